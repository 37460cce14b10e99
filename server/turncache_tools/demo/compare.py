"""What must be equal: answers across arms, and computed tokens with what was new. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from turncache_tools.demo.answers import Answer

#: In float32, KV computed in another order differs by rounding. Where the two best tokens
#: are closer than this, either is right.
TIE_GAP: Final = 1e-3


class Verdict(enum.StrEnum):
    """How an answer relates to the reference's."""

    REFERENCE = "reference"
    EQUAL = "equal"
    TIE = "tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        verdict: equal, equal up to a tie, or different.
        at: index of the first token that differs, None without one.
        gap: the reference's gap between its two best tokens there.
    """

    verdict: Verdict
    at: int | None = None
    gap: float | None = None


def compare(reference: Answer, token_ids: Sequence[int]) -> Comparison:
    """Compare generated tokens with the reference's.

    A difference is a tie when the reference's two best tokens were closer than
    :data:`TIE_GAP` there *and* the other token is its second best: a third token is none.
    """
    mine = reference.token_ids
    for at, (ours, theirs) in enumerate(zip(mine, token_ids, strict=False)):
        if ours != theirs:
            gap = reference.gaps[at]
            second = reference.runners_up[at]
            tie = gap < TIE_GAP and second in (None, theirs)
            verdict = Verdict.TIE if tie else Verdict.DIFFERENT
            return Comparison(verdict=verdict, at=at, gap=gap)
    if len(mine) != len(token_ids):
        return Comparison(verdict=Verdict.DIFFERENT, at=min(len(mine), len(token_ids)))
    return Comparison(verdict=Verdict.EQUAL)


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Return how many tokens two sequences share from their start."""
    for at, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return at
    return min(len(first), len(second))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reusable:
    """What of a prompt exists as KV somewhere, in tokens.

    Attributes:
        with_answer: shared with an earlier prompt and its answer; KV of the answer's last token
            was never computed.
        without_answer: shared with an earlier prompt alone, all that prefill has seen.
    """

    with_answer: int = 0
    without_answer: int = 0


def reusable(earlier: Iterable[Answer], prompt_ids: Sequence[int]) -> Reusable:
    """Return what of ``prompt_ids`` earlier calls have left.

    Every call computes at least the last token of its prompt.
    """
    most = len(prompt_ids) - 1
    with_answer = without_answer = 0
    for each in earlier:
        chain = each.prompt_ids + each.token_ids[:-1]
        with_answer = max(with_answer, common_prefix(chain, prompt_ids))
        without_answer = max(without_answer, common_prefix(each.prompt_ids, prompt_ids))
    return Reusable(with_answer=min(with_answer, most), without_answer=min(without_answer, most))
