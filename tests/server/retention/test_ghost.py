"""The ghost: what it says would have been kept, and why not."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.server.retention.ghost_calls import (
    BLOCK,
    TEXTS,
    arrived,
    ended,
    flood,
    serve,
    spec,
)
from turncache_server.retention.events import (
    Forgotten,
    Signalled,
    Started,
    TailVerified,
    Ticked,
)
from turncache_server.retention.ghost import MAX_OPEN_CALLS, Ghost
from turncache_server.retention.ghost_pool import Fate
from turncache_server.retention.lru import Lru
from turncache_server.retention.values import Signal


def test_a_session_that_a_flood_pushed_out_would_have_been_kept() -> None:
    """Computed again in reality and in the stock pool; not with retention."""
    ghost = Ghost(spec())
    serve(ghost, "abcdef", "gh", session="s")
    flood(ghost, 40)
    call = serve(ghost, "abcdefghij", session="s")
    assert (call.seen, call.again) == (8 * BLOCK, 8 * BLOCK)
    assert (call.stock, call.retention) == (0, 8 * BLOCK)
    assert ghost.totals["again_tokens_retention"] == 0
    assert ghost.totals["again_tokens_stock"] == 8 * BLOCK


def test_calls_without_a_session_are_counted_as_well() -> None:
    """What is computed again needs no session: the first number is there without any hint."""
    ghost = Ghost(spec())
    serve(ghost, "abcd")
    flood(ghost, 40)
    call = serve(ghost, "abcdef")
    assert (call.seen, call.again, call.retention) == (4 * BLOCK, 4 * BLOCK, 0)
    assert call.fate is Fate.UNWANTED


def test_what_the_engine_really_had_is_not_computed_again() -> None:
    """Reality counts, not the ghost's idea of it."""
    ghost = Ghost(spec())
    serve(ghost, "abcdef", session="s")
    flood(ghost, 40)
    call = serve(ghost, "abcdefgh", session="s", local=4 * BLOCK, returned=BLOCK)
    assert (call.again, call.stock) == (BLOCK, 0)


def test_twice_the_pool_holds_what_one_pool_loses() -> None:
    """A flood of one and a half pools."""
    ghost = Ghost(spec(num_blocks=20))
    serve(ghost, "abcdef", session=None)
    flood(ghost, 24)
    call = serve(ghost, "abcdefg")
    assert (call.stock, call.double) == (0, 6 * BLOCK)


def test_host_tiers_of_several_sizes_hold_different_amounts() -> None:
    """By bytes of a block; a tier that is too small helps nothing."""
    ghost = Ghost(spec(block_bytes=10**8, host_gb=(1.0, 10.0)))
    serve(ghost, "abcdef")
    flood(ghost, 40)
    call = serve(ghost, "abcdefg")
    assert call.host == ((1.0, 0), (10.0, 6 * BLOCK))
    assert ghost.totals["again_tokens_host_1gb"] == 6 * BLOCK
    assert ghost.totals["again_tokens_host_10gb"] == 0


def test_without_the_size_of_a_block_there_is_no_host_tier() -> None:
    """No number is better than a made-up one."""
    ghost = Ghost(spec(host_gb=(64.0,)))
    assert serve(ghost, "abc").host == ()


@pytest.mark.parametrize(
    ("limits", "ending", "wait_s", "fate"),
    [
        ({}, {"retain_s": 5.0}, 6.0, Fate.EXPIRED),
        ({"retain_budget": 0.1}, {"retain_s": 500.0}, 1.0, Fate.OVER_BUDGET),
        ({}, {"retain_s": 0.0}, 1.0, Fate.UNWANTED),
        ({}, {"final": True}, 1.0, Fate.UNWANTED),
    ],
)
def test_the_ghost_says_why_it_would_not_have_kept(
    limits: dict[str, float], ending: dict[str, float | bool], wait_s: float, fate: Fate
) -> None:
    """Each way to lose a block has its reason."""
    ghost = Ghost(spec(limits=limits))
    serve(ghost, "abcdef", session="s", **ending)
    ghost.take(Ticked(wait_s, 0, 0.0))
    flood(ghost, 60)
    call = serve(ghost, "abcdefgh", session="s", now_s=wait_s)
    assert call.fate is fate
    assert ghost.totals[f"unkept_tokens_{fate}"] == call.seen - call.retention > 0


