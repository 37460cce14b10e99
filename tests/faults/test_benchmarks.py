"""How benchmarks of this kind have lied, each as a test of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.bench_stack import STANDARD, FakeStack
from tests.tools.bench.blocks import RETENTION, block, blocks, call, checks, reported
from tests.tools.bench.running import SMALL, bench
from turncache_tools.bench.arms import OFF_AGAIN
from turncache_tools.bench.results import BlockResult
from turncache_tools.bench.stream import Collector


def collected(*deltas: Mapping[str, Any], tokens: int = 3) -> Any:
    """Return the answer of deltas that come a second apart."""
    collector = Collector()
    chunks: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": tokens}})
    for at_s, chunk in enumerate(chunks, 1):
        collector.add(json.dumps(chunk), float(at_s))
    return collector.end(99.0)


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "t", "function": {"name": "f"}}]},
        {"refusal": "no"},
        {"content": "yes"},
    ],
    ids=lambda delta: next(iter(delta)),
)
def test_first_token_is_not_content(delta: dict[str, Any]) -> None:
    """The first delta of any kind ends TTFT, a role does not; text for the user is apart."""
    answer = collected({"role": "assistant", "content": ""}, delta, {"content": "done"})
    assert answer.first_s == 2.0
    assert answer.content_s == (2.0 if "content" in delta else 3.0)


@pytest.mark.parametrize("deltas", [(), ({"role": "assistant"},)], ids=["usage only", "role"])
def test_answer_without_any_token(deltas: tuple[dict[str, Any], ...]) -> None:
    """An answer without a token has no times of tokens, and is none of the wrong ones."""
    answer = collected(*deltas, tokens=0)
    assert (answer.first_s, answer.content_s, answer.between_s) == (None, None, None)
    assert answer.prompt == 9


def test_nothing_measured_counted_as_zero() -> None:
    """Where 3 of 10 calls have no token, quantiles are of the other 7, and 3 are counted."""
    found = [call("a", at, ttft_ms=None if at > 7 else 50.0, on=True) for at in range(1, 11)]
    part = BlockResult(number=2, arm="both", round=1, seconds=1.0, calls=tuple(found))
    arm = reported([blocks()[0], part, blocks()[2]]).arms[1]
    assert arm.no_token == 3
    assert arm.later is not None
    assert (arm.later["p50"], arm.later["count"]) == (50.0, 6)
    assert "success" in {each.check for each in arm.refused}


def test_mixed_delta_counted_twice() -> None:
    """Time between tokens is by the tokens that the server counted, not by deltas or kinds."""
    both = {"reasoning": "hm", "content": "well"}
    answer = collected(both, both, {"content": "a b c"}, tokens=5)
    assert answer.between_s == (3.0 - 1.0) / 4
    assert answer.text == "wellwella b c"


def test_warm_up_in_measured_sessions() -> None:
    """No session and no prompt of the warm-up comes again in a measured block."""
    with FakeStack() as stack:
        bench(stack, *SMALL, "--arms", "both", "--calls", "2")
        warm = [each for each in stack.agents_calls if "warm" in (each.session or "")]
        rest = [each for each in stack.agents_calls if each not in warm and each.session]
        assert warm
        assert rest
        firsts = {each.body["messages"][0]["content"] for each in stack.agents_calls[:4]}
        assert not firsts & {each.body["messages"][0]["content"] for each in rest}


def test_second_arm_on_a_warm_cache(tmp_path: Path) -> None:
    """Arms, and a second run with the same seed, find nothing of an earlier one; else no gain."""
    with FakeStack() as stack:
        for _ in range(2):
            _, made = bench(stack, *SMALL, "--arms", "both", out=tmp_path / "f.json")
            first = [arm["by_call"][0]["tokens"] for arm in made["bench"]["arms"]]
            assert {line["prompt"] for line in first} == {first[0]["prompt"]}
            assert all(line["local"] + line["returned"] <= 40 for line in first)
        stack.warm = 10_000
        longer = (*SMALL, "--first", "200", "--calls", "1", "--arms", "both")
        code, made = bench(stack, *longer, out=tmp_path / "f.json")
        assert code == 1
        assert "first_call_cold" in {r["check"] for r in made["bench"]["arms"][1]["refused"]}
        assert made["bench"]["arms"][1]["gain"] is None


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, {"success": False}), (404, {})],
    ids=["refused with 200", "not there"],
)
def test_cache_reset_refused(
    status: int, answer: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """A cache that was not emptied ends the run, whatever the status says."""
    with FakeStack(reset=(status, answer)) as stack:
        miss = ("--miss-rate", "1", "--miss-by", "reset", "--reset", stack.url)
        code, _ = bench(stack, *SMALL, "--arms", "both", *miss)
        assert code == 4
        assert "did not empty its prefix cache" in capsys.readouterr().err
        assert (stack.mode, stack.returns) == ("on", True)


def test_start_up_in_the_first_calls() -> None:
    """What only first calls pay is in their own line, and in no gain of later ones."""
    found = blocks()
    slow = [
        replace(
            part,
            calls=tuple(
                replace(each, ttft_ms=9000.0) if each.call == 1 else each for each in part.calls
            ),
        )
        for part in found
    ]
    plain, shifted = reported(found).arms[1], reported(slow).arms[1]
    assert shifted.first is not None
    assert shifted.first["p50"] == 9000.0
    assert (shifted.later, shifted.gain) == (plain.later, plain.gain)
    assert shifted.by_call[0].ttft_ms.value == 9000.0


def test_strict_server_refuses_session_members() -> None:
    """A server that refuses what it does not know is measured: sessions are in headers only."""
    with FakeStack(strict=True) as stack:
        bench(stack, *SMALL, "--arms", "both")
        taken = [each for each in stack.agents_calls if each.session]
        assert taken
        assert all(set(each.body) <= STANDARD for each in taken)


@pytest.mark.parametrize(
    ("check", "change"),
    [
        ("equal_prompts", lambda part: replace(part, calls=tuple(_longer(part)))),
        ("equal_load", lambda part: replace(part, others=(1.0, 1.0))),
        ("equal_load", lambda part: replace(part, others=(None,))),
    ],
    ids=["longer prompts", "more other traffic", "other traffic fails"],
)
def test_gain_without_equal_load(check: str, change: Callable[[BlockResult], BlockResult]) -> None:
    """No gain is stated where an arm had longer prompts or other traffic than off."""
    found = [change(part) if part.arm == "both" else part for part in blocks()]
    report = reported(found)
    assert check in checks(report)
    assert report.arms[1].gain is None


def _longer(part: BlockResult) -> list[Any]:
    return [
        replace(each, prompt=each.prompt * 2, computed=each.computed + each.prompt)
        for each in part.calls
        if each.prompt is not None and each.computed is not None
    ]


def test_answers_are_computed_again() -> None:
    """Returns that bring prompts only, nothing that the model generated, are no returns."""
    assert "engaged" not in checks(reported(blocks()))
    found = [_without_answers(part) if part.arm == "both" else part for part in blocks()]
    report = reported(found)
    assert "engaged" in checks(report)
    assert report.arms[1].gain is None


def _without_answers(part: BlockResult) -> BlockResult:
    calls = []
    for each in part.calls:
        known = max(0, each.before - each.answer_before)
        local, returned = known // 2, known - known // 2
        computed = (each.prompt or 0) - known
        calls.append(replace(each, local=local, returned=returned, computed=computed))
    return replace(part, calls=tuple(calls))


def test_feature_never_engages() -> None:
    """An arm in which nothing was kept or returned states no gain, however fast it was."""
    cold = {"local": 0, "returned": 0, "reason": "evicted"}
    for arm, name in ((None, "both"), (RETENTION, "retention")):
        found = [
            _cold(part, cold) if part.arm == name else part for part in blocks(name, on_ms=1.0)
        ]
        report = reported(found) if arm is None else reported(found, arm)
        assert checks(report) == {"engaged"}
        assert report.arms[1].gain is None


def _cold(part: BlockResult, cold: dict[str, Any]) -> BlockResult:
    return replace(
        part, calls=tuple(replace(each, computed=each.prompt, **cold) for each in part.calls)
    )


def test_off_is_not_like_off() -> None:
    """No gain is stated where off differs from off by more than chance."""
    found = [
        block(part.number, OFF_AGAIN, part.round, 200.0) if part.arm == OFF_AGAIN else part
        for part in blocks()
    ]
    report = reported(found)
    assert "off_differs_from_off" in checks(report)


def test_failed_calls_left_out() -> None:
    """No gain is stated where an arm answered fewer of its calls."""
    found = blocks()
    broken = replace(found[1], calls=(replace(found[1].calls[0], error="status 500"),) * 8)
    assert "success" in checks(reported([found[0], broken, *found[2:]]))
