"""Sessions: names, blocks, children, copies, and what other clients are given."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import pickle
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import (
    HELLO,
    RESPONSE_TOOLS,
    TOOLS,
    assistant,
    result,
    said,
    session_ids,
    user,
)
from turncache.errors import ProtocolError, UsageError
from turncache.ledger import MAX_CALLS, MAX_CALLS_AUTOMATIC, MAX_WAITING
from turncache.protocol import CallTags, identify, tags_from_headers
from turncache.sessions import MAX_SESSIONS, TOOL_DURATIONS
from turncache.testing import FakeServer, Reply


def ask(client: turncache.OpenAI, *messages: Any, **more: Any) -> Any:
    """Make a chat completion."""
    return client.chat.completions.create(model="m", messages=messages or HELLO, **more)


def test_a_named_session_outlives_its_block() -> None:
    """The same name is the same session, in a later block too."""
    with turncache.session("ticket") as first:
        pass
    with turncache.session("ticket") as second:
        assert turncache.current_session() is second
    assert first is second
    assert not first.ended


def test_an_anonymous_session_ends_with_its_block(
    client: turncache.OpenAI, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """After the block its calls have no session, and that is said once."""
    with turncache.session() as session:
        ask(client)
        with session:
            ask(client)
        ask(client)
    bound = client.with_session(session)
    ask(bound)
    ask(bound)
    assert session.ended
    assert session_ids(server.requests) == [session.id] * 3 + [None] * 2
    assert [record.name for record in caplog.records] == ["turncache"]
    assert turncache.session().id != session.id


def test_blocks_nest(client: turncache.OpenAI, server: FakeServer) -> None:
    """The innermost open block is the session of a call."""
    with turncache.session("outer"):
        ask(client)
        with turncache.session("inner"):
            ask(client)
        ask(client)
    assert session_ids(server.requests) == ["outer", "inner", "outer"]
    assert turncache.current_session() is None


def test_a_client_of_a_session_wins_over_a_block(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """with_session() is nearer to the call than the block around it."""
    with turncache.session("block"):
        ask(client.with_session("client"))
        ask(client.with_session(turncache.session("object")))
    assert session_ids(server.requests) == ["client", "object"]


def test_turns_and_calls_of_a_tool_loop(client: turncache.OpenAI, server: FakeServer) -> None:
    """A loop of tool calls is one turn of several calls; a user's message starts the next."""
    server.script(Reply(tools=[("search", "{}")]), Reply(tools=[("search", "{}")]), Reply())
    messages: list[Any] = [user()]
    with turncache.session() as session:
        for _ in range(3):
            message = ask(client, *messages, tools=TOOLS).choices[0].message
            messages.append(message)
            messages += [result(call.id) for call in message.tool_calls or ()]
        ask(client, *messages, user("and"), tools=TOOLS)
    expected = [(1, 1, "user"), (1, 2, "tool"), (1, 3, "tool"), (2, 1, "user")]
    assert [said(request) for request in server.requests] == expected
    boundaries = [call.boundary for call in session.calls]
    assert boundaries == ["tool", "tool", "user", "tool"]


def test_another_process_says_the_same(client: turncache.OpenAI, server: FakeServer) -> None:
    """Turn and call come from the body: a restart and a replay change nothing."""
    body = [user(), assistant(None, ("c1", "search")), result(), assistant(), user("x")]
    ask(client.with_session("one"), *body)
    ask(client.with_session("one"), *body)
    ask(client.with_session("two"), *body)
    assert {said(request) for request in server.requests} == {(2, 1, "user")}


def test_answers_that_the_server_keeps(client: turncache.OpenAI, server: FakeServer) -> None:
    """With previous_response_id, turn and call continue those of the answer."""
    server.script(Reply(tools=[("search", "{}")]), Reply(), Reply(), Reply())
    with turncache.session() as session:
        first = client.responses.create(model="m", input="hello", tools=RESPONSE_TOOLS)
        output: Any = {"type": "function_call_output", "call_id": "x", "output": "42"}
        second = client.responses.create(model="m", input=[output], previous_response_id=first.id)
        third = client.responses.create(model="m", input="x", previous_response_id=second.id)
        client.responses.create(model="m", input="x", previous_response_id=second.id)
        client.responses.create(model="m", input="x", previous_response_id="of another day")
    assert third.id
    expected = [(1, 1), (1, 2), (2, 1), (2, 1), (None, None)]
    assert [said(request)[:2] for request in server.requests] == expected
    assert [call.boundary for call in session.calls][:2] == ["tool", "user"]


