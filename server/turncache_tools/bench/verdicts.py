"""Whether a gain may be printed: what must hold of two arms before they are compared. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from turncache_tools.bench.arms import KINDS, OFF, OFF_AGAIN, Arm, Hints
from turncache_tools.bench.results import BlockResult, CallResult, calls_of, of_arm, pairs
from turncache_tools.bench.statistics import Interval, bootstrap, median_ratio, quantile

#: Prompts of two arms may differ by what live answers differ in, relative to the longer.
_PROMPTS_MAY_DIFFER: Final = 0.05
#: A first call may find the shared prompt and the blocks around it, in tokens beyond it.
_FIRST_MAY_FIND: Final = 64
#: Off against off may differ by so much: agents of one block do not show how blocks differ.
_OFF_MAY_DIFFER: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why no gain is printed.

    Attributes:
        arm: that is refused.
        check: name of what does not hold.
        why: in words, with numbers.
    """

    arm: str
    check: str
    why: str


def off_against_off(blocks: Sequence[BlockResult], *, seed: int) -> Interval | None:
    """Return TTFT of off over off, calls 2 and later; None where none was measured."""
    first = [block for block in blocks if block.arm == OFF]
    again = [block for block in blocks if block.arm == OFF_AGAIN]
    return bootstrap(
        {key: _later(found) for key, found in pairs(first, again, "ttft_ms").items()},
        median_ratio,
        seed=seed,
    )


def _later(found: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    return [pair for pair in found if pair[0] > 1]


def refusals(
    blocks: Sequence[BlockResult], off: Arm, arm: Arm, *, shared: int, again: Interval | None
) -> list[Refusal]:
    """Return why an arm may not be compared with off; empty when it may.

    Args:
        blocks: all.
        off: arm to compare with.
        arm: arm to compare.
        shared: tokens that all agents begin with.
        again: off against off.
    """
    base, mine = of_arm(blocks, off.name), of_arm(blocks, arm.name)
    checks = (
        ("off_differs_from_off", off_differs(again)),
        ("success", _success(base, mine)),
        ("tokens_add_up", _adds_up(base) or _adds_up(mine)),
        ("first_call_cold", _warm(base, shared) or _warm(mine, shared)),
        ("equal_prompts", _prompts(base, mine)),
        ("equal_load", _load(base, mine)),
        ("engaged", _engaged(arm, mine)),
    )
    return [Refusal(arm=arm.name, check=check, why=why) for check, why in checks if why]


def off_differs(again: Interval | None) -> str:
    """Return why off is not like off, empty when it is."""
    if again is None:
        return "off against off was not measured"
    if abs(again.value - 1) <= _OFF_MAY_DIFFER or (again.low is not None and again.contains(1.0)):
        return ""
    return f"off against off is {again.value:.2f}, and 1 is not within its interval"


def _success(base: Sequence[BlockResult], mine: Sequence[BlockResult]) -> str:
    counts = []
    for blocks in (base, mine):
        every = [call for block in blocks for call in block.calls]
        good = sum(not call.error and call.ttft_ms is not None for call in every)
        counts.append((good, len(every)))
    (off_good, off_all), (good, all_) = counts
    if not all_ or not off_all or not good or not off_good:
        return f"answered with a first token: off {off_good} of {off_all}, here {good} of {all_}"
    if good / all_ != off_good / off_all:
        return f"answered with a first token: off {off_good} of {off_all}, here {good} of {all_}"
    return ""


def _adds_up(blocks: Sequence[BlockResult]) -> str:
    for block in blocks:
        for call in block.calls:
            if call.prompt is None or call.computed is None:
                continue
            found = (call.local or 0) + (call.returned or 0) + call.computed
            if found != call.prompt:
                return (
                    f"{block.arm}, {call.agent} call {call.call}: local {call.local} + returned "
                    f"{call.returned} + computed {call.computed} is {found}, prompt {call.prompt}"
                )
    return ""


def _warm(blocks: Sequence[BlockResult], shared: int) -> str:
    for block in blocks:
        for call in block.calls:
            found = _reused(call)
            if call.call == 1 and not call.error and found > shared + _FIRST_MAY_FIND:
                return (
                    f"{block.arm}, {call.agent}: its first call found {found} tokens in a cache, "
                    f"of which only {shared} are shared: something ran before with this content"
                )
    return ""


def _reused(call: CallResult) -> int:
    if call.local is None:
        return call.cached or 0
    return call.local + (call.returned or 0)


def _prompts(base: Sequence[BlockResult], mine: Sequence[BlockResult]) -> str:
    found = [pair for pair_list in pairs(mine, base, "prompt").values() for pair in pair_list]
    if not found:
        return "no prompt's tokens are known: the server reports no usage"
    lengths = [quantile([pair[at] for pair in found], 0.5) for at in (1, 2)]
    if abs(lengths[0] - lengths[1]) > _PROMPTS_MAY_DIFFER * max(lengths):
        return f"median prompt: here {lengths[0]:.0f} tokens, off {lengths[1]:.0f}"
    return ""


def _load(base: Sequence[BlockResult], mine: Sequence[BlockResult]) -> str:
    loads = []
    for blocks in (base, mine):
        num = max(1, len(blocks))
        calls = sum(len(block.calls) for block in blocks) / num
        others = sum(len(block.others) for block in blocks) / num
        failed = sum(each is None for block in blocks for each in block.others)
        loads.append((calls, others, failed))
    if loads[0] != loads[1]:
        names = "calls, other requests and failed ones of these, per block"
        return f"{names}: off {loads[0]}, here {loads[1]}"
    return ""


def _engaged(arm: Arm, mine: Sequence[BlockResult]) -> str:
    """Say why an arm that should have reused more did not; returns must bring answers' tokens.

    An answer's KV exists on decode only: prompt tokens alone would mean that nothing which
    the model has generated came back.
    """
    later = [call for call in calls_of(mine) if call.call > 1]
    if arm.hints is Hints.ALL and later and all(call.computed is None for call in later):
        return "no answer says what happened to its KV (Turncache-Outcome): nothing can be shown"
    if not later or all(call.computed is None and not call.cached for call in later):
        external = sum(block.counters.get("external_tokens", 0) for block in mine)
        if arm.name in KINDS and KINDS[arm.name].elsewhere and not external:
            return "nothing shows that KV was reused: neither usage nor the engines' counters"
    if arm.hints is Hints.ALL and not arm.returns and not sum(map(_reused, later)):
        return "nothing was kept: no call found any of its prompt in a cache"
    if arm.returns:
        returned = sum(call.returned or 0 for call in later)
        if not returned:
            reasons = sorted({call.reason for call in later if call.reason})
            return f"nothing was returned (reasons: {', '.join(reasons) or 'none given'})"
        generated = sum(
            max(0, _reused(call) - max(0, call.before - call.answer_before)) for call in later
        )
        possible = any(call.answer_before > _FIRST_MAY_FIND // 2 for call in later)
        if possible and not generated:
            return "returned tokens hold nothing that the model generated: answers are recomputed"
    return ""
