"""Addresses of control sockets: loopback, or anywhere where the fleet has a secret."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

from turncache.errors import ConfigError

_HOST_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*\.?")
_LONGEST_NAME: Final = 253


def check_address(
    address: str, *, setting: str = "control_address", keyed: bool = False, bind: bool = False
) -> str:
    """Return ``address`` when a control socket may be there.

    Args:
        address: ``tcp://<host>:<port>``.
        setting: where it comes from, for the message.
        keyed: the fleet has a secret, so that it may lie beyond loopback.
        bind: to listen on, which takes a number, not a name.

    Raises:
        ConfigError: otherwise.
    """
    host, port = _split(address)
    if port is not None and (is_loopback(address) or (keyed and _is_reachable(host, bind=bind))):
        return address
    if not keyed:
        raise ConfigError(
            setting,
            f"{address!r}: expected tcp://127.0.0.1:<port>; beyond loopback the control plane "
            "needs keys: set fleet_secret_file on every engine and router",
        )
    what = "the IP address to listen on, or 0.0.0.0" if bind else "a host name or IP address"
    raise ConfigError(setting, f"{address!r}: expected tcp://<host>:<port>, with {what}")


def is_loopback(address: str) -> bool:
    """Say whether an address can only be reached from this machine."""
    host, _ = _split(address)
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_ipv6(address: str) -> bool:
    """Say whether an address names an IPv6 host, which ZMQ must be told."""
    return ":" in _split(address)[0]


def _split(address: str) -> tuple[str, int | None]:
    """Return host and port, the port None where the address has another form."""
    try:
        parts = urlsplit(address)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return "", None
    bare = not (parts.path or parts.query or parts.fragment or parts.username is not None)
    return host, port if parts.scheme == "tcp" and bare else None


def _is_reachable(host: str, *, bind: bool) -> bool:
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        # A number with dots that is no address must not be looked up as a name.
        numeric = host.replace(".", "").isdigit()
        return (
            not bind
            and not numeric
            and len(host) <= _LONGEST_NAME
            and _HOST_NAME.fullmatch(host) is not None
        )
    return not ip.is_multicast and (bind or not ip.is_unspecified)
