"""Being read from: what a peek names, and what a verify confirms, whatever happens in between.

A claim is true when the bytes that the peer read are those of its own hashes. The tests keep
the "bytes" of each block in a table that only the fake engine thread writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.connector.pool_fakes import FakeBlock, FakePool, hash_of
from turncache_server.connector.source import Source, holders
from turncache_server.control.messages import Peek, PeekReply, Verify, VerifyReply
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.mailbox import HandedOver, Mailbox, Promote
from turncache_server.retention.rests import Rests

CHAIN = [hash_of(i) for i in range(4)]


class Engine:
    """A pool, its ledger and the content of each block, changed as an engine thread would.

    Attributes:
        content: the chain hash whose KV lies in the block, None for anything else.
    """

    def __init__(self, num_blocks: int = 16) -> None:
        self.pool = FakePool(num_blocks, True, 16)
        self.ledger = Ledger(num_blocks)
        self.mailbox = Mailbox()
        self.content: list[bytes | None] = [None] * num_blocks
        self.serving = True
        self.awaited: set[bytes] = set(CHAIN)
        self.rests = Rests(self.ledger.epoch)
        self.source = self.make_source(Source)

    def make_source(self, kind: type[Source]) -> Source:
        """Make a source over the pool."""
        return kind(
            self.pool,
            self.ledger,
            self.mailbox,
            serving=lambda: self.serving,
            known_blocks=lambda session, hashes: len(hashes) if session == "known" else 0,
            awaits=lambda tail: tail in self.awaited,
            rests=self.rests,
        )

    # --- the engine thread -----------------------------------------------------------------------

    def take(self, count: int = 1) -> list[FakeBlock]:
        """Hand blocks out, as the free queue does."""
        blocks = self.pool.get_new_blocks(count)
        self.ledger.last_epoch += 1
        for block in blocks:
            self.ledger.epoch[block.block_id] = self.ledger.last_epoch
        return blocks

    def schedule(self, block: FakeBlock, chain_hash: bytes) -> None:
        """Schedule the step that fills the block; the hash appears at once, as in vLLM."""
        self.pool.hash_block(block, chain_hash)
        self.ledger.schedule([("r", block.block_id, True)])

    def run(self, block: FakeBlock, chain_hash: bytes) -> None:
        """Run the forward pass and process the step."""
        self.content[block.block_id] = chain_hash
        self.ledger.processed()

    def write(self, chain_hash: bytes) -> FakeBlock:
        """Take a block, fill it and free it: cached, complete and free."""
        (block,) = self.take()
        self.schedule(block, chain_hash)
        self.run(block, chain_hash)
        self.pool.free_blocks([block])
        return block

    def rewrite(self, block: FakeBlock, chain_hash: bytes, *, run: bool) -> None:
        """Hand a free block out again, and schedule a step that fills it."""
        self.pool.free_block_queue.remove(block)
        self.pool.free_block_queue.prepend_n([block])
        assert self.take() == [block]
        self.content[block.block_id] = None
        self.schedule(block, chain_hash)
        if run:
            self.run(block, chain_hash)

    # --- the peer --------------------------------------------------------------------------------

    def peek(self, hashes: list[bytes] = CHAIN, session: str = "s") -> PeekReply:
        """Ask what is held."""
        return self.source.peek(Peek(session=session, hashes=hashes))

    def read(self, reply: PeekReply) -> list[bytes | None]:
        """Read the named blocks."""
        return [self.content[block_id] for block_id in reply.block_ids]

    def verify(self, reply: PeekReply, hashes: list[bytes] = CHAIN, **changes: Any) -> VerifyReply:
        """Ask whether what was read is still what it was."""
        question: dict[str, Any] = {
            "start_id": reply.start_id,
            "generation": reply.generation,
            "block_ids": reply.block_ids,
            "epochs": reply.epochs,
            "hashes": hashes[: len(reply.block_ids)],
        }
        return self.source.verify(Verify(**{**question, **changes}))


@pytest.fixture
def engine() -> Engine:
    """An engine with an empty cache."""
    return Engine()


# --- peek ------------------------------------------------------------------------------------


def test_a_peek_names_the_longest_written_prefix(engine: Engine) -> None:
    """Blocks behind a gap are of no use."""
    blocks = [engine.write(h) for h in (CHAIN[0], CHAIN[1], CHAIN[3])]
    reply = engine.peek()
    assert reply.block_ids == [block.block_id for block in blocks[:2]]
    assert reply.epochs == [engine.ledger.epoch[i] for i in reply.block_ids]
    assert engine.verify(reply).valid == 2


def test_a_hashed_block_is_not_named_before_it_is_written(engine: Engine) -> None:
    """VLLM lists a block when its step is scheduled, long before the forward pass ends."""
    (block,) = engine.take()
    engine.schedule(block, CHAIN[0])
    assert engine.peek().block_ids == []
    engine.run(block, CHAIN[0])
    assert engine.peek().block_ids == [block.block_id]


def test_a_second_holder_is_named_when_the_first_is_not_written(engine: Engine) -> None:
    """All holders of a hash are tried, in whatever order vLLM lists them."""
    (unwritten,) = engine.take()
    engine.schedule(unwritten, CHAIN[0])
    written = engine.write(CHAIN[1])
    engine.pool.drop_hash(written)
    engine.pool.hash_block(written, CHAIN[0])
    engine.ledger.processed()
    engine.ledger.written[unwritten.block_id] = -1
    assert engine.peek().block_ids == [written.block_id]


def test_a_block_that_is_listed_under_a_hash_that_it_lost_is_not_named(engine: Engine) -> None:
    """The map and the block are changed one after the other: both must agree."""
    block = engine.write(CHAIN[0])
    block.block_hash = None
    assert engine.peek().block_ids == []


def test_an_entry_that_changes_while_it_is_listed_is_a_no() -> None:
    """The engine thread may change a dict of holders at any time."""

    class Changing(dict[int, Any]):
        def values(self) -> Any:
            raise RuntimeError("dictionary changed size during iteration")

    pool = FakePool(4, True, 16)
    pool.cached_block_hash_to_block._cache[b"k"] = Changing({1: pool.blocks[1]})
    assert list(holders(pool.cached_block_hash_to_block, b"k")) == []


def test_a_source_that_does_not_serve_names_and_confirms_nothing(engine: Engine) -> None:
    """Mode off, a lost order of steps, a failed hook: all answers are no."""
    engine.write(CHAIN[0])
    reply = engine.peek()
    engine.serving = False
    assert engine.peek().block_ids == []
    assert engine.verify(reply).valid == 0
    engine.serving = True
    engine.ledger.in_order = False
    assert engine.peek().block_ids == []


def test_a_peek_asks_the_engine_thread_to_keep_what_it_names(engine: Engine) -> None:
    """With epochs and generation, so that a late command hits nobody else; nothing, no command."""
    engine.peek()
    assert engine.mailbox.drain() == []
    block = engine.write(CHAIN[0])
    reply = engine.peek()
    assert engine.mailbox.drain() == [Promote((block.block_id,), tuple(reply.epochs), 1)]


def test_a_peek_tells_what_was_known_without_granting_it(engine: Engine) -> None:
    """The session only counts losses: it never names a block."""
    assert engine.peek(session="known").known == len(CHAIN)
    assert engine.peek(session="stranger").known == 0
    assert engine.peek(session="known").block_ids == []


# --- verify ----------------------------------------------------------------------------------


def test_a_verify_confirms_up_to_the_first_change(engine: Engine) -> None:
    """The usual loss is one tail block: the prefix before it counts."""
    blocks = [engine.write(h) for h in CHAIN]
    reply = engine.peek()
    engine.rewrite(blocks[2], hash_of(99), run=True)
    assert engine.verify(reply).valid == 2
    assert engine.mailbox.drain()[-1] == HandedOver(CHAIN[1])


def test_a_tail_that_nobody_waits_for_takes_no_room(engine: Engine) -> None:
    """An idle engine works its mailbox off with its next call only."""
    engine.write(CHAIN[0])
    engine.awaited.clear()
    assert engine.verify(engine.peek()).valid == 1
    assert [type(command) for command in engine.mailbox.drain()] == [Promote]


def test_a_rewrite_with_equal_content_is_a_change(engine: Engine) -> None:
    """The same prompt may get the same block again: while it was read it was not complete."""
    block = engine.write(CHAIN[0])
    reply = engine.peek()
    engine.rewrite(block, CHAIN[0], run=False)
    assert engine.read(reply) == [None]
    assert engine.verify(reply).valid == 0
    engine.run(block, CHAIN[0])
    assert engine.verify(reply).valid == 0


def test_a_block_that_lost_its_hash_is_not_confirmed(engine: Engine) -> None:
    """An eviction from the cache ends the claim even where the content is untouched."""
    block = engine.write(CHAIN[0])
    reply = engine.peek()
    engine.pool.drop_hash(block)
    assert engine.verify(reply).valid == 0


@pytest.mark.parametrize("ask_in_between", [False, True])
def test_a_reset_between_peek_and_verify_is_a_no(ask_in_between: bool, engine: Engine) -> None:
    """Noticed without any hook: an idle engine runs none."""
    engine.write(CHAIN[0])
    reply = engine.peek()
    assert reply.generation == 1
    engine.pool.reset_prefix_cache()
    if ask_in_between:
        assert engine.peek().generation == 2
    answer = engine.verify(reply)
    assert (answer.valid, answer.generation) == (0, 2)


def test_a_reset_while_a_verify_is_under_way_is_a_no(engine: Engine) -> None:
    """The map is replaced before the hashes are taken away."""
    block = engine.write(CHAIN[0])
    reply = engine.peek()

    class ResetAtRead(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            engine.pool.reset_prefix_cache()
            block.block_hash = CHAIN[0] + bytes(4)  # its hash is dropped a moment later
            return found

    engine.pool.blocks = ResetAtRead(engine.pool.blocks)
    assert engine.verify(reply).valid == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"start_id": "another"},
        {"generation": 2},
        {"block_ids": [99]},
        {"block_ids": [-1]},
        {"block_ids": [0]},
        {"epochs": [0]},
        {"hashes": [hash_of(7)]},
    ],
    ids=["start", "generation", "beyond", "negative", "null-block", "epoch", "hash"],
)
def test_any_other_claim_is_a_no(changes: dict[str, Any], engine: Engine) -> None:
    """Another start, generation, block, epoch or hash confirms nothing, and breaks nothing."""
    engine.write(CHAIN[0])
    reply = engine.peek()
    assert engine.verify(reply).valid == 1
    assert engine.verify(reply, **changes).valid == 0


def test_each_start_has_its_own_id(engine: Engine) -> None:
    """A restarted engine never confirms what its predecessor named."""
    engine.write(CHAIN[0])
    reply = engine.peek()
    engine.source = engine.make_source(Source)
    assert engine.verify(reply).valid == 0


# --- torn reads ------------------------------------------------------------------------------


class Torn(list[int]):
    """A list whose reads are interrupted: the engine thread runs on between two of them."""

    def __init__(self, values: list[int]) -> None:
        super().__init__(values)
        self.before_read: Iterator[Callable[[], None]] = iter(())

    def __getitem__(self, index: Any) -> Any:
        interruption = next(self.before_read, None)
        if interruption is not None:
            interruption()
        return super().__getitem__(index)


def torn(engine: Engine) -> tuple[Torn, Torn]:
    """Make the ledger's lists interruptible."""
    epoch, written = Torn(engine.ledger.epoch), Torn(engine.ledger.written)
    engine.ledger.epoch, engine.ledger.written = epoch, written
    return epoch, written


