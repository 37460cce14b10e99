"""The recorder on the extension's hooks, and whether the ghost agrees with the real queue."""

from __future__ import annotations

import random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.server.connector.pool_fakes import FakePool, facts, hash_of, request, step
from tests.server.connector.test_extension import BLOCK_SIZE, NUM_BLOCKS, Desk
from turncache.protocol import Mode
from turncache_server.connector.config import Settings
from turncache_server.connector.extension import Extension
from turncache_server.connector.ghost_process import Frames, GhostTask, encode_events
from turncache_server.connector.observing import ghost_task
from turncache_server.connector.recorder import Recorder
from turncache_server.connector.service import Service
from turncache_server.retention.events import (
    Arrived,
    Ended,
    Forgotten,
    Signalled,
    Started,
    TailVerified,
    Ticked,
)
from turncache_server.retention.ghost import Ghost
from turncache_server.retention.mailbox import HandedOver
from turncache_server.retention.mailbox import Signalled as SignalledCommand
from turncache_server.retention.values import Signal


class Observed(Desk):
    """A desk whose extension writes down what it sees, and a ghost that follows at once."""

    def __init__(self, **values: Any) -> None:
        base: dict[str, Any] = {
            "trust_hints": True,
            "retain_budget": 1.0,
            "tenant_budget": 1.0,
            "policy": "deadline",
        }
        self.now_s = 1000.0
        self.recorder = Recorder()
        made = Settings(**{**base, **values, "mode": Mode(values.get("mode", "observe"))})
        known = facts(num_blocks=NUM_BLOCKS, block_bytes=1000)
        self.extension = Extension(
            known,
            made,
            answered=frozenset({"answered"}),
            clock=lambda: self.now_s,
            recorder=self.recorder,
        )
        self.pool = FakePool(NUM_BLOCKS, True, BLOCK_SIZE)
        self.extension.bind(self.pool)
        self.service = Service(self.extension, fingerprint={})
        self.ghost = Ghost(ghost_task(known, made).spec)

    def follow(self) -> list[Any]:
        """Let the ghost follow; returns the calls that have ended."""
        return [call for event in self.recorder.drain() if (call := self.ghost.take(event))]

    def rest(self) -> None:
        """Let the engine step without work."""
        self.extension.step_scheduled(step())
        self.extension.step_processed()

    def local_blocks(self, call: Any) -> int:
        """Return the leading blocks of a prompt that the real pool has."""
        for place, chain_hash in enumerate(call.block_hashes):
            if self.pool.first_with(chain_hash) is None:
                return place
        return len(call.block_hashes)

    def serve(self, served: Any, status: str = "answered") -> None:
        """Serve a call with what the pool has of it."""
        self.extension.arrived(served)
        blocks = self.admit(served, self.local_blocks(served))
        self.answer(served, blocks, status)
        self.rest()


def test_every_call_is_written_down_with_or_without_a_session() -> None:
    """From its arrival to its end, with what the engine found and what the caller asked for."""
    desk = Observed()
    desk.serve(request("a", session="s", retain_s=7, num_blocks=3))
    desk.serve(request("b", session=None, num_blocks=2, first=50))
    events = desk.recorder.drain()
    assert isinstance(events[0], Forgotten)
    arrivals = [event for event in events if isinstance(event, Arrived)]
    assert [(e.request, e.session, e.prompt) for e in arrivals] == [("a", "s", 13), ("b", None, 9)]
    assert arrivals[0].hashes == tuple(hash_of(n) for n in range(3))
    endings = [event for event in events if isinstance(event, Ended)]
    assert [(e.request, e.retain_s, e.num_blocks, e.complete) for e in endings] == [
        ("a", 7.0, 4, 3),
        ("b", None, 3, 2),
    ]
    assert [e.request for e in events if isinstance(e, Started)] == ["a", "b"]


def test_a_lost_session_is_told_apart_from_what_retention_would_have_had() -> None:
    """The real engine is stock: it has lost the session, and the ghost has not."""
    desk = Observed()
    desk.serve(request("a", session="s", num_blocks=4))
    for number in range(12):
        desk.serve(request(f"f{number}", session=None, num_blocks=4, first=100 + 10 * number))
    desk.serve(request("b", session="s", num_blocks=6))
    call = desk.follow()[-1]
    assert (call.again, call.lost, call.reason) == (16, 16, "evicted")
    assert (call.stock, call.retention) == (0, 16)
    counters = desk.extension.counters()
    assert counters["observed_dropped_events"] == 0
    assert desk.extension.gauges()["observing"] == 1


def test_mode_off_writes_nothing_and_mode_on_only_for_a_trace() -> None:
    """A recording that begins anew begins with an unknown cache."""
    desk = Observed(mode="on")
    desk.serve(request("a"))
    assert desk.recorder.drain() == []
    desk.switch("observe")
    desk.serve(request("b"))
    assert isinstance(desk.recorder.drain()[0], Forgotten)
    desk.switch("off")
    desk.recorder.drain()
    desk.serve(request("c"))
    assert desk.recorder.drain() == []
    assert desk.extension.gauges()["observing"] == 0
    traced = Observed(mode="on", trace_file="/t")
    traced.serve(request("a"))
    assert traced.recorder.drain()


def test_an_extension_that_breaks_off_writes_nothing_more() -> None:
    """Its hooks do nothing any more."""
    desk = Observed()
    desk.extension.break_off("a test")
    desk.serve(request("a"))
    assert [type(event) for event in desk.recorder.drain()] == [Forgotten]


def test_signals_and_verified_tails_are_written_down() -> None:
    """The ghost's sessions hear what the real ones hear."""
    desk = Observed()
    desk.extension.mailbox.post(SignalledCommand("s", Signal.FINAL, None))
    desk.extension.mailbox.post(HandedOver(b"tail"))
    desk.rest()
    kinds = [type(event) for event in desk.recorder.drain()]
    assert kinds == [Forgotten, Signalled, TailVerified, Ticked]


