"""Which servers are told about sessions.

Owns the set of hosts that have answered with a ``Turncache`` header in this process.
The decision itself is a function of that set, the host's name and the user's patterns;
no name is ever resolved, because a look-up before each first call would cost time and
tell a resolver where the user's model lives.
"""

from __future__ import annotations

import enum
import functools
import ipaddress
import re
from collections.abc import Sequence
from typing import Any, Final

#: Domains of hosted providers: nothing is sent there unless the user names the host.
PROVIDERS: Final = (
    "ai21.com",
    "aliyuncs.com",
    "amazonaws.com",
    "anthropic.com",
    "anyscale.com",
    "azure.com",
    "baseten.co",
    "bigmodel.cn",
    "cerebras.ai",
    "cloudflare.com",
    "cohere.ai",
    "cohere.com",
    "databricks.com",
    "deepinfra.com",
    "deepseek.com",
    "fireworks.ai",
    "github.ai",
    "githubcopilot.com",
    "googleapis.com",
    "groq.com",
    "huggingface.co",
    "hyperbolic.xyz",
    "lambda.ai",
    "minimax.io",
    "mistral.ai",
    "moonshot.ai",
    "moonshot.cn",
    "nebius.com",
    "novita.ai",
    "nvidia.com",
    "openai.com",
    "openrouter.ai",
    "perplexity.ai",
    "replicate.com",
    "sambanova.ai",
    "siliconflow.cn",
    "siliconflow.com",
    "together.ai",
    "together.xyz",
    "vercel.sh",
    "volces.com",
    "x.ai",
)

# Names that no public resolver answers for: they lead to the user's own network.
_PRIVATE_SUFFIXES: Final = (".localhost", ".local", ".internal", ".home.arpa")
# Carriers' shared addresses (RFC 6598): overlay networks hand them out.
_SHARED = ipaddress.ip_network("100.64.0.0/10")
_PATTERN = re.compile(r"(?:\*\.)?[a-z0-9_\-.]+(?::\d{1,5})?|\[[0-9a-f:.]+\](?::\d{1,5})?|\*")

MAX_ANSWERED: Final = 256
# Insertion-ordered: the oldest leaves first. Filled by answers, read before each call.
_answered: dict[tuple[str, int | None], None] = {}


class Audience(enum.Enum):
    """What a server gets: everything, nothing yet (its answers are read), or nothing."""

    TOLD = "told"
    UNKNOWN = "unknown"
    NEVER = "never"


def audience(host: str, port: int | None, named: Sequence[str] = ()) -> Audience:
    """Decide what the server at ``host`` and ``port`` gets.

    Hosts that the user named come first, then providers, private addresses, and hosts
    that have answered with a ``Turncache`` header.
    """
    settled = _settled(host, port, named)
    if settled is Audience.UNKNOWN and _answers(host, port):
        return Audience.TOLD
    return settled


class Server:
    """The server of one client: what is found out about it holds until its URL changes.

    Args:
        named: hosts that the user named.
    """

    __slots__ = ("_found", "_named")

    def __init__(self, named: Sequence[str]) -> None:
        """Know nothing yet."""
        self._named = named
        # One tuple, replaced whole: another thread may have another URL in hand.
        self._found: tuple[Any, tuple[str, int | None], Audience] | None = None

    def at(self, url: Any) -> tuple[tuple[str, int | None], Audience]:
        """Return (name, port) of the server at upstream's ``url``, and what it gets."""
        found = self._found
        # Upstream's URL objects do not change: the same one leads to the same server.
        if found is None or found[0] is not url:
            host = (url.host, url.port)
            found = self._found = (url, host, _settled(*host, self._named))
        _, host, told = found
        if told is Audience.UNKNOWN and _answers(*host):
            told = Audience.TOLD
        return host, told


def has_answered(host: str, port: int | None) -> None:
    """Remember that a server answered with a ``Turncache`` header."""
    key = _key(host, port)
    if key not in _answered:
        while len(_answered) >= MAX_ANSWERED:
            _answered.pop(next(iter(_answered)), None)
        _answered[key] = None


def forget_answers() -> None:
    """Forget every host that has answered with a ``Turncache`` header."""
    _answered.clear()


def check_pattern(pattern: str) -> str:
    """Return ``pattern`` when it is a host, ``host:port``, ``*.domain`` or ``*``.

    Raises:
        ValueError: naming the pattern otherwise.
    """
    if not _PATTERN.fullmatch(pattern):
        raise ValueError(
            f"{pattern!r}: expected a host name or address without scheme and path, such as "
            "llm.example.com, *.example.com, 10.0.0.7:8000 or [fd00::7]:8000"
        )
    return pattern


def _key(host: str, port: int | None) -> tuple[str, int | None]:
    return host.lower().rstrip("."), port


def _answers(host: str, port: int | None) -> bool:
    return _key(host, port) in _answered


def _settled(host: str, port: int | None, named: Sequence[str]) -> Audience:
    """Decide without what servers have answered: that part may change with every call."""
    host, port = _key(host, port)
    if not host:
        return Audience.NEVER
    if named and any(_matches(pattern, host, port) for pattern in named):
        return Audience.TOLD
    return _kind(host)


@functools.lru_cache(maxsize=1024)
def _kind(host: str) -> Audience:
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return _kind_of_name(host)
    shared = address.version == 4 and address in _SHARED
    private = address.is_loopback or address.is_private or address.is_link_local or shared
    return Audience.TOLD if private else Audience.UNKNOWN


def _kind_of_name(host: str) -> Audience:
    if any(host == domain or host.endswith("." + domain) for domain in PROVIDERS):
        return Audience.NEVER
    # A name of one label (a compose service, a host of the local network) cannot be public.
    if "." not in host or host.endswith(_PRIVATE_SUFFIXES):
        return Audience.TOLD
    return Audience.UNKNOWN


def _matches(pattern: str, host: str, port: int | None) -> bool:
    if pattern == "*":
        return True
    name, number = pattern, ""
    if not pattern.endswith("]") and ":" in pattern:
        name, _, number = pattern.rpartition(":")
    # A URL without a port leaves it to the scheme.
    if number and number != str(port) and not (port is None and number in ("80", "443")):
        return False
    name = name.strip("[]")
    if name.startswith("*."):
        return host.endswith(name[1:])
    return host.strip("[]") == name
