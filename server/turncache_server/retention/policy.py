"""What a lineage is worth: when it comes back, and what it costs to compute again.

A policy only compares; who is in flight, handed over or prioritised is decided in
:mod:`turncache_server.retention.lineages`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import ClassVar, Final, Protocol

from turncache.errors import ConfigError
from turncache.spelling import none_of

#: Group of entry points in which other packages name their policies.
GROUP: Final = "turncache.policies"


class Candidate(Protocol):
    """What a policy may know of a lineage. Times are those of the caller's clock."""

    @property
    def wanted_blocks(self) -> int:
        """Blocks that the lineage still wants."""

    @property
    def finished_at_s(self) -> float:
        """When its latest call ended or its wait was announced."""

    @property
    def expected_at_s(self) -> float | None:
        """When it is expected back, None when nobody knows."""

    @property
    def retain_until_s(self) -> float:
        """Until when it is retained."""


class Policy(Protocol):
    """Orders lineages by value."""

    def value(self, lineage: Candidate, now_s: float) -> float:
        """Return the value of keeping the lineage at ``now_s``; higher stays longer."""


class Deadline:
    """The lineage whose retention ends first is worth least."""

    name: ClassVar[str] = "deadline"

    def value(self, lineage: Candidate, now_s: float) -> float:  # noqa: ARG002 - Policy
        """Return until when the lineage is retained."""
        return lineage.retain_until_s


class Cost:
    """Cost to compute a block again, over the time for which it must be kept.

    The cost of a block is linear in the tokens before it (attention) with a constant part
    (everything else), so it rises with the lineage's length. An overdue lineage is expected
    as much later as it has already waited. One without an expectation is expected after
    ``unknown_s`` more than that, as by the mean residual life of a Lomax distribution:
    whoever says nothing does not seem to be back sooner than who says when, and among those
    the longest silent goes first.

    Args:
        doubling_blocks: length at which attention costs as much as everything else.
        soonest_s: expectations below this are not told apart.
        unknown_s: the wait assumed of a lineage without an expectation that has just ended.
    """

    name: ClassVar[str] = "cost"

    def __init__(
        self,
        *,
        doubling_blocks: float = 2048.0,
        soonest_s: float = 1.0,
        unknown_s: float = 30.0,
    ) -> None:
        self._doubling_blocks = doubling_blocks
        self._soonest_s = soonest_s
        self._unknown_s = unknown_s

    def value(self, lineage: Candidate, now_s: float) -> float:
        """Return cost per block and second of keeping."""
        cost = 1.0 + lineage.wanted_blocks / self._doubling_blocks
        return cost / max(self._remaining_s(lineage, now_s), self._soonest_s)

    def _remaining_s(self, lineage: Candidate, now_s: float) -> float:
        expected_at_s = lineage.expected_at_s
        waited_s = now_s - lineage.finished_at_s
        if expected_at_s is None:
            return self._unknown_s + waited_s
        return expected_at_s - now_s if expected_at_s > now_s else waited_s


_POLICIES: Final[dict[str, type[Deadline | Cost]]] = {
    policy.name: policy for policy in (Deadline, Cost)
}
POLICY_NAMES: Final = tuple(sorted(_POLICIES))


def policy_names() -> tuple[str, ...]:
    """Return every name that the setting may have: ours, and those of installed packages."""
    return tuple(sorted({*POLICY_NAMES, *(entry.name for entry in entry_points(group=GROUP))}))


def policy_named(name: str) -> Policy:
    """Return the policy that a setting names: one of ours, or an entry point's.

    An entry point names a class or a function without arguments; what it makes is tried before
    it is trusted with a pool.

    Raises:
        ConfigError: an unknown name, one that two packages have, or a policy that fails.
    """
    if name in _POLICIES:
        return _POLICIES[name]()
    entries = tuple(entry_points(group=GROUP, name=name))
    if not entries:
        raise ConfigError("policy", none_of(name, policy_names()))
    if len(entries) > 1:
        where = ", ".join(sorted(entry.value for entry in entries))
        raise ConfigError("policy", f"{name!r} names several: {where}; uninstall all but one")
    try:
        policy: Policy = entries[0].load()()
        for candidate in _PROBES:
            _check_finite(policy.value(candidate, _PROBED_AT_S))
    except Exception as error:
        raise ConfigError(
            "policy",
            f"{name!r} ({entries[0].value}) failed: {type(error).__name__}: {error}",
        ) from error
    return policy


def _check_finite(value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"its value is {value!r}, expected a finite number")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """A lineage that a policy is tried with."""

    wanted_blocks: int = 100
    finished_at_s: float = 990.0
    expected_at_s: float | None = None
    retain_until_s: float = 1100.0


_PROBED_AT_S: Final = 1000.0
_PROBES: Final = (
    _Probe(),
    _Probe(expected_at_s=1010.0),
    _Probe(expected_at_s=995.0),
    _Probe(wanted_blocks=0, finished_at_s=1000.0, retain_until_s=1000.0),
)
