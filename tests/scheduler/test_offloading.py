"""Retention beside vLLM's own offloading connector: both in one ``MultiConnector``.

vLLM's scheduler side and worker side of offloading are real, merged into one configuration as
``turncache flags --merge`` does; the copies between GPU and host are of the model of memory,
and late.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.builders import BLOCK, Engine, World, tokens, world
from turncache.protocol import Reason

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def made() -> Iterator[World]:
    """A clock."""
    with world() as made:
        yield made


def beside_offloading(made: World, *, mode: str = "on", asynchronous: bool = False) -> Engine:
    """Make an engine of 40 blocks with a host tier of 400."""
    return Engine(
        made,
        connector="ClockedRetention",
        settings={"mode": mode},
        num_blocks=40,
        host_blocks=400,
        async_scheduling=asynchronous,
        max_model_len=150,
    )


@MODES
def test_what_the_host_brings_back_is_not_lost(asynchronous: bool, made: World) -> None:
    """Evicted from the GPU and loaded from the host: the text is right, and nothing was lost."""
    engine = beside_offloading(made, asynchronous=asynchronous)
    # Of an answer vLLM brings nothing to the host.
    history = engine.call("first", tokens(60), session="s", max_tokens=1, retain_s=0.0)
    engine.flood(120)
    engine.call("second", [*history, *tokens(10, start=7)], session="s", max_tokens=5)
    record = engine.record("second")
    assert record.local >= 60 // BLOCK * BLOCK, "from the host"
    assert (record.lost, record.reason) == (0, Reason.OK)
    assert engine.extension.ledger.in_order
    assert engine.extension.broken is None
    engine.assert_no_leak()


def test_what_is_retained_needs_no_host(made: World) -> None:
    """The session stays on the GPU while everything else goes to the host and back."""
    engine = beside_offloading(made)
    history = engine.call("first", tokens(60), session="s", max_tokens=9)
    engine.flood(120)
    assert engine.hit(history) == (60 + 9 - 1) // BLOCK * BLOCK
    engine.call("second", [*history, *tokens(10, start=7)], session="s", max_tokens=5)
    assert engine.record("second").lost == 0
    engine.assert_no_leak()


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_computed_wrong_beside_offloading(
    seed: int, asynchronous: bool, made: World
) -> None:
    """Agents and strangers in a pool that is always full, with copies that come late, aborts and
    switches of the mode: every block holds what its hash promises, and nothing stays behind.
    """
    draw = random.Random(seed)
    engine = beside_offloading(made, asynchronous=asynchronous)
    histories = {f"s{i}": tokens(30, start=40 * i) for i in range(4)}
    running: dict[str, object] = {}
    for number in range(120):
        made.now_s += draw.choice([0.01, 1.0, 30.0])
        session = draw.choice(sorted(histories))
        request = running.pop(session, None)
        if request is None or request.is_finished():  # type: ignore[attr-defined]
            if request is not None:
                histories[session] = list(request.all_token_ids)  # type: ignore[attr-defined]
            if len(histories[session]) > 100:
                histories[session] = tokens(20, start=number)
            histories[session] += tokens(draw.randint(1, 12), start=number)
            running[session] = engine.add(
                f"call-{number}",
                histories[session],
                max_tokens=draw.choice([1, 5]),
                session=session,
                retain_s=draw.choice([None, 0.0, 20.0]),
            )
        elif draw.random() < 0.1:
            engine.abort(request.request_id)  # type: ignore[attr-defined]
        else:
            running[session] = request
        if draw.random() < 0.2:
            engine.add(f"other-{number}", tokens(draw.randint(20, 90), start=3000 + 9 * number))
        for _ in range(draw.randint(1, 8)):
            engine.step()
        engine.check_free()
    engine.run()
    assert engine.extension.broken is None
    engine.assert_no_leak()
