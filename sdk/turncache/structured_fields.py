"""Dictionaries of structured fields (RFC 9651): the text that headers of ours are written in.

Standard library only. What the members mean is in :mod:`turncache.protocol`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from turncache.errors import ProtocolError

_KEY = re.compile(r"[a-z*][a-z0-9_\-.*]*")
_NUMBER = re.compile(r"-?(?:[0-9]{1,12}\.[0-9]{1,3}|[0-9]{1,15})")
_PRINTABLE_ASCII = re.compile(r"[\x20-\x7e]*")
_TOKEN = re.compile(r"[A-Za-z*][A-Za-z0-9!#$%&'*+\-.^_`|~:/]*")

#: A bare item: ``bool``, ``int``, ``float`` or ``str``.
Item = bool | int | float | str


def parse_dictionary(header: str, text: str) -> dict[str, Item]:
    """Parse a structured-field dictionary of bare items (RFC 9651, 3.2).

    Parameters of members are read and dropped; inner lists, byte sequences and
    dates are refused because no header of ours has them. A repeated key keeps its
    last value, as the RFC says.

    Raises:
        ProtocolError: naming ``header`` and the position of the first bad character.
    """
    out: dict[str, Item] = {}
    at = _skip(text, 0, " ")
    while at < len(text):
        match = _KEY.match(text, at)
        if match is None:
            raise ProtocolError(header, f"no dictionary key at character {at} of {text!r}")
        key, at = match.group(), match.end()
        value: Item = True
        if text[at : at + 1] == "=":
            value, at = _item(header, text, at + 1)
        at = _parameters(header, text, at)
        out[key] = value
        at = _skip(text, at, " \t")
        if at == len(text):
            break
        if text[at] != ",":
            raise ProtocolError(header, f"expected ',' at character {at} of {text!r}")
        at = _skip(text, at + 1, " \t")
        if at == len(text):
            raise ProtocolError(header, f"trailing ',' in {text!r}")
    return out


def format_dictionary(members: Mapping[str, Item], *, header: str = "dictionary") -> str:
    """Serialise a dictionary of bare items (RFC 9651, 4.1.2).

    Raises:
        ProtocolError: naming ``header``, for a key or value that the standard cannot express.
    """
    for key in members:
        if not _KEY.fullmatch(key):
            raise ProtocolError(header, f"{shown(key)} is no dictionary key")
    return ", ".join(
        key if value is True else f"{key}={format_item(header, value)}"
        for key, value in members.items()
    )


def _skip(text: str, at: int, what: str) -> int:
    while at < len(text) and text[at] in what:
        at += 1
    return at


def _parameters(header: str, text: str, at: int) -> int:
    while text[at : at + 1] == ";":
        at = _skip(text, at + 1, " ")
        match = _KEY.match(text, at)
        if match is None:
            raise ProtocolError(header, f"no parameter name at character {at} of {text!r}")
        at = match.end()
        if text[at : at + 1] == "=":
            _, at = _item(header, text, at + 1)
    return at


def _item(header: str, text: str, at: int) -> tuple[Item, int]:
    first = text[at : at + 1]
    if first == '"':
        return _string(header, text, at)
    if first == "?":
        flag = text[at + 1 : at + 2]
        if flag in ("0", "1"):
            return flag == "1", at + 2
    elif match := _NUMBER.match(text, at):
        number = match.group()
        return (float(number) if "." in number else int(number)), match.end()
    elif match := _TOKEN.match(text, at):
        return match.group(), match.end()
    raise ProtocolError(header, f"no item at character {at} of {text!r}")


def _string(header: str, text: str, at: int) -> tuple[str, int]:
    out: list[str] = []
    here = at + 1
    while here < len(text):
        char = text[here]
        if char == '"':
            return "".join(out), here + 1
        if char == "\\":
            here += 1
            char = text[here : here + 1]
            if char not in ('"', "\\"):
                raise ProtocolError(header, f"bad escape at character {here} of {text!r}")
        elif not " " <= char <= "~":
            raise ProtocolError(header, f"character {char!r} is not allowed in a string")
        out.append(char)
        here += 1
    raise ProtocolError(header, f"string without end at character {at} of {text!r}")


def is_key(text: str) -> bool:
    """Whether ``text`` may be the key of a member."""
    return _KEY.fullmatch(text) is not None


def format_item(header: str, value: Item) -> str:
    """Serialise a bare item (RFC 9651, 4.1.3.1).

    Raises:
        ProtocolError: naming ``header``, for a value that the standard cannot express.
    """
    if isinstance(value, bool):
        return "?1" if value else "?0"
    if isinstance(value, (int, float)):
        # Compared first: the digits of a very long integer cannot even be shown.
        if not abs(value) < 10**15:
            raise ProtocolError(header, "a number of more than 15 digits")
        number = str(value) if isinstance(value, int) else f"{value:.3f}".rstrip("0")
        number += "0" if number.endswith(".") else ""
        if not _NUMBER.fullmatch(number):
            raise ProtocolError(header, f"{number}: more than 12 digits before the point")
        return number
    if _TOKEN.fullmatch(value):
        return value
    if not _PRINTABLE_ASCII.fullmatch(value):
        raise ProtocolError(header, f"{shown(value)}: expected printable ASCII characters")
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def shown(value: object) -> str:
    """Return a value as messages about it show it: at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
