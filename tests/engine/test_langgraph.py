"""LangGraph on the real pair: the examples run, and their KV survives their waits."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.conftest import started
from turncache_server.launch.stack import Stack

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "langgraph"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prefill and decode that parse tool calls."""
    yield from started(
        tmp_path_factory,
        prefill=1,
        decode=1,
        num_blocks={"prefill": 96, "decode": 256},
        settings={"retain_budget": 0.9, "tenant_budget": 0.9},
        engine_args=("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    )


@pytest.mark.parametrize("name", ["research_agent", "coding_loop", "approval"])
def test_an_example_runs_on_real_engines(stack: Stack, name: str) -> None:
    """An example ends with 0 and prints the tables of its sessions; nothing was lost."""
    done = subprocess.run(
        [
            *(sys.executable, EXAMPLES / f"{name}.py", "--tool-seconds", "0"),
            *("--base-url", f"{stack.base_url}/v1", "--model", stack.model),
            *("--thread", f"example-{name}"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"session example-{name} (h-" in done.stdout
    assert ", 0 lost" in done.stdout
