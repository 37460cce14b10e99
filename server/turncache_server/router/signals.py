"""Telling engines what happens to a session between its calls."""

from __future__ import annotations

from collections.abc import Iterable

from turncache.errors import EngineFault
from turncache_server.control.messages import Signal, SignalReply
from turncache_server.router.events import SignalSent
from turncache_server.router.place import rank
from turncache_server.router.plan import Snapshot
from turncache_server.router.services import Services

#: What becomes of a signal that no engine has heard.
UNHEARD = SignalReply(accepted=False, why="no engine answers on its control socket")


async def send_signal(services: Services, engines: Iterable[str], signal: Signal) -> SignalReply:
    """Send a signal to engines by name, and return the best of their answers.

    A signal only advises: an engine that does not hear it orders what it keeps by less.
    """
    best = UNHEARD
    for name in engines:
        address = services.pool.control_of(name)
        if address is None:
            continue
        try:
            reply = await services.control.ask(
                address, signal, SignalReply, timeout_s=services.config.control_timeout_s
            )
        except EngineFault:
            result = "no_answer"
        else:
            result = "accepted" if reply.accepted else "refused"
            if not best.accepted:
                best = reply
        services.events.emit(SignalSent(engine=name, kind=signal.kind, result=result))
    return best


def holders(snapshot: Snapshot, root: str, served_by: str | None) -> list[str]:
    """Return the engines that may hold a session: who answered last, else where it is placed."""
    names = []
    for side in snapshot.needed_sides:
        of_side = [engine.name for engine in snapshot.of_side(side)]
        names.append(served_by if served_by in of_side else rank(root, of_side)[0])
    return names
