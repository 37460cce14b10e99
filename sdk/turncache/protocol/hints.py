"""What the router tells an engine about a call, and what never comes from outside."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from turncache.protocol.identity import VISIBLE_ASCII
from turncache.protocol.words import (
    DEFAULT_PRIORITY,
    MAX_PRIORITY,
    MAX_RETAIN_S,
    MAX_SESSION_ID_CHARS,
    MIN_PRIORITY,
    PROTOCOL_VERSION,
    SPOKEN_VERSIONS,
)

#: Prefix of every scalar of ours in ``vllm_xargs``.
XARG_PREFIX: Final = "tc_"
#: Most engines that may be named beside a source.
MAX_ALSO: Final = 2
#: Members that steer an engine and never come from outside.
STRIPPED_BODY_MEMBERS: Final = ("kv_transfer_params", "ec_transfer_params", "kv_hints")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHints:
    """Flat scalars for one engine, carried in ``vllm_xargs``.

    Attributes:
        session: namespaced session id.
        parent: namespaced session id of the parent.
        tenant: opaque tenant name.
        retain_s: seconds to keep the KV after this call, None for the engine's default.
        expect_s: seconds until the next call is expected, None when unknown.
        priority: 0 to 100.
        source: engine id to pull from; resolved in the engine's own allow-list.
        also: at most two more, which are asked at the same time: nobody knows for sure which of
            them has it.
        handover: another engine will take this prompt: keep it above everything until then.
        call: how this leg is to be counted: ``prefill``, ``decode`` or ``single``.
        request: id under which the outcome is kept; vLLM randomises its own.
        final: nothing follows this call.
        compaction: the caller replaced its history: the old chain is superseded.
        stock: ``kv_transfer_params`` are our router's: hand this prompt over as vLLM's own
            NIXL connector does.
        repeat_s: for so many seconds the call may wait for its prompt to be prefilled again,
            when ``source`` has lost it; None when nobody would.
        repeat_above: fewest tokens, less one, that it waits for: up to so many of the prompt
            are computed at once.
    """

    session: str
    parent: str | None = None
    tenant: str | None = None
    retain_s: float | None = None
    expect_s: float | None = None
    priority: int = DEFAULT_PRIORITY
    source: str | None = None
    handover: bool = False
    call: str | None = None
    request: str | None = None
    final: bool = False
    compaction: bool = False
    stock: bool = False
    also: tuple[str, ...] = ()
    repeat_s: float | None = None
    repeat_above: int = 0

    def to_xargs(self) -> dict[str, str | int | float]:
        """Encode as scalars; members at their default are left out."""
        out: dict[str, str | int | float] = {
            "tc_v": PROTOCOL_VERSION,
            "tc_session": self.session,
        }
        for name in (
            "parent",
            "tenant",
            "retain_s",
            "expect_s",
            "source",
            "call",
            "request",
            "repeat_s",
        ):
            value = getattr(self, name)
            if value is not None:
                out[XARG_PREFIX + name] = value
        if self.also:
            out["tc_also"] = " ".join(self.also)
        if self.priority != DEFAULT_PRIORITY:
            out["tc_priority"] = self.priority
        if self.repeat_above:
            out["tc_repeat_above"] = self.repeat_above
        for name in ("handover", "final", "compaction", "stock"):
            if getattr(self, name):
                out[XARG_PREFIX + name] = 1
        return out

    @classmethod
    def from_xargs(cls, xargs: Mapping[str, Any], *, trusted: bool) -> EngineHints | None:
        """Decode scalars; anything malformed is ignored, because an engine must not fail on it.

        Args:
            xargs: the request's extra arguments.
            trusted: whether our router is in front; otherwise, or when its version is too far
                from ours, only the session and a clipped retention are read.

        Returns:
            The hints, or None without a legal session.
        """
        session = _legal_or_none(xargs.get("tc_session"))
        if session is None:
            return None
        retain_s = _seconds(xargs.get("tc_retain_s"))
        if not trusted or xargs.get("tc_v") not in SPOKEN_VERSIONS:
            return cls(session=session, retain_s=retain_s)
        priority = xargs.get("tc_priority", DEFAULT_PRIORITY)
        above = xargs.get("tc_repeat_above", 0)
        return cls(
            session=session,
            parent=_legal_or_none(xargs.get("tc_parent")),
            tenant=_legal_or_none(xargs.get("tc_tenant")),
            retain_s=retain_s,
            expect_s=_seconds(xargs.get("tc_expect_s")),
            priority=priority
            if type(priority) is int and MIN_PRIORITY <= priority <= MAX_PRIORITY
            else DEFAULT_PRIORITY,
            source=_legal_or_none(xargs.get("tc_source")),
            handover=xargs.get("tc_handover") == 1,
            call=_legal_or_none(xargs.get("tc_call")),
            request=_legal_or_none(xargs.get("tc_request")),
            final=xargs.get("tc_final") == 1,
            compaction=xargs.get("tc_compaction") == 1,
            stock=xargs.get("tc_stock") == 1,
            also=_ids(xargs.get("tc_also")),
            repeat_s=_seconds(xargs.get("tc_repeat_s")),
            repeat_above=above if type(above) is int and above >= 0 else 0,
        )


def _legal_or_none(value: object) -> str | None:
    if not isinstance(value, str) or len(value) > MAX_SESSION_ID_CHARS:
        return None
    return value if VISIBLE_ASCII.fullmatch(value) else None


def _ids(value: object) -> tuple[str, ...]:
    """Read ids that are parted by single spaces, which no id holds."""
    if not isinstance(value, str) or len(value) > MAX_ALSO * (MAX_SESSION_ID_CHARS + 1):
        return ()
    return tuple(filter(_legal_or_none, value.split(" ")[:MAX_ALSO]))


def _seconds(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value == math.inf:
        return None
    # Clipped before it is converted: an integer from outside may exceed every float.
    return float(min(value, MAX_RETAIN_S)) if value >= 0 else None


def members_from_outside(members: Iterable[str]) -> Iterator[str]:
    """Yield the names among ``members`` that a client must not set in ``vllm_xargs``."""
    for name in members:
        if name.startswith(XARG_PREFIX) or name in STRIPPED_BODY_MEMBERS or name == "session_id":
            yield name
