"""Random agents on two schedulers that pull from each other: nothing is computed wrong."""

from __future__ import annotations

import pytest

from tests.scheduler.soak import Soak

EVENTS = 600


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_ever_computed_wrong(seed: int) -> None:
    """Aborts, preemptions, resets, late and lost transfers: every use finds what it expects."""
    soak = Soak(seed)
    try:
        soak.run(EVENTS)
    finally:
        soak.world.close()
