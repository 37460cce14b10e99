"""How large the demo is: what is asked for, cut down to what this machine can do in time. Pure.

The demo promises a time. What it computes is fixed by the task (calls, tools, arms), so on a
slow machine first the other sessions' traffic gets lighter, in the waits for quick tools before
those for slow ones, and then the texts get shorter; both are said.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from turncache_tools.demo.script import NUM_TAKES, last_steps

BLOCK_SIZE: Final = 32
#: Requests of the other sessions, one at a time: short, so that their attention costs little,
#: and two at once would set both engines of a pair against each other on a few cores.
FLOOD_TOKENS: Final = 320
FLOOD_IN_FLIGHT: Final = 1
#: Beyond this many cores so small a model gains nothing.
_MOST_CORES: Final = 4
#: Tokens that the chat template adds to the first prompt, and to each answer with its tool
#: result, both rounded up.
_FIRST_TEMPLATE_TOKENS: Final = 16
_TEMPLATE_TOKENS: Final = 11
_SLACK_TOKENS: Final = 32
#: Shares of the session that the least recently used policy loses at the end. A short session
#: must lose more of it, because what every call costs anyway hides the difference.
_SHARES: Final = (1.0, 0.85, 0.7, 0.55)
_SHORT_TOKENS: Final = 3000
_LEAST_SHARE_SHORT: Final = 0.7
_SCALES: Final = (1.0, 0.85, 0.7, 0.6, 0.5)
#: What the others bring in a short wait, relative to a long one.
_SHORT_WAITS: Final = (1.0, 1 / 3, 1 / 6)
#: Costs that no size changes: the arms' warm-up calls and the last act's prefills.
_LAST_ACT_TOKENS: Final = 4200
#: Template, tokenizer, HTTP and the step of at least one block, in generated tokens' time.
_CALL_TOKENS: Final = 3
#: What the second leg adds to a request of the others' on a pair.
_HAND_OVER_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Lengths in tokens, and the traffic of the other sessions.

    Attributes:
        num_calls: calls of the agent.
        first_tokens: first prompt, without the template.
        result_tokens: one tool result.
        answer_tokens: longest answer.
        lost_share: the other sessions bring so much in a long wait that the least recently
            used policy loses this share of the last prompt; 1 turns the whole pool over.
        short_wait: what they bring in a short wait, relative to a long one.
        scale: lengths relative to what was asked for.
    """

    num_calls: int
    first_tokens: int
    result_tokens: int
    answer_tokens: int
    lost_share: float = 1.0
    short_wait: float = 1.0
    scale: float = 1.0

    @property
    def last_prompt_tokens(self) -> int:
        """The longest prompt, as far as it can be told beforehand."""
        grown = self.result_tokens + self.answer_tokens + _TEMPLATE_TOKENS
        return self.first_tokens + _FIRST_TEMPLATE_TOKENS + (self.num_calls - 1) * grown

    @property
    def max_model_len(self) -> int:
        """Longest sequence that the engines must take."""
        longest = self.last_prompt_tokens + self.answer_tokens + _SLACK_TOKENS
        return -(-longest // BLOCK_SIZE) * BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """Blocks of every pool: one whole session, the others' requests in flight, the null block.

        Small on purpose: what counts is the pool relative to what passes through it.
        """
        in_flight = FLOOD_IN_FLIGHT * (FLOOD_TOKENS // BLOCK_SIZE + 2)
        return self.max_model_len // BLOCK_SIZE + in_flight + 1

    @property
    def flood_waits(self) -> tuple[int, ...]:
        """Requests of other sessions in each wait; at least one."""
        kept = (1 - self.lost_share) * self.last_prompt_tokens
        longest = math.ceil((self.pool_tokens - kept) / FLOOD_TOKENS)
        steps = last_steps(self.num_calls)
        short = max(1, round(self.short_wait * longest))
        return tuple(longest if step.is_long else short for step in steps)

    @property
    def pool_tokens(self) -> int:
        """Tokens that a pool holds."""
        return (self.num_blocks - 1) * BLOCK_SIZE

    def scaled(self, scale: float) -> Sizes:
        """Return sizes with lengths shortened to ``scale``."""
        return replace(
            self,
            first_tokens=round(self.first_tokens * scale),
            result_tokens=round(self.result_tokens * scale),
            # Half a block: a shorter answer rarely fills the one that it begins in, and then
            # nothing of it can be returned.
            answer_tokens=max(
                min(self.answer_tokens, BLOCK_SIZE // 2), round(self.answer_tokens * scale)
            ),
            scale=scale,
        )


FULL: Final = Sizes(num_calls=12, first_tokens=1450, result_tokens=150, answer_tokens=20)
QUICK: Final = Sizes(num_calls=5, first_tokens=700, result_tokens=90, answer_tokens=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How fast one engine of this machine is.

    Attributes:
        token_s: seconds to prefill a token, without attention.
        attention_s: seconds more per token and token before it.
        decode_s: seconds to generate a token.
    """

    token_s: float
    attention_s: float
    decode_s: float

    def prefill_s(self, start: int, end: int) -> float:
        """Return the seconds to prefill the tokens from ``start`` to ``end``."""
        return self.token_s * (end - start) + self.attention_s * (end**2 - start**2) / 2

    def on_cores(self, num_cores: int) -> Speed:
        """Return the speed of an engine with more cores; each adds three quarters of one."""
        gain = 1 + 0.75 * (min(num_cores, _MOST_CORES) - 1)
        return Speed(
            token_s=self.token_s / gain,
            attention_s=self.attention_s / gain,
            decode_s=self.decode_s / gain,
        )


#: SmolLM2-135M: 106 M weights in matrix products per token, 30 layers of 576.
_GFLOP_PER_TOKEN: Final = 0.212
_GFLOP_PER_PAIR: Final = 4 * 576 * 30 / 1e9
#: Measured with vLLM 0.32 over minutes: share of a plain matrix product's best speed that its
#: prefill reaches in the products and in attention, and of a plain read's while it generates.
_PRODUCT_SHARE: Final = 0.7
_ATTENTION_SHARE: Final = 0.4
_READ_SHARE: Final = 0.3
_WEIGHTS_GB: Final = 0.54


def guess_speed(*, gflop_per_s: float, gb_per_s: float) -> Speed:
    """Guess one core's speed from a plain matrix product and a plain read of memory."""
    return Speed(
        token_s=_GFLOP_PER_TOKEN / (gflop_per_s * _PRODUCT_SHARE),
        attention_s=_GFLOP_PER_PAIR / (gflop_per_s * _ATTENTION_SHARE),
        decode_s=_WEIGHTS_GB / (gb_per_s * _READ_SHARE),
    )


def fitted_speed(short: tuple[int, float], long: tuple[int, float], *, decode_s: float) -> Speed:
    """Return the speed behind two timed prefills, given as (tokens, seconds).

    Noise can make either part negative: it counts as 0 then.
    """
    (n, s), (m, t) = short, long
    attention_s = max(0.0, 2 * (t / m - s / n) / (m - n))
    token_s = max(0.0, s / n - attention_s * n / 2)
    return Speed(token_s=token_s, attention_s=attention_s, decode_s=decode_s)


def arm_s(sizes: Sizes, speed: Speed, *, reuses: bool) -> float:
    """Estimate the seconds of one arm: calls, and the others' traffic between them."""
    flood_s = sum(sizes.flood_waits) * speed.prefill_s(0, FLOOD_TOKENS)
    answers_s = sizes.num_calls * (sizes.answer_tokens + _CALL_TOKENS) * speed.decode_s
    return flood_s + answers_s + _prefills_s(sizes, speed, reuses=reuses)


def takes_s(sizes: Sizes, speed: Speed) -> float:
    """Estimate the seconds of the further takes of the last call, in one off and one on arm."""
    others_s = sizes.flood_waits[-1] * speed.prefill_s(0, FLOOD_TOKENS)
    answer_s = (sizes.answer_tokens + _CALL_TOKENS) * speed.decode_s
    prefills_s = sum(_later_prefills_s(sizes, speed, reuses=reuses)[-1] for reuses in (False, True))
    return (NUM_TAKES - 1) * (2 * (others_s + answer_s) + prefills_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arms:
    """How many arms run, and what surrounds them.

    Attributes:
        num_off: arms that lose the session in the waits.
        num_on: arms that keep it.
        num_pair: arms of either kind on a pair.
        num_repeated: off and on arms, counted by two, that make their last call several times.
        around_s: warm-ups, probes, and memory that comes back slowly after the engines' start.
    """

    num_off: int
    num_on: int
    num_pair: int
    num_repeated: int
    around_s: float


WHOLE: Final = Arms(num_off=2, num_on=3, num_pair=3, num_repeated=1, around_s=60.0)
PAIR_ALONE: Final = Arms(num_off=1, num_on=2, num_pair=3, num_repeated=0, around_s=25.0)


def _prefills_s(sizes: Sizes, speed: Speed, *, reuses: bool) -> float:
    first = speed.prefill_s(0, sizes.first_tokens + _FIRST_TEMPLATE_TOKENS)
    return first + sum(_later_prefills_s(sizes, speed, reuses=reuses))


def _later_prefills_s(sizes: Sizes, speed: Speed, *, reuses: bool) -> list[float]:
    """Return the seconds of every prefill but the first."""
    grown = sizes.result_tokens + sizes.answer_tokens + _TEMPLATE_TOKENS
    length = sizes.first_tokens + _FIRST_TEMPLATE_TOKENS
    found = []
    for requests in sizes.flood_waits:
        kept = length
        if not reuses:
            # The others first replace what is older than the session, then its tail.
            older = sizes.pool_tokens - length
            lost = requests * FLOOD_TOKENS - older
            kept = length - min(length, max(0, lost))
        length += grown
        found.append(speed.prefill_s(kept, length))
    return found


def demo_s(
    sizes: Sizes,
    speed: Speed,
    *,
    num_cores: int,
    num_runs: int,
    start_s: float,
    arms: Arms = WHOLE,
) -> float:
    """Estimate the seconds of the whole demo.

    Args:
        sizes: what is to run.
        speed: of one core.
        num_cores: cores of this machine; every engine uses all, because they take turns.
        num_runs: how often every arm runs.
        start_s: seconds to start all engines.
        arms: which arms run.
    """
    shared = speed.on_cores(num_cores)
    off, on = arm_s(sizes, shared, reuses=False), arm_s(sizes, shared, reuses=True)
    hand_overs_s = arms.num_pair * sum(sizes.flood_waits) * _HAND_OVER_S
    last_act = _LAST_ACT_TOKENS * shared.prefill_s(0, 1000) / 1000
    repeated_s = arms.num_repeated * takes_s(sizes, shared)
    arms_s = num_runs * (arms.num_off * off + arms.num_on * on + hand_overs_s + repeated_s)
    return start_s + arms.around_s + arms_s + last_act


def candidates(asked: Sizes) -> Iterator[Sizes]:
    """Yield what may run, the most wanted first."""
    for scale in _SCALES:
        scaled = asked if scale == 1.0 else asked.scaled(scale)
        traffic = _traffic(scaled)
        # Shorter texts are for a machine that is too slow for the lightest traffic.
        for short_wait, share in traffic if scale == 1.0 else traffic[-1:]:
            yield replace(scaled, short_wait=short_wait, lost_share=share)


def _traffic(sizes: Sizes) -> tuple[tuple[float, float], ...]:
    """Return what the others may bring to these lengths, the heaviest first.

    Pairs of what a short wait brings relative to a long one, and the share that is lost in a
    long one. The short waits give way first: what the demo shows is in the long ones.
    """
    short = sizes.last_prompt_tokens < _SHORT_TOKENS
    shares = tuple(share for share in _SHARES if not short or share >= _LEAST_SHARE_SHORT)
    return (
        *((short_wait, shares[0]) for short_wait in _SHORT_WAITS[:-1]),
        *((_SHORT_WAITS[-1], share) for share in shares),
    )


def choose(
    asked: Sizes,
    speed: Speed,
    *,
    num_cores: int,
    num_runs: int,
    start_s: float,
    limit_s: float,
    arms: Arms = WHOLE,
) -> Sizes:
    """Return the most wanted sizes that fit into ``limit_s``, else the smallest."""
    chosen = asked
    for chosen in candidates(asked):
        needed_s = demo_s(
            chosen, speed, num_cores=num_cores, num_runs=num_runs, start_s=start_s, arms=arms
        )
        if needed_s <= limit_s:
            return chosen
    return chosen


def can_be_lighter(sizes: Sizes) -> bool:
    """Say whether the others could bring less to these lengths."""
    return (sizes.short_wait, sizes.lost_share) != _traffic(sizes)[-1]


def lighter(
    sizes: Sizes,
    speed: Speed,
    *,
    num_off: int,
    num_on: int,
    limit_s: float,
    num_repeated: int = 0,
) -> Sizes:
    """Return ``sizes`` with the heaviest traffic whose arms fit into ``limit_s``.

    Args:
        sizes: what was chosen; its lengths stay, because the pool is already made.
        speed: measured on the engine that does the prefill.
        num_off: arms that lose the session in every wait.
        num_on: arms that keep it.
        limit_s: seconds left for these arms.
        num_repeated: off and on arms, counted by two, that make their last call several times.
    """
    traffic = _traffic(sizes)
    first = traffic.index((sizes.short_wait, sizes.lost_share))
    for short_wait, share in traffic[first:]:
        sizes = replace(sizes, short_wait=short_wait, lost_share=share)
        needed_s = num_off * arm_s(sizes, speed, reuses=False)
        needed_s += num_on * arm_s(sizes, speed, reuses=True)
        needed_s += num_repeated * takes_s(sizes, speed)
        if needed_s <= limit_s:
            break
    return sizes
