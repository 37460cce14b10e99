"""What a user is shown: the outcome of a result, and the table of a session."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, TOOLS, assistant, system, user
from turncache.protocol import Outcome, Plan, Reason
from turncache.records import Call, CallRecord
from turncache.report import RESULTS, totals
from turncache.results import WeakTable
from turncache.testing import Failure, FakeServer, Reply

OUTCOME = Outcome(
    prompt=4171, local=32, returned=3968, computed=171, plan=Plan.RETURN, reason=Reason.OK
)
SAID: dict[str, str | None] = {"Turncache-Outcome": OUTCOME.to_header()}


def test_outcome_of_every_kind_of_result(client: turncache.OpenAI, server: FakeServer) -> None:
    """Results, streams, helpers, raw responses and errors all lead to their outcome."""
    server.script(*[Reply(headers=SAID)] * 6)
    create = client.chat.completions.create
    found = turncache.outcome(create(model="m", messages=HELLO))
    assert found == OUTCOME
    assert str(found) == OUTCOME.to_header(), "as it is printed, it reads as it was sent"
    with create(model="m", messages=HELLO, stream=True) as stream:
        assert turncache.outcome(stream) == OUTCOME
    with client.chat.completions.stream(model="m", messages=HELLO) as helper:
        assert turncache.outcome(helper) == OUTCOME
    raw = client.chat.completions.with_raw_response.create(model="m", messages=HELLO)
    assert turncache.outcome(raw) == turncache.outcome(raw.parse()) == OUTCOME
    assert turncache.outcome(raw.http_response) == OUTCOME
    api = client.chat.completions.with_streaming_response
    with api.create(model="m", messages=HELLO) as response:
        assert turncache.outcome(response) == OUTCOME
    assert turncache.outcome(client.responses.create(model="m", input="hello")) == OUTCOME


def test_outcome_of_an_error(client: turncache.OpenAI, server: FakeServer) -> None:
    """An error that carries an outcome shows it."""
    headers = {"Turncache": "v=1", "Turncache-Outcome": OUTCOME.to_header()}
    server.script(Failure(status=400, headers=headers))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HELLO)
    assert turncache.outcome(caught.value) == OUTCOME


@pytest.mark.parametrize("text", [None, "", "prompt=1", "prompt=9, local=1", "???"])
def test_no_outcome_is_none(client: turncache.OpenAI, server: FakeServer, text: str | None) -> None:
    """A server that says nothing, or nonsense, gives None; so does any other object."""
    server.script(Reply(headers={"Turncache-Outcome": text}))
    answer = client.chat.completions.create(model="m", messages=HELLO)
    assert turncache.outcome(answer) is None
    for other in (None, "text", object()):
        assert turncache.outcome(other) is None


def test_session_of_a_result(client: turncache.OpenAI, server: FakeServer) -> None:
    """A result leads to its session: the way to an automatic one."""
    answer = client.chat.completions.create(model="m", messages=HELLO)
    session = turncache.session_of(answer)
    assert session is not None
    assert session.automatic
    assert session.calls[0].prompt is not None
    with turncache.session("ticket") as named:
        stream: Any = client.chat.completions.create(model="m", messages=HELLO, stream=True)
    assert turncache.session_of(stream) is named
    stream.close()
    assert turncache.session_of(object()) is None


def test_results_are_kept_no_longer_than_they_live(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """The table of results holds none of them."""
    gc.collect()
    before = len(RESULTS)
    answer: Any = client.chat.completions.create(model="m", messages=HELLO)
    assert len(RESULTS) == before + 1
    del answer
    assert len(RESULTS) == before


def test_a_call_leaves_no_cycle(client: turncache.OpenAI, server: FakeServer) -> None:
    """Messages and answer are freed with their last reference, without the collector."""

    class Text(str):
        """A string that can be watched."""

        __slots__ = ("__weakref__",)

    text = Text("hello")
    watched = weakref.ref(text)
    gc.disable()
    try:
        stock = openai.OpenAI(base_url=server.url, api_key="-", http_client=client._client)
        for caller in (stock, client.with_session("ticket")):
            text = Text("hello")
            watched = weakref.ref(text)
            caller.chat.completions.create(model="m", messages=[user(text)])
            del text
            assert watched() is None, type(caller)
    finally:
        gc.enable()


def test_a_weak_table_tells_equal_objects_apart() -> None:
    """Results are known by identity: equal answers of two calls are two results."""

    class Equal:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    table: WeakTable[int] = WeakTable()
    one, other = Equal(), Equal()
    table.put(one, 1)
    table.put(other, 2)
    table.put("text has no weak references", 3)
    assert (table.get(one), table.get(other), len(table)) == (1, 2, 2)
    assert table.get("text has no weak references") is None


def loop(client: turncache.OpenAI, server: FakeServer) -> turncache.Session:
    """Make three calls of one session, the last with a broken answer."""
    server.script(
        Reply(headers=SAID, tools=[("search", "{}")]),
        Reply(headers={"Turncache-Outcome": None}),
        Failure(status=400),
    )
    with turncache.session("ticket-4711") as session:
        history: list[Any] = [system("it is 10:15"), user(), assistant(), user("more")]
        client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        history = [system("it is 10:16"), *history[1:], assistant(), user("<b>")]
        client.chat.completions.create(model="m", messages=history, tools=TOOLS)
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(model="m", messages=history, tools=TOOLS)
    return session


def test_the_table_has_a_line_per_call_with_units(
    client: turncache.OpenAI, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """print(session) shows totals, units, one line per call, and advice."""
    monkeypatch.delenv("COLUMNS", raising=False)
    head, names, units, *lines = str(loop(client, server)).splitlines()
    assert head.startswith("session ticket-4711: 3 calls, ")
    assert ", 0 lost" in head
    assert names.split() == [
        *("turn", "call", "cause", "boundary", "prompt", "local", "returned", "computed"),
        *("lost", "plan", "reason", "ttft", "total"),
    ]
    assert units.split() == ["tokens"] * 5 + ["s"] * 2
    first, second, failed, advice = lines
    assert first.split()[:11] == [
        *("2", "1", "user", "tool", "4,171", "32", "3,968", "171", "0", "return", "ok"),
    ]
    *_, prompt, local, returned, computed, lost, plan, reason, _, _ = second.split()
    assert (returned, lost, plan, reason) == ("-", "-", "-", "-")
    assert int(local) + int(computed) == int(prompt)
    assert failed.split()[3:9] == ["BadRequestError", *["-"] * 5]
    assert advice.startswith("advice: message 0 (system)")
    ends = {line.rindex("s", 0, len(names)) for line in (units,)}
    assert ends == {len(names) - 1}


def cells_of(text: str) -> list[list[str]]:
    """Return what a table says of each call, whatever stands beside or below what."""
    parts = [
        [line.split() for line in part.splitlines() if line.split()[0].isdigit()]
        for part in text.split("\n\n")
    ]
    return [
        [*rows[0][:2], *(cell for row in rows for cell in row[2:])]
        for rows in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize(("columns", "num_parts"), [(120, 1), (80, 2), (60, 3), (40, 4), (1, 11)])
def test_a_narrow_terminal_loses_no_figure(
    client: turncache.OpenAI,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    columns: int,
    num_parts: int,
) -> None:
    """What does not fit beside the rest stands below it, and is named there again."""
    session = loop(client, server)
    monkeypatch.setenv("COLUMNS", "200")
    wide = str(session).splitlines()[1:-1]
    monkeypatch.setenv("COLUMNS", str(columns))
    head, *lines, advice = str(session).splitlines()
    assert head.startswith("session ticket-4711: 3 calls, ")
    assert advice.startswith("advice: ")
    text = "\n".join(lines)
    assert text.count("turn  call") == num_parts
    assert cells_of(text) == cells_of("\n".join(wide))
    if columns >= 40:
        assert max(map(len, lines)) <= columns


def test_an_empty_session_prints() -> None:
    """A session without calls is one line."""
    expected = "session ticket: 0 calls, no prompt tokens reported"
    assert str(turncache.session("ticket")) == expected
    assert repr(turncache.session("ticket", parent="p")) == (
        "<Session 'ticket', parent_id='p', 0 calls>"
    )


def test_notebooks_get_html(client: turncache.OpenAI, server: FakeServer) -> None:
    """The HTML has the same cells and escapes what it shows."""
    session = loop(client, server)
    html = session._repr_html_()
    assert html.count("<tr>") == 1 + 3
    assert "<th>prompt (tokens)</th>" in html
    assert "3,968" in html
    assert "<b>" not in html
    assert "<li>message 0 (system)" in html


def test_json_has_everything(client: turncache.OpenAI, server: FakeServer) -> None:
    """to_json() gives totals, calls and advice as plain JSON."""
    session = loop(client, server)
    report = json.loads(session.to_json())
    assert report["session"] == "ticket-4711"
    assert report["totals"]["calls"] == 3
    assert report["calls"][0]["returned"] == 3968
    assert report["calls"][0]["boundary"] == "tool"
    assert report["calls"][1]["lost"] is None
    assert report["calls"] == [call.to_dict() for call in session.calls]
    assert len(report["advice"]) == 1


def test_totals_count_what_is_known() -> None:
    """A call without numbers is counted as a call, and nowhere else."""
    known = CallRecord(
        turn=1, call=1, cause=None, boundary=None, model="m", prompt=10, local=4, seconds=1.0
    )
    silent = CallRecord(turn=1, call=2, cause=None, boundary=None, model="m", seconds=1.0)
    total = totals([known, silent])
    assert (total.num_calls, total.prompt, total.reused, total.lost) == (2, 10, 4, None)
    assert total.reused_share == 0.4
    assert totals([]).reused_share is None


def test_a_running_call_has_no_record() -> None:
    """A record is of a call that has ended."""
    assert Call(started_s=1.0, model="m").record() is None
