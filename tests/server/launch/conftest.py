"""Fixtures of the launcher's tests: fake engine environments, and nobody left behind."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm_program import MARK, processes_with, write_python
from turncache_server.launch.spec import StackSpec


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A word in the environment of everything a test starts; kills what a failed test left."""
    word = uuid.uuid4().hex
    monkeypatch.setenv(MARK, word)
    yield word
    for pid in processes_with(word):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A model folder as far as the launcher looks: a configuration, and weights of 1 MB."""
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "bfloat16"}')
    (folder / "model.safetensors").write_bytes(bytes(1_000_000))
    return folder


@pytest.fixture
def make_spec(tmp_path: Path, mark: str, model_folder: Path) -> Callable[..., StackSpec]:
    """Make a specification of fake engines on free ports; ``facts`` are of the environment."""

    def make(*, facts: dict[str, Any] | None = None, **changes: Any) -> StackSpec:
        values: dict[str, Any] = {
            "model": str(model_folder),
            "router_port": 0,
            "log_dir": tmp_path / "logs" / mark,
            "python": write_python(tmp_path, **(facts or {})),
            "stop_grace_s": 0.1,
        }
        return StackSpec(**{**values, **changes})

    return make
