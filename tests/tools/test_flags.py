"""``turncache flags``: what engines are started with by others."""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.vllm_program import write_python
from tests.tools.conftest import Ran
from turncache_server.connector.config import parse_settings
from turncache_server.router.config import parse_config

Run = Callable[..., Ran]
PAIR = ("flags", "--model", "org/model", "--device", "cuda", "--prefill", "1", "--decode", "1")


def as_json(turncache: Run, *arguments: str) -> dict[str, Any]:
    """Run and read the JSON on standard output."""
    ran = turncache(arguments[0], "--json", *arguments[1:])
    assert ran.code == 0, ran.err
    data: dict[str, Any] = json.loads(ran.out)
    return data


def test_flags_are_complete_and_need_nothing_installed(turncache: Run) -> None:
    """Engines and router of a pair can be started from what is printed."""
    data = as_json(turncache, *PAIR)
    prefill, decode = data["engines"]
    assert (prefill["name"], decode["name"]) == ("prefill-0", "decode-0")
    settings = parse_settings(decode["kv_transfer_config"]["kv_connector_extra_config"])
    assert dict(settings.peers) == {"prefill-0": "tcp://127.0.0.1:5800"}
    config = parse_config(tomllib.loads(data["router_toml"]))
    assert [engine.url for engine in config.engines] == [
        "http://127.0.0.1:8100",
        "http://127.0.0.1:8200",
    ]


def test_flags_describe_a_fleet(turncache: Run) -> None:
    """Engines on machines of their own listen there, and everybody finds everybody."""
    data = as_json(
        turncache,
        *PAIR,
        *("--engine-host", "prefill-0=10.0.0.1", "--engine-host", "decode-0=fd00::2"),
        *("--fleet-secret-file", "/run/secrets/fleet"),
    )
    prefill, decode = data["engines"]
    for engine, host, at in ((prefill, "10.0.0.1", 5800), (decode, "fd00::2", 5801)):
        shown = f"[{host}]" if ":" in host else host
        settings = parse_settings(engine["kv_transfer_config"]["kv_connector_extra_config"])
        assert settings.name == engine["name"]
        assert settings.fleet_secret_file == "/run/secrets/fleet"
        assert settings.control_address == f"tcp://{shown}:{at}"
        assert engine["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == host
        assert engine["arguments"][engine["arguments"].index("--host") + 1] == host
    section = prefill["kv_transfer_config"]["kv_connector_extra_config"]
    assert dict(parse_settings(section).peers) == {"decode-0": "tcp://[fd00::2]:5801"}
    config = parse_config(tomllib.loads(data["router_toml"]))
    assert config.fleet_secret_file == "/run/secrets/fleet"
    assert [(e.url, e.control) for e in config.engines] == [
        ("http://10.0.0.1:8100", "tcp://10.0.0.1:5800"),
        ("http://[fd00::2]:8200", "tcp://[fd00::2]:5801"),
    ]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--engine-host", "prefill-0=10.0.0.1"), "10.0.0.1 is not loopback"),
        (("--engine-host", "prefill-9=10.0.0.1"), "no engine 'prefill-9'"),
        (("--engine-host", "prefill-0=node-7"), "'node-7': expected an IP address"),
        (("--engine-host", "prefill-0=0.0.0.0"), "expected an address that others reach"),
        (("--set", "fleet_secret_file=/x"), "set the stack's own fleet_secret_file"),
        (("--set-router", "fleet_secret_file=/x"), "follows from the stack"),
        (("--set-router", "colour=red"), "no such setting"),
    ],
)
def test_a_fleet_that_cannot_work_is_refused(
    turncache: Run, arguments: tuple[str, ...], why: str
) -> None:
    """The code is 2, and the value is named."""
    ran = turncache(*PAIR, *arguments)
    assert ran.code == 2
    assert why in ran.err


def test_the_shell_form_says_the_same(turncache: Run) -> None:
    """Copied into a shell, each block has the arguments and variables of the JSON."""
    data = as_json(turncache, *PAIR, "--", "--max-num-seqs", "7")
    text = turncache(*PAIR, "--", "--max-num-seqs", "7").out
    *_, config = text.partition("<<'END'\n")
    assert config == f"{data['router_toml']}END\nturncache router --config router.toml\n"
    blocks = text.split("# ")
    for engine in data["engines"]:
        block = next(b for b in blocks if b.startswith(f"{engine['name']}\n"))
        words = shlex.split(block.partition("\n")[2].replace("\\\n", " "))
        number = len(engine["environment"])
        assert dict(word.split("=", 1) for word in words[:number]) == engine["environment"]
        assert words[number:] == ["python", "-m", engine["module"], *engine["arguments"]]
        assert words[-2:] == ["--max-num-seqs", "7"]


def test_flags_merge_into_what_an_engine_has(turncache: Run) -> None:
    """Another connector becomes a sibling of ours."""
    existing = json.dumps({"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
    data = as_json(turncache, "flags", "--model", "m", "--merge", existing)
    transfer = data["engines"][0]["kv_transfer_config"]
    names = [c["kv_connector"] for c in transfer["kv_connector_extra_config"]["connectors"]]
    assert names == ["OffloadingConnector", "RetentionConnector"]
    argument = data["engines"][0]["arguments"]
    assert json.loads(argument[argument.index("--kv-transfer-config") + 1]) == transfer


def test_a_plain_engine_has_nothing_to_merge(turncache: Run) -> None:
    """Stock flags hold no connector."""
    ran = turncache("flags", "--model", "m", "--kind", "plain", "--merge", "{}")
    assert ran.code == 2
    assert "no connector to merge" in ran.err


@pytest.mark.parametrize(
    ("facts", "has_rig"), [({}, True), ({"cuda": True}, False), ({"version": None}, False)]
)
def test_the_profile_follows_the_installed_vllm(
    turncache: Run, tmp_path: Path, facts: dict[str, Any], has_rig: bool
) -> None:
    """Flags for a CPU only where vLLM is a CPU build; without vLLM, for a GPU."""
    python = write_python(tmp_path, **facts)
    data = as_json(turncache, "flags", "--model", "m", "--python", python)
    assert ("VLLM_CPU_KVCACHE_SPACE" in data["engines"][0]["environment"]) is has_rig


def test_options_reach_the_flags(turncache: Run, model_folder: Path) -> None:
    """Every option of a stack has its effect."""
    data = as_json(
        turncache,
        *("flags", "--model", str(model_folder), "--device", "cuda", "--no-router"),
        *("--served-model-name", "it", "--mode", "observe", "--max-model-len", "4096"),
        *("--dtype", "float32", "--num-blocks", "single=99", "--set", "retain_budget=0.25"),
        *("--set", "policy=deadline", "--port", "9000", "--engine-port", "9100"),
        *("--control-port", "9200", "--gpus", "3,4", "--tensor-parallel-size", "2"),
    )
    (engine,) = data["engines"]
    arguments = " ".join(engine["arguments"])
    for part in (
        f"--model {model_folder}",
        "--served-model-name it",
        "--port 9100",
        "--tensor-parallel-size 2",
        "--max-model-len 4096",
        "--dtype float32",
        "--num-gpu-blocks-override 99",
    ):
        assert part in arguments
    assert engine["environment"]["CUDA_VISIBLE_DEVICES"] == "3,4"
    settings = parse_settings(engine["kv_transfer_config"]["kv_connector_extra_config"])
    assert (settings.mode, settings.policy, settings.retain_budget) == (
        "observe",
        "deadline",
        0.25,
    )
    assert settings.control_address == "tcp://127.0.0.1:9200"
    assert data["router_toml"] is None
