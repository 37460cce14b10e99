"""Conversations of clients that name no session."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.engine import fake_pair
from tests.server.router.agents import (
    ChatAgent,
    CodingAgent,
    MessagesAgent,
    ResponsesAgent,
    turn,
)
from tests.server.router.conftest import Pair
from tests.server.router.support import bench, outcome_of
from turncache_server.router.apis import APIS
from turncache_server.router.body import Body
from turncache_server.router.following import Conversations, History, Said
from turncache_server.router.histories import chat_history, messages_history, response_history

pytestmark = pytest.mark.anyio

FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
CALL = Said(text="", calls=(("search", '{"query":"x","top":3}'),))


class Nameless:
    """An agent whose requests have lost every id on their way."""

    def __init__(self, agent: CodingAgent) -> None:
        self._agent = agent
        self.path, self.ask, self.take = agent.path, agent.ask, agent.take

    def request(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Return body and headers of the next call."""
        body, _ = self._agent.request()
        named = ("metadata", "prompt_cache_key")
        return {name: value for name, value in body.items() if name not in named}, {}


def body_of(**members: Any) -> Body:
    """Make a body."""
    return Body.parse(json.dumps(members).encode(), max_depth=100)


def read_history(scope: str, messages: list[dict[str, Any]]) -> History:
    """Read the messages of a chat completion."""
    history = chat_history(scope, body_of(messages=messages))
    assert history is not None
    return history


def known(said: Said, messages: list[dict[str, Any]] | None = None) -> Conversations:
    """Return a table with one conversation."""
    table = Conversations(10)
    table.answered(read_history("m", messages or FIRST).with_answer(said), "s")
    return table


def then(*messages: dict[str, Any]) -> History:
    """Read a history that goes on after the first messages."""
    return read_history("m", [*FIRST, *messages])


@pytest.mark.parametrize(
    "agent",
    [ChatAgent({}), Nameless(MessagesAgent("s")), Nameless(ResponsesAgent("s"))],
    ids=["chat", "messages", "responses"],
)
async def test_an_agent_that_sends_no_id_loses_nothing(agent: CodingAgent | Nameless) -> None:
    """It is one session over 30 calls with tools, on one of several engines."""
    async with fake_pair(decodes=3) as ([prefill], decodes), bench(prefill, *decodes) as running:
        answers = []
        while len(answers) < 30:
            prefill.kv.flush()
            answers += await turn(agent, running.http, f"Do thing {len(answers)}. " * 5)
        outcomes = [outcome_of(answer) for answer in answers]
        assert sum(outcome.lost for outcome in outcomes) == 0
        assert [outcome.plan for outcome in outcomes] == ["cold", *["return"] * (len(outcomes) - 1)]
        seen = [one.xargs for engine in decodes for one in engine.seen]
        assert len({xargs["tc_session"] for xargs in seen}) == 1
        assert all("tc_retain_s" not in xargs for xargs in seen)


async def test_a_title_is_not_the_conversation(pair: Pair) -> None:
    """A side call with the same first question is a session of its own, and not kept."""
    agent = ChatAgent({})
    await turn(agent, pair.bench.http, "Do this. " * 20)
    main = pair.decode.seen[-1].xargs["tc_session"]
    await pair.bench.chat(messages=[*agent.messages[:2], {"role": "user", "content": "A title."}])
    title = pair.decode.seen[-1].xargs
    assert title["tc_session"] != main
    assert title["tc_retain_s"] == 0
    await turn(agent, pair.bench.http, "And that. " * 20)
    assert pair.decode.seen[-1].xargs["tc_session"] == main


async def test_a_conversation_without_tools_is_kept_from_its_second_call(pair: Pair) -> None:
    """A single question costs no space; whoever goes on is expected to go on again."""
    messages = [{"role": "user", "content": "Where does Laura live? " * 6}]
    first = (await pair.bench.chat(messages=messages)).json()["choices"][0]["message"]
    assert pair.decode.seen[-1].xargs["tc_retain_s"] == 0
    await pair.bench.chat(messages=[*messages, first, {"role": "user", "content": "And Tom?"}])
    assert "tc_retain_s" not in pair.decode.seen[-1].xargs


