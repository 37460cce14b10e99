"""What happened to a call's KV: the ``Turncache-Outcome`` header, written and read."""

from __future__ import annotations

from dataclasses import dataclass

from turncache.errors import ProtocolError
from turncache.protocol.words import OUTCOME_HEADER, Plan, Reason
from turncache.structured_fields import Item, format_dictionary, parse_dictionary


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What happened to the KV of one call's prompt, in tokens.

    Always ``local + returned + computed == prompt``.

    Attributes:
        prompt: tokens of the prompt.
        local: found in the cache of the engine that did the prefill.
        returned: pulled from another engine and verified.
        computed: computed by this call.
        lost: part of ``computed`` that an earlier call of the lineage had computed.
        plan: how the router served the call.
        reason: why no more was reused.
        at: token at which the prompt diverged from the lineage, with reason ``diverged``.
    """

    prompt: int
    local: int
    returned: int
    computed: int
    lost: int = 0
    plan: Plan | None = None
    reason: Reason = Reason.OK
    at: int | None = None

    def __post_init__(self) -> None:
        counts = (self.prompt, self.local, self.returned, self.computed, self.lost)
        if min(counts) < 0 or self.local + self.returned + self.computed != self.prompt:
            raise ProtocolError(
                OUTCOME_HEADER,
                f"local {self.local} + returned {self.returned} + computed {self.computed} "
                f"must be prompt {self.prompt}, all from 0",
            )
        if self.lost > self.computed:
            raise ProtocolError(
                OUTCOME_HEADER, f"lost {self.lost} is more than computed {self.computed}"
            )

    @property
    def reused(self) -> int:
        """Tokens that were not computed by this call."""
        return self.local + self.returned

    def __str__(self) -> str:
        return self.to_header()

    def to_header(self) -> str:
        """Encode as the value of ``Turncache-Outcome``."""
        members: dict[str, Item] = {
            "prompt": self.prompt,
            "local": self.local,
            "returned": self.returned,
            "computed": self.computed,
            "lost": self.lost,
        }
        if self.plan is not None:
            members["plan"] = self.plan.value
        members["reason"] = self.reason.value
        if self.at is not None:
            members["at"] = self.at
        return format_dictionary(members, header=OUTCOME_HEADER)

    @classmethod
    def from_header(cls, text: str) -> Outcome:
        """Decode the value of ``Turncache-Outcome``.

        Raises:
            ProtocolError: when a count is missing or the counts do not add up.
        """
        members = parse_dictionary(OUTCOME_HEADER, text)
        counts: dict[str, int] = {}
        for name in ("prompt", "local", "returned", "computed", "lost"):
            value = members.get(name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ProtocolError(OUTCOME_HEADER, f"{name}={value!r}: expected a whole number")
            counts[name] = value
        plan, reason, at = members.get("plan"), members.get("reason"), members.get("at")
        return cls(
            **counts,
            plan=Plan(str(plan)) if plan in set(Plan) else None,
            # A reason that a newer server knows and we do not is still an answer.
            reason=Reason(str(reason)) if reason in set(Reason) else Reason.ERROR,
            at=at if isinstance(at, int) and not isinstance(at, bool) else None,
        )
