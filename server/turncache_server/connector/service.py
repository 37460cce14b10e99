"""What the control socket of an engine answers: only reads, and posts to the mailbox."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Final

from turncache.protocol import Mode
from turncache_server.connector.config import SECTION, Settings
from turncache_server.connector.extension import Extension
from turncache_server.connector.lacking import LackingCalls
from turncache_server.control.keys import FleetKeys, read_fleet_keys
from turncache_server.control.messages import (
    Call,
    CallReply,
    Hello,
    HelloReply,
    Lacking,
    LackingReply,
    ModeReply,
    Peek,
    PeekReply,
    Refusal,
    Repeated,
    Reply,
    Request,
    SessionRow,
    Sessions,
    SessionsReply,
    SetDraining,
    SetMode,
    Signal,
    SignalReply,
    Stats,
    StatsReply,
    Verify,
    VerifyReply,
    session_digest,
)
from turncache_server.control.server import ControlServer
from turncache_server.retention.mailbox import Signalled, SwitchMode
from turncache_server.retention.sessions import KeptSession
from turncache_server.retention.values import Signal as Kind

#: Side channel of engines that exchange KV: host and port.
Endpoint = tuple[str, int]


class Service:
    """Answers for one engine.

    Owner of whether the engine is draining, which only routers act upon, and which ends with the
    process. A change of it or of the mode needs the ticket that the last answer about the mode
    has shown, which names this start of the engine and the changes so far: a message that
    arrives twice, or that was meant for the process before, changes nothing.

    Args:
        extension: the engine's extension.
        fingerprint: what must be equal on a peer.
        endpoint: NIXL side channel, None on an engine that exchanges no KV.
        more_stats: further counters, for instance of the pulls.
        lacking: the calls that wait for their prompt to be prefilled again, None on an engine
            where none ever does.
    """

    def __init__(
        self,
        extension: Extension,
        *,
        fingerprint: Mapping[str, str],
        endpoint: Endpoint | None = None,
        more_stats: Callable[[], Mapping[str, float]] = dict,
        lacking: LackingCalls | None = None,
    ) -> None:
        self._extension = extension
        self._fingerprint = dict(fingerprint)
        self._endpoint = endpoint
        self._more_stats = more_stats
        self._lacking = lacking
        self._start = uuid.uuid4().hex
        self._num_changes = 0
        self._draining = False

    def __call__(self, request: Request) -> Reply:
        """Answer one question."""
        match request:
            case Hello():
                return self._hello()
            case Peek() | Verify():
                return self._show(request)
            case Call():
                return self._call(request)
            case Signal():
                return self._signal(request)
            case SetMode() | SetDraining():
                return self._change(request)
            case Sessions():
                return self._sessions(request)
            case Lacking() | Repeated():
                return self._lack(request)
            case Stats():
                return StatsReply(
                    counters={**self._extension.counters(), **self._more_stats()},
                    gauges=self._extension.gauges(),
                )

    def _hello(self) -> HelloReply:
        extension, facts = self._extension, self._extension.facts
        source = extension.source
        host, port = self._endpoint or ("", 0)
        missing = list(facts.missing)
        if extension.broken is not None:
            missing.append(extension.broken)
        return HelloReply(
            name=extension.settings.name,
            engine_id=facts.engine_id,
            start_id=source.start_id if source is not None else "",
            generation=source.generation() if source is not None else 0,
            side=extension.settings.side.value,
            mode=extension.requested_mode.value,
            fingerprint=self._fingerprint,
            nixl_host=host,
            nixl_port=port,
            tp_size=facts.tp_size,
            block_size=facts.block_size,
            num_blocks=facts.num_blocks,
            max_model_len=facts.max_model_len,
            vllm_version=facts.vllm_version,
            missing=missing,
        )

    def _show(self, request: Peek | Verify) -> Reply:
        source = self._extension.source
        if isinstance(request, Verify):
            nothing = VerifyReply(start_id="", generation=0, valid=0)
            return nothing if source is None else source.verify(request)
        if source is None:
            return PeekReply(start_id="", generation=0, block_ids=[], epochs=[])
        return source.peek(request)

    def _call(self, request: Call) -> CallReply:
        record = self._extension.book.get(request.request)
        if record is None:
            return CallReply(found=False)
        return CallReply(
            found=True,
            done=record.done,
            prompt=record.prompt,
            local=record.local,
            returned=record.returned,
            computed=record.computed,
            lost=record.lost,
            reason=record.reason.value,
            at=record.at,
            pull_s=record.pull_s,
        )

    def _signal(self, request: Signal) -> Reply:
        extension = self._extension
        if request.kind not in set(Kind):
            legal = ", ".join(Kind)
            return Refusal(code="malformed", why=f"kind {request.kind!r}: expected one of {legal}")
        if extension.requested_mode is not Mode.ON:
            return SignalReply(accepted=False, why=f"mode {extension.requested_mode.value}")
        if not extension.table.knows(request.session):
            return SignalReply(accepted=False, why="no call of this session is remembered")
        longest_s = extension.settings.retain_max_s
        expect_s = request.expect_s
        clipped_s = longest_s if expect_s is not None and expect_s > longest_s else None
        until_s = expect_s if clipped_s is None else clipped_s
        command = Signalled(request.session, Kind(request.kind), until_s)
        if not extension.mailbox.post(command):
            return SignalReply(accepted=False, why="the engine's mailbox is full; try again")
        return SignalReply(accepted=True, clipped_s=clipped_s)

    def _change(self, request: SetMode | SetDraining) -> Reply:
        return self._mode(request) if isinstance(request, SetMode) else self._drain(request)

    def _mode(self, request: SetMode) -> Reply:
        extension = self._extension
        # Without a ticket it comes from version 1, which has none.
        if request.mode and request.ticket and request.ticket != self._ticket():
            return _STALE
        if request.mode and request.mode not in set(Mode):
            legal = ", ".join(mode.value for mode in Mode)
            return Refusal(code="malformed", why=f"mode {request.mode!r}: expected one of {legal}")
        if not request.mode:
            return self._in_force(extension.broken or "")
        if extension.broken is not None:
            return self._in_force(extension.broken)
        if not extension.mailbox.post(SwitchMode(request.mode)):
            return self._in_force("the engine's mailbox is full; try again")
        extension.requested_mode = Mode(request.mode)
        self._num_changes += 1
        return self._in_force("")

    def _in_force(self, why: str) -> ModeReply:
        extension = self._extension
        mode = extension.requested_mode
        pulls = mode is Mode.ON and not extension.facts.unsupported_pull
        return ModeReply(
            mode=mode.value,
            why=why,
            pulls=pulls,
            ticket=self._ticket(),
            draining=self._draining,
            start_id=self._start,
        )

    def _drain(self, request: SetDraining) -> Reply:
        if request.ticket != self._ticket():
            return _STALE
        self._draining = request.draining
        self._num_changes += 1
        return self._in_force("")

    def _sessions(self, request: Sessions) -> Reply:
        extension = self._extension
        kept = extension.kept_sessions()
        kept.sort(key=lambda each: each.wanted_blocks, reverse=True)
        asked = [each for each in kept if request.session in ("", session_digest(each.key))]
        return SessionsReply(
            name=extension.settings.name,
            side=extension.settings.side.value,
            rows=[_row(each) for each in asked[: request.limit]],
            num_sessions=len(kept),
            num_handovers=extension.num_handovers(),
            num_calls=extension.num_calls,
            block_size=extension.facts.block_size,
            draining=self._draining,
        )

    def _lack(self, request: Lacking | Repeated) -> Reply:
        if self._lacking is None:
            return LackingReply(requests=[])
        if isinstance(request, Repeated):
            self._lacking.repeated(request.request, request.source)
        return LackingReply(requests=self._lacking.requests())

    def _ticket(self) -> str:
        return f"{self._start}:{self._num_changes}"


_STALE: Final = Refusal(
    code="stale",
    why="mode or draining was switched since it was asked for, or the engine has restarted: "
    "ask again",
)


def _row(kept: KeptSession) -> SessionRow:
    return SessionRow(
        session=session_digest(kept.key),
        state="serving" if kept.in_flight else "waiting",
        lineages=kept.lineages,
        kept_blocks=kept.wanted_blocks,
        expected_s=kept.expected_s,
        kept_s=kept.retain_s,
    )


def fleet_keys(settings: Settings) -> FleetKeys | None:
    """Return the fleet's keys, None where the settings name no secret.

    Raises:
        ConfigError: the secret's file cannot be used.
        EnvironmentFault: libzmq was built without CURVE.
    """
    if settings.fleet_secret_file is None:
        return None
    return read_fleet_keys(settings.fleet_secret_file, setting=f"{SECTION}.fleet_secret_file")


def open_control(
    extension: Extension, service: Service, keys: FleetKeys | None
) -> ControlServer | None:
    """Bind the engine's control socket, None where the settings name no address.

    Raises:
        ConfigError: the address cannot be bound.
    """
    settings = extension.settings
    if settings.control_address is None:
        return None
    server = ControlServer(settings.control_address, service, name=settings.name, keys=keys)
    extension.count_also(server.counters)
    return server
