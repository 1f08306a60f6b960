"""Time of the layer, and of decoding with a whole model, on this machine's NVIDIA GPU, beside their peers.

python -m runningtensor.bench.layers_gpu [--no-peers] [--resume] [--report] [--out FOLDER]

The layer is timed beside fla's Gated DeltaNet layer (pip install flash-linear-attention==0.6.0), decoding, in a CUDA
graph, beside transformers' Qwen3 of the same size. Processes, peers and resumed runs are as in ops_gpu.py; what has
been measured is in `layers_gpu.partial.csv` at once.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn

from runningtensor.bench import gpu
from runningtensor.bench.gpu import SEED, Found, Measured, Verdict, both_ways, console, spread, text, verdict_table
from runningtensor.bench.provenance import Provenance, installed, provenance, read
from runningtensor.layers import RunningTensor
from runningtensor.plots import plot_layers_gpu

MODULE, CSV = "runningtensor.bench.layers_gpu", "layers_gpu.csv"
TOLERANCE = 5e-2  # as in ops_gpu.py, through a whole layer: its torch code in bfloat16 is off by up to 3e-2
CHECKED = 1024  # tokens of the first sequence that are held to float64
STEPS = 50  # replays of a CUDA graph, whose median is reported
SAME = 1.03  # the longest over the shortest time of a token, whatever the context: what is still called the same

LAYER, DECODE = "layer", "decode"
OURS, COMPILED, GATED, ATTENTION = "runningtensor", "runningtensor-compiled", "fla-gated-deltanet", "transformers-qwen3"
PACKAGES = {GATED: "fla"}  # what must be installed, and whose kernels try many variants
VERSIONS = {GATED: "flash-linear-attention", ATTENTION: "transformers"}


@dataclass(frozen=True)
class Case:
    implementation: str
    task: str  # "layer" or "decode"
    B: int
    T: int  # tokens of a sequence; decode: the context
    D: int  # of the hidden states
    H: int
    K: int  # without the slot that query-skip features add
    R: int  # 1: a matrix state, or none
    V: int


@dataclass(frozen=True)
class LayerRow(Measured):
    implementation: str
    version: str  # of the package it comes from; ours is the commit
    dtype: str
    task: str
    B: int
    T: int
    D: int
    H: int
    K: int
    R: int
    V: int
    seed: int
    ms_forward: float = math.nan  # as in ops_gpu.csv; decode: of one token of every sequence, in a CUDA graph
    ms_total: float = math.nan  # forward and backward, gradients of the input and of all weights
    gpu_ms_forward: float = math.nan
    gpu_ms_total: float = math.nan
    repetitions: int = 0
    extra_peak_mib: float = math.nan  # above input, weights and their gradients, in one forward and backward
    parameters: int = 0
    note: str = ""

    @property
    def case(self) -> Case:
        return Case(*(getattr(self, field.name) for field in fields(Case)))


def layers(B: int, T: int, D: int, ours: tuple[int, ...], theirs: tuple[int, ...]) -> list[Case]:
    return [
        Case(OURS, LAYER, B, T, D, *ours),
        Case(COMPILED, LAYER, B, T, D, *ours),
        Case(GATED, LAYER, B, T, D, *theirs),
    ]


def decoding(B: int, context: int) -> list[Case]:
    return [
        Case(OURS, DECODE, B, context, 1024, 32, 24, 24, 48),
        Case(ATTENTION, DECODE, B, context, 1024, 16, 128, 1, 128),
    ]


SMALL, LARGE = ((4, 24, 24, 48), (4, 24, 1, 48)), ((32, 24, 24, 48), (6, 128, 1, 256))
LAYERS = [layers(64, 1024, 128, *SMALL), layers(16, 4096, 128, *SMALL), layers(8, 4096, 1024, *LARGE)]
# A model of 0.6B parameters with large states, 960,000 floats a layer, and the same with attention.
DECODED = dict(num_heads=32, key_dims=(24, 24), value_dim=48, intermediate_size=3072)
CONTEXTS, BATCHES = (2**10, 2**16, 2**20), (1, 64)
DECODING = {B: [decoding(B, context) for context in CONTEXTS] for B in BATCHES}
GROUPS = [*LAYERS, *(group for groups in DECODING.values() for group in groups)]
# What is ours goes first: if the time runs out, it is there.
ORDER = [(LAYER, OURS), (DECODE, OURS), (LAYER, COMPILED), (DECODE, ATTENTION), (LAYER, GATED)]


# One process, one implementation: the layers.


def make_layer(case: Case) -> nn.Module:
    torch.manual_seed(SEED)
    with torch.device("cuda"):
        if case.implementation != GATED:
            return RunningTensor(case.D, case.H, (case.K, case.R), case.V).bfloat16()
        from fla.layers import GatedDeltaNet

        options = dict(expand_v=case.V / case.K, mode="chunk", use_gate=True, use_short_conv=True)
        layer = GatedDeltaNet(case.D, head_dim=case.K, num_heads=case.H, **options)
    decay = {name: getattr(layer, name).data.clone() for name in ("A_log", "dt_bias")}
    layer.bfloat16()
    for name, value in decay.items():  # it makes these in float32, to stay so
        getattr(layer, name).data = value
    return layer


def make(case: Case) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The layer as a function, and its input with all weights, which are what is differentiated by."""
    layer = make_layer(case)
    x = torch.randn(case.B, case.T, case.D, device="cuda", dtype=torch.bfloat16).requires_grad_()
    call = torch.compile(layer, dynamic=False, fullgraph=True) if case.implementation == COMPILED else layer
    return lambda x, *_: call(x)[0], [x, *layer.parameters()]


