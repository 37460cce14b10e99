"""What a client does before each call: whose call it is, what is said of it, and to whom.

Sync and async clients share all of it; nothing here waits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from turncache import scope as scopes
from turncache import untagged, wire
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


#: A call as it was entered into its session's ledger: the call, its session, the headers that
#: say so, the line that placed it, and what broke reuse.
_Entry: TypeAlias = tuple[
    Call,
    Session | None,
    dict[str, str] | None,
    tuple[Follower[Session], int] | None,
    Sequence[Finding],
]


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
    if options.url not in PATHS and options.url.partition("?")[0] not in PATHS:
        return None
    if options.method.lower() != "post" or binding.profile is Profile.OFF:
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
    body = options.json_data
    if options.extra_json or not isinstance(body, dict):
        body = _body(options)
    owner, follow, why = choose(binding, explicit, body)
    if why is not None:
        untagged.count(why)
        return None
    if told is not Audience.TOLD or (follow and "prompt" in body):
        # Nothing is said to a server that has not shown that it listens, and a text says too
        # little of which conversation it continues.
        untagged.count(Untagged.TEXT if told is Audience.TOLD else Untagged.NOT_TOLD)
        if follow and told is Audience.NEVER:
            return None
        follow = False
    with LOCK.held:
        call, owner, headers, line, found = _enter(family, owner, body, explicit, follow=follow)
    if found and owner is not None:
        for finding in found:
            ADVISER.say(owner.id, finding)
    attempt = Attempt(
        call,
        owner,
        host,
        family.clock,
        line,
        server_keeps=options.url.startswith(_RESPONSES),
        may_teach=told is Audience.UNKNOWN,
    )
    attempt.asks_raw = (
        not stream and told is not Audience.NEVER and wire.can_ask_raw(cast_to, explicit)
    )
    extra_json = None
    if told is not Audience.TOLD:
        headers = None
    elif headers is not None and owner is not None:
        owner.ledger.speaker = binding.speaker
        in_body = binding.profile is Profile.VLLM
        extra_json = wire.body_members(options, _tags(owner, call)) if in_body else None
        if LOG.isEnabledFor(logging.DEBUG):
            LOG.debug("session %s: %s", headers[SESSION_HEADER], headers[CALL_HEADER])
        if explicit:
            headers = _not_given(headers, explicit)
    post_parser = None
    # An answer that we parse is seen when it is; its parser only matters if it is another's.
    if not stream and (not attempt.asks_raw or callable(options.post_parser)):
        post_parser = wire.observer(options, attempt.parsed, attempt.keep)
    attempt.options = wire.dress(options, headers, extra_json, post_parser)
    return attempt


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
    owner: Session | None,
    body: Mapping[str, Any],
    explicit: Mapping[str, Any],
    *,
    follow: bool,
) -> _Entry:
    """Enter the call into its session's ledger, under the lock."""
    now_s = family.clock()
    line = cause = None
    if owner is None and not follow:
        call = Call(started_s=now_s, model=str(body.get("model") or ""))
        return call, None, None, None, ()
    reading = read_call(body, family.memo)
    if owner is None:
        follower = family.follower
        owner, key, cause = follower.place(reading)
        line = follower, key
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
    return call, owner, headers, line, found


def _tags(owner: Session, call: Call) -> CallTags:
    return owner.tags(turn=call.turn, call=call.call, cause=call.cause, tools={}, final=call.final)


def _place(owner: Session, reading: Reading, previous: str) -> tuple[int | None, int | None]:
    """Return turn and call, from the answer that is continued: the server keeps the rest."""
    before = owner.ledger.place_of(previous)
    if before is None:
        return None, None
    turn, call = before
    return (turn, call + 1) if reading.cause is Cause.TOOL else (turn + 1, 1)


def _learn(owner: Session, reading: Reading, now_s: float) -> Sequence[Finding]:
    """Take from the request how long its tools ran, and what broke reuse since the last."""
    ledger = owner.ledger
    found: list[Finding] = []
    if (
        ledger.waits
        and reading.cause is Cause.TOOL
        and (results := ledger.take_results(reading.results))
    ):
        names, _, answered_s = zip(*results.values(), strict=True)
        TOOL_DURATIONS.observe(names, now_s - max(answered_s))
        found = _rewritten(reading, results)
    if reading.previous is None and reading.history:
        before = ledger.shape_before(reading)
        if before is not None:
            found += findings(before, reading)
    for finding in found:
        ledger.note(finding)
    return found


def _rewritten(reading: Reading, results: Mapping[str, Waiting]) -> list[Finding]:
    """Return a finding for arguments that came back as another text than the model's."""
    for at, call_id, arguments in echoed_calls(reading):
        waiting = results.get(call_id)
        if waiting and waiting.arguments is not None and waiting.arguments != hash(arguments):
            return [Finding(Break.ARGUMENTS_RESERIALISED, at)]
    return []


def _not_given(headers: dict[str, str], explicit: Mapping[str, Any]) -> dict[str, str]:
    """Return those headers of ours that the caller has not given itself."""
    return {name: text for name, text in headers.items() if name.lower() not in explicit}


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
