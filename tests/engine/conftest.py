"""Real vLLM engines for the engine tier: one stack at a time, started by its first test.

Two cores carry one pair, so every fixture has module scope and a module uses one stack.
Without the engine environment these tests fail: they are never skipped.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from turncache_server.launch.stack import Stack, StackSpec, start

HERE = Path(__file__).parent

if importlib.util.find_spec("vllm") is None:
    # It needs vLLM to be read, not only to run. The others fail here when they are asked for.
    collect_ignore = ["test_pair.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below this folder as engine tests, with time for engines to start."""
    for item in items:
        if HERE in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.timeout(420))


def started(tmp_path_factory: pytest.TempPathFactory, **spec: object) -> Iterator[Stack]:
    """Start a stack of the tiny model on free ports, and stop it."""
    stack = start(
        StackSpec(
            model="tiny",
            router_port=0,
            dtype="float32",
            max_model_len=2560,
            log_dir=tmp_path_factory.mktemp("stack"),
            **spec,  # type: ignore[arg-type]
        ),
        progress=lambda line: print(line, file=sys.stderr),
    )
    with stack:
        yield stack
        stack.check()


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One engine with retention; its pool holds little more than one long session."""
    yield from started(
        tmp_path_factory,
        num_blocks={"single": 96},
        settings={"retain_budget": 0.9, "tenant_budget": 0.9},
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Prefill and decode; prefill's pool holds little more than one long session."""
    with pytest.MonkeyPatch.context() as patch:
        # For /collective_rpc and the class that it calls.
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("PYTHONPATH", str(HERE.parent.parent), prepend=os.pathsep)
        yield from started(
            tmp_path_factory,
            prefill=1,
            decode=1,
            num_blocks={"prefill": 96, "decode": 256},
            settings={"retain_budget": 0.9, "tenant_budget": 0.9},
            engine_args=("--worker-extension-cls", "tests.engine.block_reader.BlockReader"),
        )
