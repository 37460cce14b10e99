"""Choosing sizes: everything on a fast machine, lighter and shorter on a slow one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache_tools.demo.script import NUM_TAKES
from turncache_tools.demo.sizes import (
    BLOCK_SIZE,
    FLOOD_IN_FLIGHT,
    FLOOD_TOKENS,
    FULL,
    PAIR_ALONE,
    QUICK,
    WHOLE,
    Sizes,
    Speed,
    arm_s,
    can_be_lighter,
    candidates,
    choose,
    demo_s,
    fitted_speed,
    guess_speed,
    lighter,
    takes_s,
)

ALL_SIZES = [*candidates(FULL), *candidates(QUICK)]


def speed(factor: float) -> Speed:
    """Return a speed; 1 is a core that prefills a short prompt at 800 tokens/s."""
    return Speed(token_s=0.00125 * factor, attention_s=4e-7 * factor, decode_s=0.025 * factor)


def chosen(factor: float, limit_s: float = 540.0) -> Sizes:
    """Return what is chosen on two such cores."""
    return choose(FULL, speed(factor), num_cores=2, num_runs=1, start_s=35.0, limit_s=limit_s)


def test_a_fast_machine_runs_everything() -> None:
    """Nothing is cut where the time is enough."""
    assert chosen(0.4) == FULL


def test_slower_machines_get_less_and_never_more() -> None:
    """First the others' traffic gets lighter, then the texts shorter."""
    found = [chosen(factor) for factor in (0.4, 0.8, 1, 1.3, 1.6, 2, 3, 4, 8)]
    scales = [sizes.scale for sizes in found]
    assert scales == sorted(scales, reverse=True)
    whole = [(sizes.short_wait, sizes.lost_share) for sizes in found if sizes.scale == 1]
    assert whole == sorted(whole, reverse=True)
    assert len(set(whole)) > 2
    assert found[-1] == list(candidates(FULL))[-1]
    assert all(sizes.lost_share <= 0.7 for sizes in found if sizes.scale < 1)


@given(factor=st.floats(0.1, 10), limit_s=st.floats(100, 5000))
def test_what_is_chosen_fits_or_is_the_smallest(factor: float, limit_s: float) -> None:
    """The estimate of the chosen sizes keeps the limit."""
    sizes = chosen(factor, limit_s)
    needed_s = demo_s(sizes, speed(factor), num_cores=2, num_runs=1, start_s=35.0)
    assert needed_s <= limit_s or sizes == list(candidates(FULL))[-1]


@pytest.mark.parametrize("sizes", ALL_SIZES)
def test_a_pool_holds_a_session_and_the_others_in_flight(sizes: Sizes) -> None:
    """Otherwise retention would have to give way to every request of somebody else."""
    longest = sizes.last_prompt_tokens + sizes.answer_tokens
    assert sizes.max_model_len >= longest
    assert sizes.max_model_len % BLOCK_SIZE == 0
    room = sizes.pool_tokens - longest
    assert room >= FLOOD_IN_FLIGHT * FLOOD_TOKENS


@pytest.mark.parametrize("sizes", ALL_SIZES)
def test_the_others_push_most_of_the_session_out_at_the_end(sizes: Sizes) -> None:
    """Least recently used first: older blocks go before the session's tail."""
    brought = sizes.flood_waits[-1] * FLOOD_TOKENS
    lost = brought - (sizes.pool_tokens - sizes.last_prompt_tokens)
    least = 0.55 if sizes.last_prompt_tokens > 3000 else 0.7
    assert lost >= least * sizes.last_prompt_tokens


def test_an_arm_that_reuses_takes_less() -> None:
    """The estimate knows what the demo shows."""
    assert arm_s(FULL, speed(1), reuses=True) < arm_s(FULL, speed(1), reuses=False)