def wrong(layer: nn.Module, f: Callable[..., Tensor], inputs: list[Tensor]) -> str | None:
    """What of ours is wrong in the first tokens of the first sequence, by the layer's own torch code in float64."""
    exact = copy.deepcopy(layer).double()
    first = inputs[0].detach()[:1, :CHECKED].double().requires_grad_()
    truth = exact(first)[0]
    out = f(*inputs).detach()  # with autograd on, for which torch.compile has to compile anyway
    # The layer is causal: where nothing else is asked for, the gradients are those of these tokens alone. So the shape
    # need not change, for which torch.compile would compile anew.
    dout = torch.zeros_like(out)
    dout[:1, :CHECKED] = torch.randn_like(dout[:1, :CHECKED])
    grads = list(both_ways(f, inputs, dout))
    want = torch.autograd.grad(truth, [first, *exact.parameters()], dout[:1, :CHECKED].double())
    names = ["outputs", "dx", *(f"d{name}" for name, _ in layer.named_parameters())]
    got = [out[:1, :CHECKED], grads[0][:1, :CHECKED], *grads[1:]]
    return gpu.far(dict(zip(names, zip(got, (truth, *want), strict=True), strict=True)), TOLERANCE)


def measure_layer(case: Case) -> Found:
    f, inputs = make(case)
    if case.implementation in (OURS, COMPILED) and (fault := wrong(make_layer(case), f, inputs)):
        return {"note": f"failed: {fault}"}
    dout = torch.randn(case.B, case.T, case.D, device="cuda", dtype=torch.bfloat16)
    return {**gpu.trained(f, inputs, dout), "parameters": sum(x.numel() for x in inputs[1:])}


# One process, one implementation: decoding.


@dataclass(frozen=True)
class Decoder:
    step: Callable[[], Tensor]  # decodes one token, makes it the next input and gives the logits [B,1,vocabulary]
    token: Tensor  # [B,1], the next input
    memory: list[Tensor]  # what else a step changes: the state
    note: str


