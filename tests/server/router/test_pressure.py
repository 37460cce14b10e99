"""Prompts that decode has not taken: how many there may be, who waits, and that room comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes.engine import FakeEngine, Script, fake_engines, fake_pair
from tests.server.router.conftest import Pair
from tests.server.router.support import CHAT, MESSAGES, Bench, bench
from turncache_server.router.checks import without_effect
from turncache_server.router.config import parse_config
from turncache_server.router.events import CallEnded, PrefillRepeated, PromptHeldBack
from turncache_server.router.untaken import How, Prompts, Release, Untaken

pytestmark = pytest.mark.anyio

WAIT_S, MOST = 30.0, 4


def untaken(limit: int | None = 100) -> Untaken:
    """Return an engine that nobody has asked for anything."""
    made = Untaken(wait_s=WAIT_S, max_waiting=MOST)
    made.set_limit(limit)
    return made


# --- the core -------------------------------------------------------------------------------


def test_a_prompt_waits_until_decode_has_taken_another() -> None:
    """What was taken makes room for who has waited longest."""
    core = untaken()
    assert core.ask("a", 60, 0.0) == (True, [])
    assert core.ask("b", 60, 1.0) == (False, [])
    assert core.state() == Prompts(tokens=60, limit=100, calls=1, waiting=1)
    assert core.over("a", 5.0) == [Release("b", How.IN_TURN, 4.0)]
    assert core.over("b", 6.0) == []
    assert not core


def test_one_prompt_alone_always_fits() -> None:
    """However large; the next one waits for it, however small."""
    core = untaken()
    assert core.ask("large", 1_000_000, 0.0)[0]
    assert not core.ask("small", 1, 0.0)[0]


def test_nobody_overtakes_because_he_is_smaller() -> None:
    """Also when he comes later and would fit."""
    core = untaken()
    core.ask("a", 90, 0.0)
    for name, tokens in (("large", 60), ("small", 5)):
        assert not core.ask(name, tokens, 0.0)[0]
    assert [each.call for each in core.over("a", 1.0)] == ["large", "small"]


def test_what_prefill_counts_replaces_the_estimate() -> None:
    """In both directions: it makes room, or takes some."""
    core = untaken()
    core.ask("a", 90, 0.0)
    core.ask("b", 60, 0.0)
    assert core.sized("a", 40, 1.0) == [Release("b", How.IN_TURN, 1.0)]
    core.sized("b", 70, 2.0)
    assert core.state().tokens == 110
    assert core.sized("nobody", 70, 2.0) == []


def test_after_the_longest_wait_a_prompt_goes() -> None:
    """Room or not; when that is, is told beforehand."""
    core = untaken()
    assert core.due_s() is None
    core.ask("a", 90, 0.0)
    core.ask("b", 90, 1.0)
    assert core.due_s() == 31.0
    assert core.advance(30.9) == []
    assert core.advance(31.0) == [Release("b", How.LATE, 30.0)]
    assert core.state().tokens == 180


def test_when_too_many_wait_who_has_waited_longest_goes() -> None:
    """Nobody is refused, and nobody is passed over."""
    core = untaken()
    core.ask("a", 90, 0.0)
    for number in range(MOST):
        assert core.ask(f"w{number}", 90, 1.0) == (False, [])
    assert core.ask("more", 90, 2.0) == (False, [Release("w0", How.CROWDED, 1.0)])
    assert core.state().waiting == MOST


def test_a_leg_that_is_repeated_has_its_room() -> None:
    """It does not wait for itself, and counts once."""
    core = untaken()
    core.ask("a", 90, 0.0)
    core.ask("b", 90, 0.0)
    assert core.ask("a", 90, 1.0) == (True, [])
    assert core.state().tokens == 90


def test_without_a_word_from_the_engine_nobody_waits() -> None:
    """What fits is not guessed; when it is known, what is on its way counts."""
    core = untaken(limit=None)
    assert all(core.ask(f"{number}", 90, 0.0)[0] for number in range(5))
    core.set_limit(100)
    assert not core.ask("more", 1, 0.0)[0]
    core.set_limit(None)
    assert core.advance(1.0) == [Release("more", How.IN_TURN, 1.0)]


class Machine(RuleBasedStateMachine):
    """Anything that can happen, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.limit: int | None = 100
        self.core = untaken()
        self.waiting: dict[str, tuple[int, float]] = {}  # the oldest first
        self.inside: dict[str, int] = {}
        self.count = 0

    def fits(self, tokens: int) -> bool:
        """Whether there is room for a prompt; one alone always has it."""
        total = sum(self.inside.values()) + tokens
        return self.limit is None or not self.inside or total <= self.limit

    def take(self, released: list[Release]) -> None:
        """Move who was released: the oldest first, over the limit only those who must go."""
        for call, how, waited_s in released:
            assert call == next(iter(self.waiting))
            full = len(self.waiting) == MOST
            tokens, since_s = self.waiting.pop(call)
            assert waited_s == self.now_s - since_s
            assert self.fits(tokens) is (how is How.IN_TURN)
            if how is How.LATE:
                assert self.now_s >= since_s + WAIT_S
            if how is How.CROWDED:
                assert full
            self.inside[call] = tokens

    @rule(tokens=st.integers(0, 150))
    def asks(self, tokens: int) -> None:
        """It goes at once if nobody waits and it fits; else it waits."""
        self.count += 1
        call = f"{self.count}"
        at_once, released = self.core.ask(call, tokens, self.now_s)
        self.take(released)
        assert at_once is (not self.waiting and not released and self.fits(tokens))
        if at_once:
            self.inside[call] = tokens
        else:
            self.waiting[call] = tokens, self.now_s

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), tokens=st.integers(0, 150))
    def asks_again(self, data: st.DataObject, tokens: int) -> None:
        """A leg that is repeated."""
        call = data.draw(st.sampled_from(sorted(self.inside)))
        assert self.core.ask(call, tokens, self.now_s) == (True, [])

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), tokens=st.integers(0, 150))
    def is_sized(self, data: st.DataObject, tokens: int) -> None:
        """Prefill has counted."""
        call = data.draw(st.sampled_from(sorted(self.inside)))
        self.inside[call] = tokens
        self.take(self.core.sized(call, tokens, self.now_s))

    @precondition(lambda self: self.inside or self.waiting)
    @rule(data=st.data())
    def is_over(self, data: st.DataObject) -> None:
        """Taken, failed, given up while it waited; twice changes nothing."""
        call = data.draw(st.sampled_from(sorted({*self.inside, *self.waiting})))
        self.inside.pop(call, None)
        self.waiting.pop(call, None)
        self.take(self.core.over(call, self.now_s))
        assert self.core.over(call, self.now_s) == []

    @rule(tokens=st.none() | st.integers(1, 300))
    def limit_changes(self, tokens: int | None) -> None:
        """The engine says what it holds, or is gone."""
        self.limit = tokens
        self.core.set_limit(tokens)
        self.take(self.core.advance(self.now_s))

    @rule(seconds=st.floats(0.01, 40))
    def time_passes(self, seconds: float) -> None:
        """When somebody is due is told beforehand, and then happens."""
        until_s = self.now_s + seconds
        while (due_s := self.core.due_s()) is not None and due_s <= until_s:
            self.now_s = max(self.now_s, due_s)
            self.take(self.core.advance(self.now_s))
            after_s = self.core.due_s()
            assert after_s is None or after_s > self.now_s
        self.now_s = until_s

    @invariant()
    def nobody_starves(self) -> None:
        """Nobody waits for longer than is allowed, while nothing is on its way, or in a gap."""
        assert all(self.now_s < since_s + WAIT_S for _, since_s in self.waiting.values())
        assert not self.waiting or not self.fits(next(iter(self.waiting.values()))[0])

    @invariant()
    def it_adds_up(self) -> None:
        """Calls and tokens are those that went and are not over."""
        assert self.core.state() == Prompts(
            tokens=sum(self.inside.values()),
            limit=self.limit,
            calls=len(self.inside),
            waiting=len(self.waiting),
        )
        assert len(self.waiting) <= MOST

    def teardown(self) -> None:
        """When all are over nothing is left."""
        while self.inside or self.waiting:
            call = next(iter(self.inside or self.waiting))
            self.inside.pop(call, None)
            self.waiting.pop(call, None)
            self.take(self.core.over(call, self.now_s))
        assert not self.core
        assert self.core.state().tokens == 0


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


