"""A prompt that decode has not taken yet is kept above everything."""

from __future__ import annotations

from tests.server.retention.support import admit, call, chain, finish, table, wanted


def test_a_handover_is_wanted_until_a_peer_has_verified_it() -> None:
    """Also when the call retains nothing else."""
    lineages = table()
    call(lineages, "s", "abc", retain_s=0, handover=True)
    assert wanted(lineages) == {0, 1, 2}
    assert lineages.handed_over(b"nobody's", now_s=1).changed == ()
    assert lineages.handed_over(b"abc", now_s=1).changed == (2, 1, 0)
    assert wanted(lineages) == set()
    assert lineages.stats().handed_over_total == 1


def test_a_peer_that_computes_the_last_block_itself_ends_it_too() -> None:
    """Of a prompt that fills its last block, a peer verifies one block less."""
    lineages = table()
    call(lineages, "s", "abc", retain_s=0, handover=True)
    lineages.handed_over(b"ab", now_s=1)
    assert wanted(lineages) == set()


def test_an_exact_tail_is_preferred() -> None:
    """A longer prompt that is handed over at the same time stays."""
    lineages = table()
    call(lineages, "s", "abc", retain_s=0, handover=True)
    call(lineages, "t", "abcd", first_block=0, retain_s=0, handover=True)
    lineages.handed_over(b"abc", now_s=1)
    assert wanted(lineages) == {0, 1, 2, 3}


def test_a_handover_ends_by_itself() -> None:
    """A decode engine that has gone leaves nothing behind."""
    lineages = table(handover_s=30)
    call(lineages, "s", "abc", retain_s=0, handover=True)
    lineages.expire(29.9)
    assert wanted(lineages) == {0, 1, 2}
    assert lineages.expire(30).changed == (2, 1, 0)
    stats = lineages.stats()
    assert (stats.handovers, stats.handovers_expired_total) == (0, 1)


def test_the_session_keeps_what_it_wants_after_the_handover() -> None:
    """It becomes keeper, and its blocks are charged to it."""
    lineages = table()
    call(lineages, "s", "abc", handover=True)
    keeper = lineages.keeper(0)
    assert lineages.board.charged == {}
    lineages.handed_over(b"abc", now_s=1)
    assert wanted(lineages) == {0, 1, 2}
    assert lineages.keeper(0) not in {None, keeper}
    assert lineages.board.charged == {None: 3}


def test_budgets_hold_when_the_session_becomes_keeper() -> None:
    """A hand-over is charged to nobody, what comes after it is."""
    lineages = table(num_blocks=10, retain_budget=0.3)
    assert call(lineages, "s", "abcde", handover=True).clipped is None
    effect = lineages.handed_over(b"abcde", now_s=1)
    assert effect.clipped == "2 wanted blocks given up for the pool's budget of 3 blocks"
    assert wanted(lineages, 10) == {0, 1, 2}


def test_a_handover_is_the_last_victim() -> None:
    """After sessions in flight, which come after those that wait."""
    lineages = table()
    call(lineages, "t", "xyz", first_block=10, retain_s=0, handover=True)
    call(lineages, "s", "abc", first_block=0)
    call(lineages, "u", "uvw", first_block=20, retain_s=3000)
    admit(lineages, "s", "abc")
    order = [lineages.keeper(20), lineages.keeper(0), lineages.keeper(10)]
    assert lineages.victims(5) == order


def test_a_shared_block_belongs_to_the_handover() -> None:
    """A session that finishes meanwhile does not become its keeper."""
    lineages = table()
    call(lineages, "s", "ab", retain_s=0, handover=True)
    keeper = lineages.keeper(0)
    finish(lineages, admit(lineages, "t", "ab"), chain("ab"))
    assert lineages.keeper(0) == keeper


def test_an_empty_chain_is_handed_over_without_a_trace() -> None:
    """A prompt shorter than a block has nothing to keep."""
    lineages = table()
    call(lineages, "s", "", handover=True)
    assert lineages.stats().handovers == 0
