"""What the engine thread writes down for the ghost: one tuple per event, and nothing else.

The engine thread appends to a bounded queue; another thread takes from it and hands the
events to the process in which the ghost lives
(:mod:`turncache_server.connector.ghost_process`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from turncache.protocol import EngineHints
from turncache_server.connector.records import CallRecord
from turncache_server.retention.events import (
    Arrived,
    Ended,
    Event,
    Forgotten,
    Signalled,
    Started,
    TailVerified,
    Ticked,
)
from turncache_server.retention.values import Signal

#: Events to hold; some thousand calls.
CAPACITY: Final = 16_384
#: A step of fewer tokens says little about the speed of prefill.
LEAST_PREFILL_TOKENS: Final = 256
#: How often time is reported while nothing else happens, as the extension ranks.
TICK_EVERY_S: Final = 0.25
#: Large steps in flight that are timed; more than vLLM keeps.
_MAX_STEPS: Final = 16


@dataclass(slots=True)
class _LargeStep:
    """A step in flight that is timed.

    Attributes:
        number: how many steps were scheduled before it.
        tokens: that it computes.
        began_s: when the engine could begin with it, as far as known.
    """

    number: int
    tokens: int
    began_s: float


class Recorder:
    """Events of one engine. The engine thread calls everything but :meth:`drain`.

    Args:
        on_first: called when the recording begins for the first time, on the engine thread.
        capacity: events to hold. When they are not taken fast enough, some are lost, and
            the ghost is told that it has missed something.

    Attributes:
        dropped: events that were lost.
        counters: of the ghost, as last heard of; set by who drains.
        gauges: likewise.
        broken: why nothing is recorded any more, None while it is; set by who drains.
    """

    def __init__(
        self, *, on_first: Callable[[], None] | None = None, capacity: int = CAPACITY
    ) -> None:
        self._on_first = on_first
        self.dropped = 0
        self.counters: Mapping[str, float] = {}
        self.gauges: Mapping[str, float] = {}
        self.broken: str | None = None
        self._events: deque[Event] = deque()
        self._capacity = capacity
        self._missed = False
        self._local: dict[str, int] = {}
        self._num_hashes: dict[str, int] = {}
        self._num_scheduled = 0
        self._num_processed = 0
        self._large: deque[_LargeStep] = deque(maxlen=_MAX_STEPS)
        self._prefill_tokens = 0
        self._prefill_s = 0.0
        self._ticked_at_s = float("-inf")
        self._changed = False

    def arrived(self, request: Any, hints: EngineHints | None, now_s: float) -> None:
        """Write down a request."""
        hashes = tuple(request.block_hashes)
        self._num_hashes[request.request_id] = len(hashes)
        self._append(
            Arrived(
                request.request_id,
                now_s,
                request.num_prompt_tokens,
                hashes,
                None if hints is None else hints.session,
                None if hints is None else hints.tenant,
            )
        )

    def looked_at(self, request_id: str, local_tokens: int) -> None:
        """Note a local hit; the last look before the first step counts."""
        self._local[request_id] = local_tokens

    def started(self, request_id: str, now_s: float) -> None:
        """Write down that a request has got its blocks."""
        self._append(Started(request_id, now_s, self._local.pop(request_id, 0)))

    def ended(
        self,
        request: Any,
        hints: EngineHints | None,
        record: CallRecord | None,
        *,
        num_blocks: int,
        complete: int,
        rest: bool,
        answered: bool,
        now_s: float,
    ) -> None:
        """Write down that a request has ended."""
        self._local.pop(request.request_id, None)
        known = self._num_hashes.pop(request.request_id, None)
        if known is None:
            return  # it arrived before the recording
        event = Ended(
            request=request.request_id,
            now_s=now_s,
            tokens=request.num_tokens,
            num_blocks=num_blocks,
            complete=complete,
            rest=rest,
            more_hashes=tuple(request.block_hashes[known:]),
            answered=answered,
        )
        if hints is not None:
            event = event._replace(
                retain_s=hints.retain_s,
                expect_s=hints.expect_s,
                priority=hints.priority,
                final=hints.final,
                compaction=hints.compaction,
                handover=hints.handover,
            )
        if record is not None:
            event = event._replace(
                returned=record.returned, lost=record.lost, reason=record.reason.value
            )
        self._append(event)
        self._changed = True

    def step_scheduled(self, num_tokens: int, now_s: float) -> None:
        """Note a step, and that time has passed."""
        if num_tokens >= LEAST_PREFILL_TOKENS:
            self._large.append(_LargeStep(self._num_scheduled, num_tokens, now_s))
        self._num_scheduled += 1
        if self._changed or now_s - self._ticked_at_s >= TICK_EVERY_S:
            self._changed = False
            self._ticked_at_s = now_s
            self._append(Ticked(now_s, self._prefill_tokens, self._prefill_s))

    def step_processed(self, now_s: float) -> None:
        """Hear that the oldest step has been processed; a large one has taken until now."""
        if self._num_processed == self._num_scheduled:
            return  # it was scheduled before the recording
        number = self._num_processed
        self._num_processed = number + 1
        if not self._large:
            return
        large = self._large[0]
        if number == large.number:
            self._prefill_tokens += large.tokens
            self._prefill_s += now_s - large.began_s
            self._large.popleft()
        if self._large and self._large[0].number == number + 1:
            # It was scheduled while this one ran.
            self._large[0].began_s = now_s

    def signalled(self, session: str, kind: Signal, expect_s: float | None, now_s: float) -> None:
        """Write down what the world said about a session."""
        self._append(Signalled(now_s, session, kind, expect_s))
        self._changed = True

    def tail_verified(self, tail_hash: bytes, now_s: float) -> None:
        """Write down that a peer has a prompt."""
        self._append(TailVerified(now_s, tail_hash))
        self._changed = True

    def forgotten(self, now_s: float) -> None:
        """Write down that what the cache holds is unknown: a reset, or a pause of recording."""
        self._local.clear()
        self._num_hashes.clear()
        self._large.clear()
        self._num_processed = self._num_scheduled
        begin, self._on_first = self._on_first, None
        if begin is not None:
            begin()
        self._append(Forgotten(now_s))

    def drain(self) -> list[Event]:
        """Take what is there, oldest first; for one thread."""
        events = self._events
        return [events.popleft() for _ in range(len(events))]

    def _append(self, event: Event) -> None:
        if self.broken is not None or len(self._events) >= self._capacity:
            self.dropped += 1
            self._missed = True
            return
        if self._missed:
            self._missed = False
            self._events.append(Forgotten(event.now_s))
        self._events.append(event)
