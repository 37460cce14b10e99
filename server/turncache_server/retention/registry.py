"""Which sessions and lineages there are. Owner of both, and of the bounds on their memory."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

from turncache_server.retention.chains import common_prefix, remember
from turncache_server.retention.sessions import Lineage, Session

#: A chain of which so many tenths are continued is superseded.
SUPERSEDE_TENTHS: Final = 9
#: Sessions that are looked at when one must be forgotten, at most.
MOST_LOOKS: Final = 1024


class Registry:
    """Sessions by name and by their last use, and lineages by number.

    Args:
        max_sessions: sessions to remember.
        max_known: block hashes to remember, over all sessions.

    Attributes:
        sessions: by name.
        lineages: by number, hand-overs too.
        num_known: hashes remembered.
    """

    def __init__(self, *, max_sessions: int, max_known: int) -> None:
        self.sessions: dict[str, Session] = {}
        # Both least recently used first: those that were spared when one had to be forgotten, and
        # those behind them, that have not been looked at since their last use.
        self._spared: OrderedDict[str, Session] = OrderedDict()
        self._unseen: OrderedDict[str, Session] = OrderedDict()
        self.lineages: dict[int, Lineage] = {}
        self.num_known = 0
        self._max_sessions = max_sessions
        self._max_known = max_known
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Return a number that rises: for generations, admissions, lineages and uses."""
        return next(self._numbers)

    def open(self, key: str) -> tuple[Session, bool]:
        """Return the session of that name as the latest one, and whether it is new."""
        record = self.sessions.get(key)
        new = record is None
        if record is None:
            record = self.sessions[key] = Session(key=key, generation=self.number())
        self._spared.pop(key, None)
        self._unseen[key] = record
        self._unseen.move_to_end(key)
        return record, new

    def close(self, session: Session) -> None:
        """Forget a session that has no lineages any more."""
        del self.sessions[session.key]
        self._spared.pop(session.key, None)
        self._unseen.pop(session.key, None)

    def in_generation(self, key: str, generation: int) -> Session | None:
        """Return the session of that name, None when its generation is another one."""
        record = self.sessions.get(key)
        return record if record is not None and record.generation == generation else None

    def add(self, session: Session | None, tenant: str | None) -> Lineage:
        """Make a lineage; without a session it is a hand-over."""
        number = self.number()
        lineage = Lineage(number=number, session=session, tenant=tenant, used=number)
        self.lineages[number] = lineage
        if session is not None:
            session.lineages[number] = lineage
        return lineage

    def use(self, lineage: Lineage) -> None:
        """Make a lineage the latest one, among all and in its session."""
        lineage.used = self.number()
        if lineage.session is not None:
            lineage.session.use(lineage)

    def remember(self, lineage: Lineage, hashes: Sequence[bytes]) -> None:
        """Remember a lineage's chain in place of its earlier one."""
        self.num_known += len(hashes) - len(lineage.known)
        lineage.known = remember(hashes)

    def remove(self, lineage: Lineage) -> None:
        """Forget a lineage."""
        self.num_known -= len(lineage.known)
        del self.lineages[lineage.number]
        if lineage.session is not None:
            del lineage.session.lineages[lineage.number]

    def excess(self, keep: Session) -> Session | None:
        """Return the session that must be forgotten next, None while the bounds hold.

        The least recently used one that wants nothing and has no call in flight: calls that
        retain nothing pass in numbers while a tool runs, and leave a session each. Without such
        a one, the least recently used without a call in flight, and then any. Never ``keep``.

        So many sessions may want something that not all are looked at each time: the next time
        goes on behind those that were spared.
        """
        if len(self.sessions) <= self._max_sessions and self.num_known <= self._max_known:
            return None
        for _ in range(min(MOST_LOOKS, len(self.sessions))):
            if not self._unseen:
                self._unseen, self._spared = self._spared, self._unseen
            key, record = next(iter(self._unseen.items()))
            if record is not keep and not record.in_flight and not record.wants:
                return record
            del self._unseen[key]
            self._spared[key] = record
        others = (
            record
            for record in itertools.chain(self._spared.values(), self._unseen.values())
            if record is not keep
        )
        busy: Session | None = None
        for record in others:
            if not record.in_flight:
                return record
            busy = busy or record
        return busy


def longest(lineages: Iterable[Lineage], hashes: Sequence[bytes]) -> tuple[int, Lineage | None]:
    """Find the lineage that shares most with a chain, and how many blocks it shares.

    ``lineages`` come least recently used first: of equals, the latest is taken. None when
    nothing is shared.
    """
    shared, continued = 0, None
    for lineage in lineages:
        share = common_prefix(lineage.known, hashes)
        if share and share >= shared:
            shared, continued = share, lineage
    return shared, continued


def continues(num_shared: int, lineage: Lineage) -> bool:
    """Say whether a chain that shares so many blocks with a lineage continues it."""
    return num_shared * 10 >= len(lineage.known) * SUPERSEDE_TENTHS


def superseded(
    lineages: Iterable[Lineage], hashes: Sequence[bytes], *, compaction: bool
) -> list[Lineage]:
    """List the lineages that a finished chain supersedes; the last one is what it continues.

    With ``compaction``, the lineage that it shares most with is superseded however little
    that is.
    """
    shares = [(common_prefix(lineage.known, hashes), lineage) for lineage in lineages]
    # Stable, so of equals the latest is last.
    shares.sort(key=lambda each: each[0])
    out = [lineage for share, lineage in shares if continues(share, lineage)]
    if compaction and shares and shares[-1][1] not in out:
        out.append(shares[-1][1])
    return out
