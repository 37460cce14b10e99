"""Two routers that share nothing, in front of the same engines."""

from __future__ import annotations

import pytest

from tests.perf.bench_replicas import Load, measure

pytestmark = pytest.mark.anyio


async def test_replicas_place_alike_and_find_the_source() -> None:
    """Without a word between them: whichever gets a call names the engine that answered last."""
    counts = await measure(Load(num_calls=100, num_sessions=12, to_first=0.8, refused=0))
    assert counts.num_sessions == counts.num_agreed == 12
    assert counts.num_changed > 20
    assert counts.num_continued > 80
    assert (counts.num_moved, counts.num_unknown, counts.lost_tokens) == (0, 0, 0)


async def test_an_answer_from_elsewhere_is_found_by_the_other_replica() -> None:
    """Whoever does not know a session, or sees that it is behind, names two engines that may."""
    counts = await measure(Load(num_calls=50, num_sessions=4, to_first=0.5, refused=0.5))
    assert counts.agreement == 1.0
    assert counts.num_moved > 10
    assert counts.num_changed > 10
    assert (counts.num_unknown, counts.lost_tokens) == (0, 0)
