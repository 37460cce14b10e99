"""Random agents on two schedulers that pull from each other: nothing is computed wrong."""

from __future__ import annotations

import pytest

from tests.builders import WrongKV
from tests.scheduler.soak import Events
from tests.scheduler.twin import run


@pytest.mark.parametrize("seed", range(24))
def test_nothing_is_ever_computed_wrong(seed: int) -> None:
    """Aborts, preemptions, resets, late and lost transfers: every use finds what it expects."""
    run(seed)


@pytest.mark.parametrize("seed", range(8))
def test_stock_handovers_in_between_change_nothing(seed: int) -> None:
    """What they bring is used by nobody else, and every pool is whole again."""
    run(seed, stock=True)


def test_a_directory_that_is_late_silent_or_wrong_changes_nothing() -> None:
    """Whom it names is asked, what they say is verified, and nobody waits for it for ever."""
    events = Events()
    for seed in range(8):
        events.add(run(seed, finding=True))
    assert events.finds > 100
    assert events.found > 20


def test_lost_prompts_that_are_computed_again_change_nothing() -> None:
    """Whoever the router names is peeked at and verified, and nobody waits for ever."""
    events = Events()
    for seed in range(8):
        events.add(run(seed, repeating=True))
    assert events.waits > 50
    assert events.helped > 10


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [
        ("rule-1-no-mark", 216),
        ("rule-4-abandoned-blocks-free", 68),
        ("rule-5-nothing-verified", 0),
        ("epoch-not-verified", 5),
        ("epoch-not-verified", 13),
    ],
)
def test_a_rule_that_is_switched_off_ends_in_wrong_kv(mutant: str, seed: int) -> None:
    """Each rule of the verified pull that keeps content right, by events that need it."""
    with pytest.raises(WrongKV):
        run(seed, mutant)
    run(seed)


@pytest.mark.parametrize(
    ("mutant", "seed"), [("rule-2-failed-reads-again", 12), ("rule-5-abort-forgets", 3)]
)
def test_a_rule_that_is_switched_off_ends_in_a_stuck_request(mutant: str, seed: int) -> None:
    """Likewise for what keeps requests and blocks from being parked for ever."""
    with pytest.raises(AssertionError, match="is stuck"):
        run(seed, mutant)
    run(seed)