def test_further_takes_of_the_last_call_take_time() -> None:
    """Those of the whole demo are in its estimate, and make its traffic lighter."""
    s = speed(1)
    again_s = takes_s(FULL, s)
    assert again_s > (NUM_TAKES - 1) * 2 * FULL.flood_waits[-1] * s.prefill_s(0, FLOOD_TOKENS)
    once = replace(WHOLE, num_repeated=0)
    whole_s, once_s = (
        demo_s(FULL, s, num_cores=1, num_runs=1, start_s=0.0, arms=arms) for arms in (WHOLE, once)
    )
    assert whole_s - once_s == pytest.approx(again_s)
    limit_s = sum(arm_s(FULL, s, reuses=reuses) for reuses in (False, True))
    assert lighter(FULL, s, num_off=1, num_on=1, limit_s=limit_s) == FULL
    repeated = lighter(FULL, s, num_off=1, num_on=1, limit_s=limit_s, num_repeated=1)
    assert repeated.short_wait < FULL.short_wait


def test_a_prefill_costs_the_same_in_one_piece_or_two() -> None:
    """Attention is counted over what lies before."""
    s = speed(1)
    assert s.prefill_s(0, 1000) + s.prefill_s(1000, 3000) == pytest.approx(s.prefill_s(0, 3000))


def test_two_timings_give_the_speed_back() -> None:
    """What was timed is what is predicted."""
    s = speed(1.7)
    timings = [(n, s.prefill_s(0, n)) for n in (300, 1100)]
    fitted = fitted_speed(timings[0], timings[1], decode_s=0.03)
    assert fitted.prefill_s(0, 3000) == pytest.approx(s.prefill_s(0, 3000))


@given(short_s=st.floats(0.01, 10), long_s=st.floats(0.01, 10))
def test_noise_never_makes_a_cost_negative(short_s: float, long_s: float) -> None:
    """A longer prompt may seem quicker on a busy machine."""
    fitted = fitted_speed((300, short_s), (1100, long_s), decode_s=0.03)
    assert fitted.token_s >= 0
    assert fitted.attention_s >= 0


def test_the_guess_follows_the_machine() -> None:
    """Twice the products and twice the memory speed are half of every cost."""
    slow = guess_speed(gflop_per_s=60, gb_per_s=8)
    fast = guess_speed(gflop_per_s=120, gb_per_s=16)
    assert fast.prefill_s(0, 500) == pytest.approx(slow.prefill_s(0, 500) / 2)
    assert fast.decode_s == pytest.approx(slow.decode_s / 2)


def test_traffic_gets_lighter_when_the_engine_is_slower_than_guessed() -> None:
    """Lengths stay: the pools are made already."""
    heavy = lighter(FULL, speed(0.5), num_off=1, num_on=1, limit_s=1000)
    light = lighter(FULL, speed(4), num_off=1, num_on=1, limit_s=100)
    assert heavy == FULL
    assert (light.short_wait, light.lost_share) == (pytest.approx(1 / 6), 0.55)
    assert can_be_lighter(heavy)
    assert not can_be_lighter(light)
    assert light.num_blocks == FULL.num_blocks


def test_traffic_never_gets_heavier_than_chosen() -> None:
    """What was chosen before stays the most."""
    small = list(candidates(FULL))[-1]
    assert not can_be_lighter(small)
    assert lighter(small, speed(0.1), num_off=1, num_on=1, limit_s=9999) == small


def test_short_waits_give_way_before_long_ones() -> None:
    """What the agent loses, it loses in the long waits: they keep their traffic longest."""
    found = list(candidates(FULL))
    whole = [sizes for sizes in found if sizes.scale == 1]
    assert [sizes.lost_share for sizes in whole[:3]] == [1.0] * 3
    longest = [max(sizes.flood_waits) for sizes in whole]
    shortest = [min(sizes.flood_waits) for sizes in whole]
    assert shortest[0] == longest[0] == longest[2]
    assert shortest[0] > shortest[1] > shortest[2] >= 1


def test_the_quick_demo_takes_less() -> None:
    """One pair, and three arms of five."""
    all_s = demo_s(QUICK, speed(1), num_cores=2, num_runs=1, start_s=150.0)
    pair_s = demo_s(QUICK, speed(1), num_cores=2, num_runs=1, start_s=50.0, arms=PAIR_ALONE)
    assert pair_s < all_s - 100
