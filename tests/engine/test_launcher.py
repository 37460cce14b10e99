"""The launcher with real engines: what only vLLM itself can show."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from turncache.errors import ConfigError, EngineFault
from turncache_server.launch.stack import StackSpec, start
from turncache_server.launch.supervise import descendants

NUM_BLOCKS = {"single": 160}


def to_stderr(line: str) -> None:
    """Show progress where pytest keeps it for failures."""
    print(line, file=sys.stderr)


@pytest.fixture
def spec_of(tmp_path: Path) -> Callable[..., StackSpec]:
    """Describe a small stack of the tiny model on free ports."""

    def make(**changes: object) -> StackSpec:
        values = {"max_model_len": 4096, "log_dir": tmp_path, **changes}
        return StackSpec(model="tiny", router_port=0, **values)  # type: ignore[arg-type]

    return make


LAUNCHER = """
import json, sys
from turncache_server.launch.stack import StackSpec, start
spec = StackSpec(
    model="tiny", router_port=0, prefill=1, decode=1, max_model_len=4096, log_dir=sys.argv[1]
)
with start(spec, progress=print) as stack:
    print(json.dumps(stack.describe()), flush=True)
    stack.wait()
"""


def test_a_pair_has_cores_of_its_own_and_does_not_outlive_its_launcher(tmp_path: Path) -> None:
    """No thread of one engine may run on the other's cores, NIXL's included; five seconds
    after kill -9 of the launcher no process below it is left.
    """
    with subprocess.Popen(
        [sys.executable, "-u", "-c", LAUNCHER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        line = next(line for line in launcher.stdout if line.startswith("{"))
        prefill, decode = [cores_of(engine["pid"]) for engine in json.loads(line)["engines"]]
        assert prefill | decode == os.sched_getaffinity(0)
        assert len(prefill | decode) == 1 or not prefill & decode
        below = descendants(launcher.pid)
        # Two engines of three processes, the router, and a reaper above each.
        assert len(below) >= 10
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 5
    while left := [pid for pid in below if is_alive(pid)]:
        assert time.monotonic() < deadline, [command_of(pid) for pid in left]
        time.sleep(0.05)


def cores_of(root: int) -> set[int]:
    """Return the cores that any thread of a process tree may run on."""
    cores: set[int] = set()
    for pid in (root, *descendants(root)):
        for task in Path("/proc", str(pid), "task").iterdir():
            cores |= os.sched_getaffinity(int(task.name))
    return cores


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def command_of(pid: int) -> str:
    """Return the command line of a process, for messages."""
    try:
        return Path("/proc", str(pid), "cmdline").read_text().replace("\0", " ")
    except OSError:
        return "(ended)"


def test_an_engine_that_is_killed_takes_the_stack_along(spec_of: Callable[..., StackSpec]) -> None:
    """Waiting ends with the engine's name, and all its processes are gone."""
    stack = start(spec_of(router=False, num_blocks=NUM_BLOCKS), progress=to_stderr)
    (engine,) = stack.engines
    below = {engine.pid, *descendants(engine.pid)}
    assert len(below) >= 2
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(EngineFault, match="ended with exit code 137") as caught:
        stack.wait()
    assert caught.value.engine == "single-0"
    assert not any(is_alive(pid) for pid in below)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        pytest.param(
            {"engine_args": ("--fly",)}, ConfigError, "vLLM knows no such flag: --fly", id="flag"
        ),
        pytest.param(
            {"engine_args": ("--dtype", "float31")},
            ConfigError,
            "vLLM refuses its command line: argument --dtype",
            id="value",
        ),
        pytest.param(
            {"num_blocks": {"single": 8}},
            EngineFault,
            "full length does not fit into the KV space; lower --max-model-len",
            id="KV space",
        ),
    ],
)
def test_what_vllm_refuses_is_explained(
    spec_of: Callable[..., StackSpec],
    changes: dict[str, object],
    error: type[Exception],
    message: str,
) -> None:
    """The cause is found in vLLM's own words, with a way out."""
    with pytest.raises(error, match=message):
        start(spec_of(router=False, **changes), progress=to_stderr)


def test_a_stock_pair_exchanges_kv(spec_of: Callable[..., StackSpec]) -> None:
    """The stock kinds that ours is compared with really transfer, on the same rig."""
    spec = spec_of(prefill=1, decode=1, kind="nixl-bidirectional")
    lines: list[str] = []
    with start(spec, progress=lines.append) as stack:
        assert stack.router_pid is None
        log = stack.engines[1].log_path.read_text()
    assert any(line.startswith("warm-up took") for line in lines), lines
    assert "NIXL" in log
