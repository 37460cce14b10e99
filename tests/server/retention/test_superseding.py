"""Which chains a finished call supersedes."""

from __future__ import annotations

import pytest

from tests.server.retention.support import admit, call, chain, finish, table, wanted
from turncache_server.retention.lineages import Signal


def test_a_call_supersedes_the_chain_that_it_continues() -> None:
    """What only the old chain used becomes unwanted, what both use stays."""
    lineages = table()
    call(lineages, "s", "aaaaaaaaab")
    admission = admit(lineages, "s", "aaaaaaaaac")
    blocks = [*chain("aaaaaaaaa"), *chain("aaaaaaaaacc", first_block=20)[9:]]
    effect = finish(lineages, admission, blocks)
    assert effect.superseded
    assert wanted(lineages) == {*range(9), 29, 30}
    assert 9 in effect.changed
    assert lineages.stats().lineages == 1


def test_nine_tenths_supersede_and_less_does_not() -> None:
    """The limit is 90 % of the old chain's blocks."""
    lineages = table()
    call(lineages, "s", "a" * 10)
    assert not call(lineages, "s", "a" * 8 + "bb", first_block=100).superseded
    assert lineages.stats().lineages == 2
    assert call(lineages, "s", "a" * 9 + "c", first_block=200).superseded


def test_another_lineage_of_a_session_leaves_the_first_alone() -> None:
    """A session id alone never makes anything unwanted."""
    lineages = table()
    call(lineages, "s", "aaaa")
    effect = call(lineages, "s", "bbbb", first_block=10)
    assert not effect.superseded
    assert wanted(lineages) == {0, 1, 2, 3, 10, 11, 12, 13}


def test_a_long_chain_supersedes_every_chain_that_it_contains() -> None:
    """Each of them is continued whole."""
    lineages = table()
    call(lineages, "s", "ab", first_block=10)
    call(lineages, "s", "abcdxx", first_block=20)
    assert lineages.stats().superseded_total == 1
    call(lineages, "s", "abcd", first_block=30)
    call(lineages, "s", "abcde", first_block=40)
    assert lineages.stats().lineages == 2
    assert wanted(lineages) == {*range(20, 26), *range(40, 45)}


@pytest.mark.parametrize("announced", [False, True], ids=["by the call", "by a signal"])
def test_a_compaction_supersedes_however_little_it_continues(announced: bool) -> None:
    """The caller says that the old history is not coming back."""
    lineages = table()
    call(lineages, "s", "aabbbbbb")
    if announced:
        lineages.signal("s", Signal.COMPACTION, expect_s=None, now_s=0)
    effect = call(lineages, "s", "aac", first_block=20, compaction=not announced)
    assert effect.superseded
    assert wanted(lineages) == {20, 21, 22}


def test_an_announced_compaction_counts_once() -> None:
    """The call after it makes another lineage again."""
    lineages = table()
    call(lineages, "s", "aaaa")
    lineages.signal("s", Signal.COMPACTION, expect_s=None, now_s=0)
    call(lineages, "s", "bbbb", first_block=10)
    assert not call(lineages, "s", "cccc", first_block=20).superseded


def test_the_ninth_lineage_replaces_the_least_recently_used_one() -> None:
    """Being continued by an admission is a use."""
    lineages = table()
    for number in range(8):
        call(lineages, "s", chr(ord("a") + number) * 2, first_block=10 * number)
    admit(lineages, "s", "aa")
    call(lineages, "s", "zz", first_block=90)
    assert lineages.stats().lineages == 8
    assert wanted(lineages) >= {0, 1, 90, 91}
    assert not wanted(lineages) & {10, 11}


def test_admission_says_what_was_computed_before() -> None:
    """The longest prefix with any lineage, and where the call leaves it."""
    lineages = table()
    assert admit(lineages, "s", "abcd").new_session
    call(lineages, "s", "abcdef")
    call(lineages, "s", "xyz", first_block=50)
    whole = admit(lineages, "s", "abcdefg")
    assert (whole.known_blocks, whole.diverged_at, whole.new_session) == (6, None, False)
    edited = admit(lineages, "s", "abcZZZZ")
    assert (edited.known_blocks, edited.diverged_at) == (3, 3)
    inside = admit(lineages, "s", "abc")
    assert (inside.known_blocks, inside.diverged_at) == (3, None)
    other = admit(lineages, "s", "qqq")
    assert (other.known_blocks, other.diverged_at) == (0, None)
    assert lineages.known_blocks("s", [b"x", b"xy", b"xyQ"]) == 2
    assert lineages.known_blocks("nobody", [b"x"]) == 0


def test_a_call_that_retains_nothing_is_remembered() -> None:
    """Its hashes tell the next call what had been computed before."""
    lineages = table()
    call(lineages, "s", "abcd", retain_s=0)
    assert wanted(lineages) == set()
    assert admit(lineages, "s", "abcde").known_blocks == 4


def test_a_lineage_that_changes_its_tenant_is_charged_to_the_new_one() -> None:
    """No block stays charged to the former tenant."""
    lineages = table()
    call(lineages, "s", "abcd", tenant="one")
    call(lineages, "s", "abcde", tenant="two")
    assert lineages.board.charged == {"two": 5}
