"""What ``make bench`` makes of reports: what must be shown, and against whom."""

from __future__ import annotations

import json
from typing import Any

from tests.perf.pays import Sweep, against_stock, figures_of
from tests.tools.bench.blocks import BOTH, blocks, reported
from turncache_tools.bench.arms import Arm, Hints, StockPair

PAIR = StockPair(prefill="p", decode="d", returning=True)
STOCK = Arm(name="bidirectional", what="", url="d", pair=PAIR, hints=Hints.SESSION)


def made(arm: Arm, *, on_ms: float, differ: int = 0, edited: bool = False) -> dict[str, Any]:
    """Return the JSON of a report in which an arm's first tokens take so long, off's 400 ms."""
    said = {arm.name: {"compared": 4, "different": differ, "edited_differs": edited}}
    report = reported(blocks(arm.name, on_ms=on_ms), arm, **said)
    read: dict[str, Any] = json.loads(json.dumps(report.to_dict()))
    return read


def test_what_must_be_shown_is_held_against_its_limit() -> None:
    """The last call's gain, off against off, and equal answers, after an edit as well."""
    sweep = Sweep(context=4000, miss_rate=1.0, least=3.5)
    good = figures_of(sweep, made(BOTH, on_ms=100.0))
    assert [each.ok for each in good] == [True, True, True]
    assert good[0].ratio is not None
    assert 3.8 < good[0].ratio < 4.0
    assert not figures_of(sweep, made(BOTH, on_ms=200.0))[0].ok
    assert not figures_of(sweep, made(BOTH, on_ms=100.0, differ=1))[2].ok
    assert not figures_of(sweep, made(BOTH, on_ms=100.0, edited=True))[2].ok


def test_stock_is_what_ours_is_held_against() -> None:
    """Stock's answers may differ, and ours must save as much waiting."""
    ours = Sweep(context=4000, miss_rate=1.0, least=1.0)
    stock = Sweep(context=4000, miss_rate=1.0, least=None, stock=True)
    theirs = figures_of(stock, made(STOCK, on_ms=150.0, edited=True))
    assert all(each.ok for each in theirs)
    assert theirs[2].value == 1.0
    (better,) = against_stock([*figures_of(ours, made(BOTH, on_ms=100.0)), *theirs])
    assert better.ok
    (worse,) = against_stock([*figures_of(ours, made(BOTH, on_ms=200.0)), *theirs])
    assert not worse.ok