def test_a_cache_reset_is_written_down() -> None:
    """What was cached is gone, in the ghost as well."""
    desk = Observed()
    desk.serve(request("a"))
    desk.follow()
    desk.pool.reset_prefix_cache()
    desk.rest()
    assert Forgotten in {type(event) for event in desk.recorder.drain()}


def test_events_that_find_no_room_are_counted_and_the_ghost_begins_anew() -> None:
    """Nothing wrong is told in silence, and the engine waits for nobody."""
    recorder = Recorder(capacity=3)
    for number in range(5):
        recorder.arrived(request(f"r{number}"), None, float(number))
    assert recorder.dropped == 2
    assert [e.request for e in recorder.drain() if isinstance(e, Arrived)] == ["r0", "r1", "r2"]
    recorder.arrived(request("r5"), None, 5.0)
    assert [type(event) for event in recorder.drain()] == [Forgotten, Arrived]
    recorder.broken = "a test"
    recorder.arrived(request("r6"), None, 6.0)
    assert recorder.drain() == []


def test_the_speed_of_prefill_is_that_of_large_steps() -> None:
    """A step counts from when the engine could begin with it: two may be in flight."""
    recorder = Recorder()
    recorder.step_scheduled(1000, 10.0)
    recorder.step_scheduled(3000, 10.1)
    recorder.step_processed(11.0)
    recorder.step_scheduled(5, 11.0)
    recorder.step_processed(14.0)
    recorder.step_processed(14.5)
    recorder.step_scheduled(0, 20.0)
    ticked = [event for event in recorder.drain() if isinstance(event, Ticked)][-1]
    assert (ticked.prefill_tokens, ticked.prefill_s) == (4000, 4.0)


def test_events_come_out_of_the_pipe_as_they_went_in() -> None:
    """In pieces of any length; hashes are cut to what is told apart."""
    desk = Observed()
    desk.serve(request("a", session="s", tenant="t", priority=7, expect_s=3))
    desk.extension.mailbox.post(SignalledCommand("s", Signal.WAIT, 4.0))
    desk.extension.mailbox.post(HandedOver(b"tail"))
    desk.rest()
    events = desk.recorder.drain()
    data = encode_events(events[:3]) + encode_events(events[3:])
    for size in (1, 7, len(data)):
        frames = Frames()
        out = [e for at in range(0, len(data), size) for e in frames.feed(data[at : at + size])]
        assert [type(event) for event in out] == [type(event) for event in events]
        assert [e for e in out if not isinstance(e, (Arrived, Ended))] == [
            e for e in events if not isinstance(e, (Arrived, Ended))
        ]
        (came,) = (e for e in out if isinstance(e, Arrived))
        assert came.hashes == tuple(hash_of(n)[-16:] for n in range(3))


def test_the_task_of_the_process_survives_its_command_line() -> None:
    """Limits, sizes and header."""
    task = ghost_task(facts(block_bytes=10), Settings(trace_file="/t", trace_file_mb=2))
    assert GhostTask.from_json(task.to_json()) == task


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    policy=st.sampled_from(["deadline", "cost"]),
    budget=st.sampled_from([0.3, 1.0]),
)
def test_the_ghost_keeps_what_mode_on_really_kept(seed: int, policy: str, budget: float) -> None:
    """The same calls, the real extension acting on its pool: the same hashes, after every call.

    The engine steps between calls, as one that serves others does all the time. Calls are
    further apart than orders of the lineages are (``RANK_EVERY_S``): both compute them as
    often, but at times of their own.
    """
    draw = random.Random(seed)
    desk = Observed(
        mode="on", trace_file="/t", policy=policy, retain_budget=budget, tenant_budget=budget
    )
    chats = {f"s{number}": 100 * number for number in range(5)}
    for number in range(60):
        session: str | None = draw.choice([*sorted(chats), None])
        first = 5000 + 10 * number if session is None else chats[session]
        if session is not None and draw.random() < 0.05:
            chats[session] += 20_000  # begins anew: another chain of the same session
        served = request(
            f"r{number}",
            session=session,
            first=first,
            num_blocks=draw.randint(1, 9),
            retain_s=draw.choice([3, 30, 300]),
            final=int(draw.random() < 0.1),
        )
        found = desk.local_blocks(served)
        desk.serve(served, draw.choice(["answered"] * 9 + ["aborted"]))
        (call,) = desk.follow()
        assert call.retention == found * BLOCK_SIZE
        real = {key[:-4] for key in desk.pool.cached_block_hash_to_block._cache}
        assert desk.ghost.retention.cached() == real
        assert desk.ghost.gauges()["retained_blocks"] == desk.extension.gauges()["retained_blocks"]
        desk.now_s += draw.choice([0.3, 1.0, 10.0])
        desk.rest()


@pytest.mark.parametrize("seed", range(3))
def test_the_stock_ghost_agrees_with_the_engine_that_is_only_observed(seed: int) -> None:
    """So the ghost can check itself wherever it runs."""
    draw = random.Random(seed)
    desk = Observed()
    for number in range(120):
        served = request(
            f"r{number}",
            session=draw.choice(["s", "t", None]),
            first=100 * draw.randint(0, 7),
            num_blocks=draw.randint(1, 9),
        )
        found = desk.local_blocks(served)
        desk.serve(served)
        (call,) = desk.follow()
        assert (call.stock, call.local) == (found * BLOCK_SIZE, found * BLOCK_SIZE)
    assert desk.ghost.totals["stock_local_tokens"] == desk.ghost.totals["local_tokens"]
