"""Certificates: the router's own, followed without a restart, and whose of engines count."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path

from turncache.errors import ConfigError, why_of
from turncache_server.router.stamps import Followed


class ServerCertificate:
    """The certificate that is in use; follows changes of its files without a restart.

    New connections see a new certificate within a second. Files that do not fit each other
    are reported, and the certificate before them stays in use: most tools write the two files
    one after the other.

    Args:
        certificate: PEM file with the certificate and its chain.
        key: PEM file with its private key.
        clock: monotonic seconds.

    Attributes:
        context: to listen with.

    Raises:
        ConfigError: the files cannot be used.
    """

    def __init__(self, certificate: Path, key: Path, clock: Callable[[], float]) -> None:
        self._files = certificate.expanduser(), key.expanduser()
        self._followed = Followed(self._files, self._read, clock, "the certificate in use stays")
        self.context = self._followed.latest()
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: object) -> None:
        """Give a connection that is about to be secured the latest certificate."""
        connection.context = self._followed.latest()

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # SSLError is one
            raise ConfigError(
                "tls_cert_file",
                f"cannot use {str(certificate)!r} with {str(key)!r}: {why_of(error)}",
            ) from error
        return context


def engines_trust(ca_file: str) -> ssl.SSLContext:
    """Return whose certificates count for engines with ``https``.

    Args:
        ca_file: PEM file of the only authorities that count; empty for the system's.

    Raises:
        ConfigError: the file cannot be used.
    """
    try:
        return ssl.create_default_context(
            cafile=str(Path(ca_file).expanduser()) if ca_file else None
        )
    except OSError as error:
        raise ConfigError("engines_ca_file", f"cannot use {ca_file!r}: {why_of(error)}") from error
