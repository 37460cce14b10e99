"""``turncache mode``, ``stats`` and ``doctor`` against control sockets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.vllm_program import write_python
from tests.tools.conftest import ControlledEngine, Ran, Secret
from turncache_server.control.keys import derive_keys
from turncache_server.control.messages import SessionRow

Run = Callable[..., Ran]
Control = Callable[..., ControlledEngine]


def test_modes_are_switched_together(turncache: Run, control: Control) -> None:
    """All named engines are in the mode afterwards, and both addresses are shown."""
    engines = [control(), control(mode="observe")]
    ran = turncache("mode", *(engine.address for engine in engines), "off")
    assert ran.code == 0
    assert [engine.mode for engine in engines] == ["off", "off"]
    assert all(engine.address in ran.out for engine in engines)


def test_a_mode_can_be_asked_for(turncache: Run, control: Control) -> None:
    """Without a mode nothing is changed; a port alone is an address."""
    engine = control(mode="observe")
    port = engine.address.rpartition(":")[2]
    ran = turncache("mode", port, "--json")
    assert ran.code == 0
    assert json.loads(ran.out) == {engine.address: {"mode": "observe", "why": ""}}


def test_an_engine_that_does_not_switch_fails_the_command(turncache: Run, control: Control) -> None:
    """The engine's reason is shown, and the code is 1."""
    engine = control(mode="off", stays="the self-test failed")
    ran = turncache("mode", engine.address, "on")
    assert ran.code == 1
    assert "the self-test failed" in ran.out
    assert f"not in mode on: {engine.address}" in ran.err


def test_an_engine_that_does_not_answer_is_an_engine_fault(turncache: Run) -> None:
    """The code is 4, and the address is named."""
    for verb in ("stats", "sessions"):
        ran = turncache(verb, "tcp://127.0.0.1:1", "--timeout", "0.2")
        assert (ran.code, ran.out) == (4, "")
        assert ran.err.count("tcp://127.0.0.1:1") == 1


def test_a_word_that_is_no_mode_is_told_from_an_address(turncache: Run) -> None:
    """A slip in the mode is not taken for an engine."""
    ran = turncache("mode", "5800", "oof")
    assert (ran.code, ran.out) == (2, "")
    assert "mode 'oof' (did you mean off?): expected one of off, observe, on" in ran.err


def test_the_doctor_of_named_engines_looks_at_them_alone(
    turncache: Run, control: Control, tmp_path: Path
) -> None:
    """No vLLM where the command runs is no failure; an interpreter that is named is looked at."""
    python = write_python(tmp_path, version=None)
    engine = control()
    ran = turncache("doctor", engine.address, "--json")
    assert ran.code == 0
    assert [finding["subject"] for finding in json.loads(ran.out)] == [engine.address]
    assert turncache("doctor", engine.address, "--python", python).code == 1


def test_a_dead_engine_keeps_nobody_else_from_being_switched(
    turncache: Run, control: Control
) -> None:
    """All are told, all are shown, and the code is 4."""
    engine = control()
    ran = turncache("mode", "tcp://127.0.0.1:1", engine.address, "off", "--timeout", "0.2")
    assert ran.code == 4
    assert engine.mode == "off"
    assert engine.address in ran.out
    assert "tcp://127.0.0.1:1" in ran.out


def test_a_fleet_is_asked_with_its_secret(turncache: Run, control: Control, secret: Secret) -> None:
    """Modes and numbers of engines with keys."""
    engine = control(keys=secret.keys, stats={"pulls": 3})
    option = ("--fleet-secret-file", str(secret.path))
    assert turncache("mode", engine.address, "off", *option).code == 0
    assert engine.mode == "off"
    assert "pulls" in turncache("stats", engine.address, *option).out


def test_a_secret_that_was_left_out_is_said(
    turncache: Run, control: Control, secret: Secret
) -> None:
    """At once, with what to give; the code is 4."""
    engine = control(keys=secret.keys)
    for verb in ("stats", "mode"):
        ran = turncache(verb, engine.address, "--timeout", "30")
        assert ran.code == 4
        assert "this side has none: give this side fleet_secret_file" in ran.err
    plain = control()
    ran = turncache("stats", plain.address, "--fleet-secret-file", str(secret.path))
    assert ran.code == 4
    assert "it has another one or none" in ran.err


@pytest.mark.parametrize("verb", ["stats", "mode", "doctor"])
def test_an_address_beyond_loopback_needs_the_secret(turncache: Run, verb: str) -> None:
    """The code is 2, and the way out is named."""
    ran = turncache(verb, "tcp://10.0.0.1:5800")
    assert ran.code == 2
    assert "fleet_secret_file" in ran.err


def test_doctor_asks_a_fleet_with_its_secret(
    turncache: Run, control: Control, secret: Secret, engine_python: str
) -> None:
    """The secret's digest is shown, so that machines can be compared; a wrong one is found."""
    option = ("--fleet-secret-file", str(secret.path), "--python", engine_python, "--json")
    right = control(keys=secret.keys, hello={"name": "decode-0"})
    ran = turncache("doctor", right.address, *option)
    findings = {f["subject"]: f for f in json.loads(ran.out)}
    assert ran.code == 0
    assert findings["fleet secret"]["detail"] == f"digest {secret.keys.digest}"
    assert findings[right.address]["detail"].startswith("decode-0, single")
    wrong = control(keys=derive_keys(b"another"))
    ran = turncache("doctor", wrong.address, *option)
    assert ran.code == 1
    assert "it has another one or none" in ran.out


