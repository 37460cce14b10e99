"""The server's documents: tables made from the code, commands that parse, names that exist."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from turncache.protocol import PROTOCOL_VERSION, SPOKEN_VERSIONS, Reason
from turncache_server import reasons
from turncache_server.connector import metric_table
from turncache_server.control.messages import CONTROL_VERSION, VERSION_SKEW
from turncache_server.router.config import RouterConfig
from turncache_server.router.metrics import Metrics
from turncache_tools.cli import app

SERVER = Path(__file__).resolve().parents[2] / "server"
PAGE = (SERVER / "README.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((SERVER / "observability" / "dashboard.json").read_text())
#: One text per rule, from its name on.
ALERTS = (SERVER / "observability" / "alerts.yaml").read_text().split("- alert: ")[1:]
EXPRESSIONS = [
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(rule.partition("expr:")[2].partition("labels:")[0] for rule in ALERTS),
]


def test_every_reason_is_explained() -> None:
    """The page's table is the one that the code makes of the closed list."""
    assert set(reasons.EXPLANATIONS) == set(Reason)
    assert reasons.table() in PAGE


def test_every_metric_is_explained() -> None:
    """Likewise what engines count."""
    assert metric_table.table() in PAGE


def test_the_routers_metrics_are_on_its_page() -> None:
    """Every name that its ``/metrics`` has."""
    page = (SERVER / "turncache_server" / "router" / "README.md").read_text(encoding="utf-8")
    names = re.findall(r"^# TYPE (\S+) ", Metrics(lambda: 0).render().decode(), re.MULTILINE)
    missing = [n for n in names if not n.endswith("_created") and n not in page]
    assert missing == []


def known_metrics() -> set[str]:
    """Return every name that an engine or the router exposes, by its samples."""
    router = re.findall(r"^# TYPE (\S+) (\S+)$", Metrics(lambda: 0).render().decode(), re.MULTILINE)
    names = {name for name, _ in router}
    names |= {f"{name}_bucket" for name, kind in router if kind == "histogram"}
    names |= {f"{metric.name}_total" for metric in metric_table.COUNTER_METRICS}
    names |= {metric.name for metric in metric_table.GAUGE_METRICS}
    names |= {f"{metric.name}_bucket" for metric in metric_table.HISTOGRAM_METRICS}
    return names


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_dashboard_and_alerts_ask_for_what_there_is(expression: str) -> None:
    """A metric that is renamed takes its panels along."""
    asked = set(re.findall(r"\bturncache_[a-z_]+", expression))
    assert asked
    assert asked <= known_metrics()


def test_panels_do_not_overlap() -> None:
    """Each has its place on the board."""
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_each_alert_says_what_to_do() -> None:
    """Three of engines: lost share, abandoned reads near their cap, any incompatible peer. Three
    of the router: calls that fail, an engine that is down, a list of engines that is refused.
    Two of what lies between the legs: decode that is behind, prompts that are lost.
    """
    assert [rule.split()[0] for rule in ALERTS] == [
        "TurncacheTokensLost",
        "TurncacheAbandonedReads",
        "TurncachePeerIncompatible",
        "TurncacheCallsFail",
        "TurncacheEngineDown",
        "TurncacheEngineListRefused",
        "TurncacheDecodeBehind",
        "TurncachePromptsPrefilledAgain",
    ]
    for rule in ALERTS:
        for part in ("expr:", "severity:", "summary:", "description:"):
            assert rule.count(part) == 1


PLAN_PAGE = (SERVER / "turncache_tools" / "plan" / "README.md").read_text(encoding="utf-8")
UPGRADING = (SERVER / "UPGRADING.md").read_text(encoding="utf-8")
COMMANDS = re.findall(
    r"^\$ turncache (\S+)(.*?)(?:\s+#.*)?$", f"{PAGE}\n{PLAN_PAGE}\n{UPGRADING}", re.MULTILINE
)


@pytest.mark.parametrize(("verb", "rest"), COMMANDS)
def test_every_command_of_the_pages_exists(verb: str, rest: str) -> None:
    """With the flags that it is shown with."""
    shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.output)
    for flag in re.findall(r"--[a-z-]+", rest):
        assert flag in plain, flag


def test_the_upgrading_page_has_the_versions_of_the_code() -> None:
    """Whoever raises one has to say what it meets; links and settings are there."""
    rows = {
        row.split("|")[1].strip().split()[0]: row.split("|")[3].strip()
        for row in UPGRADING.splitlines()
        if row.startswith("| ") and "between" not in row
    }
    assert rows["headers"] == rows["hints"] == str(PROTOCOL_VERSION)
    assert rows["control"] == str(CONTROL_VERSION)
    assert (VERSION_SKEW, len(SPOKEN_VERSIONS)) == (1, 2)
    settings = {item.name for item in dataclasses.fields(RouterConfig)}
    words = re.findall(r"`([a-z]+(?:_[a-z]+)+)(?: = [^`]*)?`", UPGRADING)
    named = {word for word in words if not word.startswith("turncache_")}
    assert {"shutdown_s", "return_enabled"} <= named
    assert named <= settings | {"vllm_xargs", "tc_v", "allow_untested_vllm"}
    for target in re.findall(r"\]\(([^)#]+)", UPGRADING):
        assert (SERVER / target).exists(), target


def test_the_security_page_names_settings_that_exist() -> None:
    """And what it has to say: NIXL's ports, what is probed, what is not protected."""
    page = (SERVER / "SECURITY.md").read_text(encoding="utf-8")
    settings = {item.name for item in dataclasses.fields(RouterConfig)}
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)(?: = [^`]*)?`", page))
    assert {"keys_file", "serve_without_keys", "fleet_secret_file"} <= named <= settings
    for part in ("| not protected |", "| what can be probed without keys |", "NIXL", "5600+"):
        assert part in page
    for target in re.findall(r"\]\(([^)#]+)", page):
        assert (SERVER / target).exists(), target
