"""Settings of the extension and facts about the engine, read once into frozen values.

This is the only place that looks into ``kv_connector_extra_config`` and vLLM's own
configuration objects.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, Final

from turncache.errors import ConfigError
from turncache.protocol import DEFAULT_RETAIN_S, MAX_RETAIN_S, Mode
from turncache.spelling import no_such, none_of
from turncache_server.connector.finding import MAX_CANDIDATES
from turncache_server.control.addresses import check_address, is_loopback
from turncache_server.redis_link import check_redis_url
from turncache_server.retention.policy import POLICY_NAMES, policy_names

#: Name of our nested object in ``kv_connector_extra_config``.
SECTION: Final = "turncache"
DEFAULT_RECOMPUTE_THRESHOLD: Final = 64
#: One host tier that most machines could afford, and one for large ones.
DEFAULT_HOST_GB: Final = (64.0, 256.0)
MAX_HOST_SIZES: Final = 4
#: Each of a part's hashes takes some memory of the ghost's process.
DEFAULT_TRACE_FILE_MB: Final = 16.0
#: Some thirty years: a setting above it is a mistake, or no finite number.
_LONGEST_S: Final = 1e9
_MOST_GB: Final = 100_000.0


class Side(enum.StrEnum):
    """What an engine is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    SINGLE = "single"


