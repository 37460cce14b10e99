"""The next prompt of a session whose tools run: what is known of it, and when it is sent ahead.

It is known but for the results of the tools: the history as the client wrote it, and the model's
answer. Owner of the prompts that wait for their time, bounded in bytes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass

from turncache_server.router.body import Body
from turncache_server.router.following import Said


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


@dataclass(frozen=True, slots=True)
class _Waiting:
    timer: asyncio.TimerHandle
    size_bytes: int
    send: Callable[[], None]


class NextPrompts:
    """The prompts that wait for their time.

    Args:
        max_bytes: of all of them; a prompt that does not fit is not sent ahead.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._waiting: dict[str, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def later(
        self, session: str, size_bytes: int, delay_s: float, send: Callable[[], None]
    ) -> bool:
        """Call ``send`` after ``delay_s``, unless the session is back; False without room."""
        self.drop(session)
        if self._size_bytes + size_bytes > self._max_bytes:
            return False

        def due() -> None:
            self.drop(session)
            send()

        timer = asyncio.get_running_loop().call_later(delay_s, due)
        self._waiting[session] = _Waiting(timer, size_bytes, send)
        self._size_bytes += size_bytes
        return True

    def move(self, session: str, delay_s: float) -> None:
        """Give a session's prompt, if there is one, another time: ``delay_s`` from now."""
        waiting = self._waiting.get(session)
        if waiting is not None:
            self.later(session, waiting.size_bytes, delay_s, waiting.send)

    def drop(self, session: str) -> bool:
        """Forget a session's prompt; False when there is none."""
        waiting = self._waiting.pop(session, None)
        if waiting is None:
            return False
        waiting.timer.cancel()
        self._size_bytes -= waiting.size_bytes
        return True

    def close(self) -> None:
        """Forget all of them."""
        for session in list(self._waiting):
            self.drop(session)