# --- the router -----------------------------------------------------------------------------

#: Blocks of a pool that holds one of the prompts here, and no second.
ONE_PROMPT = 25
WAITING = 'turncache_router_handover_waiting{engine="prefill-0"}'


def tokens_of(engine: str) -> str:
    """Name the sample of what is on its way from an engine."""
    return f'turncache_router_handover_tokens{{engine="{engine}",what="untaken"}}'


@asynccontextmanager
async def fleet(
    *, prefills: int = 1, decodes: int = 1, **change: Any
) -> AsyncIterator[tuple[Bench, list[FakeEngine], list[FakeEngine]]]:
    """Run a router whose prefill engines hold one prompt each; in the end nothing is on its way."""
    async with fake_pair(prefills=prefills, decodes=decodes) as (prefill, decode):
        for engine in prefill:
            engine.num_blocks = ONE_PROMPT
        async with bench(*prefill, *decode, **{"handover_share": 1.0, **change}) as made:
            yield made, prefill, decode
            for engine in prefill:
                await is_empty(made, engine)


async def is_empty(made: Bench, engine: FakeEngine) -> None:
    """Wait until nothing is on its way from an engine."""
    sample = tokens_of(engine.name)
    await made.eventually(lambda: made.metric(sample), lambda found: found == 0)


