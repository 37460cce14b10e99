"""When a decode engine serves a call without prefill: how much it would have to compute.

A prompt stalls every stream of the engine that computes it, so that decode computes only
what is certain to be little. It is counted from above: what came after the latest answer by
its size, the latest answer itself (a template may strip or change it), and whatever of the
prompt before the engine does not confirm to keep. Only a call that continues the history
which the engine answered last, behind equal tools, is asked about.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from turncache.errors import EngineFault
from turncache_server.control.messages import Sessions, SessionsReply, session_digest
from turncache_server.router.body import Body
from turncache_server.router.following import History
from turncache_server.router.outcomes import AsksControl

#: Bytes of text that make one token at least: English has four, and code three.
BYTES_PER_TOKEN: Final = 2
#: Tokens that a template may add around the new messages.
_TEMPLATE_TOKENS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """The call of a session that ended well last.

    Attributes:
        digest: of its history with the answer.
        front: digest of what a template puts before the messages.
        prompt_tokens: length of its prompt.
        answer_bytes: size of its answer.
    """

    digest: bytes
    front: bytes
    prompt_tokens: int
    answer_bytes: int


def front_of(body: Body) -> bytes:
    """Return the digest of what a template puts before the messages: the tools."""
    tools = body.members.get("tools")
    text = "" if tools is None else body.text[tools.value_start : tools.end]
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def least_new_tokens(
    history: History, front: bytes, last: Answered | None, *, in_turn: bool
) -> int | None:
    """Return how many tokens are new when the engine keeps the prompt before.

    Args:
        history: of the call.
        front: of the call.
        last: what the engine answered last of the session.
        in_turn: the call brings results of tools. When a turn is over, a template may strip
            the reasoning of all its answers.

    Returns:
        None when the call does not continue ``last``, or the prompt may have changed.
    """
    if last is None or front != last.front or last.digest not in history.answers[:1]:
        return None
    if history.has_reasoning and not in_turn:
        return None
    return (last.answer_bytes + history.new_bytes) // BYTES_PER_TOKEN + _TEMPLATE_TOKENS


def all_tokens(body: Body) -> int:
    """Return how many tokens a prompt has at most, when nothing of it is known."""
    return len(body.text.encode()) // BYTES_PER_TOKEN


async def kept_tokens(
    control: AsksControl, address: str, session: str, *, timeout_s: float
) -> int | None:
    """Ask an engine how many tokens it keeps for a session, None when it does not say.

    What is kept for several lineages cannot be told apart, and counts as unknown.
    """
    digest = session_digest(session)
    try:
        reply = await control.ask(
            address, Sessions(limit=1, session=digest), SessionsReply, timeout_s=timeout_s
        )
    except EngineFault:
        return None
    for row in reply.rows:
        if row.session == digest and row.lineages == 1:
            return row.kept_blocks * reply.block_size
    return None
