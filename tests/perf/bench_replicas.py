"""Two routers in front of the same engines, which share nothing: how often do they disagree?

``python -m tests.perf.bench_replicas [--calls N] [--to-first SHARE] [--refused SHARE]``

Fake engines, real routers. Sessions call in turn, few of them often and most seldom, each with
its whole history; every call goes to one of the two routers by chance, most to the first. Some
sessions are children of others. Some calls are refused (503) by the decode engine that their
session is placed on, and so answered by another one, which only the router of that call knows.
Prefill engines keep nothing from one call to the next, so that what is not returned is lost.

* *agreement*: share of sessions that both routers place on the same prefill and decode engines.
* *source unknown*: share of the calls with a history for which the router did not name, among the
  sources, the engine that had answered last. Such a call takes less back and computes the rest.

Counts, no times: the same arguments give the same figures on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from tests.fakes.engine import FakeEngine, Script, fake_pair
from tests.server.router.support import Bench, bench, outcome_of
from turncache.protocol import PARENT_HEADER
from turncache_server.router.place import rank

#: Largest share of calls whose source is unknown.
LIMIT: Final = 0.01
#: Messages of a session; then another one takes its place.
_LONGEST: Final = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the routers get.

    Attributes:
        to_first: share of calls that go to the first router.
        refused: share of calls that the session's own decode engine refuses.
    """

    num_calls: int = 1000
    num_sessions: int = 60
    to_first: float = 0.8
    refused: float = 0.01
    seed: int = 1


@dataclass(slots=True, kw_only=True)
class Counts:
    """What came of it.

    Attributes:
        num_continued: calls with a history.
        num_unknown: of these, those whose source was not the engine that answered last.
        num_changed: of these, those that came to another router than the call before.
        num_moved: calls that another engine answered than the one they were placed on.
        num_agreed: sessions that both routers place alike.
    """

    num_calls: int = 0
    num_continued: int = 0
    num_unknown: int = 0
    num_changed: int = 0
    num_moved: int = 0
    num_sessions: int = 0
    num_agreed: int = 0
    prompt_tokens: int = 0
    lost_tokens: int = 0

    @property
    def unknown(self) -> float:
        """Share of continued calls whose source was unknown."""
        return self.num_unknown / max(1, self.num_continued)

    @property
    def agreement(self) -> float:
        """Share of sessions that are placed alike."""
        return self.num_agreed / max(1, self.num_sessions)


@dataclass(slots=True)
class _Session:
    name: str
    parent: str | None = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    last: str | None = None
    router: int | None = None

    @property
    def root(self) -> str:
        """What it is placed by."""
        return self.parent or self.name


class Replicas:
    """The load, and the count of what it finds."""

    def __init__(
        self,
        routers: Sequence[Bench],
        prefills: Sequence[FakeEngine],
        decodes: Sequence[FakeEngine],
        load: Load,
    ) -> None:
        self._routers, self._load = routers, load
        self._prefills, self._decodes = prefills, {engine.name: engine for engine in decodes}
        self._random = random.Random(load.seed)
        self._num_begun = 0
        self._sessions: list[_Session] = []
        for number in range(load.num_sessions):
            self._sessions.append(self._begin(number))
        self.counts = Counts()

    async def run(self) -> Counts:
        """Make the calls, then compare where each session is placed."""
        weights = [1 / (1 + number) for number in range(self._load.num_sessions)]
        for _ in range(self._load.num_calls):
            (number,) = self._random.choices(range(len(weights)), weights)
            session = self._sessions[number]
            if len(session.messages) >= _LONGEST:
                session = self._sessions[number] = self._begin(number)
            router = 0 if self._random.random() < self._load.to_first else 1
            if self._random.random() < self._load.refused:
                home = rank(session.root, self._decodes)[0]
                self._decodes[home].scripts.append(Script(status=503))
            await self._call(session, router)
        for session in self._sessions:
            first, second = [await self._call(session, number) for number in (0, 1)]
            self.counts.num_sessions += 1
            self.counts.num_agreed += first == second
        return self.counts

    def _begin(self, number: int) -> _Session:
        """Begin a session; every fourth is a child of the one before it."""
        self._num_begun += 1
        above = self._sessions[number - 1] if number % 4 == 3 else None
        return _Session(f"s-{self._num_begun}", None if above is None else above.name)

    async def _call(self, session: _Session, router: int) -> tuple[str, str]:
        """Make one call; return the engines that served it."""
        counts = self.counts
        session.messages.append({"role": "user", "content": f"{session.name} asks. " * 4})
        headers = {} if session.parent is None else {PARENT_HEADER: session.parent}
        answer = await self._routers[router].chat(
            session=session.name, messages=session.messages, headers=headers
        )
        assert answer.status_code == 200, answer.text
        prefill = next(engine for engine in self._prefills if engine.seen)
        decode = next(e for e in self._decodes.values() if any(not _refused(e, s) for s in e.seen))
        home = rank(session.root, self._decodes)[0]
        counts.num_calls += 1
        counts.num_moved += decode.name != home
        if session.last is not None:
            counts.num_continued += 1
            counts.num_changed += session.router != router
            xargs = prefill.seen[0].xargs
            named = [xargs.get("tc_source"), *xargs.get("tc_also", "").split()]
            counts.num_unknown += session.last not in named
        outcome = outcome_of(answer)
        counts.prompt_tokens += outcome.prompt
        counts.lost_tokens += outcome.lost
        session.last, session.router = decode.name, router
        session.messages.append(answer.json()["choices"][0]["message"])
        for engine in (*self._prefills, *self._decodes.values()):
            engine.seen.clear()
            engine.scripts.clear()
        for engine in self._prefills:
            engine.kv.flush()
        return prefill.name, decode.name


def _refused(engine: FakeEngine, seen: Any) -> bool:
    return seen.xargs.get("tc_request") not in engine.replies


async def measure(load: Load) -> Counts:
    """Run two routers and the load."""
    async with (
        fake_pair(prefills=2, decodes=3) as (prefills, decodes),
        bench(*prefills, *decodes) as first,
        bench(*prefills, *decodes) as second,
    ):
        await first.ready()
        await second.ready()
        return await Replicas((first, second), prefills, decodes, load).run()


def report(load: Load, counts: Counts) -> str:
    """Write the figures as a table."""
    rows = [
        ("calls", f"{counts.num_calls}, {load.to_first:.0%} to the first router"),
        ("calls after one to the other router", f"{counts.num_changed}"),
        ("calls answered elsewhere than placed", f"{counts.num_moved}"),
        ("agreement on placing", f"{counts.agreement:.2%} of {counts.num_sessions} sessions"),
        ("source unknown", f"{counts.unknown:.2%} ({counts.num_unknown}), limit {LIMIT:.0%}"),
        ("prompt tokens lost", f"{counts.lost_tokens / max(1, counts.prompt_tokens):.2%}"),
    ]
    return "\n".join(f"{name:38} {value}" for name, value in rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, and return 1 when the limit is broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.perf.bench_replicas")
    parser.add_argument("--calls", type=int, default=Load().num_calls)
    parser.add_argument("--to-first", type=float, default=Load().to_first)
    parser.add_argument("--refused", type=float, default=Load().refused)
    args = parser.parse_args(argv)
    logging.disable(logging.WARNING)  # every refusal is one
    load = Load(num_calls=args.calls, to_first=args.to_first, refused=args.refused)
    counts = asyncio.run(measure(load))
    print(report(load, counts))
    return int(counts.unknown >= LIMIT or counts.agreement < 1)


if __name__ == "__main__":
    sys.exit(main())
