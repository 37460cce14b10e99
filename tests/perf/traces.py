"""Recorded agent sessions as one stream of calls over chains of block hashes.

The data are real Claude Code sessions without content (``data/NOTICE.md``): per request the
prompt's length, the answer's, how much of the prompt the chain's request before had, and when
it came. :func:`stream` starts sessions at random and lays their calls on one time line.

What is assumed, because the data do not say it: sessions with equally long tool definitions
share them, and with an equally long system prompt behind it that as well; sub-agents share
nothing; a prompt that goes on behind the whole prompt before it, by more than that call's
answer, contains the answer.
"""

from __future__ import annotations

import heapq
import json
import lzma
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

DATA: Final = Path(__file__).with_name("data") / "claude_code_sessions.jsonl.xz"
#: Longest prompt of a session that is taken: the context of the models in common use.
MAX_PROMPT: Final = 200_000
#: How a recorded call ended.
TOOL, USER = 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall:
    """One call of the stream.

    Attributes:
        number: place in the order of arrival.
        session: its session; a sub-agent's calls carry its parent's.
        arrives_s: when it arrives.
        ends_s: when it ends.
        hashes: of the prompt's and the answer's full blocks.
        prompt_blocks: how many of them are of the prompt.
        tool_wait_s: how long the tool wait behind it is, None when none follows.
        final: the last call of its session.
    """

    number: int
    session: str
    arrives_s: float
    ends_s: float
    hashes: tuple[int, ...]
    prompt_blocks: int
    tool_wait_s: float | None
    final: bool


class _Planned(NamedTuple):
    """A call before it has a number."""

    arrives_s: float
    tie: int
    ends_s: float
    session: str
    hashes: tuple[int, ...]
    prompt_blocks: int
    stop: int
    chain: int


def sessions(path: Path = DATA) -> list[dict[str, Any]]:
    """Read the sessions whose prompts all fit into the context."""
    with lzma.open(path, "rt") as lines:
        found = [json.loads(line) for line in lines]
    return [each for each in found if _longest(each) <= MAX_PROMPT]


def _longest(session: dict[str, Any]) -> int:
    return max((row[1] for rows in _chains(session) for row in rows[1]), default=0)


def _chains(session: dict[str, Any]) -> Iterator[tuple[float, list[list[Any]]]]:
    """Yield (start, requests) of the main chain and of each sub-agent."""
    yield 0.0, [row for row in session["r"] if isinstance(row, list)]
    for row in session["r"]:
        if isinstance(row, dict):
            yield row["t"], row["sub"]


