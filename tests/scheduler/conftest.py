"""The scheduler tier: vLLM's real scheduler and our real connector, no model, no process."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).parent

# These import vLLM at the top. Where it is not installed the fast tier deselects the whole
# folder by its marker; `make test-scheduler` always runs in the engine environment.
collect_ignore = (
    []
    if importlib.util.find_spec("vllm")
    else [
        path.name
        for path in HERE.glob("test_*.py")
        if any(name in path.read_text() for name in ("tests.builders", "tests.scheduler.soak"))
    ]
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark everything below this folder."""
    for item in items:
        if HERE in Path(str(item.fspath)).parents:
            item.add_marker(pytest.mark.scheduler)
