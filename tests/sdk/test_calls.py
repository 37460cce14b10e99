"""Turn, call and cause from a body, and fingerprints that do not depend on the memo."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sdk.support import TOOLS, assistant, result, system, user
from turncache.calls import echoed_calls, place_in_turn, read_call
from turncache.memo import NO_TOOLS, Memo, read_tools
from turncache.protocol import Cause

U, T = Cause.USER, Cause.TOOL


def read(messages: Any, **more: Any) -> Any:
    """Read a chat request without memory."""
    return read_call({"model": "m", "messages": messages, **more}, Memo())


CALLS = assistant(None, ("c1", "search"))


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([user()], (1, 1, U), id="first"),
        pytest.param([system(), user()], (1, 1, U), id="system"),
        pytest.param([user(), user("and")], (1, 1, U), id="two messages, one turn"),
        pytest.param([user(), CALLS, result()], (1, 2, T), id="tool result"),
        pytest.param([user(), CALLS, result(), result("c2")], (1, 2, T), id="two results"),
        pytest.param([user(), CALLS, result(), CALLS, result("c2")], (1, 3, T), id="second wait"),
        pytest.param([user(), CALLS, result(), user("look")], (1, 2, T), id="result and note"),
        pytest.param([user(), CALLS, result(), assistant(), user()], (2, 1, U), id="2nd turn"),
        pytest.param([assistant("hi"), user()], (1, 1, U), id="greeting first"),
        pytest.param([user(), assistant("fi")], (1, 1, U), id="asked to go on"),
        pytest.param([user(), CALLS, result(), CALLS, system()], (1, 2, U), id="reminder"),
        pytest.param([], (1, 1, U), id="nothing"),
    ],
)
def test_turn_call_and_cause(messages: Any, expected: Any) -> None:
    """A tool result continues the turn, a user's message starts the next."""
    reading = read(messages)
    assert (reading.turn, reading.call, reading.cause) == expected


