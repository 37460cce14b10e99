"""``turncache plan`` through its front door: what it prints, what it refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.conftest import Ran
from turncache_server.cost_profile import dump_profile
from turncache_server.retention.trace import TraceCall, TraceHeader, to_line
from turncache_tools.plan import command
from turncache_tools.plan.priors import prior

Run = Callable[..., Ran]

#: Four agents in a pool for two.
CROWDED = (
    *("--prior", "qwen3-32b", "--agents", "4", "--calls", "4", "--first", "8000"),
    *("--new", "400", "--wait", "20", "--pool", "24000"),
)


def planned(turncache: Run, *arguments: str) -> dict[str, Any]:
    """Return what ``--json`` prints of a plan."""
    ran = turncache("plan", *arguments, "--json")
    assert ran.code == 0, ran.err
    found: dict[str, Any] = json.loads(ran.out)["plan"]
    return found


def test_a_crowded_pool_is_told_what_each_remedy_gives(turncache: Run, tmp_path: Path) -> None:
    """Arms, fits, settings, threshold and the prior's label, on the terminal and on a page."""
    page = tmp_path / "plan.html"
    ran = turncache("plan", *CROWDED, "--decode-pool", "48000", "--html", str(page))
    assert ran.code == 0, ran.err
    for said in (
        "TTFT ms mean",
        "prefill accelerator s",
        "computed again",
        "As sessions become more",
        "Settings tried",
        "retain_budget",
        "Sessions at a time with at most 10 %",
        "Threshold: pulling is cheaper than computing from 1,570",
        "Costs are a prior, not measured here: Qwen3-32B",
    ):
        assert said in ran.out
    assert re.search(r"[\d,]+ calls in \d+ simulations, [\d.]+ s: [\d,]+ calls/s", ran.err)
    text = page.read_text()
    assert text.count("<svg") == 2
    assert "both" in text
    assert "http" not in text.replace("http-equiv", "")


def test_json_is_the_same_for_the_same_seed(turncache: Run, tmp_path: Path) -> None:
    """Figures and details do not depend on when they are made, or on where they go."""
    arguments = ("plan", *CROWDED, "--no-search", "--wait-sigma", "1", "--json")
    out = tmp_path / "figures.json"
    one, two = turncache(*arguments), turncache(*arguments, "--out", str(out))
    assert one.out == two.out == out.read_text()
    assert turncache(*arguments, "--seed", "2").out != one.out
    figures = {each["figure"]: each for each in json.loads(one.out)["figures"]}
    off, double = figures["off_computed_again"], figures["pool_x2_computed_again"]
    assert double["value"] < off["value"]
    assert figures["retention_prefill"]["unit"] == "accelerator s"


def test_arms_follow_from_the_rig(turncache: Run) -> None:
    """One engine has nothing to return from; host tiers are those that were asked for."""
    common = (*CROWDED, "--no-search", "--host-gb", "8")
    names = [arm["arm"] for arm in planned(turncache, *common)["arms"]]
    assert names == ["off", "retention", "pool x2", "host 8 GB"]
    names = [arm["arm"] for arm in planned(turncache, *common, "--decode-pool", "24000")["arms"]]
    assert names == ["off", "retention", "return", "both", "pool x2", "host 8 GB"]


def test_settings_reach_the_simulated_extension(turncache: Run) -> None:
    """A retention that ends at once keeps nothing."""
    common = (*CROWDED, "--no-search", "--others", "0.2", "--others-tokens", "4000")
    kept = planned(turncache, *common)["arms"][1]
    short = ("--set", "retain_default_s=0.001", "--set", "retain_max_s=0.001")
    dropped = planned(turncache, *common, *short)["arms"][1]
    assert kept["again_share"] < dropped["again_share"]


def test_how_many_sessions_fit_is_found(turncache: Run) -> None:
    """More fit with twice the pool; behind the last one that fits too much is computed again."""
    fits = planned(turncache, *CROWDED)["fits"]
    by_arm = fits["by_arm"]
    assert 1 <= by_arm["off"] < by_arm["pool x2"]
    shares = {point["sessions"]: point["again_share"] for point in fits["points"]}
    assert shares[by_arm["off"]]["off"] <= fits["limit"]
    beyond = min(n for n, found in shares.items() if n > by_arm["off"] and "off" in found)
    assert shares[beyond]["off"] > fits["limit"]


def recording(folder: Path) -> Path:
    """Write a trace of mode observe."""
    header = to_line(TraceHeader(trace="t", block_size=16, num_blocks=90, mode="observe"))
    names = ["a" * 16, "b" * 16, "c" * 16]
    rows = [
        TraceCall(t=0, start=0, end=1, session="s", prompt=40, output=8, blocks=names[0]),
        TraceCall(t=6, start=6, end=8, session="s", prompt=70, output=8, blocks=names[1]),
    ]
    trace = folder / "observed.jsonl"
    trace.write_text(header + "".join(map(to_line, rows)))
    return trace


def test_a_recording_brings_its_pool(turncache: Run, tmp_path: Path) -> None:
    """A trace of mode observe says how large the engine's pool was; a profile file its costs."""
    trace = recording(tmp_path)
    profile = tmp_path / "profile.toml"
    profile.write_text(dump_profile(prior("qwen3-8b")))
    files = ("--trace", str(trace), "--profile", str(profile))
    found = planned(turncache, *files, "--no-search")
    assert (found["pool_tokens"], found["calls"]) == (1440, 2)
    assert found["workload"] == "observed: observed.jsonl"


