"""Keys of the control plane: everything follows from one secret that the fleet shares.

Whoever holds the secret is of the fleet: it may ask every engine, and can stand for one.
Server and client key pairs are derived (HKDF, RFC 5869, with SHA-256), so that nothing but
the secret has to be handed out. An engine proves the server key, an asker the client key;
CURVE encrypts, and refuses what was recorded.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import stat
import zlib
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from turncache.errors import ConfigError, EnvironmentFault, why_of

#: Fewest bits that the text of a secret must hold by both estimates of :func:`entropy_bits`.
MIN_ENTROPY_BITS: Final = 128
_MAX_FILE_BYTES: Final = 4096
_SALT: Final = b"turncache fleet keys 1"
_HOW: Final = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKeys:
    """Key pairs of one fleet, in Z85; the secret halves are never shown.

    Attributes:
        names: hides what others could guess, such as session ids: the key of a keyed hash.
    """

    server_public: bytes
    server_secret: bytes = field(repr=False)
    client_public: bytes
    client_secret: bytes = field(repr=False)
    names: bytes = field(repr=False)

    @property
    def digest(self) -> str:
        """Eight digits that tell two secrets apart and give nothing away."""
        return hashlib.sha256(self.server_public + self.client_public).hexdigest()[:8]

    def serve(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket the server side, before it is bound."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.server_secret)

    def ask_with(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket the client side, before it is connected."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_public)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.client_public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.client_secret)

    def admits(self, client_public: bytes) -> bool:
        """Say whether a raw public key of 32 bytes is the fleet's client key."""
        return hmac.compare_digest(z85.encode(client_public), self.client_public)


def derive_keys(secret: bytes) -> FleetKeys:
    """Derive both key pairs from a secret."""
    extracted = hmac.digest(_SALT, secret, "sha256")
    server, client, names = (_expand(extracted, for_) for for_ in (b"server", b"client", b"names"))
    return FleetKeys(
        server_public=zmq.curve_public(server),
        server_secret=server,
        client_public=zmq.curve_public(client),
        client_secret=client,
        names=names,
    )


def _expand(extracted: bytes, purpose: bytes) -> bytes:
    """Return 32 bytes for one purpose, in Z85: one block of HKDF's second step."""
    return z85.encode(hmac.digest(extracted, purpose + b"\x01", "sha256"))


def entropy_bits(secret: bytes) -> float:
    """Estimate how much a secret holds, from above, by the lower of two measures.

    How often each byte occurs finds few symbols, compression finds repetition. Neither knows
    that a sentence was not drawn at random.
    """
    if not secret:
        return 0.0
    # Of what is repeated as a whole one copy counts.
    secret = secret[: (secret + secret).find(secret, 1)]
    total = len(secret)
    counted = -sum(n * math.log2(n / total) for n in Counter(secret).values())
    # Raw deflate: without header and checksum, which would count as content.
    deflate = zlib.compressobj(level=9, wbits=-15)
    packed = deflate.compress(secret) + deflate.flush()
    return min(counted, 8.0 * len(packed))


def read_fleet_keys(path: str | Path, *, setting: str = "fleet_secret_file") -> FleetKeys:
    """Read the secret's file and derive the keys.

    The file is read once; white space around the secret does not count.

    Raises:
        ConfigError: the file cannot be read, is readable by group or others, or holds too
            little to be a secret.
        EnvironmentFault: libzmq was built without CURVE.
    """
    if not zmq.has("curve"):
        raise EnvironmentFault(
            "this libzmq was built without CURVE: install pyzmq from its wheels, or leave "
            f"{setting} out and keep the control plane on loopback"
        )
    name = str(path)
    try:
        # Without blocking: opening a named pipe would wait for its writer.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(Path(path).expanduser(), flags), "rb") as file:
            # Of the opened file: another one cannot be put in its place meanwhile.
            status = os.fstat(file.fileno())
            secret = file.read(_MAX_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise ConfigError(setting, f"cannot read {name!r}: {why_of(error)}; {_HOW}") from error
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(setting, f"{name!r} is no regular file; {_HOW}")
    if status.st_mode & 0o077:
        raise ConfigError(
            setting,
            f"{name!r} has mode {stat.S_IMODE(status.st_mode):04o}: group or others can use it; "
            f"run: chmod 600 {name}",
        )
    if len(secret) > _MAX_FILE_BYTES:
        raise ConfigError(setting, f"{name!r} is larger than {_MAX_FILE_BYTES} bytes; {_HOW}")
    secret = secret.strip()
    if (bits := entropy_bits(secret)) < MIN_ENTROPY_BITS:
        raise ConfigError(
            setting,
            f"{name!r} holds {len(secret)} bytes with at most {bits:.0f} bits of entropy, "
            f"expected at least {MIN_ENTROPY_BITS}; {_HOW}",
        )
    return derive_keys(secret)
