"""What an engine saw, in the order in which it saw it: the ghost's only input.

Plain tuples, because the engine thread makes them. Times are those of the engine's clock.
Hashes are chain hashes: equality at one place means that the whole prefix is equal.
"""

from __future__ import annotations

from typing import NamedTuple

from turncache_server.retention.values import Signal


class Arrived(NamedTuple):
    """A call has arrived.

    Attributes:
        request: the engine's id of it.
        now_s: the time.
        prompt: tokens of its prompt.
        hashes: of the prompt's full blocks.
        session: its session, None for an ordinary call.
        tenant: whose budget it is charged to.
    """

    request: str
    now_s: float
    prompt: int
    hashes: tuple[bytes, ...]
    session: str | None
    tenant: str | None


class Started(NamedTuple):
    """A call has got its blocks.

    Attributes:
        request: its id.
        now_s: the time.
        local: prompt tokens that the engine found in its own cache.
    """

    request: str
    now_s: float
    local: int


class Ended(NamedTuple):
    """A call has ended, and its blocks are about to be freed.

    Attributes:
        request: its id.
        now_s: the time.
        tokens: prompt and answer.
        num_blocks: blocks that it held.
        complete: blocks of its chain whose content was complete.
        more_hashes: of the chain, from behind the prompt's full blocks.
        answered: it was answered, not aborted.
        retain_s: how long the caller asks for it to be retained.
        expect_s: when the caller expects to be back.
        priority: orders lineages within the tenant.
        final: nothing follows.
        compaction: supersedes what it continues.
        handover: another engine will take its prompt.
        returned: prompt tokens that a peer gave.
        lost: tokens of the session that the engine had computed before and did again.
        reason: why, by the engine's record; empty for an ordinary call.
        rest: the block behind these is kept with them, for peers.
    """

    request: str
    now_s: float
    tokens: int
    num_blocks: int
    complete: int
    more_hashes: tuple[bytes, ...]
    answered: bool
    retain_s: float | None = None
    expect_s: float | None = None
    priority: int = 50
    final: bool = False
    compaction: bool = False
    handover: bool = False
    returned: int = 0
    lost: int = 0
    reason: str = ""
    rest: bool = False


class Ticked(NamedTuple):
    """A step was scheduled.

    Attributes:
        now_s: the time.
        prefill_tokens: tokens computed in large steps since the engine was first observed.
        prefill_s: what these steps took.
    """

    now_s: float
    prefill_tokens: int
    prefill_s: float


class Signalled(NamedTuple):
    """The world outside a request said something about a session."""

    now_s: float
    session: str
    kind: Signal
    expect_s: float | None


class TailVerified(NamedTuple):
    """A peer has verified the prompt that ends in this chain hash."""

    now_s: float
    tail_hash: bytes


class Forgotten(NamedTuple):
    """The cache was reset, or nothing was seen for a while: what it holds is unknown."""

    now_s: float


Event = Arrived | Started | Ended | Ticked | Signalled | TailVerified | Forgotten
