"""The simulator: token accounting, one small case by hand, published points, determinism."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.perf.bench_plan import published_points
from turncache.errors import UsageError
from turncache_server.cost_profile import PRIOR, CostProfile
from turncache_server.router.config import parse_config
from turncache_tools.bench.workload import (
    AgentSpec,
    CallSpec,
    Parameters,
    Workload,
    parametric,
)
from turncache_tools.plan.load import AdmissionRules, Load, PlanArm, arms_for, rig_for
from turncache_tools.plan.pools import DEFAULTS
from turncache_tools.plan.priors import PRIORS, prior
from turncache_tools.plan.served import Served, SimResult
from turncache_tools.plan.simulator import simulate

#: Round numbers, so that a person can follow.
ROUND = CostProfile(
    name="round",
    model="round",
    source=PRIOR,
    about="made up",
    host_s=0.1,
    host_token_s=0.0001,
    prefill_token_s=0.001,
    prefill_pair_s=0.0,
    pull_latency_s=0.01,
    pull_token_s=0.00001,
    load_latency_s=0.02,
    load_token_s=0.00002,
    decode_token_s=0.02,
    kv_token_bytes=1000,
)
PAIR_ARMS = {"off": {}, "return": {"returning": True}, "retention": {"retaining": True}}


def arm(name: str = "off", **change: object) -> PlanArm:
    """Return an arm."""
    return PlanArm(name=name, what="", **change)  # type: ignore[arg-type]


def agent(*calls: CallSpec, name: str = "a", starts_s: float = 0.0) -> AgentSpec:
    """Return an agent of these calls."""
    return AgentSpec(name=name, calls=calls, starts_s=starts_s)


def run(
    workload: Workload,
    chosen: PlanArm,
    *,
    pool: int = 100_000,
    decode_pool: int | None = None,
    profile: CostProfile = ROUND,
    unit: int = 16,
    **load: object,
) -> SimResult:
    """Simulate one arm."""
    rig = rig_for(profile, workload, pool=pool, decode_pool=decode_pool, unit=unit)
    return simulate(Load(workload=workload, **load), rig, chosen)  # type: ignore[arg-type]


def parts(each: Served) -> tuple[int, int, int]:
    """Return what of a prompt came from where."""
    return each.local, each.returned, each.computed


TWO_CALLS = Workload(
    name="two",
    shared=160,
    agents=(agent(CallSpec(new=800, answer=16), CallSpec(new=144, answer=1, wait_s=5.0)),),
)


def test_small_case_by_hand_on_one_engine() -> None:
    """Host work, computing and decoding of two calls, and what the second one finds."""
    first, second = run(TWO_CALLS, arm()).served
    # 960 tokens: 0.1 + 0.096 host, 0.96 computing.
    assert first.ttft_s == pytest.approx(1.156)
    assert parts(first) == (0, 0, 960)
    # Answered 15 tokens later; all but the last token have KV: 60 whole blocks, not 61.
    assert second.arrived_s == pytest.approx(1.156 + 15 * 0.02 + 5)
    assert parts(second) == (960, 0, 160)
    assert second.prompt == 1120
    assert second.ttft_s == pytest.approx(0.1 + 0.112 + 0.160)


LONG_ANSWER = Workload(
    name="long answer",
    shared=160,
    agents=(agent(CallSpec(new=800, answer=321), CallSpec(new=159, answer=1)),),
)


@pytest.mark.parametrize(
    ("name", "found", "seconds"),
    [
        # Decode lacks all but 1280 tokens of 1440: 0.01 + 0.0016, and one step of 0.02.
        ("off", (960, 0, 480), 0.1 + 0.144 + 0.480 + 0.0316),
        ("return", (960, 320, 160), 0.1 + 0.144 + 0.0132 + 0.160 + 0.0316),
    ],
)
def test_small_case_by_hand_on_a_pair(
    name: str, found: tuple[int, int, int], seconds: float
) -> None:
    """Prefill lacks the answer, and computes or pulls it; decode takes what it lacks."""
    _, second = run(LONG_ANSWER, arm(**PAIR_ARMS[name]), decode_pool=100_000).served
    assert parts(second) == found
    assert second.ttft_s == pytest.approx(seconds)


def test_coarse_units_do_not_give_prefill_an_answer() -> None:
    """An answer that is shorter than a unit is decode's alone; lengths are exact all the same."""
    calls = CallSpec(new=960, answer=40), CallSpec(new=160, answer=1)
    work = Workload(name="coarse", shared=0, agents=(agent(*calls),))
    _, second = run(work, arm(), decode_pool=100_000, unit=160).served
    assert parts(second) == (960, 0, 200)
    _, alone = run(work, arm(), unit=160).served
    assert parts(alone) == (992, 0, 168)


