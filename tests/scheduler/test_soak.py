"""Random agents on two schedulers that pull from each other: nothing is computed wrong."""

from __future__ import annotations

import pytest

from tests.builders import WrongKV
from tests.scheduler.mutants import NoEpochInVerify, NoMark
from tests.scheduler.soak import Soak
from turncache_server.connector.source import Source

EVENTS = 600


def run(seed: int, mutant: type[Source] | None = None) -> None:
    """Run one seed to its end."""
    soak = Soak(seed, mutant=mutant)
    try:
        soak.run(EVENTS)
    finally:
        soak.world.close()


@pytest.mark.parametrize("seed", range(24))
def test_nothing_is_ever_computed_wrong(seed: int) -> None:
    """Aborts, preemptions, resets, late and lost transfers: every use finds what it expects."""
    run(seed)


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [(NoEpochInVerify, 5), (NoEpochInVerify, 13), (NoMark, 273), (NoMark, 1377)],
)
def test_a_source_that_breaks_a_rule_is_noticed(mutant: type[Source], seed: int) -> None:
    """With the epoch or the mark left out, the same events end in wrong KV."""
    with pytest.raises(WrongKV):
        run(seed, mutant)
    run(seed)
