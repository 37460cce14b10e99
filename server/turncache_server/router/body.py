"""Request bodies: parsed once, edited by splicing, never re-serialised. Pure.

An edit removes members of the outermost object and appends others; the text of every
member that stays is the client's, byte for byte. So the messages and tools that an engine
tokenises are what the client wrote: key order, number formats, escapes and white space in
them decide whether the next prompt continues the last one.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from turncache.protocol import members_from_outside
from turncache_server.router.errors import ApiError, invalid
from turncache_server.router.members import (
    DuplicateNameError,
    Member,
    scan_object,
    skip,
)

#: Objects in which clients put what an engine reads beside the API's own members.
XARGS: Final = "vllm_xargs"
_CARRIERS: Final = frozenset({XARGS, "extra_args", "extra_body"})
#: About so many bytes make one token of English.
_BYTES_OF_TEXT_PER_TOKEN: Final = 4


@dataclass(frozen=True, slots=True)
class Body:
    """A JSON object with the place of every member of its outermost level.

    Attributes:
        raw: the body as it came.
        members: members by name, in the order of the text.
    """

    raw: bytes
    members: Mapping[str, Member]

    @property
    def text(self) -> str:
        """The body, decoded, to which the places of members refer.

        UTF-8 decoding is one to one: a slice of it encodes to the bytes that the client sent.
        It is decoded again where it is needed, because a call lasts for minutes.
        """
        return self.raw.decode()

    @property
    def likely_tokens(self) -> int:
        """About how many tokens the prompt has, as far as its size says."""
        return len(self.raw) // _BYTES_OF_TEXT_PER_TOKEN

    @classmethod
    def parse(cls, raw: bytes, *, max_depth: int) -> Body:
        """Parse a body.

        Args:
            raw: UTF-8 without a byte order mark. Other encodings are refused although an
                engine's JSON library would guess them: both must read the same request.
            max_depth: deepest nesting of objects and arrays.

        Raises:
            ApiError: 400, when it is no JSON object, a name occurs twice in any object, or
                it is nested too deep.
        """
        members = _scanned(raw, max_depth)
        if _deeper_than(max_depth, [member.value for member in members]):
            raise _too_deep(max_depth)
        return cls(raw, {member.name: member for member in members})

    def get(self, name: str) -> Any:
        """Return a member's value, None when it is absent."""
        member = self.members.get(name)
        return None if member is None else member.value

    def edited(self, *, drop: Collection[str] = (), put: Mapping[str, str]) -> bytes:
        """Return the body with members removed and others appended, encoded.

        What clients must not say to an engine is removed in any case, also from
        ``vllm_xargs`` and its relatives.

        Args:
            drop: names to remove.
            put: JSON text by name; replaces a member of that name.
        """
        kept = [
            member
            for member in self.members.values()
            if member.name not in drop and member.name not in put
        ]
        outside = set(members_from_outside(member.name for member in kept))
        # A character is a byte in ASCII: what may be megabytes is copied once.
        text = None if self.raw.isascii() else self.text
        parts: list[bytes | memoryview] = [b"{"]
        for member in kept:
            if member.name in outside:
                continue
            if member.name in _CARRIERS:
                parts.append(_without_outsiders(text or self.text, member)[1].encode())
            elif text is None:
                parts.append(memoryview(self.raw)[member.start : member.end])
            else:
                parts.append(text[member.start : member.end].encode())
            parts.append(b",")
        parts += [_object((), put)[1:].encode()]
        if not put and len(parts) > 2:
            del parts[-2]  # a comma that nothing follows
        return b"".join(parts)

    def xargs(self, ours: Mapping[str, str | int | float]) -> str:
        """Return ``vllm_xargs`` as JSON text: the client's own, and ours.

        Raises:
            ApiError: 400, when the client's is neither an object nor null.
        """
        member = self.members.get(XARGS)
        if member is None or member.value is None:
            return msgspec.json.encode(ours).decode()
        put = {name: json.dumps(value) for name, value in ours.items()}
        if not isinstance(member.value, dict):
            raise invalid(
                f"{XARGS}: expected an object of scalars, got {type(member.value).__name__}.",
                param=XARGS,
            )
        inner, _ = scan_object(self.text, member.value_start)
        kept = [
            (m.name, _without_outsiders(self.text, m, inside=True)[1])
            for m in inner
            if m.name not in put
        ]
        return _object(_cleaned(kept), put)


