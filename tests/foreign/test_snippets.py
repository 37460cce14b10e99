"""The snippets of ``sdk/FRAMEWORKS.md`` run as printed, each in the environment it names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import turncache
from tests.foreign.support import OURS
from turncache import hosts
from turncache.testing import FakeServer

PAGE = Path(__file__).resolve().parents[2] / "sdk" / "FRAMEWORKS.md"
HERE = os.environ.get("TURNCACHE_FOREIGN", "")


def snippets(environment: str) -> list[Any]:
    """Return the blocks of the page that name an environment, under the heading above them."""
    found = []
    for section in re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title = section.splitlines()[0]
        blocks = re.findall(rf"```python {environment}\n(.*?)```", section, re.DOTALL)
        found += [pytest.param(block, id=title) for block in blocks]
    return found


@pytest.mark.parametrize("code", snippets(HERE))
def test_a_snippet_runs(code: str, server: FakeServer) -> None:
    """Its one call carries the session that it opens."""
    try:
        exec(compile(code.replace("http://localhost:8000/v1", server.url), str(PAGE), "exec"), {})
    finally:
        turncache.uninstrument()
    calls = [request for request in server.requests if request.method == "POST"]
    assert {request.headers.get("x-session-id") for request in calls} == {"ticket-4711"}


@pytest.mark.parametrize(
    "code", [one for one in snippets(HERE) if "session.headers(" not in one.values[0]]
)
def test_a_provider_gets_nothing_of_ours(
    code: str, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same code at a hosted provider: what arrives is what the stock client sends. Headers
    that the caller puts there itself are the caller's.
    """
    monkeypatch.setattr(hosts, "PROVIDERS", (*hosts.PROVIDERS, "localhost"))
    hosts._kind.cache_clear()
    url = server.url.replace("127.0.0.1", "localhost")
    try:
        exec(compile(code.replace("http://localhost:8000/v1", url), str(PAGE), "exec"), {})
    finally:
        turncache.uninstrument()
        hosts._kind.cache_clear()
    assert server.requests
    for request in server.requests:
        assert not [name for name in request.headers if name.startswith(OURS)]
        assert not {"session_id", "vllm_xargs"} & (request.body or {}).keys()
    assert turncache.untagged_calls() == {"not_told": len(server.requests)}


def test_every_environment_has_snippets() -> None:
    """The page names both environments, and has a block for each framework under test."""
    assert len(snippets("openai3")) >= 7
    assert len(snippets("openai2")) >= 3
