"""The queue before the prefill leg: prompts wait here while decode is behind.

The shell of :mod:`turncache_server.router.untaken`, which decides for each prefill engine: it
knows the time, wakes those whose turn it is, and tells the listeners of every call that had to
wait. That decode has taken a prompt shows in the first byte of its answer, where that comes with
the first token. Where it does not, decode is asked, and only while somebody waits.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from turncache.errors import EngineFault
from turncache_server.control.messages import Call, CallReply
from turncache_server.router.background import Background
from turncache_server.router.events import Events, PromptHeldBack
from turncache_server.router.outcomes import AsksControl
from turncache_server.router.untaken import Prompts, Release, Untaken

#: While somebody waits decode is asked so often, and it is looked whether more fits.
_LOOK_S: Final = 0.25
#: Questions to decode per look and prefill engine; each is asked about in its turn.
_MAX_QUESTIONS: Final = 16
#: Calls that wait for one engine; each holds its body in memory.
_MAX_WAITING: Final = 1024

#: Asks a decode engine, by name, whether it has taken a call's prompt.
Taken = Callable[[str, str], Awaitable[bool]]


class _Queue:
    """What is on its way from one prefill engine.

    Attributes:
        core: decides.
        silent: calls whose answer does not show when decode has taken the prompt, and the decode
            engine that each was sent to; those asked about longest ago first.
        asking: decode is being asked.
    """

    __slots__ = ("asking", "core", "silent")

    def __init__(self, wait_s: float) -> None:
        self.core = Untaken(wait_s=wait_s, max_waiting=_MAX_WAITING)
        self.silent: OrderedDict[str, str] = OrderedDict()
        self.asking = False


class _Waiter(NamedTuple):
    future: asyncio.Future[None]
    since_s: float


class BackPressure:
    """Holds prompts back from prefill engines whose earlier prompts decode has not taken.

    Args:
        limit: says how many tokens may be on their way from a prefill engine, None when nobody
            knows: nobody waits for it then.
        taken: asks decode.
        wait_s: longest wait of a call; then it goes on as if there were room.
        clock: monotonic seconds.
        events: told of every call that had to wait.
        background: where decode is asked.
    """

    def __init__(
        self,
        *,
        limit: Callable[[str], int | None],
        taken: Taken,
        wait_s: float,
        clock: Callable[[], float],
        events: Events,
        background: Background,
    ) -> None:
        self._limit = limit
        self._taken = taken
        self._wait_s = wait_s
        self._clock = clock
        self._events = events
        self._background = background
        self._queues: dict[str, _Queue] = {}  # none of an engine without calls
        self._engines: dict[str, str] = {}  # where each call is
        self._waiting: dict[str, _Waiter] = {}
        self._timer: asyncio.TimerHandle | None = None

    def state(self, engine: str) -> Prompts:
        """Return what is on its way from a prefill engine, and who waits for it."""
        queue = self._queues.get(engine)
        if queue is None:
            return Prompts(limit=self._limit(engine))
        queue.core.set_limit(self._limit(engine))
        return queue.core.state()

    def longest_wait_s(self, engine: str) -> float:
        """Return for how long the first of those who wait has waited, 0 while nobody does."""
        queue = self._queues.get(engine)
        due_s = None if queue is None else queue.core.due_s()
        return 0.0 if due_s is None else self._clock() - (due_s - self._wait_s)

    def ask(self, engine: str, call: str, tokens: int) -> asyncio.Future[None] | None:
        """Ask for a prompt to be computed: None when it may be at once, else what to await.

        Whoever asks also says that the call is :meth:`over`, whatever becomes of it.

        Args:
            engine: name of the prefill engine. What the call had asked of another one is over.
            call: its id.
            tokens: of its prompt, as far as anybody can say.
        """
        if self._engines.get(call, engine) != engine:
            self.over(call)
        queue = self._queues.get(engine)
        if queue is None:
            queue = self._queues[engine] = _Queue(self._wait_s)
        self._engines[call] = engine
        queue.core.set_limit(self._limit(engine))
        now_s = self._clock()
        at_once, released = queue.core.ask(call, tokens, now_s)
        self._wake(engine, released)
        if at_once:
            return None
        waiter = _Waiter(asyncio.get_running_loop().create_future(), now_s)
        self._waiting[call] = waiter
        self._look_later()
        return waiter.future

    def sized(self, call: str, tokens: int) -> None:
        """Take how long a prompt is, once prefill has counted it."""
        engine = self._engines.get(call)
        if engine is not None:
            self._wake(engine, self._queues[engine].core.sized(call, tokens, self._clock()))

    def sent_on(self, call: str, engine: str) -> None:
        """Note to which decode engine a call goes whose answer will not show in time.

        It is asked about the call while others wait.
        """
        at = self._engines.get(call)
        if at is not None:
            self._queues[at].silent[call] = engine

    def over(self, call: str) -> None:
        """Note that decode has a call's prompt, or that nobody will take it; twice is once."""
        engine = self._engines.pop(call, None)
        if engine is None:
            return
        queue, now_s = self._queues[engine], self._clock()
        queue.silent.pop(call, None)
        waiter = self._waiting.pop(call, None)
        if waiter is not None:
            self._tell(call, engine, "left", now_s - waiter.since_s)
        self._wake(engine, queue.core.over(call, now_s))
        if not queue.core:
            del self._queues[engine]

    # --- those who wait -------------------------------------------------------------------

    def _wake(self, engine: str, released: Iterable[Release]) -> None:
        for call, how, waited_s in released:
            future = self._waiting.pop(call).future
            self._tell(call, engine, how.value, waited_s)
            if not future.done():  # else its client has left just now
                future.set_result(None)

    def _tell(self, call: str, engine: str, result: str, waited_s: float) -> None:
        self._events.emit(
            PromptHeldBack(request=call, engine=engine, result=result, waited_s=waited_s)
        )

    def _look_later(self) -> None:
        """See to it that somebody looks while anybody waits."""
        if self._timer is not None or not self._waiting:
            return
        due = [due_s for each in self._queues.values() if (due_s := each.core.due_s()) is not None]
        delay_s = max(0.0, min(min(due) - self._clock(), _LOOK_S))
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._look)

    def _look(self) -> None:
        self._timer = None
        for engine, queue in self._queues.items():
            if queue.core.due_s() is None:
                continue
            queue.core.set_limit(self._limit(engine))
            self._wake(engine, queue.core.advance(self._clock()))
            if queue.core.due_s() is not None and queue.silent and not queue.asking:
                queue.asking = True
                self._background.spawn(self._ask_decode(queue), "ask decode for prompts")
        self._look_later()

    async def _ask_decode(self, queue: _Queue) -> None:
        try:
            asked = list(itertools.islice(queue.silent.items(), _MAX_QUESTIONS))
            for call, _ in asked:
                queue.silent.move_to_end(call)
            answers = await asyncio.gather(*(self._taken(engine, call) for call, engine in asked))
        finally:
            queue.asking = False
        for (call, engine), taken in zip(asked, answers, strict=True):
            # Meanwhile it may have gone to another one.
            if taken and queue.silent.get(call) == engine:
                self.over(call)


def asks_decode(
    control: AsksControl, address_of: Callable[[str], str | None], timeout_s: float
) -> Taken:
    """Make what asks decode engines, over their control sockets, for the prompts of calls.

    An engine knows a call from when it begins to compute: what it pulls for it is verified then.

    Args:
        control: how to ask.
        address_of: says where an engine's control socket is, None without one.
        timeout_s: for each question. One without an answer says nothing.
    """

    async def taken(engine: str, call: str) -> bool:
        address = address_of(engine)
        if address is None:
            return False
        try:
            reply = await control.ask(address, Call(request=call), CallReply, timeout_s=timeout_s)
        except EngineFault:
            return False
        return reply.found

    return taken
