"""The acts in order: one engine, the pair, the exchanged document."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from turncache.errors import TurncacheError
from turncache.protocol import Mode
from turncache_tools.demo import edited
from turncache_tools.demo.arms import Reference, Seat, Task, Watcher, run_arms, warm_up
from turncache_tools.demo.background import InBackground
from turncache_tools.demo.callers import Question
from turncache_tools.demo.edited import LastAct, Stale
from turncache_tools.demo.flood import Flood
from turncache_tools.demo.history import Message
from turncache_tools.demo.rigs import NUM_ENGINES, Engines, Rig, Starter
from turncache_tools.demo.rows import ARMS, Arm, CallRow, Scene
from turncache_tools.demo.script import NUM_TAKES, Tools
from turncache_tools.demo.sizes import (
    FLOOD_IN_FLIGHT,
    FLOOD_TOKENS,
    Sizes,
    Speed,
    can_be_lighter,
    fitted_speed,
    lighter,
)
from turncache_tools.demo.texts import Texts, prepare

_PAIRS = (Engines.STOCK, Engines.PAIR)
#: Share of the time for both scenes that the single engine may take.
_SINGLE_SHARE = 0.35
_PROBE_TOKENS = 1024
_PROBE_ANSWER = 8
#: Kept back at the end: the last act and the reports.
_RESERVE_S = 20.0


Groups = tuple[tuple[Arm, ...], ...]
#: On one pair its two arms cannot take turns: each would live on what the other has left. The
#: product's takes turns with stock.
_PAIR_GROUPS: Groups = ((Arm.OFF, Arm.RETURN), (Arm.RETENTION,))
_ALONE: Groups = tuple((arm,) for arm in ARMS[Scene.PAIR])


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
        groups: the arms of each scene; those of one group took turns, groups followed each other.
        act_seconds: seconds by act.
    """

    rows: list[CallRow] = field(default_factory=list)
    sizes: dict[Scene, Sizes] = field(default_factory=dict)
    groups: dict[Scene, Groups] = field(default_factory=dict)
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
        self._engine_start_s = 0.0
        self._texts: Texts | None = None
        self._references = {scene: Reference() for scene in Scene}
        self.shown = Shown()

    def run(self) -> Shown:
        """Run all acts."""
        with self._rigs(Engines.SINGLE_OFF, Engines.SINGLE) as (off, on), self._act("one engine"):
            self._single(off, on)
        with self._rigs(*_PAIRS) as (stock, pair):
            with self._act("pair"):
                self._fit(stock, Scene.PAIR, num_on=2, num_repeated=1, limit_s=self._left_s())
                warm_up(pair, f"{self._salt}-{Scene.PAIR}", _PROBE_ANSWER)
                rigs = {Arm.OFF: stock, Arm.RETENTION: pair, Arm.RETURN: pair}
                self._compare(Scene.PAIR, _PAIR_GROUPS, rigs)
            with self._act("exchanged document, stock"):
                stale = self._ask_stock(stock)
            # Its decode engine waits for a reader of the answer's KV, and steps meanwhile.
            stock.stop()
            self._ask_ours(pair, stale)
        return self.shown

    def run_pair_alone(self) -> Shown:
        """Run our pair only: its *off* is the extension switched off."""
        with self._rigs(Engines.PAIR) as (pair,):
            with self._act("pair"):
                self._texts = prepare(self._tools, self._sizes, pair.count_tokens)
                self._fit(pair, Scene.PAIR, num_on=2, limit_s=self._left_s())
                self._compare(Scene.PAIR, _ALONE, dict.fromkeys(ARMS[Scene.PAIR], pair))
            self._ask_ours(pair, None)
        return self.shown

    # --- the acts ---------------------------------------------------------------------------

    def _single(self, off: Rig, on: Rig) -> None:
        self._texts = prepare(self._tools, self._sizes, on.count_tokens)
        start_s = self._engine_start_s * sum(NUM_ENGINES[kind] for kind in _PAIRS)
        self._fit(on, Scene.SINGLE, num_on=1, limit_s=(self._left_s() - start_s) * _SINGLE_SHARE)
        warm_up(off, f"{self._salt}-{Scene.SINGLE}", _PROBE_ANSWER)
        self._compare(Scene.SINGLE, (ARMS[Scene.SINGLE],), {Arm.OFF: off, Arm.RETENTION: on})

    def _compare(self, scene: Scene, groups: Groups, rigs: Mapping[Arm, Rig]) -> None:
        """Run arms, those of one group in turns, one group after another."""
        self.shown.groups[scene] = groups
        for run in range(1, self._num_runs + 1):
            # Alternated, so that no arm always runs on the warmer machine.
            for group in groups if run % 2 else groups[::-1]:
                for arm in group:
                    _switch(rigs[arm], scene, arm)
                self._arms(scene, run, {arm: rigs[arm] for arm in group})

    def _ask_stock(self, rig: Rig) -> Stale:
        assert rig.returning is not None
        before = rig.prompt_tokens()
        answer = edited.ask_stock(rig.returning, f"{self._salt}-document", self._num_notes)
        return Stale(answer=answer, taken=(rig.prompt_tokens() - before).external)

    def _ask_ours(self, rig: Rig, stock: Stale | None) -> None:
        with self._act("exchanged document"):
            rig.set_mode(Mode.ON)
            rig.set_return(enabled=True)
            ours = edited.ask_ours(rig.caller, f"{self._salt}-document", self._num_notes)
        self.shown.last_act = LastAct(
            question=edited.CITY_QUESTION,
            ours=ours.answer,
            reference=ours.reference,
            verdict=ours.verdict,
            stock=stock,
            reused=ours.reused,
            prompt=ours.prompt,
        )

    @property
    def _num_notes(self) -> int:
        return edited.notes_that_fit(self._sizes.max_model_len)

    def _left_s(self) -> float:
        return self._deadline_s - self._clock() - _RESERVE_S

    # --- parts of acts ----------------------------------------------------------------------

    def _arms(self, scene: Scene, run: int, rigs: Mapping[Arm, Rig]) -> None:
        assert self._texts is not None
        sizes = self.shown.sizes[scene]
        num_takes = NUM_TAKES if scene is Scene.PAIR and len(rigs) > 1 else 1
        task = Task(
            scene=scene,
            run=run,
            sizes=sizes,
            takes=self._texts.takes[:num_takes],
            flood=Flood(self._texts.others, waits=sizes.flood_waits, num_in_flight=FLOOD_IN_FLIGHT),
        )
        seats = [
            Seat(arm=arm, rig=rig, salt=f"{self._salt}-{scene}-{arm}-{run}")
            for arm, rig in rigs.items()
        ]
        for rows in run_arms(seats, task, self._references[scene], self._stage):
            self.shown.rows += rows
            self._stage.arm_ended(rows)

    @contextmanager
    def _act(self, title: str) -> Iterator[None]:
        began_s = self._clock()
        self._stage.act_begins(title)
        yield
        self.shown.act_seconds[title] = self._clock() - began_s

    @contextmanager
    def _rigs(self, *kinds: Engines) -> Iterator[tuple[Rig, ...]]:
        """Start stacks side by side: most of a start is one process after another.

        Nothing is measured meanwhile. An interrupt does not wait for the others: the
        launcher's reapers end them with this program.
        """
        title = f"starting engines: {', '.join(kinds)}"
        with self._act(title):
            rigs = self._started(kinds)
        num_engines = sum(NUM_ENGINES[kind] for kind in kinds)
        self._engine_start_s = self.shown.act_seconds[title] / num_engines
        try:
            yield rigs
        finally:
            for rig in rigs:
                rig.stop()

    def _started(self, kinds: tuple[Engines, ...]) -> tuple[Rig, ...]:
        first, *rest = kinds
        others = [InBackground(partial(self._start, kind, self._sizes)) for kind in rest]
        try:
            rigs = [self._start(first, self._sizes)]
        except TurncacheError:
            for other in others:
                other.discard()
            raise
        try:
            rigs += [other.result() for other in others]
        except BaseException:
            for rig in rigs:
                rig.stop()
            raise
        return tuple(rigs)

    def _fit(
        self, rig: Rig, scene: Scene, *, num_on: int, limit_s: float, num_repeated: int = 0
    ) -> None:
        """Measure this rig and make the others' traffic lighter when the time is short."""
        salt = f"{self._salt}-{scene}-probe"
        warm_up(rig, salt, _PROBE_ANSWER)
        sizes = self._sizes
        if can_be_lighter(sizes):
            sizes = lighter(
                sizes,
                self._measured(rig, salt),
                num_off=self._num_runs,
                num_on=num_on * self._num_runs,
                limit_s=limit_s,
                num_repeated=num_repeated * self._num_runs,
            )
        self.shown.sizes[scene] = sizes
        self._stage.notes(
            f"In a long wait {max(sizes.flood_waits)} other sessions bring about "
            f"{max(sizes.flood_waits) * FLOOD_TOKENS:,} tokens through a pool of "
            f"{sizes.pool_tokens:,}, in a short one {min(sizes.flood_waits)}."
        )

    def _measured(self, rig: Rig, salt: str) -> Speed:
        """Time two prefills and one short answer."""
        longest = min(_PROBE_TOKENS, self._sizes.max_model_len // 2)
        times: list[tuple[int, float]] = []
        between_s = 0.0
        for number, num_tokens in enumerate((longest // 4, longest)):
            assert self._texts is not None
            text = "".join(self._texts.others)[: num_tokens * 4]
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


def _switch(rig: Rig, scene: Scene, arm: Arm) -> None:
    """Let our engines do what an arm has switched on; stock engines have nothing to switch."""
    if not rig.ours:
        return
    rig.set_mode(Mode.OFF if arm is Arm.OFF else Mode.ON)
    if scene is Scene.PAIR:
        rig.set_return(enabled=arm is Arm.RETURN)
