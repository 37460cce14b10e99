"""What a lineage is worth."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from turncache.errors import ConfigError
from turncache_server.retention.policy import Cost, Deadline, policy_named


@dataclass(frozen=True)
class Lineage:
    wanted_blocks: int = 100
    finished_at_s: float = 0
    expected_at_s: float | None = None
    retain_until_s: float = 100


def test_deadline_gives_up_first_what_ends_first() -> None:
    """Whatever it costs."""
    policy = Deadline()
    early, late = Lineage(wanted_blocks=9000, retain_until_s=10), Lineage(retain_until_s=20)
    assert policy.value(early, 5) < policy.value(late, 5)


def test_cost_gives_up_first_what_comes_back_last() -> None:
    """Of equal length."""
    soon, later = Lineage(expected_at_s=10), Lineage(expected_at_s=100)
    assert Cost().value(later, 5) < Cost().value(soon, 5)


def test_cost_gives_up_first_what_is_cheap_to_compute() -> None:
    """Of equal expectation: a block deep in a long chain costs more than one in a short."""
    short = Lineage(wanted_blocks=10, expected_at_s=50)
    long = Lineage(wanted_blocks=5000, expected_at_s=50)
    assert Cost().value(short, 5) < Cost().value(long, 5)


@pytest.mark.parametrize(
    ("expected_at_s", "later_s"), [(10.0, 40), (None, 70)], ids=["overdue", "never expected"]
)
def test_who_is_overdue_is_expected_as_much_later_as_it_has_waited(
    expected_at_s: float | None, later_s: float
) -> None:
    """After 40 s of waiting it is worth as much as one expected in 40 s; the silent wait more."""
    waited = Lineage(expected_at_s=expected_at_s)
    expected = Lineage(expected_at_s=40 + later_s)
    assert Cost(unknown_s=30).value(waited, 40) == Cost(unknown_s=30).value(expected, 40)


def test_of_two_that_say_nothing_the_longer_silent_goes_first() -> None:
    """Even when it is the longer one: as under the least recently used rule."""
    silent = Lineage(wanted_blocks=60, finished_at_s=0)
    fresh = Lineage(wanted_blocks=30, finished_at_s=15)
    assert Cost().value(silent, 20) < Cost().value(fresh, 20)


def test_a_policy_is_found_by_its_name() -> None:
    """An unknown one is refused with those that exist."""
    assert isinstance(policy_named("cost"), Cost)
    assert isinstance(policy_named("deadline"), Deadline)
    with pytest.raises(ConfigError, match="'lru': expected one of cost, deadline"):
        policy_named("lru")