def test_a_pool_that_is_too_small_for_what_is_wanted_evicts() -> None:
    """Nothing of the rules' doing: there was no other block left."""
    ghost = Ghost(spec(num_blocks=16))
    serve(ghost, "abcdef", session="s", retain_s=10.0)
    serve(ghost, "uvwxyz", session="t", retain_s=500.0)
    serve(ghost, "0123456", session="u", retain_s=500.0)
    call = serve(ghost, "abcdefgh", session="s")
    assert call.fate is Fate.EVICTED


def test_an_answer_is_computed_again_by_prefill_once() -> None:
    """What decode has generated is what a return would bring, at the next call only."""
    ghost = Ghost(spec())
    serve(ghost, "abc", "de", session="s")
    second = serve(ghost, "abcdef", session="s")
    third = serve(ghost, "abcdefgh", session="s")
    assert (second.from_answers, third.from_answers) == (2 * BLOCK, 0)


def test_a_session_that_breaks_its_own_prefix_is_found() -> None:
    """Where it left its chain, and how much of what it had would have been the same."""
    ghost = Ghost(spec())
    serve(ghost, "abcdefgh", session="s")
    call = serve(ghost, "abXdefghij", session="s")
    assert (call.diverged_at, call.rewritten) == (2 * BLOCK, 6 * BLOCK)
    assert ghost.totals["rewritten_tokens"] == 6 * BLOCK


def test_an_answer_that_the_client_leaves_out_breaks_nothing() -> None:
    """Reasoning is stripped, answers are tokenised anew: the last prompt counts."""
    ghost = Ghost(spec())
    serve(ghost, "abcd", "efgh", session="s")
    call = serve(ghost, "abcdXY", session="s")
    assert (call.diverged_at, call.rewritten) == (4 * BLOCK, 0)


def test_a_reset_forgets_what_blocks_hold_but_not_what_was_seen() -> None:
    """What is computed after it is computed again."""
    ghost = Ghost(spec())
    serve(ghost, "abcdef", session="s")
    ghost.take(arrived("open", "xyz", session="t"))
    ghost.take(Started("open", 0.0, 0))
    ghost.take(Forgotten(1.0))
    assert ghost.take(ended("open", "xyz")) is None
    call = serve(ghost, "abcdef1", session="s")
    assert (call.stock, call.double, call.retention, call.again) == (0, 0, 0, 6 * BLOCK)
    assert ghost.gauges()["calls_in_flight"] == 0


def test_the_world_outside_reaches_the_ghost() -> None:
    """A session that is over is let go, as in mode on."""
    ghost = Ghost(spec())
    serve(ghost, "abcdef", session="s")
    assert ghost.gauges()["retained_blocks"] == 6
    ghost.take(Signalled(0.0, "s", Signal.FINAL, None))
    assert ghost.gauges()["retained_blocks"] == 0


def test_a_hand_over_ends_when_its_tail_is_verified() -> None:
    """Until then it is above everything."""
    ghost = Ghost(spec())
    serve(ghost, "abcdef", session="s", handover=True, retain_s=0.0)
    assert ghost.gauges()["retained_blocks"] == 6
    ghost.take(TailVerified(0.0, b"abcdef"))
    assert ghost.gauges()["retained_blocks"] == 0


def test_a_call_that_was_aborted_before_its_end_leaves_what_was_complete() -> None:
    """The rest of its blocks holds nothing."""
    ghost = Ghost(spec())
    serve(ghost, "abcdef", session="s", answered=False, complete=2)
    assert serve(ghost, "abcdefg", session="s").retention == 2 * BLOCK


