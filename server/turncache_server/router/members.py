"""The members of a JSON object, and where in its text each of them is. Pure."""

from __future__ import annotations

import json
import re
from typing import Any, Final

import msgspec

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_COLON: Final = re.compile(r"[ \t\n\r]*:[ \t\n\r]*")
#: What follows a member: another one, or the end.
_MARK: Final = re.compile(r"[ \t\n\r]*([,}])[ \t\n\r]*")


class Member(msgspec.Struct, frozen=True):
    """One member of an object, with its place in the text.

    Attributes:
        start: index of the opening quote of the name.
        value_start: index of the value's first character.
        end: index after the value.
    """

    name: str
    start: int
    value_start: int
    end: int
    value: Any


def scan_object(text: str, at: int) -> tuple[list[Member], int]:
    """Read the object that starts at ``at``.

    Returns:
        Its members in order, and the index after it.

    Raises:
        ValueError: when there is no valid object, or a name occurs twice.
        RecursionError: when it is nested deeper than the interpreter's stack.
    """
    if text[at : at + 1] != "{":
        raise json.JSONDecodeError("Expecting a JSON object", text, at)
    members: list[Member] = []
    names: set[str] = set()
    at = skip(text, at + 1)
    if text[at : at + 1] == "}":
        return members, at + 1
    while True:
        start = at
        if text[at : at + 1] != '"':
            raise json.JSONDecodeError("Expecting a name in double quotes", text, at)
        name, at = _decoder.raw_decode(text, at)
        if name in names:
            raise DuplicateNameError(name)
        names.add(name)
        colon = _COLON.match(text, at)
        if colon is None:
            raise json.JSONDecodeError("Expecting ':'", text, skip(text, at))
        value_start = colon.end()
        value, at = _decoder.raw_decode(text, value_start)
        members.append(Member(name, start, value_start, at, value))
        mark = _MARK.match(text, at)
        if mark is None:
            raise json.JSONDecodeError("Expecting ',' or '}'", text, skip(text, at))
        if mark[1] == "}":
            return members, mark.end(1)
        at = mark.end()


class DuplicateNameError(ValueError):
    """Raised for an object that has a name twice.

    Attributes:
        name: which.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise DuplicateNameError(name)
            seen.add(name)
    return out


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


_decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def skip(text: str, at: int) -> int:
    """Return the index of the next character that is no white space."""
    if text[at : at + 1] > " ":
        return at
    match = _SPACE.match(text, at)
    return at if match is None else match.end()
