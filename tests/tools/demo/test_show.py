"""The whole show on fake engines: which arm sees what, and what is stopped when."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from tests.tools.demo.fake_rig import FakeClock, FakeRig, FakeStarter, Faults
from tests.tools.demo.support import SMALL
from turncache.errors import EngineFault
from turncache.protocol import Mode
from turncache_tools.demo.compare import Verdict
from turncache_tools.demo.figures import all_figures
from turncache_tools.demo.leftovers import Leftovers
from turncache_tools.demo.rigs import Engines
from turncache_tools.demo.rows import ARMS, Arm, Scene, rows_of, ttft_by_call
from turncache_tools.demo.screen import Screen
from turncache_tools.demo.show import Show, Shown
from turncache_tools.demo.sizes import BLOCK_SIZE, Sizes

NO_LIMIT_S = 1e9


def shown(
    faults: Faults | None = None,
    *,
    num_runs: int = 1,
    deadline_s: float = NO_LIMIT_S,
    start_s: float = 1.0,
) -> tuple[Shown, FakeStarter]:
    """Run a small demo on fakes."""
    clock = FakeClock()
    starter = FakeStarter(clock, faults, start_s=start_s)
    screen = Screen(Console(file=io.StringIO()), Console(file=io.StringIO()))
    show = Show(
        starter,
        screen,
        SMALL,
        num_runs=num_runs,
        salt="test",
        clock=clock,
        deadline_s=deadline_s,
    )
    return show.run(), starter


def failed(result: Shown) -> list[str]:
    """Return the names of the figures that do not hold, times left out."""
    assert result.last_act is not None
    found = all_figures(result.rows, result.last_act, Leftovers(), seconds=1.0)
    return [f.figure for f in found if not f.ok and "_ttft_" not in f.figure]


def test_every_arm_runs_every_call() -> None:
    """In both scenes, and nothing but the limit on times depends on the machine."""
    result, _ = shown()
    for scene in Scene:
        for arm in ARMS[scene]:
            rows = rows_of(result.rows, scene, arm)
            calls = [row.call for row in rows if row.take == 1]
            assert calls == list(range(1, SMALL.num_calls + 1))
    assert failed(result) == []


def test_off_computes_everything_and_on_only_what_is_new() -> None:
    """Retention keeps what prefill has, return brings the answer back as well."""
    result, _ = shown()
    for row in result.rows:
        if row.call == 1 or row.arm is Arm.OFF:
            assert row.computed == row.prompt
        elif (row.scene, row.arm) == (Scene.PAIR, Arm.RETENTION):
            assert row.local > 0
            assert row.returned == 0
            assert 0 <= row.computed - (row.prompt - row.seen_by_prefill) < BLOCK_SIZE
        else:
            assert 0 <= row.again < BLOCK_SIZE
        if (row.scene, row.arm) == (Scene.PAIR, Arm.RETURN) and row.call > 1:
            assert row.returned > 0


def test_all_arms_get_the_same_prompts_and_the_same_load() -> None:
    """The off arm's answers are in every history."""
    result, _ = shown()
    for scene in Scene:
        by_call: dict[tuple[int, int], set[tuple[int, int]]] = {}
        for row in result.rows:
            if row.scene is scene:
                kinds = by_call.setdefault((row.call, row.take), set())
                kinds.add((row.prompt, row.others_tokens))
        assert all(len(kinds) == 1 for kinds in by_call.values())
    assert {row.others_tokens > 0 for row in result.rows if row.call > 1} == {True}


def test_off_is_the_reference() -> None:
    """All others are held against it, whoever is asked first, its own repetitions too."""
    result, _ = shown(num_runs=2)
    references = [row for row in result.rows if row.verdict is Verdict.REFERENCE]
    assert {(row.run, row.arm) for row in references} == {(1, Arm.OFF)}
    asked = {(row.scene, row.call, row.take) for row in result.rows}
    assert {(row.scene, row.call, row.take) for row in references} == asked
    assert len(references) == len(asked)


