"""Notices: what a caller says about a session between two calls, sent in the background.

A notice is posted to ``/sessions`` below the base URL by the client that made the
session's latest call, with its keys, proxies and certificates: the session's id and the
``Turncache`` header of its latest call as headers, ``{"notice": "wait", "expect_s": 12}`` or
``{"notice": "final"}`` as the body. The answer's body is not read.

Nothing here raises or waits for a server. A server that does not know the path is left
alone for ten minutes; a notice that the next call has overtaken is dropped.

Owns the queue, the thread that empties it and ends with it, the tasks on event loops, and
the servers that are left alone.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from turncache.protocol import MAX_RETAIN_S, NOTICES_PATH, Notice

if TYPE_CHECKING:
    from turncache.sessions import Session
    from turncache.speaker import Speaker

LOG: Final = logging.getLogger("turncache")

MAX_QUEUED: Final = 64
TIMEOUT_S: Final = 2.0
EXIT_TIMEOUT_S: Final = 1.0
LEFT_ALONE_S: Final = 600.0
MAX_LEFT_ALONE: Final = 256
#: Answers of servers that do not know the path.
_UNKNOWN_PATH: Final = frozenset({404, 405, 501})


@dataclass(frozen=True, slots=True, kw_only=True)
class _Post:
    """One notice on its way.

    Attributes:
        session: whose notice it is.
        number: calls that the session had begun when the caller spoke.
        client: the openai client that sends it.
        headers: the session and its latest call.
        body: the notice itself.
    """

    session: Session
    number: int
    client: Any
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def overtaken(self) -> bool:
        """Whether the session has begun another call since."""
        return self.session.ledger.num_calls != self.number

    @property
    def server(self) -> tuple[str, int | None]:
        """Name and port of the server."""
        url = self.client.base_url
        return url.host, url.port

    def request(self) -> Any:
        """Make the request: an answer, or something to await it by."""
        # Upstream's own retry is the one layer of retries here.
        patient = self.client.with_options(max_retries=1, timeout=TIMEOUT_S)
        return patient.post(
            NOTICES_PATH, cast_to=type(None), body=self.body, options={"headers": self.headers}
        )


class Notifier:
    """Sends notices: of sync clients in one thread, of async ones on their event loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing to say."""
        self._clock = clock
        self._left_alone: dict[tuple[str, int | None], float] = {}
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)
        atexit.register(self.flush, EXIT_TIMEOUT_S)

    def say(self, session: Session, notice: Notice, *, expect_s: float | None = None) -> Any:
        """Send a notice about ``session`` in the background.

        Returns:
            The task that sends it when this is the event loop of an async client, else None.
        """
        try:
            return self._say(session, notice, expect_s)
        except Exception as error:  # noqa: BLE001 - a notice must not fail its caller
            LOG.debug("session %s: no notice could be sent (%s)", session.id, type(error).__name__)
            return None

    def flush(self, timeout_s: float) -> bool:
        """Wait until the thread has sent everything, at most ``timeout_s``; whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def forget(self) -> None:
        """Drop what is queued, and ask every server again."""
        with self._changed:
            self._queue.clear()
        self._left_alone.clear()

    def _renew(self) -> None:
        # A forked child has neither the thread nor the tasks, and maybe a lock that is held.
        self._queue: deque[_Post] = deque(maxlen=MAX_QUEUED)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def _say(self, session: Session, notice: Notice, expect_s: float | None) -> Any:
        speaker = session.ledger.speaker
        client = None if speaker is None else speaker.client()
        if speaker is None or client is None:
            return None
        body: dict[str, Any] = {"notice": notice.value}
        if expect_s is not None:
            body["expect_s"] = expect_s
        post = _Post(
            session=session,
            number=session.ledger.num_calls,
            client=client,
            headers=session.latest_tags(final=notice is Notice.FINAL).to_headers(),
            body=body,
        )
        if speaker.is_async:
            return self._start_task(speaker, post)
        with self._changed:
            self._queue.append(post)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="turncache-notices", daemon=True)
                thread.start()
                self._thread = thread
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                post = self._queue.popleft()
            if self._is_due(post):
                try:
                    post.request()
                except Exception as error:  # noqa: BLE001 - whatever a transport raises
                    self._failed(post, error)

    def _start_task(self, speaker: Speaker, post: _Post) -> asyncio.Task[None] | None:
        loop = speaker.loop
        if loop is None or len(self._tasks) >= MAX_QUEUED:
            return None

        def start() -> asyncio.Task[None]:
            task = loop.create_task(self._send(post))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            return task

        try:
            here = asyncio.get_running_loop() is loop
        except RuntimeError:
            here = False
        if here:
            return start()
        loop.call_soon_threadsafe(start)
        return None

    async def _send(self, post: _Post) -> None:
        if self._is_due(post):
            try:
                await post.request()
            except Exception as error:  # noqa: BLE001 - whatever a transport raises
                self._failed(post, error)

    def _is_due(self, post: _Post) -> bool:
        return not post.overtaken and self._clock() >= self._left_alone.get(post.server, -math.inf)

    def _failed(self, post: _Post, error: Exception) -> None:
        if getattr(error, "status_code", None) in _UNKNOWN_PATH:
            while len(self._left_alone) >= MAX_LEFT_ALONE:
                self._left_alone.pop(next(iter(self._left_alone)), None)
            self._left_alone[post.server] = self._clock() + LEFT_ALONE_S
        LOG.debug("session %s: a notice failed (%s)", post.session.id, type(error).__name__)


#: Speaks for this process.
NOTIFIER: Final = Notifier()


def say_wait(session: Session, expected_s: object) -> None:
    """Say that the next call of ``session`` is expected in ``expected_s``; see its method."""
    if isinstance(expected_s, (int, float)) and 0 <= expected_s < math.inf:
        NOTIFIER.say(session, Notice.WAIT, expect_s=round(min(expected_s, MAX_RETAIN_S), 3))
        return
    LOG.warning(
        "session %s: wait(expected_s=%r) says nothing: expected seconds from 0",
        session.id,
        expected_s,
    )


async def say_final(session: Session, timeout_s: float) -> None:
    """Say that nothing follows, and wait until it is said, at most ``timeout_s``."""
    task = NOTIFIER.say(session, Notice.FINAL)
    if task is not None:
        await asyncio.wait([task], timeout=timeout_s)
    elif not NOTIFIER.flush(0):
        # A sync client's thread is at it. Another async library than asyncio does not wait.
        with contextlib.suppress(RuntimeError):
            await asyncio.to_thread(NOTIFIER.flush, timeout_s)
