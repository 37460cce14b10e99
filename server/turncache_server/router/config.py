"""The router's settings: TOML and flags in, frozen dataclasses out. Read once, at start."""

from __future__ import annotations

import dataclasses
import ipaddress
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from turncache.errors import ConfigError, ProtocolError, why_of
from turncache.protocol import check_session_id
from turncache.spelling import no_such, none_of
from turncache_server.control.addresses import check_address
from turncache_server.control.keys import FleetKeys, read_fleet_keys
from turncache_server.redis_link import check_redis_url
from turncache_server.router.plan import Side

_MIB: Final = 1024 * 1024
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HEADER_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64}")
_PATH: Final = re.compile(r"(/[A-Za-z0-9_-][A-Za-z0-9._-]*){1,8}")
_HOST: Final = re.compile(r"[^\s%<>\"\\^`{|}]+")
#: Settings each of which names the engines.
_LISTS: Final = ("engines", "engines_file", "kubernetes_selector")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One engine.

    Attributes:
        name: name in logs and metrics, also the key that sessions are placed by.
        side: ``single``, or ``prefill`` and ``decode``.
        url: base URL of its HTTP server, without ``/v1``.
        engine_id: ``engine_id`` of its ``--kv-transfer-config``; the name by default.
        control: address of its control socket; without it its calls have no outcome. Beyond
            loopback only with ``fleet_secret_file``.
    """

    name: str
    side: Side
    url: str
    engine_id: str
    control: str | None = None


def _number(default: float, low: float, high: float = math.inf) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _word(default: str, *legal: str) -> Any:
    return field(default=default, metadata={"legal": legal})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """The router's settings; ``README.md`` says what each does and why it is what it is.

    Durations are seconds, sizes bytes.
    """

    engines: tuple[EngineConfig, ...]
    engines_file: str = ""
    kubernetes_selector: str = ""
    kubernetes_namespace: str = ""
    fleet_secret_file: str = ""
    keys_file: str = ""
    cache_salt: str = _word("tenant", "tenant", "session")
    tls_cert_file: str = ""
    tls_key_file: str = ""
    engines_ca_file: str = ""
    host: str = "127.0.0.1"
    serve_without_keys: bool = False
    port: int = _number(8000, 0, 65535)
    return_enabled: bool = True
    more_paths: str = ""
    follow_conversations: bool = True
    session_header: str = ""
    warm_ahead_s: float = _number(0.0, 0, 60)
    max_ahead_bytes: int = _number(256 * _MIB, 1024)
    decode_alone_tokens: int = _number(0, 0)
    max_new_tokens_on_decode: int = _number(0, 0)
    repeat_prefill_s: float = _number(30.0, 0, 120)
    repeat_after_s: float = _number(0.1, 0.001, 10)
    serve_on_prefill: bool = False
    handover_share: float = _number(0.8, 0, 100)
    handover_wait_s: float = _number(30.0, 0, 3600)
    admission: bool = False
    admission_tokens: int = _number(0, 0)
    admission_share: float = _number(0.9, 0.01, 100)
    admission_idle_s: float = _number(120.0, 0, 86400)
    admission_wait_s: float = _number(120.0, 0, 86400)
    admission_max_waiting: int = _number(256, 0)
    admin: bool = False
    on_disconnect: str = _word("cancel", "cancel", "drain")
    disconnect_drain_s: float = _number(30.0, 0, 3600)
    shutdown_s: float = _number(30.0, 0, 3600)
    ping_s: float = _number(0.0, 0, 3600)
    max_attempts: int = _number(2, 1, 16)
    retry_after_s: int = _number(1, 0, 3600)
    engine_key_env: str = ""
    max_body_bytes: int = _number(64 * _MIB, 1024)
    max_body_depth: int = _number(100, 4, 500)
    max_header_bytes: int = _number(32 * 1024, 1024, _MIB)
    max_headers: int = _number(100, 16, 1000)
    max_tenant_calls: int = _number(0, 0)
    header_timeout_s: float = _number(10.0, 0.01, 300)
    body_timeout_s: float = _number(120.0, 0.01, 3600)
    keep_alive_s: float = _number(75.0, 0, 3600)
    max_answer_bytes: int = _number(64 * _MIB, 1024)
    max_event_bytes: int = _number(16 * _MIB, 1024)
    max_sessions: int = _number(100_000, 1)
    max_calls: int = _number(10_000, 1)
    connect_timeout_s: float = _number(5.0, 0.01, 60)
    first_byte_timeout_s: float = _number(600.0, 0.01)
    prefill_timeout_s: float = _number(0.0, 0)
    idle_timeout_s: float = _number(120.0, 0.01)
    answer_timeout_s: float = _number(0.0, 0)
    client_stall_s: float = _number(120.0, 0.01, 3600)
    control_timeout_s: float = _number(0.1, 0.001, 5)
    health_interval_s: float = _number(2.0, 0.01, 300)
    health_timeout_s: float = _number(2.0, 0.01, 60)
    breaker_failures: int = _number(3, 1, 1000)
    breaker_open_s: float = _number(5.0, 0, 300)
    traces: bool = False
    pass_trace_context: bool = False
    redis_url: str = ""
    redis_password_env: str = ""
    redis_prefix: str = "turncache"
    redis_interval_s: float = _number(1.0, 0.01, 300)
    redis_timeout_s: float = _number(0.25, 0.01, 10)

    @property
    def private(self) -> bool:
        """Whether only this machine reaches the router."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def other_paths(self) -> tuple[str, ...]:
        """What ``more_paths`` names."""
        return tuple(self.more_paths.split())

    @property
    def decode_tokens(self) -> int:
        """Most new tokens that decode computes of a prompt, wherever it has the choice."""
        return max(self.decode_alone_tokens, self.max_new_tokens_on_decode)

    @property
    def may_decode_alone(self) -> bool:
        """Whether decode may serve calls without prefill: histories are remembered then."""
        return self.decode_tokens > 0


