"""Admission by working set: which calls pass, and which wait until a session has left. Pure.

The working set are the sessions whose next call is expected: those with a call in flight, and
those whose last call has ended less than ``idle_s`` ago and was not their last. While they fit
into what the engines keep, everybody passes. When they do not, the calls of a session that is
in the set pass all the same, as do those of its children and those that bring results of tools:
they are the work that is under way. A session that is new waits.

The queue is fair between tenants, one session of each in turn, and first come, first served
within a tenant. It is strict: the session whose turn it is waits for its own room, and nobody
overtakes it because he is smaller. It is bounded in length, where the tenant with most in it
gives way, and in time: after ``wait_s`` a call passes whether there is room or not.

Owner of the working set and of the queue. Time is an argument, in seconds of any clock.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Final, NamedTuple

#: Calls over which the mean size of a session is taken.
_MEAN_OVER: Final = 64
#: First calls of sessions that say what sessions have in common.
_SHARED_OVER: Final = 16


class Verdict(enum.StrEnum):
    """What becomes of a call that arrives."""

    ENTER = "enter"
    WAIT = "wait"
    REFUSE = "refuse"


class How(enum.StrEnum):
    """Why a call does not wait any longer.

    ``in_turn`` there was room for it, or its session has been let in; ``late`` it has waited for as
    long as a call may;
    ``refused`` it had to give its place to a tenant with less in a full queue.
    """

    IN_TURN = "in_turn"
    LATE = "late"
    REFUSED = "refused"


class Release(NamedTuple):
    """A call that waits no longer.

    Attributes:
        call: its id.
        how: why.
        waited_s: for how long it has waited.
    """

    call: str
    how: How
    waited_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A call of a session, as it arrives.

    Attributes:
        call: its id.
        session: namespaced id.
        tenant: who takes turns with others, None where there are no tenants.
        tokens: length of its prompt, as far as anybody can say.
        above: sessions that this one belongs to: its parent, its root.
        urgent: it passes in any case: it brings results of tools, or nothing follows it.
    """

    call: str
    session: str
    tenant: str | None = None
    tokens: int = 0
    above: tuple[str, ...] = ()
    urgent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The working set and the queue in numbers.

    Attributes:
        sessions: in the working set.
        tokens: of all of them; what they have in common counts once.
        fits: tokens that the engines keep, None when nobody knows: everybody passes then.
        waiting: calls.
    """

    sessions: int
    tokens: int
    fits: int | None
    waiting: int


class Queue(NamedTuple):
    """The calls of one tenant that wait.

    Attributes:
        tenant: its name, None where there are no tenants.
        waiting: how many they are, at least one.
        longest_wait_s: for how long the first of them has waited.
    """

    tenant: str | None
    waiting: int
    longest_wait_s: float


@dataclass(slots=True)
class _Member:
    """A session of the working set.

    Attributes:
        tokens: its last prompt and answer.
        counted: what it counts for, beside what it has in common with others.
        least: what that is at least: it will grow.
        in_flight: calls.
        proven: a call of it has ended well.
        leaves: with its last call in flight.
    """

    tokens: int
    least: int
    counted: int = 0
    in_flight: int = 0
    proven: bool = False
    leaves: bool = False


class _Waiter(NamedTuple):
    arrival: Arrival
    since_s: float


class Admission:
    """The working set of one pool, and who waits for it.

    Args:
        idle_s: seconds after its last call for which a session is expected back.
        wait_s: longest wait of a call.
        max_waiting: most calls that wait.
    """

    def __init__(self, *, idle_s: float, wait_s: float, max_waiting: int) -> None:
        self._idle_s, self._wait_s, self._max_waiting = idle_s, wait_s, max_waiting
        self._fits: int | None = None
        self._members: dict[str, _Member] = {}
        self._tokens = 0  # the sum of what the members count for
        self._shared = 0  # what sessions have in common
        self._found_first: deque[int] = deque(maxlen=_SHARED_OVER)
        self._mean = 0.0
        self._num_sized = 0
        self._calls: dict[str, str] = {}  # those in flight, and their sessions
        self._idle: OrderedDict[str, float] = OrderedDict()  # since when, the longest first
        self._waiting: OrderedDict[str, _Waiter] = OrderedDict()  # by call, the oldest first
        #: By tenant, whose turn it is first.
        self._queues: OrderedDict[str | None, OrderedDict[str, _Waiter]] = OrderedDict()

    def state(self) -> State:
        """Return the present in numbers."""
        return State(
            sessions=len(self._members),
            tokens=self._tokens + self._shared,
            fits=self._fits,
            waiting=len(self._waiting),
        )

    def queues(self, now_s: float) -> list[Queue]:
        """Return who waits, by tenant: the one with most calls first."""
        found = [
            Queue(tenant, len(calls), now_s - next(iter(calls.values())).since_s)
            for tenant, calls in self._queues.items()
        ]
        return sorted(found, key=lambda queue: (-queue.waiting, -queue.longest_wait_s))

    def __contains__(self, session: str) -> bool:
        return session in self._members

    def due_s(self) -> float | None:
        """Return when :meth:`advance` has something to do, None while nobody waits."""
        if not self._waiting:
            return None
        due_s = next(iter(self._waiting.values())).since_s + self._wait_s
        if self._idle:
            due_s = min(due_s, next(iter(self._idle.values())) + self._idle_s)
        return due_s

    # --- calls ----------------------------------------------------------------------------

    def ask(self, arrival: Arrival, now_s: float) -> tuple[Verdict, list[Release]]:
        """Let a call in, or let it wait, or refuse it; also returns who waits no longer."""
        released = self.advance(now_s)
        known = arrival.session in self._members
        if known or arrival.urgent or any(each in self._members for each in arrival.above):
            self._enter(arrival)
            # Others of its session may have waited for its room.
            return Verdict.ENTER, released + self._let_in_with(arrival.session, now_s)
        if not self._waiting and self._has_room(arrival):
            self._enter(arrival)
            return Verdict.ENTER, released
        if len(self._waiting) >= self._max_waiting:
            pushed = self._pushed_out_for(arrival.tenant)
            if pushed is None:
                return Verdict.REFUSE, released
            released.append(self._release(pushed, How.REFUSED, now_s))
        waiter = _Waiter(arrival, now_s)
        self._waiting[arrival.call] = waiter
        self._queues.setdefault(arrival.tenant, OrderedDict())[arrival.call] = waiter
        return Verdict.WAIT, released

    def ended(
        self,
        call: str,
        now_s: float,
        *,
        well: bool,
        tokens: int | None = None,
        shared: int | None = None,
        final: bool = False,
    ) -> list[Release]:
        """End a call; one that is not in flight, or has been ended before, changes nothing.

        Args:
            call: its id.
            now_s: the time.
            well: it was answered. A session none of whose calls was is not expected back.
            tokens: of its prompt and answer, None when nobody knows.
            shared: of the prompt of a session's first call, what was there already; None of
                any other call.
            final: nothing follows in this session.

        Returns:
            Who waits no longer.
        """
        session = self._calls.pop(call, None)
        if session is None:
            return []
        member = self._members[session]
        member.in_flight -= 1
        if well:
            member.proven = True
            # It may have been said already, while the end of this call was on its way.
            member.leaves = member.leaves or final
            if shared is not None:
                self._share(shared)
            if tokens is not None:
                self._resize(member, tokens)
        if not member.in_flight:
            if member.leaves or not member.proven:
                self._remove(session)
            else:
                self._idle[session] = now_s
        return self.advance(now_s)

    def left(self, call: str, now_s: float) -> list[Release]:
        """Take out a call whose client has left, waiting or in flight; returns who moves up."""
        if (waiter := self._waiting.get(call)) is not None:
            self._dequeue(waiter)
            return self.advance(now_s)
        return self.ended(call, now_s, well=False)

    def forget(self, session: str, now_s: float) -> list[Release]:
        """Let a session leave that is not expected back; returns who moves up."""
        member = self._members.get(session)
        if member is None:
            return []
        if member.in_flight:
            member.leaves = True
        else:
            self._remove(session)
        return self.advance(now_s)

    def set_fits(self, tokens: int | None) -> None:
        """Take how many tokens the engines keep; counts from the next :meth:`advance` on."""
        self._fits = tokens

    def advance(self, now_s: float) -> list[Release]:
        """Let sessions leave that were away for too long, and let in who may pass."""
        while self._idle:
            session, since_s = next(iter(self._idle.items()))
            if now_s < since_s + self._idle_s:
                break
            self._remove(session)
        released = self._in_turn(now_s)
        while self._waiting:
            waiter = next(iter(self._waiting.values()))
            if now_s < waiter.since_s + self._wait_s:
                break
            released += self._let_in(waiter, How.LATE, now_s)
        return released

    # --- the working set ------------------------------------------------------------------

    def _has_room(self, arrival: Arrival) -> bool:
        """Whether a session fits; one alone always does, it would never find more room."""
        if self._fits is None or not self._members:
            return True
        size = max(arrival.tokens - self._shared, round(self._mean))
        return self._tokens + self._shared + size <= self._fits

    def _enter(self, arrival: Arrival) -> None:
        member = self._members.get(arrival.session)
        if member is None:
            member = self._members[arrival.session] = _Member(arrival.tokens, round(self._mean))
            self._count(member)
        self._idle.pop(arrival.session, None)
        member.in_flight += 1
        member.leaves = False
        self._calls[arrival.call] = arrival.session

    def _resize(self, member: _Member, tokens: int) -> None:
        member.tokens = tokens
        self._count(member)
        self._num_sized = min(self._num_sized + 1, _MEAN_OVER)
        own = max(0, tokens - self._shared)
        self._mean += (own - self._mean) / self._num_sized

    def _share(self, found: int) -> None:
        """Take what a session's first call has found.

        A call that is made again finds all of its prompt, and is not told from a first one:
        what counts is what most first calls find.
        """
        self._found_first.append(found)
        shared = sorted(self._found_first)[(len(self._found_first) - 1) // 4]
        if shared != self._shared:
            self._shared = shared
            for member in self._members.values():
                self._count(member)

    def _count(self, member: _Member) -> None:
        counted = max(0, member.tokens - self._shared, member.least)
        self._tokens += counted - member.counted
        member.counted = counted

    def _remove(self, session: str) -> None:
        self._idle.pop(session, None)
        self._tokens -= self._members.pop(session).counted

    # --- the queue ------------------------------------------------------------------------

    def _in_turn(self, now_s: float) -> list[Release]:
        released: list[Release] = []
        while self._queues:
            tenant, queue = next(iter(self._queues.items()))
            waiter = next(iter(queue.values()))
            if not self._has_room(waiter.arrival):
                break
            self._queues.move_to_end(tenant)
            released += self._let_in(waiter, How.IN_TURN, now_s)
        return released

    def _let_in(self, waiter: _Waiter, how: How, now_s: float) -> list[Release]:
        """Let in a call, and with it the others of its session, which is in the set now."""
        self._enter(waiter.arrival)
        released = [self._release(waiter, how, now_s)]
        return released + self._let_in_with(waiter.arrival.session, now_s)

    def _let_in_with(self, session: str, now_s: float) -> list[Release]:
        """Let in who waits of a session that is in the set."""
        same = [each for each in self._waiting.values() if each.arrival.session == session]
        for each in same:
            self._enter(each.arrival)
        return [self._release(each, How.IN_TURN, now_s) for each in same]

    def _release(self, waiter: _Waiter, how: How, now_s: float) -> Release:
        self._dequeue(waiter)
        return Release(waiter.arrival.call, how, now_s - waiter.since_s)

    def _dequeue(self, waiter: _Waiter) -> None:
        call, tenant = waiter.arrival.call, waiter.arrival.tenant
        del self._waiting[call]
        queue = self._queues[tenant]
        del queue[call]
        if not queue:
            del self._queues[tenant]

    def _pushed_out_for(self, tenant: str | None) -> _Waiter | None:
        """Return who gives way to a tenant in a full queue: the last of who has most."""
        own = len(self._queues.get(tenant, ()))
        longest = max(self._queues.values(), key=len, default=None)
        if longest is None or own + 1 >= len(longest):
            return None
        return next(reversed(longest.values()))
