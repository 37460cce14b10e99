"""The end of a call is read from bytes, however they are cut."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache.protocol import Boundary
from turncache_server.router.ending import ChatEnding, SseEvent, SseSplitter

PROPERTY = settings(max_examples=80, deadline=None)

line_ends = st.sampled_from([b"\n", b"\r\n", b"\r"])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream in any legal spelling, and the data of its events."""
    stream, data = b"", []
    if draw(st.booleans()):
        stream += b"\xef\xbb\xbf"
    for _ in range(draw(st.integers(0, 5))):
        end = draw(line_ends)
        lines = draw(
            st.lists(st.text("a你🙂: \\u{}", max_size=8).map(str.encode), min_size=1, max_size=3)
        )
        for line in lines:
            if draw(st.integers(0, 4)) == 0:
                stream += draw(st.sampled_from([b": ping", b":", b"event: x", b"id"])) + end
            # Without the space a value must not begin with one: it would be taken off.
            space = b" " if line.startswith(b" ") else draw(st.sampled_from([b"", b" "]))
            stream += b"data:" + space + line + end
        stream += end
        data.append(b"\n".join(lines))
        if draw(st.integers(0, 4)) == 0:
            stream += b": keep-alive" + end + end
    return stream, data


def pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    """Cut a stream at the given offsets."""
    edges = [0, *sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


def split(chunks: list[bytes]) -> tuple[list[SseEvent], list[SseEvent]]:
    """Split chunks: (events that ended, the event that the end of the stream ended)."""
    splitter = SseSplitter()
    events = [event for chunk in chunks for event in splitter.feed(chunk)]
    return events, splitter.close()


@PROPERTY
@given(streams(), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_split_gives_the_same_events(case: tuple[bytes, list[bytes]], cuts: list[int]) -> None:
    """Events and bytes are the same for every way of cutting the stream into chunks."""
    stream, data = case
    events, rest = split(pieces(stream, cuts))
    assert b"".join(event.raw for event in [*events, *rest]) == stream
    assert [event.data for event in events if event.data is not None] == data


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_every_single_cut_gives_the_same_events(end: bytes) -> None:
    """No byte offset is special: inside a character, a line end, a name or a blank line."""
    lines = [
        ": hello",
        'data: {"a":"你好🙂"}',
        "",
        "data:two",
        "data: lines",
        "",
        "data: [DONE]",
        "",
    ]
    stream = end.join(line.encode() for line in lines) + end
    expected = ['{"a":"你好🙂"}'.encode(), b"two\nlines", b"[DONE]"]
    for cut in range(len(stream) + 1):
        events, rest = split([stream[:cut], stream[cut:]])
        assert [event.data for event in events if event.data is not None] == expected
        assert b"".join(event.raw for event in [*events, *rest]) == stream


def test_an_event_is_handed_over_as_soon_as_its_blank_line_is_there() -> None:
    """Nothing waits for the next event, not even behind a lone CR."""
    for end in (b"\n", b"\r\n", b"\r"):
        assert [event.data for event in SseSplitter().feed(b"data: x" + end + end)] == [b"x"]


def test_a_huge_event_is_split_in_linear_time() -> None:
    """An event of 8 MB in small chunks is searched once, not once per chunk."""
    size, chunk = 8 * 1024 * 1024, b"x" * 4096
    splitter = SseSplitter()
    splitter.feed(b"data: ")
    for _ in range(size // len(chunk)):
        assert splitter.feed(chunk) == []
    assert splitter.pending_bytes == size + len(b"data: ")
    (event,) = splitter.feed(b"\n\n")
    assert event.data is not None
    assert len(event.data) == size


def test_the_last_event_may_lack_its_blank_line() -> None:
    """What has begun when the stream ends is handed over by close."""
    _, rest = split([b"data: 1\n\ndata: la", b"st"])
    assert [event.data for event in rest] == [b"last"]
    assert split([])[1] == []


# --- what the events mean ------------------------------------------------------------------


def chunk(index: int = 0, finish_reason: str | None = None, **delta: Any) -> bytes:
    """Encode one chunk."""
    choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
    return json.dumps({"choices": [choice]}).encode()


def call(index: int, name: str | None, arguments: str | None) -> dict[str, Any]:
    """One piece of a tool call."""
    return {"index": index, "function": {"name": name, "arguments": arguments}}


def ended(*chunks: bytes, num_choices: int = 1, final: bool = False) -> Any:
    """Collect chunks and return the ending."""
    collector = ChatEnding(num_choices=num_choices, final=final)
    for data in chunks:
        collector.add(data)
    return collector.ending()


ARGUMENTS = '{"query":"你好 \\"x\\" 🙂","n":1}'


@PROPERTY
@given(st.lists(st.integers(0, len(ARGUMENTS)), max_size=6))
def test_arguments_in_any_pieces_make_a_tool_boundary(cuts: list[int]) -> None:
    """A tool call whose arguments come in pieces is complete when the pieces are."""
    edges = [0, *sorted(cuts), len(ARGUMENTS)]
    parts = [ARGUMENTS[a:b] for a, b in itertools.pairwise(edges)]
    ending = ended(
        chunk(role="assistant"),
        chunk(tool_calls=[call(0, "search", "")]),
        *(chunk(tool_calls=[call(0, None, part)]) for part in parts),
        chunk(finish_reason="tool_calls"),
    )
    assert ending.problem is None
    assert ending.boundary is Boundary.TOOL
    assert ending.tool_names == ("search",)


@pytest.mark.parametrize(
    ("arguments", "reason", "boundary"),
    [
        pytest.param('{"a":1}', "tool_calls", Boundary.TOOL, id="auto"),
        pytest.param('{"a":1}', "stop", Boundary.TOOL, id="named function"),
        pytest.param("", "tool_calls", Boundary.TOOL, id="no parameters"),
        pytest.param('{"a":', "length", Boundary.USER, id="cut off"),
        pytest.param('"text"', "stop", Boundary.USER, id="no object"),
    ],
)
def test_complete_tool_calls_decide_and_not_the_reason(
    arguments: str, reason: str, boundary: Boundary
) -> None:
    """A tool wait begins after tool calls that a client can execute."""
    ending = ended(chunk(tool_calls=[call(0, "f", arguments)]), chunk(finish_reason=reason))
    assert ending.boundary is boundary
    assert ending.finish_reason == reason


def test_tool_calls_keep_their_order_and_their_arguments_apart() -> None:
    """Interleaved pieces of two calls belong to the call that their index names."""
    ending = ended(
        chunk(tool_calls=[call(1, "second", '{"b"'), call(0, "first", '{"a"')]),
        chunk(tool_calls=[call(0, None, ":1}"), call(1, None, ":2}")]),
        chunk(finish_reason="tool_calls"),
    )
    assert ending.tool_names == ("first", "second")


def test_a_final_call_ends_the_session() -> None:
    """What the client said wins over what the answer looks like."""
    assert ended(chunk(finish_reason="stop"), final=True).boundary is Boundary.FINAL


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        pytest.param([], "without a finish_reason", id="nothing"),
        pytest.param([chunk(content="half")], "without a finish_reason", id="no reason"),
        pytest.param([chunk(finish_reason="error")], "gave up", id="error reason"),
        pytest.param([chunk(finish_reason="abort")], "gave up", id="broken off"),
        pytest.param([b'{"error":{"message":"x"}}'], "reported an error", id="error event"),
        pytest.param(
            [chunk(finish_reason="stop"), b'{"error":"late"}'], "reported", id="late error"
        ),
        pytest.param([b"not json"], "without a finish_reason", id="unreadable"),
    ],
)
def test_a_call_that_did_not_end_well_has_no_boundary(chunks: list[bytes], problem: str) -> None:
    """Without a finish_reason, or with an error, the call has failed."""
    ending = ended(*chunks)
    assert re.search(problem, ending.problem)
    assert ending.boundary is None


def test_every_choice_has_to_finish() -> None:
    """With n=2 one finished choice is half an answer."""
    both = [chunk(0, "stop"), chunk(1, "length")]
    assert ended(both[0], num_choices=2).problem is not None
    assert ended(*both, num_choices=2).problem is None


def test_usage_and_a_whole_answer_are_read() -> None:
    """An answer without streaming is one chunk whose message is complete."""
    whole = {
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {
                    "content": None,
                    "tool_calls": [
                        {"id": "1", "function": {"name": "f", "arguments": "{}"}},
                        {"id": "2", "function": {"name": "g", "arguments": "{}"}},
                    ],
                },
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }
    ending = ended(json.dumps(whole).encode())
    assert ending.tool_names == ("f", "g")
    assert (ending.usage.prompt_tokens, ending.usage.completion_tokens) == (7, 3)
