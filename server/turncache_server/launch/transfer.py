"""``--kv-transfer-config`` of every engine, and merging ours into one that exists. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from turncache.errors import ConfigError
from turncache_server.launch.spec import Side, StackSpec

MODULE: Final = "turncache_server.connector"
RETENTION: Final = "RetentionConnector"
PAIR: Final = "TurncacheConnector"
STOCK_PAIR: Final = "NixlConnector"
MULTI: Final = "MultiConnector"
SECTION: Final = "turncache"
_EXTRA: Final = "kv_connector_extra_config"
#: Settings that vLLM's NIXL connector reads itself, and ours with it.
_VLLM_SETTINGS: Final = frozenset({"kv_recompute_threshold"})
#: Settings for engines behind a router that is not ours.
_ANOTHER_ROUTER: Final = frozenset({"foreign_router", "find"})
#: Stock returns: our verified pull takes their place.
_STOCK_RETURN_KEYS: Final = frozenset({"bidirectional_kv_xfer", "decoder_kv_blocks_ttl"})


def transfer_config(
    spec: StackSpec,
    name: str,
    side: Side,
    *,
    control: Mapping[str, str],
    on_gpu: bool,
    mode: str,
) -> dict[str, Any] | None:
    """Return one engine's configuration, None when it needs no connector.

    Args:
        spec: the stack.
        name: of this engine, by which router and peers name it.
        side: what it is for.
        control: control address of every engine, by name.
        on_gpu: KV lies in GPU memory.
        mode: mode of the extension at start.
    """
    buffer_device = "cuda" if on_gpu else "cpu"
    if spec.kind == "plain":
        return None
    if not spec.is_ours:
        return {
            "kv_connector": STOCK_PAIR,
            "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
            "kv_buffer_device": buffer_device,
            "kv_load_failure_policy": "recompute",
            _EXTRA: {
                "backends": ["UCX"],
                **({"bidirectional_kv_xfer": True} if spec.returns_stock(name) else {}),
            },
        }
    section = {
        "mode": mode,
        "side": side,
        "name": name,
        "control_address": control[name],
        **({"fleet_secret_file": str(spec.fleet_secret_file)} if spec.fleet_secret_file else {}),
        # Hints beyond the session count only where our own router has written them.
        "trust_hints": spec.has_router and not _ANOTHER_ROUTER & spec.settings.keys(),
        **({"peers": _peers(spec, side, control)} if spec.is_pair else {}),
    }
    extra = settings_as_extra(spec.settings)
    extra[SECTION] = {**section, **extra[SECTION]}
    # No engine_id: vLLM makes a new one at every start. With a fixed one, a peer's NIXL
    # would read through the memory addresses of the engine that was there before.
    ours = {"kv_connector_module_path": MODULE}
    if not spec.is_pair:
        return {
            "kv_connector": RETENTION,
            **ours,
            "kv_role": "kv_producer",
            _EXTRA: extra,
        }
    return {
        "kv_connector": PAIR,
        **ours,
        # Both sides load: with any other role vLLM does not fence reads (engine hazards).
        "kv_role": "kv_both",
        "kv_buffer_device": buffer_device,
        "kv_load_failure_policy": "recompute",
        _EXTRA: {"backends": ["UCX"], **extra},
    }


def settings_as_extra(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as ``kv_connector_extra_config``: ours nested, vLLM's own beside them."""
    ours = {name: value for name, value in settings.items() if name not in _VLLM_SETTINGS}
    theirs = {name: value for name, value in settings.items() if name in _VLLM_SETTINGS}
    return {**theirs, SECTION: ours}


def _peers(spec: StackSpec, side: Side, control: Mapping[str, str]) -> dict[str, str]:
    """Name the engines of the other side: those from which this one may take KV."""
    return {other: control[other] for other, at in spec.members if at != side}


def merge(existing: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Add ``ours`` to the ``--kv-transfer-config`` that an engine already has.

    Our own connector is updated in place. The stock NIXL connector gives way to ours, which
    is built on it, and keeps its extra settings. Any other connector stays and becomes a
    sibling of ours in a ``MultiConnector``; that works for retention only.

    Raises:
        ConfigError: what exists is no connector configuration, or cannot be combined.
    """
    connector = existing.get("kv_connector")
    if not isinstance(connector, str):
        raise ConfigError("merge", "the existing configuration has no kv_connector")
    replaces_stock = connector == STOCK_PAIR and ours["kv_connector"] == PAIR
    if replaces_stock or connector == ours["kv_connector"]:
        return _overlay(existing, ours)
    if connector == MULTI:
        return _into_multi(existing, ours)
    _check_sibling(connector, ours)
    shared = {
        name: existing[name]
        for name in ("engine_id", "kv_role", "kv_buffer_device", "kv_load_failure_policy")
        if name in existing
    }
    return {
        "kv_connector": MULTI,
        **shared,
        _EXTRA: {"connectors": [_child(existing), _child(ours)]},
    }


def _overlay(existing: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    """Lay ours over an existing configuration; settings that only it has are kept."""
    old_extra = _mapping(existing.get(_EXTRA, {}), _EXTRA)
    new_extra = ours[_EXTRA]
    section = {**_mapping(old_extra.get(SECTION, {}), SECTION), **new_extra[SECTION]}
    kept = {key: value for key, value in old_extra.items() if key not in _STOCK_RETURN_KEYS}
    outer = _child(existing) if ours["kv_connector"] == PAIR else existing
    return {**outer, **ours, _EXTRA: {**new_extra, **kept, SECTION: section}}


def _into_multi(existing: Mapping[str, Any], ours: Mapping[str, Any]) -> dict[str, Any]:
    extra = _mapping(existing.get(_EXTRA, {}), _EXTRA)
    children = extra.get("connectors")
    if not isinstance(children, list) or not all(isinstance(c, Mapping) for c in children):
        raise ConfigError("merge", f"{MULTI} has no list of connectors in {_EXTRA}")
    others = [child for child in children if child.get("kv_connector") != ours["kv_connector"]]
    mine = [child for child in children if child.get("kv_connector") == ours["kv_connector"]]
    for child in others:
        _check_sibling(str(child.get("kv_connector")), ours)
    merged = _child(_overlay(mine[0], ours) if mine else ours)
    return {
        **existing,
        _EXTRA: {**extra, "connectors": [*others, merged]},
    }


def _check_sibling(connector: str, ours: Mapping[str, Any]) -> None:
    if ours["kv_connector"] == PAIR:
        raise ConfigError(
            "merge",
            f"{PAIR} cannot share an engine with {connector}: use one engine per machine with "
            f"{RETENTION}, or take {connector} out",
        )


def _child(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without its ``engine_id``.

    In a ``MultiConnector`` vLLM passes the parent's beside the child's own fields, so a child
    that carries one dies with a duplicate keyword.
    """
    return {key: value for key, value in config.items() if key != "engine_id"}


def _mapping(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError("merge", f"{name}: {value!r}: expected an object")
    return value
