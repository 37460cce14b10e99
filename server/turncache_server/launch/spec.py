"""What a stack should be: one frozen value, checked when it is made."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from turncache.errors import ConfigError
from turncache.spelling import did_you_mean, none_of
from turncache_server.launch.supervise import DEFAULT_GRACE_S

Kind = Literal["turncache", "nixl", "nixl-bidirectional", "plain"]
Side = Literal["prefill", "decode", "single"]
Device = Literal["auto", "cpu", "cuda"]

MAX_ENGINES: Final = 64

#: Flags of ``vllm serve`` that follow from the specification. Given twice, the parts would
#: disagree about where they find each other.
OWNED_FLAGS: Final = MappingProxyType(
    {
        "--model": "model",
        "--served-model-name": "served_name",
        "--host": "host",
        "--port": "the port settings",
        "--uds": "the port settings",
        "--tensor-parallel-size": "tensor_parallel_size",
        "-tp": "tensor_parallel_size",
        "--kv-transfer-config": "kind and settings",
        "--num-gpu-blocks-override": "num_blocks",
        "--config": "single flags",
    }
)


_FURTHER_PARALLEL: Final = frozenset(
    {"--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"}
)
#: Settings of the extension that follow from the stack.
_OURS: Final = MappingProxyType(
    {
        "mode": "set the mode of the stack instead",
        "side": "follows from prefill and decode",
        "name": "follows from prefill and decode",
        "fleet_secret_file": "set the stack's own fleet_secret_file instead",
        "control_address": "follows from control_port",
        "peers": "follow from prefill and decode",
    }
)


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StackSpec:
    """Engines, and the router in front of them.

    Attributes:
        model: folder, hub name, or ``tiny`` or ``smollm2`` (see ``launch/models.py``).
        prefill: number of prefill engines; with ``decode`` 0 one engine does both.
        decode: number of decode engines.
        kind: ``turncache``; for comparison ``nixl`` (stock disaggregation),
            ``nixl-bidirectional`` (stock with returns) or ``plain`` (stock, one engine).
        stock_returns: engines of kind ``nixl-bidirectional`` that have the flag; all by default.
            Without it a stock decode engine keeps nothing of a call that has ended.
        served_name: name of the model in the API; by default the hub name, or the folder's
            last part.
        host: address that clients reach; engines behind a router stay on loopback.
        engine_hosts: IP address of the machine of each engine, by name, for engines that
            somebody else starts; all on loopback by default.
        fleet_secret_file: secret of the control plane, at the same path on every machine.
            Needed as soon as an engine is not on loopback.
        router_port: port of the router; 0 takes a free one.
        engine_port: port of the first prefill or single engine, counted up. None takes
            8100, or free ones when ``router_port`` is 0; 0 takes free ones. Likewise
            ``decode_port`` (8200), ``nixl_port`` (5600) and ``control_port`` (5800).
        log_dir: folder for logs and the router's configuration; by default one in the
            cache folder, named after the port that clients reach.
        mode: mode of the extension at start: ``on``, ``observe`` or ``off``.
        return_enabled: the router attempts returns.
        device: ``auto`` takes what the installed vLLM was built for.
        devices: GPUs per engine in the order prefill, decode, such as ``("0,1", "2,3")``;
            by default counted up, shared when there are too few.
        tensor_parallel_size: GPUs per engine.
        num_blocks: KV blocks per side, to make cache pressure on purpose.
        max_model_len: longest sequence in tokens.
        dtype: as ``vllm serve --dtype``.
        kv_space_gib: KV space of one CPU engine, whole GiB (vLLM reads an integer).
        share_cores: give every CPU engine all cores instead of a slice: quicker for engines
            that take turns, as with one client; slower for engines that work side by side.
        engine_args: more flags of ``vllm serve``, for every engine; a repeated flag wins
            over ours.
        settings: settings of the extension, by name, over ours.
        router_settings: settings of the router, by name, over ours.
        router: start the router; stock kinds never have one.
        warm_up: make two calls before the stack counts as started, so that no user's call
            pays for handshakes and first compilations.
        stop_grace_s: seconds between TERM and KILL when a part is stopped.
        python: interpreter of the engine environment; the running one by default.

    Raises:
        ConfigError: naming the value, what was expected and the way out.
    """

    model: str
    prefill: int = 0
    decode: int = 0
    kind: Kind = "turncache"
    stock_returns: tuple[str, ...] = ()
    served_name: str | None = None
    host: str = "127.0.0.1"
    engine_hosts: Mapping[str, str] = field(default_factory=_empty)
    fleet_secret_file: Path | None = None
    router_port: int = 8000
    engine_port: int | None = None
    decode_port: int | None = None
    nixl_port: int | None = None
    control_port: int | None = None
    log_dir: Path | None = None
    mode: str = "on"
    return_enabled: bool = True
    device: Device = "auto"
    devices: tuple[str, ...] = ()
    tensor_parallel_size: int = 1
    num_blocks: Mapping[str, int | None] = field(default_factory=_empty)
    max_model_len: int | None = None
    dtype: str | None = None
    kv_space_gib: int = 1
    share_cores: bool = False
    engine_args: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=_empty)
    router_settings: Mapping[str, Any] = field(default_factory=_empty)
    router: bool = True
    warm_up: bool = True
    stop_grace_s: float = DEFAULT_GRACE_S
    python: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work, before anything starts."""
        self._check_words()
        self._check_counts()
        self._check_stock_returns()
        self._check_engine_hosts()
        self._check_ports()
        self._check_engine_args()

    @property
    def is_pair(self) -> bool:
        """Prefill and decode are separate engines."""
        return self.decode > 0

    @property
    def is_ours(self) -> bool:
        """The engines carry our connector."""
        return self.kind == "turncache"

    @property
    def has_router(self) -> bool:
        """A router stands in front of the engines."""
        return self.router and self.is_ours

    def returns_stock(self, name: str) -> bool:
        """Say whether an engine has vLLM's own ``bidirectional_kv_xfer``."""
        return self.kind == "nixl-bidirectional" and (
            not self.stock_returns or name in self.stock_returns
        )

    @property
    def gpus_per_engine(self) -> int:
        """GPUs that one engine needs: tensor times pipeline times data parallel size."""
        size = self.tensor_parallel_size
        for at, argument in enumerate(self.engine_args):
            flag, _, value = argument.partition("=")
            if flag.replace("_", "-") in _FURTHER_PARALLEL:
                value = value or "".join(self.engine_args[at + 1 : at + 2])
                # What is no number vLLM itself refuses.
                size *= max(1, int(value)) if value.isdigit() else 1
        return size

    @property
    def members(self) -> tuple[tuple[str, Side], ...]:
        """Name and side of every engine, in the order in which they are numbered."""
        if not self.is_pair:
            return (("single-0", "single"),)
        prefill: list[tuple[str, Side]] = [(f"prefill-{n}", "prefill") for n in range(self.prefill)]
        decode: list[tuple[str, Side]] = [(f"decode-{n}", "decode") for n in range(self.decode)]
        return (*prefill, *decode)

    def _check_words(self) -> None:
        for name, legal in (
            ("kind", get_args(Kind)),
            ("device", get_args(Device)),
            ("mode", ("on", "observe", "off")),
        ):
            value = getattr(self, name)
            if value not in legal:
                raise ConfigError(name, none_of(value, legal))
        if not self.model:
            raise ConfigError("model", "empty; name a folder, a hub name, tiny or smollm2")
        for name, instead in _OURS.items():
            if name in self.settings:
                raise ConfigError(f"settings.{name}", instead)

    def _check_counts(self) -> None:
        if self.prefill < 0 or self.decode < 0 or self.prefill + self.decode > MAX_ENGINES:
            raise ConfigError(
                "prefill, decode",
                f"{self.prefill} and {self.decode}: expected 0 to {MAX_ENGINES} engines",
            )
        if bool(self.prefill) != bool(self.decode):
            raise ConfigError(
                "prefill, decode",
                f"{self.prefill} prefill and {self.decode} decode: a pair needs at least one of "
                "each; leave both out for one engine",
            )
        if self.is_pair and self.kind == "plain":
            raise ConfigError("kind", "plain is one stock engine; a stock pair is nixl")
        if not self.is_pair and self.kind.startswith("nixl"):
            raise ConfigError("kind", f"{self.kind} is a pair: give prefill=1 and decode=1")
        if self.tensor_parallel_size < 1:
            raise ConfigError(
                "tensor_parallel_size", f"{self.tensor_parallel_size}: expected at least 1"
            )
        if not 1 <= self.kv_space_gib <= 4096:
            raise ConfigError("kv_space_gib", f"{self.kv_space_gib}: expected whole GiB from 1")
        sides = {side for _, side in self.members}
        for side, blocks in self.num_blocks.items():
            if side not in sides:
                raise ConfigError(
                    "num_blocks",
                    f"no {side!r} engine{did_you_mean(side, sides)}; expected "
                    f"{', '.join(sorted(sides))}",
                )
            if blocks is not None and blocks < 2:
                raise ConfigError("num_blocks", f"{side}: {blocks}: expected at least 2")
        if self.devices and len(self.devices) != len(self.members):
            raise ConfigError(
                "devices",
                f"{len(self.devices)} entries for {len(self.members)} engines "
                f"({', '.join(name for name, _ in self.members)}): expected one each",
            )

    def _check_stock_returns(self) -> None:
        if self.stock_returns and self.kind != "nixl-bidirectional":
            raise ConfigError("stock_returns", f"kind {self.kind} has none: nixl-bidirectional")
        names = [name for name, _ in self.members]
        for name in self.stock_returns:
            if name not in names:
                raise ConfigError(
                    "stock_returns",
                    f"no engine {name!r}; expected {', '.join(names)}",
                )

    def _check_engine_hosts(self) -> None:
        names = [name for name, _ in self.members]
        for name, host in self.engine_hosts.items():
            if name not in names:
                raise ConfigError(
                    "engine_hosts",
                    f"no engine {name!r}; expected {', '.join(names)}",
                )
            try:
                ip = ipaddress.ip_address(host)
            except ValueError as error:
                # It is an address to listen on as well, for NIXL too, which takes no name.
                raise ConfigError(
                    "engine_hosts", f"{name}: {host!r}: expected an IP address of its machine"
                ) from error
            if ip.is_unspecified or ip.is_multicast:
                raise ConfigError(
                    "engine_hosts", f"{name}: {host!r}: expected an address that others reach"
                )
            if self.is_ours and not ip.is_loopback and self.fleet_secret_file is None:
                raise ConfigError(
                    "engine_hosts",
                    f"{name}: {host} is not loopback: its control socket needs keys, give "
                    "fleet_secret_file",
                )

    def _check_ports(self) -> None:
        for name in ("router_port", "engine_port", "decode_port", "nixl_port", "control_port"):
            port = getattr(self, name)
            if port is not None and not 0 <= port <= 65_535 - MAX_ENGINES:
                raise ConfigError(
                    name, f"{port}: expected a port up to {65_535 - MAX_ENGINES}, or 0 for free"
                )

    def _check_engine_args(self) -> None:
        for argument in self.engine_args:
            flag = argument.partition("=")[0].replace("_", "-")
            if flag in OWNED_FLAGS:
                raise ConfigError(
                    "engine_args", f"{flag} follows from {OWNED_FLAGS[flag]}: set that instead"
                )
            if flag.startswith("--kv-offloading-") and self.kind != "plain":
                raise ConfigError(
                    "engine_args",
                    f"{flag} would put vLLM's offloading connector in the place of the one that "
                    "is there; for both, leave it out and add the connector with turncache flags "
                    '--merge \'{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", '
                    '"kv_connector_extra_config": {"cpu_bytes_to_use": BYTES}}\'',
                )
