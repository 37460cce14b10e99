"""Readers of recorded workloads: weka, Mooncake, aiperf, and traces of mode observe. Pure.

None of them holds text: what is read is how long prompts and answers were, what of a prompt
was the previous one's, and the waits between.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from turncache.errors import UsageError
from turncache_server.retention.trace import SCHEMA, read_trace
from turncache_tools.bench.workload import AgentSpec, CallSpec, Workload

#: Tokens of a block in a Mooncake trace, and in aiperf's, which follows it.
_MOONCAKE_BLOCK: Final = 512
#: How a compact weka trace says that an answer was for a person.
_END_TURN: Final = 2
_MOST_CALLS: Final = 1_000_000

_Number = int | float


class _Bad(ValueError):
    """One line is not what its format says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """One recorded call.

    Attributes:
        prompt: its tokens.
        answer: likewise.
        same: leading tokens that the session's previous prompt and answer had as well, None
            where all that can be said is that nothing was rewritten.
        wait_s: since the answer before.
        by_user: that answer was for a person, who called again.
    """

    prompt: int
    answer: int
    same: int | None = None
    wait_s: float = 0.0
    spawned: tuple[AgentSpec, ...] = ()
    by_user: bool = False


def read_workload(text: str, *, name: str) -> Workload:
    """Read a recorded workload; the format is recognised by its first record.

    Args:
        text: the whole file.
        name: of the file, for messages.

    Raises:
        UsageError: a format that is none of ours, or a record that cannot be read; names the
            line and what was expected.
    """
    first = _first_object(text, name)
    if first.get("schema") == SCHEMA or str(first.get("schema", "")).startswith("turncache-trace"):
        return _observed(text, name)
    if "requests" in first:
        return _weka(text, name, _weka_raw)
    if "r" in first and "bs" in first:
        return _weka(text, name, _weka_compact)
    if "session_id" in first and "input_length" in first:
        return _aiperf(text, name)
    if "timestamp" in first and "hash_ids" in first:
        return _mooncake(text, name)
    raise UsageError(
        f"{name}: no workload that is known here: expected a weka trace (requests, or r and bs), "
        "a Mooncake trace (timestamp, hash_ids), an aiperf one (session_id, input_length) or a "
        f"trace of mode observe ({SCHEMA}); its first record has {', '.join(sorted(first)[:8])}"
    )


def _first_object(text: str, name: str) -> dict[str, Any]:
    for candidate in (text.lstrip().split("\n", 1)[0], text):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise UsageError(
        f"{name}: no workload: its first record is no JSON object; expected a trace of weka, "
        "Mooncake, aiperf or of mode observe"
    )


