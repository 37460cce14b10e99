"""Prompts that one prefill engine was asked for and decode has not taken yet. Pure.

Prefill keeps a prompt for decode, but holds nothing back for it: where decode is behind, prefill
goes on, and evicts what nobody has read yet. So the prompts that are on their way are bounded:
from when prefill is asked for one until decode has taken and verified it, or nobody will take it
any more. A prompt that does not fit waits; one alone always fits, however large.

The queue is first come, first served, and strict: nobody overtakes because he is smaller. It is
bounded in time, and in length: whoever has waited for too long goes, room or not, and so does
who has waited longest when too many wait. Nobody is refused.

Owner of which prompts are on their way, and of who waits. Time is an argument, in seconds of any
clock.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple


class How(enum.StrEnum):
    """Why a call does not wait any longer.

    ``in_turn`` there is room for its prompt; ``late`` it has waited for as long as a call may;
    ``crowded`` it has waited longest of more than may wait.
    """

    IN_TURN = "in_turn"
    LATE = "late"
    CROWDED = "crowded"


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
class Prompts:
    """The prompts of one engine in numbers.

    Attributes:
        tokens: of the prompts that are on their way.
        limit: most of them, None when nobody knows: nobody waits then.
        calls: whose prompts they are.
        waiting: calls.
    """

    tokens: int = 0
    limit: int | None = None
    calls: int = 0
    waiting: int = 0


class _Waiter(NamedTuple):
    tokens: int
    since_s: float


class Untaken:
    """The prompts of one engine that are on their way to decode, and who waits.

    Args:
        wait_s: longest wait of a call.
        max_waiting: most calls that wait, at least one.
    """

    def __init__(self, *, wait_s: float, max_waiting: int) -> None:
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self._limit: int | None = None
        self._tokens = 0  # the sum of what is on its way
        self._calls: dict[str, int] = {}
        self._waiting: OrderedDict[str, _Waiter] = OrderedDict()  # the oldest first

    def __bool__(self) -> bool:
        return bool(self._calls or self._waiting)

    def state(self) -> Prompts:
        """Return the present in numbers."""
        return Prompts(
            tokens=self._tokens,
            limit=self._limit,
            calls=len(self._calls),
            waiting=len(self._waiting),
        )

    def due_s(self) -> float | None:
        """Return when the next call will have waited for too long, None while nobody waits."""
        if not self._waiting:
            return None
        return next(iter(self._waiting.values())).since_s + self._wait_s

    def set_limit(self, tokens: int | None) -> None:
        """Take how many tokens may be on their way; counts from the next :meth:`advance` on."""
        self._limit = tokens

    def ask(self, call: str, tokens: int, now_s: float) -> tuple[bool, list[Release]]:
        """Ask for a prompt to be computed.

        Args:
            call: its id. One whose prompt is on its way already has its room.
            tokens: of the prompt, as far as anybody can say.
            now_s: the time.

        Returns:
            Whether it may be computed at once, else it waits; and who waits no longer.
        """
        released = self.advance(now_s)
        if call in self._calls:
            return True, released
        if not self._waiting and self._has_room(tokens):
            self._enter(call, tokens)
            return True, released
        if len(self._waiting) >= self._max_waiting:
            released.append(self._release(How.CROWDED, now_s))
        self._waiting[call] = _Waiter(tokens, now_s)
        return False, released

    def sized(self, call: str, tokens: int, now_s: float) -> list[Release]:
        """Take how long a prompt is, once prefill has counted it; returns who waits no longer."""
        if call not in self._calls:
            return []
        self._tokens += tokens - self._calls[call]
        self._calls[call] = tokens
        return self.advance(now_s)

    def over(self, call: str, now_s: float) -> list[Release]:
        """Take out a call whose prompt was taken or never will be, or who waits in vain.

        One that is not there changes nothing. Returns who waits no longer.
        """
        if self._waiting.pop(call, None) is None:
            self._tokens -= self._calls.pop(call, 0)
        return self.advance(now_s)

    def advance(self, now_s: float) -> list[Release]:
        """Let go whose turn it is, and who has waited for too long."""
        released: list[Release] = []
        while self._waiting:
            first = next(iter(self._waiting.values()))
            if self._has_room(first.tokens):
                how = How.IN_TURN
            elif now_s >= first.since_s + self._wait_s:
                how = How.LATE
            else:
                break
            released.append(self._release(how, now_s))
        return released

    def _has_room(self, tokens: int) -> bool:
        return self._limit is None or not self._calls or self._tokens + tokens <= self._limit

    def _enter(self, call: str, tokens: int) -> None:
        self._calls[call] = tokens
        self._tokens += tokens

    def _release(self, how: How, now_s: float) -> Release:
        """Let go who has waited longest."""
        call, waiter = self._waiting.popitem(last=False)
        self._enter(call, waiter.tokens)
        return Release(call, how, now_s - waiter.since_s)
