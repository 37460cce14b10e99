"""One block: all agents of a workload, each a loop of calls with its live answers threaded in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from turncache.protocol import SESSION_HEADER, CallTags, Cause
from turncache_tools.bench.arms import Arm, Block, Hints
from turncache_tools.bench.client import CallFailed, Client
from turncache_tools.bench.conversation import Conversation
from turncache_tools.bench.results import BlockResult, CallResult, answered
from turncache_tools.bench.stack import Sampled, Stack
from turncache_tools.bench.stream import Streamed
from turncache_tools.bench.texts import Piece, Tokens, answer_message, kept, result_messages, text
from turncache_tools.bench.workload import AgentSpec, CallSpec, Workload, is_miss


@dataclass(frozen=True, slots=True, kw_only=True)
class Misses:
    """How prefill's cache is emptied, so that calls miss.

    Attributes:
        rate: share of the waits in which it happens, 0 to 1.
        reset: base URLs of engines whose cache is emptied; nothing: it is flooded.
        external: tiers outside of the engine as well.
        flood_tokens: of the flood's prompts together.
        flood_prompt: tokens of one of them.
        in_flight: of them at a time.
    """

    rate: float
    reset: tuple[str, ...] = ()
    external: bool = False
    flood_tokens: int = 0
    flood_prompt: int = 1000
    in_flight: int = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is the same in all blocks.

    Attributes:
        workload: what agents do.
        model: its name.
        seed: of texts and of which waits miss.
        nonce: of this start of the program: what an earlier one has left in a cache is not
            found again.
        tokens: how many tokens words make.
        body: further members of every call.
        misses: see above.
        retain_s: that hints ask for, None for the server's choice.
        on_call: told of every call that has ended.
    """

    workload: Workload
    model: str
    seed: int
    nonce: str
    tokens: Tokens
    body: Mapping[str, Any]
    misses: Misses | None
    retain_s: float | None
    on_call: Callable[[CallResult], None]


@dataclass(slots=True)
class _Agent:
    """One agent's state."""

    spec: AgentSpec
    session: str
    parent: str | None
    calls: Conversation
    history: list[Piece] = field(default_factory=list)
    tool_calls: tuple[dict[str, Any], ...] = ()
    before: int = 0
    answer_before: int = 0


