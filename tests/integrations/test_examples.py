"""The LangGraph examples and the integration's README run as printed, on the fake server."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.support import at, child_ids, session_ids, thread_id_of
from turncache.testing import FakeServer, Reply, forget_everything

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "langgraph"
README = ROOT / "integrations" / "turncache_integrations" / "langgraph" / "README.md"

Main = Callable[[list[str]], None]


def main_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Main:
    """Load an example; it finds its neighbour as it does when it is run."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its annotations are read by LangGraph, which looks the module up.
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    main: Main = module.main
    return main


def arguments(server: FakeServer) -> list[str]:
    """Return the command line of a test."""
    at_once = ["--tool-seconds", "0", "--thread", "example"]
    return ["--base-url", server.url, "--model", "m", *at_once]


def test_the_research_agent(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It searches, reads and answers in one session, and prints the table."""
    server.script(
        Reply(tools=[("search", {"pattern": "scanstring"})]),
        Reply(tools=[("read", {"name": "scanner.py"}), ("search", {"pattern": "def "})]),
        Reply(text="scanner.py"),
    )
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    main_of("research_agent", monkeypatch)(arguments(server))
    assert {r.headers["authorization"] for r in server.requests} == {"Bearer sk-mine"}
    printed = capsys.readouterr().out
    assert printed.startswith("scanner.py\n")
    assert f"session example ({thread_id_of('example')}): 3 calls" in printed
    assert session_ids(server.requests) == [thread_id_of("example")] * 3
    assert [cause for _, _, cause in at(server)] == ["user", "tool", "tool"]
    results = [m["content"] for m in server.requests[-1].body["messages"] if m["role"] == "tool"]
    assert len(results) == 3
    assert all("scan" in result or "def " in result for result in results)


def test_the_coding_loop(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It repairs the function: the tests fail, the file is written, the tests pass."""
    repaired = "from statistics import median\n"
    server.script(
        Reply(tools=[("run_tests", {})]),
        Reply(tools=[("read_code", {})]),
        Reply(tools=[("write_code", {"text": repaired})]),
        Reply(tools=[("run_tests", {})]),
        Reply(text="They pass."),
    )
    main_of("coding_loop", monkeypatch)(arguments(server))
    printed = capsys.readouterr().out
    assert "TypeError" in printed
    assert "tools: passed" in printed
    assert f"session example ({thread_id_of('example')}): 5 calls" in printed
    assert set(session_ids(server.requests)) == {thread_id_of("example")}


def test_reviewers_and_approval(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three reviewers are three children; the answer after the approval is the thread's."""
    main_of("approval", monkeypatch)(arguments(server))
    printed = capsys.readouterr().out
    assert "waiting for a person: 3 notes" in printed
    assert "answer: fine" in printed
    ids = session_ids(server.requests)
    root = thread_id_of("example")
    assert len(ids) == 7
    assert ids[-1] == root
    assert len(child_ids(ids, root)) == 3
    assert printed.count("session example/review:") == 3


def test_an_example_is_a_program(server: FakeServer) -> None:
    """An example runs from the command line as its README says."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "approval.py", *arguments(server)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "session example (" in done.stdout


def test_a_server_that_does_not_answer_is_one_line() -> None:
    """Whoever has not started one reads the address, not a traceback."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "research_agent.py", "--base-url", "http://127.0.0.1:9/v1"],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("no answer from http://127.0.0.1:9/v1/chat/completions: ")
    assert "Traceback" not in done.stderr


def test_every_example_is_in_the_table() -> None:
    """The table of the examples names every program."""
    table = (EXAMPLES / "README.md").read_text()
    programs = [path for path in EXAMPLES.glob("*.py") if "def main(" in path.read_text()]
    assert len(programs) == 3
    assert all(f"`{path.name}`" in table for path in programs)


def test_the_readme_runs(server: FakeServer) -> None:
    """The README's Python blocks run as printed."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) > 2
    forget_everything()
    names: dict[str, Any] = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks:
            code = block.replace("http://localhost:8000/v1", server.url)
            exec(compile(code, "README.md", "exec", dont_inherit=True), names)
    assert "session ticket-4711 (h-" in printed.getvalue()
    assert None not in session_ids(server.requests)