@pytest.fixture
async def pressed(anyio_backend: str) -> AsyncIterator[Pair]:
    """A router in front of a pair, whose prefill engine holds one prompt."""
    async with fleet() as (made, [prefill], [decode]):
        yield Pair(made, prefill, decode)


def call(made: Bench, session: str = "s", **members: Any) -> asyncio.Task[Any]:
    """Begin a call."""
    return asyncio.create_task(made.chat(session=session, **members))


async def seen_by(made: Bench, engine: FakeEngine, number: int = 1) -> None:
    """Wait until an engine has so many calls."""
    await made.eventually(lambda: len(engine.seen), lambda found: found == number)


async def waits(made: Bench, number: int = 1) -> None:
    """Wait until so many prompts wait for the first prefill engine."""
    await made.eventually(lambda: made.metric(WAITING), lambda found: found == number)


def results(made: Bench) -> list[str]:
    """Return what became of the prompts that had to wait, in order."""
    return [event.result for event in made.of_kind(PromptHeldBack)]


async def leave(task: asyncio.Task[Any]) -> None:
    """Let a client leave."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_prompt_waits_while_decode_is_behind(pressed: Pair) -> None:
    """No engine hears of it; how long it waited is told, and is not the router's own time."""
    made = pressed.bench
    pressed.decode.scripts = [full := Script(until=asyncio.Event())]
    first = call(made, stream=True)
    await seen_by(made, pressed.decode)
    second = call(made, "other", stream=True)
    await waits(made)
    assert len(pressed.prefill.seen) == 1
    (counted,) = pressed.prefill.replies.values()
    assert await made.metric(tokens_of("prefill-0")) == counted.prompt
    assert full.until is not None
    full.until.set()
    answer = await second
    assert [(await first).status_code, answer.status_code] == [200, 200]
    assert results(made) == ["in_turn"]
    timings = (await made.record(answer))["timings"]
    at_once, ended = made.of_kind(CallEnded)
    assert at_once.held_back_s == 0
    assert ended.ttft_s > ended.held_back_s == timings["held_back_s"] > 0
    assert ended.prefill_s < ended.ttft_s - ended.held_back_s
    assert ended.overhead_s < ended.ttft_s - ended.held_back_s
    sample = 'turncache_router_handover_queue_seconds_count{result="in_turn"}'
    assert await made.metric(sample) == 1
    assert pressed.decode.asked == [], "its streams show what it has taken"