class BoolFirst(Source):
    """The obvious way: a written flag, then the epoch. Kept to show that the test can fail."""

    def _named(self, hashes: list[bytes]) -> tuple[list[int], list[int]]:
        found = [each for each in map(self._written, hashes) if each is not None]
        return [each[0] for each in found], [each[1] for each in found]

    def _written(self, chain_hash: bytes) -> tuple[int, int] | None:
        key = chain_hash + bytes(4)
        for block in holders(self._map, key):
            block_id = block.block_id
            written = self._ledger.written[block_id] != -1
            if written and block.block_hash == key:
                return block_id, self._ledger.epoch[block_id]
        return None


def torn_peek(engine: Engine) -> tuple[list[bytes | None], int]:
    """Peek while the block is handed out and scheduled anew; read; verify."""
    block = engine.write(CHAIN[0])
    epoch, _ = torn(engine)
    epoch.before_read = iter([lambda: engine.rewrite(block, CHAIN[0], run=False)])
    reply = engine.peek([CHAIN[0]])
    epoch.before_read = iter(())
    return engine.read(reply), engine.verify(reply, [CHAIN[0]]).valid


def test_a_flag_read_before_the_epoch_would_confirm_garbage(engine: Engine) -> None:
    """The fault that the order of reads prevents: peek yes, garbage read, verify yes."""
    engine.source = engine.make_source(BoolFirst)
    assert torn_peek(engine) == ([None], 1)


