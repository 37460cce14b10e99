"""The arms of a scene: the agent's calls, with the others' traffic in every wait.

Arms that have engines of their own run side by side and take turns: off on, on off, off on, and so
on, call by call. A machine's speed drifts by more within a minute than what is compared may fail
by; two calls of a few seconds, one behind the other, drift together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from turncache_tools.demo.answers import Answer
from turncache_tools.demo.callers import Question, Reply
from turncache_tools.demo.compare import Comparison, Reusable, Verdict, compare, reusable
from turncache_tools.demo.counters import PromptTokens
from turncache_tools.demo.flood import Flood, Flooded
from turncache_tools.demo.history import Material, Message, messages_of
from turncache_tools.demo.rigs import Rig, settled
from turncache_tools.demo.rows import Arm, CallRow, Scene
from turncache_tools.demo.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """Where the tokens of a prompt came from."""

    local: int
    returned: int
    computed: int


class Watcher(Protocol):
    """Sees arms while they run: the screen."""

    def arms_begin(self, scene: Scene, arms: Sequence[Arm], run: int) -> None:
        """An arm begins, or several that take turns."""

    def call_begins(self, arm: Arm, call: int, brings: str) -> None:
        """A call is sent."""

    def says(self, text: str) -> None:
        """The model says something more."""

    def call_ended(self, answer: Answer, sources: Sources) -> None:
        """A call has its answer."""


@dataclass(slots=True)
class Reference:
    """The answers that all arms of a scene must give, by call and take.

    Written by the first arm that gives them; of arms in turns by the one that is named first.
    """

    answers: dict[tuple[int, int], Answer] = field(default_factory=dict)

    def texts(self, num: int) -> list[str]:
        """Return the first ``num`` answers, as they go into the history."""
        return [self.answers[call, 1].text for call in range(1, num + 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """An arm at its engines.

    Attributes:
        salt: separates its KV from that of every other arm and run.
    """

    arm: Arm
    rig: Rig
    salt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every arm of a scene does in one run.

    Attributes:
        takes: what the agent reads, by take of the last call.
    """

    scene: Scene
    run: int
    sizes: Sizes
    takes: tuple[Material, ...]
    flood: Flood

    @property
    def calls(self) -> tuple[tuple[int, int], ...]:
        """Calls in order, each with its take."""
        last = self.sizes.num_calls
        again = range(2, len(self.takes) + 1)
        return (*((call, 1) for call in range(1, last + 1)), *((last, take) for take in again))


_WARM_UP: Final = "Count from one to twenty. " * 24


def warm_up(rig: Rig, salt: str, max_tokens: int) -> None:
    """Make two throwaway calls, in a session of their own: KV has gone both ways then."""
    messages: list[Message] = []
    for final in (False, True):
        messages = [*messages, {"role": "user", "content": _WARM_UP}]
        reply = rig.caller.ask(
            Question(
                messages=messages,
                salt=f"{salt}-warm-up",
                session=f"{salt}-warm-up",
                max_tokens=max_tokens,
                final=final,
            )
        )
        messages.append({"role": "assistant", "content": reply.answer.text})


