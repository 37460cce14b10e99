"""The plan of a call: (request, hints, snapshot of the pool) to engines, with a reason. Pure."""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import msgspec

from turncache.protocol import Plan, Reason
from turncache_server.router.apis.api import CallRequest
from turncache_server.router.errors import SERVER_ERROR, ApiError, invalid
from turncache_server.router.place import rank

#: Engines of a side to which a session goes that nobody refuses twice: each costs a peek.
_LIKELY: Final = 2


class Side(enum.StrEnum):
    """What an engine does."""

    SINGLE = "single"
    PREFILL = "prefill"
    DECODE = "decode"


class Readiness(enum.StrEnum):
    """What can be served: all calls, some (by the policy for a side that is gone), or none."""

    OK = "ok"
    DEGRADED = "degraded"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineView:
    """One engine, as it is at the moment of planning.

    Attributes:
        name: name in the router's configuration.
        engine_id: name by which other engines may pull from it.
        live: its last health check succeeded and its circuit is closed.
        there: it lives, as far as a short silence can tell: it may still have what it was asked
            for. Whoever is live is there.
        pulls: it takes and gives KV by verified pulls, as far as anybody knows.
        told: it has said itself whether it pulls.
        draining: it is to be stopped: what it has goes to others, by their pulls.
        models: context length in tokens (None when the engine does not say) by served
            model name; empty before the engine has been reached.
    """

    name: str
    engine_id: str
    side: Side
    live: bool = True
    there: bool = True
    pulls: bool = True
    told: bool = True
    draining: bool = False
    models: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)  # without slots: what follows from it is kept
class Snapshot:
    """The pool and the switches at one moment.

    Attributes:
        decode_alone_tokens: new tokens up to which decode serves a call alone, 0 for never.
        max_new_tokens_on_decode: likewise while no prefill engine lives.
        serve_on_prefill: prefill serves calls alone while no decode engine lives.
    """

    engines: tuple[EngineView, ...]
    return_enabled: bool = True
    decode_alone_tokens: int = 0
    max_new_tokens_on_decode: int = 0
    serve_on_prefill: bool = False

    def of_side(self, side: Side) -> tuple[EngineView, ...]:
        """Return the engines of one side, live or not."""
        return self._sides[side]

    @functools.cached_property
    def _sides(self) -> Mapping[Side, tuple[EngineView, ...]]:
        return {side: tuple(e for e in self.engines if e.side is side) for side in Side}

    @functools.cached_property
    def lives(self) -> frozenset[Side]:
        """Sides of which an engine is live."""
        return frozenset(engine.side for engine in self.engines if engine.live)

    @functools.cached_property
    def needed_sides(self) -> tuple[Side, ...]:
        """Sides without which no call can be served."""
        configured = {engine.side for engine in self.engines}
        return tuple(side for side in Side if side in configured)

    @property
    def readiness(self) -> Readiness:
        """What can be served by the engines that live."""
        if not self.engines:
            return Readiness.UNAVAILABLE
        gone = [side for side in self.needed_sides if side not in self.lives]
        if not gone:
            return Readiness.OK
        able = (gone == [Side.PREFILL] and self.max_new_tokens_on_decode > 0) or (
            gone == [Side.DECODE] and self.serve_on_prefill
        )
        return Readiness.DEGRADED if able else Readiness.UNAVAILABLE

    @functools.cached_property
    def decode_limit(self) -> int:
        """New tokens up to which decode serves a call alone at this moment."""
        gone = 0 if Side.PREFILL in self.lives else self.max_new_tokens_on_decode
        return max(self.decode_alone_tokens, gone)


