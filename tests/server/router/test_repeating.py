"""Prefill legs that are sent again, because decode found their prompt lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine, Script, fake_pair
from tests.server.router.support import MESSAGES, Bench, bench, outcome_of, streamed
from turncache_server.router.events import EngineChanged, PrefillRepeated
from turncache_server.router.plan import EngineView, Side, Snapshot
from turncache_server.router.repeating import MAX_AT_ONCE, MAX_REPEATS, next_engine

pytestmark = pytest.mark.anyio
HURRY: dict[str, Any] = {"repeat_after_s": 0.005}


def decoded(decode: FakeEngine) -> tuple[int, int]:
    """Return how many tokens of the last prompt decode computed, and how many there were."""
    reply = list(decode.replies.values())[-1]
    return reply.computed, reply.prompt


def like_no_other(number: int) -> list[dict[str, Any]]:
    """Return messages that have nothing in common with others."""
    return [{"role": "user", "content": f"{number:03}. Something else altogether. " * 3}]


async def losing_all(
    running: Bench, prefill: FakeEngine, decode: FakeEngine, num_calls: int
) -> tuple[list[asyncio.Task[Any]], asyncio.Semaphore]:
    """Begin calls whose prompts are all lost; return them, and what lets decode look for one."""
    prefill.loses = num_calls
    decode.turns = turns = asyncio.Semaphore(0)
    calls = [
        asyncio.create_task(running.chat(session=f"s{number}", messages=like_no_other(number)))
        for number in range(num_calls)
    ]
    await running.eventually(lambda: len(decode.seen), lambda seen: seen == num_calls)
    return calls, turns


async def repeats(running: Bench) -> dict[str, float]:
    """Return how the repeats have ended."""
    metric = "turncache_router_repeated_prefills_total"
    results = ("done", "failed", "late", "left", "no_engine")
    counted = [(r, await running.metric(f'{metric}{{result="{r}"}}')) for r in results]
    return {result: count for result, count in counted if count}


async def test_a_lost_prompt_is_prefilled_again_and_pulled() -> None:
    """Decode computes the tail; the outcome is that of the leg whose KV was used."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        prefill.loses = 1
        answer = await running.chat(session="s")
        first, again = prefill.seen
        assert first.raw == again.raw
        assert first.headers["x-request-id"] != again.headers["x-request-id"]
        (leg,) = decode.seen
        assert (leg.xargs["tc_repeat_s"], "tc_repeat_above" in leg.xargs) == (30.0, False)
        assert not {"tc_repeat_s", "tc_repeat_above"} & first.xargs.keys()
        computed, prompt = decoded(decode)
        assert computed < prompt
        outcome = outcome_of(answer)
        assert outcome.computed == outcome.prompt
        assert outcome.lost > 0
        record = await running.record(answer)
        assert (record["repeats"], record["outcome"]["lost"]) == (1, outcome.lost)
        assert await repeats(running) == {"done": 1}


async def test_a_streamed_answer_is_none_the_wiser() -> None:
    """Headers of a stream come at once, its first event with the first token."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        prefill.loses = 1
        message = await streamed(running.openai, model="fake", messages=MESSAGES)
        assert message["content"].startswith("This is answer")
        assert len(prefill.seen) == 2


async def test_a_response_whose_first_event_says_nothing() -> None:
    """It comes before decode has looked for the prompt: the leg is watched all the same."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        prefill.loses = 1
        answer = await running.http.post(
            "/v1/responses",
            json={"model": "fake", "input": "Where does Laura live? " * 8, "stream": True},
        )
        assert "response.completed" in answer.text
        assert len(prefill.seen) == 2
        record = await running.record(answer)
        assert record["outcome"]["computed"] == record["outcome"]["prompt"]
        assert record["outcome"]["lost"] > 0


async def test_another_engine_repeats_what_the_first_one_does_not_take() -> None:
    """Decode hears whom to pull from; the engine that is full is told of, and no failed call."""
    async with (
        fake_pair(prefills=2) as (prefills, [decode]),
        bench(*prefills, decode, **HURRY) as running,
    ):
        await running.chat(session="s")
        owner, other = sorted(prefills, key=lambda engine: -len(engine.seen))
        owner.loses = 1
        owner.scripts += [Script(), Script(status=503)]
        question = {"role": "user", "content": "Something else altogether. " * 6}
        await running.chat(session="s", messages=[question])
        assert (len(owner.seen), len(other.seen)) == (3, 1)
        computed, prompt = decoded(decode)
        assert computed < prompt
        told = [(event.engine, event.result) for event in running.of_kind(PrefillRepeated)]
        assert told == [(owner.name, "failed"), (other.name, "done")]


