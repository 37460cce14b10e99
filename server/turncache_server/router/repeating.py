"""Prefill legs that are sent again, because decode found their prompt lost.

A decode engine lets such a call wait, and names it to whoever asks on its control socket. The
router asks while one of its decode legs has brought no byte for a moment: one question for
all of an engine's legs, and less often the longer nothing is found. A call that is named has
its prefill leg repeated, and the engine is told who has computed the prompt, or that nobody
will: then it waits no longer. A repeat waits for room on its prefill engine like any prompt, then
for its turn: what an engine loses under pressure must not come back to it all at once. Owner of
which legs are watched and what is being repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from turncache.errors import EngineFault, EngineRefusal
from turncache_server.control.messages import Lacking, LackingReply, Repeated
from turncache_server.router.background import Background, tell_failure
from turncache_server.router.config import RouterConfig
from turncache_server.router.events import Events, PrefillRepeated
from turncache_server.router.outcomes import AsksControl
from turncache_server.router.plan import EngineView, Snapshot

#: Most repeats for one decode leg, each by another engine: what is lost that often is lost because
#: prefill has no room, and more work would only take more of it.
MAX_REPEATS: Final = 2
#: Repeats that a prefill engine works on at once. Enough that it need not wait for the router
#: between two, and few beside the prompts that come for the first time.
MAX_AT_ONCE: Final = 4
#: Longest pause between two questions to an engine of which nothing was found.
MAX_PAUSE_S: Final = 1.0
#: For so long an engine that did not answer is promised nothing.
SILENT_S: Final = 5.0
#: Likewise one that does not know the question: until it may have been brought up to date.
OLDER_S: Final = 60.0

#: Waits until a call's prompt fits on a prefill engine, where it counts from then on.
Room = Callable[[EngineView], Awaitable[None]]
#: Runs a call's prefill leg on an engine; false when that has failed.
Repeat = Callable[[EngineView], Awaitable[bool]]


def next_engine(
    planned: Sequence[EngineView], first: str, tried: Sequence[str], snapshot: Snapshot
) -> EngineView | None:
    """Choose who repeats a prefill leg: who had it first, then another. Pure.

    Args:
        planned: prefill engines of the call, best first.
        first: name of the one that has lost the prompt.
        tried: names of those that have repeated it, or failed to.
        snapshot: the pool as it is now.

    Returns:
        None when it would not help: nobody is left who is there and may be pulled from. One that
        has been silent for a moment is asked when no other one lives.
    """
    silent = {e.name: not e.live for e in snapshot.engines if e.there and e.pulls}
    if len(tried) >= MAX_REPEATS:
        return None
    left = [engine for engine in planned if engine.name in silent and engine.name not in tried]
    return min(left, key=lambda e: (silent[e.name], e.name != first), default=None)


@dataclass(eq=False, kw_only=True)
class Watched:
    """A decode leg without a token yet.

    Attributes:
        request: the call's id.
        prefill: its prefill engines, the one that has computed the prompt in front.
        room: waits until its prompt fits.
        repeat: runs its prefill leg.
        since_s: when it was sent, by the loop's clock.
        until_s: when decode waits for a repeat no more; None until it was named.
        tried: names of the engines that have repeated it, or failed to.
        said: what the decode engine has still to hear; None for nothing.
        task: what is being done for it.
        cut: cuts it off, where its client has left and it is only read to its end.
    """

    request: str
    prefill: Sequence[EngineView]
    room: Room
    repeat: Repeat
    since_s: float
    until_s: float | None = None
    tried: list[str] = field(default_factory=list)
    said: str | None = None
    task: asyncio.Task[None] | None = None
    cut: Callable[[], object] | None = None


class _Legs:
    """The watched legs of one decode engine.

    Attributes:
        by_request: legs by call, the oldest first.
        timer: of the next question; None while it is under way.
        pause_s: after a question by which nothing was found.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.by_request: dict[str, Watched] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.asking = False
        self.pause_s = 0.0


class Watch:
    """What whoever sent a decode leg says of it."""

    def __init__(
        self, legs: dict[str, Watched], leg: Watched, look_soon: Callable[[], None]
    ) -> None:
        self._legs, self._leg, self._look_soon = legs, leg, look_soon

    def stop(self) -> None:
        """Watch it no more, and repeat nothing for it; twice is once."""
        if self._legs.get(self._leg.request) is self._leg:
            del self._legs[self._leg.request]
        if self._leg.task is not None:
            self._leg.task.cancel()

    def leave(self, cut: Callable[[], object]) -> None:
        """Repeat nothing for it, and cut it off when decode waits for its prompt all the same.

        Nobody would end that wait, and then decode would compute the prompt for nobody.
        """
        self._leg.cut = cut
        if self._leg.task is not None:
            self._leg.task.cancel()
        self._look_soon()


class _Turns:
    """The repeats of one prefill engine, first come, first served.

    Attributes:
        free: turns.
        num_legs: that have one, or wait for one.
    """

    def __init__(self) -> None:
        self.free = asyncio.Semaphore(MAX_AT_ONCE)
        self.num_legs = 0