def test_what_is_missed_is_returned_or_computed() -> None:
    """With prefill's cache empty everything comes from decode, or is computed again."""
    for name, expected in (("off", (0, 0, 1440)), ("return", (0, 1280, 160))):
        chosen = arm(**PAIR_ARMS[name])
        _, second = run(LONG_ANSWER, chosen, decode_pool=100_000, miss_rate=1.0).served
        assert parts(second) == expected
        assert second.again == (1280 if name == "off" else 0)


def test_a_named_threshold_decides_alone() -> None:
    """Fewer tokens than that are computed, though pulling would be cheaper."""
    named = replace(DEFAULTS, recompute_threshold=321)
    for settings_, returned in ((DEFAULTS, 320), (named, 0)):
        chosen = arm(returning=True, settings=settings_)
        _, second = run(LONG_ANSWER, chosen, decode_pool=100_000).served
        assert second.returned == returned


def test_prefill_serves_in_the_order_of_arrival() -> None:
    """Of two calls at once the second waits for the first."""
    work = Workload(
        name="queue",
        shared=0,
        agents=(
            agent(CallSpec(new=1000, answer=1)),
            agent(CallSpec(new=1000, answer=1), name="b"),
        ),
    )
    one, two = run(work, arm()).served
    assert (one.queued_s, two.queued_s) == (0.0, pytest.approx(1.0))
    assert two.ttft_s == pytest.approx(one.ttft_s + 1.0)


def test_a_host_tier_gives_back_what_the_pool_lost() -> None:
    """The other agent's prompt pushes all but a block of the first one's out; the tier has it."""
    calls = CallSpec(new=1600, answer=1), CallSpec(new=160, answer=1, wait_s=50.0)
    other = agent(CallSpec(new=3183, answer=1), name="b", starts_s=10.0)
    work = Workload(name="tier", shared=0, agents=(agent(*calls), other))
    without = run(work, arm(), pool=3200).served[-1]
    assert (without.loaded, without.local, without.again) == (0, 16, 1584)
    tiered = run(work, arm(host_gb=0.01), pool=3200).served[-1]
    assert (tiered.loaded, tiered.local, tiered.again) == (1584, 1600, 0)
    assert tiered.ttft_s == pytest.approx(without.ttft_s - 1.584 + 0.02 + 0.03168)


def test_retention_keeps_a_session_that_others_push_out() -> None:
    """Ordinary calls fill the pool during a wait: LRU gives the session up, retention does not."""
    calls = CallSpec(new=1600, answer=1), CallSpec(new=160, answer=1, wait_s=60.0)
    work = Workload(name="pushed", shared=0, agents=(agent(*calls),))
    again = {}
    for retaining in (False, True):
        result = run(
            work,
            arm(retaining=retaining),
            pool=6400,
            others_per_s=0.5,
            others_tokens=800,
        )
        again[retaining] = result.served[-1].again
        assert result.num_others > 10
    assert again == {False: 1600, True: 0}


