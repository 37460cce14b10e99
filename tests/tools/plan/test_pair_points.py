"""What a real pair is compared with: the same calls, simulated; and what aiperf's records say."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.perf.bench_aiperf import found_in
from tests.perf.bench_plan_pair import ARMS, figures_of, points
from turncache_server.cost_profile import ProfilePoint
from turncache_tools.bench.results import BlockResult, CallResult
from turncache_tools.bench.workload import is_miss
from turncache_tools.plan.priors import prior

POINT = ProfilePoint(
    kind="cold",
    prompt_tokens=1,
    returned_tokens=0,
    computed_tokens=1,
    measured_ms=1.0,
    fitted_ms=1.0,
    spread=0.0,
)
#: Transfers cost little, so that a return of one block pays.
COSTS = replace(
    prior("qwen3-8b"),
    pool_tokens=40_000,
    decode_pool_tokens=40_000,
    pull_latency_s=1e-4,
    points=(POINT,),
)
CALLS, ANSWER, BLOCK = 6, 40, COSTS.block_tokens


def measured(arm: str, round_: int, *, slower: float = 1.0) -> BlockResult:
    """Return a block as a pair with these costs would show it, worked out by hand."""
    calls = []
    for number in range(1, CALLS + 1):
        prompt = 300 + (number - 1) * (200 + ANSWER)
        local = returned = 0
        if number > 1 and not is_miss(0.5, 3, "a1", number):
            local = (prompt - 200 - ANSWER) // BLOCK * BLOCK
        there = 0 if number == 1 else (prompt - 200 - 1) // BLOCK * BLOCK
        # What an answer adds to a prompt that prefill has is too little to be returned.
        if arm == "both" and there - local >= 64:
            returned = there - local
        start = local + returned
        seconds = COSTS.host_work_s(prompt) + COSTS.compute_s(start, prompt - start)
        seconds += COSTS.pull_s(returned) if returned else 0.0
        seconds += COSTS.pull_s(prompt - there) + COSTS.decode_token_s
        calls.append(
            CallResult(
                agent="a1",
                call=number,
                ttft_ms=1e3 * seconds * slower,
                prompt=prompt,
                answer=ANSWER,
                local=local,
                returned=returned,
                computed=prompt - start,
            )
        )
    return BlockResult(number=0, arm=arm, round=round_, seconds=1.0, calls=tuple(calls))


def test_a_pair_that_follows_the_model_is_met() -> None:
    """Calls, misses and returns of every arm are the simulator's, to the token."""
    blocks = [measured(arm, round_) for arm in ARMS for round_ in (1, 2)]
    found = list(points(COSTS, blocks))
    assert [(each.arm, each.call) for each in found] == [
        (arm, call) for arm in ARMS for call in range(1, CALLS + 1)
    ]
    assert all(each.reused == each.simulated_reused for each in found)
    assert max(abs(each.error) for each in found) < 0.01
    assert all(each.ok for each in figures_of(found, COSTS))


def test_a_pair_that_does_not_is_not() -> None:
    """A pair that takes twice as long misses the limit, and which arm it was is told."""
    blocks = [measured(arm, 1, slower=2.0) for arm in ARMS]
    figures = {each.figure: each for each in figures_of(list(points(COSTS, blocks)), COSTS)}
    assert not figures["ttft_error_median_all"].ok
    assert figures["ttft_error_median_both"].value == pytest.approx(0.5, abs=0.01)


def test_aiperfs_records_are_counted() -> None:
    """Failed calls are no times, first turns no later ones, and every id is a session."""

    def record(session: str, turn: int, ms: float | None) -> str:
        metrics = {} if ms is None else {"time_to_first_token": {"value": ms, "unit": "ms"}}
        about = {"x_correlation_id": session, "turn_index": turn}
        return json.dumps({"metadata": about, "metrics": metrics})

    lines = [record("a", 0, 9.0), record("a", 1, 1.0), record("b", 5, 2.0), record("b", 3, None)]
    counted = {"calls": 3.0, "computed_tokens": 5.0, "reason ok": 2.0, "reason evicted": 0.0}
    found = found_in("\n".join(lines), arm="off", command=["/x/aiperf", "-m"], counted=counted)
    assert (found.later_ms, found.last_ms) == ([1.0, 2.0], [2.0])
    assert (found.calls, found.failed, found.sessions, found.router_calls) == (3, 1, 2, 3)
    assert found.tokens == {"local_tokens": 0.0, "external_tokens": 0.0, "computed_tokens": 5.0}
    assert found.reasons == {"ok": 2.0}
    assert found.command == "aiperf -m"
