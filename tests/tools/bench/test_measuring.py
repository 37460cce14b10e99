"""Statistics, arms, counters, verdicts and the whole command."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.bench_stack import FakeStack
from tests.tools.bench.blocks import block, blocks, checks, reported
from tests.tools.bench.running import SMALL, bench
from turncache.errors import UsageError
from turncache_tools.bench import words
from turncache_tools.bench.arms import OFF, OFF_AGAIN, StackFacts, StockPair, choose_arms, schedule
from turncache_tools.bench.counters import difference, prefix_caching, read_counters
from turncache_tools.bench.page import page
from turncache_tools.bench.results import BlockResult, of_arm, pairs
from turncache_tools.bench.saved import SavedBlocks
from turncache_tools.bench.statistics import bootstrap, median_ratio, quantile, summary
from turncache_tools.bench.stream import Lines

_floats = st.lists(st.floats(0, 1e6), min_size=1, max_size=30)


@given(_floats, st.floats(0, 1), st.floats(0, 1))
@settings(max_examples=60, deadline=None)
def test_quantiles_are_ordered_and_within(values: list[float], one: float, other: float) -> None:
    """A quantile lies within its values and never falls; the ends are least and most."""
    low, high = sorted((one, other))
    assert min(values) <= quantile(values, low) <= quantile(values, high) <= max(values)
    assert (quantile(values, 0), quantile(values, 1)) == (min(values), max(values))
    assert summary([]) is None


@given(st.dictionaries(st.integers(), _floats, min_size=2, max_size=6), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_intervals_hold_their_estimate(clusters: dict[int, list[float]], seed: int) -> None:
    """An interval holds its estimate and follows from the seed."""

    def middle(values: object) -> float:
        return quantile(list(values), 0.5)  # type: ignore[call-overload]

    one = bootstrap(clusters, middle, seed=seed, resamples=40)
    assert one == bootstrap(clusters, middle, seed=seed, resamples=40)
    assert one is not None
    assert one.low is not None
    assert one.high is not None
    assert one.low <= one.value <= one.high


def test_one_sample_has_no_interval() -> None:
    """One agent is one sample, whatever number of calls it made."""
    found = bootstrap({"a": [(1, 4.0, 2.0)] * 50}, median_ratio, seed=1)
    assert found is not None
    assert (found.value, found.low, found.high, found.samples) == (2.0, None, None, 1)


def test_order_of_arms_is_turned_every_round() -> None:
    """Off is at both ends of every round, and the second round is the first one reversed."""
    names = [(each.arm, each.round) for each in schedule(["off", "idle", "both"], rounds=2)]
    first = [("off", 1), ("idle", 1), ("both", 1), ("off again", 1)]
    assert names == first + [(name, 2) for name, _ in reversed(first)]
    assert schedule(["off", "both"], rounds=3)[:6] == schedule(["off", "both"], rounds=2)


def test_drift_is_no_gain() -> None:
    """A machine that slows down evenly shows neither a gain nor that off differs from off."""
    found = [
        replace(
            part,
            calls=tuple(replace(call, ttft_ms=400.0 * 1.04**part.number) for call in part.calls),
        )
        for part in blocks()
    ]
    report = reported(found)
    gain = report.arms[1].gain
    assert "off_differs_from_off" not in checks(report)
    assert report.again is not None
    assert gain is not None
    assert report.again.value == pytest.approx(1.0, abs=0.005)
    assert gain.value == pytest.approx(1.0, abs=0.005)


def test_every_call_is_held_against_both_blocks_of_off() -> None:
    """One of two off blocks that was slowed down does not make the gain."""
    found = blocks()
    found[2] = block(2, OFF_AGAIN, 1, 4000.0)
    gain = gain_of(found)
    assert 3.5 < gain < 4.1


def gain_of(found: list[BlockResult]) -> float:
    """Return off over the arm, whatever else the report says of them."""
    off, mine = of_arm(found, OFF), of_arm(found, "both")
    values = [pair for each in pairs(off, mine, "ttft_ms").values() for pair in each]
    return median_ratio(values) or 0.0


def test_arms_that_a_stack_cannot_show_have_a_reason() -> None:
    """What is not measurable says why; what has a stack of its own is measured there."""
    facts = StackFacts(ours=True, pair=False, controls=1, admin=True, returns=True)
    wanted = ("idle", "retention", "both", "p2p", "bidirectional", "warm-ahead")
    arms, missing = choose_arms(wanted, facts, url="u", urls={"bidirectional": ("p", "v")})
    assert [(arm.name, arm.url) for arm in arms] == [
        ("off", "u"),
        ("idle", "u"),
        ("retention", "u"),
        ("bidirectional", "v"),
    ]
    assert arms[-1].pair == StockPair(prefill="p", decode="v", returning=True)
    why = {each.name: each.why for each in missing}
    assert set(why) == {"both", "p2p", "warm-ahead"}
    assert "one engine" in why["both"]
    assert "--arm p2p=URL" in why["p2p"]


def test_stock_server_has_off_alone() -> None:
    """A server that is not ours is measured as off; ours is not, where it cannot be switched."""
    arms, missing = choose_arms(("both",), StackFacts(ours=False), url="u", urls={})
    assert [arm.name for arm in arms] == ["off"]
    assert "not ours" in missing[0].why
    with pytest.raises(UsageError, match="off is not measurable here"):
        choose_arms(("both",), StackFacts(ours=True, pair=True), url="u", urls={})
    with pytest.raises(UsageError, match="--arms nonsense"):
        choose_arms(("nonsense",), StackFacts(ours=False), url="u", urls={})


def test_counters_are_differences() -> None:
    """Transfer time is with the time to post; an engine that was started again counts from 0."""
    text = (
        'vllm:nixl_xfer_time_seconds_sum{engine="0"} 1.5\n'
        'vllm:nixl_post_time_seconds_sum{engine="0"} 0.5\n'
        'vllm:prompt_tokens_by_source_total{engine="0",source="local_cache_hit"} 7.0\n'
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="False"} 1.0\n'
        "# HELP nothing\nbroken line\n"
    )
    found = read_counters(text)
    assert found == {"transfer_s": 2.0, "local_tokens": 7.0}
    assert difference({"transfer_s": 0.5, "local_tokens": 9.0}, found) == {
        "transfer_s": 1.5,
        "local_tokens": 7.0,
    }
    assert prefix_caching(text) == "False"


@given(st.integers(1, 12))
@settings(max_examples=12, deadline=None)
def test_any_pieces_of_a_stream_are_the_same_events(size: int) -> None:
    """How a stream is cut on its way changes nothing."""
    whole = 'data: {"a": "é"}\n\n: ping\r\ndata:[DONE]\r\n\r\n'.encode()
    lines = Lines()
    found = [d for at in range(0, len(whole), size) for d in lines.feed(whole[at : at + size])]
    assert found == ['{"a": "é"}', "[DONE]"]


def test_gain_is_stated_with_its_interval() -> None:
    """Four times sooner is four times sooner, in table, figures and page."""
    report = reported(blocks())
    gain = report.arms[1].gain
    assert not checks(report)
    assert gain is not None
    assert gain.value == pytest.approx(3.9, abs=0.01)
    assert words.headline(report).startswith("With both the first token comes 3.90")
    (again, both) = report.figures()
    assert (again.ok, both.ok, both.ratio) == (True, True, gain.value)
    assert "3.90" in page(report)
    assert BlockResult.from_dict(json.loads(json.dumps(blocks()[3].to_dict()))) == blocks()[3]


def test_no_difference_is_called_none() -> None:
    """An arm as fast as off is not called sooner."""
    report = reported(blocks(on_ms=400.0))
    assert words.headline(report).startswith("No difference is shown")


def test_refused_gain_is_nowhere() -> None:
    """Tokens that do not add up leave no ratio in table, figures or page."""
    found = [block(b.number, b.arm, b.round, 100.0, computed=1) for b in blocks()]
    report = reported(found)
    assert "tokens_add_up" in checks(report)
    assert report.arms[1].gain is None
    assert report.figures()[1].ratio is None
    assert "No gain is stated" in page(report)
    assert words.headline(report) == "No gain can be stated: see why below"


def test_whole_run_and_going_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Arms are switched and restored, answers threaded, finished blocks are not run again."""
    saved, out, html = (tmp_path / name for name in ("saved", "f.json", "p.html"))
    flood = ("--miss-rate", "1", "--flood-tokens", "120", "--flood-prompt", "60")
    options = (*SMALL, *flood, "--resume", str(saved), "--html", str(html))
    with FakeStack() as stack:
        code, made = bench(stack, *options, "--verify", out=out)
        arms = {arm["arm"]["name"]: arm for arm in made["bench"]["arms"]}
        assert code in {0, 1}
        assert list(arms) == ["off", "idle", "retention", "both"]
        assert (arms["off"]["tokens"]["local"], arms["idle"]["tokens"]["local"]) == (0, 0)
        assert arms["retention"]["tokens"]["local"] > 0
        assert arms["retention"]["tokens"]["returned"] == 0
        assert arms["both"]["tokens"]["returned"] > 0
        assert arms["both"]["tokens"]["lost"] == 0
        assert arms["both"]["gauges"]["retained_share"] == 25.0
        assert {each["check"] for a in arms.values() for each in a["refused"]} <= {
            "off_differs_from_off"
        }
        same = {"compared": 3, "different": 0, "edited_differs": False}
        assert made["bench"]["compared"]["both"] == same
        assert made["bench"]["missed"] == 1.0
        assert (stack.mode, stack.returns) == ("on", True)
        last = [each for each in stack.agents_calls if each.session][-1]
        assert [m["role"] for m in last.body["messages"]][-3:] == ["user", "assistant", "user"]
        assert "said said" in last.body["messages"][-2]["content"]
        assert "<html" in html.read_text()
        num_seen = len(stack.agents_calls)
        lines = saved.read_text().splitlines()
        saved.write_text("\n".join(lines[:-1]) + '\n{"cut o')
        assert capsys.readouterr().out, "tables"
        code, again = bench(stack, *options, "--json", out=out)
        assert json.loads(capsys.readouterr().out) == again, "nothing else is printed"
        assert len(stack.agents_calls) - num_seen == 3 + 4 * 2
        assert len(again["bench"]["arms"]) == 4
        code, _ = bench(stack, *options, "--seed", "2")
    assert code == 2
    assert "other options" in capsys.readouterr().err


