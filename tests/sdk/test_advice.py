"""What breaks reuse: found by comparing calls, said once, never with content."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

import turncache
from tests.sdk.support import TOOLS, assistant, result, system, user
from turncache.advice import Break, Finding, Match, findings, match, num_common, shape_of
from turncache.calls import read_call
from turncache.memo import Memo
from turncache.testing import FakeServer, Reply

CALLS = assistant(None, ("c1", "search"))
HISTORY: list[Any] = [system(), user(), CALLS, result(), assistant(), user("more")]


def read(messages: Any, **more: Any) -> Any:
    """Read a chat request."""
    return read_call({"model": "m", "messages": messages, **more}, Memo())


def found(before: Any, after: Any, **tools: Any) -> list[Finding]:
    """Return what two calls in a row show."""
    old = read(before, tools=tools.get("old", TOOLS))
    new = read(after, tools=tools.get("new", TOOLS))
    return list(findings(shape_of(old), new))


GROWN = [*HISTORY, assistant("and"), user("last")]


def changed(at: int, message: Any) -> list[Any]:
    """Return the grown history with another message."""
    return [*GROWN[:at], message, *GROWN[at + 1 :]]


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param(GROWN, [], id="grown"),
        pytest.param(HISTORY, [], id="repeated"),
        pytest.param(HISTORY[:4], [], id="earlier call again"),
        pytest.param(
            changed(0, system("It is 2026-11-29 10:15:00.")),
            [Finding(Break.TIME_IN_SYSTEM, 0)],
            id="time",
        ),
        pytest.param(
            changed(0, system("It is 1796000000.")),
            [Finding(Break.TIME_IN_SYSTEM, 0)],
            id="seconds",
        ),
        pytest.param(
            changed(0, system("be verbose")), [Finding(Break.SYSTEM_CHANGED, 0)], id="system"
        ),
        pytest.param(
            changed(3, result("c1", "[cleared]")),
            [Finding(Break.MESSAGE_REWRITTEN, 3)],
            id="old result",
        ),
        pytest.param(
            changed(2, assistant("", ("c1", "search"))),
            [Finding(Break.MESSAGE_REWRITTEN, 2)],
            id="null became empty",
        ),
        pytest.param(changed(4, assistant("another sample")), [], id="another sample"),
        pytest.param([GROWN[0], *GROWN[2:]], [Finding(Break.MESSAGES_DROPPED, 1)], id="window"),
        pytest.param([*HISTORY[:5], user("edited")], [], id="edited last message"),
    ],
)
def test_findings_name_the_message(after: Any, expected: Any) -> None:
    """Each change that costs reuse is named with the index of its message."""
    assert found(HISTORY, after) == expected


def test_tools_in_another_order() -> None:
    """Reordered tools, other definitions and missing tools are told apart."""
    assert found(HISTORY, GROWN, new=TOOLS[::-1]) == [Finding(Break.TOOLS_REORDERED)]
    swapped = json.loads(json.dumps(TOOLS))
    swapped[0]["function"] = dict(reversed(swapped[0]["function"].items()))
    assert found(HISTORY, GROWN, new=swapped) == [Finding(Break.TOOLS_CHANGED)]
    assert found(HISTORY, GROWN, new=[]) == [Finding(Break.TOOLS_CHANGED)]


def test_instructions_that_change() -> None:
    """Instructions of a response are its system prompt."""
    one = read_call({"input": "hello", "instructions": "be brief"}, Memo())
    two = read_call({"input": "hello", "instructions": "it is 10:15"}, Memo())
    [finding] = findings(shape_of(one), two)
    assert finding == Finding(Break.TIME_IN_SYSTEM, None)
    assert str(finding).startswith("the instructions changed")


def test_lineages_are_told_apart() -> None:
    """A sub-agent with the same session is no rewritten main chat."""
    main = shape_of(read(HISTORY))
    assert match(main, read(GROWN)) is Match.SAME_LINE
    assert match(main, read([system("title"), user("other")])) is Match.OTHER
    assert match(main, read([*HISTORY[:2], assistant("no"), user("x")])) is Match.FORK
    first = shape_of(read([system(), user()]))
    assert match(first, read([system("write a title"), user()])) is Match.OTHER


@pytest.mark.parametrize("same", range(5))
def test_num_common_is_the_common_prefix(same: int) -> None:
    """The first difference is found wherever it is."""
    one = b"".join(bytes([n]) * 8 for n in range(4))
    other = one[: same * 8] + b"x" * 8 * (4 - same)
    assert num_common(one, other) == same
    assert num_common(one[:16], one) == 2


def test_advice_is_said_once(
    client: turncache.OpenAI, server: FakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A clock in the system prompt is said once per process, and kept in the session."""
    with turncache.session("ticket") as session, caplog.at_level(logging.WARNING, "turncache"):
        history: list[Any] = [user("first secret"), assistant("sure"), user("second secret")]
        for minute in range(10, 14):
            client.chat.completions.create(
                model="m", messages=[system(f"it is 10:{minute}, secret"), *history]
            )
            history += [assistant("secret"), user("go on, secret")]
    [record] = caplog.records
    assert "message 0 (system) changed" in record.getMessage()
    assert "secret" not in caplog.text
    assert len(session.advice) == 1
    assert "advice: message 0 (system)" in str(session)


