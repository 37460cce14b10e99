"""``turncache flags``: what to start engines with where somebody else starts them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from turncache.errors import ConfigError, EnvironmentFault, UsageError
from turncache_server.launch import preflight
from turncache_server.launch.machine import (
    EngineEnvironment,
    Machine,
    free_ports,
    inspect_environment,
    inspect_machine,
)
from turncache_server.launch.profiles import (
    SERVER_MODULE,
    EngineLaunch,
    Ports,
    count_ports,
    plan_engines,
)
from turncache_server.launch.router_config import router_config
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.transfer import merge
from turncache_tools.shell import assignments, write, write_json

TRANSFER_FLAG: Final = "--kv-transfer-config"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What a stack is started with by hand.

    Attributes:
        engines: how each engine is started.
        router_toml: the router's configuration, None without a router.
    """

    engines: tuple[EngineLaunch, ...]
    router_toml: str | None


def flags(
    spec: StackSpec,
    *,
    merge_with: Annotated[
        str | None,
        typer.Option("--merge", help="Existing --kv-transfer-config (JSON) to add ours to."),
    ] = None,
    engine_host: Annotated[
        list[str] | None,
        typer.Option(
            help="IP address of one engine's machine, such as prefill-0=10.0.0.1; needs "
            "--fleet-secret-file, a path on those machines."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Flags as JSON.")] = False,
) -> None:
    """Print the exact flags and environment of engines that others start.

    For Kubernetes, Slurm, Ray or a shell: nothing is started, nothing has to be installed.
    """
    if engine_host:
        hosts = assignments(engine_host, "--engine-host")
        spec = replace(spec, engine_hosts={name: str(host) for name, host in hosts.items()})
    result = make_flags(spec, merge_with)
    if as_json:
        write_json(as_data(result))
    else:
        write(as_shell(result))


def make_flags(spec: StackSpec, merge_with: str | None) -> Flags:
    """Work out the flags.

    Raises:
        ConfigError: the specification or the existing configuration cannot work.
    """
    preflight.check_settings(spec)
    folder = Path(spec.model).expanduser()
    if folder.is_dir():
        spec = replace(spec, model=str(folder.resolve()))
    environment, machine = _facts(spec)
    ports: Ports = count_ports(spec, free_ports(1 + 3 * len(spec.members)))
    launches = plan_engines(spec, machine=machine, environment=environment, ports=ports)
    if merge_with is not None:
        existing = _read_existing(merge_with)
        launches = tuple(_merged(launch, existing) for launch in launches)
    toml = router_config(spec, ports.router, launches) if spec.has_router else None
    if toml is not None:
        preflight.check_router_config(toml)
    return Flags(engines=launches, router_toml=toml)


def _facts(spec: StackSpec) -> tuple[EngineEnvironment, Machine]:
    """Describe where the engines will run: somewhere else, so only what was said counts."""
    on_gpu = spec.device != "cpu"
    if spec.device == "auto":
        with suppress(EnvironmentFault):
            found = inspect_environment(spec.python)
            on_gpu = found.vllm_version is None or found.cuda
    somewhere = EngineEnvironment(
        python="python", vllm_version=None, cuda=on_gpu, nixl=True, turncache=True
    )
    # Devices are chosen by whoever places the engines; cores matter to the CPU rig only.
    return somewhere, replace(inspect_machine(), gpus=())


def _read_existing(text: str) -> Mapping[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise UsageError(f"--merge: not JSON: {error}") from error
    if not isinstance(data, dict):
        raise UsageError(f"--merge: expected a JSON object, got {text[:80]!r}")
    return data


def _merged(launch: EngineLaunch, existing: Mapping[str, Any]) -> EngineLaunch:
    if TRANSFER_FLAG not in launch.arguments:
        raise ConfigError("kind", "plain engines have no connector to merge")
    at = launch.arguments.index(TRANSFER_FLAG) + 1
    both = json.dumps(merge(existing, json.loads(launch.arguments[at])))
    return replace(launch, arguments=(*launch.arguments[:at], both, *launch.arguments[at + 1 :]))


def as_data(result: Flags) -> dict[str, Any]:
    """Return the flags as plain data."""
    return {
        "engines": [
            {
                "name": launch.name,
                "side": launch.side,
                "module": SERVER_MODULE,
                "arguments": list(launch.arguments),
                "environment": dict(launch.environment),
                "kv_transfer_config": _transfer(launch.arguments),
            }
            for launch in result.engines
        ],
        "router_toml": result.router_toml,
    }


def _transfer(arguments: Sequence[str]) -> Any:
    if TRANSFER_FLAG not in arguments:
        return None
    return json.loads(arguments[arguments.index(TRANSFER_FLAG) + 1])


def as_shell(result: Flags) -> str:
    """Return the flags as commands for a POSIX shell."""
    blocks: list[str] = []
    for launch in result.engines:
        variables = [f"{name}={shlex.quote(value)}" for name, value in launch.environment.items()]
        command = shlex.join(("python", "-m", SERVER_MODULE))
        words = [*variables, command, *_pairs(launch.arguments)]
        blocks.append(f"# {launch.name}\n" + " \\\n  ".join(words))
    if result.router_toml is not None:
        blocks.append(
            f"# router\ncat > router.toml <<'END'\n{result.router_toml.rstrip()}\nEND\n"
            "turncache router --config router.toml"
        )
    return "\n\n".join(blocks).rstrip()


def _pairs(arguments: Sequence[str]) -> list[str]:
    """Keep a flag and its value on one line."""
    lines: list[str] = []
    for argument in arguments:
        if argument.startswith("-") or not lines or not lines[-1].startswith("-"):
            lines.append(shlex.quote(argument))
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return lines
