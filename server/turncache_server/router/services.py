"""What every call uses, wired once in ``app``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from turncache_server.router.background import Background
from turncache_server.router.config import RouterConfig
from turncache_server.router.events import Events
from turncache_server.router.following import Conversations
from turncache_server.router.forecast import Forecast
from turncache_server.router.gate import Gate
from turncache_server.router.keys import KeyFile
from turncache_server.router.limits import InFlight
from turncache_server.router.next_prompts import NextPrompts
from turncache_server.router.outcomes import AsksControl
from turncache_server.router.plan import Snapshot
from turncache_server.router.pool import Pool
from turncache_server.router.pressure import BackPressure
from turncache_server.router.records import CallRecords
from turncache_server.router.repeating import Repeats
from turncache_server.router.sessions import SessionTable
from turncache_server.router.traces import Traces
from turncache_server.router.upstream import Upstream


@dataclass(slots=True)
class Switches:
    """What can be changed while the router runs.

    Attributes:
        return_enabled: prefill is told to pull from decode.
        draining: the router is shutting down.
    """

    return_enabled: bool
    draining: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """The parts that a call meets.

    Attributes:
        clock: monotonic seconds.
        new_id: makes a call's id: unique, and not guessable, because it opens the record.
        engine_key: the router's own key for engines, None to pass the client's on.
        in_flight: calls of each tenant at present.
        repeats: has prefill legs sent again whose prompt was lost.
        gate: where new sessions wait for room, None when they never do.
        pressure: where prompts wait while decode is behind, None when they never do.
        keys: of the router's clients, None to serve everybody.
        traces: spans of the calls, None where nobody asked for them.
    """

    config: RouterConfig
    switches: Switches
    pool: Pool
    upstream: Upstream
    control: AsksControl
    sessions: SessionTable
    conversations: Conversations
    forecast: Forecast
    next_prompts: NextPrompts
    records: CallRecords
    events: Events
    background: Background
    clock: Callable[[], float]
    new_id: Callable[[], str]
    engine_key: str | None
    in_flight: InFlight
    repeats: Repeats
    gate: Gate | None = None
    pressure: BackPressure | None = None
    keys: KeyFile | None = None
    traces: Traces | None = None

    def snapshot(self) -> Snapshot:
        """Return the pool and the switches as they are now."""
        return self.pool.snapshot(return_enabled=self.switches.return_enabled)
