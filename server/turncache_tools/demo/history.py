"""The messages of every call: the same prompts in all arms, with the live answers in them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from turncache_tools.demo.script import FIRST_QUESTION, SYSTEM, TASK, Step

Message = dict[str, Any]


def tool_message(step: Step, result: str) -> str:
    """Return what the model gets to read of one use of a tool.

    The command stands above the result, as agents that work in a shell have it. Structured
    tool calls in the history would make a model of this size answer with tool calls.
    """
    return f"$ {step.shown}\n{result}\n\n{step.question}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What the agent reads, cut to size.

    Attributes:
        first: text that comes with the task.
        steps: uses of tools between the calls, in order.
        results: what the model reads of each.
    """

    first: str
    steps: tuple[Step, ...]
    results: tuple[str, ...]

    def brings(self, call: int) -> str:
        """Say in one line what call ``call`` (from 1) brings to the model."""
        return "the task and the first files" if call == 1 else self.steps[call - 2].shown

    def ending(self, step: Step, result: str) -> Material:
        """Return the same material with another last use of a tool."""
        return replace(self, steps=(*self.steps[:-1], step), results=(*self.results[:-1], result))


def messages_of(material: Material, answers: Sequence[str]) -> list[Message]:
    """Return the messages of the call that follows after ``answers``.

    Args:
        material: what the agent reads.
        answers: what the model said in the calls before, word for word.
    """
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": f"{TASK}\n\n{material.first}\n\n{FIRST_QUESTION}"},
    ]
    for number, answer in enumerate(answers):
        messages.append({"role": "assistant", "content": answer})
        messages.append(
            {
                "role": "tool",
                "tool_call_id": f"call_{number + 1}",
                "content": material.results[number],
            }
        )
    return messages
