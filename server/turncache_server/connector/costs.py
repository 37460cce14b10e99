"""What computing and pulling cost on this engine, as measured. Pure; owner of the measurements.

*Computing* is modelled as seconds per token plus seconds per token and token before it
(attention), fitted to the steps that prefilled. *Pulling* is a latency plus seconds per
token, fitted to the pulls that were verified; the first one from each start of a peer is
left out, because connections are made under it. Both fits forget slowly, so that they follow
a machine whose load changes.

A pull that is expected to take longer than computing is not made, except now and then, so
that a peer that has become quicker is found out. A pull may hold its request up for a tenth
of what computing would take, but for no less than several times what pulls have needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from turncache_server.cost_profile import CostProfile

#: What one measurement is worth after the next.
_DECAY: Final = 0.97
#: Measurements without which nothing is predicted.
_ENOUGH: Final = 4
#: Sizes of steps and pulls that a profile stands for: enough of them, and no larger than real
#: ones, which would hardly change what large ones have said.
_SEED_TOKENS: Final = (256, 512, 1024, 2048)
#: A step below this many prefill tokens says more about the host than about computing.
LEAST_STEP_TOKENS: Final = 64
#: So many pulls are refused as dearer before one is made to measure again.
_TRY_AGAIN: Final = 16
_DEADLINE_SHARE: Final = 0.1
_DEADLINE_PULLS: Final = 4.0
#: Scheduling and polling go by steps, which a busy machine may hold up for this long.
_LEAST_DEADLINE_S: Final = 0.25
#: Before anything was measured: no transport that we know needs as long.
_UNKNOWN_DEADLINE_S: Final = 1.0
_UNKNOWN_TOKEN_S: Final = 0.001


@dataclass(slots=True)
class Fit:
    """Least squares of seconds over two costs that are not negative, with forgetting."""

    _xx: float = 0.0
    _xy: float = 0.0
    _yy: float = 0.0
    _xt: float = 0.0
    _yt: float = 0.0
    num: int = 0

    def add(self, x: float, y: float, seconds: float) -> None:
        """Take one measurement of ``x`` and ``y`` units."""
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y
        self._yy = self._yy * _DECAY + y * y
        self._xt = self._xt * _DECAY + x * seconds
        self._yt = self._yt * _DECAY + y * seconds
        self.num += 1

    @property
    def costs(self) -> tuple[float, float]:
        """Seconds per unit of ``x`` and of ``y``."""
        det = self._xx * self._yy - self._xy * self._xy
        # Measurements of one shape only: the line through them has no second cost.
        if det > 1e-9 * self._xx * self._yy:
            a = (self._xt * self._yy - self._yt * self._xy) / det
            b = (self._yt * self._xx - self._xt * self._xy) / det
            if a >= 0 and b >= 0:
                return a, b
            if a < 0 and self._yy:
                return 0.0, max(0.0, self._yt / self._yy)
        return (max(0.0, self._xt / self._xx), 0.0) if self._xx else (0.0, 0.0)


@dataclass(slots=True)
class PullCosts:
    """Measured costs of one engine.

    Attributes:
        may_compute: computing is a choice. On a decode engine it is not: a prompt computed
            there holds up every stream.
    """

    may_compute: bool = True
    _compute: Fit = field(default_factory=Fit)
    _pull: Fit = field(default_factory=Fit)
    _warm: set[str] = field(default_factory=set)
    _num_refused: int = 0

    def seed(self, profile: CostProfile) -> None:
        """Begin with what was measured before; own measurements replace it bit by bit."""
        for tokens in _SEED_TOKENS:
            pairs = profile.pairs(0, tokens)
            self._compute.add(float(tokens), pairs, profile.compute_s(0, tokens))
            if profile.pulls:
                self._pull.add(1.0, float(tokens), profile.pull_s(tokens))

    # --- measuring ------------------------------------------------------------------------

    def computed(self, tokens: int, pairs: float, seconds: float) -> None:
        """Take a step that prefilled.

        Args:
            tokens: prefill tokens.
            pairs: sum over them of the tokens before each.
            seconds: from its start to its end.
        """
        if tokens >= LEAST_STEP_TOKENS and seconds > 0:
            self._compute.add(float(tokens), pairs, seconds)

    def pulled(self, start_id: str, tokens: int, seconds: float) -> None:
        """Take a verified pull from one start of a peer."""
        if start_id not in self._warm:
            self._warm.add(start_id)
        elif seconds > 0:
            self._pull.add(1.0, float(tokens), seconds)

    # --- deciding ---------------------------------------------------------------------------

    def compute_s(self, start: int, tokens: int) -> float | None:
        """Predict the seconds to compute ``tokens`` after ``start``; None before it is known."""
        if self._compute.num < _ENOUGH:
            return None
        token_s, pair_s = self._compute.costs
        return token_s * tokens + pair_s * tokens * (start + tokens / 2)

    def pull_s(self, tokens: int) -> float | None:
        """Predict the seconds to pull ``tokens``; None before it is known."""
        if self._pull.num < _ENOUGH:
            return None
        latency_s, token_s = self._pull.costs
        return latency_s + token_s * tokens

    def is_dearer(self, start: int, tokens: int) -> bool:
        """Say whether computing ``tokens`` after ``start`` is to be preferred to pulling them."""
        compute_s, pull_s = self.compute_s(start, tokens), self.pull_s(tokens)
        if not self.may_compute or compute_s is None or pull_s is None or pull_s <= compute_s:
            return False
        self._num_refused += 1
        return self._num_refused % _TRY_AGAIN != 0

    def deadline_s(self, start: int, tokens: int) -> float:
        """Return how long a pull of ``tokens`` after ``start`` may take."""
        compute_s, pull_s = self.compute_s(start, tokens), self.pull_s(tokens)
        if compute_s is None or pull_s is None:
            return _UNKNOWN_DEADLINE_S + _UNKNOWN_TOKEN_S * (start + tokens)
        wanted_s = max(_DEADLINE_SHARE * compute_s, _DEADLINE_PULLS * pull_s)
        longest_s = compute_s if self.may_compute else wanted_s
        return max(_LEAST_DEADLINE_S, min(wanted_s, longest_s))

    def stats(self) -> dict[str, float]:
        """Return what is known, for people; 0 for what is not."""
        token_s, pair_s = self._compute.costs if self._compute.num >= _ENOUGH else (0.0, 0.0)
        latency_s, pull_token_s = self._pull.costs if self._pull.num >= _ENOUGH else (0.0, 0.0)
        return {
            "compute_1000_tokens_s": 1000 * token_s + 500_000 * pair_s,
            "pull_1000_tokens_s": 1000 * pull_token_s,
            "pull_latency_s": latency_s,
        }


def prefill_work(scheduler_output: Any) -> tuple[int, float]:
    """Return (prefill tokens, token pairs) of a scheduled step; (0, 0) for one that decodes.

    A step with so few tokens that it cannot be measured is not looked at: that is every
    step while nothing is prefilled.
    """
    counts = scheduler_output.num_scheduled_tokens
    if scheduler_output.total_num_scheduled_tokens - len(counts) < LEAST_STEP_TOKENS:
        return 0, 0.0
    tokens, pairs = 0, 0.0
    cached = scheduler_output.scheduled_cached_reqs
    starts = [(new.req_id, new.num_computed_tokens) for new in scheduler_output.scheduled_new_reqs]
    starts += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, start in starts:
        count = counts[request_id]
        if count > 1:
            tokens += count
            pairs += count * (start + count / 2)
    return tokens, pairs
