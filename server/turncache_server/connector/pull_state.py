"""One pull in its states, the read that its workers are given, and what the scheduler is told.

Values; who changes them, and when, is :mod:`turncache_server.connector.pull`.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from turncache.protocol import Reason
from turncache_server.connector.finding import Ask, Found
from turncache_server.connector.lacking import Patience
from turncache_server.connector.peers import Peer
from turncache_server.control.messages import PeekReply, RestBlock, Verify, VerifyReply
from turncache_server.retention.rests import rest_key

#: Whom a pull reads from before that is known.
NOBODY: Final = Peer(name="", control_address="")


class PullState(enum.Enum):
    """Where a pull stands."""

    FINDING = enum.auto()
    PEEKING = enum.auto()
    LACKING = enum.auto()
    OFFERED = enum.auto()
    READING = enum.auto()
    VERIFYING = enum.auto()
    FAILING = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True, kw_only=True)
class Pull:
    """One request's pull.

    Attributes:
        peer: whom it reads from; of several candidates the first, until one was chosen.
        hashes: of the prompt's full blocks.
        tokens: the prompt, whose last token is always computed; empty to pull whole blocks only.
        found: the search for candidates, None where the hints name the source.
        asks: the peeks under way.
        useful_at_s: when the first candidate that holds something was seen to have answered.
        rest: what the source holds of the block behind those of its answer, None for nothing.
        blocks: destination blocks of the read, in prompt order.
        local_blocks: blocks found in the own cache, before the destination blocks.
        block_map: the own prefix-cache map when the read began; another one at the end
            means a reset in between, and nothing is used.
        known_blocks: leading blocks that the source once computed for the session.
        returned_tokens: tokens whose KV was read and confirmed.
        began: a read was begun.
        patience: what the router offers if the source has lost the prompt; None when it offers
            nothing, or the call may wait for it no more.
        reason: why no more was pulled, None while it goes well.
    """

    request_id: str
    session: str
    peer: Peer
    hashes: list[bytes]
    state: PullState
    tokens: Sequence[int] = ()
    found: Future[Found] | None = None
    asks: tuple[Ask, ...] = ()
    useful_at_s: float | None = None
    asked_at_s: float = 0.0
    first_look_s: float | None = None
    offered_at_s: float | None = None
    reading_at_s: float = 0.0
    answer: PeekReply | None = None
    rest: RestBlock | None = None
    attempts: int = 1
    request: Any = None
    blocks: Sequence[Any] = ()
    local_blocks: int = 0
    block_map: Any = None
    verify: Future[VerifyReply] | None = None
    returned_tokens: int = 0
    known_blocks: int = 0
    began: bool = False
    patience: Patience | None = None
    reason: Reason | None = None
    aborted: bool = False
    pull_s: float = 0.0

    def upto(self, num_blocks: int, block_size: int, rest: RestBlock | None = None) -> int:
        """Return how many leading tokens so many blocks spare, and a rest behind them."""
        tokens = num_blocks * block_size + (0 if rest is None else rest.num_tokens)
        # A prompt that fills its last block gets all of it but the last token.
        return min(tokens, len(self.tokens) - 1) if self.tokens else tokens

    def fitting(self, answer: PeekReply, block_size: int) -> RestBlock | None:
        """Return the longest rest of an answer whose tokens are the prompt's, None without."""
        held = len(answer.block_ids)
        start = held * block_size
        if not 0 < held <= len(self.hashes) or len(self.tokens) < start + 2:
            return None
        fitting = [
            rest
            for rest in answer.rests
            if 0 < rest.num_tokens < block_size
            and start + rest.num_tokens <= len(self.tokens)
            and rest.key
            == rest_key(self.hashes[held - 1], self.tokens[start : start + rest.num_tokens])
        ]
        return max(fitting, key=lambda rest: rest.num_tokens, default=None)

    def question(self) -> Verify:
        """Return what the source is asked when the read has ended."""
        answer = self.answer
        assert answer is not None, "only an offered pull is read"
        first = self.local_blocks
        return Verify(
            start_id=answer.start_id,
            generation=answer.generation,
            block_ids=answer.block_ids[first:],
            epochs=answer.epochs[first:],
            hashes=self.hashes[first : len(answer.block_ids)],
            rest=None if self.rest is None else (self.rest.block_id, self.rest.epoch),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A read for the workers to start.

    Attributes:
        attempt: which read of its request it is, from 1.
        remote_blocks: block ids at the source, one per local block.
        deadline_s: remaining seconds, counted from when the workers receive it.
    """

    request_id: str
    attempt: int
    request: Any
    local_blocks: list[int]
    remote_blocks: list[int]
    num_local_hit_blocks: int
    engine_id: str
    host: str
    port: int
    tp_size: int
    num_tokens: int
    deadline_s: float


@dataclass(slots=True)
class HandBack:
    """What the scheduler is told in one step: ids to add to and remove from its sets.

    Attributes:
        loaded_blocks: blocks that are full and whose content was confirmed: nothing writes there
            any more.
        num_blocks: these and the ones that are to be filled.
        num_rests: pulls that brought a rest.
        num_verified: pulls of which at least one block was confirmed.
        transfer_s: how long each of these took, from the begin of its read.
    """

    add: set[str] = field(default_factory=set)
    hold: set[str] = field(default_factory=set)
    loaded_blocks: list[int] = field(default_factory=list)
    num_blocks: int = 0
    num_rests: int = 0
    num_verified: int = 0
    transfer_s: list[float] = field(default_factory=list)
