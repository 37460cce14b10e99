"""One arm, simulated: calls arrive, queue for prefill, are handed over and answered. Pure.

Time jumps from event to event; the same load, rig, arm and seed give the same result. README.md
states the model and what it leaves out. Owner of all simulated state but time (``events``) and
agents (``arrivals``); pools own their blocks.

Pools are reckoned in units of ``Rig.unit_tokens``. Lengths are exact all the same: when all
units of what an engine had of a prompt are found, the call reuses all of its full KV blocks;
when a unit is missing, what lies before it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Final

from turncache_server.retention.lru import Lru
from turncache_tools.bench.workload import CallSpec, is_miss
from turncache_tools.plan.arrivals import Arrivals
from turncache_tools.plan.entrance import Entrance
from turncache_tools.plan.events import Events
from turncache_tools.plan.flight import Call, Engine, Session
from turncache_tools.plan.load import Load, PlanArm, Rig
from turncache_tools.plan.pools import EnginePool, ended_call, wrong_by
from turncache_tools.plan.served import SimResult

#: Progress is told every so many calls.
_TELL_EVERY: Final = 2000


class Simulation:
    """One arm under one load.

    Args:
        load: calls.
        rig: engines.
        arm: what is done about sessions.
        say: told how many calls are done, now and then.
    """

    def __init__(
        self, load: Load, rig: Rig, arm: PlanArm, say: Callable[[int], None] | None = None
    ) -> None:
        self._load, self._rig, self._arm, self._say = load, rig, arm, say
        self._profile = rig.profile
        self._unit, self._block = rig.unit_tokens, rig.profile.block_tokens
        decode = rig.decode_pool_tokens
        # As the router does: where answers are returned decode keeps the session, and prefill
        # is told to retain nothing, which makes its pool a stock one.
        keeps = arm.retaining and not (arm.returning and decode is not None)
        self._prefill = self._engine(rig.pool_tokens, retaining=keeps)
        self._decode = None if decode is None else self._engine(decode, retaining=arm.retaining)
        self._tier: Lru | None = None
        if arm.host_gb:
            unit_bytes = self._profile.kv_token_bytes * self._unit
            self._tier = Lru(int(arm.host_gb * 1e9 // unit_bytes))
        # Ids of units: below 0 those that all agents share.
        self._ids = itertools.count()
        self._events = Events()
        self._arrivals = Arrivals(
            load,
            self._events,
            shared=[-1 - at for at in range(self._units(load.workload.shared, least=0))],
            first_s=lambda tokens: self._profile.compute_s(0, tokens),
            arrive=self._arrive,
            other=self._other,
        )
        self._entrance: Entrance | None = None
        if arm.admission is not None:
            pool = (rig.pool_tokens if decode is None else decode) * arm.pool_factor
            self._entrance = Entrance(arm.admission, pool, self._events, self._begin)
        self._result = SimResult(arm=arm, served=[])

    def _engine(self, tokens: int, *, retaining: bool) -> Engine:
        units = int(tokens * self._arm.pool_factor) // self._unit
        pool = EnginePool(units, retaining=retaining, settings=self._arm.settings)
        return Engine(pool=pool, units=units)

    def run(self) -> SimResult:
        """Simulate until every agent has ended."""
        self._arrivals.begin()
        self._result.span_s = self._events.run(lambda: self._arrivals.open_agents > 0)
        if self._entrance is not None:
            self._result.num_late = self._entrance.num_late
        return self._result

    def _other(self, now_s: float) -> None:
        self._result.num_others += 1
        tokens = self._load.others_tokens
        spec = CallSpec(new=tokens, answer=1)
        units = self._units(tokens + 1)
        chain = [next(self._ids) for _ in range(units)]
        self._enter(now_s, Call(None, spec, 1, now_s, tokens, chain, self._units(tokens), 0, 0))

    def _units(self, tokens: int, *, least: int = 1) -> int:
        return max(least, (2 * tokens + self._unit) // (2 * self._unit))

    def _arrive(self, now_s: float, session: Session) -> None:
        if self._entrance is None:
            self._begin(now_s, session, now_s)
        else:
            kept, spec = self._kept(session)
            self._entrance.arrive(now_s, session, kept + spec.new)

    @staticmethod
    def _kept(session: Session) -> tuple[int, CallSpec]:
        """Return what the next prompt has of the history, in tokens, and the next call."""
        spec = session.spec.calls[session.number]
        history = session.history
        return history if spec.keep is None else min(history, spec.keep), spec

    def _begin(self, now_s: float, session: Session, arrived_s: float) -> None:
        """Begin a session's next call, which arrived at that time."""
        first = not session.number
        kept, spec = self._kept(session)
        prompt = kept + spec.new
        units = self._units(prompt + spec.answer)
        chain = session.chain[: self._units(kept, least=0)]
        chain += [next(self._ids) for _ in range(units - len(chain))]
        decode = self._decode
        if first:
            shared = self._load.workload.shared
            known = shared if self._prefill.saw_shared else 0
            decode_known = shared if decode is not None and decode.saw_shared else 0
        else:
            # A token's KV is written when the next one is computed: the last one has none.
            decode_known = min(kept, session.history - 1)
            known = decode_known if decode is None else min(kept, session.prompt_before)
        session.number += 1
        session.chain = chain
        session.history, session.prompt_before = prompt + spec.answer, prompt
        prompt_units = self._units(prompt)
        self._enter(
            now_s,
            Call(
                session,
                spec,
                session.number,
                arrived_s,
                prompt,
                chain,
                prompt_units,
                known,
                decode_known,
                admitted_s=now_s - arrived_s,
            ),
        )

    def _enter(self, now_s: float, call: Call) -> None:
        name = None if call.session is None else call.session.name
        pool = self._prefill.pool
        call.admission = pool.arrive(name, call.chain[: call.prompt_units], now_s)
        self._events.at(now_s + self._profile.host_work_s(call.prompt), self._ready, call)

    def _ready(self, now_s: float, call: Call) -> None:
        call.since_s = now_s
        self._prefill.waiting.append(call)
        self._go_on(now_s)

    def _go_on(self, now_s: float) -> None:
        """Give the prefill engine its next work: first come, first served."""
        engine = self._prefill
        while not engine.busy:
            if engine.pulled:
                call = engine.pulled.popleft()
                call.queued_s += now_s - call.since_s
                self._compute(now_s, call)
            elif engine.waiting and self._has_room(engine, engine.waiting[0]):
                self._start(now_s, engine.waiting.popleft())
            else:
                return

    def _needed(self, engine: Engine, call: Call) -> int:
        if engine is self._prefill and self._decode is not None:
            return call.prompt_units
        return len(call.chain)

    def _has_room(self, engine: Engine, call: Call) -> bool:
        return engine.pool.num_free >= self._needed(engine, call)

    def _start(self, now_s: float, call: Call) -> None:
        """Give a call its blocks, find what can be reused, and fetch what is elsewhere."""
        engine = self._prefill
        call.queued_s += now_s - call.since_s
        prompt = call.chain[: call.prompt_units]
        missed = self._misses(call)
        grant = engine.pool.start(
            prompt, self._needed(engine, call), 0 if missed else call.prompt_units
        )
        call.grant = grant
        used = engine.pool.num_used / engine.units
        self._result.peak_used = max(self._result.peak_used, used)
        call.local = self._reused(grant.num_hits, 0 if missed else call.known, call)
        delay_s = 0.0
        if self._tier is not None and not missed:
            delay_s += self._load_from_tier(call, prompt, grant.num_hits)
        if self._arm.returning:
            delay_s += self._return(call, prompt)
        if delay_s:
            self._events.at(now_s + delay_s, self._fetched, call)
        else:
            self._compute(now_s, call)

    def _misses(self, call: Call) -> bool:
        rate = self._load.miss_rate
        if not rate or call.session is None or call.number == 1:
            return False
        return is_miss(rate, self._load.seed, call.session.spec.name, call.number)

    def _reused(self, num_hits: int, known: int, call: Call) -> int:
        """Return tokens of whole KV blocks that a call finds; its last token is computed."""
        block = self._block
        most = min(known, call.prompt - 1) // block * block
        least = 1 if call.number > 1 else 0
        if num_hits >= self._units(known, least=least):
            return most
        return min(num_hits * self._unit // block * block, most)

    def _load_from_tier(self, call: Call, prompt: Sequence[int], num_hits: int) -> float:
        tier: Any = self._tier
        found = num_hits
        while found < len(prompt) and prompt[found] in tier:
            found += 1
        there = self._reused(found, call.known, call)
        call.loaded = max(0, there - call.local)
        call.local += call.loaded
        return self._profile.load_s(call.loaded) if call.loaded else 0.0

    def _return(self, call: Call, prompt: Sequence[int]) -> float:
        assert self._decode is not None
        there = self._reused(self._decode.pool.leading(prompt), call.decode_known, call)
        missing = there - call.local
        if missing <= 0 or not self._arm.pulls(self._profile, call.local, missing):
            return 0.0
        call.returned = missing
        return self._profile.pull_s(missing)

    def _fetched(self, now_s: float, call: Call) -> None:
        call.since_s = now_s
        self._prefill.pulled.append(call)
        self._go_on(now_s)

    def _compute(self, now_s: float, call: Call) -> None:
        start = call.local + call.returned
        call.compute_s = self._profile.compute_s(start, call.prompt - start)
        self._result.compute_s += call.compute_s
        self._prefill.busy = True
        self._events.at(now_s + call.compute_s, self._prefilled, call)

    def _prefilled(self, now_s: float, call: Call) -> None:
        engine = self._prefill
        engine.busy = False
        engine.saw_shared = engine.saw_shared or call.session is not None
        if self._decode is None:
            self._first_token(now_s, call)
        else:
            self._end_on(engine, now_s, call)
            name = None if call.session is None else call.session.name
            prompt = call.chain[: call.prompt_units]
            call.decode_admission = self._decode.pool.arrive(name, prompt, now_s)
            call.since_s = now_s
            self._decode.waiting.append(call)
            self._hand_over(now_s)
        self._go_on(now_s)

    def _hand_over(self, now_s: float) -> None:
        """Let decode take the prompts that it has room for: first come, first served."""
        engine = self._decode
        assert engine is not None
        while engine.waiting and self._has_room(engine, engine.waiting[0]):
            call = engine.waiting.popleft()
            call.queued_s += now_s - call.since_s
            prompt = call.chain[: call.prompt_units]
            call.decode_grant = engine.pool.start(prompt, len(call.chain), len(prompt))
            there = self._reused(call.decode_grant.num_hits, call.decode_known, call)
            taken_s = self._profile.pull_s(call.prompt - there) + self._profile.decode_token_s
            self._events.at(now_s + taken_s, self._first_token, call)

    def _first_token(self, now_s: float, call: Call) -> None:
        call.ttft_s = now_s - call.arrived_s
        rest_s = (call.spec.answer - 1) * self._profile.decode_token_s
        self._events.at(now_s + rest_s, self._answered, call)

    def _answered(self, now_s: float, call: Call) -> None:
        if self._decode is None:
            self._end_on(self._prefill, now_s, call)
        else:
            self._decode.saw_shared = self._decode.saw_shared or call.session is not None
            self._end_on(self._decode, now_s, call)
            self._hand_over(now_s)
        self._go_on(now_s)
        if call.session is not None:
            self._record(now_s, call)
            if self._entrance is not None:
                final = call.number == len(call.session.spec.calls)
                self._entrance.ended(now_s, call, final=final)
            self._arrivals.next_call(now_s, call.session)

    def _end_on(self, engine: Engine, now_s: float, call: Call) -> None:
        """Free a call's blocks on one engine, and say what is known of the wait behind it."""
        alone = self._decode is None
        on_prefill = engine is self._prefill
        chain = call.chain if alone or not on_prefill else call.chain[: call.prompt_units]
        grant = call.grant if on_prefill else call.decode_grant
        admission = call.admission if on_prefill else call.decode_admission
        assert grant is not None
        expect_s = None
        final = False
        if call.session is not None and admission is not None:
            expect_s, final = self._expectation(call.session, call)
            if expect_s is not None and on_prefill and not alone:
                expect_s += call.spec.answer * self._profile.decode_token_s
        ended = ended_call(
            len(chain),
            now_s,
            expect_s=expect_s,
            final=final,
            compaction=call.spec.keep is not None,
        )
        engine.pool.end(grant, admission, chain, ended)
        if on_prefill and self._tier is not None:
            tier: Any = self._tier
            tier.store(chain)

    def _expectation(self, session: Session, call: Call) -> tuple[float | None, bool]:
        """Return (the expected wait behind a call, whether nothing follows)."""
        calls = session.spec.calls
        if call.number == len(calls):
            return None, True
        following = calls[call.number]
        if following.by_user or following.spawned:
            return None, False
        place = f"{session.name}:{call.number}"
        factor = self._load.wait_error
        return wrong_by(following.wait_s, factor, seed=self._load.seed, place=place), False

    def _record(self, now_s: float, call: Call) -> None:
        served = self._result.served
        served.append(call.served(self._block, now_s))
        if self._say is not None and len(served) % _TELL_EVERY == 0:
            self._say(len(served))


def simulate(
    load: Load, rig: Rig, arm: PlanArm, say: Callable[[int], None] | None = None
) -> SimResult:
    """Simulate one arm; see :class:`Simulation`."""
    return Simulation(load, rig, arm, say).run()
