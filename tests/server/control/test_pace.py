"""How much work the control thread may do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache_server.control.pace import Pace


def test_ordinary_questions_never_wait() -> None:
    """A thousand questions of 2 ms, ten a second, are far below the share."""
    pace = Pace(share=0.5, burst_s=1.0)
    assert all(pace.spent(0.002, n * 0.1) == 0 for n in range(1000))


def test_a_burst_is_served_at_once() -> None:
    """Questions that come together wait for nothing but each other."""
    pace = Pace(share=0.5, burst_s=1.0)
    assert sum(pace.spent(0.01, n * 0.01) for n in range(100)) == 0


def test_beyond_the_burst_work_is_followed_by_rest() -> None:
    """At half of a core each second of work is followed by another of rest."""
    pace = Pace(share=0.5, burst_s=0.0)
    assert pace.spent(1.0, 1.0) == pytest.approx(2.0)
    assert pace.spent(0.0, 3.0) == pytest.approx(0.0)


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(0, 2)), max_size=60),
    st.floats(0.05, 1),
    st.floats(0, 2),
)
def test_no_order_of_questions_exceeds_the_share(
    work: list[tuple[float, float]], share: float, burst_s: float
) -> None:
    """Work before any moment is at most the burst, the share of the time, and one question."""
    pace = Pace(share=share, burst_s=burst_s)
    now_s = done_s = 0.0
    for spent_s, idle_s in work:
        assert done_s <= burst_s + share * now_s + 1e-6
        now_s += idle_s + spent_s
        done_s += spent_s
        rest_s = pace.spent(spent_s, now_s)
        assert rest_s >= 0
        now_s += rest_s


def test_a_clock_that_stands_still_is_no_credit() -> None:
    """Time that has not passed pays for nothing."""
    pace = Pace(share=0.5, burst_s=0.0)
    first = pace.spent(0.1, 5.0)
    assert pace.spent(0.1, 5.0) > first