def load_config(
    path: Path | None = None, overrides: Mapping[str, object] | None = None
) -> RouterConfig:
    """Read settings from a TOML file, flags on top.

    Args:
        path: the file, None for none.
        overrides: settings that win over the file's, by name.

    Raises:
        ConfigError: an unreadable file, an unknown name or an impossible value.
    """
    data: dict[str, object] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError("config", f"cannot read {str(path)!r}: {why_of(error)}") from error
    overrides = overrides or {}
    if any(overrides.get(name) for name in _LISTS):
        # The engines of a flag take the place of the file's, whichever way that names them.
        data = {name: value for name, value in data.items() if name not in _LISTS}
    return parse_config({**data, **overrides})


def parse_config(data: Mapping[str, object]) -> RouterConfig:
    """Check settings by name.

    Raises:
        ConfigError: naming the setting, its value and the legal ones.
    """
    fields = {item.name: item for item in dataclasses.fields(RouterConfig)}
    _check_names("", data, fields)
    values: dict[str, Any] = {
        name: _value(name, value, fields[name]) for name, value in data.items() if name != "engines"
    }
    if bool(values.get("tls_cert_file")) is not bool(values.get("tls_key_file")):
        raise ConfigError("tls_key_file", "certificate and key belong together; set both")
    if (header := values.get("session_header")) and not _HEADER_NAME.fullmatch(header):
        raise ConfigError("session_header", f"{header!r}: expected the name of a header")
    for path in str(values.get("more_paths", "")).split():
        if not _PATH.fullmatch(path):
            raise ConfigError(
                "more_paths", f"{path!r}: expected paths such as /v1/rerank, parted by spaces"
            )
    if url := values.get("redis_url"):
        check_redis_url(url)
    keyed = bool(values.get("fleet_secret_file"))
    _, *sources = _LISTS
    given = [name for name in sources if values.get(name)]
    if len(given) + ("engines" in data) > 1:
        raise ConfigError(
            given[-1],
            "set beside another list; name the engines in one of [[engines]], "
            + " and ".join(sources),
        )
    if file := values.get("engines_file"):
        engines = read_engines(Path(file), keyed=keyed)
    elif given:
        engines = ()  # Kubernetes is asked when the router starts
    else:
        engines = check_engines(data.get("engines"), keyed=keyed)
    config = RouterConfig(engines=engines, **values)
    for engine in engines:
        if _is_itself(config, engine):
            raise ConfigError(
                "engines.url",
                f"{engine.url!r} is where this router listens: a call would go round in circles; "
                "give engine or router another port",
            )
    if not (config.private or config.keys_file or config.serve_without_keys):
        raise ConfigError(
            "host",
            f"{config.host!r} is reached from other machines, and without keys whoever reaches it "
            "uses the engines: set keys_file (turncache router --new-key TENANT makes a key), "
            "listen on 127.0.0.1, or set serve_without_keys = true",
        )
    return config


def _is_itself(config: RouterConfig, engine: EngineConfig) -> bool:
    parts = urlsplit(engine.url)
    here = {config.host, "127.0.0.1", "localhost", "::1"}
    mine = config.private or config.host in ("", "0.0.0.0", "::")  # noqa: S104 - not bound here
    return parts.port == config.port and (
        parts.hostname == config.host or (mine and parts.hostname in here)
    )


