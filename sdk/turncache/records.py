"""What happened in one call: kept while it runs, and the frozen record of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from turncache.answers import Ending
from turncache.errors import ProtocolError
from turncache.protocol import Boundary, Cause, Outcome, Plan, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """One call of a session, after it has ended.

    Token counts are the server's own (``Turncache-Outcome``) where it sends them. From
    another server they come from the answer's usage: then ``prompt`` and what was
    ``local``, with the rest ``computed``, and ``returned``, ``lost``, ``plan`` and
    ``reason`` stay None. Unknown is None, never 0.

    Attributes:
        turn: number of the turn in its session, from 1.
        call: number of the call in its turn, from 1.
        cause: why the call was made.
        boundary: how it ended; None when its answer was not complete or not read.
        model: name of the model.
        prompt: tokens of the prompt.
        local: tokens found in the cache of the engine that did the prefill.
        returned: tokens pulled from another engine.
        computed: tokens computed by this call.
        lost: part of ``computed`` that an earlier call had computed.
        plan: how a router served the call.
        reason: why no more was reused.
        ttft_s: seconds to the first generated token; streams only.
        seconds: seconds to the end of the answer.
        error: name of the error that ended the call, or None.
    """

    turn: int | None
    call: int | None
    cause: Cause | None
    boundary: Boundary | None
    model: str
    prompt: int | None = None
    local: int | None = None
    returned: int | None = None
    computed: int | None = None
    lost: int | None = None
    plan: Plan | None = None
    reason: Reason | None = None
    ttft_s: float | None = None
    seconds: float
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready values."""
        return asdict(self)


class Call:
    """One call while it runs: filled in by the client that makes it.

    Times are readings of one monotonic clock, in seconds.
    """

    # What is known later. Values that nearly all calls share until then cost nothing to set.
    first_s: float | None = None
    ended_s: float | None = None
    boundary: Boundary | None = None
    prompt: int | None = None
    cached: int | None = None
    outcome_text: str | None = None
    error: str | None = None

    def __init__(
        self,
        *,
        started_s: float,
        model: str,
        turn: int | None = None,
        call: int | None = None,
        cause: Cause | None = None,
        final: bool = False,
    ) -> None:
        """Start at ``started_s``, before the request is sent."""
        self.started_s = started_s
        self.turn = turn
        self.call = call
        self.cause = cause
        self.model = model
        self.final = final

    def end(self, ending: Ending) -> None:
        """Take how the call ended."""
        self.boundary, _, self.prompt, self.cached, _, self.error = ending
        if self.final and self.boundary is not None:
            self.boundary = Boundary.FINAL

    def fail(self, ended_s: float, error: str) -> None:
        """Take that the call ended with an error, given by its name."""
        if self.ended_s is None:
            self.ended_s = ended_s
        self.boundary = None
        self.error = error

    def outcome(self) -> Outcome | None:
        """Return what the server said about the prompt's KV, or None."""
        return parse_outcome(self.outcome_text)

    def record(self) -> CallRecord | None:
        """Return the record, or None while the call runs."""
        if self.ended_s is None:
            return None
        outcome = self.outcome()
        prompt, local, computed = self.prompt, self.cached, None
        if prompt is not None and local is not None:
            computed = max(prompt - local, 0)
        if outcome is not None:
            prompt, local, computed = outcome.prompt, outcome.local, outcome.computed
        return CallRecord(
            turn=self.turn,
            call=self.call,
            cause=self.cause,
            boundary=self.boundary,
            model=self.model,
            prompt=prompt,
            local=local,
            returned=outcome.returned if outcome else None,
            computed=computed,
            lost=outcome.lost if outcome else None,
            plan=outcome.plan if outcome else None,
            reason=outcome.reason if outcome else None,
            ttft_s=None if self.first_s is None else self.first_s - self.started_s,
            seconds=self.ended_s - self.started_s,
            error=self.error,
        )


def parse_outcome(text: str | None) -> Outcome | None:
    """Return the outcome that a ``Turncache-Outcome`` header says, None when it cannot be read.

    A header that breaks the contract is the server's fault and must not fail the call
    that carried it.
    """
    if not text:
        return None
    try:
        return Outcome.from_header(text)
    except ProtocolError:
        return None
