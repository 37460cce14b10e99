"""A call that an engine is serving, and what its record says of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from turncache.protocol import EngineHints, Reason
from turncache_server.connector.pull_state import NOBODY, Pull
from turncache_server.connector.records import CallRecord
from turncache_server.retention.lineages import Admission


@dataclass(slots=True, kw_only=True)
class ServedCall:
    """One call, from its arrival to its end.

    Attributes:
        hints: what it says of itself.
        admission: to its session; None when the mode is off.
        prompt: its tokens.
        block_size: tokens per block.
        local: tokens found in this engine; the last look before the first step counts.
        handed_over: tokens that a stock hand-over brings.
        refused: why it does not pull.
        named: it names a source.
        record: as of the first admission to a step. What a preempted call reuses when it comes
            back is not added: its prompt would be counted twice.
    """

    hints: EngineHints
    admission: Admission | None
    prompt: int
    block_size: int
    local: int = 0
    handed_over: int = 0
    refused: Reason | None = None
    named: bool = False
    record: CallRecord | None = None

    def take_over(self, tokens: int) -> None:
        """Note what a stock hand-over brings; asked again when it is done, it brings nothing."""
        # Of a whole prompt the last token is computed all the same.
        most = max(0, self.prompt - 1 - self.local)
        self.handed_over = max(self.handed_over, min(tokens, most))

    def recorded(self, pull: Pull | None) -> CallRecord:
        """Return the record of a call that is about to be computed, or has never been."""
        size = self.block_size
        returned = self.handed_over if pull is None else pull.returned_tokens
        known = 0 if self.admission is None else self.admission.known_blocks
        if pull is not None:
            known = max(known, pull.known_blocks)
        # At least the last token is computed by every call, and with it its block.
        reusable = min(known, (self.prompt - 1) // size) * size
        lost = max(0, reusable - self.local - returned)
        reason, at = self._reason(pull, lost)
        return CallRecord(
            prompt=self.prompt,
            local=self.local,
            returned=returned,
            lost=lost,
            reason=reason,
            at=at,
            pull_s=0.0 if pull is None else pull.pull_s,
        )

    def _reason(self, pull: Pull | None, lost: int) -> tuple[Reason, int | None]:
        if self.admission is None:
            return Reason.DISABLED, None
        refused = self.refused if pull is None else pull.reason
        # What was only looked for may be nowhere: that is no reason unless something is lost.
        named = self.named if pull is None else pull.peer is not NOBODY
        told = named and refused is not Reason.BELOW_THRESHOLD
        if refused is not None and (lost or told):
            return refused, None
        if lost:
            return Reason.EVICTED, None
        if self.admission.new_session:
            return Reason.NEW_SESSION, None
        if self.admission.diverged_at is not None:
            return Reason.DIVERGED, self.admission.diverged_at * self.block_size
        return Reason.OK, None

    def found_besides(self, num_computed_tokens: int) -> CallRecord | None:
        """Count what a sibling connector has loaded as found in this engine: a host tier's.

        Args:
            num_computed_tokens: with which the call goes into its first step.

        Returns:
            The changed record, None when nothing was loaded.
        """
        record = self.record
        if record is None:
            return None
        loaded = num_computed_tokens - record.local - record.returned
        if loaded <= 0:
            return None
        lost = max(0, record.lost - loaded)
        found = Reason.OK if record.reason is Reason.EVICTED and not lost else record.reason
        self.record = replace(record, local=record.local + loaded, lost=lost, reason=found)
        return self.record
