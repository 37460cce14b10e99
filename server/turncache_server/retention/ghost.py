"""What would have been: simulated pools beside the real engine, which they never touch.

Every call that the engine served is served again by pools that differ from the real one in
one respect: *stock* in none, *retention* by the rules of mode ``on``, *double* by its size,
and host tiers by a second level. The measure is the same for all and needs no session:
prompt tokens that were **computed again**, although a call that the engine served before had
computed them at this place of this prefix.

*Stock* is the ghost's own check. In mode ``observe`` the real engine is stock, so what the
ghost's stock pool has and what the engine really had should be equal; by how far they differ
tells how far the other pools can be trusted. What is not simulated: a prompt's blocks are
taken at once where the engine takes them chunk by chunk, an answer's when the call ends,
and a preempted call keeps its blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

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
from turncache_server.retention.ghost_pool import Fate, GhostPool, Grant
from turncache_server.retention.lru import Lru
from turncache_server.retention.policy import policy_named
from turncache_server.retention.values import Admission, Limits

#: What was seen is remembered of at least so many pools, and twice the largest host tier.
SEEN_POOLS: Final = 8
#: Calls in flight beyond this were never ended by the engine: the oldest are given up.
MAX_OPEN_CALLS: Final = 65_536
#: How often the order of the lineages is computed anew, as in the extension.
RANK_EVERY_S: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostSpec:
    """What is simulated.

    Attributes:
        limits: bounds that mode ``on`` would use; ``num_blocks`` is the real pool's.
        policy: name of its policy.
        block_size: tokens per block.
        block_bytes: bytes of a block's KV over all ranks, 0 when unknown: no host tiers.
        host_gb: sizes of host tiers, in 10^9 bytes.
    """

    limits: Limits
    policy: str
    block_size: int
    block_bytes: int = 0
    host_gb: tuple[float, ...] = ()

    def host_blocks(self, gigabytes: float) -> int:
        """Return how many blocks a host tier of that size holds."""
        return int(gigabytes * 1e9 // self.block_bytes) if self.block_bytes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedCall:
    """One call, in reality and in every simulated pool. Counts in tokens of its prompt.

    Attributes:
        request: the engine's id of it.
        session: its session, None for an ordinary call.
        tenant: its tenant.
        arrived_s: times of the engine's clock.
        started_s: when it got its blocks.
        ended_s: when it ended.
        prompt: tokens of the prompt.
        output: tokens of the answer.
        local: found in the engine's own cache.
        returned: given by a peer.
        lost: of the session, by the engine's own record.
        reason: why, by that record.
        seen: that an earlier call had computed, whoever made it.
        again: of these, computed again in reality.
        stock: found by the simulated stock pool.
        retention: found by the pool in mode ``on``.
        double: found by a stock pool of twice the size.
        host: found by a stock pool with a host tier, by its size in GB.
        fate: why the pool in mode ``on`` lacks the first block that it lacks.
        from_answers: found by the stock pool and last computed as part of an answer: what
            prefill would have to compute although decode has it.
        diverged_at: where the call left its session's chain, None if it did not.
        rewritten: tokens behind that place that the session's last prompt had as well. Not
            those of its last answer: many clients leave parts of it out.
        hashes: of its whole chain.
        prompt_hashes: how many of them are of the prompt.
        ended: what the caller asked for.
    """

    request: str
    session: str | None
    tenant: str | None
    arrived_s: float
    started_s: float
    ended_s: float
    prompt: int
    output: int
    local: int
    returned: int
    lost: int
    reason: str
    seen: int
    again: int
    stock: int
    retention: int
    double: int
    host: tuple[tuple[float, int], ...]
    fate: Fate | None
    from_answers: int
    diverged_at: int | None
    rewritten: int
    hashes: tuple[bytes, ...]
    prompt_hashes: int
    ended: Ended


@dataclass(slots=True)
class _Hits:
    """Leading blocks of a prompt that were found."""

    seen: int = 0
    stock: int = 0
    retention: int = 0
    double: int = 0
    host: tuple[int, ...] = ()
    from_answers: int = 0
    fate: Fate | None = None


@dataclass(slots=True)
class _Open:
    """A call in flight."""

    arrived: Arrived
    admission: Admission | None
    started: Started | None = None
    grants: tuple[Grant, ...] = ()
    hits: _Hits = field(default_factory=_Hits)


class Ghost:
    """Simulated pools of one engine; :meth:`take` is told everything that the engine saw.

    Args:
        spec: what to simulate.

    Attributes:
        retention: the pool in mode ``on``.
        totals: counts since the start.
        prefill: tokens that the engine computed in large steps, and their seconds.
    """

    def __init__(self, spec: GhostSpec) -> None:
        num_blocks = spec.limits.num_blocks
        policy = policy_named(spec.policy)
        self.retention = GhostPool(spec.limits, policy)
        self.totals: Counter[str] = Counter()
        self.prefill: tuple[int, float] = (0, 0.0)
        self._spec = spec
        # These two hear of no session, and so behave as vLLM's own pool.
        self._stock = GhostPool(spec.limits, policy)
        self._double = GhostPool(replace(spec.limits, num_blocks=2 * num_blocks), policy)
        self._pools = self._stock, self._double, self.retention
        sizes = [spec.host_blocks(size) for size in spec.host_gb] if spec.block_bytes else []
        self._host = [Lru(size) for size in sizes]
        self._seen = Lru(max(SEEN_POOLS * num_blocks, 2 * max(sizes, default=0)))
        self._open: OrderedDict[str, _Open] = OrderedDict()
        # Full blocks of each session's last prompt.
        self._prompt_length: OrderedDict[str, int] = OrderedDict()
        self._ranked_at_s = float("-inf")

    def take(self, event: Event) -> ObservedCall | None:
        """Follow one event; returns the call that it ends."""
        match event:
            case Arrived():
                self._arrive(event)
            case Started():
                self._start(event)
            case Ended():
                return self._end(event)
            case Ticked():
                self.prefill = event.prefill_tokens, event.prefill_s
                self._tick(event.now_s)
            case Signalled():
                self.retention.signal(event)
            case TailVerified():
                self.retention.tail_verified(event.tail_hash, event.now_s)
            case Forgotten():
                self._forget(event.now_s)
        return None

    # --- a call -----------------------------------------------------------------------------

    def _arrive(self, event: Arrived) -> None:
        if len(self._open) >= MAX_OPEN_CALLS:
            self._give_up(next(iter(self._open)), event.now_s)
        admission = None
        if event.session is not None:
            admission = self.retention.table.admit(
                session=event.session,
                tenant=event.tenant,
                hashes=event.hashes,
                now_s=event.now_s,
            )
        self._open[event.request] = _Open(event, admission)

    def _start(self, event: Started) -> None:
        call = self._open.get(event.request)
        if call is None or call.started is not None:
            return
        call.started = event
        size = self._spec.block_size
        prompt, hashes = call.arrived.prompt, call.arrived.hashes
        # At least the last token is computed by every call, and with it its block.
        reusable = min(max(0, prompt - 1) // size, len(hashes))
        num_blocks = -(-prompt // size)
        hits = call.hits
        hits.seen = self._leading(hashes[:reusable], self._seen)
        hits.host = tuple(
            self._leading(hashes[:reusable], self._stock, tier) for tier in self._host
        )
        call.grants = tuple(pool.start(hashes, num_blocks, reusable) for pool in self._pools)
        hits.stock, hits.double, hits.retention = (grant.num_hits for grant in call.grants)
        if hits.retention < hits.seen:
            hits.fate = self.retention.why_missing(hashes[hits.retention])
        answers = [self._seen.take_flag(chain_hash) for chain_hash in hashes[: hits.seen]]
        hits.from_answers = sum(answers[: hits.stock])
        self._seen.store(hashes)

    @staticmethod
    def _leading(hashes: Sequence[bytes], *levels: Lru | GhostPool) -> int:
        for place, chain_hash in enumerate(hashes):
            if not any(chain_hash in level for level in levels):
                return place
        return len(hashes)

    def _end(self, event: Ended) -> ObservedCall | None:
        call = self._open.pop(event.request, None)
        if call is None:
            return None
        if call.started is None:
            self.retention.abandon(None, call.admission, event.now_s)
            self.totals["calls_never_started"] += 1
            return None
        hashes = call.arrived.hashes + event.more_hashes
        for pool, grant in zip(self._pools, call.grants, strict=True):
            pool.end(grant, call.admission if pool is self.retention else None, hashes, event)
        complete = hashes[: event.complete]
        for tier in self._host:
            tier.store(complete)
        self._seen.store(complete[len(call.arrived.hashes) :], flag=True)
        observed = self._observed(call, call.started, event, hashes)
        self._count(observed)
        return observed

    def _observed(
        self, call: _Open, started: Started, ended: Ended, hashes: tuple[bytes, ...]
    ) -> ObservedCall:
        size, hits, arrived = self._spec.block_size, call.hits, call.arrived
        diverged = None if call.admission is None else call.admission.diverged_at
        return ObservedCall(
            request=ended.request,
            session=arrived.session,
            tenant=arrived.tenant,
            arrived_s=arrived.now_s,
            started_s=started.now_s,
            ended_s=ended.now_s,
            prompt=arrived.prompt,
            output=max(0, ended.tokens - arrived.prompt),
            local=started.local,
            returned=ended.returned,
            lost=ended.lost,
            reason=ended.reason,
            seen=hits.seen * size,
            again=max(0, hits.seen * size - started.local - ended.returned),
            stock=hits.stock * size,
            retention=hits.retention * size,
            double=hits.double * size,
            host=tuple(
                (gigabytes, blocks * size)
                for gigabytes, blocks in zip(self._spec.host_gb, hits.host, strict=False)
            ),
            fate=hits.fate,
            from_answers=hits.from_answers * size,
            diverged_at=None if diverged is None else diverged * size,
            rewritten=self._rewritten(arrived, diverged) * size,
            hashes=hashes,
            prompt_hashes=len(arrived.hashes),
            ended=ended,
        )

    def _rewritten(self, arrived: Arrived, diverged: int | None) -> int:
        """Count blocks behind the place where a call left its session's chain."""
        if arrived.session is None:
            return 0
        before = self._prompt_length.pop(arrived.session, 0)
        self._prompt_length[arrived.session] = length = len(arrived.hashes)
        if len(self._prompt_length) > self._spec.limits.max_sessions:
            self._prompt_length.popitem(last=False)
        return 0 if diverged is None else max(0, min(before, length) - diverged)

    def _count(self, call: ObservedCall) -> None:
        totals = self.totals
        totals["calls"] += 1
        totals["prompt_tokens"] += call.prompt
        totals["output_tokens"] += call.output
        totals["computed_tokens"] += call.prompt - call.local - call.returned
        totals["seen_tokens"] += call.seen
        totals["again_tokens"] += call.again
        totals["local_tokens"] += call.local
        totals["local_seen_tokens"] += min(call.local, call.seen)
        totals["stock_local_tokens"] += call.stock
        totals["again_tokens_stock"] += max(0, call.seen - call.stock)
        totals["again_tokens_retention"] += max(0, call.seen - call.retention)
        totals["again_tokens_double"] += max(0, call.seen - call.double)
        for gigabytes, found in call.host:
            totals[f"again_tokens_host_{gigabytes:g}gb"] += max(0, call.seen - found)
        totals["answer_tokens"] += call.from_answers
        if call.lost:
            totals[f"lost_tokens_{call.reason}"] += call.lost
        if call.fate is not None:
            totals[f"unkept_tokens_{call.fate}"] += call.seen - call.retention
        if call.diverged_at is not None:
            totals["diverged_calls"] += 1
            totals["rewritten_tokens"] += call.rewritten

    # --- time -------------------------------------------------------------------------------

    def _tick(self, now_s: float) -> None:
        due = now_s - self._ranked_at_s >= RANK_EVERY_S
        if due:
            self._ranked_at_s = now_s
        self.retention.tick(now_s, rank=due)

    def _forget(self, now_s: float) -> None:
        for request in list(self._open):
            self._give_up(request, now_s)
        for pool in self._pools:
            pool.clear()
        for tier in self._host:
            tier.clear()
        self.totals["forgotten"] += 1

    def _give_up(self, request: str, now_s: float) -> None:
        call = self._open.pop(request)
        if call.started is None:
            self.retention.abandon(None, call.admission, now_s)
        for pool, grant in zip(self._pools, call.grants, strict=False):
            pool.abandon(grant, call.admission if pool is self.retention else None, now_s)

    def gauges(self) -> dict[str, float]:
        """Return the present state of the pool in mode ``on``."""
        stats = self.retention.table.stats()
        return {
            "retained_blocks": float(self.retention.num_retained),
            "wanted_blocks": float(stats.wanted_blocks),
            "sessions": float(stats.sessions),
            "calls_in_flight": float(len(self._open)),
            "seen_blocks": float(len(self._seen)),
        }
