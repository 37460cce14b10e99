"""Texts cut to size with the model's own tokenizer, once for all arms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turncache_tools.demo.history import Material, tool_message
from turncache_tools.demo.script import (
    FIRST_QUESTION,
    OTHER_LAST_STEPS,
    SYSTEM,
    TASK,
    Step,
    Tools,
    cut,
    first_text,
    last_steps,
    other_text,
)
from turncache_tools.demo.sizes import FLOOD_TOKENS, Sizes

CountTokens = Callable[[str], int]

#: Tokens of the template around a message, with a default system message.
_TEMPLATE_TOKENS = 40
_SAMPLE_CHARS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Everything that is sent.

    Attributes:
        takes: what the agent reads, by take of the last call.
        others: prompts of the other sessions.
    """

    takes: tuple[Material, ...]
    others: tuple[str, ...]


def prepare(tools: Tools, sizes: Sizes, count: CountTokens) -> Texts:
    """Cut the agent's and the others' texts to size."""
    steps = last_steps(sizes.num_calls)
    fixed = count(f"{SYSTEM}\n{TASK}\n{FIRST_QUESTION}")
    material = Material(
        first=cut(first_text(tools), sizes.first_tokens - fixed, count),
        steps=steps,
        results=tuple(_result(tools, step, sizes.result_tokens, count) for step in steps),
    )
    others = (
        material.ending(step, _result(tools, step, sizes.result_tokens, count))
        for step in OTHER_LAST_STEPS
    )
    return Texts(takes=(material, *others), others=_slices(other_text(tools), count))


def _result(tools: Tools, step: Step, num_tokens: int, count: CountTokens) -> str:
    room = num_tokens - count(tool_message(step, ""))
    return tool_message(step, cut(tools.run(step), room, count))


def _slices(text: str, count: CountTokens) -> tuple[str, ...]:
    """Cut a long text into prompts of about :data:`FLOOD_TOKENS` tokens with the template."""
    sample = text[:_SAMPLE_CHARS]
    num_chars = int((FLOOD_TOKENS - _TEMPLATE_TOKENS) * len(sample) / count(sample))
    return tuple(text[at : at + num_chars] for at in range(0, len(text) - num_chars, num_chars))
