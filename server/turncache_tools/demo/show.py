"""The acts in order: one engine, the pair, the exchanged document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from turncache.protocol import Mode
from turncache_tools.demo import edited
from turncache_tools.demo.arms import ArmRun, Reference, Watcher, run_arm
from turncache_tools.demo.callers import Question
from turncache_tools.demo.edited import LastAct
from turncache_tools.demo.flood import Flood
from turncache_tools.demo.history import Material, Message, tool_message
from turncache_tools.demo.rigs import Engines, Rig, Starter
from turncache_tools.demo.rows import Arm, CallRow, Scene
from turncache_tools.demo.script import (
    FIRST_QUESTION,
    STEPS,
    SYSTEM,
    TASK,
    Step,
    Tools,
    cut,
    first_text,
    other_text,
)
from turncache_tools.demo.sizes import (
    FLOOD_IN_FLIGHT,
    FLOOD_TOKENS,
    Sizes,
    Speed,
    fitted_speed,
    lighter,
)

#: Share of the time for both scenes that the single engine may take.
_SINGLE_SHARE = 0.3
_PROBE_TOKENS = (FLOOD_TOKENS, 4 * FLOOD_TOKENS)
_PROBE_ANSWER = 8
#: Kept back at the end: the last act and the reports.
_RESERVE_S = 25.0


class Stage(Watcher, Protocol):
    """What the show tells people."""

    def act_begins(self, title: str) -> None:
        """An act begins."""

    def arm_ended(self, rows: list[CallRow]) -> None:
        """An arm has run."""

    def notes(self, text: str) -> None:
        """Something is worth knowing."""


@dataclass(slots=True)
class Shown:
    """What has been seen so far.

    Attributes:
        sizes: per scene, as they ran.
        act_seconds: seconds by act.
    """

    rows: list[CallRow] = field(default_factory=list)
    sizes: dict[Scene, Sizes] = field(default_factory=dict)
    act_seconds: dict[str, float] = field(default_factory=dict)
    last_act: LastAct | None = None


class Show:
    """Runs the demo's acts.

    Args:
        start: starts engines.
        stage: tells people.
        sizes: how large the demo is.
        num_runs: how often every arm runs.
        salt: separates this demo's KV from everybody's.
        clock: monotonic seconds; the demo began at 0 of ``limit_s``.
        deadline_s: reading of the clock at which the demo should have ended.
        tools: the agent's.
    """

    def __init__(
        self,
        start: Starter,
        stage: Stage,
        sizes: Sizes,
        *,
        num_runs: int,
        salt: str,
        clock: Callable[[], float],
        deadline_s: float,
        tools: Tools | None = None,
    ) -> None:
        self._start = start
        self._stage = stage
        self._sizes = sizes
        self._num_runs = num_runs
        self._salt = salt
        self._clock = clock
        self._deadline_s = deadline_s
        self._tools = tools or Tools()
        self._start_s = 0.0
        self._texts: tuple[str, ...] = ()
        self._material: Material | None = None
        self.shown = Shown()

    def run(self) -> Shown:
        """Run all acts."""
        self._single()
        ours = self._pair()
        self._last_act(ours)
        return self.shown

    # --- the acts ---------------------------------------------------------------------------

    def _single(self) -> None:
        with self._act("one engine"), self._rig(Engines.SINGLE) as rig:
            self._prepare(rig)
            after_s = 3.3 * self._start_s + _RESERVE_S
            left_s = (self._deadline_s - self._clock() - after_s) * _SINGLE_SHARE
            self._fit(rig, Scene.SINGLE, num_on=1, limit_s=left_s)
            reference = Reference()
            for run in range(1, self._num_runs + 1):
                # Alternated, so that no arm always runs on the warmer machine.
                order = (Arm.OFF, Arm.RETENTION) if run % 2 else (Arm.RETENTION, Arm.OFF)
                for arm in order:
                    rig.set_mode(Mode.OFF if arm is Arm.OFF else Mode.ON)
                    self._arm(rig, Scene.SINGLE, arm, run=run, reference=reference)

    def _pair(self) -> edited.Ours:
        reference = Reference()
        with self._act("stock pair"), self._rig(Engines.STOCK_PAIR) as rig:
            after_s = 2.2 * self._start_s + _RESERVE_S
            left_s = self._deadline_s - self._clock() - after_s
            self._fit(rig, Scene.PAIR, num_on=2, limit_s=left_s)
            for run in range(1, self._num_runs + 1):
                self._arm(rig, Scene.PAIR, Arm.OFF, run=run, reference=reference)
        with self._act("pair"), self._rig(Engines.PAIR) as rig:
            for run in range(1, self._num_runs + 1):
                order = (Arm.RETENTION, Arm.RETURN) if run % 2 else (Arm.RETURN, Arm.RETENTION)
                for arm in order:
                    rig.set_return(enabled=arm is Arm.RETURN)
                    self._arm(rig, Scene.PAIR, arm, run=run, reference=reference)
            rig.set_return(enabled=True)
            self._stage.notes(f"The document about {edited.DELETED.name} is exchanged.")
            return edited.ask_ours(rig.caller, f"{self._salt}-document", self._num_notes)

    def _last_act(self, ours: edited.Ours) -> None:
        with self._act("exchanged document"), self._rig(Engines.STOCK_RETURN) as rig:
            assert isinstance(rig.caller, edited.Returning)
            before = rig.prompt_tokens()
            stock = edited.ask_stock(rig.caller, f"{self._salt}-document", self._num_notes)
            taken = (rig.prompt_tokens() - before).external
        self.shown.last_act = LastAct(
            question=edited.CITY_QUESTION,
            ours=ours.answer,
            reference=ours.reference,
            verdict=ours.verdict,
            stock=stock,
            reused=ours.reused,
            stock_taken=taken,
            prompt=ours.prompt,
        )

    @property
    def _num_notes(self) -> int:
        return edited.notes_that_fit(self._sizes.max_model_len)

    # --- parts of acts ----------------------------------------------------------------------

    def _arm(self, rig: Rig, scene: Scene, arm: Arm, *, run: int, reference: Reference) -> None:
        assert self._material is not None
        sizes = self.shown.sizes[scene]
        flood = Flood(
            self._texts,
            num_requests=sizes.flood_requests,
            num_in_flight=FLOOD_IN_FLIGHT,
        )
        arm_run = ArmRun(
            scene=scene,
            arm=arm,
            run=run,
            salt=f"{self._salt}-{scene}-{arm}-{run}",
            sizes=sizes,
            material=self._material,
            flood=flood,
        )
        rows = run_arm(rig, arm_run, reference, self._stage)
        self.shown.rows += rows
        self._stage.arm_ended(rows)

    @contextmanager
    def _act(self, title: str) -> Iterator[None]:
        began_s = self._clock()
        self._stage.act_begins(title)
        yield
        self.shown.act_seconds[title] = self._clock() - began_s

    @contextmanager
    def _rig(self, engines: Engines) -> Iterator[Rig]:
        began_s = self._clock()
        rig = self._start(engines, self._sizes)
        try:
            self._start_s = max(self._start_s, self._clock() - began_s)
            yield rig
        finally:
            rig.stop()

    def _prepare(self, rig: Rig) -> None:
        """Cut the texts to size with the model's own tokenizer, once for all arms."""
        tools, sizes, count = self._tools, self._sizes, rig.count_tokens
        steps = STEPS[: sizes.num_calls - 1]
        fixed = count(f"{SYSTEM}\n{TASK}\n{FIRST_QUESTION}")
        self._material = Material(
            first=cut(first_text(tools), sizes.first_tokens - fixed, count),
            steps=steps,
            results=tuple(self._result(step, count) for step in steps),
        )
        self._texts = _slices(other_text(tools), count)

    def _result(self, step: Step, count: Callable[[str], int]) -> str:
        room = self._sizes.result_tokens - count(tool_message(step, ""))
        return tool_message(step, cut(self._tools.run(step), room, count))

    def _fit(self, rig: Rig, scene: Scene, *, num_on: int, limit_s: float) -> None:
        """Measure this rig and make the others' traffic lighter when the time is short."""
        speed = self._measured(rig, f"{self._salt}-{scene}-probe")
        sizes = lighter(
            self._sizes,
            speed,
            num_off=self._num_runs,
            num_on=num_on * self._num_runs,
            limit_s=limit_s,
        )
        self.shown.sizes[scene] = sizes
        self._stage.notes(
            f"In every wait {sizes.flood_requests} other sessions bring about "
            f"{sizes.flood_requests * FLOOD_TOKENS:,} tokens through a pool of "
            f"{sizes.pool_tokens:,}."
        )

    def _measured(self, rig: Rig, salt: str) -> Speed:
        """Time two prefills and one short answer."""
        times: list[tuple[int, float]] = []
        between_s = 0.0
        for number, num_tokens in enumerate(_PROBE_TOKENS):
            text = "".join(self._texts)[: num_tokens * 3]
            messages: list[Message] = [{"role": "user", "content": text}]
            answer = rig.caller.ask(
                Question(
                    messages=messages,
                    salt=f"{salt}-{number}",
                    session=None,
                    max_tokens=_PROBE_ANSWER,
                )
            ).answer
            times.append((len(answer.prompt_ids), answer.first_s))
            between_s = answer.between_tokens_s or between_s
        return fitted_speed(times[0], times[1], decode_s=between_s)


def _slices(text: str, count: Callable[[str], int]) -> tuple[str, ...]:
    """Cut a long text into prompts of about :data:`FLOOD_TOKENS` tokens with the template."""
    sample = text[:20_000]
    num_chars = int((FLOOD_TOKENS - 40) * len(sample) / count(sample))
    return tuple(text[at : at + num_chars] for at in range(0, len(text) - num_chars, num_chars))
