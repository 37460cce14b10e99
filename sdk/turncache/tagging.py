"""What a client does before each call: whose call it is, what is said of it, and to whom.

Sync and async clients share all of it; nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from turncache import scope as scopes
from turncache import spans, untagged, wire
from turncache._lock import LOCK
from turncache.advice import ADVISER, Break, Finding, findings
from turncache.attempt import Attempt, complain
from turncache.calls import Reading, echoed_calls, read_call
from turncache.errors import ProtocolError
from turncache.family import Binding, Family
from turncache.follow import Follower
from turncache.hosts import Audience
from turncache.ledger import Waiting
from turncache.protocol import (
    CALL_HEADER,
    FINAL_HEADER,
    SESSION_HEADER,
    CallTags,
    Cause,
    check_session_id,
    parse_dictionary,
)
from turncache.records import Call
from turncache.sessions import TOOL_DURATIONS, Session, session
from turncache.settings import Profile
from turncache.untagged import Untagged

LOG: Final = logging.getLogger("turncache")

#: Calls of a model, by path relative to the base URL; others pass through untouched.
PATHS: Final = frozenset({"/chat/completions", "/completions", "/responses"})
_RESPONSES: Final = "/responses"
_SESSION, _FINAL, _CALL = (name.lower() for name in (SESSION_HEADER, FINAL_HEADER, CALL_HEADER))


class Choice(NamedTuple):
    """Whose call it is: a session's, a followed conversation's, or nobody's for a reason."""

    session: Session | None = None
    follow: bool = False
    nobodys: Untagged | None = None


_FOREIGN: Final = Choice(nobodys=Untagged.FOREIGN_ID)
_FOLLOWED: Final = Choice(follow=True)


class _Entry(NamedTuple):
    """A call as it was entered into its session's ledger."""

    call: Call
    session: Session | None = None
    headers: dict[str, str] | None = None
    line: tuple[Follower[Session], int] | None = None
    findings: tuple[Finding, ...] = ()


def begin(
    binding: Binding, base_url: Any, cast_to: Any, options: Any, *, stream: bool
) -> Attempt | None:
    """Prepare a call, or return None when it passes through as upstream makes it.

    Args:
        binding: of the client that makes the call.
        base_url: upstream's URL object of the server.
        cast_to: type that the answer is parsed into.
        options: upstream's ``FinalRequestOptions``.
        stream: whether the answer is streamed.
    """
    if options.url.partition("?")[0] not in PATHS or options.method.lower() != "post":
        return None
    if binding.family.settings.disabled or _profile(binding) is Profile.OFF:
        return None
    try:
        return _begin(binding, base_url, cast_to, options, stream)
    except Exception as error:  # noqa: BLE001 - a request holds whatever its caller puts there
        complain("prepare", error)
        return None


def _begin(
    binding: Binding, base_url: Any, cast_to: Any, options: Any, stream: bool
) -> Attempt | None:
    family = binding.family
    host, told = binding.server.at(base_url)
    explicit = wire.explicit_headers(binding.defaults, options)
    body = _body(options)
    choice = choose(binding, explicit, body)
    why = _why_untagged(choice, told, body)
    if why is not None:
        untagged.count(why)
        if choice.nobodys is not None or (choice.follow and told is Audience.NEVER):
            return None
    with LOCK.held:
        entry = _enter(family, choice, body, explicit, follow=choice.follow and why is None)
    call, owner, headers, line, found = entry
    if found and owner is not None:
        for finding in found:
            ADVISER.say(owner.id, finding)
    attempt = Attempt(
        call=call,
        session=owner,
        host=host,
        clock=family.clock,
        line=line,
        server_keeps=options.url.startswith(_RESPONSES),
        may_teach=told is Audience.UNKNOWN,
    )
    if attempt.span is not None:
        spans.tell_start(attempt.span, call, owner)
    attempt.asks_raw = (
        not stream and told is not Audience.NEVER and wire.can_ask_raw(cast_to, explicit)
    )
    extra_json = None
    if told is not Audience.TOLD or headers is None:
        headers = None
    else:
        if owner is not None:
            owner.ledger.speaker = binding.speaker
            if _profile(binding) is Profile.VLLM:
                extra_json = wire.body_members(options, _tags(owner, call))
        headers = _headers(headers, explicit)
    # An answer that we parse is seen when it is; its parser only matters if it is another's.
    seen = stream or (attempt.asks_raw and not callable(options.post_parser))
    attempt.options = wire.dress(
        options,
        headers=headers,
        extra_json=extra_json,
        post_parser=None if seen else wire.observer(options, attempt.parsed, attempt.keep),
    )
    return attempt


def _why_untagged(choice: Choice, told: Audience, body: Mapping[str, Any]) -> Untagged | None:
    """Return why nothing of a session is said, or None when it is said."""
    if choice.nobodys is not None:
        return choice.nobodys
    # Nothing is said to a server that has not shown that it listens, and a text says too
    # little of which conversation it continues.
    if told is not Audience.TOLD:
        return Untagged.NOT_TOLD
    return Untagged.TEXT if choice.follow and "prompt" in body else None


