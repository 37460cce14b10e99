"""Examples and the README's Python run as printed, against the fake server."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turncache.testing import Failure, FakeServer, forget_everything

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_runs(path: Path) -> None:
    """An example exits with 0, calls its tool, and prints the session's table."""
    with FakeServer() as server:
        done = subprocess.run(
            [sys.executable, path, "--base-url", server.url, "--model", "m", "--tool-seconds", "0"],
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "session example" in done.stdout
        assert {request.headers["x-session-id"] for request in server.requests} == {"example"}
        assert len(server.requests) > 1, "the tool's result went back to the model"


def ended(path: Path, *arguments: str, **environment: str) -> str:
    """Run an example that cannot go on; return the one line that it ends with."""
    done = subprocess.run(
        [sys.executable, path, "--tool-seconds", "0", *arguments],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_an_example_that_cannot_go_on_ends_in_one_line(path: Path) -> None:
    """Which URL it is about and why: nobody answers, a refusal, or a setting of ours."""
    nobody = ended(path, "--base-url", "http://127.0.0.1:9/v1")
    assert nobody.startswith("no answer from http://127.0.0.1:9/v1/chat/completions: ")
    assert "refused" in nobody
    with FakeServer() as server:
        server.script(Failure(status=404, message="no model 'm';\ntry another"))
        line = ended(path, "--base-url", server.url, "--model", "m")
        assert line.startswith(f"{server.url}/chat/completions refuses: Error code: 404")
        assert "no model" in line
        line = ended(path, "--base-url", server.url, TURNCACHE_PROFILE="fsat")
    assert line.startswith("TURNCACHE_PROFILE: 'fsat'")


def test_every_example_is_in_the_table() -> None:
    """The table of the examples names every file."""
    table = (ROOT / "examples" / "README.md").read_text()
    assert all(f"`{path.name}`" in table for path in (ROOT / "examples").glob("*.py"))


def test_the_readme_runs() -> None:
    """The README's Python blocks run as printed and show an outcome."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    forget_everything()
    with FakeServer() as server:
        names: dict[str, Any] = {}
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            for block in blocks:
                code = block.replace("http://localhost:8000/v1", server.url)
                exec(compile(code, "README.md", "exec"), names)
        names["client"].close()
        assert "prompt=" in printed.getvalue()
        assert "session ticket-4711" in printed.getvalue()
