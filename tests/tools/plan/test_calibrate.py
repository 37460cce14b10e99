"""Calibration: fits that find known costs, measurements on a fake stack, and refusals."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.bench_stack import FakeStack
from tests.tools.conftest import Ran
from turncache.protocol import CallTags, Outcome, Plan, Reason
from turncache_server.cost_profile import (
    CALIBRATED,
    CostProfile,
    dump_profile,
    parse_profile,
)
from turncache_tools.bench.client import Asked
from turncache_tools.bench.stream import Streamed
from turncache_tools.bench.texts import Tokens
from turncache_tools.calibrate.command import _check
from turncache_tools.calibrate.fit import (
    CACHED,
    COLD,
    RETURNED,
    Facts,
    Sample,
    fit_profile,
    least_squares,
    median_error,
)
from turncache_tools.calibrate.measure import Measured, Measurement, NothingReturned
from turncache_tools.plan.priors import prior

Run = Callable[..., Ran]
TRUE = prior("qwen3-8b")
FACTS = Facts(model="m", about="here", pair=True, decode_token_s=TRUE.decode_token_s)


@dataclass
class Simulated:
    """A quiet pair whose times follow from a profile; words are tokens.

    Attributes:
        wrong: factor of the time of each call, by its number.
        returning: decode gives prefill what it lacks.
    """

    profile: CostProfile = TRUE
    wrong: Callable[[int], float] = lambda _: 1.0
    returning: bool = True
    prefill: set[str] = field(default_factory=set)
    decode: dict[str, int] = field(default_factory=dict)
    resets: int = 0
    asked: int = 0

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], tags: CallTags, answer: int
    ) -> Asked:
        self.asked += 1
        prompt = sum(len(str(each["content"]).split()) for each in messages)
        cached = sum(len(str(each["content"]).split()) for each in messages[:2])
        name = tags.session_id
        local = cached if name in self.prefill and tags.call == 2 else 0
        held = self.decode.get(name, 0)
        returned = 0
        if self.returning and held - local >= 64:
            returned = held - local
        self.prefill.add(name)
        self.decode[name] = prompt + answer
        computed = prompt - local - returned
        seconds = self.profile.host_work_s(prompt)
        seconds += self.profile.compute_s(local + returned, computed)
        seconds += self.profile.pull_s(returned) if returned else 0.0
        seconds += self.profile.pull_s(prompt - held) + self.profile.decode_token_s
        outcome = Outcome(
            prompt=prompt,
            local=local,
            returned=returned,
            computed=computed,
            plan=Plan.RETURN if returned else Plan.COLD,
            reason=Reason.OK if returned else Reason.SOURCE_GONE,
        )
        streamed = Streamed(
            first_s=seconds * self.wrong(self.asked),
            content_s=None,
            total_s=seconds,
            between_s=self.profile.decode_token_s,
            longest_gap_s=None,
            text=" ".join(["said"] * answer),
            prompt=prompt,
            answer=answer,
        )
        return Asked(streamed=streamed, outcome=outcome, ours=True)

    async def empty(self) -> None:
        self.resets += 1
        self.prefill.clear()

    def measured(self, *, reset: bool, repeats: int = 2, most_s: float = 60.0) -> Measured:
        """Measure this stack."""

        async def at_once(_: float) -> None:
            return None

        measurement = Measurement(
            ask=self.ask,
            empty=self.empty if reset else None,
            tokens=Tokens(),
            nonce="n",
            pair=True,
            repeats=repeats,
            most_s=most_s,
            say=lambda _: None,
            sleep=at_once,
        )
        return asyncio.run(measurement.run([256, 512, 1024, 2048, 4096]))


@pytest.mark.parametrize("reset", [True, False], ids=["reset", "long answers"])
def test_known_costs_are_found(reset: bool) -> None:
    """Every cost of a stack that follows the model is what the stack was made of."""
    stack = Simulated()
    measured = stack.measured(reset=reset)
    assert {sample.kind for sample in measured.samples} == {COLD, CACHED, RETURNED}
    assert (stack.resets > 0) is reset
    found = fit_profile(measured.samples, FACTS)
    assert median_error(found) < 1e-6
    for name in ("host_token_s", "prefill_token_s", "prefill_pair_s", "pull_token_s"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-3), name
    assert found.host_s == pytest.approx(TRUE.host_s, rel=1e-3)
    assert found.pull_latency_s == pytest.approx(TRUE.pull_latency_s, rel=1e-2)
    assert found.source == CALIBRATED
    assert parse_profile(dump_profile(found), name="p") == found


def test_one_slow_repetition_changes_little() -> None:
    """Medians of three count, and how far repetitions lie apart is said."""
    stack = Simulated(wrong=lambda number: 3.0 if number % 11 == 0 else 1.0)
    found = fit_profile(stack.measured(reset=True, repeats=3).samples, FACTS)
    assert median_error(found) < 0.02
    assert max(point.spread for point in found.points) > 1


def test_a_slow_machine_is_measured_with_few_lengths() -> None:
    """Patience ends it, but not before costs can be told apart."""
    measured = Simulated().measured(reset=True, most_s=0.0)
    assert measured.skipped == (2048, 4096)
    assert {sample.size for sample in measured.samples} == {256, 512, 1024}


def test_a_noisy_machine_is_refused() -> None:
    """Times that follow from nothing give no profile."""
    stack = Simulated(wrong=lambda number: 1 + (number * 7919 % 13) / 2)
    found = fit_profile(stack.measured(reset=True).samples, FACTS)
    with pytest.raises(Exception, match="too noisy for a profile, none is written"):
        _check(found, shown=True)


def test_a_pair_without_returns_is_refused_early() -> None:
    """After the warm-up, with the reasons that the stack gave."""
    stack = Simulated(returning=False)
    with pytest.raises(NothingReturned, match="source_gone 1"):
        stack.measured(reset=True)
    assert stack.asked < 10


def test_fitted_times_are_what_the_planner_adds_up() -> None:
    """Where returns are dearer than hand-overs, what is fitted is still what is simulated."""
    samples = []
    for size in (256, 512, 1024, 1536):
        later = size + 32 + 96
        for kind, prompt, local, returned, handed, extra_s in (
            (COLD, size, 0, 0, size, 0.0),
            (CACHED, later, size, 0, 96, 0.0),
            (RETURNED, later, 0, size, 96, 0.4),
        ):
            computed = prompt - local - returned
            samples.append(
                Sample(
                    kind=kind,
                    size=size,
                    prompt=prompt,
                    local=local,
                    returned=returned,
                    handed=handed,
                    ttft_s=0.05 + 0.09 + 4e-3 * computed + extra_s,
                )
            )
    facts = replace(FACTS, decode_token_s=0.09)
    found = fit_profile(samples, facts)
    for sample, point in zip(samples, found.points, strict=True):
        start = sample.local + sample.returned
        seconds = found.host_work_s(sample.prompt) + found.compute_s(start, sample.computed)
        seconds += found.pull_s(sample.returned) if sample.returned else 0.0
        seconds += found.pull_s(sample.handed) + found.decode_token_s
        assert point.fitted_ms == pytest.approx(1e3 * seconds, rel=1e-4)


@given(
    st.lists(st.floats(0.001, 10), min_size=3, max_size=3),
    st.lists(
        st.tuples(*(st.floats(0.1, 100) for _ in range(3))), min_size=5, max_size=12, unique=True
    ),
)
@settings(max_examples=40, deadline=None)
def test_fits_are_never_negative_and_no_worse_than_the_truth(
    costs: list[float], rows: list[tuple[float, ...]]
) -> None:
    """What was made of costs is fitted as well as by these costs."""
    seconds = [sum(x * y for x, y in zip(row, costs, strict=True)) for row in rows]
    found = least_squares(rows, seconds)
    assert min(found) >= 0
    for row, time_s in zip(rows, seconds, strict=True):
        fitted = sum(x * y for x, y in zip(row, found, strict=True))
        assert fitted == pytest.approx(time_s, rel=0.05)


def test_a_cost_that_would_be_negative_is_none() -> None:
    """Falling times have no cost per token."""
    rows = [(1.0, 100.0), (1.0, 200.0), (1.0, 400.0)]
    found = least_squares(rows, [2.0, 1.5, 1.0])
    assert found[1] == 0
    assert 1 < found[0] < 2


def test_one_engine_has_no_cost_of_pulls() -> None:
    """Without returns the profile says nothing of them."""
    samples = [
        Sample(kind=COLD, size=n, prompt=n, local=0, returned=0, handed=n, ttft_s=0.1 + n / 1000)
        for n in (100, 200, 400)
    ]
    found = fit_profile(samples, replace(FACTS, pair=False))
    assert not found.pulls
    assert parse_profile(dump_profile(found), name="p") == found


@dataclass(frozen=True)
class Refused:
    """What is asked of which stack, and what is answered."""

    says: str
    code: int
    arguments: tuple[str, ...] = ()
    stack: Mapping[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    "case",
    [
        Refused("decode returned nothing to prefill", 1, stack={"returns_work": False}),
        Refused("carry no Turncache-Outcome", 1, stack={"ours": False}),
        Refused("did not empty its prefix cache", 4, ("--reset", "URL"), {"reset": (404, {})}),
        Refused("expected at least 3", 2, ("--lengths", "256,512")),
        Refused("'many' is no length", 2, ("--lengths", "256,many,512")),
        Refused("--repeats 0", 2, ("--repeats", "0")),
        Refused("there is no folder", 2, ("--out", "/no/such/p.toml")),
        Refused("--url 'ftp://x'", 2, ("--url", "ftp://x")),
    ],
    ids=lambda case: case.says,
)
def test_what_cannot_be_calibrated_is_refused(
    turncache: Run, tmp_path: Path, case: Refused
) -> None:
    """The code says who must act, and no profile is written."""
    out = tmp_path / "p.toml"
    with FakeStack(**case.stack) as fake:
        more = [fake.url if each == "URL" else each for each in case.arguments]
        places = ["--url", fake.url] if "--url" not in case.arguments else []
        ran = turncache("calibrate", *places, "--out", str(out), *more)
    assert (ran.code, ran.out) == (case.code, "")
    assert case.says in ran.err
    assert not out.exists()
