"""Admission by working set: who passes, who waits for how long, and what a client sees of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from openai import AsyncOpenAI

from tests.fakes.engine import FakeEngine, Script, fake_engines
from tests.server.router.support import CHAT, MESSAGES, TOOLS, Bench, bench, config_for
from turncache_server.router.admission import Admission, Arrival, How, Release, Verdict
from turncache_server.router.app import serving
from turncache_server.router.events import CallAdmitted, CallEnded

pytestmark = pytest.mark.anyio

IDLE_S, WAIT_S, MOST = 10.0, 30.0, 4


def admission(fits: int | None = 100, **change: Any) -> Admission:
    """Return an empty working set."""
    made = Admission(**{"idle_s": IDLE_S, "wait_s": WAIT_S, "max_waiting": MOST, **change})
    made.set_fits(fits)
    return made


def ask(core: Admission, name: str, now_s: float = 0.0, **arrival: Any) -> Verdict:
    """Let a session's call, named like it, arrive."""
    given = {"call": name, "session": name, "tokens": 60, **arrival}
    return core.ask(Arrival(**given), now_s)[0]


# --- the core -------------------------------------------------------------------------------


def test_what_leaves_is_given_to_the_next() -> None:
    """A session that does not fit waits until another one says that nothing follows."""
    core = admission()
    assert ask(core, "a") is Verdict.ENTER
    assert ask(core, "b") is Verdict.WAIT
    released = core.ended("a", 5.0, well=True, tokens=60, final=True)
    assert released == [Release("b", How.IN_TURN, 5.0)]
    assert core.state().tokens == 60


def test_a_session_that_is_away_for_too_long_leaves() -> None:
    """Its place is free after ``idle_s`` without a call; one in flight never expires."""
    core = admission()
    ask(core, "a")
    assert ask(core, "b", 1.0) is Verdict.WAIT
    assert core.advance(25.0) == []
    core.ended("a", 26.0, well=True, tokens=60)
    core.left("b", 27.0)
    assert ask(core, "c", 28.0) is Verdict.WAIT
    assert core.due_s() == 36.0
    ask(core, "again", 29.0, session="a")
    assert core.advance(57.0) == []
    core.ended("again", 57.5, well=True, tokens=60)
    assert core.due_s() == 58.0, "the longest wait"
    assert core.advance(58.0) == [Release("c", How.LATE, 30.0)]
    ask(core, "d", 58.0)
    core.ended("c", 59.0, well=True, final=True)
    assert core.advance(67.5) == [Release("d", How.IN_TURN, 9.5)]


@pytest.mark.parametrize(
    "arrival",
    [
        pytest.param({"session": "a"}, id="of the working set"),
        pytest.param({"above": ("a",)}, id="a child"),
        pytest.param({"urgent": True}, id="in a tool loop"),
    ],
)
def test_what_is_under_way_passes(arrival: dict[str, Any]) -> None:
    """Whatever waits, and however little room there is."""
    core = admission()
    ask(core, "a")
    assert ask(core, "b") is Verdict.WAIT
    assert ask(core, "x", **arrival) is Verdict.ENTER


def test_nobody_overtakes_because_he_is_smaller() -> None:
    """The session whose turn it is waits for its own room, and the next one behind it."""
    core = admission()
    ask(core, "a", tokens=50)
    assert ask(core, "large", tokens=80) is Verdict.WAIT
    assert ask(core, "small", tokens=10) is Verdict.WAIT
    released = core.ended("a", 1.0, well=True, final=True)
    assert [each.call for each in released] == ["large", "small"]


def test_one_session_alone_always_fits() -> None:
    """However large: more room it would never find."""
    assert ask(admission(), "a", tokens=1_000_000) is Verdict.ENTER


def test_without_a_word_from_the_engines_everybody_passes() -> None:
    """What fits is not guessed."""
    core = admission(fits=None)
    assert {ask(core, f"s{number}") for number in range(50)} == {Verdict.ENTER}


def test_what_sessions_share_counts_once() -> None:
    """The first call of a session tells how much of it others have as well."""
    core = admission(fits=200)
    ask(core, "a", tokens=90)
    core.ended("a", 1.0, well=True, tokens=90, shared=80)
    assert core.state().tokens == 80 + 10
    for name in "bcdefghi":
        assert ask(core, name, 2.0, tokens=90) is Verdict.ENTER
    assert core.state().tokens == 80 + 9 * 10


