"""Settings: defaults, every legal value, and refusals that name setting, value and legal ones."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.errors import ConfigError
from turncache.protocol import Mode
from turncache_server.connector import config
from turncache_server.connector.config import (
    Find,
    Settings,
    Side,
    engine_facts,
    of_rank,
    parse_settings,
)


def parse(**section: Any) -> Settings:
    """Parse our section alone."""
    return parse_settings({"turncache": section})


def test_without_a_section_everything_is_at_its_default() -> None:
    """A connector that is only named works."""
    assert parse_settings({}) == Settings()
    assert parse() == Settings()


def test_every_setting_is_read() -> None:
    """Each key of the section arrives in its field."""
    section = {
        "mode": "observe",
        "side": "prefill",
        "name": "prefill-0",
        "policy": "deadline",
        "retain_default_s": 60,
        "retain_max_s": 600.5,
        "retain_budget": 0.75,
        "tenant_budget": 1,
        "lend_after_s": 30,
        "pull_timeout_s": 2.5,
        "handover_s": 0,
        "control_address": "tcp://127.0.0.1:5800",
        "fleet_secret_file": "/run/secrets/fleet",
        "peers": {"decode-0": "tcp://127.0.0.1:5801"},
        "trust_hints": False,
        "foreign_router": True,
        "find": "redis",
        "redis_url": "rediss://reader@redis:6380/2",
        "redis_password_env": "REDIS_PASSWORD",
        "redis_prefix": "blue",
        "allow_untested_vllm": True,
        "ghost_host_gb": [500, 80.5],
        "trace_file": "/var/log/trace.jsonl",
        "trace_file_mb": 4,
        "cost_profile": "/etc/profile.toml",
        "weights_id": "glm-5@2026-11",
    }
    settings = parse_settings({"turncache": section, "kv_recompute_threshold": 0, "backends": []})
    assert settings == Settings(
        mode=Mode.OBSERVE,
        side=Side.PREFILL,
        name="prefill-0",
        policy="deadline",
        retain_default_s=60.0,
        retain_max_s=600.5,
        retain_budget=0.75,
        tenant_budget=1.0,
        lend_after_s=30.0,
        pull_timeout_s=2.5,
        handover_s=0.0,
        control_address="tcp://127.0.0.1:5800",
        fleet_secret_file="/run/secrets/fleet",
        peers={"decode-0": "tcp://127.0.0.1:5801"},
        trust_hints=False,
        foreign_router=True,
        find=Find.REDIS,
        redis_url="rediss://reader@redis:6380/2",
        redis_password_env="REDIS_PASSWORD",
        redis_prefix="blue",
        allow_untested_vllm=True,
        ghost_host_gb=(80.5, 500.0),
        trace_file="/var/log/trace.jsonl",
        trace_file_mb=4.0,
        cost_profile="/etc/profile.toml",
        weights_id="glm-5@2026-11",
        recompute_threshold=0,
    )
    assert set(section) == {f for f in Settings.__slots__ if f != "recompute_threshold"}


def test_our_routers_hints_are_trusted() -> None:
    """Only where no other router is said to be in front."""
    assert parse(trust_hints=True).trust_hints


def test_the_pull_timeout_may_be_left_to_the_prompt() -> None:
    """``auto``, or nothing, derives it."""
    assert parse(pull_timeout_s="auto").pull_timeout_s is None
    assert parse().pull_timeout_s is None


def test_the_default_retention_never_exceeds_the_longest() -> None:
    """A short maximum alone is enough."""
    assert parse(retain_max_s=30).retain_default_s == 30.0


REFUSED: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    (
        {"moed": "on"},
        "turncache.moed",
        ("no such setting (did you mean mode?)", "retain_default_s", "peers"),
    ),
    ({"mode": "auto"}, "turncache.mode", ("'auto'", "off, observe, on")),
    ({"mode": True}, "turncache.mode", ("True", "off, observe, on")),
    ({"side": "both"}, "turncache.side", ("'both'", "prefill, decode, single")),
    ({"policy": "lru"}, "turncache.policy", ("'lru'", "cost, deadline")),
    ({"policy": ["cost"]}, "turncache.policy", ("['cost']", "cost, deadline")),
    ({"retain_default_s": -1}, "turncache.retain_default_s", ("-1", "seconds from 0")),
    ({"retain_default_s": "60"}, "turncache.retain_default_s", ("'60'", "seconds from 0")),
    ({"retain_max_s": float("inf")}, "turncache.retain_max_s", ("inf", "seconds from 0")),
    ({"retain_max_s": float("nan")}, "turncache.retain_max_s", ("nan", "seconds from 0")),
    ({"retain_budget": 1.5}, "turncache.retain_budget", ("1.5", "a share from 0 to 1")),
    ({"tenant_budget": True}, "turncache.tenant_budget", ("True", "a share from 0 to 1")),
    ({"lend_after_s": -1}, "turncache.lend_after_s", ("-1", "seconds from 0")),
    ({"pull_timeout_s": "soon"}, "turncache.pull_timeout_s", ("'soon'", "seconds from 0")),
    ({"pull_timeout_s": None}, "turncache.pull_timeout_s", ("None", "seconds from 0")),
    ({"handover_s": -0.5}, "turncache.handover_s", ("-0.5", "seconds from 0")),
    ({"handover_s": 10**400}, "turncache.handover_s", ("seconds from 0",)),
    ({"control_address": "tcp://10.0.0.1:1"}, "turncache.control_address", ("10.0.0.1", "tcp://")),
    ({"control_address": 5800}, "turncache.control_address", ("5800", "tcp://")),
    ({"name": 7}, "turncache.name", ("7", "text")),
    ({"fleet_secret_file": True}, "turncache.fleet_secret_file", ("True", "text")),
    (
        {"control_address": "tcp://10.0.0.1:1", "fleet_secret_file": "f"},
        "turncache.name",
        ("tcp://10.0.0.1:1", "missing"),
    ),
    (
        {"control_address": "tcp://engine-1:1", "fleet_secret_file": "f", "name": "e"},
        "turncache.control_address",
        ("tcp://engine-1:1", "0.0.0.0"),
    ),
    (
        {"peers": {"a": "tcp://h:1", "b": "tcp://h:1"}, "fleet_secret_file": "f"},
        "turncache.peers.b",
        ("tcp://h:1", "twice"),
    ),
    ({"peers": ["decode-0"]}, "turncache.peers", ("['decode-0']", "engine name to control")),
    ({"peers": {"d": "tcp://d:1"}}, "turncache.peers.d", ("tcp://d:1", "tcp://127.0.0.1:")),
    ({"trust_hints": "yes"}, "turncache.trust_hints", ("'yes'", "true or false")),
    ({"foreign_router": 1}, "turncache.foreign_router", ("1", "true or false")),
    (
        {"foreign_router": True, "trust_hints": True},
        "turncache.foreign_router",
        ("trust_hints", "false"),
    ),
    ({"find": "peers", "trust_hints": True}, "turncache.find", ("trust_hints", "false")),
    ({"find": "etcd"}, "turncache.find", ("'etcd'", "hints, peers, redis")),
    (
        {"find": "peers", "peers": {f"d{i}": f"tcp://127.0.0.1:{i}" for i in range(1, 10)}},
        "turncache.find",
        ("9", "at most 8", "redis"),
    ),
    ({"find": "redis", "name": "a"}, "turncache.redis_url", ("missing", "redis://")),
    ({"redis_url": 7}, "turncache.redis_url", ("7", "text")),
    ({"redis_password_env": 7}, "turncache.redis_password_env", ("7", "text")),
    ({"redis_prefix": None}, "turncache.redis_prefix", ("None", "text")),
    (
        {"find": "redis", "name": "a", "redis_url": "redis://u:secret@r"},
        "turncache.redis_url",
        ("redis://host:6379/0", "redis_password_env"),
    ),
    ({"allow_untested_vllm": 1}, "turncache.allow_untested_vllm", ("1", "true or false")),
    ({"ghost_host_gb": 64}, "turncache.ghost_host_gb", ("64", "a list of at most 4 sizes")),
    ({"ghost_host_gb": [0]}, "turncache.ghost_host_gb", ("[0]", "above 0")),
    ({"ghost_host_gb": [True]}, "turncache.ghost_host_gb", ("[True]", "above 0")),
    ({"ghost_host_gb": [1, 2, 3, 4, 5]}, "turncache.ghost_host_gb", ("at most 4",)),
    ({"trace_file": "trace.jsonl"}, "turncache.trace_file", ("'trace.jsonl'", "absolute path")),
    ({"cost_profile": "p.toml"}, "turncache.cost_profile", ("'p.toml'", "absolute path")),
    ({"trace_file": 7}, "turncache.trace_file", ("7", "absolute path")),
    ({"trace_file_mb": 0.5}, "turncache.trace_file_mb", ("0.5", "from 1 to 1000")),
    ({"weights_id": 5}, "turncache.weights_id", ("5", "text")),
    ({"trace_file_mb": 2000}, "turncache.trace_file_mb", ("2000", "from 1 to 1000")),
]


@pytest.mark.parametrize(
    ("section", "setting", "words"),
    REFUSED,
    ids=[next(iter(s)) + str(i) for i, (s, *_) in enumerate(REFUSED)],
)
def test_refusals_name_setting_value_and_the_legal_ones(
    section: dict[str, Any], setting: str, words: tuple[str, ...]
) -> None:
    """The engine does not start with a setting that cannot work, and says what would."""
    with pytest.raises(ConfigError) as caught:
        parse(**section)
    assert caught.value.setting == setting
    message = str(caught.value)
    assert message.startswith(f"{setting}: ")
    assert all(word in message for word in words), message


def test_the_readme_lists_every_setting_with_its_default() -> None:
    """The page and the code cannot drift apart."""
    page = (Path(config.__file__).parent / "README.md").read_text(encoding="utf-8")
    rows = {
        name: default.strip().strip("`")
        for name, default in re.findall(
            r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", page.partition("## Settings")[2], re.MULTILINE
        )
    }
    shown = {None: "none", "": "none", True: "true", False: "false"}
    for item in dataclasses.fields(Settings):
        if item.name in ("recompute_threshold", "peers", "pull_timeout_s"):
            continue
        default = item.default
        if isinstance(default, tuple):
            default = [int(size) for size in default]
        text = (
            str(default)
            if isinstance(default, list)
            else shown.get(default, str(default))
            if not isinstance(default, float)
            else f"{default:g}"
        )
        assert rows[item.name] == text, item.name
    assert (rows["peers"], rows["pull_timeout_s"]) == ("none", "auto")


def test_every_setting_has_a_refusal() -> None:
    """A setting that is added gets a test of its bounds."""
    refused = {next(iter(section)) for section, _, _ in REFUSED}
    assert refused >= set(Settings.__slots__) - {"recompute_threshold"}


def test_a_fleet_with_a_secret_may_be_anywhere() -> None:
    """With keys engines listen on the network and name peers by host or address."""
    peers = {"decode-0": "tcp://10.0.0.2:5800", "decode-1": "tcp://decode-1.fleet:5800"}
    settings = parse(
        name="prefill-0",
        control_address="tcp://0.0.0.0:5800",
        fleet_secret_file="/run/secrets/fleet",
        peers=peers,
    )
    assert settings.control_address == "tcp://0.0.0.0:5800"
    assert dict(settings.peers) == peers


@pytest.mark.parametrize("value", [-1, 1.5, True, "64"])
def test_vllms_own_threshold_is_checked_too(value: Any) -> None:
    """It decides what is worth a pull."""
    with pytest.raises(ConfigError, match=re.escape(repr(value))) as caught:
        parse_settings({"kv_recompute_threshold": value})
    assert caught.value.setting == "kv_recompute_threshold"


@pytest.mark.parametrize("section", [None, 7, "on", ["mode"]])
def test_a_section_that_is_no_object_is_refused(section: Any) -> None:
    """With what it is."""
    with pytest.raises(ConfigError, match="expected an object of settings"):
        parse_settings({"turncache": section})


def test_a_rank_has_what_no_two_engines_may_share() -> None:
    """VLLM gives all ranks one configuration: the second one could not listen."""
    settings = parse(
        name="decode-0", control_address="tcp://[::1]:5800", trace_file="/var/log/trace.jsonl"
    )
    assert of_rank(settings, 0) == settings
    third = of_rank(settings, 2)
    assert third.control_address == "tcp://[::1]:5802"
    assert (third.name, third.trace_file) == ("decode-0_dp2", "/var/log/trace.jsonl_dp2")
    assert of_rank(parse(), 3) == parse()
    assert of_rank(parse(control_address="tcp://127.0.0.1:0"), 1).control_address == (
        "tcp://127.0.0.1:0"
    )
    with pytest.raises(ConfigError, match="65536"):
        of_rank(parse(control_address="tcp://127.0.0.1:65535"), 1)


ANY_VALUE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=9),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.text(max_size=9), max_size=2),
)


@given(
    st.dictionaries(st.sampled_from(sorted(Settings.__slots__)) | st.text(max_size=9), ANY_VALUE)
)
def test_any_section_is_read_or_refused(section: dict[str, Any]) -> None:
    """Nothing in a config raises anything but ConfigError."""
    try:
        settings = parse(**section)
    except ConfigError:
        return
    assert 0 <= settings.retain_default_s <= settings.retain_max_s


# --- facts -----------------------------------------------------------------------------------


class FullAttentionSpec(SimpleNamespace):
    """Named as in vLLM: the facts go by the name of the class."""


class SlidingWindowSpec(SimpleNamespace):
    """Likewise."""


def group(kind: type = FullAttentionSpec, **changes: Any) -> Any:
    """Return one KV cache group."""
    base = {
        "block_size": 16,
        "sliding_window": None,
        "attention_chunk_size": None,
        "page_size_bytes": 65_536,
    }
    return SimpleNamespace(
        kv_cache_spec=kind(**{**base, **changes}), layer_names=["layer.0", "layer.1"]
    )


def configs(groups: list[Any] | None = None, **changes: Any) -> tuple[Any, Any]:
    """Return the parts of vLLM's configuration that the facts look at."""
    cache = SimpleNamespace(
        enable_prefix_caching=changes.get("caching", True),
        block_size=16,
        hash_block_size=changes.get("hash_block_size"),
        prefix_caching_hash_algo=changes.get("algo", "sha256"),
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=2,
        pipeline_parallel_size=changes.get("pp", 1),
        data_parallel_size=changes.get("dp", 1),
        decode_context_parallel_size=changes.get("dcp", 1),
        prefill_context_parallel_size=changes.get("pcp", 1),
        enable_fault_tolerance=changes.get("fault_tolerance", False),
    )
    vllm_config = SimpleNamespace(
        cache_config=cache,
        parallel_config=parallel,
        kv_transfer_config=SimpleNamespace(engine_id="prefill-0"),
        model_config=SimpleNamespace(
            max_model_len=2048,
            is_encoder_decoder=changes.get("encoder", False),
            is_diffusion=changes.get("diffusion", False),
            enable_sleep_mode=changes.get("sleep", False),
            enable_cumem_allocator=changes.get("cumem", False),
        ),
        scheduler_config=SimpleNamespace(prefill_schedule_interval=changes.get("interval", 1)),
        speculative_config=changes.get("speculative"),
        weight_transfer_config=changes.get("weight_transfer"),
    )
    kv_cache_config = SimpleNamespace(
        num_blocks=100,
        kv_cache_groups=[group()] if groups is None else groups,
        hisparse_host_num_blocks=changes.get("hisparse"),
    )
    return vllm_config, kv_cache_config


