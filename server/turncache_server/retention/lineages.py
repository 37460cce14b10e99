"""Sessions and their lineages: who wants which block until when."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from turncache_server.retention.policy import Policy


class ChainBlock(NamedTuple):
    block_id: int
    epoch: int
    hash: bytes


class Signal(enum.StrEnum):
    WAIT = "wait"
    RESUME = "resume"
    FINAL = "final"
    COMPACTION = "compaction"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    num_blocks: int
    retain_budget: float = 0.5
    tenant_budget: float = 0.25
    retain_max_s: float = 3600.0
    retain_default_s: float = 120.0
    handover_s: float = 30.0
    max_lineages: int = 8
    max_sessions: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    session: str
    tenant: str | None
    generation: int
    known_blocks: int
    diverged_at: int | None
    new_session: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    changed: tuple[int, ...] = ()
    clipped: str | None = None
    superseded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TableStats:
    sessions: int
    lineages: int
    wanted_blocks: int
    evicted_wanted_blocks_total: int
    superseded_total: int
    clipped_total: int


class LineageTable:
    def __init__(self, limits: Limits, policy: Policy) -> None:
        raise NotImplementedError

    def known_blocks(self, session: str, hashes: Sequence[bytes]) -> int:
        raise NotImplementedError

    def admit(
        self, *, session: str, tenant: str | None, hashes: Sequence[bytes], now_s: float
    ) -> Admission:
        raise NotImplementedError

    def finish(
        self,
        admission: Admission,
        chain: Sequence[ChainBlock],
        *,
        retain_s: float | None,
        expect_s: float | None,
        priority: int,
        final: bool,
        compaction: bool,
        handover: bool,
        now_s: float,
    ) -> Effect:
        raise NotImplementedError

    def cancel(self, admission: Admission, *, now_s: float) -> Effect:
        raise NotImplementedError

    def handed_over(self, tail_hash: bytes, *, now_s: float) -> Effect:
        raise NotImplementedError

    def signal(
        self, session: str, kind: Signal, *, expect_s: float | None, now_s: float
    ) -> Effect:
        raise NotImplementedError

    def expire(self, now_s: float) -> Effect:
        raise NotImplementedError

    def wants(self, block_id: int, epoch: int) -> bool:
        raise NotImplementedError

    def keeper(self, block_id: int) -> int | None:
        raise NotImplementedError

    def victims(self, now_s: float) -> list[int]:
        raise NotImplementedError

    def evicted(self, block_id: int) -> None:
        raise NotImplementedError

    def clear(self) -> Effect:
        raise NotImplementedError

    def stats(self) -> TableStats:
        raise NotImplementedError
