"""The router as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

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


async def test_sigterm_ends_the_process_after_its_calls() -> None:
    """A call in flight gets its whole answer; the exit code is 0; the log holds no prompt."""
    engine = FakeEngine()
    script = Script(pause_after=2)
    engine.scripts = [script]
    async with fake_engines(engine):
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "turncache_server.router", "--port", "0"),
            *("--engine", ",".join(f"{k}={v}" for k, v in engine.as_config().items())),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stderr=asyncio.subprocess.PIPE,
        )
        url = await _ready_url(process)
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        headers = {"X-Session-ID": "secret-session", "Authorization": "Bearer secret-key"}
        async with (
            httpx2.AsyncClient(base_url=url, timeout=20, verify=False) as http,
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