class Looking(Screen):
    """Writes down which arm is asked, and which engines run then."""

    def __init__(self, starter: FakeStarter) -> None:
        super().__init__(Console(file=io.StringIO()), None)
        self._starter = starter
        self._scene_and_run = (Scene.SINGLE, 0)
        self.asked: dict[tuple[Scene, int], list[tuple[Arm, int]]] = {}
        self.beside: dict[tuple[Scene, Arm], set[Engines]] = {}
        self.beside_act: dict[str, set[Engines]] = {}

    def act_begins(self, title: str) -> None:
        self.beside_act[title] = self._running()

    def arms_begin(self, scene: Scene, arms: Sequence[Arm], run: int) -> None:
        self._scene_and_run = (scene, run)

    def call_begins(self, arm: Arm, call: int, brings: str) -> None:
        scene, _ = self._scene_and_run
        self.asked.setdefault(self._scene_and_run, []).append((arm, call))
        self.beside.setdefault((scene, arm), set()).update(self._running())

    def _running(self) -> set[Engines]:
        return {rig.engines for rig in self._starter.rigs if not rig.stopped}


def looked(*, num_runs: int = 1) -> Looking:
    """Run a small demo and return what was seen."""
    clock = FakeClock()
    starter = FakeStarter(clock)
    looking = Looking(starter)
    Show(
        starter,
        looking,
        SMALL,
        num_runs=num_runs,
        salt="t",
        clock=clock,
        deadline_s=NO_LIMIT_S,
    ).run()
    return looking


def test_off_and_on_take_turns_call_by_call() -> None:
    """Off on, on off, and so on, the pair's last call three times; the other way in even runs."""
    off, kept, back = Arm.OFF, Arm.RETENTION, Arm.RETURN
    asked = looked(num_runs=2).asked
    single = [(off, 1), (kept, 1), (kept, 2), (off, 2), (off, 3), (kept, 3), (kept, 4), (off, 4)]
    assert asked[Scene.SINGLE, 1] == single
    pair = [(off, 1), (back, 1), (back, 2), (off, 2), (off, 3), (back, 3), (back, 4), (off, 4)]
    pair += [(off, 4), (back, 4), (back, 4), (off, 4)]
    alone = [(kept, call) for call in (1, 2, 3, 4)]
    assert asked[Scene.PAIR, 1] == pair + alone
    turned = [each for two in zip(pair[1::2], pair[::2], strict=True) for each in two]
    assert asked[Scene.PAIR, 2] == alone + turned


def test_the_last_call_brings_something_else_in_every_take() -> None:
    """What it brings is new each time, and what was there before is still to be reused."""
    result, _ = shown()
    for arm in (Arm.OFF, Arm.RETURN):
        takes = [row for row in rows_of(result.rows, Scene.PAIR, arm) if row.call == 4]
        assert [row.take for row in takes] == [1, 2, 3]
        assert len({row.brings for row in takes}) == 3
        assert len({row.answer for row in takes}) == 3
        if arm is Arm.RETURN:
            assert all(row.returned > 0 for row in takes)
            assert all(0 <= row.again < BLOCK_SIZE for row in takes)
            assert all(row.new > takes[0].new / 2 for row in takes)


def test_a_machine_that_gets_slower_slows_both_arms() -> None:
    """The ratio of the last call is what an even machine shows."""

    def ratios(faults: Faults) -> dict[str, float]:
        result, _ = shown(faults)
        assert result.last_act is not None
        found = all_figures(result.rows, result.last_act, Leftovers(), seconds=1.0)
        return {
            figure.figure: figure.ratio or 0.0
            for figure in found
            if figure.figure.endswith("_ttft_last_call") and "pair_retention" not in figure.figure
        }

    even, drifting = ratios(Faults()), ratios(Faults(drift_s=20.0))
    assert len(even) == 2
    assert drifting == {name: pytest.approx(ratio, rel=0.08) for name, ratio in even.items()}


@pytest.mark.parametrize("engines", [Engines.STOCK, Engines.PAIR])
def test_one_stalled_take_changes_nothing(engines: Engines) -> None:
    """The last call of the pair counts by the median of its takes, which are nearly as long."""

    def last_call(faults: Faults | None = None) -> tuple[list[float], int]:
        result, starter = shown(faults)
        arm = Arm.OFF if engines is Engines.STOCK else Arm.RETURN
        rows = rows_of(result.rows, Scene.PAIR, arm)
        counted = next(rig.asked for rig in starter.rigs if rig.engines is engines)
        asked_last = [number for number, salt in counted if f"pair-{arm}" in salt][-1]
        return ttft_by_call(rows), asked_last

    even, asked_last = last_call()
    stalled, _ = last_call(Faults(stalls=(engines, asked_last)))
    assert stalled == pytest.approx(even, rel=0.2)


