"""Run the client's tests on every openai version that we name.

``python -m tests.contract.openai_versions [VERSION ...] [-- PYTEST ARGUMENT ...]``

One virtual environment per version is made under ``build/openai-versions`` and kept.
``latest`` is resolved anew each time. Exits with 1 when a version fails.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
ENVIRONMENTS: Final = ROOT / "build" / "openai-versions"
#: The floor of our dependency, the last of 2.x that was tried, the first of 3.x, and
#: whatever an installation gets today.
VERSIONS: Final = ("2.25.0", "2.54.0", "3.0.0", "latest")
TESTS: Final = (
    "tests/contract/test_openai_seam.py",
    "tests/contract/test_call_paths.py",
    "tests/faults/test_wrappers.py",
    "tests/sdk",
)
_TEST_PACKAGES: Final = (
    "hypothesis>=6.130",
    "opentelemetry-sdk>=1.30",
    "pytest-timeout>=2.4",
    "pytest>=8.4",
    "tenacity>=9",
)


def main(arguments: Sequence[str]) -> int:
    """Run the tests on the named versions, or on all; return the exit code."""
    versions, more = split(arguments)
    failed = [version for version in versions or VERSIONS if not run(version, more)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def run(version: str, more: Sequence[str]) -> bool:
    """Run the tests on one version; True when they pass."""
    python = environment(version)
    shown = subprocess.run(
        [python, "-c", "import openai; print(openai.__version__)"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    print(f"openai {shown}", flush=True)
    done = subprocess.run(
        [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--hypothesis-profile=ci",
            *TESTS,
            *more,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "sdk")},
        check=False,
    )
    return done.returncode == 0


def environment(version: str) -> Path:
    """Return the Python of the environment for ``version``, made when it is missing."""
    home = ENVIRONMENTS / version
    python = home / "bin" / "python"
    wanted = [requirement(version), *_TEST_PACKAGES]
    stamp = home / "requirements.json"
    fresh = version != "latest" and stamp.exists()
    if fresh and json.loads(stamp.read_text()) == wanted:
        return python
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    quiet = ["-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.run([python, *quiet, "--upgrade", *wanted], check=True)
    stamp.write_text(json.dumps(wanted))
    return python


def requirement(version: str) -> str:
    """Return what pip is asked for: the version, or the newest that we allow."""
    if version != "latest":
        return f"openai=={version}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(next(name for name in project["dependencies"] if name.startswith("openai")))


def split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the versions and, after ``--``, what pytest gets."""
    listed = list(arguments)
    at = listed.index("--") if "--" in listed else len(listed)
    return listed[:at], listed[at + 1 :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