class BlockRun:
    """Runs the workload once in one arm.

    Args:
        client: for calls.
        stack: to empty caches.
        setting: of all blocks.
        arm: how calls are made.
        block: which.
    """

    def __init__(
        self, client: Client, stack: Stack, setting: Setting, arm: Arm, block: Block
    ) -> None:
        self._client = client
        self._stack = stack
        self._setting = setting
        self._arm = arm
        self._block = block
        self._salt = f"{setting.nonce}-{block.number}"
        self._calls: list[CallResult] = []
        self._others: list[float | None] = []
        self._others_tokens = 0

    async def run(self) -> BlockResult:
        """Run all agents to their end.

        Raises:
            EngineFault: a cache was not emptied. Calls that fail are results.
        """
        started_s = time.perf_counter()
        sampled: Sampled = await self._stack.during(self._all())
        return BlockResult(
            number=self._block.number,
            arm=self._block.arm,
            round=self._block.round,
            seconds=time.perf_counter() - started_s,
            calls=tuple(self._calls),
            others=tuple(self._others),
            others_tokens=self._others_tokens,
            counters=sampled.counters,
            gauges=sampled.gauges,
        )

    async def _all(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                for spec in self._setting.workload.agents:
                    tasks.create_task(self._run_agent(spec, None))
        except BaseExceptionGroup as group:
            raise _first_of(group) from group

    async def _run_agent(self, spec: AgentSpec, parent: str | None) -> None:
        if spec.starts_s:
            await asyncio.sleep(spec.starts_s)
        session = f"bench-{self._salt}-{spec.name}"
        calls = Conversation(self._client, self._arm)
        agent = _Agent(spec, session, parent, calls, [self._shared()])
        for number, call in enumerate(spec.calls, 1):
            await self._between(agent, number, call)
            result = await self._call(agent, number, call)
            self._calls.append(result)
            self._setting.on_call(result)
            if result.error:
                # What follows would be calls of another history than the other arms'.
                for skipped in range(number + 1, len(spec.calls) + 1):
                    self._calls.append(_skipped(spec.name, skipped))
                return

    def _shared(self) -> Piece:
        tokens = max(1, self._setting.workload.shared)
        said = self._text(tokens, "shared")
        return Piece({"role": "system", "content": said}, tokens)

    def _text(self, tokens: float, place: str) -> str:
        words = self._setting.tokens.words(tokens)
        return text(words, place=place, seed=self._setting.seed, block=self._salt)

    async def _between(self, agent: _Agent, number: int, call: CallSpec) -> None:
        """Let the tool work: sub-agents, the wait, and whatever empties the cache."""
        if call.spawned:
            async with asyncio.TaskGroup() as tasks:
                for spec in call.spawned:
                    tasks.create_task(self._run_agent(spec, agent.session))
        if number == 1:
            return
        started_s = time.perf_counter()
        misses, name = self._setting.misses, agent.spec.name
        if misses is not None and is_miss(misses.rate, self._setting.seed, name, number):
            await self._miss(misses, f"{name}-{number}")
        left_s = call.wait_s - (time.perf_counter() - started_s)
        if left_s > 0:
            await asyncio.sleep(left_s)

    async def _miss(self, misses: Misses, place: str) -> None:
        for url in misses.reset:
            await self._stack.empty(url, external=misses.external)
        if misses.reset:
            return
        places = asyncio.Semaphore(misses.in_flight)
        num = -(-misses.flood_tokens // misses.flood_prompt)

        async def one(number: int) -> None:
            async with places:
                said = self._text(misses.flood_prompt, f"flood-{place}-{number}")
                await self._other([{"role": "user", "content": said}])

        async with asyncio.TaskGroup() as tasks:
            for number in range(num):
                tasks.create_task(one(number))

    async def _other(self, messages: list[dict[str, Any]]) -> None:
        body = {"model": self._setting.model, "messages": messages, "max_tokens": 1}
        try:
            conversation = Conversation(self._client, self._arm)
            asked = await conversation.ask({**body, "temperature": 0}, {})
        except CallFailed:
            self._others.append(None)
            return
        self._others.append(asked.streamed.total_s)
        self._others_tokens += asked.streamed.prompt or 0

    async def _call(self, agent: _Agent, number: int, call: CallSpec) -> CallResult:
        said = self._text(call.new, f"{agent.spec.name}-{number}")
        new = result_messages(agent.tool_calls if call.keep is None else (), said)
        history = kept(agent.history, call.keep)
        history += [Piece(message, call.new / len(new)) for message in new]
        body = {
            "model": self._setting.model,
            "messages": [piece.message for piece in history],
            "max_tokens": call.answer,
            "temperature": 0,
            **self._setting.body,
        }
        headers = self._headers(agent, number, call)
        try:
            asked = await agent.calls.ask(body, headers)
        except CallFailed as error:
            return CallResult(agent=agent.spec.name, call=number, error=str(error))
        result = answered(
            agent.spec.name,
            number,
            asked.streamed,
            asked.outcome,
            before=0 if call.keep is not None else agent.before,
            answer_before=agent.answer_before,
        )
        self._thread(agent, history, asked.streamed, call)
        return result

    def _thread(
        self, agent: _Agent, history: list[Piece], streamed: Streamed, call: CallSpec
    ) -> None:
        """Put the live answer into the history: the next prompt has what decode generated."""
        answer = streamed.answer or call.answer
        message = answer_message(streamed.text, streamed.tool_calls)
        agent.history = [*history, Piece(message, answer)]
        agent.tool_calls = streamed.tool_calls
        agent.before = (streamed.prompt or 0) + answer
        agent.answer_before = answer

    def _headers(self, agent: _Agent, number: int, call: CallSpec) -> dict[str, str]:
        if self._arm.hints is Hints.NONE:
            return {}
        if self._arm.hints is Hints.SESSION:
            return {SESSION_HEADER: agent.session}
        cause = Cause.USER if number == 1 else Cause.TOOL
        waits = [each.wait_s for each in agent.spec.calls[1:]]
        return CallTags(
            session_id=agent.session,
            parent_id=agent.parent,
            final=number == len(agent.spec.calls),
            turn=1,
            call=number,
            cause=cause if call.keep is None else Cause.COMPACTION,
            retain_s=self._setting.retain_s,
            # What our client would have measured of these tools so far.
            tools={"*": sum(waits) / len(waits)} if waits else {},
        ).to_headers()


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the fault that ended a block, out of all groups around it."""
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def _skipped(agent: str, call: int) -> CallResult:
    return CallResult(agent=agent, call=call, error="not made: an earlier call failed")
