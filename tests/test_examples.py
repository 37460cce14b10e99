"""Examples and the README's Python run as printed, against the fake server."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from turncache.testing import FakeServer, forget_everything

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