class _Hashes:
    """Gives every block of every chain a number that stands for its chain hash."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, Any], int] = {}

    def extend(self, chain: list[int], length: int, content: Any) -> list[int]:
        """Return ``chain`` continued to ``length`` blocks of this content."""
        out = list(chain)
        while len(out) < length:
            key = (out[-1] if out else 0, content)
            out.append(self._numbers.setdefault(key, len(self._numbers) + 1))
        return out


def _plan(
    recorded: dict[str, Any], start_s: float, block_size: int, hashes: _Hashes, name: str
) -> list[_Planned]:
    planned: list[_Planned] = []
    for number, (offset_s, rows) in enumerate(_chains(recorded)):
        chain: list[int] = []
        before: list[Any] | None = None
        if not number:
            tools, system = recorded["tool"], recorded["tool"] + recorded["sys"]
            chain = hashes.extend([], tools // block_size, ("tools", tools))
            chain = hashes.extend(chain, system // block_size, ("system", system))
        for place, row in enumerate(rows):
            at_s, prompt, answer, shared, api_s = row[:5]
            if before is not None:
                follows = shared >= before[1] // 64 * 64 and prompt >= before[1] + before[2]
                kept = before[1] + before[2] if follows else shared
                chain = chain[: kept // block_size]
            chain = chain[: prompt // block_size]
            content = (name, number, place)
            chain = hashes.extend(chain, prompt // block_size, content)
            prompt_blocks = len(chain)
            chain = hashes.extend(chain, (prompt + answer) // block_size, content)
            arrives_s = start_s + offset_s + at_s
            planned.append(
                _Planned(
                    arrives_s,
                    len(planned),
                    arrives_s + (api_s or 0.0),
                    name,
                    tuple(chain),
                    prompt_blocks,
                    row[6],
                    number,
                )
            )
            before = row
    return planned


def stream(
    *, seed: int, num_sessions: int, starts_per_s: float, block_size: int
) -> list[StreamCall]:
    """Return the calls of so many sessions that start at random, in the order of arrival."""
    draw = random.Random(seed)
    recorded = sessions()
    hashes = _Hashes()
    planned: list[_Planned] = []
    start_s = 0.0
    for number, each in enumerate(draw.sample(recorded, num_sessions)):
        start_s += draw.expovariate(starts_per_s)
        planned += _plan(each, start_s, block_size, hashes, f"session-{number}")
    planned.sort(key=lambda each: (each.arrives_s, each.session, each.tie))
    following: dict[tuple[str, int], float] = {}
    last: dict[str, int] = {}
    out: list[StreamCall] = []
    for place in range(len(planned) - 1, -1, -1):
        call = planned[place]
        next_s = following.get((call.session, call.chain))
        wait_s = None
        if call.stop == TOOL and next_s is not None:
            wait_s = max(0.0, next_s - call.ends_s)
        following[call.session, call.chain] = call.arrives_s
        out.append(
            StreamCall(
                number=place,
                session=call.session,
                arrives_s=call.arrives_s,
                ends_s=call.ends_s,
                hashes=call.hashes,
                prompt_blocks=call.prompt_blocks,
                tool_wait_s=wait_s,
                final=call.session not in last,
            )
        )
        last.setdefault(call.session, place)
    out.reverse()
    return out


class Clairvoyant:
    """A pool that gives up the block whose next use is farthest away: no order does better.

    Args:
        num_blocks: blocks of the pool.
        calls: all that it will be asked for.
    """

    def __init__(self, num_blocks: int, calls: list[StreamCall]) -> None:
        self._room = num_blocks
        self._uses: dict[int, list[int]] = {}
        for call in reversed(calls):
            for block in call.hashes[: call.prompt_blocks]:
                self._uses.setdefault(block, []).append(call.number)
        self._never = len(calls)
        self._users: dict[int, int] = {}
        # Free blocks by their next use, the farthest first; outdated entries are skipped.
        self._heap: list[tuple[int, int, int]] = []
        self._next: dict[int, int] = {}

    def start(self, call: StreamCall) -> int:
        """Give a call its blocks; returns how many leading ones were there."""
        num_hits = 0
        for block in call.hashes[: call.prompt_blocks]:
            if block not in self._next:
                break
            num_hits += 1
        self._take(call.hashes[: call.prompt_blocks])
        for block in call.hashes[: call.prompt_blocks]:
            uses = self._uses[block]
            while uses and uses[-1] <= call.number:
                uses.pop()
        return num_hits

    def _take(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self._users[block] = self._users.get(block, 0) + 1
            self._next.setdefault(block, -1)
        while len(self._next) > self._room and self._heap:
            next_use, _, block = heapq.heappop(self._heap)
            if self._next.get(block) == -next_use and block not in self._users:
                del self._next[block]

    def end(self, call: StreamCall) -> None:
        """Free a call's blocks."""
        self._take(call.hashes[call.prompt_blocks :])
        for place, block in enumerate(call.hashes):
            users = self._users[block] - 1
            if users:
                self._users[block] = users
                continue
            del self._users[block]
            uses = self._uses.get(block)
            next_use = uses[-1] if uses else self._never
            self._next[block] = next_use
            heapq.heappush(self._heap, (-next_use, -place, block))
