"""What of an engine's stream reaches the client."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.engine import Answer, Script, event
from turncache_server.router.ending import ChatEnding
from turncache_server.router.passing import AnswerStream

PARAMS = {"remote_host": "10.0.0.7", "remote_port": 5600, "remote_block_ids": [1, 2]}


def answer(**members: Any) -> list[bytes]:
    """Return a good stream's events."""
    script = members.pop("script", Script())
    body = {"messages": [{"role": "user", "content": "x"}], **members}
    return Answer.to(body, 10, 0).events(script)


def passed(chunks: list[bytes]) -> tuple[bytes, AnswerStream, list[str]]:
    """Pass chunks: (what the client gets, the stream, what was called)."""
    calls: list[str] = []
    stream = AnswerStream(ChatEnding(num_choices=1), lambda _: calls.append("completed"))
    out = b"".join(stream.feed(chunk) for chunk in chunks)
    return out + stream.close(), stream, calls


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 5000), max_size=10),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
)
def test_a_good_stream_passes_byte_for_byte(cuts: list[int], end: str, usage: bool) -> None:
    """Any cut, any line end: the client gets the engine's bytes, and completion is told once."""
    whole = b"".join(answer(stream_options={"include_usage": usage}))
    whole = b": hi\n\n" + whole
    whole = whole.replace(b"\n", end.encode())
    edges = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
    chunks = [whole[a:b] for a, b in itertools.pairwise(edges)]
    out, stream, calls = passed(chunks)
    assert out == whole
    assert stream.ending.problem is None
    assert calls == ["completed"]


def test_transfer_parameters_are_cut_out_of_their_chunk_alone() -> None:
    """Addresses and block ids do not go out; every other event keeps its bytes."""
    plain = answer()
    with_params = answer(script=Script(kv_transfer_params=PARAMS))
    out, _, _ = passed(with_params)
    assert b"10.0.0.7" not in out
    assert b"remote" not in out
    assert out == b"".join(plain)


def test_text_that_names_transfer_parameters_is_left_alone() -> None:
    """A model may talk about kv_transfer_params."""
    talk = event(
        {"choices": [{"index": 0, "delta": {"content": '"kv_transfer_params": {"a": 1}'}}]}
    )
    out, _, _ = passed([talk, *answer()])
    assert out.startswith(talk)


def test_done_after_an_incomplete_answer_is_held_back() -> None:
    """Without a finish_reason [DONE] would make the answer look complete."""
    events = answer()
    out, stream, calls = passed([*events[:-2], events[-1], b": late\n\n"])
    assert out == b"".join(events[:-2])
    assert stream.ending.problem is not None
    assert not stream.done
    assert calls == []


def test_an_engines_own_error_event_passes_with_its_end() -> None:
    """An engine that says that it failed has said it: nothing is added or held back."""
    error = event({"error": {"message": "out of memory", "code": 500}})
    chunks = [*answer()[:3], error, b"data: [DONE]\n\n"]
    out, stream, calls = passed(chunks)
    assert out == b"".join(chunks)
    assert stream.client_knows
    assert calls == []


def test_half_an_event_is_not_sent() -> None:
    """A stream that breaks inside an event ends after the event before it."""
    events = answer()
    out, stream, _ = passed([*events[:2], events[2][:-5]])
    assert out == b"".join(events[:2])
    assert stream.pending_bytes == 0


def test_completion_is_told_before_the_bytes_that_end_the_answer() -> None:
    """The client's next call may be quicker than the end of this one."""
    calls: list[bytes] = []
    stream = AnswerStream(ChatEnding(num_choices=1), lambda _: calls.append(b"completed"))
    calls += (stream.feed(chunk) for chunk in answer())
    assert calls.index(b"completed") == calls.index(b"data: [DONE]\n\n") - 1


@pytest.mark.parametrize("blank", [b"", b"\n", b"\n\n"])
def test_a_stream_without_done_is_complete_with_its_reason(blank: bytes) -> None:
    """A finish_reason ends a call, with or without [DONE] and the last blank line."""
    events = answer()[:-1]
    last = events[-1].rstrip(b"\n") + blank
    out, stream, calls = passed([*events[:-1], last])
    assert out == b"".join([*events[:-1], last])
    assert stream.ending.problem is None
    assert calls == ["completed"]


def test_parameters_in_an_event_of_several_lines_are_cut_out() -> None:
    """However an event is written, what it says about engines stays here."""
    chunk = json.dumps({"choices": [], "kv_transfer_params": PARAMS}, indent=1)
    lines = b"".join(b"data: " + line.encode() + b"\n" for line in chunk.splitlines())
    out, _, _ = passed([lines + b"\n", *answer()])
    assert b"10.0.0.7" not in out
    assert out.startswith(b'data: {"choices": []}\n\n')