def test_an_ordinary_engine_supports_everything() -> None:
    """One full-attention group, prefix caching on, any tensor parallel size."""
    facts = engine_facts(*configs(), vllm_version="0.32.0")
    assert (facts.engine_id, facts.num_blocks, facts.block_size) == ("prefill-0", 100, 16)
    assert (facts.tp_size, facts.max_model_len, facts.hash_algo) == (2, 2048, "sha256")
    assert facts.block_bytes == 2 * 2 * 65_536
    assert facts.unsupported == facts.unsupported_pull == facts.missing == ()


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (configs(caching=False), "prefix caching is off"),
        (configs([group(), group()]), "only one full-attention group"),
        (configs([]), "only one full-attention group"),
        (configs([group(SlidingWindowSpec)]), "SlidingWindowSpec"),
        (configs([group(sliding_window=128)]), "sliding-window"),
        (configs([group(attention_chunk_size=64)]), "chunked attention"),
        (configs([group(block_size=32)]), "hash block size"),
        (configs(hash_block_size=8), "hash block size"),
        (configs(speculative=object()), "rejected drafts rewrite blocks"),
        (configs(encoder=True), "encoder-decoder"),
        (configs(diffusion=True), "diffusion models"),
        (configs(hisparse=64), "HiSparse"),
        (configs(pp=2), "pipeline parallelism of 2"),
        (configs(dp=4), "data parallelism of 4"),
        (configs(dcp=2), "decode context parallelism of 2"),
        (configs(pcp=2), "prefill context parallelism of 2"),
    ],
)
def test_what_was_never_proven_is_unsupported(made: tuple[Any, Any], what: str) -> None:
    """The extension stays off there, and the reason is said in words."""
    facts = engine_facts(*made, vllm_version="0.32.0")
    assert any(what in why for why in facts.unsupported), facts.unsupported


