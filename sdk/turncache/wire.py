"""How a call's tags reach the server: upstream's request options, with ours added.

Pure: options in, a changed copy out; the caller's options are never touched. What the
caller gave wins over ours, by name.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Final

import openai

from turncache.protocol import (
    CALL_HEADER,
    FINAL_HEADER,
    PARENT_HEADER,
    SESSION_HEADER,
    TOOLS_HEADER,
    CallTags,
    Cause,
    EngineHints,
)

# Upstream's headers by which a caller asks for a raw response or another result type.
_RAW: Final = "x-stainless-raw-response"
_CAST: Final = "x-stainless-override-cast-to"
#: Headers that mean something to us when a caller gives them, in lower case.
RELEVANT: Final = frozenset(
    name.lower()
    for name in (
        SESSION_HEADER,
        PARENT_HEADER,
        FINAL_HEADER,
        CALL_HEADER,
        TOOLS_HEADER,
        _RAW,
        _CAST,
    )
)


def explicit_headers(defaults: Mapping[str, Any], options: Any) -> Mapping[str, Any]:
    """Return the relevant headers that the caller gave, by lower-case name.

    A value may be upstream's ``Omit``: the caller wants the header left out.
    """
    given = options.headers
    # Upstream makes them a plain dict, or an object that says "not given".
    if not isinstance(given, dict):
        return defaults
    return {
        **defaults,
        **{name.lower(): value for name, value in given.items() if name.lower() in RELEVANT},
    }


def can_ask_raw(cast_to: Any, explicit: Mapping[str, Any]) -> bool:
    """Whether the answer may be asked for unparsed, to read its headers, and parsed by us.

    The caller gets what upstream's ``parse()`` makes of it, which is what it would have
    got. Callers that asked for a raw response, or for a type that upstream returns
    without parsing, get that.
    """
    if explicit and (_RAW in explicit or _CAST in explicit):
        return False
    return raw_of(cast_to) is not None


@functools.lru_cache(maxsize=256)
def raw_of(cast_to: Any) -> Any:
    """Return the type to ask for instead of ``cast_to``, None when that is not parsed.

    Upstream gives whoever asks for a response type that response: it is made for every
    answer anyway, has the HTTP response, and its ``parse()`` returns a ``cast_to``. Nothing of
    it is on the wire.
    """
    return _parametrised(openai.APIResponse, cast_to)


@functools.lru_cache(maxsize=256)
def araw_of(cast_to: Any) -> Any:
    """Return what :func:`raw_of` does, for an async client: ``parse()`` is awaited."""
    return _parametrised(openai.AsyncAPIResponse, cast_to)


def _parametrised(response: Any, cast_to: Any) -> Any:
    if not isinstance(cast_to, type):
        return None
    if cast_to is not object and not issubclass(cast_to, openai.BaseModel):
        return None
    return response[cast_to]


def dress(
    options: Any,
    headers: Mapping[str, str] | None = None,
    extra_json: Mapping[str, Any] | None = None,
    post_parser: Callable[[Any], Any] | None = None,
) -> Any:
    """Return a copy of upstream's options with what is ours.

    Args:
        options: upstream's options.
        headers: sent in addition to the caller's, None for no others.
        extra_json: replaces the members that are added to the body, None to leave them.
        post_parser: replaces what is called with the parsed answer, None to leave it.
    """
    # What copy.copy() comes to, without its look-ups.
    dressed = getattr(type(options), "__copy__", copy.copy)(options)
    # Fields of a model live in its __dict__. Upstream does not validate them, and setting
    # them one by one as attributes would cost more than everything else here.
    fields = vars(dressed)
    if headers:
        given = options.headers
        fields["headers"] = {**headers, **given} if isinstance(given, dict) else headers
    if extra_json is not None:
        fields["extra_json"] = extra_json
    if post_parser is not None:
        fields["post_parser"] = post_parser
    return dressed


def body_members(options: Any, tags: CallTags) -> dict[str, Any]:
    """Return ``extra_json`` that says in the body what the headers say.

    For routers that drop headers. Only what an engine reads has a place there: the
    session, its parent, retention, priority, and the marks for the last call and for a
    compaction.
    """
    hints = EngineHints(
        session=tags.session_id,
        parent=tags.parent_id,
        retain_s=tags.retain_s,
        priority=tags.priority,
        final=tags.final,
        compaction=tags.cause is Cause.COMPACTION,
    )
    given: Mapping[str, Any] = {**options.json_data, **(options.extra_json or {})}
    xargs = given.get("vllm_xargs")
    return {
        **(options.extra_json or {}),
        "session_id": given.get("session_id", tags.session_id),
        "vllm_xargs": {**hints.to_xargs(), **(xargs if isinstance(xargs, Mapping) else {})},
    }


def observer(
    options: Any, observe: Callable[[Any], None], keep: Callable[[Any], None]
) -> Callable[[Any], Any]:
    """Return a parser for the options under which every parsed answer is seen.

    Args:
        options: upstream's options, with the caller's own parser if there is one.
        observe: gets the answer as upstream has parsed it.
        keep: gets what the caller gets, after the caller's own parser.
    """
    inner = options.post_parser
    parse: Callable[[Any], Any] | None = inner if callable(inner) else None

    def post_parser(answer: Any) -> Any:
        observe(answer)
        result = answer if parse is None else parse(answer)
        keep(result)
        return result

    return post_parser