def choose(binding: Binding, explicit: Mapping[str, Any], body: Mapping[str, Any]) -> Choice:
    """Say whose call it is.

    In this order: what the call itself says (the header, then the body's
    ``session_id``), the client's session, what a framework's integration finds, the
    innermost block around the call, ``TURNCACHE_SESSION_ID``, and the conversation that
    it continues. An id that cannot be ours is left to the server, and a block or session
    that has ended makes it nobody's.
    """
    if explicit or "session_id" in body:
        for given in (explicit.get(_SESSION), body.get("session_id")):
            if given is None:
                continue
            if not isinstance(given, str):
                return _FOREIGN
            try:
                return Choice(session(check_session_id(given)))
            except ProtocolError:
                return _FOREIGN
    if binding.session is not None:
        return _unless_ended(binding.session, ended=binding.session.ended)
    if binding.ambient is not None and (found := binding.ambient()) is not None:
        return _unless_ended(found, ended=found.ended)
    scope = scopes.innermost()
    if scope is not None:
        return _unless_ended(scope.session, ended=not scope.open)
    if binding.family.settings.session_id is not None:
        return Choice(session(binding.family.settings.session_id))
    return _FOLLOWED


def _unless_ended(owner: Session, *, ended: bool) -> Choice:
    if not ended:
        return Choice(owner)
    owner.warn_ended()
    return Choice(nobodys=Untagged.ENDED)


def _enter(
    family: Family,
    choice: Choice,
    body: Mapping[str, Any],
    explicit: Mapping[str, Any],
    *,
    follow: bool,
) -> _Entry:
    """Enter the call into its session's ledger, under the lock."""
    now_s = family.clock()
    owner = choice.session
    line, cause = None, None
    if owner is None and not follow:
        return _Entry(Call(started_s=now_s, model=str(body.get("model") or "")))
    reading = read_call(body, family.memo)
    if owner is None:
        owner, key, cause = family.follower.place(reading)
        line = (family.follower, key)
    turn, number = reading.turn, reading.call
    if reading.previous is not None:
        turn, number = _place(owner, reading, reading.previous)
    final = False
    if explicit:
        cause = _stated_cause(explicit) or cause
        final = explicit.get(_FINAL) == "true"
    call = Call(
        started_s=now_s,
        model=reading.model,
        turn=turn,
        call=number,
        cause=cause or reading.cause,
        final=final,
    )
    owner.ledger.begin(call)
    found = _learn(owner, reading, now_s)
    headers = owner.call_headers(call, tools=TOOL_DURATIONS.rows(reading.tools.names))
    return _Entry(call, owner, headers, line, found)


def _tags(owner: Session, call: Call) -> CallTags:
    return owner.tags(turn=call.turn, call=call.call, cause=call.cause, tools={}, final=call.final)


def _place(owner: Session, reading: Reading, previous: str) -> tuple[int | None, int | None]:
    """Return turn and call, from the answer that is continued: the server keeps the rest."""
    before = owner.ledger.place_of(previous)
    if before is None:
        return None, None
    turn, call = before
    return (turn, call + 1) if reading.cause is Cause.TOOL else (turn + 1, 1)


def _learn(owner: Session, reading: Reading, now_s: float) -> tuple[Finding, ...]:
    """Take from the request how long its tools ran, and what broke reuse since the last."""
    ledger = owner.ledger
    found: list[Finding] = []
    if reading.results and (results := ledger.take_results(reading.results)):
        answered_s = max(waiting.answered_s for waiting in results.values())
        TOOL_DURATIONS.observe([waiting.name for waiting in results.values()], now_s - answered_s)
        found = _rewritten(reading, results)
    if reading.previous is None and reading.history:
        before = ledger.shape_before(reading)
        if before is not None:
            found += findings(before, reading)
    if not found:
        return ()
    for finding in found:
        ledger.note(finding)
    return tuple(found)


def _rewritten(reading: Reading, results: Mapping[str, Waiting]) -> list[Finding]:
    """Return a finding for arguments that came back as another text than the model's."""
    for at, call_id, arguments in echoed_calls(reading):
        waiting = results.get(call_id)
        if waiting and waiting.arguments is not None and waiting.arguments != hash(arguments):
            return [Finding(Break.ARGUMENTS_RESERIALISED, at)]
    return []


def _headers(headers: dict[str, str], explicit: Mapping[str, Any]) -> dict[str, str]:
    """Return the headers to add: those of ours that the caller has not given itself."""
    if LOG.isEnabledFor(logging.DEBUG):
        LOG.debug("session %s: %s", headers.get(SESSION_HEADER), headers.get(CALL_HEADER))
    if explicit:
        return {name: value for name, value in headers.items() if name.lower() not in explicit}
    return headers


def _profile(binding: Binding) -> Profile:
    return binding.profile or binding.family.settings.profile


def _body(options: Any) -> Mapping[str, Any]:
    body = options.json_data
    if not isinstance(body, dict):
        return {}
    return {**body, **options.extra_json} if options.extra_json else body


def _stated_cause(explicit: Mapping[str, Any]) -> Cause | None:
    """Return the cause in a ``Turncache`` header of the caller's, for the record."""
    given = explicit.get(_CALL)
    if not isinstance(given, str):
        return None
    try:
        cause = parse_dictionary(CALL_HEADER, given).get("cause")
    except ProtocolError:
        return None
    return Cause(str(cause)) if cause in set(Cause) else None
