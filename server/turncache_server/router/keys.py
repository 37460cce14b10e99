"""API keys of the router, and the tenants that they belong to.

A key is 256 random bits, so that one fast hash of it is all that has to be kept: nobody can
guess it from its digest, and a stolen file opens nothing. :class:`KeyFile` owns the table
that is in use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turncache.errors import ConfigError, why_of
from turncache.spelling import no_such
from turncache_server.router.stamps import Followed

logger = logging.getLogger(__name__)

SETTING: Final = "keys_file"
_PREFIX: Final = "tc-"
_KEY_BYTES: Final = 32
_TENANT: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_MEMBERS: Final = frozenset({"tenant", "sha256", "admin"})
_MAX_FILE_BYTES: Final = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who makes a request.

    Attributes:
        tenant: name of its tenant, None where the router has no keys.
        admin: it may see all sessions and calls, and use ``/admin/``.
    """

    tenant: str | None = None
    admin: bool = False

    @property
    def label(self) -> str | None:
        """What engines know the tenant by: budgets need to tell tenants apart, not to name them."""
        if self.tenant is None:
            return None
        return "t" + hashlib.blake2b(self.tenant.encode(), digest_size=8).hexdigest()


#: Everybody, where the router has no keys.
ANYBODY: Final = Caller()


def digest_of(key: str) -> str:
    """Return what is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def parse_keys(text: str) -> Mapping[str, Caller]:
    """Read the text of a keys file: callers by the digest of their key.

    Raises:
        ConfigError: naming the entry, what was wrong and what was expected.
    """
    try:
        entries: Any = tomllib.loads(text).get("keys", [])
    except ValueError as error:
        raise ConfigError(SETTING, f"no TOML: {error}") from error
    if not isinstance(entries, list):
        raise ConfigError(SETTING, "expected [[keys]] tables")
    callers: dict[str, Caller] = {}
    for number, entry in enumerate(entries):
        digest, caller = _entry(f"{SETTING}: keys[{number}]", entry)
        if digest in callers:
            raise ConfigError(f"{SETTING}: keys[{number}].sha256", "occurs twice")
        callers[digest] = caller
    return callers


def _entry(where: str, entry: Any) -> tuple[str, Caller]:
    if not isinstance(entry, dict):
        raise ConfigError(where, f"{entry!r}: expected a table")
    unknown = entry.keys() - _MEMBERS
    if unknown:
        name = min(unknown)
        raise ConfigError(f"{where}.{name}", no_such("member", name, _MEMBERS))
    tenant, digest, admin = entry.get("tenant"), entry.get("sha256"), entry.get("admin", False)
    check_tenant(tenant, setting=f"{where}.tenant")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        # Not shown: somebody may have put the key itself there.
        raise ConfigError(
            f"{where}.sha256",
            "expected 64 hexadecimal digits; make a key with: turncache router --new-key TENANT",
        )
    if not isinstance(admin, bool):
        raise ConfigError(f"{where}.admin", f"{admin!r}: expected true or false")
    return digest, Caller(tenant=tenant, admin=admin)


def check_tenant(name: object, *, setting: str) -> str:
    """Return ``name`` when it may name a tenant.

    Raises:
        ConfigError: unless it has 1 to 64 letters, digits, dots, dashes or underscores.
    """
    if not isinstance(name, str) or not _TENANT.fullmatch(name):
        raise ConfigError(
            setting, f"{name!r}: expected 1 to 64 letters, digits, dots, dashes or underscores"
        )
    return name


def read_keys(path: Path) -> Mapping[str, Caller]:
    """Read a keys file.

    Raises:
        ConfigError: it cannot be read, others can change it, or it is no keys file.
    """
    try:
        with path.expanduser().open("rb") as file:
            status = os.fstat(file.fileno())
            raw = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(SETTING, f"cannot read {str(path)!r}: {why_of(error)}") from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(
            SETTING,
            f"{str(path)!r} has mode {stat.S_IMODE(status.st_mode):04o}: others can add keys; "
            f"run: chmod go-w {path}",
        )
    if len(raw) > _MAX_FILE_BYTES:
        raise ConfigError(SETTING, f"{str(path)!r} is larger than {_MAX_FILE_BYTES} bytes")
    try:
        return parse_keys(raw.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(SETTING, f"{str(path)!r} is not UTF-8") from error


def add_key(path: Path, tenant: str, *, admin: bool = False) -> str:
    """Make a key, append its digest to a keys file, and return the key, which is kept nowhere.

    The file is made, for its owner only, when it does not exist.

    Raises:
        ConfigError: an impossible tenant, or a file that cannot be used.
    """
    check_tenant(tenant, setting="--new-key")
    path = path.expanduser()
    if path.exists():
        read_keys(path)
    key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
    entry = f'\n[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of(key)}"\n'
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            file.write(entry + ("admin = true\n" if admin else ""))
    except OSError as error:
        raise ConfigError(SETTING, f"cannot write {str(path)!r}: {why_of(error)}") from error
    return key


class KeyFile:
    """The keys that are in use; follows changes of its file without a restart.

    A file that cannot be used any more is reported, and the keys before it stay in use: a
    slip of an editor must not lock everybody out, or let anybody in.

    Args:
        path: the file.
        clock: monotonic seconds.

    Raises:
        ConfigError: as :func:`read_keys`.
    """

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        path = path.expanduser()
        self._callers = Followed([path], lambda: read_keys(path), clock, "the keys in use stay")

    def __len__(self) -> int:
        return len(self._callers.latest())

    def caller_of(self, key: str) -> Caller | None:
        """Return whose key it is, None when nobody's."""
        return self._callers.latest().get(digest_of(key))


def salt_of(caller: Caller, root: str | None, given: object) -> str | None:
    """Return the ``cache_salt`` of a call, None to leave the client's.

    Only calls with one salt share KV, and only the router makes salts: nobody can ask, by
    timing, what another tenant has sent. What the client gave separates further.

    Args:
        caller: whose call it is.
        root: the session's root, None to share within the tenant.
        given: the client's own salt, None without.
    """
    if caller.tenant is None:
        return None
    parts = "\0".join((caller.tenant, root or "", str(given or "")))
    return hashlib.blake2b(
        parts.encode("utf-8", "surrogatepass"), digest_size=24, person=b"turncache-salt"
    ).hexdigest()
