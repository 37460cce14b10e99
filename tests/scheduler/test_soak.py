"""Random agents on two schedulers that pull from each other: nothing is computed wrong."""

from __future__ import annotations

import pytest

from tests.builders import WrongKV
from tests.scheduler.twin import run


@pytest.mark.parametrize("seed", range(24))
def test_nothing_is_ever_computed_wrong(seed: int) -> None:
    """Aborts, preemptions, resets, late and lost transfers: every use finds what it expects."""
    run(seed)


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [("epoch-not-verified", 5), ("epoch-not-verified", 13)],
)
def test_a_rule_that_is_switched_off_is_noticed(mutant: str, seed: int) -> None:
    """Without a rule the same events end in wrong KV."""
    with pytest.raises(WrongKV):
        run(seed, mutant)
    run(seed)
