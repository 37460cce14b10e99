"""Where a control socket may be: on loopback, and beyond it with keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.errors import ConfigError
from turncache_server.control.addresses import check_address, is_ipv6, is_loopback

LOOPBACK = ["tcp://127.0.0.1:5800", "tcp://localhost:1", "tcp://[::1]:5800", "tcp://127.9.9.9:1"]
REMOTE = ["tcp://10.0.0.1:5800", "tcp://engine-3:5800", "tcp://a_b.fleet.:1", "tcp://[fd00::1]:1"]
NEVER = [
    "ipc:///tmp/x",
    "tcp://127.0.0.1",
    "tcp://127.0.0.1:notaport",
    "tcp://127.0.0.1:99999",
    "127.0.0.1:5800",
    "tcp://127.0.0.1:5800@evil:1",
    "tcp://127.0.0.1:5800/path",
    "tcp://10.0.0.1:5800?x",
    "tcp://10.0.0:5800",
    "tcp://300.1.1.1:5800",
    "tcp://224.0.0.1:5800",
    "tcp://-a:5800",
    f"tcp://{'a' * 64}:5800",
    "tcp://:5800",
    "",
]


@pytest.mark.parametrize("address", LOOPBACK)
@pytest.mark.parametrize("keyed", [False, True])
def test_loopback_is_accepted_with_and_without_keys(address: str, keyed: bool) -> None:
    """The first set-up needs no secret."""
    assert check_address(address, keyed=keyed) == address
    assert is_loopback(address)


@pytest.mark.parametrize("address", [*REMOTE, *NEVER, "tcp://0.0.0.0:5800", "tcp://*:5800"])
def test_without_keys_anything_else_is_refused(address: str) -> None:
    """The message names the setting, what is expected and the way out."""
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:<port>.*fleet_secret_file") as caught:
        check_address(address, setting="turncache.peers.decode-0")
    assert caught.value.setting == "turncache.peers.decode-0"


@pytest.mark.parametrize("address", REMOTE)
def test_with_keys_hosts_are_asked_by_name_or_number(address: str) -> None:
    """Peers and router name engines as their machines are named."""
    assert check_address(address, keyed=True) == address
    assert not is_loopback(address)


@pytest.mark.parametrize("address", [*NEVER, "tcp://0.0.0.0:5800", "tcp://[::]:1", "tcp://*:1"])
def test_with_keys_what_is_no_host_is_refused(address: str) -> None:
    """Nothing that ZMQ would read as something else gets through."""
    with pytest.raises(ConfigError, match="a host name or IP address"):
        check_address(address, keyed=True)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:1", "tcp://[::]:1", "tcp://10.0.0.1:1"])
def test_with_keys_engines_listen_on_numbers(address: str) -> None:
    """All interfaces, or one."""
    assert check_address(address, keyed=True, bind=True) == address


def test_a_name_is_no_address_to_listen_on() -> None:
    """ZMQ binds to numbers only."""
    with pytest.raises(ConfigError, match="the IP address to listen on"):
        check_address("tcp://engine-3:5800", keyed=True, bind=True)


def test_ipv6_is_told_apart() -> None:
    """ZMQ has to be told."""
    assert [is_ipv6(a) for a in ("tcp://[::1]:1", "tcp://10.0.0.1:1", "tcp://h:1")] == [
        True,
        False,
        False,
    ]


@given(st.text(max_size=40), st.booleans(), st.booleans())
def test_any_text_is_accepted_or_refused(text: str, keyed: bool, bind: bool) -> None:
    """Nothing makes the check raise anything but ConfigError, and without keys no host passes."""
    for address in (text, f"tcp://{text}", f"tcp://{text}:5800"):
        try:
            check_address(address, keyed=keyed, bind=bind)
        except ConfigError:
            continue
        assert keyed or is_loopback(address)
