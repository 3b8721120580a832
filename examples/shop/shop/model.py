"""A stand-in for a language model: slow, and it speaks in tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

MAX_TOKENS = 2000
MAX_DELAY_MS = 5000
WORDS = ("the", "our", "a", "warm", "small", "quiet", "lamp", "mug", "chair", "clock", "waits", "glows", "keeps")


class BadPromptError(ValueError):
    """A parameter of the chat is out of bounds; the message says what is allowed."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What to say something about, in how many tokens, with how many milliseconds of thinking before each."""

    question: str = "What goes with a mug?"
    tokens: int = 20
    delay_ms: int = 20

    @property
    def delay_s(self) -> float:
        return self.delay_ms / 1000


def read_prompt(question: str | None, tokens: str | None, delay_ms: str | None) -> Prompt:
    """
    A prompt from query parameters, which may be missing.

    Raises:
        BadPromptError: a number is none, or out of bounds.
    """
    return Prompt(
        question=(question or Prompt().question)[:500],
        tokens=_number("n", tokens, Prompt().tokens, 1, MAX_TOKENS),
        delay_ms=_number("delay_ms", delay_ms, Prompt().delay_ms, 0, MAX_DELAY_MS),
    )


def _number(name: str, typed: str | None, default: int, lowest: int, highest: int) -> int:
    if not typed:
        return default
    if not (typed.isascii() and typed.isdigit()) or not lowest <= int(typed[:9]) <= highest:
        raise BadPromptError(f"{name}={typed[:20]!r}: a whole number from {lowest} to {highest} is allowed")
    return int(typed)


def events(prompt: Prompt) -> Iterator[str]:
    """
    The answer as server-sent events, one token each, and a last event ``done``.

    Does not wait; whoever sends them sleeps `Prompt.delay_s` before each, in the way that suits its framework.
    """
    import hashlib
    import json

    for number in range(prompt.tokens):
        digest = hashlib.sha256(f"{prompt.question}/{number}".encode()).digest()
        token = json.dumps({"token": WORDS[digest[0] % len(WORDS)]})
        yield f"id: {number}\ndata: {token}\n\n"
    yield f"event: done\ndata: {json.dumps({'tokens': prompt.tokens})}\n\n"
