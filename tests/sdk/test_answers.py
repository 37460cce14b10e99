"""How a call ended: from whole answers and from chunks, complete or not."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.answers import MAX_ARGUMENT_CHARS, ChunkReader, Ending, ToolCall, read_answer
from turncache.protocol import Boundary


def chat(finish: Any = "stop", *calls: Any, **more: Any) -> dict[str, Any]:
    """Return a chat completion as a mapping."""
    message = {"role": "assistant", "content": None, "tool_calls": list(calls) or None}
    return {"id": "a1", "choices": [{"message": message, "finish_reason": finish}], **more}


def function(name: str = "search", arguments: str = "{}", call_id: str = "c1") -> dict[str, Any]:
    """Return a tool call of a chat completion."""
    return {"id": call_id, "function": {"name": name, "arguments": arguments}}


CALL = ToolCall("c1", "search", "{}")


@pytest.mark.parametrize(
    ("answer", "boundary", "tools"),
    [
        pytest.param(chat(), Boundary.USER, (), id="answer"),
        pytest.param(chat("tool_calls", function()), Boundary.TOOL, (CALL,), id="tool call"),
        pytest.param(chat("stop", function()), Boundary.TOOL, (CALL,), id="named tool choice"),
        pytest.param(chat("length", function()), Boundary.USER, (), id="cut tool call"),
        pytest.param(chat(None), None, (), id="no finish reason"),
        pytest.param({"choices": None}, None, (), id="nothing"),
        pytest.param(None, None, (), id="none"),
        pytest.param(
            chat("tool_calls", {"id": "c1", "custom": {"name": "search", "input": "{}"}}),
            Boundary.TOOL,
            (CALL,),
            id="custom tool",
        ),
    ],
)
def test_chat_answers(answer: Any, boundary: Any, tools: Any) -> None:
    """A tool wait begins with complete tool calls, whatever the finish reason says."""
    ending = read_answer(answer)
    assert (ending.boundary, ending.tools) == (boundary, tools)


ITEM = {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"}


@pytest.mark.parametrize(
    ("output", "status", "boundary", "tools"),
    [
        ([{"type": "message"}], "completed", Boundary.USER, ()),
        ([ITEM], "completed", Boundary.TOOL, (CALL,)),
        ([ITEM], "incomplete", Boundary.USER, ()),
        ([ITEM], "in_progress", None, ()),
        ([{"type": "web_search_call", "id": "w"}], "completed", Boundary.USER, ()),
        (
            [{"type": "local_shell_call", "call_id": "c1"}],
            "completed",
            Boundary.TOOL,
            (ToolCall("c1", "local_shell_call", None),),
        ),
        ([], "failed", None, ()),
    ],
)
def test_responses(output: Any, status: str, boundary: Any, tools: Any) -> None:
    """Items whose results the caller brings begin a tool wait; the server's own do not."""
    ending = read_answer({"id": "r1", "output": output, "status": status})
    assert (ending.boundary, ending.tools) == (boundary, tools)
    assert ending.failed == ("failed" if status == "failed" else None)


def test_usage_of_both_apis() -> None:
    """Prompt and cached tokens are read from either API; absent and odd ones are unknown."""
    for names in (
        ("prompt_tokens", "prompt_tokens_details"),
        ("input_tokens", "input_tokens_details"),
    ):
        usage = {names[0]: 9, names[1]: {"cached_tokens": 4}}
        ending = read_answer(chat(usage=usage))
        assert (ending.prompt, ending.cached) == (9, 4)
    ending = read_answer(chat(usage={"prompt_tokens": 9}))
    assert (ending.prompt, ending.cached) == (9, None)
    ending = read_answer(chat(usage={"prompt_tokens": "9"}))
    assert ending.prompt is None


def test_long_arguments_are_not_kept() -> None:
    """Arguments are kept until the result comes; a whole file among them is not."""
    [tool] = read_answer(chat("stop", function(arguments="x" * (MAX_ARGUMENT_CHARS + 1)))).tools
    assert tool.arguments is None


def chunk(delta: Any = None, finish: Any = None, index: int = 0, **more: Any) -> Any:
    """Return a chunk of a streamed chat completion."""
    members = {"content": None, "tool_calls": None, **(delta or {})}
    choice = SimpleNamespace(index=index, delta=SimpleNamespace(**members), finish_reason=finish)
    return SimpleNamespace(id="a1", choices=[choice], usage=None, **more)


def call_delta(at: int, **members: Any) -> Any:
    """Return a piece of a tool call."""
    inner = {name: members.pop(name, None) for name in ("name", "arguments")}
    return SimpleNamespace(
        index=at, id=members.get("id"), function=SimpleNamespace(**inner), custom=None
    )


@pytest.mark.parametrize(
    ("delta", "fresh"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"content": "a"}, True),
        ({"reasoning_content": "a"}, True),
        ({"reasoning": "a"}, True),
        ({"refusal": "a"}, True),
        ({"tool_calls": [call_delta(0, id="c1", name="search")]}, True),
        ({}, False),
    ],
)
def test_the_first_token_is_what_the_model_generated(delta: Any, fresh: bool) -> None:
    """A chunk with nothing but a role is no token; reasoning and tool calls are."""
    assert ChunkReader().feed(chunk(delta)) is fresh


def test_chunks_of_several_choices() -> None:
    """Each choice has its own tool calls and finish reason."""
    reader = ChunkReader()
    for index in (0, 1):
        call = call_delta(0, id=f"c{index}", name="search", arguments="{}")
        reader.feed(chunk({"tool_calls": [call]}, index=index))
        reader.feed(chunk(finish="tool_calls", index=index))
    assert [tool.id for tool in reader.ending().tools] == ["c0", "c1"]


def test_a_stream_without_finish_reason_is_not_complete() -> None:
    """Text that just stops is no answer."""
    reader = ChunkReader()
    reader.feed(chunk({"content": "a"}))
    assert reader.ending().boundary is None


@given(
    cuts=st.lists(st.integers(0, 19), max_size=6), finish=st.sampled_from(["tool_calls", "stop"])
)
def test_any_chunking_gives_the_same_ending(cuts: list[int], finish: str) -> None:
    """Arguments may arrive in any pieces: the tool call is the same."""
    arguments = '{"query": "a b c d"}'
    bounds = [0, *sorted(cuts), len(arguments)]
    reader = ChunkReader()
    reader.feed(chunk({"tool_calls": [call_delta(0, id="c1", name="search")]}))
    for start, end in itertools.pairwise(bounds):
        reader.feed(chunk({"tool_calls": [call_delta(0, arguments=arguments[start:end])]}))
    reader.feed(chunk(finish=finish))
    usage = SimpleNamespace(prompt_tokens=9, prompt_tokens_details=None)
    reader.feed(SimpleNamespace(id="a1", choices=[], usage=usage))
    assert reader.ending() == Ending(
        boundary=Boundary.TOOL,
        tools=(ToolCall("c1", "search", arguments),),
        prompt=9,
        cached=None,
        answer_id="a1",
    )


def test_response_events_end_with_the_response() -> None:
    """The last event holds the whole response; deltas show the first token."""
    reader = ChunkReader()
    whole = {"id": "r1", "output": [ITEM], "status": "completed"}
    assert not reader.feed(SimpleNamespace(type="response.created", response={}))
    assert reader.feed(SimpleNamespace(type="response.function_call_arguments.delta"))
    assert reader.ending().boundary is None
    assert not reader.feed(SimpleNamespace(type="response.completed", response=whole))
    assert reader.ending() == read_answer(whole)