def read_engines(path: Path, *, keyed: bool) -> tuple[EngineConfig, ...]:
    """Read the engines from a file of their own, which holds nothing else.

    Args:
        path: TOML with ``[[engines]]`` tables.
        keyed: the fleet has a secret, so that control sockets may be beyond loopback.

    Raises:
        ConfigError: naming the file, and what is wrong with it.
    """
    try:
        data = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
        _check_names("", data, {"engines": None})
        return check_engines(data.get("engines"), keyed=keyed)
    except (OSError, ValueError, ConfigError, ProtocolError) as error:
        raise ConfigError("engines_file", f"cannot use {str(path)!r}: {why_of(error)}") from error


def _check_names(prefix: str, data: Mapping[str, object], legal: Mapping[str, object]) -> None:
    for name in data:
        if name not in legal:
            raise ConfigError(prefix + name, no_such("setting", name, legal))


def _value(name: str, value: object, item: dataclasses.Field[Any]) -> object:
    kind = type(item.default)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if type(value) is not kind:
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise ConfigError(name, f"{value!r}: expected {words[kind]}")
    low: float = item.metadata.get("low", -math.inf)
    high: float = item.metadata.get("high", math.inf)
    if isinstance(value, (int, float)) and not low <= value <= high:
        upper = "" if high == math.inf else f" to {high:g}"
        raise ConfigError(name, f"{value!r}: expected a number from {low:g}{upper}")
    legal = item.metadata.get("legal")
    if legal is not None and value not in legal:
        raise ConfigError(name, none_of(value, legal))
    return value


def check_engines(value: object, *, keyed: bool) -> tuple[EngineConfig, ...]:
    """Check a list of tables, one per engine.

    Args:
        value: the list.
        keyed: see :func:`read_engines`.

    Raises:
        ConfigError: naming the table and what is wrong with it.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise ConfigError(
            "engines", "expected at least one [[engines]] table with name, side and url"
        )
    engines = tuple(_engine(index, item, keyed=keyed) for index, item in enumerate(value))
    for what in ("name", "engine_id", "url", "control"):
        seen: set[str] = set()
        for engine in engines:
            text = getattr(engine, what)
            if text is not None and text in seen:
                raise ConfigError(
                    f"engines.{what}", f"{text!r} occurs twice; every engine needs its own"
                )
            if text is not None:
                seen.add(text)
    _check_sides(engines)
    return engines


def fleet_keys(config: RouterConfig) -> FleetKeys | None:
    """Read the fleet's secret, None where the settings name none.

    Raises:
        ConfigError: its file cannot be used.
        EnvironmentFault: libzmq was built without CURVE.
    """
    return read_fleet_keys(config.fleet_secret_file) if config.fleet_secret_file else None


def _check_sides(engines: tuple[EngineConfig, ...]) -> None:
    sides = {engine.side for engine in engines}
    if sides not in ({Side.SINGLE}, {Side.PREFILL, Side.DECODE}):
        got = ", ".join(sorted(side.value for side in sides))
        raise ConfigError(
            "engines.side",
            f"got {got}: expected only single engines, or at least one prefill and one decode",
        )


def _engine(index: int, item: object, *, keyed: bool) -> EngineConfig:
    prefix = f"engines[{index}]."
    if not isinstance(item, Mapping):
        raise ConfigError(f"engines[{index}]", f"{item!r}: expected a table")
    _check_names(prefix, item, {f.name: f for f in dataclasses.fields(EngineConfig)})
    for name, value in item.items():
        if not isinstance(value, str):
            raise ConfigError(prefix + name, f"{value!r}: expected text")
    for name in ("name", "side", "url"):
        if name not in item:
            raise ConfigError(prefix + name, "missing; every engine needs name, side and url")
    if not _NAME.fullmatch(item["name"]):
        raise ConfigError(
            prefix + "name",
            f"{item['name']!r}: expected 1 to 64 letters, digits, dots, dashes or underscores",
        )
    if item["side"] not in set(Side):
        raise ConfigError(prefix + "side", none_of(item["side"], Side))
    control = item.get("control") or None
    return EngineConfig(
        name=item["name"],
        side=Side(item["side"]),
        url=_url(prefix + "url", item["url"]),
        engine_id=check_session_id(
            item.get("engine_id", item["name"]), field_name=prefix + "engine_id"
        ),
        control=None
        if control is None
        else check_address(control, setting=prefix + "control", keyed=keyed),
    )


def _url(setting: str, text: str) -> str:
    try:
        parts = urlsplit(text)
        legal = (
            parts.scheme in ("http", "https")
            and _HOST.fullmatch(parts.hostname or "") is not None
            and parts.port != 0
            and parts.username is None
            and parts.path in ("", "/")
            and not parts.query
            and not parts.fragment
        )
    except ValueError:
        parts, legal = urlsplit(""), False
    if not legal:
        raise ConfigError(
            setting, f"{text!r}: expected http://host:port, without path or credentials"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}"
