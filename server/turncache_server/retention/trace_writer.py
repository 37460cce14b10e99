"""From observed calls to the lines of a trace; see :mod:`turncache_server.retention.trace`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Final

from turncache_server.retention.ghost import ObservedCall
from turncache_server.retention.trace import DIGITS, TraceCall, TraceHeader, TraceSpeed, to_line

#: Decimal places of times.
_PLACES: Final = 3


class TraceWriter:
    """Writes one trace, part by part; each part can be read alone.

    Args:
        header: of the first part.
        key: secret of this trace, 16 to 64 bytes; kept in memory only.
        origin_s: the engine's clock at the start of the trace.
    """

    def __init__(self, header: TraceHeader, *, key: bytes, origin_s: float) -> None:
        self._header = replace(header, part=0)
        self._key = key
        self._origin_s = origin_s
        # Hashes that the present part has; its size bounds them.
        self._written: set[bytes] = set()

    @property
    def part(self) -> int:
        """Number of the part that was begun last."""
        return self._header.part

    def begin_part(self) -> str:
        """Begin the next part; returns its header."""
        self._header = replace(self._header, part=self._header.part + 1)
        self._written.clear()
        return to_line(self._header)

    def call(self, call: ObservedCall) -> str:
        """Return a call's line."""
        chain = [self._digest(chain_hash) for chain_hash in call.hashes]
        shared = self._num_written(chain)
        new = chain[shared:]
        self._written.update(new)
        ended = call.ended
        return to_line(
            TraceCall(
                t=self._since(call.arrived_s),
                start=self._since(call.started_s),
                end=self._since(call.ended_s),
                session=self._name("session", call.session),
                tenant=self._name("tenant", call.tenant),
                prompt=call.prompt,
                output=call.output,
                local=call.local,
                returned=call.returned,
                lost=call.lost,
                reason=call.reason,
                answered=ended.answered,
                retain_s=ended.retain_s,
                expect_s=ended.expect_s,
                priority=ended.priority,
                final=ended.final,
                compaction=ended.compaction,
                handover=ended.handover,
                seen=call.seen,
                again=call.again,
                stock=call.stock,
                retention=call.retention,
                double=call.double,
                host=tuple(found for _, found in call.host),
                fate=None if call.fate is None else call.fate.value,
                from_answers=call.from_answers,
                diverged_at=call.diverged_at,
                rewritten=call.rewritten,
                prompt_blocks=call.prompt_hashes,
                shared=shared,
                after=chain[shared - 1].hex() if shared else "",
                blocks=b"".join(new).hex(),
            )
        )

    def speed(self, now_s: float, prefill_tokens: int, prefill_s: float) -> str:
        """Return the line of a measurement."""
        return to_line(
            TraceSpeed(
                t=self._since(now_s),
                prefill_tokens=prefill_tokens,
                prefill_s=round(prefill_s, _PLACES),
            )
        )

    def _num_written(self, chain: Sequence[bytes]) -> int:
        # A chain is written from its start: the first block that is missing ends it.
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle - 1] in self._written:
                low = middle
            else:
                high = middle - 1
        return low

    def _since(self, now_s: float) -> float:
        return round(now_s - self._origin_s, _PLACES)

    def _name(self, kind: str, name: str | None) -> str | None:
        return None if name is None else self._digest(f"{kind} {name}".encode()).hex()

    def _digest(self, data: bytes) -> bytes:
        return blake2b(data, digest_size=DIGITS // 2, key=self._key).digest()
