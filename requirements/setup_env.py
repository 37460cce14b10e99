"""Make the environments of this repository: ``python3 requirements/setup_env.py dev engine``.

Standard library only. Each environment is a virtual environment filled from pinned lock
files with ``--no-deps``, plus this repository, editable. A stamp inside the environment
(the hash of what went in) makes a second run a matter of a second.

Exit codes: 0 ready, 2 unknown name, 3 this machine lacks something.
"""

# ruff: noqa: INP001, S603, T201 - a program, which starts fixed commands and prints
from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
STAMP: Final = ".turncache-stamp.json"
#: PyTorch's own index of CPU builds: asked only when the configured indexes lack the pin.
TORCH_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
LOCKED_PYTHON: Final = (3, 11)
NUM_LOG_LINES: Final = 25


class SetupFailure(Exception):
    """Raised when an environment cannot be made; the message names the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What goes into one environment.

    Attributes:
        folder: relative to the repository, unless ``--into`` says otherwise.
        locks: files in ``requirements/``, installed in this order; a later pin wins.
        modules: imported at the end: an environment that cannot import is not ready.
        size_gib: free disk space that an empty environment needs.
    """

    folder: str
    locks: tuple[str, ...]
    modules: tuple[str, ...]
    size_gib: float


ENVIRONMENTS: Final = {
    "dev": Environment(
        folder=".venv",
        locks=("dev.lock", "langgraph.lock"),
        modules=("turncache", "pytest", "mypy", "typer", "turncache.langgraph"),
        size_gib=0.8,
    ),
    "engine": Environment(
        folder="build/engine-venv",
        locks=("engine-cpu.lock", "engine-test.lock", "langgraph.lock"),
        modules=("torch", "nixl", "vllm", "turncache_server", "pytest", "langgraph"),
        size_gib=6,
    ),
}


def pins(lock: str) -> list[str]:
    """Return the pins of a lock file, without comments."""
    lines = (ROOT / "requirements" / lock).read_text().splitlines()
    return [pin for line in lines if (pin := line.partition("#")[0].strip())]


def merged_pins(locks: Sequence[str]) -> list[str]:
    """Return the pins of several lock files; of one name the last pin stays."""
    by_name = {pin.partition("==")[0].lower(): pin for lock in locks for pin in pins(lock)}
    return sorted(by_name.values(), key=str.lower)


def project_tables() -> str:
    """Return what an editable installation depends on: not the settings of tools."""
    text = (ROOT / "pyproject.toml").read_text()
    return text.partition("[tool.ruff]")[0]


