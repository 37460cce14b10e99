"""Workloads: drawn from numbers, read from traces, cut to size; texts of equal length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache.errors import UsageError
from turncache_server.retention.trace import TraceCall, TraceHeader, to_line
from turncache_tools.bench.texts import Piece, Tokens, fit_tokens, kept, text
from turncache_tools.bench.traces import read_workload
from turncache_tools.bench.workload import (
    AgentSpec,
    Cut,
    Parameters,
    Workload,
    every_agent,
    fitted,
    parametric,
)

SESSION = [(0, 15000, 200, 0, 5.0), (1, 16000, 100, 15000, 2.0), (2, 9000, 50, 6400, 60.0)]


def lengths(agent: AgentSpec, shared: int) -> list[int]:
    """Return the prompts that an agent's calls have."""
    out, history = [], shared
    for call in agent.calls:
        history = (history if call.keep is None else min(history, call.keep)) + call.new
        out.append(history)
        history += call.answer
    return out


def test_same_seed_same_workload() -> None:
    """A workload follows from numbers and seed; another seed gives another one."""
    numbers = Parameters(new_sigma=0.8, wait_sigma=1.0, subagent_every=4)
    assert parametric(numbers, seed=3) == parametric(numbers, seed=3)
    assert parametric(numbers, seed=3) != parametric(numbers, seed=4)


@given(st.integers(0, 999), st.integers(1500, 4000))
@settings(max_examples=25, deadline=None)
def test_compaction_keeps_history_below_its_limit(seed: int, limit: int) -> None:
    """No prompt is longer than the limit, but for what one call adds."""
    numbers = Parameters(calls=30, first=300, new_sigma=0.5, compact_at=limit, compact_to=50)
    work = parametric(numbers, seed=seed)
    assert max(lengths(work.agents[0], work.shared)) <= limit + numbers.answer


def test_subagents_run_inside_the_wait_of_their_parent() -> None:
    """Every fourth call waits for a sub-agent with a history of its own."""
    work = parametric(Parameters(agents=1, calls=8, subagent_every=4), seed=1)
    assert [len(call.spawned) for call in work.agents[0].calls] == [0, 0, 0, 1, 0, 0, 0, 1]
    names = [agent.name for agent in every_agent(work.agents)]
    assert len(set(names)) == 3
    assert work.num_calls == 8 + 2 * 3


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"agents": 0}, "--agents 0"),
        ({"wait_s": -1.0}, "--wait -1"),
        ({"compact_at": 900}, "--compact-at 900"),
    ],
)
def test_impossible_numbers_are_refused(change: dict[str, Any], named: str) -> None:
    """The message names the option and its value."""
    with pytest.raises(UsageError, match=named):
        parametric(Parameters(**change), seed=1)


def raw(rows: Any = SESSION) -> str:
    """Return a session in weka's raw form."""
    requests: list[dict[str, Any]] = []
    ids: list[int] = []
    for number, (t, prompt, answer, same, think) in enumerate(rows):
        ids = ids[: same // 64] + [10**6 * number + at for at in range((prompt - same) // 64)]
        requests.append({"t": t, "in": prompt, "out": answer, "think_time": think, "hash_ids": ids})
    head = {"id": "s", "block_size": 64, "tool_tokens": 1000, "system_tokens": 500}
    return json.dumps({**head, "requests": requests})


def compact() -> str:
    """Return the same session in the compact form, with a sub-agent before its last call."""
    rows: list[Any] = [[t, p, a, same, 1.0, w, 1] for t, p, a, same, w in SESSION]
    rows.insert(2, {"t": 2, "sub": [[0, 3000, 10, 0, 1.0, 0, 1]]})
    return json.dumps({"id": "s", "bs": 64, "tool": 1000, "sys": 500, "r": rows}) + "\n"


@pytest.mark.parametrize("form", [raw, compact], ids=["raw", "compact"])
def test_weka_sessions_keep_their_lengths(form: Any) -> None:
    """Prompts are as long as recorded, waits are kept, a rewritten history is cut."""
    work = read_workload(form(), name="w.json")
    (agent,) = work.agents
    assert lengths(agent, work.shared) == [15000, 16000, 9000]
    assert [call.wait_s for call in agent.calls] == [0.0, 2.0, 60.0]
    assert [call.keep for call in agent.calls][2] == 6400
    inner = [len(call.spawned) for call in agent.calls]
    assert inner == ([0, 0, 1] if form is compact else [0, 0, 0])


def test_mooncake_requests_become_conversations() -> None:
    """A request that contains an earlier one's full blocks continues it, another one does not."""
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 10, "hash_ids": [0, 1, 2]},
        {"timestamp": 500, "input_length": 1100, "output_length": 10, "hash_ids": [0, 7, 8]},
        {"timestamp": 9000, "input_length": 2000, "output_length": 5, "hash_ids": [0, 1, 3, 4]},
    ]
    work = read_workload("\n".join(map(json.dumps, rows)), name="m.jsonl")
    assert [len(agent.calls) for agent in work.agents] == [2, 1]
    assert lengths(work.agents[0], 0) == [1100, 2000]
    assert work.agents[0].calls[1].wait_s == 9.0
    assert work.agents[1].starts_s == 0.5


def test_aiperf_lines_carry_what_is_new() -> None:
    """Later lines of a session add to its history; blocks that all begin with are shared."""
    rows = [
        {"session_id": "a", "input_length": 2000, "output_length": 8, "hash_ids": [0, 1, 5]},
        {"session_id": "b", "input_length": 3000, "output_length": 8, "hash_ids": [0, 1, 6]},
        {"session_id": "a", "input_length": 300, "output_length": 9, "hash_ids": [], "delay": 70},
    ]
    work = read_workload("\n".join(map(json.dumps, rows)), name="a.jsonl")
    assert work.shared == 1024
    assert lengths(work.agents[0], work.shared) == [2000, 2308]
    assert work.agents[0].calls[1].wait_s == 0.07


