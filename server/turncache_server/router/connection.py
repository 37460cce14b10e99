"""One connection to an engine: one request at a time, bytes as they come.

The parts of an answer go from the socket to whoever takes them in one call, without a task
that wakes up for each: a stream costs what its bytes cost. Time is measured by one timer
that looks, when it is due, when the engine was last heard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, cast

from turncache_server.router.wire import AnswerReader, WireError

#: Takes a part of a body; returns whether it can take the next one at once.
Take = Callable[[bytes], bool]

#: Bytes of a body that wait for whoever reads it, before the engine is made to wait.
_MAX_WAITING: Final = 256 * 1024
#: Large requests are sent in pieces, so that other calls go on meanwhile.
_PIECE: Final = 256 * 1024


class Broken(Exception):
    """Raised when a connection has ended before its answer.

    Attributes:
        kind: ``disconnected``, ``timeout`` or ``bad_answer``.
        untouched: no byte of an answer has come.
    """

    def __init__(self, kind: str, *, untouched: bool = False) -> None:
        super().__init__(kind)
        self.kind = kind
        self.untouched = untouched


class Connection(asyncio.BufferedProtocol):
    """A connection.

    Args:
        space: what arrives is read into, and taken from before anything else is read: all
            connections of an event loop share it. (Memory of its own for each read, which a
            protocol without a buffer gets, takes longer than the rest of a chunk's way.)

    Attributes:
        transport: of the connection.
        num_requests: requests that were sent on it.
    """

    transport: asyncio.Transport

    def __init__(self, space: memoryview) -> None:
        self._loop = asyncio.get_running_loop()
        self._space = space
        self._reader = AnswerReader()
        self._take: Take | None = None
        self._full = False
        self._refused: Exception | None = None
        self._parts: list[bytes] = []
        self._num_waiting = 0
        self._wake: asyncio.Future[None] | None = None
        self._broken: Broken | None = None
        self._unsent = memoryview(b"")
        self._writable = True
        self._reading = True
        self._heard = False
        self._heard_s = 0.0
        self._until_s: float | None = None
        self._idle_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self.num_requests = 0

    # --- what the event loop calls --------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Transports of other loops are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _: int) -> memoryview:
        """Say where what arrives is to be put."""
        return self._space

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has arrived."""
        reader = self._reader
        if reader.done or not self.num_requests:
            self.abort()  # nobody has asked for anything
            return
        self._heard = True
        self._heard_s = self._loop.time()
        try:
            part = reader.feed(bytes(self._space[:nbytes]))
        except WireError:
            self._break(Broken("bad_answer"))
            return
        if part and self._take is not None:
            self._give(part, self._take)
            if not reader.done:
                return
        elif part:
            self._parts.append(part)
            self._num_waiting += len(part)
            if self._num_waiting > _MAX_WAITING:
                self._pause()
        self._wake_up()

    def eof_received(self) -> None:
        """Take the end of what the engine sends."""
        try:
            self._reader.end()
        except WireError:
            self._break(Broken("disconnected", untouched=not self._heard))
        self._wake_up()

    def connection_lost(self, _: Exception | None) -> None:
        """Tell whoever waits."""
        self._stop_timer()
        if not self._reader.done:
            self._break(Broken("disconnected", untouched=not self._heard))

    def pause_writing(self) -> None:
        """Send no more of a request: the engine does not read."""
        self._writable = False

    def resume_writing(self) -> None:
        """Send the next pieces of a request."""
        self._writable = True
        self._push()

    # --- what its holder calls ------------------------------------------------------------

    @property
    def answer(self) -> AnswerReader:
        """What reads the answer to the last request."""
        return self._reader

    @property
    def reusable(self) -> bool:
        """Whether its last request has been answered and it can take another one."""
        return (
            self._reader.done
            and self._reader.reusable
            and not self._unsent
            and self._broken is None
            and not self.transport.is_closing()
        )

    async def ask(self, head: bytes, body: bytes, until_s: float) -> None:
        """Send a request and await the headers of its answer, at the longest until ``until_s``.

        Raises:
            Broken: they will not come. The connection is cut, as when this is cancelled.
        """
        self._reader = AnswerReader()
        self._parts, self._num_waiting, self._heard = [], 0, False
        self.num_requests += 1
        if len(body) <= _PIECE:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self._unsent = memoryview(body)
            self._push()
        try:
            while not self._reader.status:
                await self._event(until_s)
        except BaseException:
            self.abort()
            raise

    async def part(self, *, until_s: float | None = None, idle_s: float = 0.0) -> bytes:
        """Return the next part of the body, empty at its end.

        Args:
            until_s: time of the loop at which waiting ends, None to take ``idle_s``.
            idle_s: seconds of silence after which it ends.

        Raises:
            Broken: it will not come.
        """
        while not self._parts:
            if self._reader.done:
                return b""
            await self._event(until_s, idle_s)
        part = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts, self._num_waiting = [], 0
        return part

    async def flow(self, take: Take, *, idle_s: float) -> bool:
        """Give every part of the body to ``take`` as it arrives, while it can take more.

        Returns:
            Whether the body goes on: nothing is read before the next call. False at its end.

        Raises:
            Broken: the body has not ended, and nothing more will come.
            Exception: what ``take`` raises; the connection goes on, for whoever drains it.
        """
        if (first := await self.part(idle_s=idle_s)) and not take(first):
            return True
        self._take, self._full = take, False
        try:
            while not self._full and not self._reader.done:
                await self._event(None, idle_s)
            if self._refused is not None:
                raise self._refused
            return self._full
        finally:
            self._take = self._refused = None

    def abort(self) -> None:
        """Cut the connection: so an engine learns that a call is cancelled."""
        self._stop_timer()
        self._unsent = memoryview(b"")
        self.transport.abort()

    # --- inside ---------------------------------------------------------------------------

    def _give(self, part: bytes, take: Take) -> None:
        try:
            if take(part):
                return
        except Exception as error:  # noqa: BLE001 - raised where the taker waits
            self._refused = error
        self._take, self._full = None, True
        self._pause()
        self._wake_up()

    async def _event(self, until_s: float | None, idle_s: float = 0.0) -> None:
        """Wait for anything to change.

        Raises:
            Broken: nothing will.
        """
        if self._broken is not None:
            raise self._broken
        if not self._reading and not self.transport.is_closing():
            self._reading = True
            self.transport.resume_reading()
        self._until_s, self._idle_s = until_s, idle_s
        self._heard_s = self._loop.time()
        due_s = self._due_s()
        if self._timer is None or self._timer.when() > due_s:
            self._stop_timer()
            self._timer = self._loop.call_at(due_s, self._look)
        self._wake = self._loop.create_future()
        try:
            await self._wake
        finally:
            self._wake = None

    def _due_s(self) -> float:
        return self._heard_s + self._idle_s if self._until_s is None else self._until_s

    def _look(self) -> None:
        """See whether the engine has been silent for too long."""
        self._timer = None
        if self._wake is None:
            return  # nobody waits: the time is the client's
        if (due_s := self._due_s()) > self._loop.time():
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self._break(Broken("timeout"))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _pause(self) -> None:
        if self._reading and not self.transport.is_closing():
            self._reading = False
            self.transport.pause_reading()

    def _push(self) -> None:
        while self._unsent and self._writable:
            piece, self._unsent = self._unsent[:_PIECE], self._unsent[_PIECE:]
            self.transport.write(piece)

    def _break(self, why: Broken) -> None:
        if self._broken is None:
            self._broken = why
        self.abort()
        self._wake_up()

    def _wake_up(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
