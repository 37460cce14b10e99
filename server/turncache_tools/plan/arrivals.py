"""Who calls when: agents with their waits and sub-agents, and ordinary calls. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from turncache_tools.bench.workload import AgentSpec
from turncache_tools.plan.events import Events
from turncache_tools.plan.flight import Session
from turncache_tools.plan.load import Load


class Arrivals:
    """Lets agents of a load begin, wait and end.

    Args:
        load: calls.
        events: simulated time.
        shared: ids of the units that all agents begin with.
        first_s: that a first call of so many tokens takes: agents begin one behind the other.
        arrive: told of a session whose next call comes.
        other: told of an ordinary call.
    """

    def __init__(
        self,
        load: Load,
        events: Events,
        *,
        shared: Sequence[int],
        first_s: Callable[[int], float],
        arrive: Callable[[float, Session], None],
        other: Callable[[float], None],
    ) -> None:
        self._load, self._events = load, events
        self._shared, self._first_s = shared, first_s
        self._arrive, self._tell_other = arrive, other
        self._draw = random.Random(f"others-{load.seed}")  # noqa: S311 - reproducible, not secret
        self.open_agents = 0

    def begin(self) -> None:
        """Let the first agents begin, and ordinary calls come."""
        agents = self._load.workload.agents
        total = len(agents) if self._load.num_agents is None else self._load.num_agents
        self.open_agents = total
        left = iter(range(total))

        def begin(now_s: float, number: int) -> None:
            spec = agents[number % len(agents)]
            self._start_agent(now_s, spec, f"{spec.name}#{number}", ended)

        def ended(now_s: float) -> None:
            self.open_agents -= 1
            if self._load.sessions is not None and (number := next(left, None)) is not None:
                begin(now_s, number)

        places = total if self._load.sessions is None else min(self._load.sessions, total)
        at_s = 0.0
        for number in itertools.islice(left, places):
            spec = agents[number % len(agents)]
            if self._load.sessions is None:
                at_s = spec.starts_s
            self._events.at(at_s, begin, number)
            # One behind the other: a start of all at once would be a queue of its own.
            at_s += self._first_s(self._load.workload.shared + spec.calls[0].new)
        if self._load.others_per_s:
            self._events.at(self._draw.expovariate(self._load.others_per_s), self._other, None)

    def _start_agent(
        self,
        now_s: float,
        spec: AgentSpec,
        name: str,
        then: Callable[[float], None],
        parent: str | None = None,
    ) -> None:
        shared = max(0, self._load.workload.shared)
        self.next_call(now_s, Session(name, spec, list(self._shared), shared, then, parent))

    def next_call(self, now_s: float, session: Session) -> None:
        """Begin the wait before a session's next call, or end the session."""
        if session.number == len(session.spec.calls):
            session.then(now_s)
            return
        call = session.spec.calls[session.number]
        open_children = len(call.spawned)
        if not open_children:
            wait_s = call.wait_s if session.number else 0.0
            self._events.at(now_s + wait_s, self._arrive, session)
            return

        def child_ended(at_s: float) -> None:
            nonlocal open_children
            open_children -= 1
            if not open_children:
                self._events.at(at_s + call.wait_s, self._arrive, session)

        for child in call.spawned:
            name = f"{session.name}/{child.name}"
            self._start_agent(now_s, child, name, child_ended, session.name)

    def _other(self, now_s: float, _: None) -> None:
        self._tell_other(now_s)
        next_s = now_s + self._draw.expovariate(self._load.others_per_s)
        self._events.at(next_s, self._other, None)