def test_recording_of_observe_becomes_sessions() -> None:
    """Sessions, lengths and waits of a recording; ordinary calls are none of them."""
    header = to_line(TraceHeader(trace="t", block_size=16, num_blocks=9, mode="observe"))
    one, two, three = "a" * 16, "b" * 16, "c" * 16
    rows = [
        TraceCall(t=0, start=0, end=1, session="s", prompt=40, output=8, blocks=one + two),
        TraceCall(t=2, start=2, end=3, prompt=40, output=8, blocks=three),
        TraceCall(t=6, start=6, end=8, session="s", prompt=70, output=8, shared=2, after=two),
        TraceCall(t=9, start=9, end=9, session="s", prompt=30, output=8, shared=1, after=one),
    ]
    work = read_workload(header + "".join(map(to_line, rows)), name="o.jsonl")
    (agent,) = work.agents
    assert lengths(agent, 0) == [40, 70, 30]
    assert [call.wait_s for call in agent.calls] == [0.0, 5.0, 1.0]
    assert [call.keep for call in agent.calls] == [None, 32, 16]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no JSON object; expected a trace of weka, Mooncake"),
        ("not json", "no JSON object"),
        ('{"a": 1}', "no workload that is known"),
        ('{"schema": "turncache-trace/99"}', "turncache-trace/99"),
        ('{"block_size": 64, "requests": 7}', "requests is"),
        ('{"block_size": 64, "requests": [{"in": -4, "out": 1}]}', "line 1: in is -4"),
        ('{"timestamp": 0, "input_length": 1, "hash_ids": [1]}', "output_length is None"),
        ('{"session_id": "a", "input_length": 5, "output_length": 1}\n{"session_id"', "line 2"),
        ('{"id": "s", "bs": 64, "r": [[1, 2]]}', "2 values"),
        ('{"id": "s", "bs": 64, "r": []}', "no call"),
    ],
)
def test_unreadable_workloads_are_named(content: str, says: str) -> None:
    """The message names the file, the line and what was expected."""
    with pytest.raises(UsageError, match=says) as caught:
        read_workload(content, name="f.jsonl")
    assert "f.jsonl" in str(caught.value)


_NAMES = """requests r bs id block_size in out hash_ids think_time session_id input_length
output_length timestamp delay"""
_values = st.sampled_from(
    [None, True, -1, 0, 7, 64, 1e99, float("nan"), "x", [], [1], [[1, 2, 3, 4, 5, 6]], [{}]]
) | st.lists(st.fixed_dictionaries({"in": st.sampled_from([0, 5, "x"]), "out": st.just(1)}))
_objects = st.dictionaries(st.sampled_from(_NAMES.split()), _values, max_size=7)


@given(st.lists(_objects, max_size=4))
@settings(max_examples=80, deadline=None)
def test_any_file_is_read_or_refused(records: list[dict[str, Any]]) -> None:
    """Whatever JSON a file holds: a workload with calls, or a UsageError; nothing else."""
    content = "\n".join(map(json.dumps, records))
    try:
        work = read_workload(content, name="f")
    except UsageError:
        return
    assert work.num_calls > 0
    for agent in every_agent(work.agents):
        assert all(call.new > 0 and call.answer > 0 and call.wait_s >= 0 for call in agent.calls)


def test_cut_to_the_size_of_a_machine() -> None:
    """Tokens and waits are scaled, and an agent ends before its prompt gets too long."""
    work = read_workload(raw(), name="w")
    cut = Cut(agents=5, calls=9, tokens=0.1, waits=0.5, max_wait_s=20.0)
    (agent,) = fitted(work, cut).agents
    assert lengths(agent, 150) == [1500, 1600, 900]
    assert [call.wait_s for call in agent.calls] == [0.0, 1.0, 20.0]
    short = fitted(work, Cut(agents=5, calls=9, tokens=0.1, max_context=1550))
    assert len(short.agents[0].calls) == 1
    with pytest.raises(UsageError, match="--max-context 10"):
        fitted(work, Cut(agents=5, calls=9, max_context=10))


@given(st.integers(1, 300), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_blocks_have_the_same_words_in_another_order(num_words: int, seed: int) -> None:
    """Two blocks' texts have the same words; long ones begin differently."""
    one, other = (text(num_words, place="p", seed=seed, block=b) for b in ("x", "y"))
    assert sorted(one.split()) == sorted(other.split())
    assert len(one.split()) == num_words
    if num_words >= 24:
        assert one.split()[:24] != other.split()[:24]
    assert one == text(num_words, place="p", seed=seed, block="x")


def test_tokens_are_fitted_to_the_server() -> None:
    """Two probes give tokens per word; texts are made to measure."""
    fit = fit_tokens((32, 74), (160, 330))
    assert (fit.per_word, fit.per_prompt) == (2.0, 10.0)
    assert fit.words(100) == 50
    assert Tokens().words(0.2) == 1


def test_history_is_cut_at_whole_messages() -> None:
    """What stays are leading messages; the first one always does."""
    pieces = [Piece({"role": "user", "content": str(at)}, 100) for at in range(4)]
    assert kept(pieces, None) == pieces
    assert kept(pieces, 250) == pieces[:2]
    assert kept(pieces, 5) == pieces[:1]


def test_reading_does_not_depend_on_the_folder(tmp_path: Path) -> None:
    """A workload's name says its format and file."""
    work = read_workload(raw(), name=(tmp_path / "w.json").name)
    assert isinstance(work, Workload)
    assert work.name == "weka: w.json"
