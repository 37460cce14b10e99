"""The next prompt of a session whose tools run: what is known of it, and when it is sent ahead.

It is known but for the results of the tools: the history as the client wrote it, and the model's
answer. Owner of the prompts that wait for their time, bounded in bytes, fairly among tenants.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from turncache_server.router.body import Body
from turncache_server.router.following import Said

#: Sessions whose prompt has been sent, and that are not back: remembered so that it can be counted
#: what it was good for.
_MAX_SENT: Final = 10_000


def next_messages(body: Body, said: Said) -> str:
    """Return the messages of the next prompt, as JSON text: those of ``body`` as they are.

    Args:
        body: of a chat completion.
        said: the answer to it, with at least one tool call.
    """
    member = body.members["messages"]
    ids = [call_id or f"call_{at}" for at, call_id in enumerate(said.call_ids)]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, said.calls, strict=True)
    ]
    more: list[dict[str, object]] = [
        {"role": "assistant", "content": said.text or None, "tool_calls": calls},
    ]
    more += [{"role": "tool", "tool_call_id": call_id, "content": ""} for call_id in ids]
    given = body.text[member.value_start : member.end].rstrip()[:-1]
    return f"{given},{json.dumps(more)[1:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    tenant: str | None
    timer: asyncio.TimerHandle
    size_bytes: int
    send: Callable[[], None]


@dataclass(slots=True)
class _Share:
    """What a tenant's prompts take.

    Attributes:
        size_bytes: of all of them.
        sessions: whose they are, the latest last.
    """

    size_bytes: int = 0
    sessions: dict[str, None] = field(default_factory=dict)


class NextPrompts:
    """The prompts that wait for their time.

    Tenants share the room: one may use what nobody else needs, and gives way, its latest
    prompts first, to another that has less than an equal part.

    Args:
        max_bytes: of all of them; a prompt that does not fit is not sent ahead.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._waiting: dict[str, _Waiting] = {}
        self._shares: dict[str | None, _Share] = {}
        self._sent: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def later(
        self,
        session: str,
        size_bytes: int,
        delay_s: float,
        send: Callable[[], None],
        *,
        tenant: str | None,
    ) -> int:
        """Call ``send`` after ``delay_s``, unless the session is back.

        Args:
            session: namespaced id.
            size_bytes: of the prompt.
            delay_s: from now.
            send: sends it.
            tenant: whose session it is.

        Returns:
            How many prompts are given up for want of room: this one, or others.
        """
        self.drop(session)
        num_gone = 0
        if self._size_bytes + size_bytes > self._max_bytes:
            if not self._is_owed(tenant, size_bytes):
                return 1
            # It does not fit because another has more than an equal part: the largest has.
            while self._size_bytes + size_bytes > self._max_bytes:
                largest = max(self._shares.values(), key=lambda share: share.size_bytes)
                self.drop(next(reversed(largest.sessions)))
                num_gone += 1

        def due() -> None:
            self.drop(session)
            self._sent[session] = None
            if len(self._sent) > _MAX_SENT:
                self._sent.popitem(last=False)
            send()

        timer = asyncio.get_running_loop().call_later(delay_s, due)
        self._waiting[session] = _Waiting(
            tenant=tenant, timer=timer, size_bytes=size_bytes, send=send
        )
        self._size_bytes += size_bytes
        share = self._shares.setdefault(tenant, _Share())
        share.size_bytes += size_bytes
        share.sessions[session] = None
        return num_gone

    def _is_owed(self, tenant: str | None, size_bytes: int) -> bool:
        """Say whether a prompt is within an equal part of the room for every tenant."""
        num_tenants = len(self._shares.keys() | {tenant})
        own = self._shares.get(tenant, _Share()).size_bytes
        return (own + size_bytes) * num_tenants <= self._max_bytes

    def move(self, session: str, delay_s: float) -> None:
        """Give a session's prompt, if there is one, another time: ``delay_s`` from now."""
        waiting = self._waiting.get(session)
        if waiting is not None:
            self.later(session, waiting.size_bytes, delay_s, waiting.send, tenant=waiting.tenant)

    def drop(self, session: str) -> bool:
        """Forget a session's prompt; False when there is none."""
        waiting = self._waiting.pop(session, None)
        if waiting is None:
            return False
        waiting.timer.cancel()
        self._size_bytes -= waiting.size_bytes
        share = self._shares[waiting.tenant]
        share.size_bytes -= waiting.size_bytes
        del share.sessions[session]
        if not share.sessions:
            del self._shares[waiting.tenant]
        return True

    def came_to_nothing(self, session: str) -> None:
        """Hear that a session's prompt was sent, and not computed."""
        self._sent.pop(session, None)

    def was_sent(self, session: str) -> bool:
        """Say of a session that is back, once, whether its prompt had been sent."""
        if session not in self._sent:
            return False
        del self._sent[session]
        return True

    def close(self) -> None:
        """Forget all of them."""
        for session in list(self._waiting):
            self.drop(session)