def run_arms(
    seats: Sequence[Seat], task: Task, reference: Reference, watcher: Watcher
) -> list[list[CallRow]]:
    """Run one arm, or several in turns, and return the rows of each.

    The answers of the arm that is named first become the reference where there is none, and
    every arm's prompts carry the reference's answers: an answer that left it at a tie is counted,
    not continued. In odd runs the arm that is named first begins.

    Args:
        seats: arms; several need engines of their own each.
        task: what they do.
        reference: of the scene.
        watcher: sees them.
    """
    watcher.arms_begin(task.scene, [seat.arm for seat in seats], task.run)
    places = range(len(seats))
    earlier: list[list[Answer]] = [[] for _ in places]
    rows: list[list[CallRow]] = [[] for _ in places]
    for number, (call, take) in enumerate(task.calls):
        asking = _Asking(call=call, take=take, history=reference.texts(call - 1))
        in_turn = places if (number + task.run) % 2 else reversed(places)
        asked = {at: _ask(seats[at], task, asking, watcher) for at in in_turn}
        for at in places:
            answer = asked[at].reply.answer
            comparison = _judge(reference, (call, take), answer)
            left = reusable(earlier[at], answer.prompt_ids)
            rows[at].append(_row(seats[at], task, asked[at], comparison, left))
            earlier[at].append(answer)
    return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asking:
    """A call that every arm makes.

    Attributes:
        history: answers before it.
    """

    call: int
    take: int
    history: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call that has its answer, and what was seen around it."""

    asking: _Asking
    brings: str
    reply: Reply
    counted: PromptTokens
    flooded: Flooded
    held: dict[str, float]

    @property
    def sources(self) -> Sources:
        """Where the prompt's tokens came from: as our engine says, else as vLLM counted."""
        outcome, counted = self.reply.outcome, self.counted
        if outcome is None:
            return Sources(
                local=counted.local, returned=counted.external, computed=counted.computed
            )
        return Sources(local=outcome.local, returned=outcome.returned, computed=outcome.computed)


def _ask(seat: Seat, task: Task, asking: _Asking, watcher: Watcher) -> _Asked:
    """Let the others fill the arm's caches, and make its call."""
    rig, call, take = seat.rig, asking.call, asking.take
    material = task.takes[take - 1]
    flooded = Flooded(num_tokens=0, seconds=0.0)
    if call > 1:
        flooded = task.flood.pour(rig.caller, wait=call - 1, salt=f"{seat.salt}-{take}")
    brings = material.brings(call)
    watcher.call_begins(seat.arm, call, brings)
    held = rig.held()
    before = rig.prompt_tokens()
    reply = rig.caller.ask(
        Question(
            messages=messages_of(material, asking.history),
            salt=seat.salt,
            session=seat.salt,
            max_tokens=task.sizes.answer_tokens,
            final=(call, take) == task.calls[-1],
        ),
        watcher.says,
    )
    asked = _Asked(
        asking=asking,
        brings=brings,
        reply=reply,
        counted=settled(rig.prompt_tokens, before, len(reply.answer.prompt_ids)),
        flooded=flooded,
        held=held,
    )
    watcher.call_ended(reply.answer, asked.sources)
    return asked


def _row(seat: Seat, task: Task, asked: _Asked, comparison: Comparison, left: Reusable) -> CallRow:
    answer, outcome, sources = asked.reply.answer, asked.reply.outcome, asked.sources
    prompt, between_s = len(answer.prompt_ids), answer.between_tokens_s
    return CallRow(
        scene=task.scene,
        arm=seat.arm,
        run=task.run,
        call=asked.asking.call,
        take=asked.asking.take,
        brings=asked.brings,
        ttft_ms=answer.first_s * 1e3,
        total_ms=answer.total_s * 1e3,
        between_tokens_ms=None if between_s is None else between_s * 1e3,
        prompt=prompt,
        local=sources.local,
        returned=sources.returned,
        computed=sources.computed,
        new=prompt - left.with_answer,
        seen_by_prefill=left.without_answer,
        # A switched-off extension keeps no book of what it had computed before.
        lost=None if outcome is None or seat.arm is Arm.OFF else outcome.lost,
        reason=None if outcome is None else outcome.reason.value,
        witness=asked.counted.computed,
        answer=answer.text,
        verdict=comparison.verdict,
        gap=comparison.gap,
        others_tokens=asked.flooded.num_tokens,
        others_s=asked.flooded.seconds,
        held=asked.held,
    )


def _judge(reference: Reference, which: tuple[int, int], answer: Answer) -> Comparison:
    expected = reference.answers.setdefault(which, answer)
    if expected is answer:
        return Comparison(verdict=Verdict.REFERENCE)
    if expected.prompt_ids != answer.prompt_ids:
        # Not the same question: whatever it says proves nothing.
        return Comparison(verdict=Verdict.DIFFERENT, at=0)
    return compare(expected, answer.token_ids)
