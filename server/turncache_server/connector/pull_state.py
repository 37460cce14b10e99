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
from turncache_server.control.messages import PeekReply, VerifyReply

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
        found: the search for candidates, None where the hints name the source.
        asks: the peeks under way.
        useful_at_s: when the first candidate that holds something was seen to have answered.
        blocks: destination blocks of the read, in prompt order.
        local_blocks: blocks found in the own cache, before the destination blocks.
        block_map: the own prefix-cache map when the read began; another one at the end
            means a reset in between, and nothing is used.
        known_blocks: leading blocks that the source once computed for the session.
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
    found: Future[Found] | None = None
    asks: tuple[Ask, ...] = ()
    useful_at_s: float | None = None
    asked_at_s: float = 0.0
    first_look_s: float | None = None
    offered_at_s: float | None = None
    reading_at_s: float = 0.0
    answer: PeekReply | None = None
    attempts: int = 1
    request: Any = None
    blocks: Sequence[Any] = ()
    local_blocks: int = 0
    block_map: Any = None
    verify: Future[VerifyReply] | None = None
    returned_blocks: int = 0
    known_blocks: int = 0
    began: bool = False
    patience: Patience | None = None
    reason: Reason | None = None
    aborted: bool = False
    pull_s: float = 0.0


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
        loaded_blocks: blocks whose content was confirmed.
        num_verified: pulls of which at least one block was confirmed.
        transfer_s: how long each of these took, from the begin of its read.
    """

    add: set[str] = field(default_factory=set)
    hold: set[str] = field(default_factory=set)
    loaded_blocks: list[int] = field(default_factory=list)
    num_verified: int = 0
    transfer_s: list[float] = field(default_factory=list)
