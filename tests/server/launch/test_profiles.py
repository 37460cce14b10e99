"""From a specification and facts to flags and environment."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache.errors import ConfigError
from turncache_server.connector.config import parse_settings
from turncache_server.launch.machine import EngineEnvironment, Machine
from turncache_server.launch.profiles import (
    CPU_RIG,
    EngineLaunch,
    count_ports,
    effective_mode,
    plan_engines,
    served_name,
    split_cores,
)
from turncache_server.launch.spec import StackSpec

FREE = tuple(range(20_000, 20_100))


def environment(**changes: Any) -> EngineEnvironment:
    """Describe an engine environment: tested vLLM for CPU, unless told otherwise."""
    values = {
        "python": "python",
        "vllm_version": "0.32.0",
        "cuda": False,
        "nixl": True,
        "turncache": True,
    }
    return EngineEnvironment(**{**values, **changes})


def plan(
    *, gpus: tuple[str, ...] = (), cores: tuple[int, ...] = (0, 1), **changes: Any
) -> tuple[EngineLaunch, ...]:
    """Plan a stack on a machine with these GPUs (none: a CPU machine) and cores."""
    spec = StackSpec(**{"model": "/models/small", **changes})
    return plan_engines(
        spec,
        machine=Machine(cores=cores, memory_available_bytes=1 << 40, gpus=gpus),
        environment=environment(cuda=bool(gpus)),
        ports=count_ports(spec, FREE),
    )


def value_of(launch: EngineLaunch, flag: str) -> str:
    """Return the value of a flag that occurs once."""
    assert launch.arguments.count(flag) == 1
    return launch.arguments[launch.arguments.index(flag) + 1]


def transfer_of(launch: EngineLaunch) -> dict[str, Any]:
    """Return a launch's ``--kv-transfer-config``."""
    data: dict[str, Any] = json.loads(value_of(launch, "--kv-transfer-config"))
    return data


def test_one_cpu_engine_gets_exactly_these_flags_and_variables() -> None:
    """The CPU profile of one engine, word for word."""
    (launch,) = plan(max_model_len=4096, dtype="float32", num_blocks={"single": 300})
    head, transfer = launch.arguments[:-2], transfer_of(launch)
    assert " ".join(head) == (
        "--model /models/small --served-model-name small --host 127.0.0.1 --port 8100 "
        "--enable-prompt-tokens-details --max-model-len 4096 --dtype float32 "
        "--num-gpu-blocks-override 300 --enforce-eager --block-size 32 "
        "--max-num-batched-tokens 1024 "
        "--distributed-executor-backend vllm.v1.executor.uniproc_executor.UniProcExecutor"
    )
    assert transfer == {
        "kv_connector": "RetentionConnector",
        "kv_connector_module_path": "turncache_server.connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {
            "turncache": {
                "mode": "on",
                "side": "single",
                "name": "single-0",
                "control_address": "tcp://127.0.0.1:5800",
                "trust_hints": True,
            }
        },
    }
    assert dict(launch.environment) == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "MALLOC_MMAP_THRESHOLD_": "33554432",
        "MALLOC_TRIM_THRESHOLD_": "4294967295",
        "MALLOC_TOP_PAD_": "67108864",
        "HF_HUB_OFFLINE": "1",
    }


def test_tensor_parallel_cpu_workers_keep_vllms_own_executor() -> None:
    """Several ranks need several processes."""
    (launch,) = plan(tensor_parallel_size=2)
    assert "--distributed-executor-backend" not in launch.arguments


def test_a_cpu_pair_shares_nothing_but_the_machine() -> None:
    """Each engine has ports, cores and threads of its own, and NIXL's rig."""
    prefill, decode = plan(prefill=1, decode=1)
    assert (prefill.port, decode.port) == (8100, 8200)
    assert (prefill.nixl_port, decode.nixl_port) == (5600, 5601)
    assert (prefill.cores, decode.cores) == ((0,), (1,))
    for launch in (prefill, decode):
        assert launch.environment["OMP_NUM_THREADS"] == "1"
        assert launch.environment["UCX_TLS"] == "tcp"
        assert int(launch.environment["MALLOC_TRIM_THRESHOLD_"]) > 2**30
        assert launch.environment["PYTHONPATH"] == str(CPU_RIG)
        assert launch.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(launch.nixl_port)