class Find(enum.StrEnum):
    """Where an engine looks for a session's KV when the hints of a call name no engine."""

    HINTS = "hints"
    PEERS = "peers"
    REDIS = "redis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the extension in one engine.

    Attributes:
        mode: do nothing, count only, or act.
        side: what this engine is for.
        name: by which peers and router name this engine; a question for another is refused.
        policy: which lineage is worth most: ``cost``, ``deadline`` or an entry point's name.
        retain_default_s: seconds to keep a session's KV when the call does not say.
        retain_max_s: longest retention that a call may ask for, in seconds.
        retain_budget: share of the pool that may be retained.
        tenant_budget: share of the pool that one tenant may retain.
        lend_after_s: seconds after which what calls without a session have used is lent to
            sessions beyond the budgets; 0 lends nothing.
        pull_timeout_s: longest time for a pull, None to derive it from the prompt.
        handover_s: seconds for which prefill keeps a prompt that decode has not taken.
        control_address: address of the control socket, None for none.
        fleet_secret_file: file with the secret that all engines and routers share, None to
            stay on loopback without keys.
        peers: engines that this one may pull from: name to control address.
        trust_hints: our router is in front: read all hints, not only the session.
        foreign_router: another router is in front, which hands prompts over by
            ``kv_transfer_params`` and lets no client set them.
        find: where to look for a session's KV when no hint names an engine.
        redis_url: of the directory, for ``find`` ``redis``.
        redis_password_env: environment variable with its password, empty for none.
        redis_prefix: of all keys.
        allow_untested_vllm: act on a vLLM that is not in the table of tested versions.
        ghost_host_gb: sizes of the host tiers that mode ``observe`` simulates, in 10^9 bytes.
        trace_file: where to write the trace of what the engine saw, None for no trace.
        trace_file_mb: size in 10^6 bytes at which a part of the trace is full.
        cost_profile: profile of turncache calibrate whose costs are taken until own ones are
            measured, None to begin with nothing.
        weights_id: name of the weights, compared between engines where their files cannot be
            read.
        recompute_threshold: fewest tokens worth a pull (vLLM's ``kv_recompute_threshold``);
            None for what was measured, but at least 64.
    """

    mode: Mode = Mode.ON
    side: Side = Side.SINGLE
    name: str = ""
    policy: str = "cost"
    retain_default_s: float = DEFAULT_RETAIN_S
    retain_max_s: float = MAX_RETAIN_S
    retain_budget: float = 0.5
    tenant_budget: float = 0.25
    lend_after_s: float = 600.0
    pull_timeout_s: float | None = None
    handover_s: float = 30.0
    control_address: str | None = None
    fleet_secret_file: str | None = None
    peers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    trust_hints: bool = False
    foreign_router: bool = False
    find: Find = Find.HINTS
    redis_url: str = ""
    redis_password_env: str = ""
    redis_prefix: str = "turncache"
    allow_untested_vllm: bool = False
    ghost_host_gb: tuple[float, ...] = DEFAULT_HOST_GB
    trace_file: str | None = None
    trace_file_mb: float = DEFAULT_TRACE_FILE_MB
    cost_profile: str | None = None
    weights_id: str = ""
    recompute_threshold: int | None = None


def parse_settings(extra_config: Mapping[str, Any]) -> Settings:
    """Read our settings out of ``kv_connector_extra_config``.

    Raises:
        ConfigError: on an unknown key or an impossible value, naming the legal ones.
    """
    section = extra_config.get(SECTION, {})
    if not isinstance(section, Mapping):
        raise ConfigError(SECTION, f"{section!r}: expected an object of settings")
    known = {f.name for f in fields(Settings)} - {"recompute_threshold"}
    if unknown := sorted(set(section) - known):
        raise ConfigError(f"{SECTION}.{unknown[0]}", no_such("setting", unknown[0], known))
    read = _Reader(section)
    retain_max_s = read.seconds("retain_max_s", MAX_RETAIN_S)
    timeout = section.get("pull_timeout_s", "auto")
    secret_file = read.text("fleet_secret_file") or None
    name = read.text("name")
    threshold = extra_config.get("kv_recompute_threshold")
    if threshold is not None and (
        isinstance(threshold, bool) or not isinstance(threshold, int) or threshold < 0
    ):
        raise ConfigError("kv_recompute_threshold", f"{threshold!r}: expected tokens from 0")
    find = Find(read.word("find", Find.HINTS, tuple(Find)))
    trust_hints, foreign_router = read.flag("trust_hints"), read.flag("foreign_router")
    peers = _peers(section.get("peers", {}), keyed=secret_file is not None)
    redis_url = _redis_url(read.text("redis_url"), find)
    _check_who_is_in_front(trust_hints=trust_hints, foreign_router=foreign_router, find=find)
    _check_finding(find, peers)
    return Settings(
        mode=Mode(read.word("mode", Mode.ON, tuple(Mode))),
        side=Side(read.word("side", Side.SINGLE, tuple(Side))),
        name=name,
        policy=_policy(read),
        retain_default_s=min(read.seconds("retain_default_s", DEFAULT_RETAIN_S), retain_max_s),
        retain_max_s=retain_max_s,
        retain_budget=read.share("retain_budget", 0.5),
        tenant_budget=read.share("tenant_budget", 0.25),
        lend_after_s=read.seconds("lend_after_s", 600.0),
        pull_timeout_s=None if timeout == "auto" else read.seconds("pull_timeout_s", 0.0),
        handover_s=read.seconds("handover_s", 30.0),
        control_address=_control_address(section, name=name, keyed=secret_file is not None),
        fleet_secret_file=secret_file,
        peers=peers,
        trust_hints=trust_hints,
        foreign_router=foreign_router,
        find=find,
        redis_url=redis_url,
        redis_password_env=read.text("redis_password_env"),
        redis_prefix=read.text("redis_prefix", "turncache"),
        allow_untested_vllm=read.flag("allow_untested_vllm"),
        ghost_host_gb=read.sizes("ghost_host_gb", DEFAULT_HOST_GB),
        trace_file=read.path("trace_file"),
        trace_file_mb=read.megabytes("trace_file_mb", DEFAULT_TRACE_FILE_MB),
        cost_profile=read.path("cost_profile"),
        weights_id=read.text("weights_id"),
        recompute_threshold=threshold,
    )


def of_rank(settings: Settings, rank: int) -> Settings:
    """Return the settings of one data-parallel rank: what no two engines may share is its own.

    VLLM gives all ranks one configuration. Rank 0 keeps it; another listens at a port that is
    higher by its number, as NIXL does, and has the number in its name and in that of its trace.

    Raises:
        ConfigError: there is no such port.
    """
    if not rank:
        return settings
    address, suffix = settings.control_address, f"_dp{rank}"
    if address is not None:
        before, _, port = address.rpartition(":")
        # Of port 0 the system makes one of its own.
        address = f"{before}:{int(port) + rank if int(port) else 0}"
        check_address(
            address,
            setting=f"{SECTION}.control_address",
            keyed=settings.fleet_secret_file is not None,
            bind=True,
        )
    return replace(
        settings,
        name=settings.name and settings.name + suffix,
        control_address=address,
        trace_file=settings.trace_file and settings.trace_file + suffix,
    )


def _policy(read: _Reader) -> str:
    # Looking for those of other packages takes longer than reading all other settings.
    legal = POLICY_NAMES if read.has("policy", POLICY_NAMES) else policy_names()
    return read.word("policy", "cost", legal)


class _Reader:
    """Typed access to one section, with errors that name the setting."""

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._section = section

    def word(self, name: str, default: str, legal: tuple[str, ...]) -> str:
        value = self._section.get(name, default)
        if value not in legal:
            raise ConfigError(f"{SECTION}.{name}", none_of(value, legal))
        return str(value)

    def has(self, name: str, values: tuple[str, ...]) -> bool:
        return name not in self._section or self._section[name] in values

    def text(self, name: str, default: str = "") -> str:
        value = self._section.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{SECTION}.{name}", f"{value!r}: expected text")
        return value

    def flag(self, name: str) -> bool:
        value = self._section.get(name, False)
        if not isinstance(value, bool):
            raise ConfigError(f"{SECTION}.{name}", f"{value!r}: expected true or false")
        return value

    def path(self, name: str) -> str | None:
        value = self._section.get(name)
        if value is None:
            return None
        if not isinstance(value, str) or not value.startswith("/"):
            raise ConfigError(f"{SECTION}.{name}", f"{value!r}: expected an absolute path")
        return value

    def sizes(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        value = self._section.get(name, default)
        if not isinstance(value, (list, tuple)) or len(value) > MAX_HOST_SIZES:
            legal = False
        else:
            legal = all(type(size) in (int, float) and 0 < size <= _MOST_GB for size in value)
        if not legal:
            raise ConfigError(
                f"{SECTION}.{name}",
                f"{value!r}: expected a list of at most {MAX_HOST_SIZES} sizes in GB, each "
                f"above 0 and at most {_MOST_GB:g}",
            )
        return tuple(sorted({float(size) for size in value}))

    def megabytes(self, name: str, default: float) -> float:
        value = self._number(name, default, high=1000.0, what="megabytes from 1 to 1000")
        if value < 1:
            raise ConfigError(f"{SECTION}.{name}", f"{value!r}: expected megabytes from 1 to 1000")
        return value

    def seconds(self, name: str, default: float) -> float:
        return self._number(name, default, high=_LONGEST_S, what="seconds from 0")

    def share(self, name: str, default: float) -> float:
        return self._number(name, default, high=1.0, what="a share from 0 to 1")

    def _number(self, name: str, default: float, *, high: float, what: str) -> float:
        value = self._section.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= high:
            raise ConfigError(f"{SECTION}.{name}", f"{value!r}: expected {what}")
        return float(value)


def _control_address(section: Mapping[str, Any], *, name: str, keyed: bool) -> str | None:
    value = section.get("control_address")
    if value is None:
        return None
    setting = f"{SECTION}.control_address"
    address = check_address(str(value), setting=setting, keyed=keyed, bind=True)
    if not name and not is_loopback(address):
        raise ConfigError(
            f"{SECTION}.name",
            f"missing, with control_address {address}: give the name by which the peers name "
            "this engine, so that a wrong address is noticed",
        )
    return address


def _peers(value: Any, *, keyed: bool) -> Mapping[str, str]:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{SECTION}.peers",
            f"{value!r}: expected an object of engine name to control address",
        )
    peers: dict[str, str] = {}
    for name, text in value.items():
        setting = f"{SECTION}.peers.{name}"
        address = check_address(str(text), setting=setting, keyed=keyed)
        if address in peers.values():
            raise ConfigError(setting, f"{address!r} occurs twice; every engine has its own")
        peers[str(name)] = address
    return MappingProxyType(peers)


def _redis_url(url: str, find: Find) -> str:
    if find is not Find.REDIS:
        return url
    if not url:
        raise ConfigError(f"{SECTION}.redis_url", "missing, with find redis: redis://host:6379/0")
    return check_redis_url(url, setting=f"{SECTION}.redis_url")


def _check_who_is_in_front(*, trust_hints: bool, foreign_router: bool, find: Find) -> None:
    """Refuse to trust our router and to do without it at the same time."""
    if not trust_hints:
        return
    for name, on in (("foreign_router", foreign_router), ("find", find is not Find.HINTS)):
        if on:
            raise ConfigError(
                f"{SECTION}.{name}",
                "set together with trust_hints: behind our router, which names the source itself, "
                f"leave {name} out; behind another one set trust_hints to false, because it lets "
                "clients' hints through",
            )


def _check_finding(find: Find, peers: Mapping[str, str]) -> None:
    if find is Find.PEERS and len(peers) > MAX_CANDIDATES:
        raise ConfigError(
            f"{SECTION}.find",
            f"peers, of which there are {len(peers)}: each is asked about each prompt, so at most "
            f"{MAX_CANDIDATES}; with more set find to redis",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What the extension knows of its engine.

    Attributes:
        engine_id: NIXL engine id, new at every start.
        num_blocks: blocks in the pool.
        block_size: tokens per block.
        tp_size: tensor parallel size.
        max_model_len: longest sequence in tokens.
        hash_algo: prefix-cache hash algorithm.
        vllm_version: version of vLLM.
        block_bytes: bytes of a block's KV over all ranks, 0 when unknown.
        unsupported: why retention cannot work here, in words; empty when it can.
        unsupported_pull: why pulls cannot work here, beside ``unsupported``.
        missing: what an operator would want to switch on.
    """

    engine_id: str
    num_blocks: int
    block_size: int
    tp_size: int
    max_model_len: int
    hash_algo: str
    vllm_version: str
    block_bytes: int = 0
    unsupported: tuple[str, ...] = ()
    unsupported_pull: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def engine_facts(
    vllm_config: Any, kv_cache_config: Any, vllm_version: str, *, side: Side = Side.SINGLE
) -> EngineFacts:
    """Translate vLLM's configuration; the only reader of it beside the fingerprint."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    transfer = vllm_config.kv_transfer_config
    caching = bool(cache.enable_prefix_caching)
    return EngineFacts(
        engine_id=str(transfer.engine_id),
        num_blocks=int(kv_cache_config.num_blocks),
        block_size=int(cache.block_size),
        tp_size=int(parallel.tensor_parallel_size),
        max_model_len=int(vllm_config.model_config.max_model_len),
        hash_algo=str(cache.prefix_caching_hash_algo),
        vllm_version=vllm_version,
        block_bytes=_block_bytes(kv_cache_config) * int(parallel.tensor_parallel_size),
        unsupported=tuple(_unsupported(vllm_config, kv_cache_config)),
        unsupported_pull=tuple(_unsupported_pull(vllm_config, side)),
        missing=() if caching else ("prefix caching is off: start with --enable-prefix-caching",),
    )


def _block_bytes(kv_cache_config: Any) -> int:
    """Return the bytes of one block on one rank, over all layers."""
    return sum(
        len(group.layer_names) * int(group.kv_cache_spec.page_size_bytes)
        for group in kv_cache_config.kv_cache_groups
    )


def _unsupported(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    model = vllm_config.model_config
    why: list[str] = []
    if not cache.enable_prefix_caching:
        why.append("prefix caching is off")
    groups = list(kv_cache_config.kv_cache_groups)
    specs = {type(group.kv_cache_spec).__name__ for group in groups}
    if len(groups) != 1 or specs != {"FullAttentionSpec"}:
        why.append(
            f"KV cache groups {sorted(specs)} ({len(groups)}): only one full-attention group"
        )
    elif groups[0].kv_cache_spec.sliding_window or groups[0].kv_cache_spec.attention_chunk_size:
        why.append("sliding-window or chunked attention")
    elif groups[0].kv_cache_spec.block_size != cache.block_size or (
        cache.hash_block_size not in (None, cache.block_size)
    ):
        why.append("the hash block size differs from the block size")
    if vllm_config.speculative_config is not None:
        why.append("speculative decoding: rejected drafts rewrite blocks")
    if getattr(model, "is_encoder_decoder", False):
        why.append("encoder-decoder models")
    if getattr(model, "is_diffusion", False):
        why.append("diffusion models: a block is written until its tokens are settled")
    if getattr(kv_cache_config, "hisparse_host_num_blocks", None) is not None:
        why.append("HiSparse: part of the KV lies in pools of its own")
    sizes = {
        "pipeline": parallel.pipeline_parallel_size,
        "data": parallel.data_parallel_size,
        "decode context": parallel.decode_context_parallel_size,
        "prefill context": parallel.prefill_context_parallel_size,
    }
    why += [f"{name} parallelism of {size}" for name, size in sizes.items() if size > 1]
    return why


def _unsupported_pull(vllm_config: Any, side: Side) -> list[str]:
    why: list[str] = []
    interval = int(getattr(vllm_config.scheduler_config, "prefill_schedule_interval", 1))
    if side is Side.DECODE and interval > 1:
        # Of a stock hand-over one token is left to compute, which escapes the interval.
        why.append(f"prefill_schedule_interval of {interval}: the last block of each prompt waits")
    algo = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if "xxhash" in algo:
        why.append(f"hash algorithm {algo}: collisions can be made, use sha256")
    model = vllm_config.model_config
    if getattr(model, "enable_sleep_mode", False) or getattr(
        model, "enable_cumem_allocator", False
    ):
        # Waking maps other memory under the addresses that NIXL has registered.
        why.append("sleep mode: peers would read the memory from before the sleep")
    if getattr(vllm_config.parallel_config, "enable_fault_tolerance", False):
        # It drops the steps in flight, whose notes would then be taken for later steps.
        why.append("fault tolerance: what a failed step has not written stays in the prefix cache")
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        why.append("weight transfer: an updated engine's KV would pass for the others'")
    return why
