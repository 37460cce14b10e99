"""Measured blocks made by hand."""

from __future__ import annotations

from typing import Any

from turncache_tools.bench.arms import OFF, OFF_AGAIN, Arm, Hints
from turncache_tools.bench.report import Report, Run, report_on
from turncache_tools.bench.results import BlockResult, CallResult

SHARED = 100
ANSWER = 50
NEW = 200
OFF_ARM = Arm(name=OFF, what="", url="u")
BOTH = Arm(name="both", what="", url="u", hints=Hints.ALL, returns=True)
RETENTION = Arm(name="retention", what="", url="u", hints=Hints.ALL)


def call(agent: str, number: int, *, ttft_ms: float | None, on: bool, **more: Any) -> CallResult:
    """Return one call of an agent whose history grows evenly; ``on`` finds all of it."""
    prompt = SHARED + number * NEW + (number - 1) * ANSWER
    before = 0 if number == 1 else prompt - NEW
    local = 0 if number == 1 else before - ANSWER if on else 0
    returned = ANSWER if on and number > 1 else 0
    values: dict[str, Any] = {
        "prompt": prompt,
        "answer": ANSWER,
        "before": before,
        "answer_before": 0 if number == 1 else ANSWER,
        "local": local,
        "returned": returned,
        "computed": prompt - local - returned,
        "lost": 0,
        "reason": "ok",
    }
    values.update(more)
    return CallResult(agent=agent, call=number, ttft_ms=ttft_ms, total_ms=ttft_ms, **values)


def block(number: int, arm: str, round_: int, ttft_ms: float | None, **more: Any) -> BlockResult:
    """Return a block of two agents with four calls each; agents differ a little."""
    on = arm not in (OFF, OFF_AGAIN)
    calls = [
        call(agent, at, ttft_ms=None if ttft_ms is None else ttft_ms + shift + at, on=on, **more)
        for agent, shift in (("a1", 0.0), ("a2", 1.0))
        for at in range(1, 5)
    ]
    return BlockResult(number=number, arm=arm, round=round_, seconds=9.0, calls=tuple(calls))


def blocks(arm: str = "both", *, off_ms: float = 400.0, on_ms: float = 100.0) -> list[BlockResult]:
    """Return two rounds of off, an arm and off again."""
    return [
        block(0, OFF, 1, off_ms),
        block(1, arm, 1, on_ms),
        block(2, OFF_AGAIN, 1, off_ms),
        block(3, OFF_AGAIN, 2, off_ms),
        block(4, arm, 2, on_ms),
        block(5, OFF, 2, off_ms),
    ]


def reported(found: list[BlockResult], arm: Arm = BOTH, **more: Any) -> Report:
    """Report on blocks."""
    run = Run(seed=1, workload="by hand", shared=SHARED, miss_rate=None, stack={})
    return report_on(run, [OFF_ARM, arm], [], found, more)


def checks(report: Report) -> set[str]:
    """Return the names of what did not hold."""
    return {each.check for arm in report.arms for each in arm.refused}
