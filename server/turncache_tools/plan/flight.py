"""What is under way in a simulation: sessions, calls, and engines with those who wait. Values."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from turncache_server.retention.ghost_pool import Grant
from turncache_server.retention.values import Admission
from turncache_tools.bench.workload import AgentSpec, CallSpec
from turncache_tools.plan.pools import EnginePool
from turncache_tools.plan.served import Served


@dataclass(slots=True)
class Session:
    """An agent's state.

    Attributes:
        chain: its units' ids.
        history: tokens of the last prompt and answer.
        prompt_before: tokens of the last prompt.
        then: what goes on when it has ended.
        parent: the session that it is a sub-agent of.
    """

    name: str
    spec: AgentSpec
    chain: list[int]
    history: int
    then: Callable[[float], None]
    parent: str | None = None
    number: int = 0
    prompt_before: int = 0


@dataclass(slots=True)
class Call:
    """A call in flight."""

    session: Session | None
    spec: CallSpec
    number: int
    arrived_s: float
    prompt: int
    chain: list[int]
    prompt_units: int
    # Tokens of the prompt that the prefill and the decode engine had, if nothing was evicted.
    known: int
    decode_known: int
    grant: Grant | None = None
    admission: Admission | None = None
    decode_grant: Grant | None = None
    decode_admission: Admission | None = None
    local: int = 0
    loaded: int = 0
    returned: int = 0
    compute_s: float = 0.0
    admitted_s: float = 0.0
    queued_s: float = 0.0
    since_s: float = 0.0
    ttft_s: float = 0.0

    def served(self, block: int, now_s: float) -> Served:
        """Return what is told of an agent's call that ends now; ``block`` in tokens."""
        assert self.session is not None
        calls = self.session.spec.calls
        last = self.number == len(calls)
        seen = max(self.known, self.decode_known)
        seen = min(seen, self.prompt - 1) // block * block
        return Served(
            session=self.session.name,
            call=self.number,
            arrived_s=self.arrived_s,
            ttft_s=self.ttft_s,
            admitted_s=self.admitted_s,
            queued_s=self.queued_s,
            ends_turn=self.session.parent is None and (last or calls[self.number].by_user),
            ended_s=now_s,
            prompt=self.prompt,
            answer=self.spec.answer,
            local=self.local,
            loaded=self.loaded,
            returned=self.returned,
            computed=self.prompt - self.local - self.returned,
            seen=seen,
            again=max(0, seen - self.local - self.returned),
            compute_s=self.compute_s,
        )


@dataclass(slots=True)
class Engine:
    """An engine's pool and those who wait for it."""

    pool: EnginePool
    units: int
    waiting: deque[Call] = field(default_factory=deque)
    pulled: deque[Call] = field(default_factory=deque)
    busy: bool = False
    saw_shared: bool = False
