"""``turncache doctor`` for a server, and for a log of requests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm_server import BASE_URL, look
from tests.sdk.support import assistant, result, system, user
from tests.tools.conftest import Ran
from turncache.testing import Failure, FakeServer, Reply, forget_everything
from turncache_tools.doctor_log import look_at_log

Run = Callable[..., Ran]
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}
SECOND = {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def fresh_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings from outside, and nothing learned."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("TURNCACHE_PROFILE", raising=False)
    forget_everything()


def test_a_server_that_lacks_nothing() -> None:
    """Everything is ok but that no turncache answers."""
    verdicts = {subject: finding.verdict for subject, finding in look().items()}
    assert verdicts == {
        BASE_URL: "ok",
        "turncache": "note",
        "usage details": "ok",
        "prefix caching": "ok",
        "tool parser": "ok",
        "chat template": "ok",
    }


@pytest.mark.parametrize(
    ("flags", "subject", "verdict", "detail"),
    [
        ({"caching": False}, "prefix caching", "failed", "--enable-prefix-caching"),
        ({"details": False}, "usage details", "note", "--enable-prompt-tokens-details"),
        ({"details": False}, "prefix caching", "note", "cannot be seen"),
        ({"tools": False}, "tool parser", "failed", "--enable-auto-tool-choice"),
        ({"calls": False}, "tool parser", "note", "called none"),
        ({"calls": False, "says": "<tool_call>{}"}, "tool parser", "failed", "as text"),
        ({"template": "strips"}, "chat template", "note", "strips reasoning"),
        ({"template": "drops"}, "chat template", "note", "never rendered"),
        ({"template": "none"}, "chat template", "note", "no /tokenize"),
        ({"headers": {"Turncache": "v=1"}}, "turncache", "note", "extension is off"),
        ({"models": []}, BASE_URL, "failed", "--model"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_a_server_lacks_is_named(
    flags: dict[str, Any], subject: str, verdict: str, detail: str
) -> None:
    """The flag that would repair it is in the finding."""
    finding = look(**flags)[subject]
    assert finding.verdict == verdict
    assert detail in finding.detail


def test_a_url_without_a_path_means_v1(turncache: Run) -> None:
    """The address of a server is enough."""
    with FakeServer() as server:
        ran = turncache("doctor", "--base-url", server.url.removesuffix("/v1"), "--json")
        paths = {request.path for request in server.requests}
    assert json.loads(ran.out)[0]["subject"] == server.url
    assert all(path.startswith("/v1/") for path in paths if "tokenize" not in path)


def test_a_router_of_ours_is_recognised(turncache: Run) -> None:
    """Its outcomes are believed, the session that was used is ended, and the code is 0."""
    with FakeServer() as server:
        server.script(Reply(), Reply(), Reply(tools=[("get_time", {})]))
        ran = turncache("doctor", "--base-url", server.url, "--json")
        findings = {f["subject"]: f for f in json.loads(ran.out)}
        assert findings["turncache"]["verdict"] == "ok"
        assert findings["prefix caching"]["verdict"] == "ok"
        assert findings["tool parser"]["verdict"] == "ok"
        assert ran.code == 0
        assert all("vllm" not in subject for subject in findings)


@pytest.mark.parametrize(
    ("failure", "detail"),
    [
        (Failure(status=401), "--api-key"),
        (Failure(status=500, message="boom"), "status 500"),
    ],
)
def test_a_server_that_refuses(turncache: Run, failure: Failure, detail: str) -> None:
    """The finding says what to do; the code is 1."""
    with FakeServer() as server:
        server.script(failure)
        ran = turncache("doctor", "--base-url", server.url, "--model", "m")
    assert ran.code == 1
    assert detail in ran.out


def test_a_server_that_is_not_there(turncache: Run) -> None:
    """Nobody listening is a finding, not a trace."""
    ran = turncache("doctor", "--base-url", "http://127.0.0.1:1/v1")
    assert (ran.code, ran.err) == (1, "")
    assert "does not answer" in ran.out


def test_the_key_is_sent_and_never_shown(turncache: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes from the option or from OPENAI_API_KEY."""
    monkeypatch.setenv("OPENAI_API_KEY", "geheim")
    with FakeServer() as server:
        ran = turncache("doctor", "--base-url", server.url)
        assert {r.headers["authorization"] for r in server.requests} == {"Bearer geheim"}
    assert "geheim" not in ran.out + ran.err + turncache("doctor", "--help").out