async def test_an_engine_that_is_not_pressed_notices_nothing(pressed: Pair) -> None:
    """Nobody waits, and decode is asked nothing, whatever the form of the answer."""
    for stream in (True, False):
        assert (await pressed.bench.chat(session="s", stream=stream)).status_code == 200
    assert results(pressed.bench) == []
    assert pressed.decode.asked == []


async def test_decode_is_asked_for_what_an_answer_in_one_piece_does_not_show(
    pressed: Pair,
) -> None:
    """The next prompt goes as soon as decode has this one, long before its answer."""
    made = pressed.bench
    pressed.decode.scripts = [slow := Script(pause_after=0)]
    first = call(made)
    await seen_by(made, pressed.decode)
    second = call(made, "other")
    assert (await second).status_code == 200
    assert not first.done()
    assert results(made) == ["in_turn"]
    assert set(pressed.decode.asked) == {pressed.decode.seen[0].xargs["tc_request"]}
    slow.resume.set()
    await first


async def test_what_decode_has_in_its_queue_is_not_taken(pressed: Pair) -> None:
    """It is asked again and again, and the next prompt waits."""
    made = pressed.bench
    pressed.decode.scripts = [full := Script(until=asyncio.Event())]
    first = call(made)
    await seen_by(made, pressed.decode)
    second = call(made, "other")
    await made.eventually(lambda: len(pressed.decode.asked), lambda found: found >= 2)
    assert len(pressed.prefill.seen) == 1
    assert full.until is not None
    full.until.set()
    assert [(await each).status_code for each in (first, second)] == [200, 200]


@pytest.mark.parametrize(
    ("path", "shows"), [(CHAT, True), ("/v1/messages", True), ("/v1/responses", False)]
)
async def test_the_first_event_shows_it_where_it_comes_with_the_first_token(
    path: str, shows: bool
) -> None:
    """A response is announced before anything is computed: there the first event says nothing."""
    fakes: dict[str, FakeEngine] = {}
    prefill = FakeEngine("prefill-0", "prefill", fleet=fakes)
    decode = FakeEngine("decode-0", "decode", fleet=fakes, control=False)
    prefill.num_blocks = ONE_PROMPT
    text = MESSAGES[0]["content"] * 2
    given = {"input": text} if path == "/v1/responses" else {"messages": [user(text)]}
    async with fake_engines(prefill, decode), bench(prefill, decode, handover_share=1.0) as made:
        decode.scripts = [begun := Script(pause_after=1)]
        body = {"model": "fake", "stream": True, "max_tokens": 50, **given}
        async with made.http.stream("POST", path, json=body) as answer:
            parts = answer.aiter_bytes()
            await anext(parts)
            second = call(made, "other")
            if shows:
                assert (await second).status_code == 200
            else:
                await waits(made)
            begun.resume.set()
            async for _ in parts:
                pass
        assert (await second).status_code == 200
        assert results(made) == ([] if shows else ["in_turn"])


def user(text: str) -> dict[str, str]:
    """Return a user's message."""
    return {"role": "user", "content": text}


