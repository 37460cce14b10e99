"""The log: one line for each request, with what an operator asks first."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.fakes.engine import FakeEngine, Script, fake_engines
from tests.server.router.conftest import Pair
from tests.server.router.support import TOOLS, bench, outcome_of
from turncache_server.control.messages import session_digest
from turncache_server.router.keys import Caller, add_key

pytestmark = pytest.mark.anyio


def facts_of(line: str) -> dict[str, str]:
    """Read the part of a line that is names and values."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def lines_of(caplog: pytest.LogCaptureFixture, request: str) -> list[str]:
    """Return the router's lines about a request."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name == "turncache.router" and request in record.getMessage()
    ]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_call_is_one_line_with_its_outcome(
    pair: Pair, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    """Who served it, how it ended, and what happened to its KV; nothing that anybody said."""
    caplog.set_level(logging.INFO)
    answer = await pair.bench.chat(tools=TOOLS, session="geheim", stream=stream)
    await pair.bench.record(answer)
    (line,) = lines_of(caplog, answer.headers["x-request-id"])
    assert f"session {session_digest('geheim')}: " in line
    facts, outcome = facts_of(line), outcome_of(answer)
    assert float(facts.pop("ttft")) <= float(facts.pop("total"))
    facts.pop("answer", None)
    assert facts == {
        "api": "chat",
        "plan": "cold",
        "reason": "new_session",
        "engines": f"{pair.prefill.name},{pair.decode.name}",
        "code": "200",
        "boundary": "tool",
        **{
            name: str(getattr(outcome, name))
            for name in ("prompt", "local", "returned", "computed", "lost")
        },
    }
    assert "geheim" not in caplog.text
    assert "Laura" not in caplog.text


async def test_a_call_that_failed_is_one_warning_beside_its_leg(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine that did not serve it is in the line of its leg, and not in the call's."""
    caplog.set_level(logging.INFO)
    pair.decode.scripts.append(Script(die="before"))
    answer = await pair.bench.chat(session="s")
    assert answer.status_code == 502
    await pair.bench.record(answer)
    leg, line = lines_of(caplog, answer.headers["x-request-id"])
    assert f"leg on {pair.decode.name} (decode) failed: disconnected" in leg
    facts = facts_of(line)
    assert (facts["code"], facts["problem"]) == ("502", "disconnected")
    assert facts["engines"] == pair.prefill.name
    assert "ttft" not in facts
    levels = {record.levelno for record in caplog.records if record.getMessage() in (leg, line)}
    assert levels == {logging.WARNING}


async def test_a_refused_request_is_one_line_without_its_words(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Why, in a word of ours: what was refused may hold a prompt."""
    caplog.set_level(logging.INFO)
    for path, body, code, why in (
        ("/v1/chat/completions", {"messages": [], "geheim": 1}, 400, "invalid_request_error"),
        ("/v1/chat/completions", {"messages": [{}], "model": "geheim"}, 404, "model_not_found"),
        ("/geheim", {}, 404, "not_found"),
    ):
        answer = await pair.bench.http.post(path, json=body)
        assert answer.status_code == code
        (line,) = lines_of(caplog, answer.headers["x-request-id"])
        assert f"refused: api={'chat' if 'chat' in path else 'other'} code={code} why={why}" in line
    assert "geheim" not in "".join(lines_of(caplog, "refused"))


async def test_what_is_passed_on_is_one_line_and_counted(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """It has no plan, and an engine all the same."""
    caplog.set_level(logging.INFO)
    answer = await pair.bench.http.post("/tokenize", json={"model": "fake", "prompt": "geheim"})
    (line,) = lines_of(caplog, answer.headers["x-request-id"])
    facts = facts_of(line)
    assert (facts["api"], facts["engines"], facts["code"]) == ("tokenize", "decode-0", "200")
    sample = 'turncache_router_requests_total{api="tokenize",code="200",plan="none"}'
    assert await pair.bench.metric(sample) == 1
    assert "geheim" not in line


async def test_a_tenant_is_named_as_engines_know_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose calls they are can be told, and the name is nowhere."""
    caplog.set_level(logging.INFO)
    path = tmp_path / "keys.toml"
    key = add_key(path, "team-geheim")
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=str(path)) as running:
        running.http.headers["authorization"] = f"Bearer {key}"
        answer = await running.chat(session="s")
        await running.record(answer)
    (line,) = lines_of(caplog, answer.headers["x-request-id"])
    assert facts_of(line)["tenant"] == Caller(tenant="team-geheim").label
    assert "geheim" not in line
    assert key not in caplog.text
