"""What time and expectations do to a lineage."""

from __future__ import annotations

import pytest

from tests.server.retention.support import admit, call, chain, finish, table, wanted
from turncache_server.retention.deadlines import Deadlines
from turncache_server.retention.lineages import Signal
from turncache_server.retention.policy import Cost


def test_retention_ends_at_its_deadline() -> None:
    """The default holds where the call asks for nothing; the hashes stay known."""
    lineages = table(retain_default_s=120)
    call(lineages, "s", "abc", now_s=10)
    assert lineages.expire(129.9).changed == ()
    assert wanted(lineages) == {0, 1, 2}
    assert lineages.expire(130).changed == (2, 1, 0)
    assert wanted(lineages) == set()
    assert admit(lineages, "s", "abc").known_blocks == 3


def test_a_longer_wish_is_cut_and_reported() -> None:
    """In words, with both times."""
    lineages = table(retain_max_s=60)
    effect = call(lineages, "s", "abc", retain_s=100)
    assert effect.clipped == "retention of 100 s cut to 60 s"
    lineages.expire(60)
    assert wanted(lineages) == set()
    assert lineages.stats().clipped_total == 1


@pytest.mark.parametrize(
    ("expect_s", "until_s"),
    [(None, 120), (10, 120), (100, 200), (9000, 3600)],
    ids=["unknown", "soon", "later", "beyond the limit"],
)
def test_without_a_wish_retention_covers_twice_the_expected_wait(
    expect_s: float | None, until_s: float
) -> None:
    """At least the default, at most the limit."""
    lineages = table()
    assert call(lineages, "s", "a", expect_s=expect_s).clipped is None
    lineages.expire(until_s - 0.1)
    assert wanted(lineages) == {0}
    lineages.expire(until_s)
    assert wanted(lineages) == set()


def test_nothing_of_a_session_expires_while_a_call_is_in_flight() -> None:
    """Time counts again when the last call has ended."""
    lineages = table(retain_default_s=10)
    call(lineages, "s", "abc")
    first = admit(lineages, "s", "abcd", now_s=1)
    second = admit(lineages, "s", "xyz", now_s=1)
    lineages.expire(50)
    lineages.cancel(first, now_s=50)
    lineages.expire(100)
    assert wanted(lineages) == {0, 1, 2}
    lineages.cancel(second, now_s=100)
    assert wanted(lineages) == {0, 1, 2}
    lineages.expire(110)
    assert wanted(lineages) == set()


def test_a_call_that_never_ends_does_not_keep_its_session_for_ever() -> None:
    """After the longest retention it no longer counts as in flight."""
    lineages = table(retain_default_s=10, retain_max_s=100)
    call(lineages, "s", "abc")
    admit(lineages, "s", "abcd", now_s=5)
    lineages.expire(104.9)
    assert wanted(lineages) == {0, 1, 2}
    lineages.expire(105)
    assert wanted(lineages) == set()
    assert lineages.kept(105) == []


def test_a_cancelled_call_restarts_the_retention() -> None:
    """A retry is likely."""
    lineages = table(retain_default_s=10)
    call(lineages, "s", "abc")
    lineages.cancel(admit(lineages, "s", "abcd", now_s=9), now_s=9)
    lineages.expire(18.9)
    assert wanted(lineages) == {0, 1, 2}
    lineages.expire(19)
    assert wanted(lineages) == set()


def test_a_wait_signal_extends_the_retention_to_cover_the_wait() -> None:
    """Never shortens it."""
    lineages = table(retain_default_s=10)
    call(lineages, "s", "abc", retain_s=50)
    lineages.signal("s", Signal.WAIT, expect_s=None, now_s=1)
    lineages.expire(49)
    assert wanted(lineages) == {0, 1, 2}
    lineages.signal("s", Signal.WAIT, expect_s=100, now_s=49)
    lineages.expire(248)
    assert wanted(lineages) == {0, 1, 2}
    lineages.expire(249)
    assert wanted(lineages) == set()


@pytest.mark.parametrize(("expect_s", "kept"), [(3599, {0, 1, 2}), (3600, set()), (9000, set())])
def test_a_wait_that_outlasts_every_retention_is_not_retained_for(
    expect_s: float, kept: set[int]
) -> None:
    """What is let go is ordinary, and the session's next call is retained as any other."""
    lineages = table(retain_max_s=3600)
    call(lineages, "s", "abc", retain_s=3600)
    effect = lineages.signal("s", Signal.WAIT, expect_s=expect_s, now_s=1)
    assert wanted(lineages) == kept
    assert effect.dead == ()
    call(lineages, "s", "abcd", now_s=9000)
    assert wanted(lineages) == {0, 1, 2, 3}


def test_a_wait_of_hours_takes_nothing_from_a_call_in_flight() -> None:
    """A notice that comes late leaves alone what the next call is at."""
    lineages = table()
    call(lineages, "s", "abc")
    admit(lineages, "s", "abcd", now_s=1)
    lineages.signal("s", Signal.WAIT, expect_s=9000, now_s=1)
    assert wanted(lineages) == {0, 1, 2}


def test_a_cancel_signal_lets_go_until_the_next_call_ends() -> None:
    """A call in flight is not bound by it."""
    lineages = table()
    call(lineages, "s", "abc")
    running = admit(lineages, "s", "abc")
    effect = lineages.signal("s", Signal.CANCEL, expect_s=None, now_s=1)
    assert effect.changed == (2, 1, 0)
    finish(lineages, running, chain("abcd"), now_s=2)
    assert wanted(lineages) == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", list(Signal))
def test_a_signal_about_an_unknown_session_changes_nothing(kind: Signal) -> None:
    """Signals come from outside and may be late."""
    lineages = table()
    assert lineages.signal("nobody", kind, expect_s=1, now_s=1).changed == ()
    assert lineages.stats().sessions == 0


def test_expectations_that_were_late_three_times_are_ignored() -> None:
    """By more than three times the expected wait, in a row; a true one restores belief."""
    lineages = table(policy=Cost(unknown_s=30))

    def is_believed(now_s: float) -> bool:
        """Come back and expect the next call in 10 s, beside a new session's 20 s."""
        call(lineages, "s", "abc", now_s=now_s, retain_s=3000, expect_s=10)
        call(lineages, f"new at {now_s}", "xyz", first_block=100, now_s=now_s, expect_s=20)
        mine, new = lineages.keeper(0), lineages.keeper(100)
        order = [each for each in lineages.victims(now_s) if each in {mine, new}]
        return order == [new, mine]

    assert [is_believed(now_s) for now_s in (0, 100, 200)] == [True, True, True]
    late = admit(lineages, "s", "abc", now_s=300)
    assert late.expectation_ratio == 10
    lineages.cancel(late, now_s=300)
    assert not is_believed(300)
    assert is_believed(311)


def test_a_deadline_that_is_set_anew_replaces_the_old_one() -> None:
    """Earlier or later, and the heap does not grow with it."""
    deadlines = Deadlines()
    for due_s in range(1000):
        deadlines.set(1, float(due_s))
    assert deadlines.pop_due(998) is None
    assert deadlines.pop_due(999) == 1
    assert deadlines.pop_due(10_000) is None
    deadlines.set(2, 5)
    deadlines.discard(2)
    assert deadlines.pop_due(5) is None
    assert len(deadlines) == 0
