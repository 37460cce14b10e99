"""The circuit breaker of one engine. Pure: the clock is an argument.

States: *closed* (calls pass), *open* (calls go elsewhere until ``open_s`` have passed), and
after that closed on probation: one more failure opens it again. Events: a failure, a
success. Only what is the engine's fault is a failure (a connection that is refused or
breaks, an answer that does not come): an answer of any status, a 500 for a prompt that is
too long included, shows that the engine lives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Breaker:
    """Counts consecutive failures of one engine.

    Attributes:
        max_failures: consecutive failures that open the circuit.
        open_s: seconds until calls pass again.
    """

    max_failures: int
    open_s: float
    _failures: int = 0
    _opened_at_s: float | None = None

    def failed(self, now_s: float) -> None:
        """Note a failure of the engine."""
        self._failures += 1
        if self._failures >= self.max_failures:
            self._opened_at_s = now_s

    def succeeded(self) -> None:
        """Note an answer of the engine."""
        self._failures = 0
        self._opened_at_s = None

    def is_open(self, now_s: float) -> bool:
        """Tell whether calls should go elsewhere."""
        return self._opened_at_s is not None and now_s < self._opened_at_s + self.open_s
