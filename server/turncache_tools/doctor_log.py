"""``turncache doctor --log``: what breaks the reuse of KV in requests that were logged.

A log has one JSON object per line: a request's body, or an object that holds it as
``body`` or ``request`` (an object or its JSON text), with ``headers`` beside it if they
were logged. The format of batch files is one of these. No text of a message is shown.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from turncache.advice import Break, findings, num_common
from turncache.advice import Finding as Advice
from turncache.calls import Reading, read_call
from turncache.errors import ProtocolError
from turncache.follow import Follower
from turncache.ledger import MAX_LINEAGES, Ledger
from turncache.memo import Memo
from turncache.messages import FINGERPRINT_BYTES
from turncache.protocol import identify
from turncache_tools.doctor_agents import HABITS, Habit, as_chat, habits
from turncache_tools.finding import Finding

_SUBJECT: Final = "requests"
#: Dropping much of a history, rarely, is what a compaction does.
#: What agents do by themselves costs on some servers only.
_HARMLESS: Final = frozenset({Break.MESSAGES_DROPPED, *Habit})


@dataclass(slots=True)
class _Conversation:
    """What is known of one session or followed conversation."""

    ledger: Ledger = field(default_factory=lambda: Ledger(automatic=True))
    histories: deque[bytes] = field(default_factory=lambda: deque(maxlen=MAX_LINEAGES))


@dataclass(slots=True)
class _Seen:
    """How often one kind of change was found, and where first."""

    first_line: int
    advice: Advice | str
    times: int = 1


class LogReader:
    """Reads requests in the order in which they were made."""

    def __init__(self) -> None:
        """Start before the first line."""
        self._memo = Memo()
        self._follower: Follower[_Conversation] = Follower(lambda _: _Conversation())
        self._sessions: dict[str, _Conversation] = {}
        self._conversations: set[int] = set()
        self._seen: dict[Break | Habit, _Seen] = {}
        self._num_read = 0
        self._num_odd = 0
        self._num_messages = 0
        self._num_continued = 0

    def read(self, lines: Iterable[str]) -> None:
        """Read lines; the empty ones are passed over, and those without a request counted."""
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                headers, logged = _request(line)
                body, is_billed = as_chat(logged)
                reading = read_call(body, self._memo)
                self._take(number, headers, body, reading)
                found = [Habit.BILLING_HEADER] if is_billed else []
                for habit in (*found, *habits(body, reading)):
                    self._note(number, habit, HABITS[habit])
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
                self._num_odd += 1

    def findings(self) -> list[Finding]:
        """Return what was found: how much was read, how much continues, what broke."""
        if not self._num_read:
            return [
                Finding(
                    subject=_SUBJECT,
                    verdict="failed",
                    detail=f"no request in {self._num_odd} lines: expected a JSON object per line "
                    "with messages or input, or with a body that has them",
                )
            ]
        odd = f"; {self._num_odd} lines without a request" if self._num_odd else ""
        known = len(self._conversations)
        return [
            Finding(
                subject=_SUBJECT,
                verdict="note" if self._num_odd else "ok",
                detail=f"{self._num_read:,} requests of {known:,} conversations{odd}",
            ),
            self._continued(),
            *(_finding(kind, seen) for kind, seen in self._seen.items()),
        ]

    def _continued(self) -> Finding:
        subject = "continued"
        if not self._num_messages:
            return Finding(
                subject=subject,
                verdict="note",
                detail="these requests have prompts and no messages, by which one is compared "
                "with another",
            )
        return Finding(
            subject=subject,
            verdict="ok",
            detail=f"{self._num_continued / self._num_messages:.0%} of the messages "
            "were sent before in the same place: what a cache can reuse at best",
        )

    def _take(
        self, number: int, headers: Mapping[str, str], body: Mapping[str, Any], reading: Reading
    ) -> None:
        conversation = self._conversation(headers, body, reading)
        self._num_read += 1
        self._conversations.add(id(conversation))
        own = reading.history
        self._num_messages += len(own) // FINGERPRINT_BYTES
        known = [num_common(old, own) for old in conversation.histories]
        self._num_continued += max(known, default=0)
        conversation.histories.append(own)
        before = conversation.ledger.shape_before(reading) if own else None
        for advice in findings(before, reading) if before is not None else ():
            self._note(number, advice.kind, advice)

    def _note(self, number: int, kind: Break | Habit, advice: Advice | str) -> None:
        seen = self._seen.get(kind)
        if seen is None:
            self._seen[kind] = _Seen(number, advice)
        else:
            seen.times += 1

    def _conversation(
        self, headers: Mapping[str, str], body: Mapping[str, Any], reading: Reading
    ) -> _Conversation:
        try:
            identity = identify(headers, body)
        except ProtocolError:
            identity = None
        if identity is None:
            return self._follower.place(reading).owner
        return self._sessions.setdefault(identity.session_id, _Conversation())


def look_at_log(lines: Iterable[str]) -> list[Finding]:
    """Look at logged requests, one JSON object per line, in the order of the calls."""
    reader = LogReader()
    reader.read(lines)
    return reader.findings()


def _finding(kind: Break | Habit, seen: _Seen) -> Finding:
    times = "once" if seen.times == 1 else f"{seen.times:,} times"
    return Finding(
        subject=kind.value,
        verdict="note" if kind in _HARMLESS else "failed",
        detail=f"{times}, first in line {seen.first_line}: {seen.advice}",
    )


def _is_request(body: Mapping[str, Any]) -> bool:
    """Say whether a server would read messages, items or a prompt in this body."""
    for name in ("messages", "input"):
        given = body.get(name)
        if isinstance(given, list) and given and all(isinstance(each, dict) for each in given):
            return True
    return isinstance(body.get("input"), str) or isinstance(body.get("prompt"), (str, list))


def _request(line: str) -> tuple[Mapping[str, str], Mapping[str, Any]]:
    """Return headers, with lower-case names, and body of a logged request.

    Raises:
        ValueError: when the line holds none.
    """
    entry = json.loads(line)
    body = entry.get("body", entry.get("request", entry))
    if isinstance(body, str):
        body = json.loads(body)
    if not isinstance(body, dict) or not _is_request(body):
        raise ValueError("no request")
    headers = entry.get("headers") or {}
    return {str(name).lower(): str(value) for name, value in headers.items()}, body
