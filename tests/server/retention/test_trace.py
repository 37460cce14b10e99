"""The trace: what is written can be read, and says nothing that it must not."""

from __future__ import annotations

import json
from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tests.server.retention.ghost_calls import TEXTS, serve, spec
from tests.server.retention.support import hashes
from turncache_server.retention.ghost import Ghost, ObservedCall
from turncache_server.retention.trace import (
    DIGITS,
    TraceError,
    TraceHeader,
    TraceSpeed,
    read_trace,
    to_line,
)
from turncache_server.retention.trace_writer import TraceWriter

HEADER = TraceHeader(trace="t1", block_size=4, num_blocks=20, host_gb=(1.0,), side="decode")


def writer(key: bytes = b"k" * 32) -> TraceWriter:
    """A writer of a trace that begins at second 100."""
    return TraceWriter(HEADER, key=key, origin_s=100.0)


def observed(*texts: str, session: str | None = "my-session") -> list[ObservedCall]:
    """Calls as the ghost saw them."""
    ghost = Ghost(spec(block_bytes=10**8, host_gb=(1.0,)))
    return [
        serve(ghost, text, "z", session=session, now_s=100.5 + number, retain_s=3.0)
        for number, text in enumerate(texts)
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(TEXTS, st.sampled_from([None, "s", "t"])), max_size=15))
def test_chains_come_out_as_they_went_in(calls: list[tuple[str, str | None]]) -> None:
    """Equal prefixes are equal in the trace, others are not, and every count is kept."""
    ghost = Ghost(spec())
    made = [serve(ghost, text, "z", session=session, now_s=100.0) for text, session in calls]
    pen = writer()
    lines = [pen.begin_part(), *map(pen.call, made)]
    trace = read_trace("".join(lines).splitlines())
    assert trace.header == replace(HEADER, part=1)
    names: dict[bytes, str] = {}
    for call, (read, chain) in zip(made, trace.chains(), strict=True):
        assert len(chain) == len(call.hashes)
        for chain_hash, name in zip(call.hashes, chain, strict=True):
            assert names.setdefault(chain_hash, name) == name
        counted = (read.prompt, read.output, read.seen, read.again, read.stock, read.retention)
        assert counted == (
            call.prompt,
            call.output,
            call.seen,
            call.again,
            call.stock,
            call.retention,
        )
        assert (read.session is None) == (call.session is None)
        assert read.fate == call.fate
    assert len(set(names.values())) == len(names)


def test_only_what_is_new_is_written() -> None:
    """A conversation of many calls costs its length, not its square."""
    pen = writer()
    pen.begin_part()
    first, second = map(json.loads, map(pen.call, observed("abcd", "abcdzef")))
    assert len(first["blocks"]) == 5 * DIGITS
    assert (second["shared"], len(second["blocks"])) == (5, 3 * DIGITS)
    assert second["after"] == first["blocks"][-DIGITS:]


def test_every_part_can_be_read_alone_and_parts_share_their_names() -> None:
    """A part that begins has nothing from before, and equal blocks have equal hashes."""
    pen, (call,) = writer(), observed("abcd")
    first = read_trace([pen.begin_part(), pen.call(call)])
    second = read_trace([pen.begin_part(), pen.call(call)])
    assert (first.header.part, second.header.part) == (1, 2)
    assert first.header.trace == second.header.trace
    assert next(first.chains())[1] == next(second.chains())[1]


def test_nothing_of_another_trace_or_of_a_guess_can_be_found() -> None:
    """Neither names nor hashes appear, and another key gives other ones."""
    (call,) = observed("abcd")
    lines = []
    for key in (b"k" * 32, b"j" * 32):
        pen = writer(key)
        pen.begin_part()
        lines.append(json.loads(pen.call(call)))
    text = json.dumps(lines)
    assert "my-session" not in text
    assert not any(each.hex()[:8] in text for each in hashes("abcdz") if len(each) > 3)
    assert lines[0]["session"] != lines[1]["session"]
    assert lines[0]["blocks"] != lines[1]["blocks"]
    assert {"text", "tokens", "messages", "request"}.isdisjoint(lines[0])


def test_times_are_seconds_since_the_start_of_the_trace() -> None:
    """The engine's clock says nothing to others."""
    pen, (call,) = writer(), observed("abcd")
    read = read_trace([pen.begin_part(), pen.call(call), pen.speed(160.0, 4000, 2.00049)])
    assert (read.calls[0].t, read.calls[0].start, read.calls[0].end) == (0.5, 0.5, 0.5)
    assert read.speed == TraceSpeed(t=60.0, prefill_tokens=4000, prefill_s=2.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 400))
def test_a_file_that_was_cut_off_is_read_up_to_there(cut: int) -> None:
    """The engine may be writing, or have been killed: all whole lines count."""
    pen = writer()
    whole = "".join([pen.begin_part(), *map(pen.call, observed("abcd", "abcdz", "abcdzef"))])
    last = len(whole.splitlines(keepends=True)[-1])
    left = max(0, last - cut)
    trace = read_trace(whole[: len(whole) - last + left].splitlines())
    # Without its line end the last line is whole.
    assert len(trace.calls) == (3 if left >= last - 1 else 2)
    assert trace.truncated == (0 < left < last - 1)


def test_a_broken_line_in_the_middle_is_named() -> None:
    """That is no cut: something has changed the file."""
    pen, (call,) = writer(), observed("abcd")
    lines = [pen.begin_part(), '{"kind":"call","t":', pen.call(call)]
    with pytest.raises(TraceError, match=r"my\.jsonl, line 2"):
        read_trace(lines, name="my.jsonl")


def test_a_newer_schema_is_refused_by_its_name() -> None:
    """With the one that can be read."""
    line = to_line(HEADER).replace("turncache-trace/1", "turncache-trace/2")
    with pytest.raises(TraceError, match=r"turncache-trace/2.*reads turncache-trace/1"):
        read_trace([line])


@pytest.mark.parametrize("lines", [[], ["hello"], ["[1]"], ['{"kind":"trace"}'], ["{}"]])
def test_what_is_no_trace_is_refused(lines: list[str]) -> None:
    """Any file may be named by mistake."""
    with pytest.raises(TraceError, match="trace"):
        read_trace(lines)


def test_unknown_kinds_and_members_are_ignored_and_wrong_types_are_not() -> None:
    """So that the schema can grow."""
    pen, (call,) = writer(), observed("abcd")
    header, line = pen.begin_part(), pen.call(call)
    grown = json.dumps({**json.loads(line), "colour": "red"})
    trace = read_trace([header, grown, '{"kind":"weather"}', ""])
    assert trace.calls == read_trace([header, line]).calls
    wrong = json.dumps({**json.loads(line), "prompt": "many"})
    with pytest.raises(TraceError, match="prompt is 'many', expected int"):
        read_trace([header, wrong, line])


def test_a_chain_without_its_beginning_is_refused() -> None:
    """Half a file is no trace."""
    pen = writer()
    header, _, second = pen.begin_part(), *map(pen.call, observed("abcd", "abcdzef"))
    with pytest.raises(TraceError, match="no earlier line has it"):
        list(read_trace([header, second]).chains())