def test_a_file_that_is_no_text_is_not_gone_on_from(tmp_path: Path) -> None:
    """It is named, and left as it is."""
    path = tmp_path / "blocks.jsonl"
    path.write_bytes(b"\xc2\x28")
    with pytest.raises(UsageError, match=r"blocks\.jsonl: cannot be used"):
        SavedBlocks(path, {})
    assert path.read_bytes() == b"\xc2\x28"


def test_a_switch_is_waited_for_until_the_router_knows_it(tmp_path: Path) -> None:
    """No call of an arm is planned by the arm before it."""
    with FakeStack(notices_every=3) as stack:
        _, made = bench(stack, *SMALL, "--arms", "both", out=tmp_path / "f.json")
    both = next(a for a in made["bench"]["arms"] if a["arm"]["name"] == "both")
    assert both["tokens"]["returned"] > 0
    assert both["tokens"]["lost"] == 0


def test_failed_call_ends_its_agent() -> None:
    """A call that fails is counted, its agent's other calls are not made, and no gain is stated."""
    with FakeStack(ours=False, fails=frozenset({5})) as stack:
        code, _ = bench(stack, *SMALL)
    assert code == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--miss-rate", "2"), "--miss-rate 2"),
        (("--miss-rate", "1"), "--flood-tokens"),
        (("--miss-rate", "1", "--miss-by", "reset"), "--reset"),
        (("--arm", "x"), "NAME=URL"),
        (("--arm", "off=http://a,http://b,http://c"), "NAME=PREFILL,DECODE"),
        (("--rounds", "0"), "--rounds 0"),
        (("--trace", "/nowhere"), "--trace /nowhere"),
        (("--url", "ftp://x"), "--url"),
        (("--out", "/nowhere/f"), "--out /nowhere/f: there is no folder"),
    ],
)
def test_usage_errors(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be run is refused before anything is asked, with exit code 2."""
    from turncache_tools.__main__ import main

    assert main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err
