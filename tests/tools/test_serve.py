"""``turncache serve`` with fake engines, as a program."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm_program import processes_with
from tests.tools.conftest import Ran

Run = Callable[..., Ran]


@pytest.fixture
def arguments(model_folder: Path, engine_python: str, tmp_path: Path) -> tuple[str, ...]:
    """Return the arguments for fake engines on free ports."""
    return (
        *("serve", "--port", "0", "--stop-grace", "0.1", "--model", str(model_folder)),
        *("--python", engine_python, "--log-dir", str(tmp_path / "logs")),
    )


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run the verb until it has described its stack."""
    # Below a shell's background job Ctrl-C is ignored, and programs that we start inherit that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "turncache_tools", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as program:
        signal.signal(signal.SIGINT, before)
        assert program.stdout is not None
        line = program.stdout.readline()
        try:
            yield program, json.loads(line)
        finally:
            program.kill()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGHUP, 0)]
)
def test_a_stack_serves_until_it_is_told_to_end(
    arguments: tuple[str, ...], mark: str, number: int, code: int
) -> None:
    """Data is one JSON line on standard output; after the signal nobody is left."""
    with serving(*arguments, "--no-router") as (program, data):
        assert data["model"] == "some-model"
        assert [engine["name"] for engine in data["engines"]] == ["single-0"]
        program.send_signal(number)
        out, err = program.communicate(timeout=20)
    assert (program.returncode, out) == (code, "")
    assert "single-0: ready" in err
    assert processes_with(mark) == []


def test_an_engine_that_dies_ends_the_command_with_its_last_lines(
    arguments: tuple[str, ...], mark: str
) -> None:
    """The code is 4, and standard error has the engine's name and log."""
    with serving(*arguments, "--no-router") as (program, data):
        (engine,) = data["engines"]
        subprocess.run(["kill", "-SEGV", str(engine["pid"])], check=True)
        _, err = program.communicate(timeout=20)
    assert program.returncode == 4
    assert "single-0: ended with exit code 139 while serving" in err
    assert processes_with(mark) == []


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (("--", "--fail", "MemoryError"), 4, "there is too little memory"),
        (
            ("--", "--fail", "api_server.py: error: unrecognized arguments: --fly"),
            2,
            "vLLM knows no such flag: --fly",
        ),
        (("--kv-space-gib", "4000"), 3, "too little memory"),
        (("--set", "colour=red"), 2, "turncache.colour: no such setting; expected"),
        (("--set-router", "colour=red"), 2, "no such setting"),
        (("--timeout", "0.2", "--", "--never-ready"), 4, "was not ready within 0.2 s"),
    ],
)
def test_a_stack_that_cannot_start_says_why(
    turncache: Run, arguments: tuple[str, ...], more: tuple[str, ...], code: int, message: str
) -> None:
    """The exit code says who must act, and no data is printed."""
    ran = turncache(*arguments, *more)
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err


def test_a_missing_model_is_refused_with_the_names_that_exist(
    turncache: Run, engine_python: str
) -> None:
    """A path that does not exist is a mistake of the command line."""
    ran = turncache("serve", "--model", "./nowhere", "--python", engine_python)
    assert ran.code == 2
    assert "'./nowhere' does not exist" in ran.err


def test_nobody_outlives_a_killed_command(arguments: tuple[str, ...], mark: str) -> None:
    """Killed without a chance to clean up, the command still leaves nobody."""
    with serving(*arguments) as (program, data):
        assert data["router_pid"] is not None
        assert len(processes_with(mark)) >= 5
        program.kill()
        program.wait()
    deadline = time.monotonic() + 10
    while processes_with(mark):
        assert time.monotonic() < deadline
        time.sleep(0.02)
