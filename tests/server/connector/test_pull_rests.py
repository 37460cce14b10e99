"""What a pull does with the block behind the full ones: fits, is read, is confirmed, or is not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.server.connector.peer_fakes import (
    FakeBlock,
    FakePeers,
    FakeRequest,
    compatible,
    confirms,
    holds,
)
from turncache.protocol import Reason
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.pull import PullBook
from turncache_server.connector.pull_state import HandBack, Read
from turncache_server.control.messages import RestBlock
from turncache_server.retention.rests import rest_key

SIZE = 4
MAP = object()
R = "r1"


def hashes(count: int) -> list[bytes]:
    """Return the chain hashes of so many blocks."""
    return [bytes([i]) * 4 for i in range(count)]


def rest(prompt: list[int], held: int, num_tokens: int) -> RestBlock:
    """Return what a source holds behind ``held`` blocks of a prompt that it has served."""
    start = held * SIZE
    return RestBlock(
        block_id=200 + num_tokens,
        epoch=2000 + num_tokens,
        num_tokens=num_tokens,
        key=rest_key(hashes(held)[-1], prompt[start : start + num_tokens]),
    )


class Desk:
    """A pull book with fake peers, and one call of a prompt."""

    def __init__(self, prompt: list[int], *, also: tuple[str, ...] = ()) -> None:
        self.peers = FakePeers()
        for name in also:
            self.peers.records[name] = compatible(name)
        self.book = PullBook(
            self.peers,  # type: ignore[arg-type]  # stands for PeerBook
            block_size=SIZE,
            threshold_tokens=0,
            timeout_s=5.0,
            costs=PullCosts(),
        )
        self.request = FakeRequest(R)
        chain = hashes(len(prompt) // SIZE)
        assert self.book.start(R, "s", "decode-0", chain, 100.0, tokens=prompt, also=also) is None

    def look(self, *answers: Any, local_blocks: int = 0) -> int | None:
        """Let the sources answer, and return what is offered."""
        for (_, _, future), answer in zip(self.peers.peeks, answers, strict=True):
            future.set_result(answer)
        return self.book.look(R, local_blocks * SIZE, 100.0)

    def read(self, tokens: int, *, local_blocks: int = 0) -> Read | None:
        """Allocate blocks for an offer; returns the read, None when there is none."""
        blocks = [FakeBlock(10 + i) for i in range(local_blocks + -(-tokens // SIZE))]
        self.book.allocated(self.request, blocks, tokens, MAP, 100.0)
        reads = self.book.take_reads()
        return reads[0] if reads else None

    def settle(self, valid: int, *, confirmed: bool) -> HandBack:
        """End the read and let the source answer."""
        self.book.completed({R}, set(), MAP, 101.0)
        self.peers.verifies[-1][1].set_result(confirms(valid, rest=confirmed))
        return self.book.completed(set(), set(), MAP, 101.0)


PROMPT = list(range(50, 61))  # two full blocks and three tokens


@pytest.mark.parametrize(
    ("num_tokens", "offered"),
    [(1, 9), (2, 10), (3, 10)],
    ids=["fewer", "all but the last", "all"],
)
def test_a_rest_is_offered_as_far_as_the_prompt_goes(num_tokens: int, offered: int) -> None:
    """The last token of a prompt is computed in any case."""
    desk = Desk(PROMPT)
    assert desk.look(holds(2, rests=[rest(PROMPT, 2, num_tokens)])) == offered


@pytest.mark.parametrize(
    "changes",
    [
        {"key": rest_key(hashes(2)[-1], [1, 2])},
        {"key": rest_key(hashes(1)[-1], PROMPT[8:10])},
        {"num_tokens": 0},
        {"num_tokens": -1},
        {"num_tokens": SIZE},
        {"num_tokens": 1 << 40},
        {"key": b""},
    ],
    ids=["tokens", "parent", "empty", "negative", "full", "huge", "no key"],
)
def test_what_is_not_the_prompts_is_left_where_it_is(changes: dict[str, Any]) -> None:
    """Then the full blocks are pulled, as from an engine that names no rests."""
    desk = Desk(PROMPT)
    other = msgspec.structs.replace(rest(PROMPT, 2, 2), **changes)
    assert desk.look(holds(2, rests=[other])) == 8
    read = desk.read(8)
    assert read is not None
    assert read.remote_blocks == [100, 101]
    assert desk.settle(2, confirmed=False).loaded_blocks == [10, 11]
    assert desk.request.num_computed_tokens == 8


def test_the_longest_rest_that_fits_is_taken() -> None:
    """Sessions with the same beginning have left theirs behind the same block."""
    desk = Desk(PROMPT)
    others = [rest(PROMPT, 2, 1), rest([9] * 12, 2, 3), rest(PROMPT, 2, 2)]
    assert desk.look(holds(2, rests=others)) == 10
    read = desk.read(10)
    assert read is not None
    assert read.remote_blocks == [100, 101, 202]
    assert read.local_blocks == [10, 11, 12]
    assert read.num_tokens == 10


def test_of_equal_sources_the_one_with_the_longer_rest_is_read() -> None:
    """Everything that need not be computed counts."""
    desk = Desk(PROMPT, also=("decode-1",))
    offered = desk.look(holds(2), holds(2, rests=[rest(PROMPT, 2, 2)]))
    assert offered == 10
    pull = desk.book.get(R)
    assert pull is not None
    assert pull.peer.name == "decode-1"


def test_a_confirmed_rest_is_computed_with_and_not_passed_on() -> None:
    """Its block is filled by the call, and known as written only then."""
    desk = Desk(PROMPT)
    desk.look(holds(2, rests=[rest(PROMPT, 2, 2)]), local_blocks=1)
    read = desk.read(6, local_blocks=1)
    assert read is not None
    assert (read.remote_blocks, read.num_local_hit_blocks) == ([101, 202], 1)
    back = desk.settle(1, confirmed=True)
    question = desk.peers.verifies[0][0]
    assert (question.block_ids, question.rest) == ([101], (202, 2002))
    assert desk.request.num_computed_tokens == 10
    assert back.loaded_blocks == [11]
    assert (back.num_blocks, back.num_rests) == (2, 1)
    pull = desk.book.get(R)
    assert pull is not None
    assert (pull.returned_tokens, pull.reason) == (6, None)


def test_a_rest_whose_block_has_been_handed_out_is_computed() -> None:
    """The full blocks before it are used; nothing that was promised is lost."""
    desk = Desk(PROMPT)
    desk.look(holds(2, rests=[rest(PROMPT, 2, 2)]))
    desk.read(10)
    back = desk.settle(2, confirmed=False)
    assert desk.request.num_computed_tokens == 8
    assert (back.loaded_blocks, back.num_blocks, back.num_rests) == ([10, 11], 2, 0)


def test_behind_a_block_that_is_not_confirmed_no_rest_is_used() -> None:
    """It was computed with what came before it."""
    desk = Desk(PROMPT)
    desk.look(holds(2, rests=[rest(PROMPT, 2, 2)]))
    desk.read(10)
    back = desk.settle(1, confirmed=True)
    assert desk.request.num_computed_tokens == 4
    assert back.loaded_blocks == [10]


def test_a_rest_alone_may_be_pulled() -> None:
    """Where all full blocks are here; the threshold decides whether it is worth it."""
    desk = Desk(PROMPT)
    assert desk.look(holds(2, rests=[rest(PROMPT, 2, 2)]), local_blocks=2) == 2
    read = desk.read(2, local_blocks=2)
    assert read is not None
    assert read.remote_blocks == [202]
    back = desk.settle(0, confirmed=True)
    assert desk.request.num_computed_tokens == 10
    assert (back.loaded_blocks, back.num_verified) == ([], 1)


def test_a_rest_alone_that_is_not_confirmed_fails_the_read() -> None:
    """Nothing was loaded, so the call has to be told so."""
    desk = Desk(PROMPT)
    desk.look(holds(2, rests=[rest(PROMPT, 2, 2)]), local_blocks=2)
    desk.read(2, local_blocks=2)
    back = desk.settle(0, confirmed=False)
    assert not back.add
    assert desk.book.take_failures() == {R}
    desk.book.completed({R}, {R}, MAP, 101.0)
    pull = desk.book.get(R)
    assert pull is not None
    assert pull.reason is Reason.EVICTED
    chain = hashes(2)
    assert desk.book.start("next", "s", "decode-0", chain, 101.0) is None, "its source is well"


def test_a_prompt_that_fills_its_last_block_is_pulled_but_for_one_token() -> None:
    """That block is written once more, so it is not known as written yet."""
    desk = Desk([*PROMPT, 61])
    assert desk.look(holds(3)) == 11
    read = desk.read(11)
    assert read is not None
    assert read.remote_blocks == [100, 101, 102]
    back = desk.settle(3, confirmed=False)
    assert desk.request.num_computed_tokens == 11
    assert (back.loaded_blocks, back.num_blocks) == ([10, 11], 3)


def test_a_prompt_of_one_token_more_than_its_blocks_needs_no_rest() -> None:
    """The last token is computed: there is nothing else behind the blocks."""
    prompt = PROMPT[:9]
    desk = Desk(prompt)
    assert desk.look(holds(2, rests=[rest(prompt, 2, 1)])) == 8
    read = desk.read(8)
    assert read is not None
    assert read.remote_blocks == [100, 101]


def test_blocks_for_another_offer_are_not_read_into() -> None:
    """The scheduler gives as many as were offered, or the read fails."""
    desk = Desk(PROMPT)
    assert desk.look(holds(2, rests=[rest(PROMPT, 2, 2)])) == 10
    assert desk.read(8) is None
    assert desk.book.take_failures() == {R}