def test_a_peek_that_is_overtaken_names_nothing(engine: Engine) -> None:
    """Epoch first, then mark equals epoch: the same interruption is a no."""
    content, valid = torn_peek(engine)
    assert (content, valid) == ([], 0)


@settings(deadline=None)
@given(
    at=st.integers(0, 8),
    which=st.sampled_from(["epoch", "written"]),
    what=st.sampled_from(["same", "same-run", "other", "drop", "reset"]),
    then_run=st.booleans(),
)
def test_no_interruption_makes_a_false_yes(at: int, which: str, what: str, then_run: bool) -> None:
    """Whatever the engine thread does between any two reads, confirmed blocks hold their KV."""
    engine = Engine()
    blocks = [engine.write(h) for h in CHAIN]
    epoch, written = torn(engine)

    def interrupt() -> None:
        epoch.before_read = written.before_read = iter(())
        block = blocks[1]
        if what == "drop":
            engine.pool.drop_hash(block)
        elif what == "reset":
            engine.pool.reset_prefix_cache()
        else:
            new_hash = hash_of(50) if what == "other" else CHAIN[1]
            engine.rewrite(block, new_hash, run=what == "same-run")

    pauses: list[Callable[[], None]] = [lambda: None] * at
    (epoch if which == "epoch" else written).before_read = iter([*pauses, interrupt])
    reply = engine.peek()
    content = engine.read(reply)
    if then_run and what in ("same", "other") and engine.ledger._notes:
        engine.run(blocks[1], CHAIN[1] if what == "same" else hash_of(50))
    valid = engine.verify(reply).valid
    assert content[:valid] == CHAIN[:valid]
