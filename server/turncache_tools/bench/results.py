"""What was measured: calls and blocks, and their JSON. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from turncache.protocol import Outcome
from turncache_tools.bench.arms import OFF, OFF_AGAIN
from turncache_tools.bench.stream import Streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """One call. Times in milliseconds, counts in tokens; None is never measured as 0.

    Attributes:
        agent: its name.
        call: number in its agent, from 1.
        error: why it failed, empty for an answer.
        ttft_ms: to the first delta of any kind.
        content_ms: to the first text for the user.
        total_ms: to the end.
        between_ms: mean time between tokens.
        longest_gap_ms: longest time between two deltas.
        prompt: by usage, or by the outcome.
        answer: by usage.
        cached: by usage of the engine that answered.
        before: tokens of the previous prompt and answer, 0 for a first call.
        answer_before: tokens of the previous answer.
        local: by the outcome; likewise the following.
        returned: see above.
        computed: see above.
        lost: see above.
        reason: see above.
        plan: see above.
    """

    agent: str
    call: int
    error: str = ""
    ttft_ms: float | None = None
    content_ms: float | None = None
    total_ms: float | None = None
    between_ms: float | None = None
    longest_gap_ms: float | None = None
    prompt: int | None = None
    answer: int | None = None
    cached: int | None = None
    before: int = 0
    answer_before: int = 0
    local: int | None = None
    returned: int | None = None
    computed: int | None = None
    lost: int | None = None
    reason: str | None = None
    plan: str | None = None


def answered(
    agent: str,
    call: int,
    streamed: Streamed,
    outcome: Outcome | None,
    *,
    before: int,
    answer_before: int,
) -> CallResult:
    """Return the result of a call that was answered."""
    return CallResult(
        agent=agent,
        call=call,
        ttft_ms=_ms(streamed.first_s),
        content_ms=_ms(streamed.content_s),
        total_ms=_ms(streamed.total_s),
        between_ms=_ms(streamed.between_s),
        longest_gap_ms=_ms(streamed.longest_gap_s),
        prompt=streamed.prompt if outcome is None else outcome.prompt,
        answer=streamed.answer,
        cached=streamed.cached,
        before=before,
        answer_before=answer_before,
        local=None if outcome is None else outcome.local,
        returned=None if outcome is None else outcome.returned,
        computed=None if outcome is None else outcome.computed,
        lost=None if outcome is None else outcome.lost,
        reason=None if outcome is None else outcome.reason.value,
        plan=None if outcome is None or outcome.plan is None else outcome.plan.value,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockResult:
    """One block.

    Attributes:
        number: see ``arms.Block``; likewise arm and round.
        seconds: it took.
        calls: in the order in which they ended.
        others: seconds that each request of the other traffic took, None for a failed one.
        others_tokens: of their prompts.
        counters: of all engines, over the block; see ``counters.COUNTERS``.
        gauges: means over the block of what was sampled.
    """

    number: int
    arm: str
    round: int
    seconds: float
    calls: tuple[CallResult, ...]
    others: tuple[float | None, ...] = ()
    others_tokens: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BlockResult:
        """Read what :meth:`to_dict` wrote."""
        known = {each.name: values[each.name] for each in fields(cls) if each.name in values}
        known["calls"] = tuple(CallResult(**call) for call in values["calls"])
        known["others"] = tuple(values.get("others", ()))
        return cls(**known)


def of_arm(blocks: Iterable[BlockResult], arm: str) -> list[BlockResult]:
    """Return the blocks of an arm, in their order; off's are both of every round."""
    names = (OFF, OFF_AGAIN) if arm == OFF else (arm,)
    return [block for block in blocks if block.arm in names]


def calls_of(blocks: Iterable[BlockResult]) -> list[CallResult]:
    """Return all calls that were answered."""
    return [call for block in blocks for call in block.calls if not call.error]


def measured(calls: Iterable[CallResult], name: str) -> list[float]:
    """Return a member of all calls that have it."""
    found = (getattr(call, name) for call in calls)
    return [value for value in found if value is not None]


def pairs(
    one: Sequence[BlockResult], other: Sequence[BlockResult], name: str
) -> dict[tuple[int, str], list[tuple[int, float, float]]]:
    """Pair the calls of two arms by round, agent and call.

    Returns:
        By (round, agent): (call, value of one, value of the other), for every two blocks of a
        round. Calls of one agent depend on each other: whoever resamples takes whole agents.
    """
    out: dict[tuple[int, str], list[tuple[int, float, float]]] = {}
    for block, partner in itertools.product(one, other):
        if block.round != partner.round:
            continue
        found = {(call.agent, call.call): call for call in partner.calls if not call.error}
        for call in block.calls:
            match = found.get((call.agent, call.call))
            mine = getattr(call, name)
            theirs = None if match is None else getattr(match, name)
            if not call.error and mine is not None and theirs is not None:
                key = (block.round, call.agent)
                out.setdefault(key, []).append((call.call, float(mine), float(theirs)))
    return out
