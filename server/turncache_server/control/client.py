"""Asking an engine's control socket, from a thread or from asyncio."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from typing import TypeVar

import zmq
import zmq.asyncio

from turncache.errors import EngineFault, ProtocolError
from turncache_server.control.messages import (
    Refusal,
    Reply,
    Request,
    decode_reply,
    encode,
    open_envelope,
)

R = TypeVar("R", bound=Reply)


def _matching(data: bytes, number: int, kind: type[R], address: str) -> R | None:
    """Decode ``data`` when it answers question ``number``, else None."""
    got, body = open_envelope(data)
    if got != number:
        return None  # the late answer to a question that timed out
    reply = decode_reply(body)
    if isinstance(reply, Refusal):
        raise EngineFault(address, f"refused ({reply.code}): {reply.why}")
    if not isinstance(reply, kind):
        raise EngineFault(address, f"answered {type(reply).__name__}, expected {kind.__name__}")
    return reply


class ControlClient:
    """Blocking client, safe to use from many threads: each has a socket of its own.

    Meant for threads that live as long as the client: the sockets of a thread that has
    ended stay open until :meth:`close`.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._local = threading.local()
        self._numbers = itertools.count(1)
        # Keeps the sockets of ended threads from being closed by the garbage collector,
        # on whatever thread that runs.
        self._open: set[zmq.Socket[bytes]] = set()

    def ask(self, address: str, request: Request, kind: type[R], *, timeout_s: float) -> R:
        """Ask and wait for the answer.

        Raises:
            EngineFault: no answer in time, a refusal, or an answer of another kind.
        """
        number = next(self._numbers)
        deadline = time.monotonic() + timeout_s
        try:
            socket = self._socket(address)
            socket.send(encode(number, request), flags=zmq.NOBLOCK)
            while (left_s := deadline - time.monotonic()) > 0:
                if not socket.poll(max(1, int(left_s * 1000))):
                    break
                reply = _matching(socket.recv(), number, kind, address)
                if reply is not None:
                    return reply
        except (zmq.ZMQError, ProtocolError) as error:
            self._forget(address)
            raise EngineFault(address, f"control request failed: {error}") from error
        self._forget(address)
        raise EngineFault(address, f"no answer on the control socket within {timeout_s:g} s")

    def close(self) -> None:
        """Close every socket; no question may be in flight."""
        self._context.destroy(linger=0)
        self._open.clear()

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        sockets: dict[str, zmq.Socket[bytes]] | None = getattr(self._local, "sockets", None)
        if sockets is None:
            sockets = self._local.sockets = {}
        if address not in sockets:
            socket = self._context.socket(zmq.DEALER)
            self._open.add(socket)
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
            sockets[address] = socket
        return sockets[address]

    def _forget(self, address: str) -> None:
        socket = self._local.sockets.pop(address, None)
        if socket is not None:
            socket.close(linger=0)
            self._open.discard(socket)


class AsyncControlClient:
    """Client for one event loop: one socket per address, many questions in flight."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._numbers = itertools.count(1)
        self._peers: dict[str, _Peer] = {}

    async def ask(self, address: str, request: Request, kind: type[R], *, timeout_s: float) -> R:
        """Ask and await the answer.

        Raises:
            EngineFault: no answer in time, a refusal, or an answer of another kind.
        """
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(self._context, address)
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        peer.waiting[number] = future
        try:
            async with asyncio.timeout(timeout_s):
                await peer.socket.send(encode(number, request))
                reply = _matching(await future, number, kind, address)
        except TimeoutError as error:
            raise EngineFault(
                address, f"no answer on the control socket within {timeout_s:g} s"
            ) from error
        except (zmq.ZMQError, ProtocolError) as error:
            raise EngineFault(address, f"control request failed: {error}") from error
        finally:
            peer.waiting.pop(number, None)
        if reply is None:
            raise EngineFault(address, "the answer carries another number")
        return reply

    async def close(self) -> None:
        """Close every socket and wait for the readers."""
        for peer in self._peers.values():
            await peer.close()
        self._peers.clear()
        self._context.destroy(linger=0)


class _Peer:
    """One DEALER socket and the task that hands answers to their questions."""

    def __init__(self, context: zmq.asyncio.Context, address: str) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # Questions to a dead engine must fail by their deadline, not pile up.
        self.socket.setsockopt(zmq.SNDHWM, 1000)
        self.socket.connect(address)
        self.waiting: dict[int, asyncio.Future[bytes]] = {}
        self._reader = asyncio.create_task(self._read(), name=f"turncache-control {address}")

    async def _read(self) -> None:
        while True:
            data = await self.socket.recv()
            try:
                number, _ = open_envelope(data)
            except ProtocolError as error:
                # Whose answer it is cannot be read, but nobody will get one from a peer
                # that speaks another version: better the reason now than silence until
                # the deadline.
                for unanswered in self.waiting.values():
                    if not unanswered.done():
                        unanswered.set_exception(error)
                continue
            future = self.waiting.get(number)
            if future is not None and not future.done():
                future.set_result(data)

    async def close(self) -> None:
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self.socket.close(linger=0)
