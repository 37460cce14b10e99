"""What coding agents put into requests that breaks reuse, by request. Pure.

The pages in ``server/agents`` say what to do about each of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any, Final

from turncache.calls import Reading
from turncache.messages import SYSTEM
from turncache_server.router.histories import is_billing


class Habit(enum.StrEnum):
    """What an agent does by itself."""

    BILLING_HEADER = "billing_header"
    SYSTEM_IN_HISTORY = "system_in_history"
    TRUNCATION_AUTO = "truncation_auto"


HABITS: Final = {
    Habit.BILLING_HEADER: "the system prompt begins with a billing line that differs in every "
    "request (Claude Code): vLLM from 0.32 drops it, any other server computes everything again. "
    "Set CLAUDE_CODE_ATTRIBUTION_HEADER=0 there",
    Habit.SYSTEM_IN_HISTORY: "has a system message in the middle of the history (Claude Code): "
    "with a chat template that wants it first, such as Qwen's, vLLM merges it into the front, and "
    "everything is computed again. Give vLLM a --chat-template that accepts it",
    Habit.TRUNCATION_AUTO: 'has truncation: "auto" (Codex): the server cuts the start of a long '
    "history off, and everything is computed again. Leave it out, and compact rarely",
}


def as_chat(body: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """Return a body with Anthropic's system prompt as its first message.

    Returns:
        The body, and whether a billing line was left out: it is no part of what the agent
        says, and would hide every other change of the system prompt.
    """
    system, messages = body.get("system"), body.get("messages")
    if not isinstance(system, (str, list)) or not isinstance(messages, list):
        return body, False
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system
    kept = [block for block in blocks if not is_billing(block)]
    first = [{"role": "system", "content": kept}] if kept else []
    return {**body, "messages": [*first, *messages]}, len(kept) < len(blocks)


def habits(body: Mapping[str, Any], reading: Reading) -> Sequence[Habit]:
    """Return what a request shows of its agent, the billing line apart."""
    found = []
    if SYSTEM in reading.kinds[reading.start :]:
        found.append(Habit.SYSTEM_IN_HISTORY)
    if body.get("truncation") == "auto":
        found.append(Habit.TRUNCATION_AUTO)
    return found
