"""``final`` ends a generation."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.server.retention.support import admit, call, chain, finish, table, wanted
from turncache_server.retention.lineages import LineageTable, Signal


def by_call(lineages: LineageTable) -> None:
    """End the session with its last call."""
    call(lineages, "s", "abcde", final=True)


def by_signal(lineages: LineageTable) -> None:
    """End the session from outside a call."""
    lineages.signal("s", Signal.FINAL, expect_s=None, now_s=0)


@pytest.mark.parametrize("end", [by_call, by_signal])
def test_final_lets_everything_of_the_session_go(
    end: Callable[[LineageTable], None],
) -> None:
    """Nothing follows, so nothing is wanted or remembered."""
    lineages = table()
    call(lineages, "s", "abcd")
    call(lineages, "s", "xyz", first_block=10)
    end(lineages)
    assert wanted(lineages) == set()
    assert lineages.stats().sessions == 0
    assert admit(lineages, "s", "abcd").new_session


@pytest.mark.parametrize("end", [by_call, by_signal])
def test_a_call_admitted_before_final_cannot_bring_the_session_back(
    end: Callable[[LineageTable], None],
) -> None:
    """Neither on its own nor into the generation that a later call has opened."""
    lineages = table()
    call(lineages, "s", "ab")
    early = admit(lineages, "s", "abcd")
    end(lineages)
    finish(lineages, early, chain("abcd"))
    assert wanted(lineages) == set()
    late = admit(lineages, "s", "ab")
    assert late.generation > early.generation
    finish(lineages, early, chain("abcd"))
    assert wanted(lineages) == set()
    finish(lineages, late, chain("ab"))
    assert wanted(lineages) == {0, 1}


def test_a_final_call_of_an_ended_generation_ends_no_other() -> None:
    """It was admitted before."""
    lineages = table()
    early = admit(lineages, "s", "ab")
    by_signal(lineages)
    call(lineages, "s", "ab")
    finish(lineages, early, chain("ab"), final=True)
    assert wanted(lineages) == {0, 1}


def test_a_final_call_is_still_handed_over() -> None:
    """Decode must be able to take the prompt, whatever comes after."""
    lineages = table()
    call(lineages, "s", "abc", final=True, handover=True)
    assert wanted(lineages) == {0, 1, 2}
    assert lineages.stats().sessions == 0
    lineages.handed_over(b"abc", now_s=1)
    assert wanted(lineages) == set()


def test_what_another_session_wants_stays_when_one_is_final() -> None:
    """A shared block stays while any lineage wants it, and gets another keeper."""
    lineages = table()
    call(lineages, "s", "abc")
    call(lineages, "t", "abcd")
    keeper = lineages.keeper(0)
    lineages.signal("t", Signal.FINAL, expect_s=None, now_s=0)
    assert wanted(lineages) == {0, 1, 2}
    assert lineages.keeper(0) not in {keeper, None}
    assert lineages.keeper(3) is None
