"""The router as a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import httpx2
import pytest

from tests.fakes.engine import FakeEngine, Script, fake_engines
from tests.server.router.support import CHAT, MESSAGES

pytestmark = pytest.mark.anyio


async def _ready_url(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    while line := (await process.stderr.readline()).decode():
        if "router listens on " in line:
            return line.rpartition(" ")[2].strip()
    raise AssertionError("the router ended before it was ready")


async def started(
    engine: FakeEngine, *wrapper: str
) -> tuple[asyncio.subprocess.Process, httpx2.AsyncClient]:
    """Start a router of its own in front of an engine; return it and a client of it."""
    process = await asyncio.create_subprocess_exec(
        *(*wrapper, sys.executable, "-m", "turncache_server.router", "--port", "0"),
        *("--engine", ",".join(f"{k}={v}" for k, v in engine.as_config().items())),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=asyncio.subprocess.PIPE,
    )
    url = await _ready_url(process)
    return process, httpx2.AsyncClient(base_url=url, timeout=20, verify=False)


def files_of(pid: int) -> tuple[str, str]:
    """Return how many open files a process may have: (soft limit, hard limit)."""
    limits = Path(f"/proc/{pid}/limits").read_text(encoding="ascii")
    (row,) = [line.split() for line in limits.splitlines() if line.startswith("Max open files")]
    return row[3], row[4]


async def test_sigterm_ends_the_process_after_its_calls() -> None:
    """A call in flight gets its whole answer; the exit code is 0; the log holds no prompt."""
    engine = FakeEngine()
    script = Script(pause_after=2)
    engine.scripts = [script]
    async with fake_engines(engine):
        process, client = await started(engine)
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        headers = {"X-Session-ID": "secret-session", "Authorization": "Bearer secret-key"}
        async with (
            client as http,
            http.stream("POST", CHAT, json=body, headers=headers) as answer,
        ):
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGTERM)
            script.resume.set()
            assert [line async for line in lines][-2] == "data: [DONE]"
        _, log = await process.communicate()
        assert process.returncode == 0
    text = log.decode()
    assert "plan=single" in text
    for secret in ("secret-session", "secret-key", "Laura"):
        assert secret not in text


@pytest.mark.skipif(not Path("/proc/self/limits").exists(), reason="Linux says it there")
async def test_a_second_signal_ends_the_drain() -> None:
    """Who presses Ctrl-C twice does not wait; the hang-up of a terminal counts as the first.

    And a process that begins with few files takes as many as it may.
    """
    engine = FakeEngine()
    engine.scripts = [Script(pause_after=2)]
    async with fake_engines(engine):
        # Under nohup a hang-up is ignored, and by whoever is started there.
        hears = ("env", "--default-signal=HUP")
        few = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")
        process, client = await started(engine, *hears, *few)
        soft, hard = files_of(process.pid)
        assert soft == hard != "256"
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        async with client as http, http.stream("POST", CHAT, json=body) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            process.send_signal(signal.SIGHUP)
            assert process.stderr is not None
            while b"drains for at most" not in await process.stderr.readline():
                pass
            process.send_signal(signal.SIGTERM)
            last = [line async for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"
        await process.communicate()
        assert process.returncode == 0
