"""Telling engines what happens to a session between its calls."""

from __future__ import annotations

from collections.abc import Iterable

from turncache.errors import EngineFault
from turncache_server.control.messages import Signal, SignalReply
from turncache_server.router.events import SignalSent
from turncache_server.router.services import Services


async def send_signal(services: Services, engines: Iterable[str], signal: Signal) -> None:
    """Send a signal to engines by name; what becomes of it is told to listeners.

    A signal only advises: an engine that does not hear it orders what it keeps by less.
    """
    for name in engines:
        address = services.pool.config_of(name).control
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
        services.events.emit(SignalSent(engine=name, kind=signal.kind, result=result))