async def test_what_is_lost_again_is_computed_by_decode() -> None:
    """One engine, one repeat: more work would not help, and the call is answered."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        prefill.loses = 2
        answer = await running.chat(session="s")
        assert answer.status_code == 200
        assert len(prefill.seen) == 2
        computed, prompt = decoded(decode)
        assert computed == prompt
        assert await repeats(running) == {"done": 1, "no_engine": 1}


async def test_a_repeat_that_is_refused_is_the_end_of_it() -> None:
    """The client gets decode's answer, not prefill's error."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        prefill.loses = 1
        prefill.scripts += [Script(), Script(status=400)]
        answer = await running.chat(session="s")
        assert answer.status_code == 200
        assert (await running.record(answer))["repeats"] == 1
        assert await repeats(running) == {"failed": 1, "no_engine": 1}


async def test_a_client_that_leaves_ends_the_repeat_too() -> None:
    """Both legs are broken off, and decode's call waits for nothing any more."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        prefill.loses = 1
        held = Script(until=asyncio.Event())
        prefill.scripts += [Script(), held]
        call = asyncio.create_task(running.chat(session="s"))
        await held.arrived.wait()
        call.cancel()
        await running.eventually(
            lambda: (prefill.num_cancelled, decode.num_cancelled, len(decode.lacking)),
            lambda seen: seen == (1, 1, 0),
        )
        assert await repeats(running) == {"left": 1}


@pytest.mark.parametrize("when", ["before", "waiting", "repeating", "opened"])
async def test_a_leg_that_is_drained_is_cut_off_when_it_waits_for_its_prompt(when: str) -> None:
    """Nobody repeats a prompt for nobody, and decode computes none: it holds nothing yet."""
    settings = {"on_disconnect": "drain", "repeat_after_s": 0.05 if when == "before" else 0.005}
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **settings) as running:
        prefill.loses = 1
        prefill.scripts = [Script(), held := Script(until=asyncio.Event())]
        if when == "opened":
            body = {"model": "fake", "input": "Where does Laura live? " * 8, "stream": True}
            call = asyncio.create_task(running.http.post("/v1/responses", json=body))
        else:
            call = asyncio.create_task(running.chat(session="s", stream=when == "waiting"))
        if when == "before":
            await running.eventually(lambda: decode.lacking, bool)
        else:
            await held.arrived.wait()
        call.cancel()
        await running.eventually(
            lambda: (decode.num_cancelled, len(decode.lacking)), lambda seen: seen == (1, 0)
        )
        assert len(prefill.seen) == (1 if when == "before" else 2)
        assert len(decode.replies) == 0
        assert held.until is not None
        held.until.set()


async def test_a_leg_that_has_its_prompt_is_drained_to_its_end() -> None:
    """An engine that does not survive aborts is not told to end what it works on."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, on_disconnect="drain", **HURRY) as running,
    ):
        decode.scripts.append(slow := Script(pause_after=0))
        call = asyncio.create_task(running.chat(session="s"))
        await running.eventually(lambda: decode.replies, bool)
        call.cancel()
        asked = decode.num_lacking_questions
        await running.eventually(
            lambda: decode.num_lacking_questions, lambda number: number > asked + 1
        )
        slow.resume.set()
        await running.eventually(lambda: decode.num_active, lambda number: number == 0)
        assert decode.num_cancelled == 0


@pytest.mark.parametrize(
    ("settings", "updated"), [({"repeat_prefill_s": 0}, True), ({}, False)], ids=["off", "older"]
)
async def test_without_it_decode_computes(settings: dict[str, Any], updated: bool) -> None:
    """Switched off, or an engine of the version before, which knows neither hint nor question."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, **HURRY, **settings) as running,
    ):
        decode.updated = updated
        slow = Script(until=asyncio.Event())
        decode.scripts.append(slow)
        prefill.loses = 1
        call = asyncio.create_task(running.chat(session="s", stream=True))
        await slow.arrived.wait()
        await asyncio.sleep(0.03)
        assert slow.until is not None
        slow.until.set()
        answer = await call
        assert answer.status_code == 200
        assert len(prefill.seen) == 1
        assert ("tc_repeat_s" in decode.seen[0].xargs) == (not updated)
        assert bool(decode.num_lacking_questions) == (not updated)
        assert await repeats(running) == {}


async def test_an_engine_that_could_not_be_asked_is_promised_nothing() -> None:
    """It would wait for nobody; and one of the version before is not asked at every call."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        decode.updated = False
        slow = Script(until=asyncio.Event())
        decode.scripts.append(slow)
        call = asyncio.create_task(running.chat(session="s", stream=True))
        await running.eventually(lambda: decode.num_lacking_questions, bool)

        async def promised() -> bool:
            await running.chat(session="other")
            return "tc_repeat_s" in decode.seen[-1].xargs

        await running.eventually(promised, lambda found: not found)
        assert decode.num_lacking_questions == 1
        assert slow.until is not None
        slow.until.set()
        assert (await call).status_code == 200


