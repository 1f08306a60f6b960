"""Conversations as text: by the tokenizer's chat template, or else as plain lines."""

from functools import cached_property
from itertools import takewhile
from typing import Any

Message = dict[str, str]  # "role" and "content"
REPLY = "(the reply stands here)"


class Conversation:
    """How a conversation is written for a model.

    prompt:   a whole conversation, up to where the model goes on
    first, closing, later:  a conversation turn by turn, of which nothing need be kept: what is put before the first
        reply, after each reply, and before each reply but the first
    stop:     what the model would write in place of the user
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.has_template = bool(getattr(tokenizer, "chat_template", None))
        self.stop: tuple[str, ...] = () if self.has_template else ("\nUser:",)

    def prompt(self, messages: list[Message], reply: bool = True) -> str:
        if self.has_template:
            return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply)
        # After "Assistant:" a model writes the space itself: to end with it would split what is one token.
        lines = [f"{message['role'].capitalize()}: {message['content'].lstrip(' ')}" for message in messages]
        return "\n".join((*lines, "Assistant:" if reply else "User:"))

    @cached_property
    def closing(self) -> str:
        return common(self.after_reply([], False), self.after_reply([user("Hello")], True))

    def first(self, text: str) -> str:
        return self.prompt([user(text)])

    def later(self, text: str) -> str:
        return self.after_reply([user(text)], True).removeprefix(self.closing)

    def after_reply(self, messages: list[Message], reply: bool) -> str:
        """What follows a reply, whatever was said: templates take whole conversations only."""
        whole = self.prompt([user("Hello"), {"role": "assistant", "content": REPLY}, *messages], reply)
        return whole.partition(REPLY)[2]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def common(a: str, b: str) -> str:
    """What both begin with."""
    return "".join(x for x, _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))
