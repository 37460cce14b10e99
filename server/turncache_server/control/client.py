"""Asking an engine's control socket, from a thread or from asyncio.

A connection that cannot be made because of its keys is told apart from one that nobody
answers: ZMQ reports how handshakes end to a *monitor*. Somebody has to read it at all times,
because ZMQ's own thread waits for room in a full one, and with it every other connection.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, TypeVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from turncache.errors import EngineFault, EngineRefusal, ProtocolError
from turncache_server.control.addresses import is_ipv6
from turncache_server.control.keys import FleetKeys
from turncache_server.control.messages import (
    MAX_MESSAGE_BYTES,
    ModeReply,
    Refusal,
    Reply,
    Request,
    SetDraining,
    SetMode,
    decode_reply,
    encode,
    open_envelope,
)

R = TypeVar("R", bound=Reply)

_NO_NAMES: Final[Mapping[str, str]] = MappingProxyType({})
#: Questions that wait for a dead engine must fail by their deadline, not pile up.
_QUESTIONS_WAITING: Final = 1000
_HANDSHAKES: Final = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
#: Handshakes that the other side cuts off without a word before that counts as a refusal. One
#: alone may have met an engine that was about to end.
_CUT_OFF: Final = 2


class _Handshake:
    """What the monitor of one connection has told so far.

    Attributes:
        done: both sides know each other.
        refusal: why they never will, None as long as they may.
    """

    def __init__(self, address: str, *, keyed: bool) -> None:
        self._address = address
        self._keyed = keyed
        self._num_cut = 0
        self.done = False
        self.refusal: EngineRefusal | None = None

    def note(self, frames: list[bytes]) -> None:
        """Take in one message of the monitor."""
        event = parse_monitor_message(frames)["event"]
        if event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self.done, self._num_cut, self.refusal = True, 0, None
            return
        self.done = False
        if event == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
            # What a server does with keys of another secret, which it cannot tell from noise;
            # and what is left to see when it was quicker to close than this side to read.
            self._num_cut += 1
            if self._num_cut >= _CUT_OFF:
                self.refusal = self._refused(self._secrets_differ())
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self.refusal = self._refused("the key is not one of that fleet")
        else:
            self.refusal = self._refused(self._secrets_differ())

    def too_late(self, timeout_s: float) -> EngineFault:
        """Return the error for a question whose time is over."""
        if self.refusal is not None:
            return self.refusal
        if self._num_cut and not self.done:
            return self._refused(f"{self._secrets_differ()}; or it is just ending")
        return EngineFault(
            self._address,
            f"no answer on the control socket within {timeout_s:g} s: is the engine running, and "
            "is this its control_address?",
        )

    def _secrets_differ(self) -> str:
        # One text for all that may be behind it: which of two events comes first is chance.
        if self._keyed:
            return (
                "it does not take this side's fleet secret, it has another one or none: give both "
                "the same fleet_secret_file"
            )
        return (
            "it has a fleet secret and this side has none: give this side fleet_secret_file; or it "
            "is no control socket: not an engine's HTTP port, but its control_address"
        )

    def _refused(self, why: str) -> EngineRefusal:
        return EngineRefusal(self._address, "unauthenticated", why)


def _prepare(socket: zmq.Socket[Any], address: str, keys: FleetKeys | None) -> None:
    """Set a socket up, before it is connected."""
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDHWM, _QUESTIONS_WAITING),
        (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
        (zmq.IPV6, int(is_ipv6(address))),
    ):
        socket.setsockopt(option, value)
    if keys is not None:
        keys.ask_with(socket)


def _matching(data: bytes, number: int, kind: type[R], address: str) -> R | None:
    """Decode ``data`` when it answers question ``number``, else None."""
    got, body = open_envelope(data)
    if got != number:
        return None  # the late answer to a question that timed out
    reply = decode_reply(body)
    if isinstance(reply, Refusal):
        raise EngineRefusal(address, reply.code, reply.why)
    if not isinstance(reply, kind):
        raise EngineFault(address, f"answered {type(reply).__name__}, expected {kind.__name__}")
    return reply


def _broken(address: str, error: zmq.ZMQError | ProtocolError) -> EngineFault:
    if isinstance(error, ProtocolError) and error.field == "version":
        return EngineRefusal(address, error.field, str(error))
    return EngineFault(address, f"control request failed: {error}")


class _Link:
    """One thread's DEALER socket to an address, and its handshake."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: FleetKeys | None
    ) -> None:
        self.handshake = _Handshake(address, keyed=keys is not None)
        self.socket = context.socket(zmq.DEALER)
        _prepare(self.socket, address, keys)
        # Kept only until the handshake has ended, by when its question has ended too: in
        # between questions nobody would read it.
        self._monitor: zmq.Socket[bytes] | None = self.socket.get_monitor_socket(_HANDSHAKES)
        self.socket.connect(address)

    def wait(self, left_s: float) -> bool:
        """Wait for an answer, and say whether there is one.

        Raises:
            EngineRefusal: the handshake has failed.
        """
        left_ms = max(1, int(left_s * 1000))
        if self._monitor is None:
            return bool(self.socket.poll(left_ms))
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(left_ms))
        if self._monitor in ready:
            self.handshake.note(self._monitor.recv_multipart())
            if self.handshake.refusal is not None:
                raise self.handshake.refusal
        if self.handshake.done or self.socket in ready:
            self._stop_watching()
        return self.socket in ready

    def close(self) -> None:
        self._stop_watching()
        self.socket.close(linger=0)

    def _stop_watching(self) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
            self._monitor = None


