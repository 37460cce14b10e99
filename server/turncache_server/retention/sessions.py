"""Records of sessions and lineages. Changed only by the lineage table and its want board."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from turncache_server.retention.chains import KnownChain, remember

#: An expectation is late when the session takes more than this many times as long.
LATE_FACTOR: Final = 3.0
#: After so many late returns in a row the session's expectations are ignored.
LATE_LIMIT: Final = 3


@dataclass(slots=True, eq=False, kw_only=True)
class Session:
    """A caller's name for a chain of calls, between two finals.

    Attributes:
        key: the caller's name.
        generation: unique over all sessions; a call of another generation has no say.
        lineages: by number, least recently used first.
        in_flight: admission number to the time of admission.
        continuing: admission number to the lineage that the call continues.
        late: late returns in a row.
        compaction_announced: the next finished call supersedes what it continues.
    """

    key: str
    generation: int
    lineages: dict[int, Lineage] = field(default_factory=dict)
    in_flight: dict[int, float] = field(default_factory=dict)
    continuing: dict[int, Lineage] = field(default_factory=dict)
    late: int = 0
    compaction_announced: bool = False

    def use(self, lineage: Lineage) -> None:
        """Make a lineage the most recently used one."""
        self.lineages.pop(lineage.number, None)
        self.lineages[lineage.number] = lineage

    @property
    def wants(self) -> bool:
        """Whether any of its lineages wants blocks."""
        return any(lineage.wanted_blocks for lineage in self.lineages.values())

    def latest(self) -> Lineage | None:
        """Return the most recently used lineage."""
        return next(reversed(self.lineages.values()), None)

    def ended(self, number: int) -> None:
        """Note that a call is not in flight any more."""
        self.in_flight.pop(number, None)
        self.continuing.pop(number, None)

    def score(self, ratio: float) -> None:
        """Judge an expectation by the wait that came true, in multiples of it."""
        self.late = self.late + 1 if ratio > LATE_FACTOR else 0


@dataclass(slots=True, eq=False, kw_only=True)
class Lineage:
    """One content chain, or a prompt that is being handed over. A policy's candidate.

    Attributes:
        number: names the lineage and its shelf.
        session: None for a hand-over, which belongs to a call only.
        tenant: whose budget its blocks are charged to; None for nobody's.
        priority: orders lineages within a tenant.
        known: the chain's hashes, compactly, held or not.
        blocks: block id at each place of the chain, -1 where nothing is wanted.
        wanted_blocks: number of places that want a block.
        finished_at_s: when the wait began.
        hinted_at_s: when the caller expects to be back.
        retain_s: how long the lineage is retained after its calls.
        retain_until_s: until when.
        used: rises with every use; settles ties.
    """

    number: int
    session: Session | None
    tenant: str | None
    priority: int = 50
    known: KnownChain[int] = field(default_factory=lambda: remember(()))
    blocks: list[int] = field(default_factory=list)
    wanted_blocks: int = 0
    finished_at_s: float = 0.0
    hinted_at_s: float | None = None
    retain_s: float = 0.0
    retain_until_s: float = 0.0
    used: int = 0

    @property
    def handover(self) -> bool:
        """Whether this is a prompt that no peer has verified yet."""
        return self.session is None

    @property
    def in_flight(self) -> bool:
        """Whether a call that continues it is being served.

        Another call of its session says nothing about it: an agent that hands work to others
        has calls in flight nearly always, and chains that nobody continues.
        """
        return self.session is not None and self in self.session.continuing.values()

    @property
    def expected_at_s(self) -> float | None:
        """When it is expected back; None without a hint that has earned belief."""
        if self.session is not None and self.session.late >= LATE_LIMIT:
            return None
        return self.hinted_at_s

    def wanted_tail_first(self) -> Iterator[int]:
        """Yield the wanted blocks from the chain's tail; entries may be dropped meanwhile."""
        blocks = self.blocks
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index] >= 0:
                yield blocks[index]


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSession:
    """A session at one moment, for people.

    Attributes:
        key: the caller's name for it.
        in_flight: a call is being served.
        lineages: chains that are remembered.
        wanted_blocks: over its lineages; what they share counts in each.
        expected_s: seconds until the soonest expectation, None without one.
        retain_s: seconds for which something is retained, None while a call is in flight.
    """

    key: str
    in_flight: bool
    lineages: int
    wanted_blocks: int
    expected_s: float | None
    retain_s: float | None


def view_of(session: Session, now_s: float) -> KeptSession:
    """Return a session as it is at ``now_s``; for any thread."""
    lineages = list(session.lineages.values())
    wanting = [each for each in lineages if each.wanted_blocks]
    expected = [at_s for each in wanting if (at_s := each.expected_at_s) is not None]
    in_flight = bool(session.in_flight)
    until_s = max((each.retain_until_s for each in wanting), default=now_s)
    return KeptSession(
        key=session.key,
        in_flight=in_flight,
        lineages=len(lineages),
        wanted_blocks=sum(each.wanted_blocks for each in wanting),
        expected_s=min(expected) - now_s if expected else None,
        retain_s=None if in_flight else max(0.0, until_s - now_s),
    )
