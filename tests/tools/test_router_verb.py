"""``turncache router``: the router alone."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.conftest import Ran, Secret

Run = Callable[..., Ran]
CONFIG = """
port = 0
[[engines]]
name = "single-0"
side = "single"
url = "http://127.0.0.1:8100"
"""


def test_a_configuration_is_checked_without_starting(turncache: Run, tmp_path: Path) -> None:
    """What was read is shown, for people and for programs."""
    path = tmp_path / "router.toml"
    path.write_text(CONFIG)
    ran = turncache("router", "--config", str(path), "--check", "--json")
    assert ran.code == 0
    assert json.loads(ran.out)["engines"] == [
        {"name": "single-0", "side": "single", "url": "http://127.0.0.1:8100", "control": None}
    ]
    assert "1 engine, " in turncache("router", "--config", str(path), "--check").out


def test_flags_win_over_the_file_and_need_none(turncache: Run, tmp_path: Path) -> None:
    """A setting is a flag of the same name, and engines are given one by one."""
    path = tmp_path / "router.toml"
    path.write_text(f"max_headers = 50\nmax_body_bytes = 2048\n{CONFIG}")
    flags = ("--max-headers", "20", "--body-timeout-s", "7", "--check", "--json")
    ran = turncache("router", "--config", str(path), *flags)
    limits = json.loads(ran.out)["limits"]
    assert (limits["max_headers"], limits["max_body_bytes"]) == (20, 2048)
    assert limits["body_timeout_s"] == 7
    engine = "name=a,side=single,url=http://127.0.0.1:1"
    ran = turncache("router", "--engine", engine, "--port", "9000", "--no-admin", *flags)
    assert [each["name"] for each in json.loads(ran.out)["engines"]] == ["a"]
    assert json.loads(ran.out)["port"] == 9000
    ran = turncache("router", "--config", str(path), "--max-headers", "1", "--check")
    assert ran.code == 2
    assert ran.err.startswith("max_headers: 1: expected")
    assert turncache("router", "--check").code == 2


def test_a_check_names_the_file_of_the_engines(turncache: Run, tmp_path: Path) -> None:
    """Whose engines were counted is said, and a file that cannot be used is refused by name."""
    path, engines = tmp_path / "router.toml", tmp_path / "engines.toml"
    path.write_text(f'engines_file = "{engines}"\n')
    engines.write_text(CONFIG.replace("port = 0", ""))
    check = ("router", "--config", str(path), "--check")
    assert f"1 engine from {engines}, " in turncache(*check).out
    assert json.loads(turncache(*check, "--json").out)["engines_file"] == str(engines)
    engines.write_text(CONFIG)
    ran = turncache(*check)
    assert ran.code == 2
    assert str(engines) in ran.err
    path.write_text(CONFIG)
    assert json.loads(turncache(*check, "--json").out)["engines_file"] is None


def test_a_check_reads_the_fleets_secret(turncache: Run, tmp_path: Path, secret: Secret) -> None:
    """Engines may be anywhere then; the digest is shown, and a file that cannot be used refused."""
    path = tmp_path / "router.toml"
    engine = 'control = "tcp://engine-0.fleet:5800"\n'
    path.write_text(f'fleet_secret_file = "{secret.path}"\n{CONFIG}{engine}')
    check = ("router", "--config", str(path), "--check")
    assert json.loads(turncache(*check, "--json").out)["fleet_secret"] == secret.keys.digest
    assert secret.keys.digest in turncache(*check).out
    secret.path.chmod(0o644)
    ran = turncache(*check)
    assert ran.code == 2
    assert "chmod 600" in ran.err
    path.write_text(CONFIG + engine)
    ran = turncache(*check)
    assert ran.code == 2
    assert "fleet_secret_file" in ran.err


def test_a_key_is_made_and_counted(turncache: Run, tmp_path: Path) -> None:
    """The key is printed once, its digest kept; the check says whom the router serves."""
    path, keys = tmp_path / "router.toml", tmp_path / "keys.toml"
    path.write_text(CONFIG)
    assert "no keys" in turncache("router", "--config", str(path), "--check").out
    ran = turncache("router", "--config", str(path), "--new-key", "red")
    assert ran.code == 2
    assert "keys_file: not set" in ran.err
    path.write_text(f'keys_file = "{keys}"\n{CONFIG}')
    made = turncache("router", "--config", str(path), "--new-key", "red")
    assert made.code == 0
    assert made.out.strip().startswith("tc-")
    assert made.out.strip() not in keys.read_text()
    turncache("router", "--config", str(path), "--new-key", "ops", "--admin-key")
    check = ("router", "--config", str(path), "--check")
    assert "2 keys of 2 tenants" in turncache(*check).out
    assert json.loads(turncache(*check, "--json").out)["tenants"] == ["ops", "red"]


def test_a_check_needs_no_cluster(turncache: Run, tmp_path: Path) -> None:
    """Which engines Kubernetes names is asked when the router starts."""
    path = tmp_path / "router.toml"
    path.write_text('kubernetes_selector = "app=turncache"')
    ran = turncache("router", "--config", str(path), "--check")
    assert ran.code == 0
    assert "engines that Kubernetes names (app=turncache)" in ran.out
    ran = turncache("router", "--config", str(path), "--check", "--json")
    assert json.loads(ran.out)["kubernetes_selector"] == "app=turncache"


@pytest.mark.parametrize(
    "setting",
    [
        'engine_key_env = "TURNCACHE_NO_SUCH_VARIABLE"',
        'redis_url = "redis://h"\nredis_password_env = "TURNCACHE_NO_SUCH_VARIABLE"',
    ],
    ids=["engines' key", "Redis' password"],
)
def test_a_check_names_the_variable_that_there_is_not(
    turncache: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """The router would not start; what is in a variable is not shown."""
    path = tmp_path / "router.toml"
    path.write_text(f"{setting}\n{CONFIG}")
    check = ("router", "--config", str(path), "--check")
    ran = turncache(*check)
    assert (ran.code, ran.out) == (2, "")
    assert "no variable 'TURNCACHE_NO_SUCH_VARIABLE'" in ran.err
    monkeypatch.setenv("TURNCACHE_NO_SUCH_VARIABLE", "geheim")
    ran = turncache(*check)
    assert (ran.code, ran.err) == (0, "")
    assert "geheim" not in ran.out


def test_a_check_reads_the_certificate(turncache: Run, tmp_path: Path) -> None:
    """Of the router, and the authorities of the engines."""
    path, none = tmp_path / "router.toml", tmp_path / "none.pem"
    for setting, lines in (
        ("tls_cert_file", f'tls_cert_file = "{none}"\ntls_key_file = "{none}"'),
        ("engines_ca_file", f'engines_ca_file = "{none}"'),
    ):
        path.write_text(f"{lines}\n{CONFIG}")
        ran = turncache("router", "--config", str(path), "--check")
        assert ran.code == 2
        assert ran.err.startswith(f"{setting}: ")


def test_a_check_says_what_has_no_effect(turncache: Run, tmp_path: Path) -> None:
    """Single engines have no next prompt to bring up to date; a pair has."""
    path = tmp_path / "router.toml"
    path.write_text(f"warm_ahead_s = 2\nserve_on_prefill = true\n{CONFIG}")
    check = ("router", "--config", str(path), "--check")
    ran = turncache(*check)
    assert ran.code == 0
    assert "warm_ahead_s = 2.0 has no effect" in ran.err
    assert len(json.loads(turncache(*check, "--json").out)["warnings"]) == 2
    pair = CONFIG.replace('"single"', '"prefill"') + CONFIG.replace("port = 0", "").replace(
        '"single"', '"decode"'
    ).replace("single-0", "decode-0").replace("8100", "8200")
    path.write_text(f"warm_ahead_s = 2\n{pair}")
    ran = turncache(*check)
    assert (ran.code, ran.err) == (0, "")


def test_a_wrong_configuration_names_the_setting(turncache: Run, tmp_path: Path) -> None:
    """The code is 2."""
    path = tmp_path / "router.toml"
    path.write_text(CONFIG.replace("port", "harbour"))
    ran = turncache("router", "--config", str(path), "--check")
    assert ran.code == 2
    assert "harbour: no such setting" in ran.err


def test_the_router_runs_until_it_is_told_to_end(tmp_path: Path) -> None:
    """It serves in the foreground, says where, and ends in order."""
    path = tmp_path / "router.toml"
    path.write_text(CONFIG)
    command = [sys.executable, "-m", "turncache_tools", "router", "--config", str(path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as program:
        assert program.stderr is not None
        for line in program.stderr:
            if "router listens on http://127.0.0.1:" in line:
                break
        else:
            raise AssertionError("it did not say where it listens")
        program.send_signal(signal.SIGTERM)
        program.communicate(timeout=20)
    assert program.returncode == 0
