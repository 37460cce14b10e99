"""The progress delay of NIXL on CPU engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from turncache_server.launch.profiles import CPU_RIG

BINDINGS = """
DEFAULT_COMM_PORT = 5
class nixlAgentConfig: pthrDelay = None
class nixlAgent:
    def __init__(self, name, config): self.name, self.delay = name, config.pthrDelay
"""
API = """
from . import _bindings as nixlBind
PORT = nixlBind.DEFAULT_COMM_PORT
def make():
    config = nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    return nixlBind.nixlAgent("me", config)
"""
PROGRAM = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
agent = module.make()
seen = sys.modules.get("hidden_ran") is not None
print(json.dumps([agent.name, agent.delay, module.PORT, seen]))
"""


def run(tmp_path: Path, module: str) -> list[object]:
    """Create an agent in a process with the rig on its path."""
    path = os.pathsep.join((str(CPU_RIG), str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        capture_output=True,
        text=True,
    )
    data: list[object] = json.loads(done.stdout)
    return data


def write_package(folder: Path, name: str) -> None:
    """Write a package in the form of NIXL's."""
    package = folder / name
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_bindings.py").write_text(BINDINGS)
    (package / "_api.py").write_text(API)


@pytest.mark.parametrize("name", ["nixl_cu12", "nixl_cu13"])
def test_an_agent_gets_a_delay_whatever_the_api_hard_codes(tmp_path: Path, name: str) -> None:
    """The progress thread pauses for two milliseconds; everything else is NIXL's."""
    write_package(tmp_path, name)
    assert run(tmp_path, f"{name}._api") == ["me", 2000, 5, False]


def test_other_packages_are_left_alone(tmp_path: Path) -> None:
    """Only NIXL's own modules are looked at."""
    write_package(tmp_path, "somebody_else")
    assert run(tmp_path, "somebody_else._api") == ["me", 0, 5, False]


def test_the_sitecustomize_that_it_hides_runs_too(tmp_path: Path) -> None:
    """A machine's own start-up code is not lost."""
    write_package(tmp_path, "nixl_cu12")
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['hidden_ran'] = sys\n")
    assert run(tmp_path, "nixl_cu12._api") == ["me", 2000, 5, True]
