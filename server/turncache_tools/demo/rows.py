"""What is known of every call: the rows of the tables and of demo.json. Pure."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from turncache_tools.demo.compare import Verdict


class Scene(enum.StrEnum):
    """Which engines serve."""

    SINGLE = "single"
    PAIR = "pair"


class Arm(enum.StrEnum):
    """What is switched on."""

    OFF = "off"
    RETENTION = "retention"
    RETURN = "return"


#: The arms of a scene in the order of tables; the last one is what the product does.
ARMS = {
    Scene.SINGLE: (Arm.OFF, Arm.RETENTION),
    Scene.PAIR: (Arm.OFF, Arm.RETENTION, Arm.RETURN),
}
_ARM_NAMES = {Arm.OFF: "off", Arm.RETENTION: "retention", Arm.RETURN: "retention and return"}


def arm_name(scene: Scene, arm: Arm, *, stock: bool) -> str:
    """Return an arm's name for people.

    Args:
        scene: its scene.
        arm: the arm.
        stock: the pair's *off* ran on stock engines; else our extension was switched off.
    """
    if (scene, arm) == (Scene.PAIR, Arm.OFF) and stock:
        return "off (stock NixlConnector)"
    return _ARM_NAMES[arm]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRow:
    """One call of the agent in one arm. Token counts are those of the engine that prefills.

    Attributes:
        run: repetition of the arm, from 1.
        call: number of the call, from 1.
        take: from 1; of the last call there may be several, each with another result of its tool.
        brings: what is new in its prompt, in words.
        ttft_ms: to the first text at the client.
        total_ms: to the end of the answer.
        between_tokens_ms: mean between two generated tokens, None for fewer than two.
        prompt: tokens of the prompt.
        local: found in the prefilling engine's own cache.
        returned: taken from decode and verified.
        computed: computed by this call.
        new: tokens that no earlier call has computed.
        seen_by_prefill: tokens that prefill has computed in an earlier call.
        lost: what the engine itself counts as computed before, None for stock.
        reason: the engine's reason for not reusing more, None for stock.
        witness: tokens computed by vLLM's own counters.
        answer: what the model said.
        verdict: the answer against the reference's.
        gap: the reference's gap where the answer differs first, None without a difference.
        others_tokens: what the other sessions brought before this call.
        others_s: seconds that it took them.
        held: share of each engine's pool that was retained just before the call.
    """

    scene: Scene
    arm: Arm
    run: int
    call: int
    take: int
    brings: str
    ttft_ms: float
    total_ms: float
    between_tokens_ms: float | None
    prompt: int
    local: int
    returned: int
    computed: int
    new: int
    seen_by_prefill: int
    lost: int | None
    reason: str | None
    witness: int
    answer: str
    verdict: Verdict
    gap: float | None
    others_tokens: int
    others_s: float
    held: dict[str, float]

    @property
    def again(self) -> int:
        """Tokens computed though an earlier call had computed them: what the caches missed.

        Up to one block of it is no miss: KV is shared in whole blocks.
        """
        return self.computed - self.new

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {**asdict(self), "again": self.again}


def rows_of(
    rows: Iterable[CallRow], scene: Scene, arm: Arm, *, run: int | None = None
) -> list[CallRow]:
    """Return the rows of one arm, of one run or of all."""
    return [row for row in rows if row.scene is scene and row.arm is arm and run in (None, row.run)]


def ttft_by_call(rows: Sequence[CallRow]) -> list[float]:
    """Return the median TTFT of every call over runs and takes, in ms, calls in order."""
    calls = sorted({row.call for row in rows})
    return [median(row.ttft_ms for row in rows if row.call == call) for call in calls]
