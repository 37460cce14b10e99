"""What is refused before anything starts: each refusal names the value and the way out."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from turncache.errors import ConfigError, EnvironmentFault
from turncache_server.connector.config import parse_settings
from turncache_server.control.keys import read_fleet_keys
from turncache_server.launch import models
from turncache_server.launch.machine import (
    EngineEnvironment,
    Machine,
    port_is_free,
    port_user,
)
from turncache_server.launch.profiles import (
    LOOPBACK,
    EngineLaunch,
    Ports,
    effective_mode,
    runs_on_gpu,
)
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.transfer import settings_as_extra
from turncache_server.versions import OLDEST, Support, name_tested_versions, support_of

_GIB: Final = 2**30
#: Resident memory of a CPU engine without weights and KV (vLLM 0.32, two processes).
ENGINE_OVERHEAD_BYTES: Final = int(1.6 * _GIB)
_WEIGHT_FILES: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
_BYTES_PER_VALUE: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def check_environment(spec: StackSpec, environment: EngineEnvironment) -> list[str]:
    """Check the engine environment; return what an operator should know all the same.

    Raises:
        EnvironmentFault: vLLM, NIXL or turncache is missing, or vLLM is too old.
        ConfigError: the device is not what vLLM was built for.
    """
    version, python = environment.vllm_version, environment.python
    if version is None:
        raise EnvironmentFault(
            f"vLLM is not installed for {python}: install it there, or name the interpreter of "
            "the engine environment with --python"
        )
    support = support_of(version)
    if support is Support.TOO_OLD and spec.is_ours:
        raise EnvironmentFault(
            f"vLLM {version} is too old: {OLDEST[0]}.{OLDEST[1]} or newer is needed "
            f"(tested: {name_tested_versions()})"
        )
    if spec.is_ours and not environment.turncache:
        raise EnvironmentFault(
            f"turncache is not installed for {python}: engines load it from there; "
            f"{python} -m pip install --no-deps turncache"
        )
    if spec.is_pair and not environment.nixl:
        raise EnvironmentFault(
            f"NIXL is not installed for {python}, prefill and decode exchange KV with it: "
            f"{python} -m pip install nixl"
        )
    if spec.device == "cuda" and not environment.cuda:
        raise ConfigError("device", "'cuda', but the installed torch is a CPU build")
    notes: list[str] = []
    if spec.is_ours and support is Support.UNTESTED:
        mode = effective_mode(spec, version)
        hint = "; allow_untested_vllm=true lets it act" if mode == "observe" else ""
        notes.append(
            f"vLLM {version} is untested (tested: {name_tested_versions()}): "
            f"starting in mode {mode}{hint}"
        )
    return notes


def check_settings(spec: StackSpec) -> None:
    """Check the settings of the extension as the engine will.

    Raises:
        ConfigError: naming the setting and the legal values.
    """
    parse_settings(settings_as_extra(spec.settings))


def check_fleet(spec: StackSpec) -> None:
    """Check the fleet's secret as engines and router will, on the machine that starts them.

    Raises:
        ConfigError: its file cannot be used, or an engine is to run elsewhere.
    """
    if spec.engine_hosts:
        raise ConfigError(
            "engine_hosts",
            "engines are started on this machine only: print what to start elsewhere with "
            "turncache flags",
        )
    if spec.fleet_secret_file is not None:
        read_fleet_keys(spec.fleet_secret_file)


def check_router_config(text: str) -> None:
    """Check the router's configuration as the router will.

    Raises:
        ConfigError: naming the setting and the legal values.
        EnvironmentFault: the router's packages are missing.
    """
    try:
        from turncache_server.router.config import (  # noqa: PLC0415 - only with a router
            parse_config,
        )
    except ImportError as error:
        raise EnvironmentFault(
            f"the router's packages are missing ({error}): pip install 'turncache[router]'"
        ) from error
    try:
        settings = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            "router_settings", f"a setting's name is not one of a router: {error}"
        ) from error
    parse_config(settings)


def resolve_model(spec: StackSpec, python: str, progress: models.Progress) -> str:
    """Return the model as vLLM gets it: an absolute folder, or a hub name.

    A model of our own recipes is made when it is not there yet.

    Raises:
        ConfigError: a folder that does not exist or holds no model.
        EnvironmentFault: a model of ours could not be made.
    """
    name = spec.model
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError("model", f"{folder} holds no config.json: it is no model folder")
        return str(folder.resolve())
    if name in models.RECIPES:
        return str(models.build(name, progress=progress, python=python))
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ConfigError(
            "model",
            f"{name!r} does not exist: name a folder, a model of the hub, or one of "
            f"{', '.join(models.RECIPES)}, which are made here",
        )
    return name


def check_ports(spec: StackSpec, launches: Sequence[EngineLaunch], ports: Ports) -> None:
    """Refuse a port that somebody listens on.

    Raises:
        ConfigError: naming the port, its purpose and, where visible, its user.
    """
    wanted: list[tuple[str, str, int]] = []
    if spec.has_router:
        wanted.append(("router", spec.host, ports.router))
    for launch, at in zip(launches, ports.engines, strict=True):
        wanted.append((launch.name, launch.host, at.http))
        if launch.nixl_port is not None:
            wanted.append((f"NIXL of {launch.name}", LOOPBACK, at.nixl))
        if launch.control_address is not None:
            wanted.append((f"control socket of {launch.name}", LOOPBACK, at.control))
    for purpose, host, port in wanted:
        try:
            free = port_is_free(host, port)
        except OSError as error:
            raise ConfigError(
                "host, ports",
                f"nothing can listen on {host}:{port} ({purpose}): {error.strerror or error}; "
                "name an address of this machine and a port that you may use",
            ) from error
        if not free:
            user = port_user(port)
            raise ConfigError(
                "ports",
                f"{host}:{port} ({purpose}) is in use{f' by {user}' if user else ''}: stop it, "
                "choose another port, or 0 for a free one",
            )


def check_memory(spec: StackSpec, machine: Machine, environment: EngineEnvironment) -> None:
    """Refuse CPU engines that cannot fit; on a GPU vLLM itself measures.

    Raises:
        EnvironmentFault: with the estimate, what is available, and what to lower.
    """
    if runs_on_gpu(spec, environment):
        return
    num_engines = len(spec.members)
    weights = weights_bytes(Path(spec.model), spec.dtype)
    kv_space = spec.kv_space_gib * _GIB
    needed = num_engines * (weights + kv_space + ENGINE_OVERHEAD_BYTES)
    if needed > machine.memory_available_bytes:
        raise EnvironmentFault(
            f"too little memory: {num_engines} x (weights {weights / _GIB:.1f} + KV space "
            f"{spec.kv_space_gib} + engine {ENGINE_OVERHEAD_BYTES / _GIB:.1f} GiB) = "
            f"{needed / _GIB:.1f} GiB, available are "
            f"{machine.memory_available_bytes / _GIB:.1f} GiB: close other programs, or use a "
            "smaller model, KV space or number of engines"
        )


def weights_bytes(folder: Path, dtype: str | None) -> int:
    """Estimate the weights of a model folder in memory; 0 for what is not on this machine."""
    if not folder.is_dir():
        return 0
    for pattern in _WEIGHT_FILES:
        size_bytes = sum(path.stat().st_size for path in folder.glob(pattern))
        if size_bytes:
            break
    else:
        return 0
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return size_bytes
    stored = _stored_dtype(config) if isinstance(config, Mapping) else ""
    old, new = _BYTES_PER_VALUE.get(stored), _BYTES_PER_VALUE.get(dtype or stored)
    return size_bytes * new // old if old and new else size_bytes


def _stored_dtype(config: Mapping[str, object]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "")