def test_every_kind_of_engines_starts_once() -> None:
    """The two single engines side by side, then both pairs; all are stopped."""
    _, starter = shown()
    kinds = [rig.engines for rig in starter.rigs]
    assert set(kinds[:2]) == {Engines.SINGLE_OFF, Engines.SINGLE}
    assert set(kinds[2:]) == {Engines.STOCK, Engines.PAIR}
    assert all(rig.stopped for rig in starter.rigs)


def test_the_off_engine_is_ours_switched_off() -> None:
    """One engine is compared with itself, but for the mode."""
    _, starter = shown()
    modes = {rig.engines: rig.modes for rig in starter.rigs if not rig.engines.startswith("pair")}
    assert modes[Engines.SINGLE_OFF] == [Mode.OFF]
    assert modes[Engines.SINGLE] == [Mode.ON]


def test_the_same_stacks_run_beside_every_arm_of_a_scene() -> None:
    """What waits on the same cores would be in the times of one arm and not of the other."""
    stacks = {
        Scene.SINGLE: {Engines.SINGLE_OFF, Engines.SINGLE},
        Scene.PAIR: {Engines.STOCK, Engines.PAIR},
    }
    assert looked().beside == {
        (scene, arm): stacks[scene] for scene in Scene for arm in ARMS[scene]
    }


def test_ours_answers_about_the_exchanged_document_without_stock_beside_it() -> None:
    """A stock decode engine that holds an answer's KV steps without a pause."""
    assert looked().beside_act["exchanged document"] == {Engines.PAIR}


@pytest.mark.parametrize("broken", list(Engines))
def test_when_one_of_two_starts_fails_the_other_is_stopped(broken: Engines) -> None:
    """Whichever of them it is; the error is the one that is told."""
    clock = FakeClock()
    starter = FakeStarter(clock)

    def start(engines: Engines, sizes: Sizes) -> FakeRig:
        if engines is broken:
            raise EngineFault(engines, "was not ready within 300 s")
        return starter(engines, sizes)

    show = Show(
        start,
        Screen(Console(file=io.StringIO()), None),
        SMALL,
        num_runs=1,
        salt="t",
        clock=clock,
        deadline_s=NO_LIMIT_S,
    )
    with pytest.raises(EngineFault, match="was not ready"):
        show.run()
    beside = {
        Engines.SINGLE: Engines.SINGLE_OFF,
        Engines.SINGLE_OFF: Engines.SINGLE,
        Engines.PAIR: Engines.STOCK,
        Engines.STOCK: Engines.PAIR,
    }
    assert starter.rigs[-1].engines is beside[broken]
    assert all(rig.stopped for rig in starter.rigs)


def test_our_pair_alone_is_compared_with_itself_switched_off() -> None:
    """The quick show: one start, three arms, and nobody who answers from the deleted document."""
    clock = FakeClock()
    starter = FakeStarter(clock)
    out = io.StringIO()
    result = Show(
        starter,
        Screen(Console(file=io.StringIO()), Console(file=out, width=140), stock=False),
        SMALL,
        num_runs=2,
        salt="t",
        clock=clock,
        deadline_s=NO_LIMIT_S,
    ).run_pair_alone()
    assert [rig.engines for rig in starter.rigs] == [Engines.PAIR]
    assert starter.rigs[0].stopped
    assert [row.arm for row in result.rows if row.call == 1] == [
        Arm.OFF,
        Arm.RETENTION,
        Arm.RETURN,
        Arm.RETURN,
        Arm.RETENTION,
        Arm.OFF,
    ]
    off = rows_of(result.rows, Scene.PAIR, Arm.OFF)
    assert all(row.computed == row.prompt for row in off)
    assert failed(result) == []
    assert result.last_act is not None
    assert result.last_act.stock is None
    assert "stock" not in out.getvalue()


