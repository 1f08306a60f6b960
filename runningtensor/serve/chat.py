"""A chat in the terminal. The state is the context: a turn reads what is new, however long the chat has been."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from runningtensor.serve.conversation import Conversation, common
from runningtensor.serve.writing import Sampling, Session, load

COMMANDS = "/save FILE and /load FILE keep and take up the state, /reset forgets, /exit ends."


def chat(model: str, max_new_tokens: int, temperature: float, device: str | None) -> None:
    session = Session(*load(model, device))
    conversation = Conversation(session.tokenizer)
    sampling = Sampling(max_new_tokens=max_new_tokens, temperature=temperature, stop=conversation.stop)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # arrow keys
            import readline  # noqa: F401
    print(COMMANDS, "Ctrl-C stops a reply.")
    if not conversation.has_template:
        print("The tokenizer has no chat template: lines of `User: …` and `Assistant: …` are used.")
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line == "/exit":
            return
        try:
            if line.startswith("/"):
                print(command(session, line))
            elif line:
                answer(session, conversation, sampling, line)
        except (ValueError, OSError) as error:
            print(error)


def command(session: Session, line: str) -> str:
    name, _, rest = line.partition(" ")
    path = Path(rest.strip()).expanduser()
    if name == "/reset" and not rest:
        session.reset()
        return "Nothing is remembered."
    if name not in ("/save", "/load") or not rest.strip():
        return COMMANDS
    if name == "/save":
        session.save(path)
        return f"{session.tokens:,} tokens → {path}, {path.stat().st_size / 2**20:,.1f} MiB"
    session.load(path)
    return f"{path}: {session.tokens:,} tokens"


def answer(session: Session, conversation: Conversation, sampling: Sampling, line: str) -> None:
    if session.tokens == 0:  # a template brings its own special tokens
        session.add(conversation.first(line), begin=not conversation.has_template)
    else:
        session.add(conversation.later(line))
    writer = session.write(sampling)
    with interruptible() as interrupted:
        for text in session.stream(writer):
            print(text, end="", flush=True)
            if interrupted:
                break
    print()
    # Of what closes a reply, the model may have written something itself.
    session.add(conversation.closing.removeprefix(common(conversation.closing, writer.ended)))


@contextlib.contextmanager
def interruptible() -> Iterator[list[int]]:
    """Ctrl-C fills the list, and no more: in the midst of a token it would leave some layers ahead of others."""
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
