"""Keys from one secret, and which files may hold it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from turncache.errors import ConfigError
from turncache_server.control.keys import (
    MIN_ENTROPY_BITS,
    derive_keys,
    entropy_bits,
    read_fleet_keys,
)


def secret_file(folder: Path, content: bytes, mode: int = 0o600) -> Path:
    """Write a secret."""
    path = folder / "fleet.secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_keys_of_a_secret_are_these() -> None:
    """A golden vector: engines of another version must derive the same."""
    keys = derive_keys(b"a secret that is not secret at all")
    assert keys.server_public == b"1Or!!IFYt7Juzh+/]FGcFn>/^u>bMtMb@r%C8DCl"
    assert keys.client_public == b"MWltNHM01l{}wQqqX8#M=9oiWZ75==gx@pG)t*^v"
    assert keys.digest == "fce50213"


@given(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64))
def test_every_secret_has_pairs_of_its_own(one: bytes, other: bytes) -> None:
    """Pairs fit together, both sides differ, and so do secrets."""
    keys = derive_keys(one)
    assert keys == derive_keys(one)
    assert zmq.curve_public(keys.server_secret) == keys.server_public
    assert zmq.curve_public(keys.client_secret) == keys.client_public
    assert keys.server_public != keys.client_public
    assert keys.admits(z85.decode(keys.client_public))
    assert not keys.admits(z85.decode(keys.server_public))
    if one != other:
        assert derive_keys(other).client_public != keys.client_public


def test_secret_halves_are_never_shown() -> None:
    """A log line with the keys gives nothing away."""
    keys = derive_keys(b"s")
    assert keys.server_secret.decode() not in repr(keys)
    assert keys.client_secret.decode() not in repr(keys)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_private_file_is_read(tmp_path: Path, mode: int) -> None:
    """White space around the secret, as editors leave it, does not count."""
    secret = secrets.token_hex(32).encode()
    path = secret_file(tmp_path, b"  " + secret + b"\n", mode)
    assert read_fleet_keys(path) == derive_keys(secret)


def test_a_link_to_a_private_file_is_read(tmp_path: Path) -> None:
    """Kubernetes mounts secrets as links."""
    path = secret_file(tmp_path, secrets.token_bytes(48).strip() + b"x")
    link = tmp_path / "link"
    link.symlink_to(path)
    assert read_fleet_keys(link) == read_fleet_keys(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o610, 0o666])
def test_a_file_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    """The message says with which mode, and what to run."""
    path = secret_file(tmp_path, secrets.token_hex(32).encode(), mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o}.*chmod 600") as caught:
        read_fleet_keys(path, setting="turncache.fleet_secret_file")
    assert caught.value.setting == "turncache.fleet_secret_file"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "0 bytes"),
        (b"\n\n", "0 bytes"),
        (b"hunter2", "7 bytes"),
        (b"correct horse battery staple", "28 bytes"),
        (b"a" * 4000, "0 bits"),
        (b"abcabcabc" * 100, "900 bytes"),
        (b"0123456789abcdef" * 40, "640 bytes"),
        (b"x" * 5000, "larger than 4096"),
    ],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes, why: str) -> None:
    """Short, repeated or endless; the message says how to make one and never shows it."""
    path = secret_file(tmp_path, content)
    with pytest.raises(ConfigError, match=why) as caught:
        read_fleet_keys(path)
    message = str(caught.value)
    assert "openssl rand -hex 32" in message
    assert not content.strip() or content.strip().decode() not in message


@pytest.mark.parametrize("make", ["nothing", "folder", "pipe"])
def test_what_is_no_file_is_refused(tmp_path: Path, make: str) -> None:
    """Nothing hangs, and the message names the path."""
    path = tmp_path / "it"
    if make == "folder":
        path.mkdir()
    elif make == "pipe":
        os.mkfifo(path, 0o600)
    with pytest.raises(ConfigError, match=str(path)):
        read_fleet_keys(path)


@given(st.binary(min_size=32, max_size=32))
def test_what_random_bytes_become_is_enough(raw: bytes) -> None:
    """256 bits in hex, from any generator that does not repeat itself."""
    text = raw.hex().encode()
    if len(set(raw)) >= 24:
        assert entropy_bits(text) >= MIN_ENTROPY_BITS
    assert 0 <= entropy_bits(text) <= 8 * len(text) + 64
