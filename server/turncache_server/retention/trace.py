"""The trace of what an engine saw: hashes, counts and times, never content.

A trace is JSON Lines. The first line of a file is its header, every other line a record with
a ``kind``. Unknown kinds and members are ignored; another schema is refused by its name.

Hashes are eight bytes of BLAKE2b of the engine's chain hash (or of the session's or tenant's
name) under a random key that is made at every start of an engine and never written. Equal
hashes of one trace are equal prefixes; nothing can be compared with another trace, or with
the hash of a text that somebody guesses.

A call's chain is written as what it adds: ``shared`` leading blocks end in the block
``after``, which an earlier line of the same file has, and ``blocks`` are the new ones.

Version history of :data:`SCHEMA`:

1. header, ``call``, ``speed``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeVar

from turncache.errors import UsageError

NAME: Final = "turncache-trace"
VERSION: Final = 1
SCHEMA: Final = f"{NAME}/{VERSION}"
#: Hexadecimal digits of a hash.
DIGITS: Final = 16

_RecordT = TypeVar("_RecordT", "TraceHeader", "TraceCall", "TraceSpeed")


class TraceError(UsageError):
    """Raised when a file is no trace that this version can read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What one file is.

    Attributes:
        trace: random name, new at every start of an engine; parts of one trace share it.
        part: number of the file in its trace, from 1.
        started_at: start of the trace, ISO 8601; all times are seconds since.
        mode: of the extension when the file was begun.
        side: ``prefill``, ``decode`` or ``single``.
        vllm_version: of the engine.
        block_size: tokens per block.
        num_blocks: blocks in the pool.
        block_bytes: bytes of a block's KV over all ranks, 0 when unknown.
        policy: that mode ``on`` would use, and its bounds.
        retain_budget: share of the pool.
        tenant_budget: share of the pool.
        retain_default_s: retention of a call that asks for none.
        retain_max_s: longest retention.
        host_gb: sizes of the simulated host tiers, in 10^9 bytes.
    """

    trace: str
    part: int = 1
    started_at: str = ""
    mode: str = ""
    side: str = "single"
    vllm_version: str = ""
    block_size: int
    num_blocks: int
    block_bytes: int = 0
    policy: str = ""
    retain_budget: float = 0.0
    tenant_budget: float = 0.0
    retain_default_s: float = 0.0
    retain_max_s: float = 0.0
    host_gb: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCall:
    """One call that has ended, in the order in which calls ended. Counts in tokens.

    Attributes:
        t: when it arrived, in seconds since the start of the trace.
        start: when it got its blocks.
        end: when it ended.
        session: hash of its session, None for an ordinary call.
        tenant: hash of its tenant.
        prompt: tokens of the prompt.
        output: tokens of the answer.
        local: found in the engine's own cache.
        returned: given by a peer.
        lost: of the session, computed before and again, by the engine's own record.
        reason: why, by that record; empty for an ordinary call.
        answered: it was answered, not aborted.
        retain_s: what the caller asked for, None for nothing.
        expect_s: when the caller expected to be back.
        priority: of the session within its tenant.
        final: nothing was to follow.
        compaction: it replaced what it continued.
        handover: another engine was to take its prompt.
        seen: that an earlier call had computed, whoever made it.
        again: of these, computed again.
        stock: found by the ghost's stock pool.
        retention: found by its pool in mode ``on``.
        double: found by its pool of twice the size.
        host: found with a host tier, in the order of the header's ``host_gb``.
        fate: why the pool in mode ``on`` lacks the first block that it lacks.
        from_answers: found by the stock pool and last computed as part of an answer.
        diverged_at: where it left its session's chain, None if it did not.
        rewritten: behind that place, tokens that the session's last prompt had as well.
        prompt_blocks: full blocks of its prompt.
        shared: leading blocks that an earlier line has.
        after: the last of these, empty for none.
        blocks: the other blocks' hashes, one behind the other.
    """

    t: float
    start: float
    end: float
    session: str | None = None
    tenant: str | None = None
    prompt: int
    output: int = 0
    local: int = 0
    returned: int = 0
    lost: int = 0
    reason: str = ""
    answered: bool = True
    retain_s: float | None = None
    expect_s: float | None = None
    priority: int = 50
    final: bool = False
    compaction: bool = False
    handover: bool = False
    seen: int = 0
    again: int = 0
    stock: int = 0
    retention: int = 0
    double: int = 0
    host: tuple[int, ...] = ()
    fate: str | None = None
    from_answers: int = 0
    diverged_at: int | None = None
    rewritten: int = 0
    prompt_blocks: int = 0
    shared: int = 0
    after: str = ""
    blocks: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSpeed:
    """How fast the engine computed prompts, from the start of the trace.

    Attributes:
        t: the time, in seconds since the start of the trace.
        prefill_tokens: tokens computed in large steps.
        prefill_s: what these steps took.
    """

    t: float
    prefill_tokens: int
    prefill_s: float


@dataclass(slots=True)
class Trace:
    """What one file holds.

    Attributes:
        header: its first line.
        calls: in the order of the file.
        speed: the last measurement, None without one.
        truncated: the last line was cut off and left out.
    """

    header: TraceHeader
    calls: list[TraceCall] = field(default_factory=list)
    speed: TraceSpeed | None = None
    truncated: bool = False

    def chains(self) -> Iterator[tuple[TraceCall, tuple[str, ...]]]:
        """Yield every call with the hashes of its whole chain.

        Raises:
            TraceError: a chain continues one that the file does not have.
        """
        parents: dict[str, str] = {}
        for call in self.calls:
            chain = _chain_to(call.after, call.shared, parents)
            for at in range(0, len(call.blocks), DIGITS):
                block = call.blocks[at : at + DIGITS]
                parents[block] = chain[-1] if chain else ""
                chain.append(block)
            yield call, tuple(chain)


def _chain_to(block: str, length: int, parents: Mapping[str, str]) -> list[str]:
    chain: list[str] = []
    while len(chain) < length:
        if block not in parents:
            raise TraceError(
                f"block {block!r}: a chain continues it, but no earlier line has it; give the "
                "whole file, from its header on"
            )
        chain.append(block)
        block = parents[block]
    chain.reverse()
    return chain


def to_line(record: TraceHeader | TraceCall | TraceSpeed) -> str:
    """Return a record as one line with its end; members at their default are left out."""
    kinds = {TraceHeader: "trace", TraceCall: "call", TraceSpeed: "speed"}
    out: dict[str, Any] = {"kind": kinds[type(record)]}
    if isinstance(record, TraceHeader):
        out["schema"] = SCHEMA
    defaults = {each.name: each.default for each in fields(record)}
    out |= {name: value for name, value in asdict(record).items() if value != defaults[name]}
    return json.dumps(out, separators=(",", ":")) + "\n"


def read_trace(lines: Iterable[str], *, name: str = "trace") -> Trace:
    """Read one file.

    Args:
        lines: with or without their ends. The last one may have been cut off, by a crash
            or because the engine is still writing.
        name: of the file, for messages.

    Raises:
        TraceError: no trace, one of another schema, or a line that cannot be read.
    """
    rest = enumerate(lines, 1)
    _, first = next(rest, (1, ""))
    trace = Trace(_read_header(first, name))
    pending: TraceError | None = None
    for number, line in rest:
        if pending is not None:
            raise pending
        if not line.strip():
            continue
        try:
            _add(trace, _object(line))
        except (ValueError, TypeError) as error:
            pending = TraceError(f"{name}, line {number}: no record of a {SCHEMA}: {error}")
    trace.truncated = pending is not None
    return trace


def _read_header(line: str, name: str) -> TraceHeader:
    try:
        head = _object(line)
        schema = head.get("schema")
    except ValueError as error:
        raise TraceError(f"{name}: no trace: its first line is no JSON object") from error
    if schema != SCHEMA:
        hint = ""
        if isinstance(schema, str) and schema.startswith(f"{NAME}/"):
            hint = "; it was written by another version of turncache"
        raise TraceError(f"{name}: schema {schema!r}, this version reads {SCHEMA}{hint}")
    try:
        return _record(TraceHeader, head)
    except (ValueError, TypeError) as error:
        raise TraceError(f"{name}: the header cannot be read: {error}") from error


def _add(trace: Trace, values: Mapping[str, Any]) -> None:
    if values.get("kind") == "call":
        trace.calls.append(_record(TraceCall, values))
    elif values.get("kind") == "speed":
        trace.speed = _record(TraceSpeed, values)


def _object(line: str) -> dict[str, Any]:
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError(f"{line[:40]!r}: expected a JSON object")  # noqa: TRY004 - a bad file
    return values


#: What a member may be, by its annotation.
_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "str": (str,),
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str | None": (str, type(None)),
    "int | None": (int, type(None)),
    "float | None": (int, float, type(None)),
    "tuple[float, ...]": (list,),
    "tuple[int, ...]": (list,),
}


def _record(kind: type[_RecordT], values: Mapping[str, Any]) -> _RecordT:
    """Build a record of the members that this version knows, checking their types."""
    known: dict[str, Any] = {}
    for each in fields(kind):
        if each.name not in values:
            continue
        value, allowed = values[each.name], _KINDS[str(each.type)]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ValueError(f"{each.name} is {value!r}, expected {each.type}")
        known[each.name] = tuple(value) if isinstance(value, list) else value
    if kind is TraceCall and len(known.get("blocks", "")) % DIGITS:
        raise ValueError("blocks do not come in whole hashes")
    return kind(**known)
