"""The blocks that calls have begun and not filled: which are remembered, and by what name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from turncache_server.retention.rests import (
    MOST_OF_ONE,
    MOST_PARENTS,
    Rest,
    Rests,
    rest_key,
)

TOKENS = st.lists(st.integers(0, 2**31), max_size=15)
PARENTS = st.binary(min_size=1, max_size=64)


def rest(block_id: int, *tokens: int, epoch: int = 1, parent: bytes = b"p") -> Rest:
    """Return what a block holds."""
    return Rest(block_id, epoch, len(tokens), rest_key(parent, tokens))


@given(PARENTS, TOKENS, PARENTS, TOKENS)
def test_a_key_names_one_chain_and_its_tokens(
    parent: bytes, tokens: list[int], other: bytes, others: list[int]
) -> None:
    """Another parent or other tokens, more or fewer ones among them, have another key."""
    same = (parent, tokens) == (other, others)
    assert (rest_key(parent, tokens) == rest_key(other, others)) is same


def test_equal_rests_are_remembered_side_by_side() -> None:
    """Nobody may keep the newest: then an older one is still there to be named."""
    rests = Rests([1] * 8)
    for block_id in (3, 4):
        rests.note(b"p", rest(block_id, 7, 8))
    assert [each.block_id for each in rests.after(b"p")] == [4, 3]


def test_what_has_been_handed_out_is_forgotten_first() -> None:
    """It takes no room from what is still there."""
    epoch = [1] * 8
    rests = Rests(epoch)
    for block_id in (3, 4):
        rests.note(b"p", rest(block_id, block_id))
    epoch[3] = 2
    rests.note(b"p", rest(5, 5))
    assert [each.block_id for each in rests.after(b"p")] == [5, 4]


def test_a_block_is_remembered_once() -> None:
    """It holds what it was given last."""
    epoch = [1] * 8
    rests = Rests(epoch)
    rests.note(b"p", rest(3, 7, epoch=1))
    epoch[3] = 2
    rests.note(b"p", rest(3, 7, 8, epoch=2))
    assert rests.after(b"p") == (rest(3, 7, 8, epoch=2),)


def test_calls_that_went_on_differently_are_told_apart() -> None:
    """So many of one chain hash, the newest first."""
    rests = Rests([1] * (MOST_OF_ONE + 2))
    for token in range(MOST_OF_ONE + 2):
        rests.note(b"p", rest(token, token))
    newest = range(MOST_OF_ONE + 1, 1, -1)
    assert rests.after(b"p") == tuple(rest(token, token) for token in newest)
    assert rests.after(b"q") == ()


def test_the_oldest_go_first() -> None:
    """What is remembered is bounded; a hash that is noted again counts as new."""
    rests = Rests([1] * 8)
    for number in range(MOST_PARENTS):
        rests.note(number.to_bytes(4, "big"), rest(1, number))
    rests.note((0).to_bytes(4, "big"), rest(2, 5))
    rests.note(b"one more", rest(3, 6))
    assert len(rests) == MOST_PARENTS
    assert rests.after((0).to_bytes(4, "big"))
    assert not rests.after((1).to_bytes(4, "big"))
    rests.clear()
    assert not len(rests)