def _records(text: str, name: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a file of JSON Lines, or of one JSON object, with line numbers."""
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, dict):
        return [(1, whole)]
    out = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{name}, line {number}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise UsageError(f"{name}, line {number}: expected a JSON object")
        out.append((number, found))
    return out


def _at(record: Mapping[str, Any], member: str, *, least: float = 0) -> float:
    return _number(record.get(member), member, least=least)


def _number(value: object, member: str, *, least: float = 0) -> float:
    if isinstance(value, bool) or not isinstance(value, _Number) or not least <= value < 1e15:
        raise _Bad(f"{member} is {value!r}, expected a number from {least:g}")
    return float(value)


def _list(value: object, member: str) -> list[Any]:
    if not isinstance(value, list):
        raise _Bad(f"{member} is {str(value)[:40]!r}, expected a list")
    return value


def _guarded(name: str, number: int, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except _Bad as error:
        raise UsageError(f"{name}, line {number}: {error}") from error


def _common(first: Sequence[object], second: Sequence[object]) -> int:
    at = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        at += 1
    return at


def _agent(name: str, seen: Sequence[_Seen], shared: int, starts_s: float = 0.0) -> AgentSpec:
    """Turn recorded lengths into what each call adds to the history, and what it keeps."""
    calls: list[CallSpec] = []
    history = shared
    for each in seen:
        keep = None
        start = history
        if calls and each.same is not None and each.same < history - each.answer:
            start = keep = max(shared, min(each.same, each.prompt))
        if calls and each.prompt <= start:
            # Shorter than what it continues: the rest was dropped.
            start = keep = max(min(shared, each.prompt - 1), min(each.same or 0, each.prompt - 1))
        new = max(1, each.prompt - start)
        calls.append(
            CallSpec(
                new=new,
                answer=max(1, each.answer),
                wait_s=each.wait_s if calls else 0.0,
                keep=keep,
                spawned=each.spawned,
                by_user=each.by_user if calls else False,
            )
        )
        history = start + new + max(1, each.answer)
    return AgentSpec(name=name, calls=tuple(calls), starts_s=starts_s)


# --- weka: one object per session -------------------------------------------------------------


def _weka(
    text: str, name: str, read: Callable[[dict[str, Any], int], tuple[AgentSpec, int]]
) -> Workload:
    found: list[tuple[AgentSpec, int]] = []
    for number, record in _records(text, name):
        try:
            found.append(read(record, number))
        except _Bad as error:
            raise UsageError(f"{name}, line {number}: {error}") from error
    shared = min(size for _, size in found)
    return _named("weka", name, shared, [agent for agent, _ in found])


def _weka_raw(record: dict[str, Any], number: int) -> tuple[AgentSpec, int]:
    shared = int(_or_zero(record, "tool_tokens") + _or_zero(record, "system_tokens"))
    block = int(_at(record, "block_size", least=1))
    name = str(record.get("id") or number)
    return _agent(name, _weka_calls(record, block, name, shared), shared), shared


def _or_zero(record: Mapping[str, Any], member: str) -> float:
    return _number(record.get(member) or 0, member)


def _weka_calls(record: dict[str, Any], block: int, name: str, shared: int) -> list[_Seen]:
    out: list[_Seen] = []
    before: list[Any] = []
    waiting: list[AgentSpec] = []
    by_user = False
    for request in _list(record.get("requests"), "requests"):
        if not isinstance(request, dict):
            raise _Bad(f"a request is {request!r}, expected an object")
        if "requests" in request:
            inner = f"{name}.{len(out)}.{len(waiting) + 1}"
            seen = _weka_calls(request, block, inner, shared)
            waiting.append(_agent(inner, seen, shared))
            continue
        ids = _list(request.get("hash_ids", []), "hash_ids")
        out.append(
            _Seen(
                prompt=int(_at(request, "in", least=1)),
                answer=int(_at(request, "out")),
                same=_common(before, ids) * block if before else None,
                wait_s=_or_zero(request, "think_time"),
                spawned=tuple(waiting),
                by_user=by_user,
            )
        )
        before, waiting = ids, []
        by_user = request.get("stop") == "end_turn"
    return out


def _weka_compact(record: dict[str, Any], number: int) -> tuple[AgentSpec, int]:
    shared = int(_or_zero(record, "tool") + _or_zero(record, "sys"))
    name = str(record.get("id") or number)
    return _agent(name, _compact_calls(record.get("r"), name, shared), shared), shared


def _compact_calls(rows: object, name: str, shared: int) -> list[_Seen]:
    out: list[_Seen] = []
    waiting: list[AgentSpec] = []
    by_user = False
    for row in _list(rows, "r"):
        if isinstance(row, dict):
            inner = f"{name}.{len(out)}.{len(waiting) + 1}"
            waiting.append(_agent(inner, _compact_calls(row.get("sub"), inner, shared), shared))
            continue
        if len(_list(row, "a request")) < 6:
            raise _Bad(f"a request has {len(row)} values, expected t, in, out, shared, api, think")
        out.append(
            _Seen(
                prompt=int(_number(row[1], "in", least=1)),
                answer=int(_number(row[2], "out")),
                same=int(_number(row[3], "shared")) if out else None,
                wait_s=_number(row[5] or 0, "think_time"),
                spawned=tuple(waiting),
                by_user=by_user,
            )
        )
        waiting = []
        by_user = len(row) > 6 and row[6] == _END_TURN
    return out


# --- Mooncake: requests without sessions ------------------------------------------------------


@dataclass(slots=True)
class _Chain:
    seen: list[_Seen]
    ids: list[Any]
    at_s: float
    starts_s: float


def _mooncake(text: str, name: str) -> Workload:
    """Read requests; one that contains all full blocks of an earlier one continues it."""
    chains: list[_Chain] = []
    by_last: dict[Any, _Chain] = {}
    for number, record in _records(text, name):

        def read(record: dict[str, Any] = record) -> tuple[float, int, int, list[Any]]:
            return (
                _at(record, "timestamp") / 1e3,
                int(_at(record, "input_length", least=1)),
                int(_at(record, "output_length")),
                _list(record.get("hash_ids"), "hash_ids"),
            )

        at_s, prompt, answer, ids = _guarded(name, number, read)
        full = ids[: prompt // _MOONCAKE_BLOCK]
        chain = next((by_last[key] for key in reversed(full) if key in by_last), None)
        if chain is None or _common(chain.ids, full) < len(chain.ids):
            chain = _Chain([], [], at_s, at_s)
            chains.append(chain)
        same = len(chain.ids) * _MOONCAKE_BLOCK if chain.seen else None
        # It says when a request came, not when the one before was answered.
        wait_s = max(0.0, at_s - chain.at_s)
        chain.seen.append(_Seen(prompt=prompt, answer=answer, same=same, wait_s=wait_s))
        if chain.ids:
            by_last.pop(chain.ids[-1], None)
        chain.ids, chain.at_s = full, at_s
        if len(full) > 1:
            # One block is a system prompt: it does not tell conversations apart.
            by_last[full[-1]] = chain
    agents = [
        _agent(f"m{number}", chain.seen, 0, chain.starts_s)
        for number, chain in enumerate(chains, 1)
    ]
    return _named("mooncake", name, 0, agents)


# --- aiperf: sessions whose later lines carry what is new -------------------------------------


@dataclass(slots=True)
class _Session:
    calls: list[CallSpec] = field(default_factory=list)
    first_ids: list[Any] = field(default_factory=list)
    starts_s: float = 0.0


def _aiperf(text: str, name: str) -> Workload:
    sessions: dict[str, _Session] = {}
    for number, record in _records(text, name):
        key = record.get("session_id")
        if not isinstance(key, str):
            raise UsageError(f"{name}, line {number}: session_id is {key!r}, expected a string")
        session = sessions.setdefault(key, _Session())

        def read(record: dict[str, Any] = record, session: _Session = session) -> None:
            if not session.calls:
                session.first_ids = _list(record.get("hash_ids", []), "hash_ids")
                session.starts_s = _or_zero(record, "timestamp") / 1e3
            session.calls.append(
                CallSpec(
                    new=int(_at(record, "input_length", least=1)),
                    answer=max(1, int(_at(record, "output_length"))),
                    wait_s=_or_zero(record, "delay") / 1e3 if session.calls else 0.0,
                )
            )

        _guarded(name, number, read)
    shared = _shared_blocks([s.first_ids for s in sessions.values()]) * _MOONCAKE_BLOCK
    agents = []
    for key, session in sessions.items():
        first, *rest = session.calls
        begun = CallSpec(new=max(1, first.new - shared), answer=first.answer)
        agents.append(AgentSpec(name=key, calls=(begun, *rest), starts_s=session.starts_s))
    return _named("aiperf", name, shared, agents)


def _shared_blocks(firsts: Sequence[Sequence[object]]) -> int:
    return min((_common(firsts[0], other) for other in firsts[1:]), default=0)


# --- a recording of mode observe --------------------------------------------------------------


def _observed(text: str, name: str) -> Workload:
    trace = read_trace(text.splitlines(), name=name)
    size = trace.header.block_size
    sessions: defaultdict[str, list[tuple[float, float, int, int, tuple[str, ...]]]]
    sessions = defaultdict(list)
    for call, chain in trace.chains():
        if call.session is not None and call.answered and call.prompt > 0:
            row = (call.t, call.end, call.prompt, call.output, chain)
            sessions[call.session].append(row)
    agents = []
    for session, rows in sessions.items():
        rows.sort(key=lambda row: row[:2])
        seen: list[_Seen] = []
        before: tuple[str, ...] = ()
        ended_s = rows[0][0]
        for arrived_s, end_s, prompt, answer, chain in rows:
            same = min(_common(before, chain) * size, prompt) if seen else None
            wait_s = max(0.0, arrived_s - ended_s)
            seen.append(_Seen(prompt=prompt, answer=answer, same=same, wait_s=wait_s))
            before, ended_s = chain, end_s
        agents.append(_agent(session, seen, 0, rows[0][0]))
    return _named("observed", name, 0, agents)


def _named(form: str, name: str, shared: int, agents: Sequence[AgentSpec]) -> Workload:
    kept = tuple(agent for agent in agents if agent.calls)
    if not kept:
        raise UsageError(f"{name}: no call of any session in it")
    workload = Workload(name=f"{form}: {name}", shared=shared, agents=kept)
    if workload.num_calls > _MOST_CALLS:
        raise UsageError(f"{name}: {workload.num_calls} calls; at most {_MOST_CALLS} are read")
    return workload