def test_advice_for_followed_conversations(client: turncache.OpenAI, server: FakeServer) -> None:
    """Without a session the conversation is followed, and advised, in spite of the clock."""
    history: list[Any] = [user(), assistant(), user("more")]
    for minute in (10, 11):
        client.chat.completions.create(model="m", messages=[system(f"it is 10:{minute}"), *history])
        history += [assistant(), user("go on")]
    [session] = client.automatic_sessions
    assert len(session.calls) == 2
    assert "date or time" in session.advice[0]


def test_a_message_that_is_changed_in_place_is_found(client: turncache.OpenAI) -> None:
    """A body that upstream does not copy may hold other content in the same objects."""
    messages = [system(), user(), assistant(), user("more"), assistant(), user("and more")]
    with turncache.session() as session:
        client.post("/chat/completions", body={"model": "m", "messages": messages}, cast_to=object)
        messages[3]["content"] = "something else"
        client.post("/chat/completions", body={"model": "m", "messages": messages}, cast_to=object)
    [advice] = session.advice
    assert advice.startswith("message 3 is not what it was")


@pytest.mark.parametrize("written", ['{"q": "x", "n": 1}', '{"n":1,"q":"x"}'])
def test_arguments_written_again_are_found(
    client: turncache.OpenAI, server: FakeServer, written: str
) -> None:
    """Arguments that went through a parser come back as other text than the model's."""
    server.script(Reply(tools=[("search", '{"q":"x","n":1}')]))
    with turncache.session() as session:
        answer = client.chat.completions.create(model="m", messages=[user()], tools=TOOLS)
        message: Any = answer.choices[0].message.model_dump(exclude_unset=True)
        message["tool_calls"][0]["function"]["arguments"] = written
        call_id = message["tool_calls"][0]["id"]
        client.chat.completions.create(
            model="m", messages=[user(), message, result(call_id)], tools=TOOLS
        )
    [advice] = session.advice
    assert advice.startswith("message 1 holds tool call arguments")


def test_untouched_arguments_are_no_finding(client: turncache.OpenAI, server: FakeServer) -> None:
    """An answer that is appended as it came breaks nothing, streamed or not."""
    server.script(Reply(tools=[("search", '{"q" :1}')]), Reply(tools=[("search", '{"q" :2}')]))
    with turncache.session() as session:
        messages: list[Any] = [user()]
        answer = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
        message = answer.choices[0].message
        assert message.tool_calls
        messages += [message, result(message.tool_calls[0].id)]
        stream = client.chat.completions.stream(model="m", messages=messages, tools=TOOLS)
        with stream as events:
            message = events.get_final_completion().choices[0].message
        assert message.tool_calls
        messages += [
            message.model_dump(exclude={"parsed", "audio"}, exclude_none=True),
            result(message.tool_calls[0].id),
        ]
        client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
    assert session.advice == ()
