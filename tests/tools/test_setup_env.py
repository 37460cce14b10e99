"""The set-up of environments: pinned, complete, and quick the second time."""

from __future__ import annotations

import importlib.util
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"[A-Za-z0-9._-]+==[^\s=]+")


@pytest.fixture(scope="module")
def setup_env() -> ModuleType:
    """Load the program: its folder is no package."""
    spec = importlib.util.spec_from_file_location("setup_env", ROOT / "requirements/setup_env.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["setup_env"] = module
    spec.loader.exec_module(module)
    return module


def names(pins: list[str]) -> set[str]:
    """Return the normalised names of pins or requirements."""
    return {re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~ ]", p)[0]).lower() for p in pins}


def test_every_line_of_every_lock_is_an_exact_pin(setup_env: ModuleType) -> None:
    """Nothing is left to a resolver."""
    for environment in setup_env.ENVIRONMENTS.values():
        for lock in environment.locks:
            assert [pin for pin in setup_env.pins(lock) if not PIN.fullmatch(pin)] == []


def test_the_development_environment_has_what_the_project_names(setup_env: ModuleType) -> None:
    """Every requirement of package, extras and groups that tests use is in the lock."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = list(project["project"]["dependencies"])
    for extra in ("router", "tools", "langgraph"):
        wanted += project["project"]["optional-dependencies"][extra]
    for group in ("test", "dev"):
        wanted += [item for item in project["dependency-groups"][group] if isinstance(item, str)]
    locks = setup_env.ENVIRONMENTS["dev"].locks
    assert names(wanted) - names(setup_env.merged_pins(locks)) - {"turncache"} == set()


def test_both_environments_test_with_the_same_tools(setup_env: ModuleType) -> None:
    """A test that passes in one environment fails in the other for its own reasons only."""
    dev, engine = set(setup_env.pins("dev.lock")), set(setup_env.pins("engine-test.lock"))
    assert engine <= dev


def test_what_two_locks_pin_has_one_version(setup_env: ModuleType) -> None:
    """A lock that goes into several environments changes no package of theirs."""
    for environment in setup_env.ENVIRONMENTS.values():
        together = [pin.lower() for lock in environment.locks for pin in setup_env.pins(lock)]
        assert len(names(together)) == len({pin.replace("_", "-") for pin in together})


def test_the_extra_for_engines_adds_nothing_to_the_engine_environment(
    setup_env: ModuleType,
) -> None:
    """VLLM brings all that the connector needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extra = project["project"]["optional-dependencies"]["engine"]
    assert names(extra) <= names(setup_env.pins("engine-cpu.lock"))


def test_comments_are_no_pins_and_later_locks_win(
    setup_env: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name is installed once, in the version of the last lock."""
    (tmp_path / "requirements").mkdir()
    (tmp_path / "requirements/a.lock").write_text("# why\nB==1 # here\na==1\n\n")
    (tmp_path / "requirements/b.lock").write_text("b==2\n")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    assert setup_env.pins("a.lock") == ["B==1", "a==1"]
    assert setup_env.merged_pins(["a.lock", "b.lock"]) == ["a==1", "b==2"]


def test_a_ready_environment_is_left_alone(
    setup_env: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a matching stamp nothing is installed: one line is all that happens."""
    if not (Path(sys.prefix) / setup_env.STAMP).exists():
        pytest.skip("this environment was not made by the program")
    name = "engine" if importlib.util.find_spec("vllm") else "dev"
    assert setup_env.main([name, "--into", sys.prefix]) == 0
    assert capsys.readouterr().out == f"{name}: ready ({sys.prefix})\n"


def test_an_unknown_environment_is_a_usage_error(setup_env: ModuleType) -> None:
    """The names are listed."""
    with pytest.raises(SystemExit, match="2"):
        setup_env.main(["production"])


def test_an_environment_that_does_not_fit_on_the_disk_is_refused(
    setup_env: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message says how much is needed and where, and the code is 3."""
    huge = {"dev": setup_env.Environment(folder="x", locks=(), modules=(), size_gib=1e9)}
    monkeypatch.setattr(setup_env, "ENVIRONMENTS", huge)
    assert setup_env.main(["dev", "--into", str(tmp_path / "env")]) == 3
    assert "GiB of disk are needed" in capsys.readouterr().err
