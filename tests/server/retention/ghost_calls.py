"""Builders of the ghost's tests: calls as an engine would write them down."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st

from tests.server.retention.support import hashes
from turncache_server.retention.events import Arrived, Ended, Started, Ticked
from turncache_server.retention.ghost import Ghost, GhostSpec, ObservedCall
from turncache_server.retention.values import Limits

BLOCK = 4

#: Prompts that often continue, share and leave each other, one letter a block.
TEXTS = st.text(alphabet="ab", min_size=1, max_size=7).map(lambda tail: "sy" + tail)


def spec(num_blocks: int = 20, **changes: Any) -> GhostSpec:
    """What is simulated, with budgets that do not bind unless the test sets them."""
    limits = {"retain_budget": 1.0, "tenant_budget": 1.0, **changes.pop("limits", {})}
    values: dict[str, Any] = {
        "limits": Limits(num_blocks=num_blocks, **limits),
        "policy": "deadline",
        "block_size": BLOCK,
        **changes,
    }
    return GhostSpec(**values)


def arrived(request: str, text: str, *, session: str | None = None, now_s: float = 0.0) -> Arrived:
    """A call whose prompt has one full block a letter, and one token more."""
    chain = tuple(hashes(text))
    return Arrived(request, now_s, len(text) * BLOCK + 1, chain, session, None)


def ended(
    request: str, text: str, answer: str = "", *, now_s: float = 0.0, **changes: Any
) -> Ended:
    """The end of a call whose answer fills one block a letter."""
    chain = tuple(hashes(text + answer))
    values: dict[str, Any] = {
        "tokens": len(chain) * BLOCK + 2,
        "num_blocks": len(chain) + 1,
        "complete": len(chain),
        "more_hashes": chain[len(text) :],
        "answered": True,
        **changes,
    }
    return Ended(request=request, now_s=now_s, **values)


def serve(
    ghost: Ghost,
    text: str,
    answer: str = "",
    *,
    session: str | None = None,
    now_s: float = 0.0,
    local: int = 0,
    **changes: Any,
) -> ObservedCall:
    """Let the ghost follow one call from its arrival to its end."""
    ghost.take(arrived("r", text, session=session, now_s=now_s))
    ghost.take(Started("r", now_s, local))
    ghost.take(Ticked(now_s, 0, 0.0))
    call = ghost.take(ended("r", text, answer, now_s=now_s, **changes))
    ghost.take(Ticked(now_s, 0, 0.0))
    assert call is not None
    return call


def flood(ghost: Ghost, num_blocks: int, *, length: int = 4) -> None:
    """Let ordinary calls pass through the pools."""
    for number in range(-(-num_blocks // length)):
        ghost.totals["floods"] += 1
        letter = chr(0x4E00 + ghost.totals["floods"])
        serve(ghost, letter * length, now_s=float(number) * 0)