async def test_what_an_engine_was_to_be_promised_is_not_when_it_falls_silent_meanwhile() -> None:
    """Its body was ready while prefill worked; a call that nobody watches is not to wait."""
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **HURRY) as running:
        decode.scripts.append(slow := Script(until=asyncio.Event()))
        first = asyncio.create_task(running.chat(session="first", stream=True))
        await slow.arrived.wait()
        prefill.scripts.append(held := Script(until=asyncio.Event()))
        second = asyncio.create_task(running.chat(session="second", messages=like_no_other(2)))
        await held.arrived.wait()
        decode.updated = False

        async def promised() -> bool:
            await running.chat(session="other")
            return "tc_repeat_s" in decode.seen[-1].xargs

        await running.eventually(promised, lambda found: not found)
        assert held.until is not None
        held.until.set()
        assert (await second).status_code == 200
        leg = decode.seen[-1]
        assert leg.xargs["tc_session"] != decode.seen[-2].xargs["tc_session"]
        assert "tc_repeat_s" not in leg.xargs
        assert slow.until is not None
        slow.until.set()
        assert (await first).status_code == 200


async def test_a_repeat_takes_no_longer_than_decode_waits() -> None:
    """An engine that hangs is left while decode computes the prompt itself."""
    settings = {**HURRY, "repeat_prefill_s": 0.05}
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **settings) as running:
        prefill.loses = 1
        prefill.scripts += [Script(), Script(until=asyncio.Event())]
        decode.scripts.append(computing := Script(pause_after=0))
        call = asyncio.create_task(running.chat(session="s"))
        await running.eventually(lambda: prefill.num_cancelled, bool)
        assert (await repeats(running))["failed"] == 1
        computing.resume.set()
        assert (await call).status_code == 200


async def test_an_engine_repeats_so_many_legs_at_once_and_no_more() -> None:
    """Those that it has lost at one time do not come back to it at one time; all get their turn."""
    num_calls = MAX_AT_ONCE + 2
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, handover_share=0.0, **HURRY) as running,
    ):
        calls, turns = await losing_all(running, prefill, decode, num_calls)
        prefill.max_active = 0
        prefill.default = held = Script(until=asyncio.Event())
        for _ in calls:
            turns.release()
        await running.eventually(lambda: prefill.num_active, lambda now: now == MAX_AT_ONCE)
        assert len(decode.lacking) == num_calls
        await asyncio.sleep(0.05)
        assert len(prefill.seen) == num_calls + MAX_AT_ONCE
        assert prefill.max_active == MAX_AT_ONCE
        assert held.until is not None
        held.until.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * num_calls
        assert await repeats(running) == {"done": num_calls}


async def test_who_waits_for_a_turn_waits_no_longer_than_its_client() -> None:
    """No leg is sent for it, and those that are sent are answered."""
    num_calls = MAX_AT_ONCE + 2
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, handover_share=0.0, **HURRY) as running,
    ):
        calls, turns = await losing_all(running, prefill, decode, num_calls)
        prefill.default = held = Script(until=asyncio.Event())
        for _ in calls:
            turns.release()
        await running.eventually(lambda: prefill.num_active, lambda now: now == MAX_AT_ONCE)
        begun = [leg.body["messages"] for leg in prefill.seen[num_calls:]]
        waiting = [call for n, call in enumerate(calls) if like_no_other(n) not in begun]
        assert len(waiting) == num_calls - MAX_AT_ONCE
        for call in waiting:
            call.cancel()
        left = {"left": len(waiting)}
        await running.eventually(lambda: repeats(running), lambda ended: ended == left)
        assert held.until is not None
        held.until.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        codes = [each.status_code for each in answers if not isinstance(each, BaseException)]
        assert codes == [200] * MAX_AT_ONCE
        assert len(prefill.seen) == num_calls + MAX_AT_ONCE
        assert await repeats(running) == {"done": MAX_AT_ONCE, **left}


async def test_who_waits_for_a_turn_waits_no_longer_than_decode() -> None:
    """No leg is sent for who is late; whoever is let in by one that has ended may send one."""
    num_calls = MAX_AT_ONCE + 2
    settings = {**HURRY, "handover_share": 0.0, "repeat_prefill_s": 0.5}
    async with fake_pair() as ([prefill], [decode]), bench(prefill, decode, **settings) as running:
        calls, turns = await losing_all(running, prefill, decode, num_calls)
        prefill.default = Script(until=asyncio.Event())
        for _ in calls:
            turns.release()
        answers = await asyncio.gather(*calls)
        assert [answer.status_code for answer in answers] == [200] * num_calls
        # Decode has waited since before the router heard of it: its answer may end a repeat first.
        ends = await repeats(running)
        assert sum(ends.values()) == num_calls
        assert set(ends) <= {"failed", "late", "left"}
        late = [event for event in running.of_kind(PrefillRepeated) if event.result == "late"]
        assert len(late) <= num_calls - MAX_AT_ONCE
        assert MAX_AT_ONCE <= len(prefill.seen) - num_calls <= num_calls - len(late)