async def test_following_can_be_switched_off() -> None:
    """Then a call without an id is nobody's, whatever it continues."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, follow_conversations=False) as running,
    ):
        agent = ChatAgent({})
        await turn(agent, running.http, "Do this.")
        sessions = {seen.xargs["tc_session"] for seen in decode.seen}
        assert len(sessions) == len(decode.seen) == 2
        assert {seen.xargs["tc_retain_s"] for seen in decode.seen} == {0}


def test_the_answer_has_to_be_in_the_history() -> None:
    """Strangers who begin alike, or continue with another answer, are strangers."""
    table = known(Said(text="Hi!"))
    asked = {"role": "user", "content": "And?"}
    assert table.session_of(then({"role": "assistant", "content": "Hi!"}, asked)) == "s"
    assert table.session_of(then()) is None
    assert table.session_of(then({"role": "assistant", "content": "Hey!"}, asked)) is None
    other = read_history("other", [*FIRST, {"role": "assistant", "content": "Hi!"}, asked])
    assert table.session_of(other) is None


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Hi!\n"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hi!"}]},
        {"role": "assistant", "content": "Hi!", "reasoning": "hm", "tool_calls": None},
    ],
)
def test_forms_of_one_answer_are_one(message: dict[str, Any]) -> None:
    """Text or parts, stripped or not, with or without reasoning: it is the same answer."""
    assert known(Said(text="Hi!")).session_of(then(message)) == "s"


def test_arguments_may_be_written_again() -> None:
    """Clients parse arguments and write them with other spaces and another order of names."""
    function = {"name": "search", "arguments": '{"top": 3, "query": "x"}'}
    call = {"id": "c", "type": "function", "function": function}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert known(CALL).session_of(then(said, {"role": "tool", "content": "y"})) == "s"
    function["arguments"] = '{"top": 4, "query": "x"}'
    assert known(CALL).session_of(then(said)) is None


def test_marks_of_caching_do_not_count() -> None:
    """A mark on the last message that moves on makes no other conversation."""
    marked = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    table = known(Said(text="Hi!"), [FIRST[0], {"role": "user", "content": [marked]}])
    assert table.session_of(then({"role": "assistant", "content": "Hi!"})) == "s"


def test_a_client_that_drops_its_latest_answers_goes_on() -> None:
    """An earlier answer is found when the latest is unknown."""
    table = known(Said(text="Hi!"))
    history = then(
        {"role": "assistant", "content": "Hi!"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "never said"},
    )
    assert table.session_of(history) == "s"


def test_the_table_is_bounded() -> None:
    """The conversation that was used least recently is forgotten first."""
    table = Conversations(2)
    for name in "abc":
        table.answered(read_history("m", FIRST).with_answer(Said(text=name)), name)
    assert len(table) == 2
    assert table.session_of(then({"role": "assistant", "content": "a"})) is None
    assert table.session_of(then({"role": "assistant", "content": "c"})) == "c"


def test_a_message_comes_back_without_thinking_and_with_the_billing_line_of_its_time() -> None:
    """What vLLM's template does not get, or drops, is not part of a conversation."""
    billed = [{"type": "text", "text": "x-anthropic-billing-header: cch=1"}]
    prompt = [{"type": "text", "text": "Be brief."}]
    asked = {"role": "user", "content": "Hello"}
    history = messages_history("m", body_of(system=billed + prompt, messages=[asked]))
    assert history is not None
    table = Conversations(10)
    said = Said(text="Hi!", calls=(("search", '{"top":3,"query":"x"}'),))
    table.answered(history.with_answer(said), "s")
    answer = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "Hi!"},
            {"type": "tool_use", "id": "t", "name": "search", "input": {"query": "x", "top": 3}},
        ],
    }
    result = {"type": "tool_result", "tool_use_id": "t", "content": "found"}
    messages = [asked, answer, {"role": "user", "content": [result]}]
    billed[0]["text"] += "2"
    later = messages_history("m", body_of(system=billed + prompt, messages=messages))
    assert later is not None
    assert table.session_of(later) == "s"
    other = messages_history("m", body_of(system="Be long.", messages=messages))
    assert other is not None
    assert table.session_of(other) is None


def test_a_response_comes_back_as_its_items() -> None:
    """Reasoning, message and parallel calls are one answer, with or without ids of items."""
    history = response_history("m", body_of(instructions="Be brief.", input="Hello"))
    assert history is not None
    table = Conversations(10)
    calls = (("shell", '{"a": 1}'), ("patch", "*** Begin"))
    table.answered(history.with_answer(Said(text="Hi!", calls=calls)), "s")
    part = {"type": "output_text", "text": "Hi!", "annotations": []}
    items = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"},
        {"type": "message", "id": "m", "role": "assistant", "content": [part]},
        {"type": "function_call", "call_id": "1", "name": "shell", "arguments": '{"a":1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "patch", "input": "*** Begin"},
        {"type": "function_call_output", "call_id": "1", "output": "found"},
    ]
    later = response_history("m", body_of(instructions="Be brief.", input=items))
    assert later is not None
    assert table.session_of(later) == "s"
    kept = body_of(input=items, previous_response_id="resp_1")
    assert response_history("m", kept) is None


def test_what_is_new_is_what_came_after_the_latest_answer() -> None:
    """Its size bounds what an engine that has the rest must compute."""
    asked = {"role": "user", "content": "x" * 500}
    longer = then({"role": "assistant", "content": "y" * 4000}, asked)
    assert 500 <= longer.new_bytes < 600
    assert then(asked).new_bytes > longer.new_bytes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=4) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)
KINDS = st.sampled_from(["text", "thinking", "tool_use", "tool_result"])
PART = st.fixed_dictionaries({"type": KINDS | JSON}, optional={"text": JSON, "content": JSON})
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool"]) | JSON,
            "type": st.sampled_from(["function_call", "message", "reasoning"]) | JSON,
            "content": JSON | st.lists(PART, max_size=3),
            "output": JSON,
            "tool_calls": JSON,
        },
    ),
    max_size=4,
)


# Wide JSON is slow to draw on a busy machine, and no sign of anything.
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(MESSAGES, JSON)
def test_any_messages_can_be_read(messages: list[dict[str, Any]], other: Any) -> None:
    """Whatever a body holds, following it raises nothing and is a function of it."""
    for api in APIS:
        body = body_of(messages=messages, input=messages, system=other, instructions=other)
        if isinstance(other, list | str | None):
            assert api.history("m", body) == api.history("m", body)
