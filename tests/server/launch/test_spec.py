"""What a stack specification refuses."""

from __future__ import annotations

from typing import Any

import pytest

from turncache.errors import ConfigError
from turncache_server.launch.spec import OWNED_FLAGS, StackSpec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "model: empty"),
        ({"kind": "magic"}, "kind: 'magic': expected one of turncache, nixl"),
        ({"mode": "loud"}, "mode: 'loud': expected one of on, observe, off"),
        (
            {"device": "tpu"},
            r"device: 'tpu' \(did you mean cpu\?\): expected one of auto, cpu, cuda",
        ),
        ({"prefill": 1}, "1 prefill and 0 decode: a pair needs at least one of each"),
        ({"decode": 2}, "0 prefill and 2 decode"),
        ({"prefill": -1, "decode": 1}, "expected 0 to 64 engines"),
        ({"prefill": 40, "decode": 40}, "expected 0 to 64 engines"),
        ({"prefill": 1, "decode": 1, "kind": "plain"}, "a stock pair is nixl"),
        ({"kind": "nixl"}, "nixl is a pair: give prefill=1 and decode=1"),
        ({"kind": "nixl-bidirectional"}, "nixl-bidirectional is a pair"),
        ({"stock_returns": ("single-0",)}, "kind turncache has none: nixl-bidirectional"),
        (
            {
                "kind": "nixl-bidirectional",
                "prefill": 1,
                "decode": 1,
                "stock_returns": ("decode-1",),
            },
            "no engine 'decode-1'; expected prefill-0, decode-0",
        ),
        ({"tensor_parallel_size": 0}, "expected at least 1"),
        ({"kv_space_gib": 0}, "expected whole GiB from 1"),
        ({"num_blocks": {"decode": 5}}, "no 'decode' engine; expected single"),
        ({"num_blocks": {"single": 1}}, "single: 1: expected at least 2"),
        ({"devices": ("0", "1")}, r"2 entries for 1 engines \(single-0\)"),
        ({"router_port": 70_000}, "router_port: 70000: expected a port"),
        ({"nixl_port": -1}, "nixl_port: -1: expected a port"),
        ({"settings": {"mode": "off"}}, "set the mode of the stack instead"),
        ({"engine_args": ("--port", "1")}, "--port follows from the port settings"),
        ({"engine_args": ("--port=1",)}, "--port follows from the port settings"),
        ({"engine_args": ("--kv_transfer_config", "{}")}, "--kv-transfer-config follows from"),
        ({"engine_args": ("--kv-offloading-size=4",)}, "turncache flags --merge"),
    ],
)
def test_a_specification_that_cannot_work_is_refused(changes: dict[str, Any], message: str) -> None:
    """The message names the value, what was expected and the way out."""
    with pytest.raises(ConfigError, match=message):
        StackSpec(**{"model": "m", **changes})


@pytest.mark.parametrize("flag", sorted(OWNED_FLAGS))
def test_no_flag_of_ours_can_be_given_twice(flag: str) -> None:
    """Every flag that follows from the specification is refused among the engine's."""
    with pytest.raises(ConfigError, match=f"{flag} follows from"):
        StackSpec(model="m", engine_args=(flag, "x"))


def test_members_are_numbered_per_side_with_prefill_first() -> None:
    """Names carry side and number; one engine is single-0."""
    pair = StackSpec(model="m", prefill=1, decode=2)
    assert pair.members == (
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
    )
    assert StackSpec(model="m").members == (("single-0", "single"),)


@pytest.mark.parametrize(
    ("changes", "has_router"),
    [
        ({}, True),
        ({"router": False}, False),
        ({"kind": "plain"}, False),
        ({"kind": "nixl", "prefill": 1, "decode": 1}, False),
    ],
)
def test_only_our_own_kind_has_a_router(changes: dict[str, Any], has_router: bool) -> None:
    """Stock stacks are measured without anything of ours in the path."""
    assert StackSpec(**{"model": "m", **changes}).has_router is has_router