def test_a_weak_hash_is_no_ground_for_a_pull() -> None:
    """Retention works with any hash; a pull needs one that nobody can find collisions of."""
    facts = engine_facts(*configs(algo="xxhash_cbor"), vllm_version="0.32.0")
    assert facts.unsupported == ()
    assert any("collisions" in why for why in facts.unsupported_pull)


def test_a_decode_engine_that_holds_prefills_back_is_handed_prompts_as_stock() -> None:
    """The block that a pull leaves to compute would wait for its turn; prefill's waits anyway."""
    made = configs(interval=4)
    of_decode = engine_facts(*made, vllm_version="0.33.0", side=Side.DECODE)
    assert any("interval of 4" in why for why in of_decode.unsupported_pull)
    assert of_decode.unsupported == ()
    assert engine_facts(*made, vllm_version="0.33.0", side=Side.PREFILL).unsupported_pull == ()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"sleep": True}, "sleep mode"),
        ({"cumem": True}, "sleep mode"),
        ({"weight_transfer": object()}, "weight transfer"),
        ({"fault_tolerance": True}, "fault tolerance"),
    ],
)
def test_memory_or_weights_that_change_below_it_are_no_ground_for_a_pull(
    change: dict[str, Any], what: str
) -> None:
    """What is kept stays on its engine: peers could not tell what they read."""
    facts = engine_facts(*configs(**change), vllm_version="0.32.0")
    assert facts.unsupported == ()
    assert any(what in why for why in facts.unsupported_pull)