def test_a_tie_is_counted_and_the_reference_goes_on() -> None:
    """The prompts after it stay equal, so every later answer can still be compared."""
    result, _ = shown(Faults(swap_call=2, gap=1e-5))
    ties = [row for row in result.rows if row.verdict is Verdict.TIE]
    assert [(row.arm, row.call) for row in ties] == [
        (Arm.RETENTION, 2),
        (Arm.RETURN, 2),
        (Arm.RETENTION, 2),
    ]
    assert failed(result) == []


def test_another_answer_fails_the_demo() -> None:
    """With a clear gap the same difference is a wrong answer."""
    result, _ = shown(Faults(swap_call=2, gap=0.4))
    assert failed(result) == ["answers_different"]


def test_retention_that_does_not_engage_fails_the_demo() -> None:
    """A feature that silently does nothing must not look like one that works."""
    result, _ = shown(Faults(forgets=True))
    assert "single_retention_computed_beyond_new" in failed(result)
    assert "pair_return_computed_beyond_new" in failed(result)


def test_an_outcome_that_vllm_does_not_confirm_fails_the_demo() -> None:
    """Our own numbers are checked against vLLM's counters, call by call."""
    result, _ = shown(Faults(miscount=5))
    assert failed(result) == ["calls_where_vllm_counts_otherwise"]


def test_the_exchanged_document_is_answered_by_both() -> None:
    """The stock pair took KV from decode and answers from it."""
    result, _ = shown()
    act = result.last_act
    assert act is not None
    assert act.stock_is_from_the_deleted
    assert act.stock is not None
    assert act.stock.taken == 32
    assert not act.ours_is_from_the_deleted
    assert act.ours == act.reference
    stale, _ = shown(Faults(stale=True))
    assert "answers_from_the_deleted_document" in failed(stale)


@pytest.mark.parametrize("dies_at", [1, 5, 20])
def test_a_dead_engine_ends_the_show_and_stops_the_rest(dies_at: int) -> None:
    """Whichever call finds it dead."""
    clock = FakeClock()
    starter = FakeStarter(clock, Faults(dies_at=dies_at))
    show = Show(
        starter,
        Screen(Console(file=io.StringIO()), None),
        SMALL,
        num_runs=1,
        salt="test",
        clock=clock,
        deadline_s=NO_LIMIT_S,
    )
    with pytest.raises(EngineFault, match="exit code 137"):
        show.run()
    assert all(rig.stopped for rig in starter.rigs)


@pytest.mark.parametrize(
    ("deadline_s", "least"),
    [pytest.param(NO_LIMIT_S, True, id="time enough"), pytest.param(1.0, False, id="too late")],
)
def test_traffic_gets_lighter_when_time_runs_out(deadline_s: float, least: bool) -> None:
    """Per scene, before its first arm, so that all of its arms carry the same."""
    result, _ = shown(deadline_s=deadline_s)
    shares = {sizes.lost_share for sizes in result.sizes.values()}
    assert shares == ({1.0} if least else {0.7})


def test_seconds_are_told_by_act() -> None:
    """Where the time of the demo went, the starts of engines included."""
    result, _ = shown(start_s=40.0)
    assert list(result.act_seconds) == [
        "starting engines: single-off, single",
        "one engine",
        "starting engines: stock, pair",
        "pair",
        "exchanged document, stock",
        "exchanged document",
    ]
    assert result.act_seconds["starting engines: stock, pair"] >= 40.0


def test_people_see_answers_and_counts() -> None:
    """The model's words as they come, and what each call computed."""
    live = io.StringIO()
    out = io.StringIO()
    clock = FakeClock()
    kwargs: dict[str, Any] = {"num_runs": 1, "salt": "t", "clock": clock}
    Show(
        FakeStarter(clock),
        Screen(Console(file=live, width=120), Console(file=out, width=140)),
        SMALL,
        deadline_s=NO_LIMIT_S,
        **kwargs,
    ).run()
    assert "read_file secrets.py" in live.getvalue()
    assert "word-" in live.getvalue()
    assert "first token" in live.getvalue()
    assert "One engine: off and retention, in turns" in live.getvalue()
    assert "  4  return: search return  shutil.py" in live.getvalue()
    tables = out.getvalue()
    assert tables.count("computed") == 5
    assert "retention and return" in tables
    assert "(tokens)" in tables
