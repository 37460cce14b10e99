"""From blocks to what is reported: numbers by arm and call, gains and refusals. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from turncache_tools.bench.arms import OFF, Arm, NotMeasurable
from turncache_tools.bench.counters import added
from turncache_tools.bench.results import (
    BlockResult,
    CallResult,
    calls_of,
    measured,
    of_arm,
    pairs,
)
from turncache_tools.bench.statistics import (
    Interval,
    bootstrap,
    median_ratio,
    quantile,
    summary,
)
from turncache_tools.bench.verdicts import Refusal, off_against_off, off_differs, refusals
from turncache_tools.figure import SCHEMA as FIGURES_SCHEMA
from turncache_tools.figure import Figure

SCHEMA: Final = "turncache-bench/1"
_TIMES: Final = ("ttft_ms", "content_ms", "total_ms", "between_ms", "longest_gap_ms")
#: Upper ends of the buckets of prompt lengths.
_LENGTHS: Final = tuple(2**power for power in range(8, 21))


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was run.

    Attributes:
        seed: of workload and resampling.
        workload: its name.
        shared: tokens that all agents begin with.
        miss_rate: asked for: share of waits that empty prefill's cache, None for none asked.
        stack: facts for the reader.
    """

    seed: int
    workload: str
    shared: int
    miss_rate: float | None
    stack: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLine:
    """Calls of one number in one arm: medians, with an interval for TTFT."""

    call: int
    count: int
    ttft_ms: Interval
    tokens: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReport:
    """One arm.

    Attributes:
        arm: which.
        blocks: so many.
        calls: sent.
        failed: not answered.
        no_token: answered without a delta: in no TTFT.
        errors: how often each happened.
        first: TTFT of first calls.
        later: TTFT of calls 2 and later.
        times: of all calls, by name.
        by_call: lines by number of the call.
        by_length: TTFT by length of the prompt: (upper end, summary).
        tokens: mean per later call, by source; empty where no answer says.
        reasons: how often each was given, later calls.
        answer_rate: tokens of answers per second of the blocks.
        others: seconds of the other traffic's requests.
        counters: of the engines, per block.
        gauges: means.
        gain: TTFT of off over this arm, calls 2 and later; None when refused.
        gain_by_call: likewise by number of the call.
        refused: why there is no gain.
    """

    arm: Arm
    blocks: int
    calls: int
    failed: int
    no_token: int
    errors: Mapping[str, int]
    first: Mapping[str, float] | None
    later: Mapping[str, float] | None
    times: Mapping[str, Mapping[str, float] | None]
    by_call: tuple[CallLine, ...]
    by_length: tuple[tuple[int, Mapping[str, float]], ...]
    tokens: Mapping[str, float]
    reasons: Mapping[str, int]
    answer_rate: float
    others: Mapping[str, float] | None
    counters: Mapping[str, float]
    gauges: Mapping[str, float]
    gain: Interval | None = None
    gain_by_call: Mapping[int, Interval] | None = None
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that is printed.

    Attributes:
        run: what was run.
        arms: off first.
        missing: arms that this stack cannot show.
        again: TTFT of off over off.
        missed: share of later calls in off that found less than half of the previous prompt
            on prefill; None where the answers do not say.
        compared: what ``--verify`` found, by arm.
    """

    run: Run
    arms: tuple[ArmReport, ...]
    missing: tuple[NotMeasurable, ...]
    again: Interval | None
    missed: float | None
    compared: Mapping[str, Any]

    @property
    def ok(self) -> bool:
        """Say whether everything that was measured may be relied on."""
        return all(not arm.refused and not arm.failed for arm in self.arms)

    def figures(self) -> list[Figure]:
        """Return the numbers that claims are held against."""
        out = []
        if self.again is not None:
            ok = not off_differs(self.again)
            out.append(
                Figure(figure="off_against_off", unit="ratio", value=self.again.value, ok=ok)
            )
        off = self.arms[0]
        for each in self.arms[1:]:
            if each.later is None or off.later is None:
                continue
            out.append(
                Figure(
                    figure=f"{each.arm.name}_ttft_later_calls",
                    unit="ms",
                    value=each.later["p50"],
                    baseline=off.later["p50"],
                    ratio=None if each.gain is None else each.gain.value,
                    ok=not each.refused,
                )
            )
        return out

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            "schema": FIGURES_SCHEMA,
            "figures": [figure.to_dict() for figure in self.figures()],
            "bench": {"schema": SCHEMA, **asdict(self)},
        }


def report_on(
    run: Run,
    arms: Sequence[Arm],
    missing: Sequence[NotMeasurable],
    blocks: Sequence[BlockResult],
    compared: Mapping[str, Any],
) -> Report:
    """Work out the report.

    Args:
        run: what was run.
        arms: that were measured, off first.
        missing: that were not.
        blocks: all that ended.
        compared: answers of equal prompts, by arm.
    """
    again = off_against_off(blocks, seed=run.seed)
    off = of_arm(blocks, OFF)
    return Report(
        run=run,
        arms=tuple(_arm(run, arms[0], arm, blocks, again) for arm in arms),
        missing=tuple(missing),
        again=again,
        missed=_missed(calls_of(off)),
        compared=compared,
    )


def _missed(calls: Sequence[CallResult]) -> float | None:
    later = [call for call in calls if call.call > 1 and call.local is not None and call.before]
    if not later:
        return None
    return sum((call.local or 0) < call.before / 2 for call in later) / len(later)


def _arm(
    run: Run, off: Arm, arm: Arm, blocks: Sequence[BlockResult], again: Interval | None
) -> ArmReport:
    mine = of_arm(blocks, arm.name)
    calls = calls_of(mine)
    later = [call for call in calls if call.call > 1]
    every = [call for block in mine for call in block.calls]
    seconds = sum(block.seconds for block in mine)
    gain: Interval | None = None
    by_call: dict[int, Interval] | None = None
    refused: tuple[Refusal, ...] = ()
    if arm is not off:
        refused = tuple(refusals(blocks, off, arm, shared=run.shared, again=again))
        if not refused:
            gain, by_call = _gains(of_arm(blocks, off.name), mine, seed=run.seed)
    others = [each for block in mine for each in block.others if each is not None]
    return ArmReport(
        arm=arm,
        blocks=len(mine),
        calls=len(every),
        failed=len(every) - len(calls),
        no_token=sum(call.ttft_ms is None for call in calls),
        errors=dict(Counter(call.error for call in every if call.error)),
        first=summary(measured((call for call in calls if call.call == 1), "ttft_ms")),
        later=summary(measured(later, "ttft_ms")),
        times={name: summary(measured(calls, name)) for name in _TIMES},
        by_call=_by_call(mine, seed=run.seed),
        by_length=_by_length(calls),
        tokens=_tokens(later),
        reasons=dict(Counter(call.reason for call in later if call.reason)),
        answer_rate=sum(measured(calls, "answer")) / seconds if seconds else 0.0,
        others=summary(others),
        counters=_per_block(mine, lambda block: block.counters),
        gauges=_per_block(mine, lambda block: block.gauges),
        gain=gain,
        gain_by_call=by_call,
        refused=refused,
    )


def _tokens(calls: Sequence[CallResult]) -> dict[str, float]:
    known = [call for call in calls if call.computed is not None]
    if not known:
        return {}
    names = ("prompt", "local", "returned", "computed")
    out = {name: sum(measured(known, name)) / len(known) for name in names}
    return {**out, "lost": sum(map(_lost, known)) / len(known)}


def _lost(call: CallResult) -> int:
    """Return computed tokens that the call before had: by lengths, where no engine keeps book.

    An engine that is switched off answers 0, which is not what was lost.
    """
    new = max(0, (call.prompt or 0) - call.before)
    return max(call.lost or 0, min(call.before, max(0, (call.computed or 0) - new)))


def _per_block(
    blocks: Sequence[BlockResult], pick: Callable[[BlockResult], Mapping[str, float]]
) -> dict[str, float]:
    return {name: value / len(blocks) for name, value in added(map(pick, blocks)).items()}


def _by_call(blocks: Sequence[BlockResult], *, seed: int) -> tuple[CallLine, ...]:
    numbers = sorted({call.call for call in calls_of(blocks)})
    out = []
    for number in numbers:
        clusters: dict[tuple[int, str], list[float]] = {}
        found = []
        for block in blocks:
            for call in block.calls:
                if call.error or call.call != number:
                    continue
                found.append(call)
                if call.ttft_ms is not None:
                    clusters.setdefault((block.round, call.agent), []).append(call.ttft_ms)
        ttft = bootstrap(clusters, lambda v: quantile(v, 0.5) if v else None, seed=seed)
        if ttft is not None:
            out.append(CallLine(call=number, count=len(found), ttft_ms=ttft, tokens=_tokens(found)))
    return tuple(out)


def _by_length(calls: Sequence[CallResult]) -> tuple[tuple[int, Mapping[str, float]], ...]:
    buckets: dict[int, list[float]] = {}
    for call in calls:
        if call.ttft_ms is None or call.prompt is None:
            continue
        top = next((top for top in _LENGTHS if call.prompt <= top), _LENGTHS[-1] * 2)
        buckets.setdefault(top, []).append(call.ttft_ms)
    found = [(top, summary(values)) for top, values in sorted(buckets.items())]
    return tuple((top, each) for top, each in found if each is not None)


def _gains(
    off: Sequence[BlockResult], mine: Sequence[BlockResult], *, seed: int
) -> tuple[Interval | None, dict[int, Interval]]:
    found = pairs(off, mine, "ttft_ms")
    later = {key: [pair for pair in each if pair[0] > 1] for key, each in found.items()}
    by_call: dict[int, Interval] = {}
    for number in sorted({pair[0] for each in found.values() for pair in each}):
        of_call = {key: [p for p in each if p[0] == number] for key, each in found.items()}
        gain = bootstrap({k: v for k, v in of_call.items() if v}, median_ratio, seed=seed)
        if gain is not None:
            by_call[number] = gain
    return bootstrap(
        {key: each for key, each in later.items() if each}, median_ratio, seed=seed
    ), by_call
