"""From rows to figures: what the demo claims, with the limit that each claim must keep. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turncache_tools.demo.compare import Verdict
from turncache_tools.demo.edited import LastAct
from turncache_tools.demo.leftovers import Leftovers
from turncache_tools.demo.rows import ARMS, Arm, CallRow, Scene, rows_of, ttft_by_call
from turncache_tools.demo.sizes import BLOCK_SIZE, Sizes
from turncache_tools.figure import Figure

__all__ = ["Earned", "Figure", "all_figures", "earned", "exact", "least_ratios"]

#: Least ratio of TTFT at the last call of the whole task, off over on.
LEAST_RATIO: Final = {Scene.SINGLE: 4.0, Scene.PAIR: 5.0}
#: Texts of less than this part of their length have less to save: less is asked of them.
_LEAST_SCALE: Final = 0.7


def _compared(name: str, unit: str, value: float, baseline: float) -> dict[str, Any]:
    return {
        "figure": name,
        "unit": unit,
        "value": value,
        "baseline": baseline,
        "ratio": baseline / value if value else None,
    }


def _at_most(name: str, unit: str, value: float, limit: float, **more: Any) -> Figure:
    return Figure(figure=name, unit=unit, value=value, limit=limit, ok=value <= limit, **more)


def _at_least(name: str, unit: str, value: float, limit: float, **more: Any) -> Figure:
    return Figure(figure=name, unit=unit, value=value, limit=limit, ok=value >= limit, **more)


def least_ratios(sizes: Mapping[Scene, Sizes]) -> dict[Scene, float]:
    """Return what TTFT must gain at the sizes that were chosen, off over on.

    Below ``_LEAST_SCALE`` by the square: a shorter text costs off less, and what every call costs
    anyway (legs, the rest of a block, a step) is a larger part of what is left.
    """
    return {
        scene: LEAST_RATIO[scene] * min(1.0, chosen.scale / _LEAST_SCALE) ** 2
        for scene, chosen in sizes.items()
    }


def all_figures(
    rows: Sequence[CallRow],
    last_act: LastAct,
    leftovers: Leftovers,
    *,
    seconds: float,
    least_ratio: Mapping[Scene, float] = LEAST_RATIO,
) -> list[Figure]:
    """Return every figure of a demo that has run to its end.

    Args:
        rows: of all arms.
        last_act: the exchanged document.
        leftovers: what the demo has left behind.
        seconds: how long it took.
        least_ratio: what TTFT must gain, off over on; scenes without an entry only inform.
    """
    ran = {row.scene for row in rows}
    scenes = [scene for scene in Scene if scene in ran]
    return [
        *(f for scene in scenes for f in _scene_figures(rows, scene, least_ratio.get(scene))),
        *_correctness(rows),
        *_last_act(last_act),
        _at_most("leftover_processes", "processes", len(leftovers.processes), 0),
        _at_most("leftover_ports", "ports", len(leftovers.ports), 0),
        _at_most("leftover_files", "files", len(leftovers.files), 0),
        Figure(figure="demo_seconds", unit="s", value=seconds),
    ]


def exact(rows: Iterable[CallRow]) -> bool:
    """Say whether every answer was the reference's, up to ties."""
    return all(row.verdict is not Verdict.DIFFERENT for row in rows)


def _scene_figures(rows: Sequence[CallRow], scene: Scene, least: float | None) -> list[Figure]:
    off_arm, *on_arms = ARMS[scene]
    off = rows_of(rows, scene, off_arm)
    figures: list[Figure] = []
    for arm in on_arms:
        on = rows_of(rows, scene, arm)
        name = f"{scene}_{arm}"
        last = arm is on_arms[-1]
        compared = _compared(
            f"{name}_ttft_last_call", "ms", ttft_by_call(on)[-1], ttft_by_call(off)[-1]
        )
        limit = least if last else None
        figures.append(
            Figure(
                **compared,
                limit=limit,
                ok=limit is None or (compared["ratio"] or 0.0) >= limit,
            )
        )
        figures.append(
            Figure(
                **_compared(
                    f"{name}_computed_calls_2_on",
                    "tokens",
                    _mean_per_run(on, "computed"),
                    _mean_per_run(off, "computed"),
                )
            )
        )
        figures.append(_excess(name, on, after_answer=arm is not Arm.RETENTION or last))
    if scene is Scene.PAIR:
        figures.append(_answers_back(rows_of(rows, scene, Arm.RETURN)))
    figures += [_between_tokens(rows, scene), _others(rows, scene), _equal_load(rows, scene)]
    return figures


def _mean_per_run(rows: Sequence[CallRow], name: str) -> float:
    runs = {row.run for row in rows}
    # The task has its last call once, however often that is timed.
    counted = [row for row in rows if row.call > 1 and row.take == 1]
    return float(sum(getattr(row, name) for row in counted)) / max(1, len(runs))