async def test_a_client_that_leaves_while_it_waits_leaves_the_queue(pressed: Pair) -> None:
    """No engine hears of it."""
    made = pressed.bench
    pressed.decode.scripts = [full := Script(until=asyncio.Event())]
    first = call(made)
    await seen_by(made, pressed.decode)
    second = call(made, "other")
    await waits(made)
    await leave(second)
    await waits(made, 0)
    assert results(made) == ["left"]
    assert full.until is not None
    full.until.set()
    await first
    assert len(pressed.prefill.seen) == 1
    await made.eventually(
        lambda: [event.code for event in made.of_kind(CallEnded)], lambda codes: 499 in codes
    )


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_leaves_makes_room(pressed: Pair, leg: str) -> None:
    """In either leg: nobody will take its prompt."""
    made = pressed.bench
    engine: FakeEngine = getattr(pressed, leg)
    engine.scripts = [Script(until=asyncio.Event())]
    first = call(made)
    await seen_by(made, engine)
    second = call(made, "other")
    await waits(made)
    await leave(first)
    assert (await second).status_code == 200
    assert results(made) == ["in_turn"]


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_that_breaks_makes_room(pressed: Pair, leg: str) -> None:
    """The call fails as it would have, and the next one goes."""
    made = pressed.bench
    engine: FakeEngine = getattr(pressed, leg)
    engine.scripts = [broken := Script(until=asyncio.Event(), die="before")]
    first = call(made)
    await seen_by(made, engine)
    second = call(made, "other")
    await waits(made)
    assert broken.until is not None
    broken.until.set()
    assert (await first).status_code == 502
    assert (await second).status_code == 200


async def test_who_waits_for_an_engine_that_dies_goes_to_another() -> None:
    """Its first prompt is with decode still, and nothing would make room."""
    async with fleet(prefills=2) as (made, prefill, [decode]):
        decode.scripts = [full := Script(until=asyncio.Event())]
        first = call(made)
        await seen_by(made, decode)
        dead = next(engine for engine in prefill if engine.seen)
        other = next(engine for engine in prefill if engine is not dead)
        second = call(made)
        waiting = f'turncache_router_handover_waiting{{engine="{dead.name}"}}'
        await made.eventually(lambda: made.metric(waiting), lambda found: found == 1)
        await dead.stop()
        assert (await second).status_code == 200
        assert len(other.seen) == 1
        assert full.until is not None
        full.until.set()
        assert (await first).status_code == 200


async def test_what_a_call_had_asked_of_an_engine_that_refused_is_over() -> None:
    """It goes on with another one, and its prompt counts there."""
    async with fleet(prefills=2) as (made, prefill, [decode]):
        await made.chat(session="s")
        best = next(engine for engine in prefill if engine.seen)
        other = next(engine for engine in prefill if engine is not best)
        best.scripts = [Script(status=503)]
        decode.scripts = [full := Script(until=asyncio.Event())]
        first = call(made)
        await seen_by(made, decode, 2)
        assert await made.metric(tokens_of(best.name)) == 0
        assert await made.metric(tokens_of(other.name)) > 0
        assert (await made.chat(session="s")).status_code == 200
        assert len(best.seen) == 3
        assert results(made) == []
        assert full.until is not None
        full.until.set()
        await first


async def test_a_decode_engine_that_refuses_leaves_the_prompt_to_another() -> None:
    """The other one is asked whether it has it."""
    async with fleet(decodes=2) as (made, [prefill], decode):
        await made.chat(session="s")
        best = next(engine for engine in decode if engine.seen)
        other = next(engine for engine in decode if engine is not best)
        best.scripts = [Script(status=503)]
        other.scripts = [slow := Script(pause_after=0)]
        first = call(made)
        await seen_by(made, other)
        assert (await made.chat(session="s", stream=True)).status_code == 200
        assert (best.asked, len(other.asked) > 0) == ([], True)
        assert len(prefill.seen) == 3
        slow.resume.set()
        await first


def other_prompt() -> list[dict[str, str]]:
    """Return messages that no engine has seen."""
    return [user("Something else altogether. " * 10)]


