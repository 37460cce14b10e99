"""What a simulation gives: calls, and totals. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from turncache_tools.plan.load import PlanArm


class Served(NamedTuple):
    """One call of an agent. Counts in tokens; ``local + returned + computed = prompt``.

    Attributes:
        session: its agent.
        call: its number, from 1.
        arrived_s: simulated time.
        ttft_s: to the first token.
        admitted_s: of these, waiting to be let in by the router.
        queued_s: of these, waiting for room or for the prefill engine.
        ends_turn: a person's turn is over with its answer, or the session.
        ended_s: simulated time of its last token.
        prompt: tokens.
        answer: likewise.
        local: found by the prefill, or only, engine, host tier included.
        loaded: of these, from the host tier.
        returned: pulled from decode.
        computed: the rest.
        seen: of the prompt, what an earlier call had computed, wherever.
        again: of these, computed again.
        compute_s: the accelerator's time.
    """

    session: str
    call: int
    arrived_s: float
    ttft_s: float
    admitted_s: float
    queued_s: float
    ends_turn: bool
    ended_s: float
    prompt: int
    answer: int
    local: int
    loaded: int
    returned: int
    computed: int
    seen: int
    again: int
    compute_s: float


@dataclass(slots=True)
class SimResult:
    """What one arm did.

    Attributes:
        arm: which.
        served: calls of agents, in the order in which they ended.
        span_s: simulated time.
        compute_s: of the prefill, or only, accelerator, ordinary calls included.
        num_others: ordinary calls.
        peak_used: most of the prefill, or only, pool that calls held at once, as a share.
        num_late: calls that were let in because they had waited for too long.
    """

    arm: PlanArm
    served: list[Served]
    span_s: float = 0.0
    compute_s: float = 0.0
    num_others: int = 0
    peak_used: float = 0.0
    num_late: int = 0