def test_calls_that_never_start_or_never_arrived_are_no_calls() -> None:
    """Aborted in the queue; begun before the recording."""
    ghost = Ghost(spec())
    ghost.take(arrived("r", "abc", session="s"))
    assert ghost.take(ended("r", "abc", answered=False, complete=0)) is None
    assert ghost.take(Started("other", 0.0, 0)) is None
    assert ghost.take(ended("other", "abc")) is None
    assert ghost.totals["calls"] == 0
    assert ghost.gauges()["calls_in_flight"] == 0


def test_calls_that_the_engine_never_ends_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded whatever the engine forgets to say."""
    monkeypatch.setattr("turncache_server.retention.ghost.MAX_OPEN_CALLS", 3)
    assert MAX_OPEN_CALLS > 3
    ghost = Ghost(spec())
    for number in range(9):
        ghost.take(arrived(f"r{number}", f"{number}ab", session=f"s{number}"))
        ghost.take(Started(f"r{number}", 0.0, 0))
    assert ghost.gauges()["calls_in_flight"] == 3
    assert ghost.retention.num_used == 3 * 4


# --- what always holds -----------------------------------------------------------------------

CALLS = st.lists(
    st.tuples(
        TEXTS,
        st.text(alphabet="ab", max_size=2),
        st.sampled_from([None, "s", "t", "u"]),
        st.sampled_from([None, 0.0, 10.0]),
        st.booleans(),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(CALLS)
def test_an_unlimited_pool_computes_nothing_again(
    calls: list[tuple[str, str, str, float, bool]],
) -> None:
    """With room for everything every pool has all that was seen.

    For retention only while nothing is let go: what is no longer wanted is the next to be
    handed out, before blocks that were never used.
    """
    ghost = Ghost(spec(num_blocks=2000, block_bytes=1000, host_gb=(1.0,)))
    for number, (text, answer, _, _, answered) in enumerate(calls):
        call = serve(ghost, text, answer, session=f"s{number}", answered=answered)
        assert call.stock == call.double == call.retention == call.seen
        assert call.host == ((1.0, call.seen),)
    assert sum(n for name, n in ghost.totals.items() if name.startswith("again_tokens_")) == 0
    assert [pool.short_blocks for pool in ghost._pools] == [0, 0, 0]


@settings(max_examples=40, deadline=None)
@given(st.integers(6, 24), CALLS, st.randoms(use_true_random=False))
def test_no_pool_ever_holds_more_than_its_size(
    num_blocks: int, calls: list[tuple[str, str, str, float, bool]], draw: object
) -> None:
    """Calls overlap, pools run short, and every block is counted once."""
    ghost = Ghost(spec(num_blocks=num_blocks, block_bytes=10**8, host_gb=(0.5,)))
    open_calls: list[tuple[str, str, str]] = []
    for number, (text, answer, session, retain_s, answered) in enumerate(calls):
        request = f"r{number}"
        ghost.take(arrived(request, text, session=session, now_s=float(number)))
        ghost.take(Started(request, float(number), 0))
        open_calls.append((request, text, answer))
        if answered:
            done = open_calls.pop(draw.randrange(len(open_calls)))  # type: ignore[attr-defined]
            ghost.take(ended(*done, now_s=float(number), retain_s=retain_s))
        ghost.take(Ticked(float(number), 0, 0.0))
        for pool, size in zip(ghost._pools, (1, 2, 1), strict=True):
            assert 0 <= pool.num_retained <= pool.num_free <= size * num_blocks - 1
            assert len(pool.cached()) <= size * num_blocks - 1
        assert all(len(tier) <= 5 for tier in ghost._host)
    for done in open_calls:
        ghost.take(ended(*done))
    assert [pool.num_used for pool in ghost._pools] == [0, 0, 0]


def test_a_bounded_set_forgets_the_tail_of_the_oldest_chain_first() -> None:
    """A head without its tail is worth something; a tail without its head is not."""
    tier = Lru(3)
    tier.store([b"a", b"ab"])
    tier.store([b"x", b"xy"], flag=True)
    assert (b"a" in tier, b"ab" in tier) == (True, False)
    assert (tier.take_flag(b"xy"), tier.take_flag(b"xy"), tier.take_flag(b"a")) == (
        True,
        False,
        False,
    )