class ControlClient:
    """Blocking client, safe to use from many threads: each has a socket of its own.

    Meant for threads that live as long as the client: the sockets of a thread that has
    ended stay open until :meth:`close`.

    Args:
        keys: of the fleet, None to ask engines without keys.
        names: engine that is meant at an address; any other one there refuses.
    """

    def __init__(
        self, keys: FleetKeys | None = None, *, names: Mapping[str, str] = _NO_NAMES
    ) -> None:
        self._keys = keys
        self._names = dict(names)
        self._context = zmq.Context()
        self._local = threading.local()
        self._numbers = itertools.count(1)
        # Keeps the sockets of ended threads from being closed by the garbage collector,
        # on whatever thread that runs.
        self._open: set[_Link] = set()

    def ask(self, address: str, request: Request, kind: type[R], *, timeout_s: float) -> R:
        """Ask and wait for the answer.

        Raises:
            EngineRefusal: a refusal, keys that do not fit, or another version.
            EngineFault: no answer in time, or an answer of another kind.
        """
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        try:
            link = self._link(address)
            question = encode(number, request, to=self._names.get(address, ""))
            link.socket.send(question, flags=zmq.NOBLOCK)
            while (left_s := deadline - time.monotonic()) > 0:
                if not link.wait(left_s):
                    continue
                reply = _matching(link.socket.recv(), number, kind, address)
                if reply is not None:
                    return reply
        except (zmq.ZMQError, ProtocolError) as error:
            self._forget(address)
            raise _broken(address, error) from error
        except EngineRefusal:
            self._forget(address)
            raise
        self._forget(address)
        raise link.handshake.too_late(timeout_s)

    def close(self) -> None:
        """Close every socket; no question may be in flight."""
        for link in self._open:
            link.close()
        self._context.destroy(linger=0)
        self._open.clear()

    def _link(self, address: str) -> _Link:
        links: dict[str, _Link] | None = getattr(self._local, "links", None)
        if links is None:
            links = self._local.links = {}
        if address not in links:
            links[address] = _Link(self._context, address, self._keys)
            self._open.add(links[address])
        return links[address]

    def _forget(self, address: str) -> None:
        links: dict[str, _Link] = getattr(self._local, "links", {})
        link = links.pop(address, None)
        if link is not None:
            link.close()
            self._open.discard(link)


def switch_mode(client: ControlClient, address: str, mode: str, *, timeout_s: float) -> ModeReply:
    """Switch an engine's mode: ask for the ticket, then change with it.

    Raises:
        EngineFault: as :meth:`ControlClient.ask`; code ``stale`` when somebody else has
            switched it in between.
    """
    seen = client.ask(address, SetMode(), ModeReply, timeout_s=timeout_s)
    change = SetMode(mode=mode, ticket=seen.ticket)
    return client.ask(address, change, ModeReply, timeout_s=timeout_s)


def set_draining(
    client: ControlClient, address: str, draining: bool, *, timeout_s: float
) -> ModeReply:
    """Let an engine's sessions go to the others, or stop that; raises as :func:`switch_mode`."""
    seen = client.ask(address, SetMode(), ModeReply, timeout_s=timeout_s)
    change = SetDraining(draining=draining, ticket=seen.ticket)
    return client.ask(address, change, ModeReply, timeout_s=timeout_s)