@pytest.mark.parametrize("url", ["localhost:8000", "http://", "ftp://h"])
def test_what_is_no_base_url_is_refused(turncache: Run, url: str) -> None:
    """The code is 2 and the option is named."""
    ran = turncache("doctor", "--base-url", url)
    assert ran.code == 2
    assert "--base-url" in ran.err


def body(messages: list[Any], *tools: Any) -> dict[str, Any]:
    """Return the body of a chat completion."""
    return {"model": "m", "messages": messages, **({"tools": list(tools)} if tools else {})}


LOOP = [system("be brief"), user("hello")]
GROWN = [*LOOP, assistant(None, ("c1", "search")), result("c1")]


def test_a_log_without_faults() -> None:
    """Requests, conversations and what a cache could reuse are counted."""
    lines = [json.dumps(body(messages, TOOL)) for messages in (LOOP, GROWN)]
    requests, continued = look_at_log(lines)
    assert requests.detail == "2 requests of 1 conversations"
    assert (requests.verdict, continued.verdict) == ("ok", "ok")
    assert continued.detail.startswith("25%"), "of 1 + 3 messages after the system prompt"


@pytest.mark.parametrize(
    ("second", "kind"),
    [
        (body(GROWN, SECOND, TOOL), "tools_reordered"),
        (body(GROWN, TOOL), "tools_changed"),
        (body([system("it is 12:30:01"), *GROWN[1:]], TOOL, SECOND), "time_in_system"),
        (body([system("be long"), *GROWN[1:]], TOOL, SECOND), "system_changed"),
    ],
    ids=["reordered", "changed", "clock", "system"],
)
def test_what_breaks_reuse_is_found(second: Any, kind: str) -> None:
    """The line and the message are named, and no text of a message is shown."""
    first = body([*LOOP, assistant("yes"), user("geheim")], TOOL, SECOND)
    second["messages"] = [*second["messages"][:2], assistant("yes"), user("geheim"), *GROWN[2:]]
    [finding] = look_at_log([json.dumps(first), "", json.dumps(second)])[2:]
    assert (finding.subject, finding.verdict) == (kind, "failed")
    assert finding.detail.startswith("once, first in line 3: ")
    assert "geheim" not in finding.detail


