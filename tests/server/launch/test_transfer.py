"""Merging our configuration into one that an engine already has."""

from __future__ import annotations

from typing import Any

import pytest

from turncache.errors import ConfigError
from turncache_server.connector.config import parse_settings
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.transfer import merge, transfer_config


def retention() -> dict[str, Any]:
    """Return our configuration of one engine."""
    made = transfer_config(
        StackSpec(model="m"),
        "single-0",
        "single",
        control={"single-0": "tcp://127.0.0.1:5800"},
        on_gpu=True,
        mode="on",
    )
    assert made is not None
    return made


def pair() -> dict[str, Any]:
    """Return our configuration of a prefill engine."""
    made = transfer_config(
        StackSpec(model="m", prefill=1, decode=1),
        "prefill-0",
        "prefill",
        control={"prefill-0": "tcp://127.0.0.1:5800", "decode-0": "tcp://127.0.0.1:5801"},
        on_gpu=True,
        mode="on",
    )
    assert made is not None
    return made


def children(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the children of a multi connector."""
    assert config["kv_connector"] == "MultiConnector"
    found: list[dict[str, Any]] = config["kv_connector_extra_config"]["connectors"]
    return found


@pytest.mark.parametrize("ours", [retention(), pair()], ids=["retention", "pair"])
def test_what_we_write_is_what_the_connector_reads(ours: dict[str, Any]) -> None:
    """The connector accepts every setting that the launcher writes."""
    settings = parse_settings(ours["kv_connector_extra_config"])
    assert settings.control_address == "tcp://127.0.0.1:5800"
    assert settings.trust_hints


def test_vllms_own_setting_goes_beside_ours() -> None:
    """``kv_recompute_threshold`` is read by vLLM's connector, so it is not nested."""
    spec = StackSpec(model="m", settings={"kv_recompute_threshold": 128, "retain_budget": 0.3})
    made = transfer_config(
        spec,
        "single-0",
        "single",
        control={"single-0": "tcp://127.0.0.1:1"},
        on_gpu=True,
        mode="on",
    )
    assert made is not None
    settings = parse_settings(made["kv_connector_extra_config"])
    assert (settings.recompute_threshold, settings.retain_budget) == (128, 0.3)


def test_another_connector_becomes_a_sibling() -> None:
    """An offloading connector stays first and keeps its settings; engine ids go to the parent."""
    existing = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": "mine",
        "kv_connector_extra_config": {"block_size": 64},
    }
    merged = merge(existing, retention())
    assert (merged["engine_id"], merged["kv_role"]) == ("mine", "kv_both")
    first, second = children(merged)
    assert first["kv_connector_extra_config"] == {"block_size": 64}
    assert second["kv_connector"] == "RetentionConnector"
    # vLLM passes the parent's beside a child's fields: a second one is a TypeError.
    assert "engine_id" not in first
    assert "engine_id" not in second


def test_a_multi_connector_gets_one_more_child_and_only_once() -> None:
    """Merging is idempotent, and other children are left alone."""
    existing = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other", "x": 1}]},
    }
    once = merge(existing, retention())
    assert [child["kv_connector"] for child in children(once)] == ["Other", "RetentionConnector"]
    assert merge(once, retention()) == once


def test_our_own_connector_keeps_what_only_it_has() -> None:
    """A setting that somebody added survives; what the launcher decides is updated."""
    existing = retention()
    existing["kv_connector_extra_config"]["turncache"] |= {"retain_budget": 0.2, "mode": "off"}
    section = merge(existing, retention())["kv_connector_extra_config"]["turncache"]
    assert (section["retain_budget"], section["mode"]) == (0.2, "on")


def test_the_stock_pair_connector_gives_way_to_ours() -> None:
    """Ours is built on it: its settings stay, its unverified returns and fixed id go."""
    existing = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "engine_id": "fixed",
        "kv_connector_extra_config": {
            "backends": ["GDS"],
            "bidirectional_kv_xfer": True,
            "kv_recompute_threshold": 200,
        },
    }
    merged = merge(existing, pair())
    extra = merged["kv_connector_extra_config"]
    assert (merged["kv_connector"], merged["kv_role"]) == ("TurncacheConnector", "kv_both")
    assert extra["backends"] == ["GDS"]
    assert "bidirectional_kv_xfer" not in extra
    assert "engine_id" not in merged
    assert parse_settings(extra).recompute_threshold == 200


@pytest.mark.parametrize(
    ("existing", "message"),
    [
        ({}, "has no kv_connector"),
        ({"kv_connector": "OffloadingConnector"}, "cannot share an engine with Offloading"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}]},
            },
            "cannot share an engine with Other",
        ),
        ({"kv_connector": "MultiConnector"}, "has no list of connectors"),
        (
            {"kv_connector": "NixlConnector", "kv_connector_extra_config": 3},
            "kv_connector_extra_config: 3: expected an object",
        ),
    ],
)
def test_what_cannot_be_combined_is_refused(existing: dict[str, Any], message: str) -> None:
    """The pair connector shares an engine with nobody; the message says what to do."""
    with pytest.raises(ConfigError, match=message):
        merge(existing, pair())