def test_subagents_run_in_the_wait_of_their_parent() -> None:
    """The parent's next call comes after they have ended, and its own wait."""
    child = agent(CallSpec(new=500, answer=1), name="child")
    spawning = CallSpec(new=100, answer=1, wait_s=2.0, spawned=(child,))
    work = Workload(name="spawn", shared=0, agents=(agent(CallSpec(new=500, answer=1), spawning),))
    first, inner, second = run(work, arm()).served
    assert inner.session == "a#0/child"
    assert inner.arrived_s == pytest.approx(first.ttft_s)
    assert second.arrived_s == pytest.approx(inner.arrived_s + inner.ttft_s + 2.0)


_workloads = st.builds(
    Parameters,
    agents=st.integers(1, 4),
    calls=st.integers(1, 6),
    system=st.integers(0, 200),
    tools=st.just(0),
    first=st.integers(1, 900),
    new=st.integers(1, 300),
    new_sigma=st.floats(0, 1),
    answer=st.integers(1, 120),
    wait_s=st.floats(0, 300),
    compact_at=st.sampled_from([0, 1200]),
    compact_to=st.just(90),
    subagent_every=st.sampled_from([0, 2]),
    subagent_calls=st.just(2),
)


@given(st.data(), _workloads, st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_tokens_add_up(data: st.DataObject, numbers: Parameters, seed: int) -> None:
    """In every arm local, returned and computed make the prompt, and every call is answered."""
    pair = data.draw(st.booleans())
    unit = data.draw(st.sampled_from([16, 48, 160]))
    sessions = data.draw(st.sampled_from([None, 1, 3]))
    miss_rate = data.draw(st.sampled_from([0.0, 0.5]))
    which = data.draw(st.integers(0, 5))
    work = parametric(numbers, seed=seed)
    pool = 9_600
    rig = rig_for(ROUND, work, pool=pool, decode_pool=pool if pair else None, unit=unit)
    arms = arms_for(rig, DEFAULTS, (0.002,))
    load = Load(workload=work, sessions=sessions, miss_rate=miss_rate, seed=seed)
    result = simulate(load, rig, arms[which % len(arms)])
    assert len(result.served) == work.num_calls
    for each in result.served:
        assert each.local + each.returned + each.computed == each.prompt
        assert min(parts(each)) >= 0
        assert each.computed >= 1
        assert 0 <= each.loaded <= each.local
        assert 0 <= each.again <= each.seen < each.prompt
        assert each.ttft_s >= ROUND.host_work_s(each.prompt) + each.compute_s + each.queued_s - 1e-9
    assert result.compute_s == pytest.approx(sum(each.compute_s for each in result.served))
    assert 0 < result.peak_used <= 1


@given(_workloads, st.integers(0, 99), st.integers(0, 60), st.integers(0, 60))
@settings(max_examples=25, deadline=None)
def test_a_larger_pool_never_computes_more_of_one_session(
    numbers: Parameters, seed: int, one: int, other: int
) -> None:
    """Under LRU, with one session, more room computes as much or less."""
    alone = replace(numbers, agents=1, subagent_every=0)
    work = parametric(alone, seed=seed)
    small, large = sorted((6_400 + 160 * one, 6_400 + 160 * other))
    computed = [
        sum(each.computed for each in run(work, arm(), pool=pool).served) for pool in (small, large)
    ]
    assert computed[1] <= computed[0]


@given(_workloads, st.integers(0, 99), st.sampled_from([0.0, 5.0, 200.0, 1e6]), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_with_admission_every_call_is_answered_in_time(
    numbers: Parameters, seed: int, wait_s: float, max_waiting: int
) -> None:
    """Nobody waits for longer than is allowed, those that the queue refuses come again."""
    work = parametric(numbers, seed=seed)
    rules = AdmissionRules(wait_s=wait_s, idle_s=20.0, max_waiting=max_waiting)
    result = run(work, arm(retaining=True, admission=rules), pool=6_400, sessions=4)
    assert len(result.served) == work.num_calls
    for each in result.served:
        assert 0 <= each.admitted_s <= each.ttft_s
        if max_waiting == 3:  # as many as may ever wait
            assert each.admitted_s <= wait_s + 1e-6
        if each.call > 1:
            assert not each.admitted_s, "a tool wait ends in a tool loop"
    tops = sum("/" not in name for name in {each.session for each in result.served})
    assert sum(each.ends_turn for each in result.served) == tops


def test_admission_lets_one_session_after_the_other_in() -> None:
    """By hand: the second agent fits when the first has ended, and then finds all of its own."""
    calls = CallSpec(new=1600, answer=1), CallSpec(new=160, answer=1, wait_s=9.0)
    work = Workload(
        name="two", shared=0, agents=(agent(*calls), agent(*calls, name="b", starts_s=5.0))
    )
    again, waited = {}, {}
    for rules in (None, AdmissionRules()):
        result = run(work, arm(admission=rules), pool=2400)
        again[rules] = sum(each.again for each in result.served)
        waited[rules] = max(each.admitted_s for each in result.served)
    assert again[None] > 1600
    assert again[AdmissionRules()] == 0
    first_ends_s = 0.1 + 0.16 + 1.6 + 9.0 + 0.1 + 0.176 + 0.161 + 0.0
    assert waited[None] == 0
    assert waited[AdmissionRules()] == pytest.approx(first_ends_s - 5.0, abs=0.02)


def test_the_planner_has_the_routers_settings() -> None:
    """What is simulated without a word is what a router does without one."""
    engine = {"name": "e", "side": "single", "url": "http://127.0.0.1:1"}
    config = parse_config({"engines": [engine]})
    assert AdmissionRules() == AdmissionRules(
        share=config.admission_share,
        idle_s=config.admission_idle_s,
        wait_s=config.admission_wait_s,
        max_waiting=config.admission_max_waiting,
    )


def test_the_seed_decides_everything() -> None:
    """The same seed gives the same result, another one another."""
    work = parametric(Parameters(agents=6, calls=8, wait_s=30.0, wait_sigma=1.0), seed=1)

    def served(seed: int) -> list[Served]:
        return run(
            work,
            arm(retaining=True, returning=True),
            pool=8_000,
            decode_pool=8_000,
            sessions=4,
            others_per_s=0.2,
            miss_rate=0.3,
            seed=seed,
        ).served

    assert served(5) == served(5)
    assert served(5) != served(6)


def test_published_points_are_met() -> None:
    """Every published number is within its limit; ``make perf-plan`` prints the errors."""
    points = list(published_points())
    assert len(points) > 20
    assert {point.name: f"{point.error:+.1%}" for point in points if not point.ok} == {}


@pytest.mark.parametrize("name", PRIORS)
def test_every_prior_says_where_it_comes_from(name: str) -> None:
    """Priors are labelled, and reckon with everything that a plan needs."""
    profile = prior(name)
    assert profile.source == PRIOR
    assert profile.about
    assert profile.pulls
    assert profile.kv_token_bytes
    assert 0 < profile.compute_s(0, 1000) < profile.compute_s(100_000, 1000) < 60


def test_sparse_attention_costs_no_more_behind_its_reach() -> None:
    """A token attends to at most so many others, however the prompt is cut."""
    profile = replace(ROUND, prefill_pair_s=1e-6, attended_tokens=100)
    assert profile.pairs(0, 100) == 5000
    assert profile.pairs(0, 300) == 5000 + 200 * 100
    assert profile.pairs(0, 60) + profile.pairs(60, 240) == profile.pairs(0, 300)


def test_a_pool_that_cannot_hold_a_call_is_refused() -> None:
    """Before anything is simulated, with the longest call's length."""
    with pytest.raises(UsageError, match="--pool 960: the longest call has 1121 tokens"):
        run(TWO_CALLS, arm(), pool=960)
    with pytest.raises(UsageError, match="has no cost of transfers"):
        run(TWO_CALLS, arm(), decode_pool=9600, profile=replace(ROUND, pull_token_s=None))
