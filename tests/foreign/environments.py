"""Run the tests of the client inside other frameworks, each in the environment that it needs.

``python -m tests.foreign.environments [NAME ...] [-- PYTEST ARGUMENT ...]``

One virtual environment per name is made under ``build/foreign`` from a pinned lock file and
kept. Frameworks share one where their pins agree. Exits with 1 when one fails.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.contract.openai_versions import split

ROOT: Final = Path(__file__).resolve().parents[2]
HOME: Final = ROOT / "build" / "foreign"
STAMP: Final = "lock.sha256"


@dataclass(frozen=True, slots=True)
class Environment:
    """One environment: its lock file, and the test files that run in it."""

    lock: str
    tests: tuple[str, ...]


ENVIRONMENTS: Final = {
    "openai3": Environment(
        "foreign-openai3.lock",
        (
            "test_langchain.py",
            "test_litellm.py",
            "test_openai_agents.py",
            "test_pydantic_ai.py",
            "test_snippets.py",
            "test_starlette.py",
        ),
    ),
    # These pin openai below 3.
    "openai2": Environment("foreign-openai2.lock", ("test_snippets.py",)),
}


def main(arguments: Sequence[str]) -> int:
    """Run the named environments, or all; return the exit code."""
    names, more = split(arguments)
    failed = [name for name in names or ENVIRONMENTS if not run(name, more)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(name: str, more: Sequence[str]) -> bool:
    """Run the tests of one environment; True when they pass."""
    environment = ENVIRONMENTS[name]
    python = prepared(name, ROOT / "requirements" / environment.lock)
    print(f"foreign: {name}", flush=True)
    tests = [f"tests/foreign/{test}" for test in environment.tests]
    done = subprocess.run(
        # Warnings of frameworks are theirs; ours are errors in the fast tier.
        [python, "-m", "pytest", "-q", "-o", "filterwarnings=ignore", *tests, *more],
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT / "sdk"),
            "TURNCACHE_FOREIGN": name,
            # Nothing leaves this machine: no traces, no price lists, no notices of versions.
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false",
        },
        check=False,
    )
    return done.returncode == 0


def prepared(name: str, lock: Path) -> Path:
    """Return the Python of an environment, filled from its lock when that has changed."""
    home = HOME / name
    python = home / "bin" / "python"
    wanted = hashlib.sha256(lock.read_bytes()).hexdigest()
    stamp = home / STAMP
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"foreign: making {home} (minutes when packages are not cached)", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
    quiet = ["-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([python, *quiet, "-r", str(lock)], check=True)
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
