"""What is remembered is bounded."""

from __future__ import annotations

from tests.server.retention.support import admit, call, chain, finish, table, wanted
from turncache_server.retention.lineages import KNOWN_POOLS
from turncache_server.retention.registry import MOST_LOOKS


def test_the_least_recently_used_session_is_forgotten() -> None:
    """Its blocks become unwanted, which the next effect reports."""
    lineages = table(max_sessions=2)
    call(lineages, "a", "aa", first_block=0)
    call(lineages, "b", "bb", first_block=10)
    admit(lineages, "a", "aa")
    admit(lineages, "c", "cc")
    assert lineages.stats().sessions == 2
    assert wanted(lineages) == {0, 1}
    assert lineages.expire(0).changed == (11, 10)
    assert lineages.expire(0).changed == ()
    assert lineages.stats().sessions_forgotten_total == 1


def test_sessions_in_flight_are_forgotten_last() -> None:
    """They are the ones that are certain to be used."""
    lineages = table(max_sessions=2)
    admit(lineages, "a", "aa")
    call(lineages, "b", "bb")
    admit(lineages, "c", "cc")
    assert admit(lineages, "a", "aa").new_session is False
    admit(lineages, "d", "dd")
    assert lineages.stats().sessions == 2


def test_calls_that_retain_nothing_make_no_waiting_session_forgotten() -> None:
    """An agent's tool runs, and meanwhile others pass, each under a name of its own."""
    lineages = table(max_sessions=8, num_blocks=64)
    for number in range(4):
        call(lineages, f"agent{number}", "ab", first_block=10 * number, tenant=f"t{number}")
    for number in range(200):
        call(lineages, f"s{number}", f"{number:04}", first_block=50, retain_s=0)
        assert lineages.stats().sessions <= 8
    assert wanted(lineages, 64) == {10 * number + place for number in range(4) for place in (0, 1)}
    assert all(lineages.knows(f"agent{number}") for number in range(4))


def test_sessions_that_never_come_back_are_forgotten_once_they_want_nothing() -> None:
    """However many they are: those that are spared have their turn when their time is over."""
    lineages = table(max_sessions=8, num_blocks=64, retain_default_s=10)
    for number in range(100):
        call(lineages, f"s{number}", f"{number:04}", first_block=4 * (number % 16), now_s=number)
        lineages.expire(number)
        assert lineages.stats().sessions <= 8
    lineages.expire(200)
    assert wanted(lineages, 64) == set()
    call(lineages, "next", "x", retain_s=0)
    assert lineages.stats().sessions == 8


def test_of_many_sessions_that_all_want_something_the_oldest_go_first() -> None:
    """However many have to be looked at: whoever was used again is not among them."""
    most = 2 * MOST_LOOKS + 100
    lineages = table(num_blocks=4 * most, max_sessions=most)
    for number in range(most):
        call(lineages, f"s{number}", "a", first_block=number)
    call(lineages, "s3", "ab", first_block=3)
    for number in range(50):
        call(lineages, f"t{number}", "a", first_block=2 * most + number)
    forgotten = [number for number in range(most) if not lineages.knows(f"s{number}")]
    assert forgotten == [number for number in range(51) if number != 3]


def test_a_session_at_rest_is_found_behind_many_that_want_something() -> None:
    """At the latest when the others have been looked at once."""
    most = 2 * MOST_LOOKS + 100
    lineages = table(num_blocks=4 * most, max_sessions=most)
    for number in range(most - 1):
        call(lineages, f"s{number}", "a", first_block=number)
    call(lineages, "rests", "a", first_block=most, retain_s=0)
    for number in range(3):
        call(lineages, f"t{number}", "a", first_block=2 * most + number)
    assert not lineages.knows("rests")
    assert lineages.knows("s2")


def test_remembered_hashes_are_bounded_in_pools() -> None:
    """However many sessions never come back."""
    lineages = table(num_blocks=16)
    for number in range(100):
        call(lineages, f"s{number}", f"{number:03}" + "x" * 13, retain_s=0)
        assert lineages.stats().known_blocks <= KNOWN_POOLS * 16
    assert lineages.stats().sessions == KNOWN_POOLS


def test_nothing_is_left_of_sessions_that_have_ended() -> None:
    """Neither wants nor charges nor deadlines."""
    lineages = table()
    for number in range(50):
        call(lineages, f"s{number}", f"{number}", first_block=number, tenant="t")
        call(lineages, f"s{number}", f"{number}x", first_block=number, tenant="t", final=True)
    stats = lineages.stats()
    assert (stats.sessions, stats.lineages, stats.known_blocks, stats.wanted_blocks) == (0,) * 4
    assert lineages.board.charged == {}
    assert lineages.board.wanting == {}
    assert len(lineages._deadlines) == 0


def test_clearing_wants_nothing_and_remembers_everything() -> None:
    """Mode off and prefix-cache resets lose blocks, not what was computed."""
    lineages = table()
    call(lineages, "s", "abc")
    call(lineages, "t", "xyz", first_block=10, handover=True)
    admit(lineages, "s", "abc")
    assert set(lineages.clear().changed) == {0, 1, 2, 10, 11, 12}
    assert wanted(lineages) == set()
    assert lineages.stats().handovers == 0
    assert admit(lineages, "s", "abcd").known_blocks == 3


def test_an_evicted_block_leaves_every_chain() -> None:
    """It is counted, and a new content of the block is not wanted."""
    lineages = table()
    call(lineages, "s", "abc")
    call(lineages, "t", "abcd")
    lineages.evicted(2)
    assert wanted(lineages) == {0, 1, 3}
    lineages.evicted(7)
    assert lineages.stats().evicted_wanted_blocks_total == 1
    assert lineages.stats().wanted_blocks == 3


def test_a_want_of_overwritten_content_is_swept_out() -> None:
    """A block that was written again has another epoch, of which nobody was told."""
    lineages = table()
    call(lineages, "s", "abc")
    rewritten = [*chain("abc")[:2], chain("abZ", epoch=2)[2]]
    finish(lineages, admit(lineages, "t", "abZ"), rewritten)
    assert wanted(lineages, epoch=1) == {0, 1}
    assert wanted(lineages, epoch=2) == {2}
    assert lineages.stats().wanted_blocks == 3
    call(lineages, "t", "abZ", final=True)
    assert wanted(lineages) == {0, 1}
    assert wanted(lineages, epoch=2) == set()
    assert lineages.stats().wanted_blocks == 2
    lineages.expire(1e6)
    assert lineages.board.wanting == {}


def test_a_chain_at_an_older_epoch_wants_nothing_of_a_newer_content() -> None:
    """The call's block was taken and written by another before its end was told."""
    lineages = table()
    call(lineages, "s", "ab")
    finish(lineages, admit(lineages, "t", "xy"), chain("xy", epoch=0))
    assert wanted(lineages) == {0, 1}
    assert wanted(lineages, epoch=0) == set()