class KeyValues:
    """Keys and values of so many tokens, in memory that stays where it is; each step writes those of the last token.

    As the cache is always full, attention needs no mask: with one, transformers would copy the keys and values of every
    layer to as many heads as there are queries, and torch would not take its fastest kernel.
    """

    def __init__(self, config: Any, B: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        shape = (B, config.num_key_value_heads, tokens, config.head_dim)
        self.layers = [
            tuple(torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
            for _ in range(config.num_hidden_layers)
        ]

    @staticmethod
    def bytes(config: Any, B: int, tokens: int) -> int:
        return 2 * 2 * config.num_hidden_layers * B * tokens * config.num_key_value_heads * config.head_dim

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        keys, values = self.layers[layer_idx]
        keys[:, :, -1:].copy_(k)
        values[:, :, -1:].copy_(v)
        return keys, values


def decoder(model: Any, past: Any, B: int, memory: list[Tensor], note: str, **arguments: Any) -> Decoder:
    token = torch.randint(model.config.vocab_size, (B, 1), device=model.device)

    @torch.no_grad()
    def step() -> Tensor:
        logits = model(input_ids=token, past_key_values=past, use_cache=True, **arguments).logits
        token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        return logits

    return Decoder(step, token, memory, note)


def decode_ours(model: Any, B: int, context: int) -> Decoder:
    from runningtensor.models import RunningTensorCache

    past = RunningTensorCache(model.config)
    with torch.no_grad():  # a prompt, so that there are states
        model(torch.zeros(B, 4, dtype=torch.long, device=model.device), past_key_values=past, use_cache=True)
    counter = past.layers[0].tokens.fill_(context)
    held = [x for layer in past.layers for x in layer.read()]
    for x in held:
        x.normal_(std=0.1)
    note = "context emulated, a state does not know how long it was: states random, token count set"
    return decoder(model, past, B, [counter, *held], note)


def decode_attention(model: Any, B: int, context: int) -> Decoder:
    past = KeyValues(model.config, B, context, model.device, model.dtype)
    position = torch.full((1, 1), context - 1, device=model.device)
    note = "context emulated: keys and values random, each step writes the last token anew"
    return decoder(model, past, B, [], note, position_ids=position, attention_mask={"full_attention": None})


def configuration(implementation: str, ours: Any) -> Any:
    """Ours, or a Qwen3 of the same size: its mixers have more parameters, so its MLP is narrower."""
    if implementation == OURS:
        return ours
    from transformers import Qwen3Config

    names = ["vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings"]
    names += ["num_attention_heads", "num_key_value_heads", "head_dim"]
    return Qwen3Config(
        **{name: getattr(ours, name) for name in names},
        intermediate_size=ours.intermediate_size // 2,
        max_position_embeddings=max(CONTEXTS),
    )


@cache
def make_model(implementation: str) -> Any:
    """In bfloat16, with random weights; once for all cases of a process."""
    from transformers import AutoModelForCausalLM

    from runningtensor.models import RunningTensorConfig

    torch.manual_seed(SEED)
    with torch.device("cuda"):
        config = configuration(implementation, RunningTensorConfig(**DECODED))
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


def capture(step: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A step as a graph, and the logits that a replay overwrites."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # kernels are compiled and workspaces made outside the graph
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step()
    return graph, logits


def differs(decoder: Decoder, graph: torch.cuda.CUDAGraph, logits: Tensor) -> str | None:
    """What a replay does otherwise than a step would from the same state."""
    held = (decoder.token, *decoder.memory)
    before = [x.clone() for x in held]
    graph.replay()
    got, token = logits.clone(), decoder.token.clone()
    if not torch.equal(token, got[:, -1].argmax(-1, keepdim=True)):
        return "the graph does not feed back its token"
    for x, old in zip(held, before, strict=True):
        x.copy_(old)
    return gpu.far({"the graph's logits": (got, decoder.step().double())}, TOLERANCE)


def measure_decoding(case: Case) -> Found:
    model = make_model(case.implementation)
    torch.manual_seed(SEED)
    parameters = sum(x.numel() for x in model.parameters())
    if case.implementation == ATTENTION:
        needed, free = KeyValues.bytes(model.config, case.B, case.T), torch.cuda.mem_get_info()[0]
        if needed > 0.95 * free:
            sizes = f"{needed / 2**30:,.0f} GiB, of which {free / 2**30:,.0f} are free"
            return {"note": f"skipped: keys and values are {sizes}", "parameters": parameters}
    one = (decode_ours if case.implementation == OURS else decode_attention)(model, case.B, case.T)
    graph, logits = capture(one.step)
    if fault := differs(one, graph, logits):
        return {"note": f"failed: {fault}"}
    for _ in range(gpu.WARM_UPS):
        graph.replay()
    ms = gpu.median_of(graph.replay, STEPS)
    return {"ms_forward": ms, "repetitions": STEPS, "parameters": parameters, "note": one.note}


def measure(case: Case) -> Found:
    return measure_layer(case) if case.task == LAYER else measure_decoding(case)


# The process that runs these.


def in_processes(cases: list[Case]) -> Iterator[tuple[Case, Found]]:
    for _, some in groupby(cases, lambda case: (case.task, case.implementation)):
        yield from gpu.in_process(MODULE, list(some), {})


def compile_peers(cases: list[Case], progress: Progress) -> None:
    families = {(case.H, case.K): case for case in reversed(cases)}  # for each of which variants are chosen anew
    gpu.compile_families(MODULE, list(families.values()), progress)


def chosen(peers: bool) -> list[Case]:
    """The cases in the order they are measured."""
    cases = [case for group in GROUPS for case in group if peers or case.implementation not in (GATED, ATTENTION)]
    return sorted(cases, key=lambda case: ORDER.index((case.task, case.implementation)))


def main(out: Path = Path("results/bench"), peers: bool = True, resume: bool = False) -> list[LayerRow]:
    """Measures, prints tables, writes `layers_gpu.csv` and draws `layers_gpu.png`."""
    path = out / CSV
    origin = provenance(torch.device("cuda"))
    console.print(f"{origin.device}, torch {origin.torch}, triton {origin.triton}, commit {origin.commit}, bfloat16")
    cases = chosen(peers)
    for package, without in (
        ("fla", lambda case: case.implementation == GATED),
        ("transformers", lambda case: case.task == DECODE),
    ):
        if any(map(without, cases)) and find_spec(package) is None:
            console.print(f"not installed, done without: {package}")
            cases = [case for case in cases if not without(case)]
    rows = gpu.collect(
        path,
        LayerRow,
        cases,
        gpu.measured_before((path, gpu.partial_of(path)), origin, LayerRow) if resume else [],
        lambda case: case.implementation in PACKAGES,
        compile_peers,
        in_processes,
        partial(make_row, origin),
        one_line,
    )
    report(path)
    return rows


def make_row(origin: Provenance, case: Case, found: Found) -> LayerRow:
    version = installed(VERSIONS[case.implementation]) if case.implementation in VERSIONS else origin.commit
    dtype = "bfloat16, state float32" if (case.task, case.implementation) == (DECODE, OURS) else "bfloat16"
    return LayerRow(**asdict(origin), version=version, dtype=dtype, seed=SEED, **asdict(case), **gpu.rounded(found))


def report(path: Path) -> None:
    """The tables and the figure of what is in a CSV."""
    rows = read(path, LayerRow)
    console.print(layer_table(rows), decoding_table(rows), verdict_table(verdicts(rows)))
    gpu.draw(path, plot_layers_gpu)


def shape(case: Case) -> str:
    widths = f"{case.K}×{case.R}×{case.V}" if case.R > 1 else f"{case.K}×{case.V}"
    return f"B{case.B} T{case.T} D{case.D} H{case.H} {widths}"


def one_line(row: LayerRow) -> str:
    what = f"{row.task}, {row.implementation} {shape(row.case)}: "
    times = {"a token" if row.task == DECODE else "forward": row.ms_forward, "forward and backward": row.ms_total}
    return what + (", ".join(f"{k} {v:.3f} ms" for k, v in times.items() if v == v) or row.note)


def layer_table(rows: list[LayerRow]) -> Table:
    return gpu.comparison(
        "Layers. Milliseconds, medians; ×: over ours, above; gpu: without waiting for Python; MiB: peak above "
        "input, weights and gradients.",
        rows,
        LAYERS,
        lambda _: True,
        shape,
        {"MiB": lambda row: text(row.extra_peak_mib, ",.0f"), "weights": lambda row: f"{row.parameters:,}"},
    )


def decoding_table(rows: list[LayerRow]) -> Table:
    """A line for each model and batch."""
    table = Table(box=SIMPLE, pad_edge=False, caption="Decoding in a CUDA graph: milliseconds of one token of a batch.")
    table.add_column("implementation")
    for heading in ("weights", "batch", *(f"after {context:,} tokens" for context in CONTEXTS)):
        table.add_column(heading, justify="right")
    at = {row.case: row for row in rows}
    for groups in DECODING.values():
        for cases in zip(*groups, strict=True):
            line = [at.get(case) for case in cases]
            if some := next((row for row in line if row is not None), None):
                cells = ["" if row is None else text(row.ms_forward) or row.note for row in line]
                table.add_row(some.implementation, f"{some.parameters / 1e6:,.0f}M", str(some.B), *cells)
        table.add_section()
    return table


def verdicts(rows: list[LayerRow]) -> list[Verdict]:
    at = {row.case: row for row in rows}
    found: list[Verdict] = []

    def ms(case: Case, column: str) -> float:
        return getattr(at[case], column) if case in at else math.nan

    for group in LAYERS:
        mine, theirs = group[0], group[-1]
        for column, way in (("ms_forward", "forward"), ("ms_total", "forward and backward")):
            ratio, alone = (ms(mine, name) / ms(theirs, name) for name in (column, f"gpu_{column}"))
            found.append(
                Verdict(f"{shape(mine)}: {way}, over {theirs.implementation}", "≤ 1", ratio, alone, ratio <= 1)
            )
    for B, groups in DECODING.items():
        longer = spread([ms(group[0], "ms_forward") for group in groups])
        target = f"decoding, batch {B}, context from {CONTEXTS[0]:,} to {CONTEXTS[-1]:,}: longest over shortest time"
        found.append(Verdict(target, f"≤ {SAME}", longer, math.nan, longer <= SAME))
    return found


if __name__ == "__main__":
    about = "Time of the layer and of decoding on this machine's GPU."
    gpu.command(about, CSV, Case, measure, make, PACKAGES, report, main)