def test_engines_that_take_turns_may_share_all_cores() -> None:
    """With one client either prefill or decode works: a slice each would leave cores idle."""
    for launch in plan(prefill=1, decode=1, share_cores=True):
        assert launch.cores == (0, 1)
        assert launch.environment["OMP_NUM_THREADS"] == "2"


def test_a_pair_names_the_engines_of_the_other_side_as_peers() -> None:
    """Prefill may take KV from every decode engine and the reverse, and from nobody else."""
    launches = plan(prefill=2, decode=1, settings={"handover_s": 7})
    sections = [transfer_of(x)["kv_connector_extra_config"]["turncache"] for x in launches]
    assert [section["peers"] for section in sections] == [
        {"decode-0": "tcp://127.0.0.1:5802"},
        {"decode-0": "tcp://127.0.0.1:5802"},
        {"prefill-0": "tcp://127.0.0.1:5800", "prefill-1": "tcp://127.0.0.1:5801"},
    ]
    assert [section["handover_s"] for section in sections] == [7, 7, 7]
    assert [transfer_of(launch)["kv_role"] for launch in launches] == ["kv_both"] * 3
    assert {transfer_of(launch)["kv_load_failure_policy"] for launch in launches} == {"recompute"}


def test_a_fixed_engine_id_is_never_given() -> None:
    """A peer's NIXL would read through the addresses of the engine that was there before."""
    for kind in ("turncache", "nixl"):
        for launch in plan(prefill=1, decode=1, kind=kind):
            assert "engine_id" not in transfer_of(launch)


@pytest.mark.parametrize(
    ("kind", "roles", "extra"),
    [
        ("nixl", ["kv_producer", "kv_consumer"], {"backends": ["UCX"]}),
        (
            "nixl-bidirectional",
            ["kv_producer", "kv_consumer"],
            {"backends": ["UCX"], "bidirectional_kv_xfer": True},
        ),
    ],
)
def test_stock_pairs_hold_nothing_of_ours(
    kind: str, roles: list[str], extra: dict[str, Any]
) -> None:
    """Stock kinds load the stock connector, with failed loads recomputed."""
    launches = plan(prefill=1, decode=1, kind=kind)
    transfers = [transfer_of(launch) for launch in launches]
    assert [t["kv_connector"] for t in transfers] == ["NixlConnector"] * 2
    assert [t["kv_role"] for t in transfers] == roles
    assert [t["kv_connector_extra_config"] for t in transfers] == [extra] * 2
    assert "turncache" not in json.dumps(transfers)
    assert [launch.control_address for launch in launches] == [None, None]


def test_stock_returns_can_be_left_to_some_engines() -> None:
    """Only a decode engine without them lets go of a call's KV when it ends."""
    some = ("prefill-0", "decode-1")
    launches = plan(prefill=1, decode=2, kind="nixl-bidirectional", stock_returns=some)
    flags = [
        transfer_of(launch)["kv_connector_extra_config"].get("bidirectional_kv_xfer", False)
        for launch in launches
    ]
    assert flags == [True, False, True]


def test_a_plain_engine_has_no_connector() -> None:
    """The baseline for one engine is vLLM as it is."""
    (launch,) = plan(kind="plain")
    assert "--kv-transfer-config" not in launch.arguments


def test_hints_are_trusted_only_behind_our_router() -> None:
    """Without our router anybody could have written them."""
    for router in (True, False):
        (launch,) = plan(router=router)
        section = transfer_of(launch)["kv_connector_extra_config"]["turncache"]
        assert section["trust_hints"] is router
    for setting in ({"foreign_router": True}, {"find": "peers"}):
        (launch,) = plan(router=True, settings=setting)
        section = transfer_of(launch)["kv_connector_extra_config"]["turncache"]
        assert section["trust_hints"] is False
        assert parse_settings({"turncache": section})


