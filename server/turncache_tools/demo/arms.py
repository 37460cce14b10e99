"""One arm: the agent's calls, with the others' traffic in every wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from turncache_tools.demo.answers import Answer
from turncache_tools.demo.callers import Question, Reply
from turncache_tools.demo.compare import Comparison, Verdict, compare, reusable
from turncache_tools.demo.counters import PromptTokens
from turncache_tools.demo.flood import Flood, Flooded
from turncache_tools.demo.history import Material, Message, messages_of
from turncache_tools.demo.rigs import Rig, settled
from turncache_tools.demo.rows import Arm, CallRow, Scene
from turncache_tools.demo.sizes import Sizes


class Watcher(Protocol):
    """Sees an arm while it runs: the screen."""

    def arm_begins(self, scene: Scene, arm: Arm, run: int) -> None:
        """An arm begins."""

    def call_begins(self, call: int, brings: str) -> None:
        """A call is sent."""

    def says(self, text: str) -> None:
        """The model says something more."""

    def call_ended(self, row: CallRow) -> None:
        """A call has its answer."""


@dataclass(slots=True)
class Reference:
    """The answers that all arms of a scene must give; written by the first arm that runs."""

    answers: list[Answer] = field(default_factory=list)

    def texts(self, num: int) -> list[str]:
        """Return the first ``num`` answers, as they go into the history."""
        return [answer.text for answer in self.answers[:num]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmRun:
    """One run of one arm.

    Attributes:
        salt: separates its KV from that of every other arm and run.
    """

    scene: Scene
    arm: Arm
    run: int
    salt: str
    sizes: Sizes
    material: Material
    flood: Flood


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


def run_arm(rig: Rig, run: ArmRun, reference: Reference, watcher: Watcher) -> list[CallRow]:
    """Run an arm and return its rows.

    The first arm's answers become the reference, and every arm's prompts carry the
    reference's answers: an answer that left it at a tie is counted, not continued.
    """
    watcher.arm_begins(run.scene, run.arm, run.run)
    previous: Answer | None = None
    rows: list[CallRow] = []
    for call in range(1, run.sizes.num_calls + 1):
        flooded = Flooded(num_tokens=0, seconds=0.0)
        if call > 1:
            flooded = run.flood.pour(rig.caller, wait=call - 1, salt=run.salt)
        watcher.call_begins(call, run.material.brings(call))
        row, previous = _call(
            rig,
            run,
            call,
            reference=reference,
            previous=previous,
            flooded=flooded,
            says=watcher.says,
        )
        rows.append(row)
        watcher.call_ended(row)
    return rows


def _call(
    rig: Rig,
    run: ArmRun,
    call: int,
    *,
    reference: Reference,
    previous: Answer | None,
    flooded: Flooded,
    says: Callable[[str], None],
) -> tuple[CallRow, Answer]:
    held = rig.held()
    before = rig.prompt_tokens()
    reply = rig.caller.ask(
        Question(
            messages=messages_of(run.material, reference.texts(call - 1)),
            salt=run.salt,
            session=run.salt,
            max_tokens=run.sizes.answer_tokens,
            final=call == run.sizes.num_calls,
        ),
        says,
    )
    answer = reply.answer
    counted = settled(rig.prompt_tokens, before, len(answer.prompt_ids))
    comparison = _judge(reference, call, answer)
    left = reusable(previous, answer.prompt_ids)
    prompt, outcome = len(answer.prompt_ids), reply.outcome
    between_s = answer.between_tokens_s
    row = CallRow(
        scene=run.scene,
        arm=run.arm,
        run=run.run,
        call=call,
        brings=run.material.brings(call),
        ttft_ms=answer.first_s * 1e3,
        total_ms=answer.total_s * 1e3,
        between_tokens_ms=None if between_s is None else between_s * 1e3,
        prompt=prompt,
        **_sources(reply, counted),
        new=prompt - left.with_answer,
        seen_by_prefill=left.without_answer,
        # A switched-off extension keeps no book of what it had computed before.
        lost=None if outcome is None or run.arm is Arm.OFF else outcome.lost,
        reason=None if outcome is None else outcome.reason.value,
        witness=counted.computed,
        answer=answer.text,
        verdict=comparison.verdict,
        gap=comparison.gap,
        others_tokens=flooded.num_tokens,
        others_s=flooded.seconds,
        held=held,
    )
    return row, answer


def _sources(reply: Reply, counted: PromptTokens) -> dict[str, int]:
    """Return where the prompt's tokens came from: as our engine says, else as vLLM counted."""
    outcome = reply.outcome
    if outcome is None:
        return {
            "local": counted.local,
            "returned": counted.external,
            "computed": counted.computed,
        }
    return {
        "local": outcome.local,
        "returned": outcome.returned,
        "computed": outcome.computed,
    }


def _judge(reference: Reference, call: int, answer: Answer) -> Comparison:
    if len(reference.answers) < call:
        reference.answers.append(answer)
        return Comparison(verdict=Verdict.REFERENCE)
    expected = reference.answers[call - 1]
    if expected.prompt_ids != answer.prompt_ids:
        # Not the same question: whatever it says proves nothing.
        return Comparison(verdict=Verdict.DIFFERENT, at=0)
    return compare(expected, answer.token_ids)