README = Path(command.__file__).with_name("README.md").read_text(encoding="utf-8")
PLANS = re.findall(r"^\$ turncache plan (.*)$", README, re.MULTILINE)


def test_commands_of_the_page_run_as_printed(
    turncache: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a recording, and the profile that the command before them writes."""
    recording(tmp_path)
    (tmp_path / "profile.toml").write_text(dump_profile(prior("qwen3-8b")))
    monkeypatch.chdir(tmp_path)
    assert len(PLANS) == 2
    for words in PLANS:
        ran = turncache("plan", *words.split(), "--no-search")
        assert ran.code == 0, ran.err
    assert (tmp_path / "plan.html").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "costs: give either --profile FILE"),
        (("--prior", "gpt-9"), "--prior 'gpt-9': expected one of deepseek-v3"),
        (("--prior", "glm-5", "--profile", "x"), "give either --profile FILE"),
        (("--profile", "/no/such.toml"), "/no/such.toml: cannot be read"),
        (("--prior", "glm-5"), "--pool: how many tokens"),
        (("--prior", "glm-5", "--pool", "0"), "--pool 0: expected a number from 1"),
        (("--prior", "glm-5", "--pool", "99"), "--pool 99: the longest call has"),
        (("--prior", "glm-5", "--pool", "9999", "--unit", "100"), "--unit 100: expected a mul"),
        (("--prior", "glm-5", "--pool", "9999", "--agents", "0"), "--agents 0"),
        (("--prior", "glm-5", "--pool", "9999", "--sessions", "0"), "--sessions 0"),
        (("--prior", "glm-5", "--pool", "9999", "--others", "-1"), "--others -1"),
        (("--prior", "glm-5", "--pool", "9999", "--miss-rate", "2"), "--miss-rate 2"),
        (("--prior", "glm-5", "--pool", "9999", "--wait-error", "0.5"), "--wait-error 0.5"),
        (("--prior", "glm-5", "--pool", "9999", "--host-gb", "0"), "--host-gb 0"),
        (("--prior", "glm-5", "--pool", "9999", "--set", "policy=luck"), "turncache.policy"),
        (("--prior", "glm-5", "--pool", "9999", "--set", "colour=1"), "turncache.colour"),
        (("--prior", "glm-5", "--pool", "9999", "--html", "/no/such/p.html"), "--html"),
        (("--prior", "glm-5", "--pool", "9999", "--trace", "/no/such"), "--trace /no/such"),
        (("--prior", "glm-5", "--pool", "9999", "--trace", "BAD"), "no workload that is known"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_before_any_work(
    turncache: Run, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    """The code is 2, the message names option and value, and nothing is simulated."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"a": 1}\n')
    ran = turncache("plan", *(str(bad) if each == "BAD" else each for each in arguments))
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert "simulated" not in ran.err


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ('schema = "turncache-profile/9"', "expected 'turncache-profile/1'"),
        ("host_s = -1.0", "host_s: -1.0: expected a number from 0"),
        ("host_s = true", "host_s: True: expected a number from 0"),
        ("pool_tokens = 1.5", "pool_tokens: 1.5: expected a whole number"),
        ("engines = [1]", "expected a list of texts"),
        ('source = "guessed"', "source 'guessed'"),
        ("colour = 1", "colour: no such member; expected one of"),
        ("model", "no TOML"),
        ("", "model is missing"),
    ],
)
def test_bad_profiles_are_refused(turncache: Run, tmp_path: Path, change: str, says: str) -> None:
    """The message names the file, the member and what was expected."""
    name = change.partition(" ")[0] or "model"
    lines = dump_profile(prior("glm-5")).splitlines()
    kept = [line for line in lines if line.partition(" ")[0] != name]
    path = tmp_path / "p.toml"
    path.write_text("\n".join([*kept, change]))
    ran = turncache("plan", "--profile", str(path), "--pool", "9999")
    assert ran.code == 2
    assert says in ran.err
    assert "p.toml" in ran.err


def test_admission_is_an_arm_of_its_own(turncache: Run, tmp_path: Path) -> None:
    """With its longest wait named; its price is in a table of all calls, and it is never best."""
    page = tmp_path / "plan.html"
    crowd = (*CROWDED, "--no-search", "--sessions", "4")
    ran = turncache("plan", *crowd, "--admission-wait", "60", "--html", str(page))
    assert ran.code == 0, ran.err
    for text in (ran.out, page.read_text()):
        assert "New sessions wait for room" in text
        assert "longest wait s" in text
    report = planned(turncache, *crowd, "--admission-wait", "60")
    arms = {arm["arm"]: arm for arm in report["arms"]}
    assert list(arms) == ["off", "retention", "admission", "pool x2", *list(arms)[4:]]
    assert arms["retention"]["waits"] is None
    assert 0 < arms["admission"]["waits"]["max"] <= 60
    assert arms["admission"]["again_share"] < arms["retention"]["again_share"]
    refused = turncache("plan", *crowd, "--admission-wait", "-1")
    assert refused.code == 2
    assert "--admission-wait" in refused.err