def test_only_the_part_that_clients_reach_listens_beyond_loopback() -> None:
    """Engines behind a router stay on loopback; an engine without one takes the host."""
    assert value_of(plan(host="0.0.0.0")[0], "--host") == "127.0.0.1"
    (alone,) = plan(host="0.0.0.0", router=False)
    assert value_of(alone, "--host") == "0.0.0.0"
    assert alone.url == "http://127.0.0.1:8100"


def test_a_gpu_pair_is_left_as_vllm_makes_it() -> None:
    """The GPU profile adds devices and ports; nothing of the CPU rig."""
    prefill, decode = plan(gpus=("0", "1", "2", "3"), prefill=1, decode=1, tensor_parallel_size=2)
    assert prefill.environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert decode.environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert value_of(prefill, "--tensor-parallel-size") == "2"
    assert transfer_of(prefill)["kv_buffer_device"] == "cuda"
    assert prefill.cores == ()
    for name in ("PYTHONPATH", "UCX_TLS", "VLLM_CPU_KVCACHE_SPACE"):
        assert name not in prefill.environment
    for flag in ("--enforce-eager", "--block-size", "--gpu-memory-utilization"):
        assert flag not in prefill.arguments


def test_engines_that_share_a_gpu_share_its_memory() -> None:
    """With one GPU for two engines each gets half of what vLLM would take."""
    launches = plan(gpus=("0",), prefill=1, decode=1)
    assert [x.environment["CUDA_VISIBLE_DEVICES"] for x in launches] == ["0", "0"]
    assert [value_of(x, "--gpu-memory-utilization") for x in launches] == ["0.45", "0.45"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel_size": 2}, "this machine has 1"),
        ({"devices": ("0,1",)}, "single-0 gets '0,1', it needs 1 "),
    ],
)
def test_gpus_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """The message names engine, devices and size."""
    with pytest.raises(ConfigError, match=message):
        plan(gpus=("0",), **changes)


@pytest.mark.parametrize(
    ("version", "settings", "mode"),
    [
        ("0.32.0", {}, "on"),
        ("0.33.0", {}, "observe"),
        ("0.33.0", {"allow_untested_vllm": True}, "on"),
        (None, {}, "on"),
    ],
)
def test_an_untested_vllm_observes_until_it_is_allowed(
    version: str | None, settings: dict[str, Any], mode: str
) -> None:
    """The table decides; an unknown version is left to the engine itself."""
    assert effective_mode(StackSpec(model="m", settings=settings), version) == mode


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"model": "/models/small"}, "small"),
        ({"model": "org/small"}, "org/small"),
        ({"model": "/models/small", "served_name": "it"}, "it"),
    ],
)
def test_the_name_in_the_api(changes: dict[str, Any], name: str) -> None:
    """A folder is known by its last part, a hub model by its full name."""
    assert served_name(StackSpec(**changes)) == name


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_cores_are_split_fairly_and_completely(num_cores: int, num_engines: int) -> None:
    """With enough cores each is used once and shares differ by at most one."""
    slices = split_cores(range(num_cores), num_engines)
    assert len(slices) == num_engines
    assert all(slices)
    if num_cores >= num_engines:
        assert [core for part in slices for core in part] == list(range(num_cores))
        sizes = [len(part) for part in slices]
        assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([0, 8000]))
def test_every_part_has_a_port_of_its_own(prefill: int, decode: int, router_port: int) -> None:
    """No two parts of a stack share a port, whether counted up or free."""
    spec = StackSpec(model="m", prefill=prefill, decode=decode, router_port=router_port)
    ports = count_ports(spec, FREE)
    used = [ports.router, *(p for e in ports.engines for p in (e.http, e.nixl, e.control))]
    assert len(set(used)) == len(used)
    assert (ports.router == 8000) == (router_port == 8000)


def test_bases_that_collide_are_refused() -> None:
    """Two parts on one port would fight for it."""
    with pytest.raises(ConfigError, match="8200 would be used twice"):
        count_ports(StackSpec(model="m", prefill=1, decode=1, engine_port=8200), FREE)