async def test_an_engine_that_is_silent_for_a_moment_repeats_all_the_same() -> None:
    """One health check that failed is no reason to let decode compute the prompt."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, breaker_failures=1000, **HURRY) as running,
    ):
        prefill.loses = 1
        decode.scripts.append(held := Script(until=asyncio.Event()))
        call = asyncio.create_task(running.chat(session="s"))
        await held.arrived.wait()
        prefill.healthy = False
        await running.eventually(
            lambda: [event.live for event in running.of_kind(EngineChanged)][-1],
            lambda live: not live,
        )
        assert held.until is not None
        held.until.set()
        assert (await call).status_code == 200
        computed, prompt = decoded(decode)
        assert computed < prompt
        assert await repeats(running) == {"done": 1}


async def test_another_decode_engine_hears_who_has_the_prompt_now() -> None:
    """The one before it was told so, and refused then."""
    async with (
        fake_pair(prefills=2, decodes=2) as (prefills, decodes),
        bench(*prefills, *decodes, **HURRY) as running,
    ):
        await running.chat(session="s")
        owner, other = sorted(prefills, key=lambda engine: -len(engine.seen))
        first, second = sorted(decodes, key=lambda engine: -len(engine.seen))
        owner.loses = 1
        owner.scripts += [Script(), Script(status=503)]
        first.scripts.append(Script(status=503, after_pull=True))
        assert (await running.chat(session="s", messages=like_no_other(1))).status_code == 200
        assert (len(owner.seen), len(other.seen)) == (3, 1)
        assert [leg.xargs["tc_source"] for leg in (first.seen[-1], *second.seen)] == [
            owner.name,
            other.name,
        ]


async def test_a_decode_engine_without_a_control_socket_is_offered_nothing() -> None:
    """It could not say that it waits."""
    prefill = FakeEngine("prefill-0", "prefill")
    decode = FakeEngine("decode-0", "decode", fleet=prefill.fleet, control=False)
    await prefill.start()
    await decode.start()
    try:
        async with bench(prefill, decode, **HURRY) as running:
            await running.chat(session="s")
            assert "tc_repeat_s" not in decode.seen[0].xargs
    finally:
        await prefill.close()
        await decode.close()


async def test_only_legs_that_are_silent_are_asked_about() -> None:
    """Quick ones cost no question; a slow one a few, at growing intervals."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, repeat_after_s=0.02) as running,
    ):
        slow = Script(until=asyncio.Event())
        decode.scripts.append(slow)
        call = asyncio.create_task(running.chat(session="s"))
        await running.eventually(lambda: decode.num_lacking_questions, lambda asked: asked >= 2)
        assert slow.until is not None
        slow.until.set()
        await call
        assert await repeats(running) == {}


async def test_the_limit_of_decode_goes_along() -> None:
    """What decode may compute of a prompt it computes, instead of waiting."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, max_new_tokens_on_decode=512, decode_alone_tokens=64) as running,
    ):
        await running.chat(session="s", messages=MESSAGES * 20)
        assert decode.seen[-1].xargs["tc_repeat_above"] == 512


def view(name: str, **changes: Any) -> EngineView:
    """Return a prefill engine."""
    return EngineView(name=name, engine_id=name, side=Side.PREFILL, **changes)


@pytest.mark.parametrize(
    ("now", "tried", "expected"),
    [
        ([view("a"), view("b")], [], "a"),
        ([view("a", live=False), view("b")], [], "b"),
        ([view("a", pulls=False), view("b")], [], "b"),
        ([view("b")], [], "b"),
        ([view("a"), view("b")], ["a"], "b"),
        ([view("a")], ["a"], None),
        ([view("a"), view("b"), view("c")], ["a", "b"], None),
        ([view("a", live=False), view("b", pulls=False)], [], "a"),
        ([view("a", live=False, there=False), view("b", pulls=False)], [], None),
    ],
)
def test_who_repeats_a_leg(
    now: Sequence[EngineView], tried: list[str], expected: str | None
) -> None:
    """Who had it, then another; nobody twice, and only who lives and may be pulled from: one that
    is silent for a moment when nobody else is there.
    """
    planned = [view("b"), view("a"), view("c")]
    chosen = next_engine(planned, "a", tried, Snapshot(engines=tuple(now)))
    assert (None if chosen is None else chosen.name) == expected
    assert len(tried) <= MAX_REPEATS