def test_children_name_their_parent(client: turncache.OpenAI, server: FakeServer) -> None:
    """A child is a session of its own, the same one every time, beside its parent."""
    parent = turncache.session("ticket")
    with parent.child("researcher") as child:
        ask(client)
    assert child is parent.child("researcher")
    assert server.requests[0].headers["x-session-id"] == "ticket/researcher"
    assert server.requests[0].headers["x-parent-session-id"] == "ticket"
    long = turncache.session("t" * 250).child("researcher")
    assert len(long.id) <= 256
    assert long.parent_id == "t" * 250


@pytest.mark.parametrize("name", ["", "two words", "naïve", "a\r\nX-Evil: 1", "x" * 257])
def test_illegal_ids_are_refused(client: turncache.OpenAI, name: str) -> None:
    """An id that cannot travel is an error where it is given, with the way out."""
    for use in (turncache.session, client.with_session):
        with pytest.raises(ProtocolError, match=r"hash.*opaque_id"):
            use(name)
        with pytest.raises(ProtocolError, match="4711 is no session id: expected text"):
            use(4711)  # type: ignore[arg-type]
    legal = turncache.opaque_id(name)
    assert turncache.session(legal).id == legal
    assert legal == turncache.opaque_id(name) != turncache.opaque_id(name + "x")


def test_illegal_settings_are_refused() -> None:
    """Retention and priority that mean nothing are errors."""
    with pytest.raises(UsageError, match="retain_s=-1"):
        turncache.session(retain_s=-1)
    with pytest.raises(UsageError, match="retain_s=nan"):
        turncache.session(retain_s=float("nan"))
    with pytest.raises(UsageError, match="retain_s='5m'"):
        turncache.session(retain_s="5m")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="priority=101"):
        turncache.session(priority=101)
    with pytest.raises(UsageError, match="priority='high'"):
        turncache.session(priority="high")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"priority=1\.5"):
        turncache.session(priority=1.5)  # type: ignore[arg-type]


def test_retention_and_priority_travel(client: turncache.OpenAI, server: FakeServer) -> None:
    """What a session asks for is in every call of it."""
    with turncache.session("ticket", retain_s=30, priority=80):
        ask(client)
    assert "retain=30.0, priority=80" in server.requests[0].headers["turncache"]
    assert turncache.session("ticket").retain_s == 30


def test_a_session_pickles_to_its_id() -> None:
    """Another process gets a session with the same id; in this one it is the same object."""
    named = turncache.session("ticket", parent="root", priority=70)
    assert pickle.loads(pickle.dumps(named)) is named
    assert copy.deepcopy(named) is copy.copy(named) is named
    anonymous = turncache.session()
    twin = pickle.loads(pickle.dumps(anonymous))
    assert (twin.id, twin.ended) == (anonymous.id, False)


def test_the_registry_is_bounded() -> None:
    """The oldest names are forgotten, unless somebody still holds the session."""
    from turncache import sessions

    held = turncache.session("held")
    for number in range(MAX_SESSIONS):
        turncache.session(f"s{number}")
    gc.collect()
    assert len(sessions._recent) == MAX_SESSIONS
    assert turncache.session("held") is held
    assert len(sessions._alive) <= MAX_SESSIONS + 1


def test_calls_are_bounded(client: turncache.OpenAI, server: FakeServer) -> None:
    """A session keeps its latest calls only, and few waiting tool calls."""
    from turncache.answers import ToolCall
    from turncache.ledger import Ledger
    from turncache.records import Call

    for automatic, limit in ((False, MAX_CALLS), (True, MAX_CALLS_AUTOMATIC)):
        ledger = Ledger(automatic=automatic)
        for number in range(2 * limit):
            ledger.begin(Call(started_s=number, model="m"))
        assert [call.started_s for call in ledger.calls] == list(range(limit, 2 * limit))
        for number in range(2 * MAX_WAITING):
            ledger.wait_for([ToolCall(f"c{number}", "f", None)], 0.0)
        ids = [f"c{number}" for number in range(2 * MAX_WAITING)]
        assert len(ledger.take_results(ids)) == MAX_WAITING
        assert ledger.take_results(ids) == {}