def test_a_call_that_is_made_again_does_not_count_as_shared() -> None:
    """It finds all of its prompt: one such would let everybody in for ever."""
    core = admission(fits=200)
    for name in "ab":
        ask(core, name, tokens=90)
        core.ended(name, 1.0, well=True, tokens=90, shared=10)
    ask(core, "c", 2.0, tokens=90, urgent=True)
    core.ended("c", 3.0, well=True, tokens=90, shared=90)
    assert core.state().tokens == 10 + 3 * 80
    assert ask(core, "d", 4.0, tokens=90) is Verdict.WAIT


def test_what_is_shared_may_become_less() -> None:
    """Another kind of agent comes: those who are in count with what they have of their own."""
    core = admission(fits=1000)
    for number in range(16):
        name = f"s{number}"
        ask(core, name, tokens=90)
        core.ended(name, 1.0, well=True, tokens=90, shared=80, final=number > 0)
    assert core.state().tokens == 80 + 10
    for number in range(16):
        name = f"t{number}"
        ask(core, name, tokens=90)
        core.ended(name, 1.0, well=True, tokens=90, shared=0, final=True)
    assert core.state().tokens == 90


def test_a_session_that_is_over_before_its_last_call_has_ended_leaves() -> None:
    """The notice overtakes the end of the stream that it follows."""
    core = admission()
    ask(core, "a")
    core.forget("a", 1.0)
    core.ended("a", 2.0, well=True, tokens=50)
    assert core.state().sessions == 0


def test_who_waits_comes_in_with_an_urgent_call_of_the_same_session() -> None:
    """It is in the working set now, and its calls always pass."""
    core = admission(fits=50)
    ask(core, "a", tokens=50)
    assert ask(core, "waits", session="s", tokens=50) is Verdict.WAIT
    arrival = Arrival(call="urgent", session="s", tokens=50, urgent=True)
    verdict, released = core.ask(arrival, 3.0)
    assert verdict is Verdict.ENTER
    assert released == [Release("waits", How.IN_TURN, 3.0)]


def test_sessions_count_with_what_they_will_become() -> None:
    """A new session is reckoned with the mean of those before it."""
    core = admission(fits=150)
    ask(core, "a", tokens=10)
    core.ended("a", 1.0, well=True, tokens=80)
    assert ask(core, "b", 2.0, tokens=10) is Verdict.WAIT


def test_a_session_that_was_never_answered_is_not_expected() -> None:
    """Its failed first call leaves no KV behind."""
    core = admission()
    ask(core, "a")
    core.ended("a", 1.0, well=False)
    assert core.state().sessions == 0


def test_tenants_take_turns() -> None:
    """One who sends many does not hold up one who sends few."""
    core = admission(max_waiting=10)
    ask(core, "first", tokens=100)
    for name in ("a1", "a2", "a3", "b1"):
        ask(core, name, tenant=name[0], tokens=100)
    order = []
    last = "first"
    for now_s in range(1, 5):
        ((last, _, _),) = core.ended(last, now_s, well=True, final=True)
        order.append(last)
    assert order == ["a1", "b1", "a2", "a3"]


def test_in_a_full_queue_the_tenant_with_most_gives_way() -> None:
    """A tenant cannot shut the others out by filling it."""
    core = admission()
    ask(core, "first")
    for number in range(MOST):
        assert ask(core, f"a{number}", tenant="a") is Verdict.WAIT
    assert ask(core, "a9", tenant="a") is Verdict.REFUSE
    verdict, released = core.ask(Arrival(call="b", session="b", tenant="b", tokens=60), 1.0)
    assert verdict is Verdict.WAIT
    assert released == [Release("a3", How.REFUSED, 1.0)]
    assert core.state().waiting == MOST
    for number in range(2):
        core.left(f"a{number}", 2.0)
    for name in ("b2", "c"):
        ask(core, name, 3.0, tenant=name[0])
    assert ask(core, "c2", 4.0, tenant="c") is Verdict.REFUSE, "b would not have more than c"


