"""Retention inside vLLM's scheduler: what it brings, and that it is never in the way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import BLOCK, Conversation, Engine, World, tokens, world
from turncache.protocol import Reason
from turncache_server.control.messages import Peek
from turncache_server.retention.mailbox import Signalled, SwitchMode
from turncache_server.retention.values import Signal

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def made() -> Iterator[World]:
    """A clock and a wire."""
    with world() as made:
        yield made


def retaining(made: World, name: str = "single-0", **kwargs: Any) -> Engine:
    """Make an ordinary engine with ``RetentionConnector``."""
    return Engine(made, name, connector="ClockedRetention", **kwargs)


@MODES
def test_a_session_survives_a_flood_and_stock_loses_it(asynchronous: bool, made: World) -> None:
    """Three times the pool passes between two calls; ours has the history, stock has nothing."""
    ours = retaining(made, "ours", async_scheduling=asynchronous)
    stock = Engine(made, "stock", connector=None, async_scheduling=asynchronous)
    for engine in (ours, stock):
        engine.call("c1", tokens(80), session="s")
        engine.flood(3 * engine.num_blocks)
    assert ours.hit(tokens(82)) == 80
    assert stock.hit(tokens(82)) == 0
    ours.call("c2", tokens(100), session="s")
    assert (ours.record("c2").local, ours.record("c2").lost) == (80, 0)
    ours.assert_no_leak()


@MODES
def test_an_answer_that_stops_itself_counts_no_block_that_was_never_full(
    asynchronous: bool, made: World
) -> None:
    """The step that was scheduled before the stop was seen writes nothing that is kept."""
    engine = retaining(made, async_scheduling=asynchronous)
    prompt = tokens(3 * BLOCK)
    history = engine.call("first", prompt, session="s", max_tokens=64, stop_after=BLOCK)
    assert len(history) == 4 * BLOCK, "the answer's last token fills a block"
    engine.call("second", [*history, *tokens(3, start=5)], session="s")
    record = engine.record("second")
    assert (record.local, record.lost, record.reason) == (3 * BLOCK, 0, Reason.OK)


def test_without_sessions_blocks_go_as_in_stock(made: World) -> None:
    """The same ordinary calls leave the same prefixes cached, in the same blocks."""
    ours, stock = retaining(made, "ours"), Engine(made, "stock", connector=None)
    draw = random.Random(7)
    prompts = [tokens(draw.randint(5, 90), start=draw.randint(0, 9)) for _ in range(80)]
    for number, prompt in enumerate(prompts):
        for engine in (ours, stock):
            engine.call(f"r{number}", prompt, max_tokens=1 + number % 7)
        kept = [[b.block_id for b in e.cached(prompt)] for e in (ours, stock)]
        assert kept[0] == kept[1]
    order = [
        [b.block_id for b in e.pool.free_block_queue.get_all_free_blocks()] for e in (ours, stock)
    ]
    assert order[0] == order[1]


def test_final_lets_a_session_go(made: World) -> None:
    """Nothing follows: its blocks are the next to go, whatever it wanted before."""
    engine = retaining(made)
    engine.call("c1", tokens(80), session="s")
    engine.call("c2", tokens(90), session="s", final=True)
    assert engine.extension.gauges()["retained_blocks"] == 0
    engine.flood(2 * engine.num_blocks)
    assert engine.hit(tokens(82)) == 0
    engine.assert_no_leak()


def test_time_lets_a_session_go(made: World) -> None:
    """After its retention a session is ordinary again."""
    engine = retaining(made)
    engine.call("c1", tokens(80), session="s", retain_s=5.0)
    made.now_s += 6
    engine.flood(2 * engine.num_blocks)
    assert engine.hit(tokens(82)) == 0
    engine.assert_no_leak()


@pytest.mark.parametrize(
    ("person_s", "kept_until_s"), [(600, 1200), (7200, 0)], ids=["minutes", "hours"]
)
def test_a_run_that_waits_for_a_person(person_s: float, kept_until_s: float, made: World) -> None:
    """An interrupt of minutes is retained for, twice over; one of hours is demoted at once, and
    the resumed call is computed and right, and retained as any other.
    """
    engine = retaining(made)
    engine.call("asked", tokens(80), session="s")
    engine.extension.mailbox.post(Signalled("s", Signal.WAIT, person_s))
    engine.flood(1)
    wanted = engine.extension.gauges()["retained_blocks"]
    made.now_s += max(kept_until_s - 1, 0)
    engine.flood(2 * engine.num_blocks)
    assert engine.hit(tokens(82)) == (80 if kept_until_s else 0)
    assert bool(wanted) is bool(kept_until_s)
    made.now_s += person_s
    engine.flood(2 * engine.num_blocks)
    assert engine.hit(tokens(82)) == 0
    engine.call("resumed", tokens(80), session="s")
    assert engine.record("resumed").local == 0
    engine.flood(2 * engine.num_blocks)
    assert engine.hit(tokens(82)) == 80
    engine.assert_no_leak()


def test_a_run_that_is_cancelled_in_its_tool(made: World) -> None:
    """Nobody says so: what was retained for the tool goes with its time, and a made-up result
    continues the session.
    """
    engine = retaining(made)
    history = engine.call("calls-a-tool", tokens(80), session="s")
    engine.extension.mailbox.post(Signalled("s", Signal.WAIT, 5.0))
    engine.flood(1)
    assert engine.extension.gauges()["retained_blocks"] > 0
    made.now_s += 121
    engine.flood(1)
    assert engine.extension.gauges()["retained_blocks"] == 0
    engine.call("repaired", [*history, *tokens(9, start=3)], session="s")
    assert engine.record("repaired").lost == 0
    engine.assert_no_leak()


def test_a_signal_from_outside_lets_a_session_go(made: World) -> None:
    """The world may say that a session is over, through the mailbox."""
    engine = retaining(made)
    engine.call("c1", tokens(80), session="s")
    engine.extension.mailbox.post(Signalled("s", Signal.FINAL, None))
    engine.flood(2 * engine.num_blocks)
    assert engine.hit(tokens(82)) == 0
    engine.assert_no_leak()


def test_an_edited_history_keeps_its_common_prefix(made: World) -> None:
    """What both lines share stays; the record says where they part."""
    engine = retaining(made)
    engine.call("c1", tokens(80), session="s")
    edited = tokens(80)
    edited[41] = 3
    engine.call("c2", edited, session="s")
    record = engine.record("c2")
    assert (record.local, record.reason.value, record.at) == (40, "diverged", 40)
    engine.assert_no_leak()


def test_two_sessions_that_share_a_prefix_count_it_once(made: World) -> None:
    """A system prompt stays while either of them wants it."""
    engine = retaining(made)
    shared = tokens(40)
    engine.call("a", [*shared, *tokens(20, start=1)], session="a", retain_s=5.0)
    engine.call("b", [*shared, *tokens(20, start=2)], session="b", retain_s=500.0)
    assert engine.extension.gauges()["retained_blocks"] == 10 + 5 + 5
    made.now_s += 6
    engine.flood(2 * engine.num_blocks)
    assert engine.hit([*shared, 5]) == 40
    engine.assert_no_leak()


@MODES
def test_a_mode_that_is_switched_within_a_step(asynchronous: bool, made: World) -> None:
    """Between the schedule of a step and its processing; the engine goes on without a hitch."""
    engine = retaining(made, async_scheduling=asynchronous)
    engine.call("c1", tokens(80), session="s")
    request = engine.add("c2", tokens(100), session="s", max_tokens=20)
    for mode in ("off", "on", "observe", "on", "off") * 3:
        if engine.busy:
            engine.schedule() if len(engine.flights) < engine.depth else None
        engine.extension.mailbox.post(SwitchMode(mode))
        if engine.flights:
            engine.process()
        engine.check_free()
    engine.run()
    assert request.is_finished()
    assert engine.extension.mode.value == "off"
    assert engine.extension.gauges()["retained_blocks"] == 0
    engine.assert_no_leak()


def test_observe_leaves_the_engine_as_stock(made: World) -> None:
    """It counts what was lost, and blocks go in vLLM's own order."""
    ours = retaining(made, "ours", settings={"mode": "observe"})
    stock = Engine(made, "stock", connector=None)
    for engine in (ours, stock):
        engine.call("c1", tokens(80), session="s")
        engine.flood(3 * engine.num_blocks)
        engine.call("c2", tokens(100), session="s")
    assert (ours.record("c2").local, ours.record("c2").lost) == (0, 80)
    order = [
        [b.block_id for b in e.pool.free_block_queue.get_all_free_blocks()] for e in (ours, stock)
    ]
    assert order[0] == order[1]


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_retained_blocks_can_always_be_had(seed: int, asynchronous: bool, made: World) -> None:
    """A pool that is nearly full, a thousand random steps: every free block is a free block."""
    draw = random.Random(seed)
    engine = retaining(
        made,
        num_blocks=20,
        max_model_len=72,
        max_requests=4,
        batched_tokens=draw.choice([8, 24, 64]),
        async_scheduling=asynchronous,
        settings={"retain_budget": 1.0, "tenant_budget": 1.0, "retain_default_s": 1000},
    )
    chats = [Conversation(f"s{number}") for number in range(5)]
    live: dict[str, Any] = {}
    for number in range(1000):
        live = {r: q for r, q in live.items() if not q.is_finished()}
        if len(live) < 4 and draw.random() < 0.3:
            chat = draw.choice(chats)
            if len(chat.history) > 50:
                chat.history = chat.history[: draw.randint(0, 20)]
            request_id = f"r{number}"
            live[request_id] = engine.add(
                request_id,
                chat.more(draw.randint(1, 12)),
                max_tokens=draw.randint(1, 8),
                session=chat.session if draw.random() < 0.8 else None,
            )
        elif live and draw.random() < 0.03:
            engine.abort(draw.choice(sorted(live)))
        engine.step()
        engine.check_free()
        made.now_s += 0.01
    engine.run()
    assert engine.extension.broken is None
    blocks = engine.pool.get_new_blocks(engine.num_blocks - 1)
    assert len({block.block_id for block in blocks}) == engine.num_blocks - 1
    engine.pool.free_blocks(blocks)
    engine.assert_no_leak()


def test_an_engine_that_nobody_reads_from_looks_at_no_write(made: World) -> None:
    """It knows what a session had, and names no block of it."""
    engine = retaining(made)
    engine.call("c1", tokens(80), session="s")
    reply = engine.source.peek(Peek(session="s", hashes=engine.hashes(tokens(80))))
    assert (reply.block_ids, reply.known) == ([], 80 // BLOCK)
    assert engine.check_named() == 0


def test_the_step_that_frees_a_call_makes_it_wanted_first(made: World) -> None:
    """Right after the hook vLLM frees the blocks: they go onto their shelf at once."""
    engine = retaining(made)
    engine.call("c1", tokens(80), session="s", max_tokens=9)
    queue = engine.pool.free_block_queue
    assert queue.num_retained == 88 // BLOCK
    last = queue.get_all_free_blocks()[-queue.num_retained :]
    # A chain's tail is the first of it to go.
    assert [b.block_id for b in last][::-1][: 80 // BLOCK] == [
        b.block_id for b in engine.cached(tokens(82))
    ]
    engine.assert_no_leak()
