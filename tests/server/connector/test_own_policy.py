"""Policies of other packages: found by their entry points, tried, and harmless when broken."""

from __future__ import annotations

import importlib
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.connector.pool_fakes import step
from tests.server.connector.test_extension import NUM_BLOCKS, Desk
from turncache.errors import ConfigError
from turncache_server.connector import config
from turncache_server.connector.config import SECTION, parse_settings

README = (Path(config.__file__).parent / "README.md").read_text(encoding="utf-8")
SECTION_TEXT = README.partition("## Your own policy")[2].partition("\n## ")[0]

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Put a package with a policy where packages are."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def put(source: str, entries: str, package: str = "my_policies") -> None:
        (tmp_path / f"{package}.py").write_text(source)
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[turncache.policies]\n{entries}\n")
        importlib.invalidate_caches()

    yield put
    sys.modules.pop("my_policies", None)


def test_the_pages_example_decides_what_is_kept(install: Install) -> None:
    """As documented: the class, its entry point, and the setting that names it."""
    (source,) = re.findall(r"```python\n(.*?)```", SECTION_TEXT, re.DOTALL)
    (project,) = re.findall(r"```toml\n(.*?)```", SECTION_TEXT, re.DOTALL)
    entries = tomllib.loads(project)["project"]["entry-points"]["turncache.policies"]
    install(source, "\n".join(f"{name} = {where}" for name, where in entries.items()))
    (name,) = entries
    assert parse_settings({SECTION: {"policy": name}}).policy == name
    desk = Desk(policy=name)
    large = desk.call("r1", session="large", num_blocks=6, retain_s=10.0)
    small = desk.call("r2", session="small", num_blocks=3, first=100, retain_s=100.0)
    rank(desk)
    taken = set(desk.flood(NUM_BLOCKS - 1 - len(large)))
    assert taken >= set(small)
    assert taken.isdisjoint(large)


def rank(desk: Desk) -> None:
    """Let a step pass, in which lineages are ordered anew."""
    desk.extension.step_scheduled(step())
    desk.extension.step_processed()


class Timed(Desk):
    """A desk whose clock goes on while the policy thinks."""

    @property
    def now_s(self) -> float:  # type: ignore[override]
        return self._at_s + float(getattr(sys.modules.get("my_policies"), "spent_s", 0.0))

    @now_s.setter
    def now_s(self, at_s: float) -> None:
        self._at_s = at_s


def test_a_policy_that_takes_its_time_has_little_of_the_engines(install: Install) -> None:
    """However often something changes: ordering takes time for each lineage that waits."""
    install(
        "spent_s = 0.0\n"
        "class Slow:\n"
        "    def value(self, lineage, now_s):\n"
        "        global spent_s\n"
        "        spent_s += 0.001\n"
        "        return lineage.retain_until_s\n",
        "slow = my_policies:Slow",
    )
    desk = Timed(policy="slow")
    began_s = desk.now_s
    for number in range(400):
        desk.call(f"r{number}", session=f"s{number % 8}", num_blocks=2, first=10 * (number % 8))
        desk._at_s += 0.01
    passed_s = desk.now_s - began_s
    assert 0 < passed_s - 400 * 0.01 < 0.1 * passed_s


BROKEN = {
    "import": ("import nothing_of_that_name", "ModuleNotFoundError"),
    "no such class": ("", "AttributeError"),
    "arguments": ("class P:\n def __init__(self, x): pass", "TypeError"),
    "no method": ("class P: pass", "AttributeError"),
    "raises": ("class P:\n def value(self, lineage, now_s): return 1 / 0", "ZeroDivisionError"),
    "no number": ("class P:\n def value(self, lineage, now_s): return None", "TypeError"),
    "not finite": (
        "class P:\n def value(self, lineage, now_s): return float('nan')",
        "its value is nan",
    ),
}


@pytest.mark.parametrize(("source", "why"), BROKEN.values(), ids=BROKEN)
def test_a_broken_policy_switches_the_extension_off(
    source: str, why: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says which and why; the engine keeps its own queue."""
    install(source, "p = my_policies:P")
    with caplog.at_level(logging.ERROR):
        desk = Desk(policy="p")
    assert desk.extension.broken is not None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "'p' (my_policies:P) failed" in line
    assert why in line
    assert type(desk.pool.free_block_queue).__name__ == "FakeQueue"
    desk.call("r1", session="s")
    assert desk.extension.gauges()["broken"] == 1


def test_a_policy_that_fails_later_switches_the_extension_off(install: Install) -> None:
    """The hook ends in break-off, and the engine goes on."""
    install(
        "class P:\n"
        " def value(self, lineage, now_s):\n"
        "  if lineage.wanted_blocks == 7: raise ValueError('seven')\n"
        "  return 0.0",
        "p = my_policies:P",
    )
    desk = Desk(policy="p")
    assert desk.extension.broken is None
    desk.call("r1", session="s", num_blocks=6)  # and a rest
    rank(desk)
    assert desk.extension.broken is not None
    assert type(desk.pool.free_block_queue).__name__ == "FakeQueue"
    desk.flood(NUM_BLOCKS - 1)


def test_a_name_that_two_packages_have_is_refused(install: Install) -> None:
    """Which of them would be meant is chance."""
    install("class P: pass", "p = my_policies:P")
    install("class P: pass", "p = others:P", package="others")
    why = Desk(policy="p").extension.broken
    assert why is not None
    assert "my_policies:P, others:P" in why


def test_an_unknown_name_ends_the_start_with_those_that_there_are(install: Install) -> None:
    """Installed ones among them; a package cannot take one of our names."""
    install("class P: pass", "p = my_policies:P\ncost = my_policies:P")
    with pytest.raises(ConfigError, match=r"'q'.*cost, deadline, p"):
        parse_settings({SECTION: {"policy": "q"}})
    assert Desk(policy="cost").extension.broken is None
