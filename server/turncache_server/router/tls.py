"""Certificates: the router's own, followed without a restart, and whose of engines count."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Final

from turncache.errors import ConfigError
from turncache_server.router.stamps import stamp_of

logger = logging.getLogger(__name__)

_RELOAD_S: Final = 1.0


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
        self._clock = clock
        self._seen = self._stamps()
        self._looked_s = clock()
        self.context = self._current = self._read()
        self.context.sni_callback = self._choose

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: object) -> None:
        """Give a connection that is about to be secured the latest certificate."""
        self._follow()
        connection.context = self._current

    def _follow(self) -> None:
        now_s = self._clock()
        if now_s - self._looked_s < _RELOAD_S:
            return
        self._looked_s = now_s
        stamps = self._stamps()
        if stamps == self._seen:
            return
        self._seen = stamps
        try:
            self._current = self._read()
        except ConfigError as error:
            logger.error("the certificate in use stays: %s", error)  # noqa: TRY400 - says it all
            return
        logger.info("certificate read from %s", self._files[0])

    def _stamps(self) -> tuple[object, ...]:
        return tuple(map(stamp_of, self._files))

    def _read(self) -> ssl.SSLContext:
        certificate, key = self._files
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # SSLError is one
            raise ConfigError(
                "tls_cert_file", f"cannot use {str(certificate)!r} with {str(key)!r}: {error}"
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
        raise ConfigError("engines_ca_file", f"cannot use {ca_file!r}: {error}") from error
