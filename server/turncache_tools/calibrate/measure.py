"""Calls on a quiet stack, one at a time: cold, with a cached prefix, with a return.

Every measurement is a session of two calls. The first is cold. The second continues it: with
prefill's cache as it is that is a cached prefix, with the cache emptied before it is a return
of everything. Where the cache cannot be emptied, the first call's answer is made long: decode
has its KV, prefill does not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from turncache.errors import TurncacheError
from turncache.protocol import CallTags, Cause
from turncache_tools.bench.client import Asked
from turncache_tools.bench.texts import Tokens, answer_message, result_messages, text
from turncache_tools.calibrate.fit import CACHED, COLD, RETURNED, Sample

#: Fewer lengths do not tell costs apart.
LEAST_LENGTHS: Final = 3
_SYSTEM_TOKENS: Final = 32
#: An answer that is shorter than the fewest tokens worth a pull.
_SHORT_ANSWER: Final = 32
#: Answers that are long enough to be pulled, as multiples of a short one.
_LONG_ANSWERS: Final = (4, 8, 16)
#: What a second call adds, as a share of the first prompt.
_NEW_SHARE: Final = 0.125
_LEAST_NEW: Final = 48
#: A block can be pulled a step after it was filled.
_BETWEEN_S: Final = 0.05
#: An engine whose cache was emptied introduces itself to its peers again.
_AFTER_EMPTYING_S: Final = 1.0


class NothingReturned(TurncacheError):
    """Raised when decode returned nothing where it should have; names the reasons given."""


class NotOurs(TurncacheError):
    """Raised when answers do not say what happened to the prompt."""


class Ask(Protocol):
    """Makes a call and waits for its end."""

    async def __call__(
        self, messages: Sequence[Mapping[str, Any]], tags: CallTags, answer: int
    ) -> Asked:
        """Return the answer of at most ``answer`` tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was measured.

    Attributes:
        samples: times to first token.
        between_s: mean times between tokens of long enough answers.
        skipped: lengths that would have taken too long.
        moved_tokens: that went from engine to engine, warm-up included.
    """

    samples: tuple[Sample, ...]
    between_s: tuple[float, ...]
    skipped: tuple[int, ...]
    moved_tokens: int


@dataclass(slots=True)
class Measurement:
    """Makes the calls.

    Attributes:
        ask: makes one.
        empty: empties prefill's cache, None where that cannot be done.
        tokens: how many of them words make.
        nonce: of this start of the program.
        pair: prefill and decode are apart, and returns are measured.
        repeats: of every point.
        most_s: a length with a slower cold call is the last one, if it is the third or a later
            one.
        say: told of progress.
        sleep: waits for seconds.
    """

    ask: Ask
    empty: Callable[[], Awaitable[None]] | None
    tokens: Tokens
    nonce: str
    pair: bool
    repeats: int
    most_s: float
    say: Callable[[str], None]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _samples: list[Sample] = field(default_factory=list)
    _between_s: list[float] = field(default_factory=list)
    _reasons: dict[str, int] = field(default_factory=dict)
    _number: int = 0
    _moved_tokens: int = 0

    async def run(self, lengths: Sequence[int]) -> Measured:
        """Measure prompts of these lengths, shortest first.

        Raises:
            NothingReturned: on a pair, when no call got anything back.
            NotOurs: answers carry no outcome.
            TurncacheError: an answer has no token.
        """
        await self._warm_up(lengths[0])
        skipped: Sequence[int] = ()
        for place, length in enumerate(lengths):
            slowest_s = 0.0
            for _ in range(self.repeats):
                slowest_s = max(slowest_s, await self._point(length))
            self.say(f"{length:,} tokens measured: cold {slowest_s:.2f} s")
            if slowest_s > self.most_s and place + 1 >= LEAST_LENGTHS:
                skipped = lengths[place + 1 :]
                break
        if self.pair and self.empty is None:
            for times in _LONG_ANSWERS:
                for _ in range(self.repeats):
                    await self._second(lengths[0], times * _SHORT_ANSWER, RETURNED)
                self.say(f"returns of {times * _SHORT_ANSWER} tokens measured")
        if self.pair and not any(sample.kind == RETURNED for sample in self._samples):
            self._refuse()
        return Measured(
            samples=tuple(self._samples),
            between_s=tuple(self._between_s),
            skipped=tuple(skipped),
            moved_tokens=self._moved_tokens,
        )

    def _refuse(self) -> None:
        said = ", ".join(f"{reason} {count}" for reason, count in sorted(self._reasons.items()))
        raise NothingReturned(
            f"decode returned nothing to prefill (reasons given: {said or 'none'}): are returns on "
            "in the router (return_enabled) and the engines in mode on? --without-returns fits "
            "the rest"
        )

    async def _warm_up(self, length: int) -> None:
        """Make each kind of call once: connections are made and kernels chosen under it."""
        self.say("warming up")
        await self._point(length)
        if self.pair:
            if self.empty is None:
                await self._second(length, _LONG_ANSWERS[0] * _SHORT_ANSWER, RETURNED)
            if not any(sample.kind == RETURNED for sample in self._samples):
                self._refuse()
        self._samples.clear()
        self._between_s.clear()

    async def _point(self, length: int) -> float:
        """Measure one length; returns the seconds of the cold call."""
        cold_s = await self._second(length, _SHORT_ANSWER, CACHED)
        if self.pair and self.empty is not None:
            await self._second(length, _SHORT_ANSWER, RETURNED)
        return cold_s

    async def _second(self, length: int, answer: int, kind: str) -> float:
        """Make a session of two calls; returns the seconds of the first."""
        self._number += 1
        session = f"calibrate-{self.nonce}-{self._number}"
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._text(_SYSTEM_TOKENS, f"{session}-system")},
            {"role": "user", "content": self._text(length - _SYSTEM_TOKENS, session)},
        ]
        first = await self._call(messages, session, 1, answer)
        # A first call before a return is one more cold call: it is measured as such.
        long = answer > _SHORT_ANSWER
        cold_s = self._take(COLD, length, first, before=0)
        if first.streamed.between_s is not None:
            self._between_s.append(first.streamed.between_s)
        await self.sleep(_BETWEEN_S)
        if kind == RETURNED and self.empty is not None:
            await self.empty()
            await self.sleep(_AFTER_EMPTYING_S)
        before = (first.streamed.prompt or 0) + (first.streamed.answer or answer)
        new = max(_LEAST_NEW, round(_NEW_SHARE * length))
        said = self._text(new, f"{session}-2")
        messages.append(answer_message(first.streamed.text, first.streamed.tool_calls))
        messages += result_messages(first.streamed.tool_calls, said)
        second = await self._call(messages, session, 2, 2)
        size = answer if long and self.empty is None else length
        self._take(kind, size, second, before=before)
        return cold_s

    def _text(self, tokens: int, place: str) -> str:
        return text(self.tokens.words(max(1, tokens)), place=place, seed=0, block=self.nonce)

    async def _call(
        self, messages: Sequence[Mapping[str, Any]], session: str, number: int, answer: int
    ) -> Asked:
        tags = CallTags(
            session_id=session,
            final=number == 2,
            turn=1,
            call=number,
            cause=Cause.USER if number == 1 else Cause.TOOL,
        )
        return await self.ask(messages, tags, answer)

    def _take(self, kind: str, size: int, asked: Asked, *, before: int) -> float:
        """Keep a call as a sample of what really happened to it."""
        outcome, ttft_s = asked.outcome, asked.streamed.first_s
        if outcome is None:
            raise NotOurs(
                "answers carry no Turncache-Outcome: costs are told apart by what was found, "
                "returned and computed, which only our stack says"
            )
        handed = max(0, outcome.prompt - before)
        self._moved_tokens += outcome.returned + handed
        if ttft_s is None:
            raise TurncacheError("an answer without a token has no time to its first token")
        if kind != COLD:
            if kind == RETURNED and not outcome.returned:
                reason = outcome.reason.value
                self._reasons[reason] = self._reasons.get(reason, 0) + 1
            kind = RETURNED if outcome.returned else CACHED
        self._samples.append(
            Sample(
                kind=kind,
                size=size,
                prompt=outcome.prompt,
                local=outcome.local,
                returned=outcome.returned,
                handed=handed,
                ttft_s=ttft_s,
            )
        )
        return ttft_s