def test_doctor_finds_a_secret_that_others_can_read(
    turncache: Run, control: Control, secret: Secret, engine_python: str
) -> None:
    """Engines are not asked with it."""
    secret.path.chmod(0o644)
    engine = control(keys=secret.keys)
    ran = turncache(
        *("doctor", engine.address, "--python", engine_python),
        *("--fleet-secret-file", str(secret.path), "--json"),
    )
    assert ran.code == 1
    findings = {f["subject"]: f for f in json.loads(ran.out)}
    assert findings["fleet secret"]["verdict"] == "failed"
    assert "chmod 600" in findings["fleet secret"]["detail"]
    assert engine.address not in findings


@pytest.mark.parametrize("url", ["http://h:99999", "localhost:8000", "ftp://h:1", "http://"])
def test_doctor_refuses_what_is_no_url_of_a_router(turncache: Run, url: str) -> None:
    """The value and what was expected, not a trace."""
    ran = turncache("doctor", "--router", url)
    assert ran.code == 2
    assert url in ran.err
    assert "expected a URL such as http://" in ran.err


def test_stats_have_a_column_per_engine(turncache: Run, control: Control) -> None:
    """A number that one engine does not have is a dash, in JSON it is absent."""
    first, second = control(stats={"pulls": 3, "pull_s": 0.25}), control()
    addresses = (first.address, second.address)
    rows = {
        line.split()[0]: line.split()[1:]
        for line in turncache("stats", *addresses).out.splitlines()
    }
    assert rows["pulls"] == ["3", "-"]
    assert rows["pull_s"] == ["0.25", "-"]
    assert rows["free_blocks"] == ["7", "7"]
    data = json.loads(turncache("stats", *addresses, "--json").out)
    assert data[first.address]["counters"] == {"pulls": 3, "pull_s": 0.25}
    assert data[second.address] == {"counters": {}, "gauges": {"free_blocks": 7}}


def test_doctor_finds_a_complete_environment_well(turncache: Run, engine_python: str) -> None:
    """Every finding is ok or a note, and the code is 0."""
    ran = turncache("doctor", "--python", engine_python, "--json")
    assert ran.code == 0
    verdicts = {f["subject"]: f["verdict"] for f in json.loads(ran.out)}
    assert verdicts == {"vllm": "ok", "turncache": "ok", "nixl": "ok", "machine": "ok"}


def test_doctor_names_what_is_missing(turncache: Run, tmp_path: Path) -> None:
    """A missing vLLM fails; missing NIXL is a note, because one engine needs none."""
    python = write_python(tmp_path, version=None, nixl=False)
    ran = turncache("doctor", "--python", python, "--json")
    assert ran.code == 1
    verdicts = {f["subject"]: f["verdict"] for f in json.loads(ran.out)}
    assert (verdicts["vllm"], verdicts["nixl"]) == ("failed", "note")


def test_doctor_compares_engines(turncache: Run, control: Control, engine_python: str) -> None:
    """Engines that cannot exchange KV are named with both values."""
    first = control()
    second = control(hello={"fingerprint": {"model": "other"}, "missing": ["a tool parser"]})
    ran = turncache("doctor", first.address, second.address, "--python", engine_python, "--json")
    assert ran.code == 1
    findings = {f["subject"]: f for f in json.loads(ran.out)}
    assert findings[first.address]["verdict"] == "ok"
    assert findings[second.address]["verdict"] == "note"
    assert "a tool parser" in findings[second.address]["detail"]
    assert findings["same KV"]["verdict"] == "failed"
    assert "'m'" in findings["same KV"]["detail"]
    assert "'other'" in findings["same KV"]["detail"]


def test_doctor_agrees_when_engines_match(
    turncache: Run, control: Control, engine_python: str
) -> None:
    """Equal fingerprints are said to be equal; a router that is not there is not."""
    engines = [control(), control()]
    ran = turncache(
        "doctor",
        *(engine.address for engine in engines),
        *("--python", engine_python, "--router", "http://127.0.0.1:1"),
    )
    assert ran.code == 1
    assert "engines can exchange KV" in ran.out
    assert "does not answer /health" in ran.out


def test_sessions_are_a_table_of_all_engines(turncache: Run, control: Control) -> None:
    """What is kept in tokens, when it is expected; the limit is said, JSON has all numbers."""
    rows = [
        SessionRow(session="0a0a", state="waiting", lineages=2, kept_blocks=9, expected_s=-3.4),
        SessionRow(session="0b0b", state="serving", lineages=1, kept_blocks=4, kept_s=70.0),
    ]
    first, second = control(sessions=rows), control()
    ran = turncache("sessions", first.address, second.address)
    assert ran.code == 0
    shown = {line.split()[1]: line.split()[2:] for line in ran.out.splitlines()[1:]}
    assert shown["0a0a"] == ["waiting", "144", "9", "2", "-3", "s", "-"]
    assert shown["0b0b"] == ["serving", "64", "4", "1", "-", "70", "s"]
    ran = turncache("sessions", first.address, "--limit", "1", "--json")
    (data,) = json.loads(ran.out).values()
    assert (data["num_sessions"], data["num_handovers"], data["num_calls"]) == (2, 1, 2)
    assert [row["session"] for row in data["sessions"]] == ["0a0a"]
    assert data["sessions"][0]["kept_tokens"] == 144
    assert "1 of 2 sessions" in turncache("sessions", first.address, "--limit", "1").err


@pytest.mark.parametrize("verb", ["drain", "sessions"])
def test_an_engine_that_is_gone_cannot_be_drained_or_listed(turncache: Run, verb: str) -> None:
    """The code is 4, and the address is named."""
    ran = turncache(verb, "tcp://127.0.0.1:1", *(("--timeout", "0.2") if verb != "drain" else ()))
    assert ran.code == 4
    assert "tcp://127.0.0.1:1" in ran.err