class Machine(RuleBasedStateMachine):
    """Anything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.core = admission()
        self.waiting: dict[str, float] = {}
        self.inside: dict[str, str] = {}
        self.sessions: dict[str, str] = {}
        self.count = 0

    def take(self, released: list[Release]) -> None:
        """Move who was released, and check what he was told."""
        for call, how, waited_s in released:
            assert waited_s == self.now_s - self.waiting.pop(call)
            if how is not How.REFUSED:
                self.inside[call] = self.sessions[call]
            if how is How.LATE:
                assert waited_s >= WAIT_S - 1e-6

    @rule(
        session=st.sampled_from("abcdef"),
        tenant=st.sampled_from([None, "t", "u"]),
        tokens=st.integers(0, 150),
        urgent=st.integers(0, 9),
    )
    def arrives(self, session: str, tenant: str | None, tokens: int, urgent: int) -> None:
        """A call of a session that is in the working set, or urgent, never waits."""
        self.take(self.core.advance(self.now_s))
        name = f"{tenant}/{session}"
        known = name in self.core
        self.count += 1
        call = f"{self.count}"
        self.sessions[call] = name
        arrival = Arrival(call=call, session=name, tenant=tenant, tokens=tokens, urgent=urgent == 0)
        verdict, released = self.core.ask(arrival, self.now_s)
        if verdict is Verdict.WAIT:
            self.waiting[call] = self.now_s
        elif verdict is Verdict.ENTER:
            self.inside[call] = name
        self.take(released)
        if known or urgent == 0:
            assert verdict is Verdict.ENTER
        if verdict is Verdict.REFUSE:
            assert len(self.waiting) == MOST

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), tokens=st.none() | st.integers(0, 150), well=st.booleans())
    def ends(self, data: st.DataObject, tokens: int | None, well: bool) -> None:
        """A call is over; twice changes nothing."""
        call = data.draw(st.sampled_from(sorted(self.inside)))
        final = data.draw(st.booleans())
        shared = data.draw(st.sampled_from([None, 0, 20, 100]))
        del self.inside[call]
        self.take(
            self.core.ended(call, self.now_s, well=well, tokens=tokens, shared=shared, final=final)
        )
        before = self.core.state()
        self.take(self.core.left(call, self.now_s))
        assert self.core.state() == before

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        """The client of a call that waits goes away."""
        call = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[call]
        self.take(self.core.left(call, self.now_s))

    @rule(session=st.sampled_from("abcdef"))
    def is_forgotten(self, session: str) -> None:
        """A client says that nothing follows."""
        self.take(self.core.forget(f"None/{session}", self.now_s))

    @rule(tokens=st.none() | st.integers(1, 300))
    def fits(self, tokens: int | None) -> None:
        """Engines come and go."""
        self.core.set_fits(tokens)
        self.take(self.core.advance(self.now_s))

    @rule(seconds=st.floats(0.01, 40))
    def time_passes(self, seconds: float) -> None:
        """When something is due is told beforehand, and then happens."""
        until_s = self.now_s + seconds
        while (due_s := self.core.due_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.take(self.core.advance(self.now_s))
            after_s = self.core.due_s()
            assert after_s is None or after_s > self.now_s
        self.now_s = until_s

    @invariant()
    def nobody_starves(self) -> None:
        """Nobody waits for longer than is allowed, or while nobody is inside."""
        assert all(self.now_s - since_s < WAIT_S for since_s in self.waiting.values())
        assert not self.waiting or self.core.state().sessions

    @invariant()
    def it_adds_up(self) -> None:
        """Calls, sessions and tokens are those that came in and have not left."""
        state = self.core.state()
        assert state.waiting == len(self.waiting) <= MOST
        assert state.sessions >= len(set(self.inside.values()))
        assert state.tokens >= 0
        assert all(session in self.core for session in self.inside.values())

    @invariant()
    def the_queues_are_those_who_wait(self) -> None:
        """By tenant, each with the wait of the one who came first."""
        since_s: dict[str, list[float]] = {}
        for call, began_s in self.waiting.items():
            since_s.setdefault(self.sessions[call].partition("/")[0], []).append(began_s)
        found = self.core.queues(self.now_s)
        assert {str(queue.tenant): queue[1:] for queue in found} == {
            tenant: (len(began), self.now_s - min(began)) for tenant, began in since_s.items()
        }
        assert found == sorted(found, key=lambda queue: (-queue.waiting, -queue.longest_wait_s))


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_no_tenant_waits_for_more_than_its_turn(order: list[str]) -> None:
    """While a tenant waits, no other one is let in twice before it."""
    core = admission(max_waiting=100, wait_s=1e9)
    ask(core, "first", tokens=100)
    waiting = Counter(order)
    for number, tenant in enumerate(order):
        ask(core, f"{tenant}{number}", tenant=tenant, tokens=100)
    since: dict[str, Counter[str]] = {tenant: Counter() for tenant in waiting}
    last = "first"
    for now_s in range(1, len(order) + 1):
        ((last, _, _),) = core.ended(last, now_s, well=True, final=True)
        waiting[last[0]] -= 1
        since[last[0]].clear()
        for tenant, seen in since.items():
            if waiting[tenant] and tenant != last[0]:
                seen[last[0]] += 1
                assert seen[last[0]] == 1


# --- the router -----------------------------------------------------------------------------


@asynccontextmanager
async def single() -> AsyncIterator[FakeEngine]:
    """Run one engine."""
    engine = FakeEngine()
    async with fake_engines(engine):
        yield engine


ON = {"admission": True, "admission_tokens": 100, "admission_idle_s": 60.0}


async def waits(made: Bench, num: int = 1) -> None:
    """Wait until so many calls wait."""
    sample = "turncache_router_admission_waiting"
    await made.eventually(lambda: made.metric(sample), lambda found: found == num)


def results(made: Bench) -> list[str]:
    """Return what became of the calls at the gate, in order."""
    return [event.result for event in made.of_kind(CallAdmitted)]


async def test_a_new_session_waits_for_one_that_ends() -> None:
    """Its wait is part of its time to first byte, not of the router's own time."""
    async with single() as engine, bench(engine, **ON) as made:
        await made.chat(session="a")
        second = asyncio.create_task(made.chat(session="b"))
        await waits(made)
        assert len(engine.seen) == 1, "no engine hears of a call that waits"
        await made.chat(session="a", headers={"X-Session-Final": "true"})
        answer = await second
        assert answer.status_code == 200
        assert results(made) == ["at_once", "at_once", "in_turn"]
        ended = made.of_kind(CallEnded)[-1]
        assert ended.ttft_s > ended.queued_s > 0
        assert ended.overhead_s < ended.ttft_s - ended.queued_s
        assert (await made.record(answer))["timings"]["queued_s"] == ended.queued_s
        assert await made.metric("turncache_router_queue_seconds_count") == 1