class PlanHints(msgspec.Struct, frozen=True, kw_only=True):
    """What is known about a call's session.

    Attributes:
        root: namespaced id that the session is placed by.
        served_by: name of the engine that generated the session's last answer.
        behind: another router has had calls of the session since.
        new_tokens: most prompt tokens that ``served_by`` would have to compute, None when
            it has not confirmed what it keeps.
        all_tokens: most tokens of the prompt.
    """

    root: str
    served_by: str | None = None
    behind: bool = False
    new_tokens: int | None = None
    all_tokens: int = 0


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is served.

    Attributes:
        label: ``single``, ``decode``, ``return`` or ``cold``.
        reason: why nothing is returned, ``ok`` when that is not the plan's doing.
        prefill: engines for the prefill leg, best first; empty when one engine serves the
            call alone.
        serve: engines that answer the client, best first, never empty.
        source: engine id that prefill is to pull from, None without a return.
        also: engine ids that may have it as well, where nobody knows for sure.
        stock: prefill hands over to decode as stock does: an engine of the plan pulls nothing.
    """

    label: Plan
    reason: Reason
    prefill: tuple[EngineView, ...]
    serve: tuple[EngineView, ...]
    source: str | None = None
    also: tuple[str, ...] = ()
    stock: bool = False


def make_plan(request: CallRequest, hints: PlanHints, snapshot: Snapshot) -> CallPlan:
    """Decide how a call is served.

    Raises:
        ApiError: 503, when no engine of a needed side serves the model at present.
    """
    if Side.SINGLE in snapshot.needed_sides:
        serve = _keeper_first(request, hints, snapshot, Side.SINGLE)
        return CallPlan(label=Plan.SINGLE, reason=Reason.OK, prefill=(), serve=serve)
    if request.one_engine is not None:
        gone = snapshot.serve_on_prefill and Side.DECODE not in snapshot.lives
        serve = _keeper_first(request, hints, snapshot, Side.PREFILL if gone else Side.DECODE)
        return CallPlan(label=Plan.COLD, reason=Reason.UNSUPPORTED, prefill=(), serve=serve)
    if (alone := _one_side(request, hints, snapshot)) is not None:
        return alone
    decode = _candidates(request, hints, snapshot, Side.DECODE)
    prefill = _candidates(request, hints, snapshot, Side.PREFILL)
    # One that does not pull decides for all: which of them will answer is not known yet.
    stock = not all(engine.pulls for engine in (*prefill, *decode))
    reason, sources = _sources(request, hints, snapshot, stock=stock)
    return CallPlan(
        label=Plan.RETURN if sources else Plan.COLD,
        reason=reason,
        prefill=prefill,
        serve=decode,
        source=sources[0] if sources else None,
        also=sources[1:],
        stock=stock,
    )


def _one_side(request: CallRequest, hints: PlanHints, snapshot: Snapshot) -> CallPlan | None:
    """Plan a call that one side serves alone, None when two are to share it.

    Raises:
        ApiError: 503, when no prefill engine lives and decode would compute too much.
    """
    if snapshot.serve_on_prefill and Side.DECODE not in snapshot.lives:
        serve = _candidates(request, hints, snapshot, Side.PREFILL)
        return CallPlan(label=Plan.COLD, reason=Reason.SOURCE_GONE, prefill=(), serve=serve)
    limit = snapshot.decode_limit
    if limit == 0:
        return None
    if hints.new_tokens is not None and hints.new_tokens <= limit:
        live = _live(request, snapshot, Side.DECODE)
        # No other engine: one that does not keep the history would compute all of it.
        serve = tuple(engine for engine in live if engine.name == hints.served_by and engine.live)
        if serve and not serve[0].draining:
            return CallPlan(label=Plan.DECODE, reason=Reason.OK, prefill=(), serve=serve)
    if Side.PREFILL in snapshot.lives:
        return None
    if hints.all_tokens <= limit:
        serve = _candidates(request, hints, snapshot, Side.DECODE)
        return CallPlan(label=Plan.DECODE, reason=Reason.OK, prefill=(), serve=serve)
    raise ApiError(
        503,
        "No prefill engine is there at present, and decode computes at most "
        f"{limit} new tokens of a prompt (max_new_tokens_on_decode). Nothing of the session is "
        "lost; try again.",
        kind=SERVER_ERROR,
        code="no_prefill",
    )


def check_model(request: CallRequest, snapshot: Snapshot) -> None:
    """Refuse a model that no engine serves, and an answer that no context can hold.

    An engine would refuse both, but the decode engine only after prefill has computed the
    whole prompt.

    Raises:
        ApiError: 404 ``model_not_found``, or 400.
    """
    if request.model is None:
        return
    lengths = [
        engine.models[request.model]
        for engine in snapshot.engines
        if request.model in engine.models
    ]
    if not lengths and any(engine.models for engine in snapshot.engines):
        raise ApiError(
            404,
            f"The model {request.model[:200]!r} does not exist here; GET /v1/models lists "
            "the models that do.",
            param="model",
            code="model_not_found",
        )
    known = [length for length in lengths if length is not None]
    if known and request.max_tokens is not None and request.max_tokens > max(known):
        raise invalid(
            f"max_tokens: {request.max_tokens} is more than the model's context of "
            f"{max(known)} tokens.",
            param="max_tokens",
        )


def _candidates(
    request: CallRequest, hints: PlanHints, snapshot: Snapshot, side: Side
) -> tuple[EngineView, ...]:
    """Rank the engines of a side: the live ones that stay, the live ones, or all.

    A health check may be late in both directions. Trying a dead engine costs a refused
    connection; refusing the call costs the call.
    """
    live = _live(request, snapshot, side)
    return _ranked(hints.root, [engine for engine in live if not engine.draining] or live)


def _live(request: CallRequest, snapshot: Snapshot, side: Side) -> list[EngineView]:
    """List the live engines of a side that serve the model, or all of them when none is live."""
    able = [
        engine
        for engine in snapshot.of_side(side)
        if request.model is None or not engine.models or request.model in engine.models
    ]
    if not able:
        raise ApiError(
            503,
            f"No {side.value} engine serves the model {(request.model or '')[:200]!r} at "
            "present; GET /v1/models lists what is served.",
            kind=SERVER_ERROR,
            code="no_engine",
        )
    return [engine for engine in able if engine.live] or able


def _keeper_first(
    request: CallRequest, hints: PlanHints, snapshot: Snapshot, side: Side
) -> tuple[EngineView, ...]:
    """Rank the engines for a call that one of them serves alone.

    The one that keeps the continued answer comes first, because no other knows it; and a
    draining one goes on with what it has, because the others could only compute it again.
    """
    engines = _candidates(request, hints, snapshot, side)
    for engine in _live(request, snapshot, side):
        if engine.name == hints.served_by and (request.continues is not None or engine.draining):
            return (engine, *(each for each in engines if each is not engine))
    return engines


def _ranked(root: str, engines: Iterable[EngineView]) -> tuple[EngineView, ...]:
    by_name = {engine.name: engine for engine in engines}
    return tuple(by_name[name] for name in rank(root, by_name))


def _sources(
    request: CallRequest, hints: PlanHints, snapshot: Snapshot, *, stock: bool
) -> tuple[Reason, tuple[str, ...]]:
    """Choose the decode engines to pull from: (reason, engine ids, the likeliest first)."""
    if stock or not snapshot.return_enabled:
        return Reason.DISABLED, ()
    if hints.served_by is None and not request.has_answers:
        return Reason.NEW_SESSION, ()
    names = [] if hints.served_by is None else [hints.served_by]
    if not names or hints.behind:
        # Where it was placed before one of them began to drain, and where it went if that refused.
        ranked = _ranked(hints.root, _live(request, snapshot, Side.DECODE))
        names = [*(engine.name for engine in ranked[:_LIKELY]), *names]
    live = {engine.name: engine for engine in snapshot.of_side(Side.DECODE) if engine.live}
    found = tuple(live[name].engine_id for name in dict.fromkeys(names) if name in live)
    return (Reason.OK, found) if found else (Reason.SOURCE_GONE, ())
