"""The queue before the plan: calls of new sessions wait here until there is room for them.

The shell of :mod:`turncache_server.router.admission`, which decides: it knows the time, wakes
those who are let in, and tells the listeners. A call whose client leaves, and every call when
the router shuts down, leaves the queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from turncache_server.router.admission import (
    Admission,
    Arrival,
    How,
    Queue,
    Release,
    State,
    Verdict,
)
from turncache_server.router.errors import ApiError, shutting_down
from turncache_server.router.events import CallAdmitted, Events

#: While somebody waits it is looked at least so often whether more fits: engines come and go.
_LOOK_S = 1.0


class Gate:
    """Lets calls in.

    Args:
        core: decides.
        fits: says how many tokens the engines keep, None when nobody knows.
        clock: monotonic seconds.
        events: told of every call that is let in or refused.
        retry_after_s: what those who are refused are told.
    """

    def __init__(
        self,
        core: Admission,
        *,
        fits: Callable[[], int | None],
        clock: Callable[[], float],
        events: Events,
        retry_after_s: float,
    ) -> None:
        self._core = core
        self._fits = fits
        self._clock = clock
        self._events = events
        self._retry_after_s = retry_after_s
        self._waiting: dict[str, asyncio.Future[float]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def state(self) -> State:
        """Return the working set and the queue as they are now."""
        self._look()
        return self._core.state()

    def queues(self) -> list[Queue]:
        """Return who waits, by tenant: the one with most calls first."""
        return self._core.queues(self._clock())

    def ask(self, arrival: Arrival) -> asyncio.Future[float] | None:
        """Let a call in: None, or what it has to await, which gives the seconds that it waited.

        Whoever asks also says that the call has :meth:`ended` or :meth:`left`.

        Raises:
            ApiError: 429, the queue is full; the future raises it too, or 503 at the end.
        """
        self._core.set_fits(self._fits())
        verdict, released = self._core.ask(arrival, self._clock())
        self._wake(released)
        if verdict is Verdict.ENTER:
            self._tell(arrival.call, "at_once", 0.0)
            return None
        if verdict is Verdict.REFUSE:
            self._tell(arrival.call, "refused", 0.0)
            raise self._full()
        if self._closed:
            self.left(arrival.call)
            raise shutting_down(self._retry_after_s)
        future = asyncio.get_running_loop().create_future()
        self._waiting[arrival.call] = future
        self._look_later()
        return future

    def ended(
        self, call: str, *, well: bool, tokens: int | None, shared: int | None, final: bool
    ) -> None:
        """End a call that was let in; see :meth:`Admission.ended`."""
        self._core.set_fits(self._fits())
        self._wake(
            self._core.ended(
                call, self._clock(), well=well, tokens=tokens, shared=shared, final=final
            )
        )

    def left(self, call: str) -> None:
        """Take out a call that is over, wherever it is; one that has ended changes nothing."""
        self._core.set_fits(self._fits())
        if self._waiting.pop(call, None) is not None:
            self._tell(call, "left", 0.0)
        self._wake(self._core.left(call, self._clock()))

    def forget(self, session: str) -> None:
        """Let a session leave that is not expected back."""
        self._wake(self._core.forget(session, self._clock()))

    def close(self) -> None:
        """Send everybody away who waits: another router, or this one's next start, serves them."""
        self._closed = True
        for call, future in list(self._waiting.items()):
            if not future.done():
                future.set_exception(shutting_down(self._retry_after_s))
            self._core.left(call, self._clock())
        self._waiting.clear()
        self._look_later()

    def _look(self) -> None:
        self._core.set_fits(self._fits())
        self._wake(self._core.advance(self._clock()))

    def _look_later(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._core.due_s()
        if due_s is not None:
            delay_s = max(0.0, min(due_s - self._clock(), _LOOK_S))
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _wake(self, released: Iterable[Release]) -> None:
        for call, how, waited_s in released:
            future = self._waiting.pop(call, None)
            self._tell(call, how.value, waited_s)
            if future is None or future.done():
                continue  # its client has left just now
            if how is How.REFUSED:
                future.set_exception(self._full())
            else:
                future.set_result(waited_s)
        self._look_later()

    def _tell(self, call: str, result: str, waited_s: float) -> None:
        self._events.emit(CallAdmitted(request=call, result=result, waited_s=waited_s))

    def _full(self) -> ApiError:
        return ApiError(
            429,
            "More sessions wait for room than may (admission_max_waiting). Those that have begun "
            "are served; try again later.",
            kind="rate_limit_error",
            code="admission_full",
            retry_after_s=self._retry_after_s,
        )
