"""Costs of computing and pulling: what is fitted, what is preferred, how long is waited."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache_server.connector.costs import LEAST_STEP_TOKENS, Fit, PullCosts, prefill_work
from turncache_server.cost_profile import CALIBRATED, CostProfile

TOKEN_S, PAIR_S = 1e-3, 2e-7
LATENCY_S, PULL_TOKEN_S = 0.02, 1e-5


def measured(*, slower: float = 1.0, may_compute: bool = True) -> PullCosts:
    """Return costs of a machine that prefills 1,000 tokens/s, with pulls ``slower`` than usual."""
    costs = PullCosts(may_compute=may_compute)
    for start, tokens in ((0, 512), (512, 512), (4096, 300), (0, 100), (9000, 700)):
        pairs = tokens * (start + tokens / 2)
        costs.computed(tokens, pairs, TOKEN_S * tokens + PAIR_S * pairs)
    costs.pulled("a", 1000, 99.0)
    for tokens in (500, 1000, 4000, 250):
        costs.pulled("a", tokens, slower * (LATENCY_S + PULL_TOKEN_S * tokens))
    return costs


def test_what_was_measured_is_what_is_predicted() -> None:
    """Attention included: the same tokens cost more behind a long history."""
    costs = measured()
    assert costs.compute_s(0, 1000) == pytest.approx(TOKEN_S * 1000 + PAIR_S * 1000 * 500)
    assert costs.compute_s(50_000, 1000) == pytest.approx(TOKEN_S * 1000 + PAIR_S * 1000 * 50_500)
    assert costs.pull_s(2000) == pytest.approx(LATENCY_S + PULL_TOKEN_S * 2000)


def test_the_first_pull_from_a_start_of_a_peer_does_not_count() -> None:
    """It makes connections; a peer that has restarted has another first one."""
    costs = measured()
    before = costs.pull_s(1000)
    costs.pulled("b", 1000, 50.0)
    assert costs.pull_s(1000) == before
    costs.pulled("b", 1000, 50.0)
    after = costs.pull_s(1000)
    assert before is not None
    assert after is not None
    assert after > before


def test_a_profile_stands_for_measurements_that_were_not_made_yet() -> None:
    """Its costs decide at once; what the engine measures replaces them."""
    profile = CostProfile(
        name="m",
        model="m",
        source=CALIBRATED,
        about="",
        host_s=0.1,
        host_token_s=0.0,
        prefill_token_s=TOKEN_S,
        prefill_pair_s=PAIR_S,
        pull_latency_s=LATENCY_S,
        pull_token_s=PULL_TOKEN_S,
        decode_token_s=0.01,
    )
    costs = PullCosts()
    costs.seed(profile)
    assert costs.compute_s(9000, 700) == pytest.approx(profile.compute_s(9000, 700))
    assert costs.pull_s(5000) == pytest.approx(profile.pull_s(5000))
    assert costs.is_dearer(0, 15)
    for _ in range(200):
        costs.computed(1024, 1024 * 512, 0.01)
    assert costs.compute_s(0, 1024) == pytest.approx(0.01, rel=0.1)


def test_nothing_is_predicted_before_enough_was_measured() -> None:
    """Until then everything is pulled, with a deadline that no transport needs."""
    costs = PullCosts()
    assert costs.compute_s(0, 1000) is None
    assert costs.pull_s(1000) is None
    assert not costs.is_dearer(0, 10)
    assert costs.deadline_s(0, 4000) == pytest.approx(5.0)


def test_a_pull_that_takes_longer_than_computing_is_dearer() -> None:
    """Short pieces are computed, long ones pulled; the border is where both take as long."""
    costs = measured(slower=20)
    assert costs.is_dearer(0, 200)
    assert not costs.is_dearer(0, 2000)


def test_now_and_then_a_dearer_pull_is_made_to_measure_again() -> None:
    """A peer that was slow once must not be shunned for ever."""
    costs = measured(slower=1000)
    refused = [costs.is_dearer(0, 200) for _ in range(32)]
    assert refused.count(False) == 2


def test_a_decode_engine_never_prefers_to_compute() -> None:
    """A prompt computed there holds up every stream."""
    assert not measured(slower=1000, may_compute=False).is_dearer(0, 200)


def test_the_deadline_is_a_tenth_of_computing() -> None:
    """Of a long prompt; a short one gets what pulls need, and never longer than computing."""
    costs = measured()
    compute_s = costs.compute_s(0, 20_000)
    assert compute_s is not None
    assert costs.deadline_s(0, 20_000) == pytest.approx(compute_s / 10)
    assert costs.deadline_s(0, 100) == 0.25
    slow = measured(slower=20)
    compute_s, pull_s = slow.compute_s(0, 2000), slow.pull_s(2000)
    assert compute_s is not None
    assert pull_s is not None
    assert slow.deadline_s(0, 2000) == pytest.approx(min(4 * pull_s, compute_s))


@given(
    st.lists(
        st.tuples(st.floats(0, 1e6), st.floats(0, 1e12), st.floats(0, 1e4)), min_size=1, max_size=30
    )
)
def test_no_cost_is_ever_negative(measurements: list[tuple[float, float, float]]) -> None:
    """Whatever a busy machine measures."""
    fit = Fit()
    for x, y, seconds in measurements:
        fit.add(x, y, seconds)
    a, b = fit.costs
    assert a >= 0
    assert b >= 0
    assert a == a  # noqa: PLR0124 - not a NaN
    assert b == b  # noqa: PLR0124


@given(start=st.integers(0, 200_000), tokens=st.integers(1, 200_000), slower=st.floats(0.01, 1e3))
def test_a_deadline_is_never_longer_than_computing_and_never_at_once(
    start: int, tokens: int, slower: float
) -> None:
    """Waiting for longer than computing takes is senseless."""
    costs = measured(slower=slower)
    compute_s = costs.compute_s(start, tokens)
    assert compute_s is not None
    assert 0.25 <= costs.deadline_s(start, tokens) <= max(0.25, compute_s * 1.000001)


def step(new: dict[str, tuple[int, int]], cached: dict[str, tuple[int, int]]) -> Any:
    """Return a scheduler output: (tokens computed before, tokens scheduled) by request."""
    counts = {name: count for name, (_, count) in {**new, **cached}.items()}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=start)
            for name, (start, _) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached), num_computed_tokens=[start for start, _ in cached.values()]
        ),
    )


def test_a_step_is_measured_by_its_prefill() -> None:
    """Decoding requests beside it add a token each, and are not counted."""
    many = {f"d{n}": (500, 1) for n in range(50)}
    assert prefill_work(step({}, many)) == (0, 0.0)
    work = prefill_work(step({"p": (1000, 256)}, {**many, "q": (100, 100)}))
    assert work == (356, 256 * (1000 + 128) + 100 * (100 + 50))
    assert prefill_work(step({"p": (0, LEAST_STEP_TOKENS)}, {})) == (0, 0.0)
