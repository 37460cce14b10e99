"""The tie rule and the arithmetic of what could be reused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.demo.support import answer
from turncache_tools.demo.compare import (
    TIE_GAP,
    Reusable,
    Verdict,
    common_prefix,
    compare,
    reusable,
)

TOKENS = st.lists(st.integers(0, 3), max_size=12)


def test_equal_tokens_are_equal() -> None:
    """Nothing else is looked at."""
    assert compare(answer(), (1, 2, 3)).verdict is Verdict.EQUAL


@pytest.mark.parametrize(
    ("gap", "second", "verdict"),
    [
        pytest.param(TIE_GAP / 2, 92, Verdict.TIE, id="second best at a tie"),
        pytest.param(TIE_GAP / 2, None, Verdict.TIE, id="second best not known"),
        pytest.param(TIE_GAP, 92, Verdict.DIFFERENT, id="the limit is no tie"),
        pytest.param(0.5, 92, Verdict.DIFFERENT, id="clearly another token"),
        pytest.param(TIE_GAP / 2, 77, Verdict.DIFFERENT, id="a third token"),
    ],
)
def test_only_the_second_best_at_a_tie_is_a_tie(
    gap: float, second: int | None, verdict: Verdict
) -> None:
    """The first difference decides; what follows it follows from it."""
    reference = answer(gaps=(1.0, gap, 1.0), runners_up=(91, second, 93))
    comparison = compare(reference, (1, 92, 55))
    assert comparison.verdict is verdict
    assert (comparison.at, comparison.gap) == (1, gap)


def test_a_tie_before_the_difference_excuses_nothing() -> None:
    """The gap counts where the answers part, not somewhere."""
    reference = answer(gaps=(0.0, 1.0, 1.0), runners_up=(91, 92, 93))
    assert compare(reference, (1, 92, 3)).verdict is Verdict.DIFFERENT


@pytest.mark.parametrize("tokens", [(1, 2), (1, 2, 3, 4)])
def test_another_length_is_a_difference(tokens: tuple[int, ...]) -> None:
    """An answer that ends elsewhere is another answer."""
    assert compare(answer(), tokens).verdict is Verdict.DIFFERENT


@given(tokens=st.lists(st.integers(0, 3), min_size=3, max_size=3), gap=st.floats(0, 1))
def test_a_verdict_is_one_of_three(tokens: list[int], gap: float) -> None:
    """Equal exactly for equal tokens, a tie only below the limit."""
    comparison = compare(answer(gaps=(gap,) * 3, runners_up=(0, 0, 0)), tokens)
    assert (comparison.verdict is Verdict.EQUAL) == (tokens == [1, 2, 3])
    if comparison.verdict is Verdict.TIE:
        assert gap < TIE_GAP


@given(first=TOKENS, second=TOKENS)
def test_the_common_prefix_is_common_and_longest(first: list[int], second: list[int]) -> None:
    """Equal up to there, and there one ends or they differ."""
    num = common_prefix(first, second)
    assert first[:num] == second[:num]
    assert num in (len(first), len(second)) or first[num] != second[num]


def test_the_last_generated_token_has_no_kv() -> None:
    """Its KV would have been computed by the step after it, which never came."""
    before = answer(prompt_ids=(1, 2), token_ids=(3, 4))
    assert reusable([before], (1, 2, 3, 4, 5, 6)) == Reusable(with_answer=3, without_answer=2)


def test_a_call_computes_at_least_its_last_token() -> None:
    """A repeated prompt cannot be reused whole."""
    assert reusable([answer()], (10, 11, 12, 13)) == Reusable(with_answer=3, without_answer=3)


def test_a_first_call_reuses_nothing() -> None:
    """There is nothing to reuse."""
    assert reusable([], (1, 2, 3)) == Reusable()


def test_a_retokenised_answer_is_reused_up_to_the_difference() -> None:
    """Text that goes back may come out as other tokens than the model generated."""
    before = answer(prompt_ids=(1, 2), token_ids=(3, 4, 5, 6))
    assert reusable([before], (1, 2, 3, 99, 6, 7)).with_answer == 3


def test_whichever_earlier_call_shares_most_counts() -> None:
    """A call that is made again with another end shares its start with both others."""
    task = answer(prompt_ids=(1, 2), token_ids=(3, 4))
    first = answer(prompt_ids=(1, 2, 3, 5, 6), token_ids=(7, 8))
    assert reusable([task, first], (1, 2, 3, 5, 9)) == Reusable(with_answer=4, without_answer=4)
    assert reusable([first, task], (1, 2, 3, 4, 9)) == Reusable(with_answer=3, without_answer=3)


@given(prompt=TOKENS, said=TOKENS, following=st.lists(st.integers(0, 3), min_size=1))
def test_reusable_is_within_the_prompt(
    prompt: list[int], said: list[int], following: list[int]
) -> None:
    """Never the whole prompt, and with the answer never less than without it."""
    before = answer(prompt_ids=tuple(prompt), token_ids=tuple(said))
    left = reusable([before], following)
    assert 0 <= left.without_answer <= left.with_answer < len(following)