def digest(*parts: str) -> str:
    """Return a short hash of ``parts``."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


class Builder:
    """Makes one environment, step by step, and says so.

    Args:
        name: key of :data:`ENVIRONMENTS`.
        folder: where it goes; an existing environment there is completed in place.
    """

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.environment = ENVIRONMENTS[name]
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.log = ROOT / "build" / f"setup-{name}.log"

    def build(self) -> None:
        """Bring the environment up to date.

        Raises:
            SetupFailure: naming the step, the end of its output and the way out.
        """
        started = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        wanted_pins = merged_pins(self.environment.locks)
        wanted = {
            "packages": digest(*wanted_pins),
            "project": digest(project_tables(), str(ROOT)),
        }
        found = self._stamp()
        if found == wanted:
            self.say(f"ready ({self.folder})")
            return
        if not found and not self._works():
            self._create()
        modules: tuple[str, ...] = ("turncache", "turncache_server")
        if found.get("packages") != wanted["packages"]:
            self._install(wanted_pins)
            modules = self.environment.modules
        if found.get("project") != wanted["project"]:
            self.say("installing this repository, editable")
            self._run("pip", "install", "--quiet", "--no-deps", "--editable", str(ROOT))
        self.say(f"importing {', '.join(modules)}")
        self._run_command([str(self.python), "-c", f"import {', '.join(modules)}"])
        (self.folder / STAMP).write_text(json.dumps(wanted))
        self.say(f"ready ({self.folder}) after {time.monotonic() - started:.0f} s")

    def say(self, what: str) -> None:
        """Print one progress line."""
        print(f"{self.name}: {what}", flush=True)

    def _stamp(self) -> dict[str, str]:
        """Return the stamp of a working environment, else an empty one."""
        try:
            stamp = json.loads((self.folder / STAMP).read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) and self._works() else {}

    def _works(self) -> bool:
        """Say whether there is an interpreter that runs."""
        try:
            done = subprocess.run([self.python, "-c", ""], check=False, capture_output=True)
        except OSError:
            return False
        return done.returncode == 0

    def _create(self) -> None:
        base = self._base_python()
        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        free_gib = shutil.disk_usage(parent).free / 2**30
        if free_gib < self.environment.size_gib:
            raise SetupFailure(
                f"{self.environment.size_gib:g} GiB of disk are needed in {parent}, "
                f"{free_gib:.1f} GiB are free: make room, or choose another place with --into"
            )
        self.say(f"creating {self.folder} with {base}")
        self._run_command([base, "-m", "venv", "--clear", str(self.folder)])

    def _base_python(self) -> str:
        """Return an interpreter of the version that the locks were made with."""
        if sys.version_info[:2] == LOCKED_PYTHON:
            return sys.executable
        name = f"python{LOCKED_PYTHON[0]}.{LOCKED_PYTHON[1]}"
        found = shutil.which(name)
        if found is None:
            raise SetupFailure(
                f"the lock files were made with {name}, this is Python "
                f"{sys.version_info[0]}.{sys.version_info[1]} and {name} is not on PATH: "
                f"install it, or run this program with it"
            )
        return found

    def _install(self, wanted: Sequence[str]) -> None:
        """Install the pins, the CPU build of torch first: it may need its own index."""
        self.say(f"installing {len(wanted)} pinned packages (minutes when they are not cached)")
        torch = next((pin for pin in wanted if pin.startswith("torch==")), None)
        if torch is not None:
            try:
                self._run("pip", "install", "--quiet", "--no-deps", torch)
            except SetupFailure:
                self.say(f"{torch} is not in the configured indexes: asking PyTorch's own")
                self._run(
                    *("pip", "install", "--quiet", "--no-deps"),
                    *("--extra-index-url", TORCH_CPU_INDEX, torch),
                )
        rest = [pin for pin in wanted if pin != torch]
        self._run("pip", "install", "--quiet", "--no-deps", *rest)

    def _run(self, module: str, *arguments: str) -> None:
        self._run_command([str(self.python), "-m", module, *arguments])

    def _run_command(self, command: Sequence[str]) -> None:
        """Run a step with its output in the log; on failure show the end of it."""
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        environment.pop("PYTHONPATH", None)
        with self.log.open("w") as log:
            done = subprocess.run(
                list(command),
                check=False,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
            )
        if done.returncode:
            tail = "\n".join(self.log.read_text().splitlines()[-NUM_LOG_LINES:])
            raise SetupFailure(
                f"this step failed with exit code {done.returncode}:\n"
                f"  {' '.join(command)[:300]}\n{tail}\n"
                f"The whole output is in {self.log}. Repair what it names and run it again: "
                f"finished steps are kept"
            )


@contextlib.contextmanager
def one_at_a_time(folder: Path) -> Iterator[None]:
    """Keep two set-ups of one environment apart."""
    lock = folder.parent / f".{folder.name}.setup-lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Make the environments named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="+", choices=sorted(ENVIRONMENTS), metavar="NAME")
    parser.add_argument("--into", type=Path, help="another folder (one NAME only)")
    options = parser.parse_args(argv)
    if options.into is not None and len(options.names) != 1:
        parser.error("--into takes exactly one NAME")
    for name in options.names:
        folder = options.into or ROOT / ENVIRONMENTS[name].folder
        try:
            with one_at_a_time(folder):
                Builder(name, folder).build()
        except SetupFailure as failure:
            print(f"{name}: {failure}", file=sys.stderr)
            return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
