"""What machine code shows of an assembler's faults."""

import re
from collections.abc import Iterator

WRITERS = ("U", "R2UR", "S2UR", "VOTE", "REDUX")  # begin the names of instructions that write uniform registers


def instructions(sass: str) -> Iterator[str]:
    """Of what `cuobjdump -sass` prints, without predicates."""
    for found in re.finditer(r"/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([^;]*?)\s*;", sass):
        yield found[1]


def from_nowhere(sass: str) -> list[str]:
    """Arithmetic on uniform registers, the ones that descriptors of matrix products are in, that nothing wrote before
    it, and such descriptors. Copies do not count: around a loop, what has no meaning yet may be kept too."""
    written: set[int] = set()
    found, lines = [], list(instructions(sass))
    assert lines, "no machine code"
    for line in lines:
        name, _, rest = line.partition(" ")
        if product := re.match(r"R\d+, (R\d+, )?gdesc\[UR(\d+)\]", rest):
            first = int(product[2])  # of two descriptors, or of one, which is the second, beside registers
            if set(range(first + 2 if product[1] else first, first + 4)) - written:
                found.append(line)
        if not name.startswith(WRITERS):
            continue
        operands = [[int(number) for number in re.findall(r"\bUR(\d+)", text)] for text in rest.split(",")]
        into, *others = [numbers for numbers in operands if numbers] or [[]]
        if not operands[0] and not name.startswith(("R2UR", "VOTE")):  # a predicate is what it writes
            into, others = [], [into, *others]
        wide = re.search(r"\.(64|WIDE|128)", name)
        sources = {register for numbers in others for register in numbers}
        if name.startswith("U") and not name.startswith("UMOV") and sources - written:
            found.append(line)
        for register in into:
            written.update(range(register, register + (4 if wide and wide[1] == "128" else 2 if wide else 1)))
    return found
