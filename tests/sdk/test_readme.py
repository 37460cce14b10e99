"""The README: its examples run, and it names every public name."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

import turncache
from turncache.testing import FakeServer

README = Path(__file__).resolve().parents[2] / "sdk" / "README.md"


def blocks(language: str) -> list[str]:
    """Return the README's code blocks in one language."""
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


def untimed(line: str) -> list[str]:
    """Return what a line says, but for seconds."""
    return [word for word in line.split() if not re.fullmatch(r"\d+\.\d{3}", word)]


def test_the_examples_run(server: FakeServer) -> None:
    """Every example runs as printed, one after the other, against the fake server."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks("python"):
            code = block.replace("http://localhost:8000/v1", server.url)
            exec(compile(code, str(README), "exec"), names)
    names["client"].close()
    names["stock"].close()
    assert "prompt=34, local=14, returned=0, computed=20" in printed.getvalue()
    assert "session ticket-4711: 2 calls" in printed.getvalue()


def test_the_table_is_the_one_that_is_printed(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table in the README has the columns and counts of the real one, in 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    [shown] = blocks("text")
    code = blocks("python")[0].replace("http://localhost:8000/v1", server.url)
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), names)
    names["client"].close()
    real = printed.getvalue().splitlines()
    wanted = shown.splitlines()
    assert real[0] == wanted[0]
    assert max(map(len, wanted)) <= 80
    assert [untimed(line) for line in real] == [untimed(line) for line in wanted]


def test_every_public_name_is_named() -> None:
    """What the package exports is in its README."""
    text = README.read_text()
    for name in turncache.__all__:
        assert re.search(rf"\b{name}\b", text), name


def test_every_variable_is_named() -> None:
    """What the environment may set is in the README."""
    settings = Path(turncache.__file__).with_name("settings.py").read_text()
    for name in set(re.findall(r"TURNCACHE_[A-Z_]+", settings)):
        assert f"`{name}`" in README.read_text(), name