BILLED = [
    {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=0a1b2;"},
    {"type": "text", "text": "You are Claude Code"},
]


@pytest.mark.parametrize(
    ("request_body", "habit", "says"),
    [
        ({"system": BILLED, "messages": [user("hi")]}, "billing_header", "ATTRIBUTION_HEADER=0"),
        (
            body([*LOOP, assistant("yes"), system("remember"), user("go on")]),
            "system_in_history",
            "--chat-template",
        ),
        (
            {"input": [{"role": "user", "content": "hi"}], "truncation": "auto"},
            "truncation_auto",
            "compact rarely",
        ),
    ],
)
def test_habits_of_coding_agents_are_named(request_body: Any, habit: str, says: str) -> None:
    """Once, with what to do; a note, because some servers do not mind."""
    findings = look_at_log([json.dumps(request_body)] * 3)
    [found] = [each for each in findings if each.subject == habit]
    assert found.verdict == "note"
    assert found.detail.startswith("3 times, first in line 1: ")
    assert says in found.detail


def test_a_billing_line_hides_no_other_change() -> None:
    """It alone is no change of the system prompt; a clock behind it is."""
    lines = []
    messages: list[Any] = [user("hello")]
    for number in range(3):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cch={number};"}
        lines.append({"system": [billing, BILLED[1]], "messages": messages})
        messages = [*messages, assistant(f"a{number}"), user(f"u{number}")]
    subjects = {each.subject for each in look_at_log(map(json.dumps, lines))}
    assert "billing_header" in subjects
    assert not subjects & {"system_changed", "time_in_system"}
    for number, line in enumerate(lines):
        line["system"] = [*line["system"], {"type": "text", "text": f"12:00:0{number}"}]
    assert "time_in_system" in {each.subject for each in look_at_log(map(json.dumps, lines))}


def test_repeated_faults_are_one_finding() -> None:
    """A clock in every prompt is said once, with how often, from the first shared answer on."""
    lines, messages = [], [user("hello")]
    for number in range(4):
        lines.append(json.dumps(body([system(f"12:00:0{number}"), *messages])))
        messages = [*messages, assistant(f"a{number}"), user(f"u{number}")]
    findings = {finding.subject: finding.detail for finding in look_at_log(lines)}
    assert findings["time_in_system"].startswith("2 times, first in line 3: ")


def test_every_form_of_a_log_is_read() -> None:
    """Plain bodies, batch files, bodies as text, and headers that name the session."""
    inner = body([user("hello")])
    lines = [
        json.dumps(inner),
        json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/x", "body": inner}),
        json.dumps({"request": json.dumps(inner)}),
        json.dumps({"headers": {"X-Session-ID": "ticket"}, "body": inner}),
        json.dumps({"headers": {"X-Session-ID": "not an id"}, "body": {"input": "hello"}}),
        "no json",
        json.dumps({"level": "info"}),
        json.dumps([1]),
    ]
    [requests, _] = look_at_log(lines)
    assert requests.detail == "5 requests of 3 conversations; 3 lines without a request"
    assert requests.verdict == "note"


def test_a_log_from_the_command_line(turncache: Run, tmp_path: Path) -> None:
    """A file is read, the code is 1 when reuse breaks, and a missing file is usage."""
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(body(LOOP, TOOL, SECOND)) + "\n")
    assert turncache("doctor", "--log", str(path)).code == 0
    with path.open("a") as lines:
        lines.write(json.dumps(body(GROWN, SECOND, TOOL)) + "\n")
    ran = turncache("doctor", "--log", str(path), "--json")
    assert ran.code == 1
    assert json.loads(ran.out)[-1]["subject"] == "tools_reordered"
    assert turncache("doctor", "--log", str(tmp_path / "none")).code == 2


def test_a_log_of_rubbish_is_a_failure_without_a_trace(turncache: Run, tmp_path: Path) -> None:
    """What is no text, and nests too deep, is a line without a request; others are read."""
    path = tmp_path / "requests.jsonl"
    path.write_bytes(b"\xc2\x28\n" + b"[" * 100_000 + b"\n")
    ran = turncache("doctor", "--log", str(path))
    assert ran.code == 1
    assert "no request in 2 lines" in ran.out
    with path.open("a") as lines:
        lines.write(json.dumps(body(LOOP)) + "\n")
    ran = turncache("doctor", "--log", str(path))
    assert ran.code == 0
    assert "1 requests" in ran.out


@pytest.mark.parametrize(
    "body",
    [
        {"messages": "hi"},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": None},
        {"input": [1]},
        {"prompt": 3},
    ],
    ids=str,
)
def test_a_log_of_what_no_server_would_read_is_a_failure(body: dict[str, object]) -> None:
    """The name of a member alone makes no request."""
    [finding] = look_at_log([json.dumps(body)] * 2)
    assert finding.verdict == "failed"
    assert finding.detail.startswith("no request in 2 lines")


def test_a_log_of_prompts_says_that_nothing_is_compared() -> None:
    """Legacy completions have no messages, so that nothing of them is called well."""
    requests, continued = look_at_log([json.dumps({"prompt": "Once"})] * 2)
    assert requests.detail.startswith("2 requests")
    assert (continued.verdict, continued.detail[:32]) == (
        "note",
        "these requests have prompts and ",
    )


def test_an_empty_log_is_a_failure() -> None:
    """A file without requests says what was expected."""
    [finding] = look_at_log(["{}"])
    assert finding.verdict == "failed"
    assert "per line" in finding.detail