async def two_prefills(made: Bench, prefill: list[FakeEngine]) -> tuple[FakeEngine, str, str]:
    """Return a prefill engine, a session that is placed on it, and one that is placed elsewhere."""
    placed: dict[str, str] = {}
    for number in range(100):
        await made.chat(session=f"s{number}")
        (engine,) = [
            e for e in prefill if e.seen and e.seen[-1].headers["x-session-id"] == f"s{number}"
        ]
        placed.setdefault(engine.name, f"s{number}")
        if len(placed) == 2:
            break
    owner = prefill[0]
    return owner, placed[owner.name], placed[prefill[1].name]


async def test_a_repeat_counts_on_the_engine_that_computes() -> None:
    """Whoever has lost the prompt has room for another one."""
    async with fleet(prefills=2, repeat_after_s=0.005) as (made, prefill, [decode]):
        owner, session, _ = await two_prefills(made, prefill)
        other = prefill[1]
        owner.loses = 1
        owner.scripts = [Script(), Script(status=503)]
        other.scripts = [again := Script(until=asyncio.Event())]
        lost = call(made, session, messages=other_prompt())
        await again.arrived.wait()
        assert await made.metric(tokens_of(owner.name)) == 0
        assert await made.metric(tokens_of(other.name)) > 0
        assert (await made.chat(session=session)).status_code == 200
        assert again.until is not None
        again.until.set()
        assert (await lost).status_code == 200
        assert results(made) == []
        assert decode.lacking == {}


@pytest.mark.parametrize("how", ["room", "client", "patience"])
async def test_a_repeat_waits_for_room_like_any_prompt(how: str) -> None:
    """Until there is some, its client has left, or decode has waited for long enough."""
    patience_s = 0.3 if how == "patience" else 30.0
    settings = {"repeat_after_s": 0.005, "repeat_prefill_s": patience_s}
    async with fleet(prefills=2, **settings) as (made, prefill, [decode]):
        owner, session, elsewhere = await two_prefills(made, prefill)
        other = prefill[1]
        num_seen = len(other.seen)
        decode.scripts = [full := Script(until=asyncio.Event())]
        first = call(made, elsewhere, stream=True)
        await full.arrived.wait()
        owner.loses = 1
        owner.scripts = [Script(), Script(status=503)]
        lost = call(made, session, messages=other_prompt())
        waiting = f'turncache_router_handover_waiting{{engine="{other.name}"}}'
        await made.eventually(lambda: made.metric(waiting), lambda found: found == 1)
        assert await made.metric(tokens_of(owner.name)) == 0
        assert full.until is not None
        if how == "room":
            full.until.set()
        elif how == "client":
            await leave(lost)
        if how != "client":
            answer = await lost
            assert answer.status_code == 200
            assert (await made.record(answer))["repeats"] == (2 if how == "room" else 1)
        assert await made.metric(waiting) == 0
        assert len(other.seen) == num_seen + (2 if how == "room" else 1)
        await made.eventually(lambda: decode.lacking, lambda lacking: not lacking)
        told = [(event.engine, event.result) for event in made.of_kind(PrefillRepeated)]
        end = {"room": "done", "client": "left", "patience": "late"}[how]
        assert told[0] == (owner.name, "failed")
        # Decode, which has waited for a little longer, may have answered first.
        assert told[1:] in ([(other.name, end)], [(other.name, "left")])
        assert results(made) == ["in_turn" if how == "room" else "left"]
        full.until.set()
        assert (await first).status_code == 200


@pytest.mark.parametrize(("most", "waits_on"), [(1000, True), (3, False)])
async def test_a_short_silence_of_an_engine_lifts_no_bound(most: int, waits_on: bool) -> None:
    """Its limit is what it was, until as many checks have failed as open a circuit."""
    async with fleet(breaker_failures=most) as (made, [prefill], [decode]):
        decode.scripts = [full := Script(until=asyncio.Event())]
        first = call(made, stream=True)
        await seen_by(made, decode)
        second = call(made, "other", stream=True)
        await waits(made)
        prefill.healthy = False
        live = 'turncache_router_engine_live{engine="prefill-0",side="prefill"}'
        await made.eventually(lambda: made.metric(live), lambda found: found == 0)
        limit = 'turncache_router_handover_tokens{engine="prefill-0",what="limit"}'
        if waits_on:
            await asyncio.sleep(0.3)  # several checks, and looks at the queue
            assert await made.metric(limit) == 4 * ONE_PROMPT
            await waits(made)
        else:
            await made.eventually(lambda: made.metric(limit), lambda found: found == -1)
            await waits(made, 0)
        assert full.until is not None
        full.until.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]