async def test_calls_in_a_tool_loop_and_untagged_calls_pass() -> None:
    """So does a child of a session that is there."""
    async with single() as engine, bench(engine, **ON) as made:
        await made.chat(session="a")
        waiting = asyncio.create_task(made.chat(session="b"))
        await waits(made)
        reply = {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        }
        result = {"role": "tool", "tool_call_id": "c", "content": "done"}
        loop = await made.chat(session="x", messages=[*MESSAGES, reply, result], tools=TOOLS)
        child = await made.chat(session="y", headers={"X-Parent-Session-ID": "a"})
        untagged = await made.chat()
        assert [each.status_code for each in (loop, child, untagged)] == [200] * 3
        assert not waiting.done()
        await stop(waiting)


async def stop(task: asyncio.Task[Any]) -> None:
    """Let a client leave."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue() -> None:
    """No engine hears of it, and the next one has its place."""
    async with single() as engine, bench(engine, **ON) as made:
        await made.chat(session="a")
        waiting = asyncio.create_task(made.chat(session="b"))
        await waits(made)
        await stop(waiting)
        await waits(made, 0)
        assert results(made) == ["at_once", "left"]
        assert len(engine.seen) == 1


async def test_after_the_longest_wait_a_call_passes() -> None:
    """Nobody starves; that it was not for room is counted."""
    async with single() as engine, bench(engine, **ON, admission_wait_s=0.05) as made:
        await made.chat(session="a")
        assert (await made.chat(session="b")).status_code == 200
        assert results(made) == ["at_once", "late"]


async def test_a_full_queue_refuses() -> None:
    """With 429 and when to try again."""
    async with single() as engine, bench(engine, **ON, admission_max_waiting=0) as made:
        await made.chat(session="a")
        answer = await made.chat(session="b")
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "admission_full"
        assert answer.headers["retry-after"] == "1"


async def test_a_call_that_fails_gives_its_place_back() -> None:
    """A first call that no engine could answer leaves nothing to come back to."""
    async with single() as engine, bench(engine, **ON) as made:
        engine.scripts.append(Script(status=500))
        await made.chat(session="a")
        assert (await made.chat(session="b")).status_code == 200
        assert results(made) == ["at_once", "at_once"]


async def test_a_client_that_leaves_with_the_last_event_is_expected_back() -> None:
    """As OpenAI's does, which closes a stream behind ``[DONE]``, before its very end."""
    async with single() as engine, bench(engine, **{**ON, "admission_tokens": 10**6}) as made:
        for number in range(8):
            stream = await made.openai.chat.completions.create(
                model="fake",
                messages=MESSAGES,  # type: ignore[arg-type]
                stream=True,
                extra_headers={"X-Session-ID": f"s{number}"},
            )
            async for _ in stream:
                pass
        await made.eventually(
            lambda: made.metric("turncache_router_active_calls"), lambda found: found == 0
        )
        assert (await made.http.get("/v1/sessions")).json()["num_sessions"] == 8
        assert await made.metric("turncache_router_admission_sessions") == 8