def test_headers_for_other_clients() -> None:
    """headers() says for any HTTP client what ours would send."""
    session = turncache.session("ticket", parent="root")
    messages = [user(), assistant(None, ("c1", "search")), result()]
    TOOL_DURATIONS.observe(["search"], 2.0)
    headers = session.headers(messages=messages, tools=TOOLS, final=True)
    lower = {name.lower(): value for name, value in headers.items()}
    identity = identify(lower, {})
    assert identity is not None
    assert tags_from_headers(lower, identity) == CallTags(
        session_id="ticket",
        parent_id="root",
        final=True,
        turn=1,
        call=2,
        cause=turncache.protocol.Cause.TOOL,
        tools={"*": 2.0, "search": 2.0},
    )
    assert "cause" not in session.headers()["Turncache"]
    assert "cause=compaction" in session.headers(input="x", cause="compaction")["Turncache"]
    with pytest.raises(UsageError, match="cause='boredom'"):
        session.headers(cause="boredom")


def test_headers_understand_message_objects(client: turncache.OpenAI, server: FakeServer) -> None:
    """An answer's message may be passed as the object that it is."""
    server.script(Reply(tools=[("search", "{}")]))
    message = ask(client, tools=TOOLS).choices[0].message
    headers = turncache.session("t").headers(messages=[user(), message, result("c1")])
    assert "turn=1, call=2, cause=tool" in headers["Turncache"]


def test_the_last_call_is_marked(client: turncache.OpenAI, server: FakeServer) -> None:
    """X-Session-Final makes the record's boundary final."""
    with turncache.session() as session:
        ask(client, extra_headers={"X-Session-Final": "true"})
    assert server.requests[0].headers["x-session-final"] == "true"
    assert session.calls[0].boundary == "final"


def test_automatic_sessions(client: turncache.OpenAI, server: FakeServer) -> None:
    """Without a session a conversation is followed; another one is another session."""
    ask(client, user("a"))
    ask(client, user("a"), assistant(), user("more"))
    ask(client, user("b"))
    one, same, other = session_ids(server.requests)
    assert one == same != other
    assert [session.id for session in client.automatic_sessions] == [one, other]
    assert all(session.automatic for session in client.automatic_sessions)


def test_a_branch_names_its_parent(client: turncache.OpenAI, server: FakeServer) -> None:
    """A conversation that leaves another's history is its child, caused by a fork."""
    ask(client, user("a"))
    ask(client, user("a"), assistant("x"), user("left"))
    ask(client, user("a"), assistant("y"), user("right"))
    main, _, branch = server.requests
    assert branch.headers["x-parent-session-id"] == main.headers["x-session-id"]
    assert said(branch) == (2, 1, "fork")


def test_legacy_completions_are_not_followed(client: turncache.OpenAI, server: FakeServer) -> None:
    """A text prompt without a session is nobody's."""
    client.completions.create(model="m", prompt="hello")
    assert session_ids(server.requests) == [None]


def test_other_clients_follow_their_own(client: turncache.OpenAI, server: FakeServer) -> None:
    """Two clients with one conversation have two sessions: nothing leaks between them."""
    other = turncache.OpenAI(base_url=server.url, api_key="other", http_client=client._client)
    ask(client)
    ask(other)
    first, second = session_ids(server.requests)
    assert first != second


def _child(client: turncache.OpenAI) -> None:
    with openai.DefaultHttpxClient() as http_client:
        ask(client.with_options(http_client=http_client))


# Python 3.12 and later warn about every fork of a process with threads.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_sessions_of_its_own(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """Two processes never share an automatic session."""
    ask(client)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(client,))
    process.start()
    process.join(30)
    ask(client)
    parent, child, parent_again = session_ids(server.requests)
    assert process.exitcode == 0
    assert parent == parent_again != child