def _excess(name: str, rows: Sequence[CallRow], *, after_answer: bool) -> Figure:
    """Compare what was computed with what was new, call by call; the worst counts.

    Fewer tokens than the new ones would be worse than too many: KV of something else.

    Args:
        name: start of the figure's name.
        rows: of the arm.
        after_answer: the previous answer's KV is within reach as well; without returns
            prefill has only its own.
    """
    later = [row for row in rows if row.call > 1]
    excess = [
        row.computed - (row.new if after_answer else row.prompt - row.seen_by_prefill)
        for row in later
    ]
    worst = max(excess, default=0)
    return Figure(
        figure=f"{name}_computed_beyond_new",
        unit="tokens",
        value=worst,
        limit=BLOCK_SIZE,
        ok=worst <= BLOCK_SIZE and min(excess, default=0) >= 0,
    )


def _answers_back(rows: Sequence[CallRow]) -> Figure:
    """Count tokens of answers, which only decode had, that prefill did not compute again.

    Only full blocks travel: what can come back of an answer ends at the last full block of
    the prompt and answer before. A short answer may end in the block in which it began.
    """
    later = [row for row in rows if row.call > 1]
    back = sum(max(0, row.local + row.returned - row.seen_by_prefill) for row in later)
    possible = 0
    for row in later:
        full = (row.prompt - row.new) // BLOCK_SIZE * BLOCK_SIZE
        possible += max(0, full - row.seen_by_prefill)
    return _at_least("pair_return_answer_tokens_back", "tokens", back, possible)


def _between_tokens(rows: Sequence[CallRow], scene: Scene) -> Figure:
    def middle(arm: Arm) -> float:
        found = sorted(
            row.between_tokens_ms
            for row in rows_of(rows, scene, arm)
            if row.between_tokens_ms is not None and row.call > 1
        )
        return found[len(found) // 2] if found else 0.0

    off, *on = ARMS[scene]
    return Figure(**_compared(f"{scene}_between_tokens", "ms", middle(on[-1]), middle(off)))


def _others(rows: Sequence[CallRow], scene: Scene) -> Figure:
    """Compare what the other sessions' traffic took: what the agent gains, who pays?"""

    def per_wait(arm: Arm) -> float:
        waits = [row.others_s for row in rows_of(rows, scene, arm) if row.call > 1]
        return sum(waits) / max(1, len(waits))

    off, *on = ARMS[scene]
    return Figure(**_compared(f"{scene}_others_per_wait", "s", per_wait(on[-1]), per_wait(off)))


def _equal_load(rows: Sequence[CallRow], scene: Scene) -> Figure:
    loads: dict[int, set[int]] = {}
    for row in rows:
        if row.scene is scene:
            loads.setdefault(row.call, set()).add(row.others_tokens)
    unequal = sum(len(load) > 1 for load in loads.values())
    return _at_most(f"{scene}_waits_with_unequal_load", "waits", unequal, 0)


def _correctness(rows: Sequence[CallRow]) -> list[Figure]:
    different = sum(row.verdict is Verdict.DIFFERENT for row in rows)
    ties = sum(row.verdict is Verdict.TIE for row in rows)
    warm = sum(row.call == 1 and row.local + row.returned > 0 for row in rows)
    witness = sum(row.witness != row.computed for row in rows)
    return [
        _at_most("answers_different", "answers", different, 0),
        Figure(figure="answers_at_a_tie", unit="answers", value=ties),
        _at_most("first_calls_not_cold", "calls", warm, 0),
        _at_most("calls_where_vllm_counts_otherwise", "calls", witness, 0),
    ]


def _last_act(act: LastAct) -> list[Figure]:
    return [
        Figure(
            figure="answers_from_the_deleted_document",
            unit="answers",
            value=int(act.ours_is_from_the_deleted),
            baseline=None if act.stock is None else int(act.stock_is_from_the_deleted),
            limit=0,
            ok=not act.ours_is_from_the_deleted,
        ),
        _at_most(
            "edited_history_answers_different",
            "answers",
            int(act.verdict is Verdict.DIFFERENT),
            0,
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Earned:
    """Who earned what in one scene, per run, calls 2 and later.

    Attributes:
        off: tokens that the off arm computed.
        new: tokens that no earlier call had computed: the least that any arm can compute.
        missed: tokens computed again by each arm, the off arm's first.
    """

    off: float
    new: float
    missed: dict[Arm, float]


def earned(rows: Sequence[CallRow], scene: Scene) -> Earned:
    """Return what the arms of a scene computed again."""
    arms = {arm: rows_of(rows, scene, arm) for arm in ARMS[scene]}
    off = arms[Arm.OFF]
    return Earned(
        off=_mean_per_run(off, "computed"),
        new=_mean_per_run(off, "new"),
        missed={arm: _mean_per_run(found, "again") for arm, found in arms.items()},
    )