async def test_a_stock_hand_over_holds_back_by_itself(pressed: Pair) -> None:
    """Prefill keeps its blocks until decode has read them: the router counts nothing."""
    made = pressed.bench
    pressed.decode.mode = "off"
    await made.eventually(
        lambda: made.http.get("/health"),
        lambda answer: answer.json()["sides"]["decode"]["pulling"] == 0,
    )
    pressed.decode.scripts = [full := Script(until=asyncio.Event())]
    first = call(made)
    await seen_by(made, pressed.decode)
    assert await made.metric(tokens_of("prefill-0")) == 0
    assert (await made.chat(session="other")).status_code == 200
    assert results(made) == []
    assert full.until is not None
    full.until.set()
    await first


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"handover_share": 0.0}, id="off"),
        pytest.param({"handover_share": 100.0}, id="room enough"),
        pytest.param({"num_blocks": 0}, id="unknown size"),
    ],
)
async def test_nobody_waits_without_a_bound(change: dict[str, Any]) -> None:
    """By its setting, by its size, or because the engine does not say how large it is."""
    num_blocks = change.pop("num_blocks", ONE_PROMPT)
    async with fake_pair() as ([prefill], [decode]):
        prefill.num_blocks = num_blocks
        async with bench(prefill, decode, **{"handover_share": 1.0, **change}) as made:
            decode.scripts = [full := Script(until=asyncio.Event())]
            first = call(made)
            await seen_by(made, decode)
            assert (await made.chat(session="other")).status_code == 200
            assert full.until is not None
            full.until.set()
            await first


async def test_after_the_longest_wait_a_prompt_goes_all_the_same() -> None:
    """Never an error, and counted."""
    async with fleet(handover_wait_s=0.02) as (made, _, [decode]):
        decode.scripts = [full := Script(until=asyncio.Event())]
        first = call(made)
        await seen_by(made, decode)
        assert (await made.chat(session="other")).status_code == 200
        assert results(made) == ["late"]
        assert decode.asked == [], "nobody waits any more"
        assert full.until is not None
        full.until.set()
        await first


async def test_a_prompt_larger_than_the_limit_goes_alone(pressed: Pair) -> None:
    """It does not wait for room that there never will be."""
    large = [user("What is this? " * 200)]
    answer = await pressed.bench.chat(session="s", messages=large)
    assert answer.json()["usage"]["prompt_tokens"] > 4 * ONE_PROMPT
    assert results(pressed.bench) == []


async def test_the_limit_of_each_prefill_engine_is_shown(pressed: Pair) -> None:
    """Its share of what the engine says that its pool holds."""
    text = (await pressed.bench.http.get("/metrics")).text
    lines = [line for line in text.splitlines() if line.startswith("turncache_router_handover_")]
    assert 'turncache_router_handover_tokens{engine="prefill-0",what="limit"} 100.0' in lines
    assert not [line for line in lines if "decode-0" in line]


def test_a_bound_in_front_of_single_engines_has_no_effect() -> None:
    """Whoever sets one is told so; nobody is told of a default."""
    engines = [{"name": "e", "side": "single", "url": "http://127.0.0.1:1"}]
    assert without_effect(parse_config({"engines": engines})) == []
    (told,) = without_effect(parse_config({"engines": engines, "handover_share": 0.5}))
    assert told.startswith("handover_share = 0.5 has no effect")
