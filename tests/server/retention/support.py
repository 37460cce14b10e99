"""Small builders for the retention tests."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hypothesis import HealthCheck, settings

from turncache_server.retention.lineages import (
    Admission,
    ChainBlock,
    Effect,
    Limits,
    LineageTable,
)
from turncache_server.retention.policy import Deadline, Policy

#: For the state machines; a campaign sets the variable to a few thousand.
MACHINE = settings(
    max_examples=int(os.environ.get("TURNCACHE_TEST_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def hashes(text: str) -> list[bytes]:
    """Chain hashes of a prompt whose blocks hold one letter each."""
    return [text[: end + 1].encode() for end in range(len(text))]


def chain(text: str, first_block: int = 0, epoch: int = 1) -> list[ChainBlock]:
    """A chain over consecutive blocks."""
    return [ChainBlock(first_block + place, epoch, each) for place, each in enumerate(hashes(text))]


def table(num_blocks: int = 1000, policy: Policy | None = None, **limits: float) -> LineageTable:
    """A table whose budgets do not bind unless the test sets them."""
    bounds: dict[str, float] = {"retain_budget": 1.0, "tenant_budget": 1.0, **limits}
    return LineageTable(
        Limits(num_blocks=num_blocks, **bounds),  # type: ignore[arg-type]
        policy or Deadline(),
    )


def admit(
    lineages: LineageTable, session: str, text: str, *, now_s: float = 0, tenant: str | None = None
) -> Admission:
    """Let a call in."""
    return lineages.admit(session=session, tenant=tenant, hashes=hashes(text), now_s=now_s)


def finish(
    lineages: LineageTable,
    admission: Admission,
    blocks: Sequence[ChainBlock],
    *,
    now_s: float = 0,
    retain_s: float | None = None,
    expect_s: float | None = None,
    priority: int = 50,
    final: bool = False,
    compaction: bool = False,
    handover: bool = False,
    rest: ChainBlock | None = None,
) -> Effect:
    """End a call with the defaults of one that says nothing."""
    return lineages.finish(
        admission,
        blocks,
        retain_s=retain_s,
        expect_s=expect_s,
        priority=priority,
        final=final,
        compaction=compaction,
        handover=handover,
        now_s=now_s,
        rest=rest,
    )


def call(
    lineages: LineageTable,
    session: str,
    text: str,
    *,
    first_block: int = 0,
    now_s: float = 0,
    tenant: str | None = None,
    **ending: float | bool | None,
) -> Effect:
    """Admit a call and end it at the same moment; block k of the text is first_block + k."""
    admission = admit(lineages, session, text, now_s=now_s, tenant=tenant)
    return finish(
        lineages,
        admission,
        chain(text, first_block),
        now_s=now_s,
        **ending,  # type: ignore[arg-type]
    )


def wanted(lineages: LineageTable, num_blocks: int = 1000, epoch: int = 1) -> set[int]:
    """The blocks that the table wants at an epoch."""
    return {block_id for block_id in range(num_blocks) if lineages.wants(block_id, epoch)}