def drop_members(raw: bytes, names: Collection[str], *, within: Collection[str] = ()) -> bytes:
    """Remove members whose value is not null from a JSON object; all else stays as it is.

    Args:
        raw: the object.
        names: of the members to remove.
        within: members that are objects, from which they are removed as well.

    Returns:
        ``raw`` itself when there is nothing to remove or it is no JSON object.
    """
    try:
        text = raw.decode()
        members, _ = scan_object(text, skip(text, 0))
    except (ValueError, RecursionError):
        return raw
    kept: list[tuple[str, str]] = []
    changed = False
    for member in members:
        if member.name in names and member.value is not None:
            changed = True
            continue
        value = text[member.value_start : member.end]
        if member.name in within and isinstance(member.value, dict):
            cleaned = drop_members(value.encode(), names).decode()
            changed, value = changed or cleaned != value, cleaned
        kept.append((member.name, text[member.start : member.value_start] + value))
    return _object(kept, {}).encode() if changed else raw


def _scanned(raw: bytes, max_depth: int) -> list[Member]:
    """Read a body and say what is wrong with it; arguments as for :meth:`Body.parse`."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            f"The body is not UTF-8: byte {error.start} cannot be decoded. Send JSON in UTF-8."
        ) from error
    if text.startswith("\ufeff"):
        raise invalid("The body begins with a byte order mark. Send JSON in UTF-8 without one.")
    try:
        members, end = scan_object(text, skip(text, 0))
    except DuplicateNameError as error:
        raise invalid(
            f"The body has the name {error.name!r} twice in one object: which of them "
            "counts is undefined. Send it once.",
            param=error.name,
        ) from error
    except RecursionError as error:
        raise _too_deep(max_depth) from error
    except ValueError as error:  # JSONDecodeError is one, as is a number of 5,000 digits
        raise invalid(f"The body is not valid JSON: {error}.") from error
    if skip(text, end) != len(text):
        raise invalid(f"The body goes on after its JSON object, at character {end}.")
    return members


def _too_deep(max_depth: int) -> ApiError:
    return invalid(f"The body is nested deeper than {max_depth} levels.")


def _deeper_than(max_depth: int, values: list[Any]) -> bool:
    """Tell whether the values of an outermost object exceed ``max_depth`` levels with it."""
    level = [value for value in values if isinstance(value, (dict, list))]
    depth = 1
    while level:
        depth += 1
        if depth > max_depth:
            return True
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, (dict, list))
        ]
    return False


def _object(kept: Iterable[tuple[str, str]], put: Mapping[str, str]) -> str:
    parts = [text for _, text in kept]
    parts += [f"{_quoted(name)}:{text}" for name, text in put.items()]
    return "{" + ",".join(parts) + "}"


# Names of ours, which are few.
_quoted: Final = functools.lru_cache(maxsize=64)(json.dumps)


def _cleaned(kept: list[tuple[str, str]]) -> list[tuple[str, str]]:
    outside = set(members_from_outside(name for name, _ in kept))
    return [(name, text) for name, text in kept if name not in outside]


def _without_outsiders(text: str, member: Member, *, inside: bool = False) -> tuple[str, str]:
    """Return a member's (name, text), cleaned when it is a carrier of extra arguments.

    Args:
        text: of the whole body.
        member: the member.
        inside: it lies in a carrier: who unpacks the one may unpack the other.
    """
    if not (inside or member.name in _CARRIERS) or not isinstance(member.value, dict):
        return member.name, text[member.start : member.end]
    inner, _ = scan_object(text, member.value_start)
    kept = _cleaned([_without_outsiders(text, below, inside=True) for below in inner])
    return member.name, text[member.start : member.value_start] + _object(kept, {})
