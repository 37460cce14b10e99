"""One arm, simulated: calls arrive, queue for prefill, are handed over and answered. Pure.

Time jumps from event to event; the same load, rig, arm and seed give the same result. README.md
states the model and what it leaves out. Owner of all simulated state; pools own their blocks.

Pools are reckoned in units of ``Rig.unit_tokens``. Lengths are exact all the same: when all
units of what an engine had of a prompt are found, the call reuses all of its full KV blocks;
when a unit is missing, what lies before it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turncache_server.retention.ghost_pool import Grant
from turncache_server.retention.lru import Lru
from turncache_server.retention.values import Admission
from turncache_tools.bench.workload import AgentSpec, CallSpec
from turncache_tools.plan.load import Load, PlanArm, Rig
from turncache_tools.plan.pools import EnginePool, ended_call, wrong_by
from turncache_tools.plan.served import Served, SimResult

#: Progress is told every so many calls.
_TELL_EVERY: Final = 2000


@dataclass(slots=True)
class _Session:
    """An agent's state.

    Attributes:
        chain: its units' ids.
        history: tokens of the last prompt and answer.
        prompt_before: tokens of the last prompt.
        then: what goes on when it has ended.
    """

    name: str
    spec: AgentSpec
    chain: list[int]
    history: int
    then: Callable[[float], None]
    number: int = 0
    prompt_before: int = 0


@dataclass(slots=True)
class _Call:
    """A call in flight."""

    session: _Session | None
    spec: CallSpec
    number: int
    arrived_s: float
    prompt: int
    chain: list[int]
    prompt_units: int
    # Tokens of the prompt that the prefill and the decode engine had, if nothing was evicted.
    known: int
    decode_known: int
    grant: Grant | None = None
    admission: Admission | None = None
    decode_grant: Grant | None = None
    decode_admission: Admission | None = None
    local: int = 0
    loaded: int = 0
    returned: int = 0
    compute_s: float = 0.0
    queued_s: float = 0.0
    since_s: float = 0.0
    ttft_s: float = 0.0


@dataclass(slots=True)
class _Engine:
    """An engine's pool and those who wait for it."""

    pool: EnginePool
    units: int
    waiting: deque[_Call] = field(default_factory=deque)
    pulled: deque[_Call] = field(default_factory=deque)
    busy: bool = False
    saw_shared: bool = False


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
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = itertools.count()
        # Ids of units: below 0 those that all agents share.
        self._ids = itertools.count()
        self._shared = [-1 - at for at in range(self._units(load.workload.shared, least=0))]
        self._open_agents = 0
        self._draw = random.Random(f"others-{load.seed}")  # noqa: S311 - reproducible, not secret
        self._result = SimResult(arm=arm, served=[])

    def _engine(self, tokens: int, *, retaining: bool) -> _Engine:
        units = int(tokens * self._arm.pool_factor) // self._unit
        pool = EnginePool(units, retaining=retaining, settings=self._arm.settings)
        return _Engine(pool=pool, units=units)

    def run(self) -> SimResult:
        """Simulate until every agent has ended."""
        self._begin()
        events = self._events
        now_s = 0.0
        while events and self._open_agents:
            now_s, _, act, what = heapq.heappop(events)
            act(now_s, what)
        self._result.span_s = now_s
        return self._result

    def _at(self, at_s: float, act: Callable[..., None], what: Any) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), act, what))

    # --- agents -----------------------------------------------------------------------------

    def _begin(self) -> None:
        agents = self._load.workload.agents
        total = len(agents) if self._load.num_agents is None else self._load.num_agents
        self._open_agents = total
        left = iter(range(total))

        def begin(now_s: float, number: int) -> None:
            spec = agents[number % len(agents)]
            self._start_agent(now_s, spec, f"{spec.name}#{number}", ended)

        def ended(now_s: float) -> None:
            self._open_agents -= 1
            if self._load.sessions is not None and (number := next(left, None)) is not None:
                begin(now_s, number)

        places = total if self._load.sessions is None else min(self._load.sessions, total)
        at_s = 0.0
        for number in itertools.islice(left, places):
            spec = agents[number % len(agents)]
            if self._load.sessions is None:
                at_s = spec.starts_s
            self._at(at_s, begin, number)
            # One behind the other: a start of all at once would be a queue of its own.
            at_s += self._profile.compute_s(0, self._load.workload.shared + spec.calls[0].new)
        if self._load.others_per_s:
            self._at(self._draw.expovariate(self._load.others_per_s), self._other, None)

    def _start_agent(
        self, now_s: float, spec: AgentSpec, name: str, then: Callable[[float], None]
    ) -> None:
        chain = list(self._shared)
        session = _Session(name, spec, chain, max(0, self._load.workload.shared), then)
        self._next_call(now_s, session)

    def _next_call(self, now_s: float, session: _Session) -> None:
        """Begin the wait before a session's next call, or end the session."""
        if session.number == len(session.spec.calls):
            session.then(now_s)
            return
        call = session.spec.calls[session.number]
        open_children = len(call.spawned)
        if not open_children:
            self._at(now_s + (call.wait_s if session.number else 0.0), self._arrive, session)
            return

        def child_ended(at_s: float) -> None:
            nonlocal open_children
            open_children -= 1
            if not open_children:
                self._at(at_s + call.wait_s, self._arrive, session)

        for child in call.spawned:
            self._start_agent(now_s, child, f"{session.name}/{child.name}", child_ended)

    def _other(self, now_s: float, _: None) -> None:
        self._result.num_others += 1
        tokens = self._load.others_tokens
        spec = CallSpec(new=tokens, answer=1)
        units = self._units(tokens + 1)
        chain = [next(self._ids) for _ in range(units)]
        call = _Call(None, spec, 1, now_s, tokens, chain, self._units(tokens), 0, 0)
        self._enter(now_s, call)
        self._at(now_s + self._draw.expovariate(self._load.others_per_s), self._other, None)

    # --- a call -----------------------------------------------------------------------------

    def _units(self, tokens: int, *, least: int = 1) -> int:
        return max(least, (2 * tokens + self._unit) // (2 * self._unit))

    def _arrive(self, now_s: float, session: _Session) -> None:
        spec = session.spec.calls[session.number]
        first = not session.number
        kept = session.history if spec.keep is None else min(session.history, spec.keep)
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
            _Call(
                session,
                spec,
                session.number,
                now_s,
                prompt,
                chain,
                prompt_units,
                known,
                decode_known,
            ),
        )

    def _enter(self, now_s: float, call: _Call) -> None:
        name = None if call.session is None else call.session.name
        pool = self._prefill.pool
        call.admission = pool.arrive(name, call.chain[: call.prompt_units], now_s)
        self._at(now_s + self._profile.host_work_s(call.prompt), self._ready, call)

    def _ready(self, now_s: float, call: _Call) -> None:
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

    def _needed(self, engine: _Engine, call: _Call) -> int:
        if engine is self._prefill and self._decode is not None:
            return call.prompt_units
        return len(call.chain)

    def _has_room(self, engine: _Engine, call: _Call) -> bool:
        return engine.pool.num_free >= self._needed(engine, call)

    def _start(self, now_s: float, call: _Call) -> None:
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
            self._at(now_s + delay_s, self._fetched, call)
        else:
            self._compute(now_s, call)

    def _misses(self, call: _Call) -> bool:
        rate = self._load.miss_rate
        if not rate or call.session is None or call.number == 1:
            return False
        # The same waits as those that turncache bench empties prefill's cache in.
        place = f"{call.session.spec.name}-{call.number}"
        draw = random.Random(f"miss-{self._load.seed}-{place}")  # noqa: S311 - reproducible
        return draw.random() < rate

    def _reused(self, num_hits: int, known: int, call: _Call) -> int:
        """Return tokens of whole KV blocks that a call finds; its last token is computed."""
        block = self._block
        most = min(known, call.prompt - 1) // block * block
        least = 1 if call.number > 1 else 0
        if num_hits >= self._units(known, least=least):
            return most
        return min(num_hits * self._unit // block * block, most)

    def _load_from_tier(self, call: _Call, prompt: Sequence[int], num_hits: int) -> float:
        tier: Any = self._tier
        found = num_hits
        while found < len(prompt) and prompt[found] in tier:
            found += 1
        there = self._reused(found, call.known, call)
        call.loaded = max(0, there - call.local)
        call.local += call.loaded
        return self._profile.load_s(call.loaded) if call.loaded else 0.0

    def _return(self, call: _Call, prompt: Sequence[int]) -> float:
        assert self._decode is not None
        there = self._reused(self._decode.pool.leading(prompt), call.decode_known, call)
        missing = there - call.local
        if missing <= 0 or not self._arm.pulls(self._profile, call.local, missing):
            return 0.0
        call.returned = missing
        return self._profile.pull_s(missing)

    def _fetched(self, now_s: float, call: _Call) -> None:
        call.since_s = now_s
        self._prefill.pulled.append(call)
        self._go_on(now_s)

    def _compute(self, now_s: float, call: _Call) -> None:
        start = call.local + call.returned
        call.compute_s = self._profile.compute_s(start, call.prompt - start)
        self._result.compute_s += call.compute_s
        self._prefill.busy = True
        self._at(now_s + call.compute_s, self._prefilled, call)

    def _prefilled(self, now_s: float, call: _Call) -> None:
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
            self._at(now_s + taken_s, self._first_token, call)

    def _first_token(self, now_s: float, call: _Call) -> None:
        call.ttft_s = now_s - call.arrived_s
        rest_s = (call.spec.answer - 1) * self._profile.decode_token_s
        self._at(now_s + rest_s, self._answered, call)

    def _answered(self, now_s: float, call: _Call) -> None:
        if self._decode is None:
            self._end_on(self._prefill, now_s, call)
        else:
            self._decode.saw_shared = self._decode.saw_shared or call.session is not None
            self._end_on(self._decode, now_s, call)
            self._hand_over(now_s)
        self._go_on(now_s)
        if call.session is not None:
            self._record(call)
            self._next_call(now_s, call.session)

    def _end_on(self, engine: _Engine, now_s: float, call: _Call) -> None:
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

    def _expectation(self, session: _Session, call: _Call) -> tuple[float | None, bool]:
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

    def _record(self, call: _Call) -> None:
        assert call.session is not None
        computed = call.prompt - call.local - call.returned
        seen = max(call.known, call.decode_known)
        seen = min(seen, call.prompt - 1) // self._block * self._block
        served = self._result.served
        served.append(
            Served(
                session=call.session.name,
                call=call.number,
                arrived_s=call.arrived_s,
                ttft_s=call.ttft_s,
                queued_s=call.queued_s,
                prompt=call.prompt,
                answer=call.spec.answer,
                local=call.local,
                loaded=call.loaded,
                returned=call.returned,
                computed=computed,
                seen=seen,
                again=max(0, seen - call.local - call.returned),
                compute_s=call.compute_s,
            )
        )
        if self._say is not None and len(served) % _TELL_EVERY == 0:
            self._say(len(served))


def simulate(
    load: Load, rig: Rig, arm: PlanArm, say: Callable[[int], None] | None = None
) -> SimResult:
    """Simulate one arm; see :class:`Simulation`."""
    return Simulation(load, rig, arm, say).run()
