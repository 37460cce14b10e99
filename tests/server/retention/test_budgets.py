"""What gives way above a budget."""

from __future__ import annotations

from tests.server.retention.support import admit, call, chain, finish, table, wanted


def test_the_least_valuable_tail_gives_way() -> None:
    """The session whose retention ends first loses its tail, and the effect says so."""
    lineages = table(num_blocks=20, retain_budget=0.5)
    call(lineages, "old", "aaaaaa", retain_s=10)
    effect = call(lineages, "new", "bbbbbb", first_block=10, retain_s=20)
    assert effect.clipped == "2 wanted blocks given up for the pool's budget of 10 blocks"
    assert wanted(lineages, 20) == {0, 1, 2, 3, 10, 11, 12, 13, 14, 15}
    assert set(effect.changed) >= {4, 5}


def test_a_tenant_gives_way_for_its_own_excess_only() -> None:
    """Another tenant's less valuable blocks stay."""
    lineages = table(num_blocks=40, retain_budget=0.5, tenant_budget=0.2)
    call(lineages, "other", "cccc", first_block=30, tenant="other", retain_s=1)
    call(lineages, "s", "aaaaaa", tenant="mine", retain_s=10)
    effect = call(lineages, "t", "bbbbbb", first_block=10, tenant="mine", retain_s=20)
    assert effect.clipped == "4 wanted blocks given up for the tenant's budget of 8 blocks"
    assert wanted(lineages, 40) == {0, 1, *range(10, 16), *range(30, 34)}


def test_sessions_without_a_tenant_share_the_pool() -> None:
    """Where nobody is named, the tenant budget binds nobody."""
    lineages = table(num_blocks=20, retain_budget=0.5, tenant_budget=0.1)
    assert call(lineages, "s", "a" * 10).clipped is None


def test_a_shared_block_counts_once() -> None:
    """Two sessions over one system prompt fit where their sum does not."""
    lineages = table(num_blocks=20, retain_budget=0.3)
    call(lineages, "s", "aaaab")
    blocks = [*chain("aaaa"), *chain("aaaac", first_block=10)[4:]]
    assert finish(lineages, admit(lineages, "t", "aaaac"), blocks).clipped is None
    assert lineages.stats().wanted_blocks == 6


def test_what_several_want_gives_way_last() -> None:
    """Giving up a shared block frees nothing."""
    lineages = table(num_blocks=20, retain_budget=0.25)
    call(lineages, "s", "aaaab", retain_s=1)
    blocks = [*chain("aaaa"), *chain("aaaacc", first_block=10)[4:]]
    finish(lineages, admit(lineages, "t", "aaaacc"), blocks, retain_s=2)
    assert wanted(lineages, 20) == {0, 1, 2, 3, 14}


def test_a_budget_smaller_than_what_is_shared_still_holds() -> None:
    """Then the shared blocks go, tail first."""
    lineages = table(num_blocks=20, retain_budget=0.1)
    for session in ("s", "t", "u"):
        finish(lineages, admit(lineages, session, "aaaa"), chain("aaaa"))
    assert wanted(lineages, 20) == {0, 1}


def test_room_that_ordinary_calls_leave_is_lent() -> None:
    """Until one comes: then sessions give back what it used, down to the budget."""
    lineages = table(num_blocks=20, retain_budget=0.5, lend_after_s=60)
    assert call(lineages, "old", "a" * 9, retain_s=500).clipped is None
    assert call(lineages, "new", "b" * 9, first_block=10, retain_s=900).clipped is None
    lineages.ordinary(4, now_s=1)
    assert (
        lineages.expire(1).clipped == "2 wanted blocks given up for the pool's budget of 16 blocks"
    )
    lineages.ordinary(100, now_s=2)
    lineages.expire(2)
    assert lineages.stats().wanted_blocks == 10
    call(lineages, "later", "c" * 9, now_s=130, retain_s=500)
    assert lineages.stats().wanted_blocks > 10


def test_a_call_that_retains_nothing_is_an_ordinary_one() -> None:
    """What it used is not lent."""
    lineages = table(num_blocks=20, retain_budget=0.5, lend_after_s=60)
    call(lineages, "none", "d" * 12, retain_s=0)
    assert call(lineages, "s", "a" * 15).clipped_blocks == 5


def test_a_tenant_is_lent_what_the_others_leave() -> None:
    """Another tenant gets its part at once, from whoever is over its own."""
    lineages = table(num_blocks=20, retain_budget=0.5, tenant_budget=0.25, lend_after_s=60)
    assert call(lineages, "s", "a" * 16, tenant="mine", retain_s=900).clipped is None
    effect = call(lineages, "t", "bbbb", first_block=16, tenant="other", retain_s=1)
    assert effect.clipped is None
    lineages.ordinary(4, now_s=0)
    assert lineages.expire(0).clipped_blocks == 4
    assert wanted(lineages, 20) == {*range(12), 16, 17, 18, 19}


def test_priorities_order_within_a_tenant_only() -> None:
    """A tenant cannot gain against another one by asking for more."""
    lineages = table()
    call(lineages, "a-low", "a", first_block=0, tenant="a", retain_s=30, priority=10)
    call(lineages, "a-high", "b", first_block=1, tenant="a", retain_s=10, priority=90)
    call(lineages, "b", "c", first_block=2, tenant="b", retain_s=20, priority=50)
    low, high, other = (lineages.keeper(block_id) for block_id in range(3))
    # By retention: high (10), other (20), low (30); low and high exchange their places.
    assert lineages.victims(0) == [low, other, high]
