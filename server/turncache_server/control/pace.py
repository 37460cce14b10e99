"""How much work a control thread may do: a flood must leave the interpreter to the engine."""

from __future__ import annotations

from typing import Final

#: Share of one core. The engine loop shares the interpreter's lock with the control thread.
SHARE: Final = 0.5
#: Work that may be done at once after a quiet time: some hundred of the longest peeks in use.
BURST_S: Final = 1.0


class Pace:
    """A token bucket of processor seconds. Pure: times come in, a rest comes out.

    Args:
        share: of a core, in the long run.
        burst_s: processor seconds at once.
    """

    def __init__(self, *, share: float = SHARE, burst_s: float = BURST_S) -> None:
        self._share = share
        self._burst_s = burst_s
        self._credit_s = burst_s
        self._at_s: float | None = None

    def spent(self, work_s: float, now_s: float) -> float:
        """Note work that has just been done; return how long to rest before the next.

        Args:
            work_s: processor seconds of it.
            now_s: monotonic time.
        """
        passed_s = 0.0 if self._at_s is None else max(0.0, now_s - self._at_s)
        self._at_s = now_s
        credit_s = min(self._burst_s, self._credit_s + passed_s * self._share) - work_s
        self._credit_s = credit_s
        return max(0.0, -credit_s / self._share)