def test_responses_items_read_like_messages() -> None:
    """Output items are the model's, their outputs are tool results, a string is a user's."""
    items = [
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c1", "name": "search", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    reading = read_call({"model": "m", "input": items}, Memo())
    assert (reading.kinds, reading.turn, reading.call) == ("ummt", 1, 2)
    assert reading.results == ("c1",)
    assert list(echoed_calls(reading)) == [(2, "c1", "{}")]
    text = read_call({"model": "m", "input": "hello"}, Memo())
    assert text.history == read([user()]).history


def test_kept_history_shows_the_cause_only() -> None:
    """With previous_response_id or a conversation the body does not show turn and call."""
    for name, value in (("previous_response_id", "r1"), ("conversation", {"id": "r1"})):
        reading = read_call({"model": "m", "input": "more", name: value}, Memo())
        assert (reading.previous, reading.turn, reading.call) == ("r1", None, None)
        assert reading.cause is Cause.USER


def test_legacy_completions_show_nothing() -> None:
    """A prompt is text or tokens: no turn, call or cause is guessed from it."""
    for prompt in ("hello", [1, 2, 3]):
        reading = read_call({"model": "m", "prompt": prompt}, Memo())
        assert (reading.turn, reading.call, reading.cause) == (None, None, None)


def test_results_are_those_of_the_last_input() -> None:
    """Results of earlier waits are not brought again."""
    reading = read([user(), CALLS, result("c1"), CALLS, result("c2"), result("c3")])
    assert reading.results == ("c2", "c3")


def test_instructions_count_as_a_system_message() -> None:
    """Instructions are compared like a system prompt, apart from the history."""
    plain = read_call({"input": "hello"}, Memo())
    instructed = read_call({"input": "hello", "instructions": "be brief"}, Memo())
    assert plain.history == instructed.history
    assert (len(plain.system), len(instructed.system)) == (0, 8)
    assert plain.start == instructed.start == 0
    assert plain.system != instructed.system


@pytest.mark.parametrize(
    "changed",
    [
        {"role": "assistant", "content": ""},
        {"role": "assistant"},
        {"role": "assistant", "content": None, "refusal": None},
        {"role": "user", "content": None},
        {"role": "assistant", "content": [{"type": "text", "text": ""}]},
        assistant(None, ("c1", "search")),
    ],
    ids=json.dumps,
)
def test_every_change_of_a_message_shows(changed: Any) -> None:
    """Absent, null and empty content render differently, and so differ here."""
    message = {"role": "assistant", "content": None}
    assert read([user(), message]).history != read([user(), changed]).history


@pytest.mark.parametrize("inner", [False, True], ids=["call", "function"])
def test_a_member_more_in_a_tool_call_shows(inner: bool) -> None:
    """A tool call that holds more than the usual members is another message."""
    changed = copy.deepcopy(CALLS)
    call = changed["tool_calls"][0]
    (call["function"] if inner else call)["index"] = 0
    assert read([user(), CALLS]).history != read([user(), changed]).history


def test_key_order_of_a_message_does_not_matter() -> None:
    """Templates read a message by key: the order of its keys renders the same."""
    one = {"role": "tool", "tool_call_id": "c1", "content": "42", "name": "search"}
    other = dict(reversed(one.items()))
    assert read([one]).history == read([other]).history


def test_key_order_of_a_tool_matters() -> None:
    """Templates print a tool's schema as it comes."""
    one, other = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    tools = [
        [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        for schema in (one, other)
    ]
    first, second = (read_tools(each) for each in tools)
    assert first.names == second.names == ("f",)
    assert first.digest != second.digest
    assert read_tools(json.loads(json.dumps(tools[0]))) == first
    assert read_tools([]) is read_tools("nonsense") is NO_TOOLS


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=5,
)
MESSAGES = st.lists(
    st.one_of(
        st.sampled_from([user(), system(), result(), CALLS, assistant()]),
        st.builds(user, st.text(max_size=3)),
        st.dictionaries(
            st.sampled_from(["role", "type", "content", "tool_call_id", "tool_calls"]),
            JSON,
            max_size=4,
        ),
    ),
    max_size=9,
)


@given(
    histories=st.lists(MESSAGES, max_size=5),
    limit=st.sampled_from([1, 2, 32]),
    max_bytes=st.sampled_from([1500, 100_000]),
)
def test_the_memo_never_changes_a_reading(histories: list[Any], limit: int, max_bytes: int) -> None:
    """Whatever was read before, a reading is what it would be without."""
    memo = Memo(max_histories=limit, max_bytes=max_bytes)
    grown: list[Any] = []
    for history in histories:
        grown = [*grown, *history]
        for messages in (history, grown, json.loads(json.dumps(grown))):
            assert memo.read(messages) == Memo().read(messages)


@given(kinds=st.text("sumto", max_size=30))
def test_going_on_never_lowers_turn_or_call(kinds: str) -> None:
    """An answer and its tool result raise the call by one, an answer and a user the turn."""
    turn, call, _ = place_in_turn(kinds)
    assert place_in_turn(kinds + "mt") == (turn, call + 1, Cause.TOOL)
    asked = place_in_turn(kinds + "mu")
    assert asked[1:] == (1, Cause.USER)
    assert place_in_turn(kinds + "mumu") == (asked[0] + 1, 1, Cause.USER)


@pytest.mark.parametrize("seed", range(8))
def test_a_long_history_is_placed_like_a_fresh_one(seed: int) -> None:
    """What is counted while a history grows stays what its letters say."""
    shapes = {"s": system(), "u": user(), "m": CALLS, "t": result(), "o": {"role": "odd"}}
    chance = random.Random(seed)
    memo = Memo()
    messages: list[Any] = [user(), CALLS, result()]
    for _ in range(12):
        weights = (1, chance.choice((0, 1)), 30, 30, 1)
        kinds = chance.choices("sumto", weights, k=chance.randrange(1, 90))
        messages += [shapes[kind] for kind in kinds]
        known, _, turn, call = memo.read(messages)
        assert (turn, call) == place_in_turn(known)[:2]
        earlier = messages[: chance.randrange(1, len(messages))]
        assert memo.read(earlier) == Memo().read(earlier)


def test_tools_are_read_once() -> None:
    """The same definitions give the same names, and no more are kept than may be."""
    memo = Memo()
    for number in range(100):
        tools = [{"type": "function", "function": {"name": f"f{number}"}}]
        assert memo.read_tools(tools) == read_tools(tools)
        assert memo.read_tools(copy.deepcopy(tools)) is memo.read_tools(tools)
    assert len(memo._tools) <= 32
    assert memo.read_tools(()) is memo.read_tools([]) is NO_TOOLS


@given(history=MESSAGES, data=st.data())
def test_a_message_that_was_changed_in_place_is_noticed(history: list[Any], data: Any) -> None:
    """The same objects with other content are read as what they hold by then."""
    memo = Memo()
    parts = {"role": "user", "content": [{"type": "text", "text": "x"}]}
    messages = copy.deepcopy([user("a"), assistant(), parts, CALLS, result(), *history])
    memo.read(messages)
    changed = messages[data.draw(st.integers(0, len(messages) - 1))]
    if isinstance(changed.get("content"), list):
        changed["content"].append("more")
    elif isinstance(changed.get("tool_calls"), list) and changed["tool_calls"]:
        changed["tool_calls"].pop()
    else:
        changed["content"] = "rewritten"
    assert memo.read(messages) == Memo().read(messages)


def test_arguments_that_were_changed_in_place_are_noticed() -> None:
    """What the memo keeps of a tool call shares no container with the caller's."""
    memo = Memo()
    messages = copy.deepcopy([user(), CALLS, result(), assistant(), user()])
    memo.read(messages)
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"q": 1}'
    assert memo.read(messages) == Memo().read(messages)


def test_old_histories_leave_the_memo() -> None:
    """The memo holds no more text than it may."""
    memo = Memo(max_histories=2, max_bytes=1000)
    for number in range(9):
        memo.read([user(f"{number}"), assistant(), user(), user("x" * 300)])
        assert len(memo._histories) <= 2
        assert memo._num_bytes <= 1000
    memo.read([user("big"), assistant(), user(), user("x" * 5000)])
    assert memo._num_bytes == 0


def test_tools_are_named_in_order() -> None:
    """Names come from chat, responses and built-in tools."""
    tools = [*TOOLS, {"type": "function", "name": "flat"}, {"type": "web_search"}, None]
    assert read_tools(tools).names == (
        "search",
        "run_tests",
        "flat",
        "web_search",
        "",
    )