async def test_a_notice_of_the_end_makes_room() -> None:
    """A client that says between two calls that nothing follows."""
    async with single() as engine, bench(engine, **ON) as made:
        await made.chat(session="a")
        waiting = asyncio.create_task(made.chat(session="b"))
        await waits(made)
        headers = {"X-Session-ID": "a"}
        await made.http.post("/v1/sessions", json={"notice": "final"}, headers=headers)
        assert (await waiting).status_code == 200


async def test_engines_say_what_fits() -> None:
    """The pool of every engine that keeps sessions, times the share that may be promised."""
    engines = FakeEngine("one"), FakeEngine("two")
    for engine in engines:
        engine.num_blocks = 100
    settings_ = {"admission": True, "admission_share": 0.5}
    async with fake_engines(*engines), bench(*engines, **settings_) as made:
        assert await made.metric('turncache_router_admission_tokens{what="fits"}') == 400
        listed = (await made.http.get("/v1/sessions")).json()
        state = {"sessions": 0, "tokens": 0, "fits": 400, "waiting": 0}
        assert listed["admission"] == {**state, "longest_wait_s": 0.0, "tenants": []}


async def test_while_no_engine_says_what_fits_nobody_waits() -> None:
    """As with stock engines, for which ``admission_tokens`` has to be set."""
    async with single() as engine, bench(engine, admission=True) as made:
        for number in range(5):
            assert (await made.chat(session=f"s{number}")).status_code == 200
        assert results(made) == ["at_once"] * 5


async def test_a_router_that_ends_sends_away_who_waits() -> None:
    """At once, with 503: another replica may have room."""
    async with single() as engine, httpx2.AsyncClient(timeout=20) as http:
        async with serving(config_for([engine], **ON, shutdown_s=20.0)) as router:
            made = Bench(router, http, AsyncOpenAI(api_key="-", http_client=http))
            http.base_url = router.url
            await made.chat(session="a")
            waiting = asyncio.create_task(made.chat(session="b"))
            await waits(made)
        answer = await waiting
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "draining"
        assert len(engine.seen) == 1


async def test_a_stream_is_kept_alive_while_it_waits() -> None:
    """With ``ping_s``; that the router ends comes as the terminal event then."""
    got: list[bytes] = []
    pinged = asyncio.Event()

    async def read(http: httpx2.AsyncClient) -> None:
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        headers = {"X-Session-ID": "b"}
        async with http.stream("POST", CHAT, json=body, headers=headers) as answer:
            async for part in answer.aiter_bytes():
                got.append(part)
                pinged.set()

    async with single() as engine, httpx2.AsyncClient(timeout=20) as http:
        settings_ = {**ON, "ping_s": 0.01, "shutdown_s": 20.0}
        async with serving(config_for([engine], **settings_)) as router:
            http.base_url = router.url
            made = Bench(router, http, AsyncOpenAI(api_key="-", http_client=http))
            await made.chat(session="a")
            reading = asyncio.create_task(read(http))
            await pinged.wait()
        await reading
        text = b"".join(got)
        assert text.startswith(b": ping")
        assert b'"draining"' in text
        assert len(engine.seen) == 1