class AsyncControlClient:
    """Client for one event loop: one socket per address, many questions in flight.

    Args:
        keys: of the fleet, None to ask engines without keys.
        names: engine that is meant at an address; any other one there refuses.
    """

    def __init__(
        self, keys: FleetKeys | None = None, *, names: Mapping[str, str] = _NO_NAMES
    ) -> None:
        self._keys = keys
        self._names = dict(names)
        self._context = zmq.asyncio.Context()
        self._numbers = itertools.count(1)
        self._peers: dict[str, _Peer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def ask(self, address: str, request: Request, kind: type[R], *, timeout_s: float) -> R:
        """Ask and await the answer.

        Raises:
            EngineRefusal: a refusal, keys that do not fit, or another version.
            EngineFault: no answer in time, or an answer of another kind.
        """
        peer = self._peers.get(address)
        if peer is not None and peer.handshake.refusal is not None:
            self._drop(address, peer)
            peer = None
        if peer is None:
            peer = self._peers[address] = _Peer(self._context, address, self._keys)
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        peer.waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await peer.socket.send(encode(number, request, to=self._names.get(address, "")))
                reply = _matching(await future, number, kind, address)
        except TimeoutError as error:
            raise peer.handshake.too_late(timeout_s) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task: the socket was closed under a question that was still being sent,
            # because another one was refused.
            raise peer.handshake.too_late(timeout_s) from error
        except (zmq.ZMQError, ProtocolError) as error:
            raise _broken(address, error) from error
        finally:
            peer.waiting.pop(number, None)
            if not future.cancel() and not future.cancelled():
                # It may have failed while the question was still being sent: that is heard here,
                # or asyncio would write of it when it is collected.
                future.exception()
            if peer.handshake.refusal is not None:
                self._drop(address, peer)
        if reply is None:
            raise EngineFault(address, "the answer carries another number")
        return reply

    def expect(self, address: str, engine_id: str) -> None:
        """Mean this engine at an address: any other one there refuses."""
        self._names[address] = engine_id

    def forget(self, address: str) -> None:
        """Close the connection to an address, which nobody will ask any more."""
        self._names.pop(address, None)
        if (peer := self._peers.get(address)) is not None:
            self._drop(address, peer)

    async def close(self) -> None:
        """Close every socket and wait for the readers."""
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
        await asyncio.gather(*self._closing)
        self._context.destroy(linger=0)

    def _drop(self, address: str, peer: _Peer) -> None:
        """Let the next question try a new connection; ZMQ does not repeat some handshakes."""
        if self._peers.get(address) is peer:
            del self._peers[address]
            task = asyncio.create_task(peer.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


class _Peer:
    """One DEALER socket and the tasks that hand answers to their questions."""

    def __init__(self, context: zmq.asyncio.Context, address: str, keys: FleetKeys | None) -> None:
        self.socket = context.socket(zmq.DEALER)
        _prepare(self.socket, address, keys)
        self.handshake = _Handshake(address, keyed=keys is not None)
        self._monitor = self.socket.get_monitor_socket(_HANDSHAKES)
        self.socket.connect(address)
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self._tasks = (
            asyncio.create_task(self._read(), name=f"turncache-control {address}"),
            asyncio.create_task(self._watch(), name=f"turncache-handshake {address}"),
        )

    async def _read(self) -> None:
        while True:
            data = await self.socket.recv()
            try:
                number, _ = open_envelope(data)
            except ProtocolError as error:
                # Whose answer it is cannot be read, but nobody will get one from a peer
                # that speaks another version: better the reason now than silence until
                # the deadline.
                self._fail_all(error)
                continue
            future = self.waiting.get(number)
            if future is not None and not future.done():
                future.set_result(data)

    async def _watch(self) -> None:
        while True:
            self.handshake.note(await self._monitor.recv_multipart())
            if self.handshake.refusal is not None:
                self._fail_all(self.handshake.refusal)

    def _fail_all(self, error: Exception) -> None:
        for unanswered in self.waiting.values():
            if not unanswered.done():
                unanswered.set_exception(error)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.socket.disable_monitor()
        self._monitor.close(linger=0)
        self.socket.close(linger=0)
