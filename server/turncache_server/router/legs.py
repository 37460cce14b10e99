"""The body and headers of each leg of a call. Pure.

A leg is one request to one engine. The decode leg, and the only leg of a call on one
engine, is what the client sent. The prefill leg is the same request with an answer of one
token, which nobody reads: its purpose is the prompt's KV.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

import msgspec

from turncache.protocol import REQUEST_ID_HEADER, SESSION_HEADER, EngineHints
from turncache_server.router.apis.api import Api
from turncache_server.router.body import XARGS, Body
from turncache_server.stock import HAND_OVER

# vLLM prefers the header, but reads the member where the header is missing: a client must
# not choose the id of an engine's request, two equal ones corrupt its state.
_NEVER: Final = frozenset({"request_id"})

#: Member with which engines tell each other, through a proxy, what is held where.
TRANSFER: Final = "kv_transfer_params"


_NULL: Final = msgspec.Raw(b"null")


class _Prefilled(msgspec.Struct, frozen=True):
    kv_transfer_params: msgspec.Raw = _NULL


_prefilled: Final = msgspec.json.Decoder(_Prefilled)

#: Request headers that an engine may see as the client sent them: its key, when the router
#: has none of its own.
FORWARDED_HEADERS: Final = ("authorization",)
#: Likewise, where the settings pass trace context on.
TRACE_HEADERS: Final = ("traceparent", "tracestate")
#: Answer headers of an engine that a client may see.
ANSWER_HEADERS: Final = ("content-type", "retry-after")


def prefill_body(
    api: Api,
    body: Body,
    hints: EngineHints,
    *,
    salt: str | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Make the body of the prefill leg; arguments as for :func:`serving_body`.

    ``more`` are members as JSON text, in the place of the client's own.
    """
    ours = {**more, **api.prefill_put(body), **_ours(api, body, hints, salt)}
    if hints.stock:
        ours[TRANSFER] = json.dumps(dict(HAND_OVER))
    return body.edited(drop=api.prefill_drop | _NEVER, put=ours)


def serving_body(
    api: Api,
    body: Body,
    hints: EngineHints,
    *,
    salt: str | None = None,
    held: bytes | None = None,
) -> bytes:
    """Make the body of the leg whose answer the client gets.

    Args:
        api: the API that it is for.
        body: the client's.
        hints: of this leg.
        salt: ``cache_salt`` of the call, None to leave the client's.
        held: in a stock hand-over what the prefill engine has said, as JSON.
    """
    ours = _ours(api, body, hints, salt)
    if held is not None:
        ours[TRANSFER] = held.decode()
    return body.edited(drop=_NEVER, put=ours)


def transfer_params(answer: bytes) -> bytes | None:
    """Return what a prefill engine holds for a stock hand-over, as JSON.

    None when it holds nothing, as for a prompt that fills no block: decode then computes.
    """
    try:
        held = bytes(_prefilled.decode(answer).kv_transfer_params)
    except msgspec.DecodeError:
        return None
    return held if held.startswith(b"{") else None


def leg_headers(
    client: Mapping[str, str],
    *,
    session: str,
    request_id: str,
    engine_key: str | None,
    trace: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Make the headers of a leg.

    Args:
        client: the client's headers with lower-case names. Only the allow-list is taken:
            vLLM also reads headers that choose a data-parallel rank or a priority.
        session: namespaced session id.
        request_id: minted per attempt.
        engine_key: the router's own key for engines, None to pass the client's on.
        trace: headers of trace context for the engine.
    """
    headers = {**forwarded(client), **(trace or {})}
    if engine_key is not None:
        headers["authorization"] = f"Bearer {engine_key}"
    headers["content-type"] = "application/json"
    headers[SESSION_HEADER] = session
    headers[REQUEST_ID_HEADER] = request_id
    return headers


def forwarded(
    client: Mapping[str, str], names: Iterable[str] = FORWARDED_HEADERS
) -> dict[str, str]:
    """Return the client's headers that an engine may see, by lower-case names.

    Values beyond ASCII, which HTTP does not define, are left out.
    """
    return {name: client[name] for name in names if name in client and client[name].isascii()}


def _ours(api: Api, body: Body, hints: EngineHints, salt: str | None) -> dict[str, str]:
    ours = {XARGS: body.xargs(hints.to_xargs())}
    if api.takes_session:
        ours["session_id"] = json.dumps(hints.session)
    if salt is not None:
        ours["cache_salt"] = json.dumps(salt)
    return ours
