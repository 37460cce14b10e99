"""From rows to figures: every claim that can fail does fail when its row is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.demo.support import all_rows, last_act, report, row
from turncache_tools.demo.compare import Verdict
from turncache_tools.demo.edited import Stale
from turncache_tools.demo.figures import Figure, all_figures, earned, exact, least_ratios
from turncache_tools.demo.leftovers import Leftovers
from turncache_tools.demo.report import earned_lines
from turncache_tools.demo.rows import Arm, CallRow, Scene, ttft_by_call
from turncache_tools.demo.sizes import FULL


def figures(*changed: CallRow, left: Leftovers | None = None, **act: Any) -> dict[str, Figure]:
    """Return the figures of a demo in which some rows are replaced."""
    keys = {(one.scene, one.arm, one.run, one.call): one for one in changed}
    rows = [keys.get((one.scene, one.arm, one.run, one.call), one) for one in all_rows()]
    found = all_figures(rows, last_act(**act), left or Leftovers(), seconds=500.0)
    return {figure.figure: figure for figure in found}


def failed(found: dict[str, Figure]) -> list[str]:
    """Return the names of the figures that do not hold."""
    return [name for name, figure in found.items() if not figure.ok]


def test_short_texts_need_not_gain_what_whole_ones_must() -> None:
    """They have less to save, while the rest of a call costs the same."""
    full = least_ratios(dict.fromkeys(Scene, FULL))
    assert full == {Scene.SINGLE: 4.0, Scene.PAIR: 5.0}
    assert least_ratios(dict.fromkeys(Scene, FULL.scaled(0.7))) == full
    half = least_ratios({Scene.PAIR: FULL.scaled(0.35)})
    assert half == {Scene.PAIR: pytest.approx(1.25)}


def test_a_good_demo_has_no_failed_figure() -> None:
    """Every figure has its own name, and ratios are baseline over value."""
    found = figures()
    assert failed(found) == []
    pair = found["pair_return_ttft_last_call"]
    assert (pair.baseline, pair.value, pair.limit) == (3160.0, 170.0, 5.0)
    assert pair.ratio == pytest.approx(3160 / 170)
    assert found["single_retention_ttft_last_call"].limit == 4.0
    assert found["pair_retention_ttft_last_call"].limit is None


@pytest.mark.parametrize(
    ("scene", "arm", "changes", "name"),
    [
        pytest.param(
            Scene.PAIR, Arm.RETURN, {"ttft_ms": 700.0}, "pair_return_ttft_last_call", id="pair"
        ),
        pytest.param(
            Scene.SINGLE,
            Arm.RETENTION,
            {"ttft_ms": 900.0},
            "single_retention_ttft_last_call",
            id="single",
        ),
        pytest.param(
            Scene.PAIR,
            Arm.RETURN,
            {"computed": 193, "witness": 193},
            "pair_return_computed_beyond_new",
            id="more than a block",
        ),
        pytest.param(
            Scene.PAIR,
            Arm.RETURN,
            {"computed": 159, "witness": 159},
            "pair_return_computed_beyond_new",
            id="KV of something else",
        ),
        pytest.param(
            Scene.PAIR,
            Arm.RETENTION,
            {"computed": 213, "witness": 213},
            "pair_retention_computed_beyond_new",
            id="retention without returns",
        ),
        pytest.param(
            Scene.SINGLE,
            Arm.RETENTION,
            {"verdict": Verdict.DIFFERENT},
            "answers_different",
            id="another answer",
        ),
        pytest.param(
            Scene.SINGLE,
            Arm.RETENTION,
            {"witness": 999},
            "calls_where_vllm_counts_otherwise",
            id="an outcome that vLLM does not confirm",
        ),
        pytest.param(
            Scene.PAIR,
            Arm.OFF,
            {"others_tokens": 3000},
            "pair_waits_with_unequal_load",
            id="a lighter load",
        ),
    ],
)
def test_a_wrong_last_call_fails_its_figure(
    scene: Scene, arm: Arm, changes: dict[str, Any], name: str
) -> None:
    """One wrong call is enough, and fails nothing else."""
    assert failed(figures(row(scene, arm, 12, **changes))) == [name]


def test_a_warm_first_call_fails() -> None:
    """An arm that starts on the cache of another proves nothing."""
    found = figures(row(Scene.SINGLE, Arm.RETENTION, 1, local=32))
    assert failed(found) == ["first_calls_not_cold"]


def test_returns_that_bring_no_answers_fail() -> None:
    """Hits on prompts alone look fine and are what retention does without returns."""
    changed = []
    for call in range(2, 13):
        good = row(Scene.PAIR, Arm.RETURN, call)
        changed.append(row(Scene.PAIR, Arm.RETURN, call, returned=good.seen_by_prefill, local=0))
    assert "pair_return_answer_tokens_back" in failed(figures(*changed))


def test_the_deleted_document_must_not_be_answered_from() -> None:
    """What stock does is shown and held against nobody."""
    assert failed(figures(ours="Laura lives in Rome.")) == ["answers_from_the_deleted_document"]
    assert failed(figures(stock=Stale(answer="The customer lives in London.", taken=0))) == []
    assert failed(figures(verdict=Verdict.DIFFERENT)) == ["edited_history_answers_different"]


@pytest.mark.parametrize(
    ("left", "name"),
    [
        (Leftovers(processes=("17 python",)), "leftover_processes"),
        (Leftovers(ports=(8100,)), "leftover_ports"),
        (Leftovers(files=("/dev/shm/x",)), "leftover_files"),
    ],
)
def test_leftovers_fail(left: Leftovers, name: str) -> None:
    """A demo cleans up after itself."""
    assert failed(figures(left=left)) == [name]


def test_ties_are_counted_and_allowed() -> None:
    """Where two tokens are equally likely either is right."""
    found = figures(row(Scene.PAIR, Arm.RETURN, 5, verdict=Verdict.TIE, gap=1e-5))
    assert failed(found) == []
    assert found["answers_at_a_tie"].value == 1


def test_exact_means_no_difference() -> None:
    """Ties are exact, differences are not."""
    assert exact([row(Scene.PAIR, Arm.RETURN, 2, verdict=Verdict.TIE)])
    assert not exact([row(Scene.PAIR, Arm.RETURN, 2, verdict=Verdict.DIFFERENT)])


def test_several_runs_count_by_their_median() -> None:
    """One slow run of three moves nothing."""
    rows = [
        row(Scene.PAIR, Arm.RETURN, 2, run=run, ttft_ms=ms)
        for run, ms in enumerate((200.0, 9000.0, 210.0), 1)
    ]
    assert ttft_by_call(rows) == [210.0]


def test_what_a_task_computes_counts_its_last_call_once() -> None:
    """However often it is timed."""
    again = [row(Scene.PAIR, Arm.RETURN, 12, take=take) for take in (2, 3)]
    found = all_figures([*all_rows(), *again], last_act(), Leftovers(), seconds=500.0)
    counted = {figure.figure: figure.value for figure in found}
    expected = figures()["pair_return_computed_calls_2_on"].value
    assert counted["pair_return_computed_calls_2_on"] == expected


def test_earnings_are_per_feature() -> None:
    """Retention saves what prefill had seen, return what only decode had."""
    pair = earned(all_rows(), Scene.PAIR)
    assert pair.missed[Arm.OFF] > 20_000
    assert pair.missed[Arm.RETENTION] == 11 * 30
    assert pair.missed[Arm.RETURN] == 11 * 10
    lines = earned_lines(report())
    assert "holds 80% of prefill's pool" in lines[1]
    assert "return saves 220 more" in lines[1]
    assert lines[1].endswith("and holds 0%.")