class Repeats:
    """Has prefill legs repeated.

    Args:
        config: the router's settings.
        control: asks engines.
        events: told of every repeat.
        background: runs the questions.
        snapshot: returns the pool as it is.
    """

    def __init__(
        self,
        config: RouterConfig,
        control: AsksControl,
        *,
        events: Events,
        background: Background,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._config = config
        self._control = control
        self._events = events
        self._background = background
        self._snapshot = snapshot
        self._legs: dict[str, _Legs] = {}
        self._turns: dict[str, _Turns] = {}  # none of an engine that repeats nothing
        # Engines that do not answer, or not this question, are not asked until then.
        self._deaf_until_s: dict[str, float] = {}

    def hears(self, address: str) -> bool:
        """Say whether a decode engine may be told that prompts are prefilled again for it.

        One that could not be asked would wait for nobody.
        """
        until_s = self._deaf_until_s.get(address)
        if until_s is None:
            return True
        if asyncio.get_running_loop().time() < until_s:
            return False
        del self._deaf_until_s[address]
        return True

    def watch(
        self,
        address: str,
        request: str,
        prefill: Sequence[EngineView],
        *,
        room: Room,
        repeat: Repeat,
    ) -> Watch:
        """Watch a decode leg until what is returned is stopped, with its first token.

        Args:
            address: of the decode engine's control socket.
            request: the call's id.
            prefill: its prefill engines, the one that has computed the prompt in front.
            room: waits until its prompt fits on one of them.
            repeat: runs its prefill leg there.
        """
        legs = self._legs.setdefault(address, _Legs(address))
        since_s = asyncio.get_running_loop().time()
        leg = Watched(request=request, prefill=prefill, room=room, repeat=repeat, since_s=since_s)
        legs.by_request[request] = leg
        self._ask_soon(legs)
        return Watch(legs.by_request, leg, partial(self._ask_soon, legs))

    def _ask_soon(self, legs: _Legs) -> None:
        legs.pause_s = self._config.repeat_after_s
        if not legs.asking:
            self._ask_within(legs, legs.pause_s)

    def _ask_within(self, legs: _Legs, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time() + delay_s
        if legs.timer is not None:
            if legs.timer.when() <= due_s:
                return
            legs.timer.cancel()
        legs.timer = loop.call_at(due_s, self._due, legs)

    def _due(self, legs: _Legs) -> None:
        """Ask, unless every leg is too young; without legs nobody asks any more."""
        legs.timer = None
        oldest = next(iter(legs.by_request.values()), None)
        if oldest is None:
            self._legs.pop(legs.address, None)
            return
        now_s = asyncio.get_running_loop().time()
        young_s = oldest.since_s + self._config.repeat_after_s - now_s
        if young_s > 0:
            self._ask_within(legs, young_s)
            return
        legs.asking = True  # until then legs that join are asked about by the next one
        self._background.spawn(self._ask(legs), "ask for lost prompts")

    async def _ask(self, legs: _Legs) -> None:
        try:
            reply = await self._control.ask(
                legs.address, Lacking(), LackingReply, timeout_s=self._config.control_timeout_s
            )
            named: Sequence[str] = reply.requests
        except EngineFault as error:
            # It is silent, or older than this question: then none of its calls waits.
            named = ()
            older = isinstance(error, EngineRefusal) and error.code == "unsupported"
            deaf_s = OLDER_S if older else SILENT_S
            self._deaf_until_s[legs.address] = asyncio.get_running_loop().time() + deaf_s
            if older:
                return
        finally:
            legs.asking = False
        found = [leg for name in named if (leg := legs.by_request.get(name)) is not None]
        for leg in found:
            if leg.cut is not None:
                leg.cut()
            elif leg.task is None:
                leg.task = asyncio.create_task(self._help(legs.address, leg), name="repeat a leg")
                leg.task.add_done_callback(tell_failure)
        self._ask_within(legs, legs.pause_s)
        if not found:
            legs.pause_s = min(2 * legs.pause_s, MAX_PAUSE_S)

    async def _help(self, address: str, leg: Watched) -> None:
        """Have the prompt computed again, and tell the decode engine by whom."""
        try:
            if leg.said is None:
                leg.said = await self._repeated(leg)
            await self._control.ask(
                address,
                Repeated(request=leg.request, source=leg.said),
                LackingReply,
                timeout_s=self._config.control_timeout_s,
            )
            leg.said = None
        except EngineFault:
            pass  # it goes on naming the call, and is told the same again
        finally:
            leg.task = None

    async def _repeated(self, leg: Watched) -> str:
        """Run the leg again; returns the engine id of who did, empty when nobody could."""
        first, now_s = leg.prefill[0].name, asyncio.get_running_loop().time()
        if leg.until_s is None:
            leg.until_s = now_s + self._config.repeat_prefill_s
        while engine := next_engine(leg.prefill, first, leg.tried, self._snapshot()):
            leg.tried.append(engine.name)
            result, overdue = "left", "late"
            try:
                async with asyncio.timeout_at(leg.until_s):
                    await leg.room(engine)
                    async with self._turn(engine.name):
                        overdue = "failed"
                        result = "done" if await leg.repeat(engine) else "failed"
            except TimeoutError:
                result = overdue
                return ""  # decode has gone on without it
            finally:
                self._tell(leg, engine.name, result)
            if result == "done":
                return engine.engine_id
        self._tell(leg, None, "no_engine")
        return ""

    @asynccontextmanager
    async def _turn(self, engine: str) -> AsyncIterator[None]:
        """Wait until a prefill engine works on few enough repeats for another one."""
        turns = self._turns.setdefault(engine, _Turns())
        turns.num_legs += 1
        try:
            async with turns.free:
                yield
        finally:
            turns.num_legs -= 1
            if not turns.num_legs:
                del self._turns[engine]

    def _tell(self, leg: Watched, engine: str | None, result: str) -> None:
        self._events.emit(PrefillRepeated(request=leg.request, engine=engine, result=result))
