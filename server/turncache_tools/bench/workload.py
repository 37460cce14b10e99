"""What agents do: calls, what each adds to the history, waits, sub-agents. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from turncache.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSpec:
    """One call of an agent. Counts in tokens.

    Attributes:
        new: what the call adds behind the history: a tool's result or a question.
        answer: longest answer.
        wait_s: between the answer before and this call.
        keep: leading tokens of the history that stay, None for all of it. What follows is
            replaced by a text of :attr:`new` tokens: a compaction, or an edit.
        spawned: sub-agents that run to their end, all at once, before this call.
        by_user: the wait was a person's: no tool's duration tells its length.
    """

    new: int
    answer: int
    wait_s: float = 0.0
    keep: int | None = None
    spawned: tuple[AgentSpec, ...] = ()
    by_user: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent: a session of its own.

    Attributes:
        name: unique in the workload.
        calls: in order.
        starts_s: after the start of the block.
    """

    name: str
    calls: tuple[CallSpec, ...]
    starts_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one block of calls consists of, the same in all arms.

    Attributes:
        name: for the report.
        shared: tokens of the system prompt and tool schemas that all agents begin with.
        agents: top-level agents.
    """

    name: str
    shared: int
    agents: tuple[AgentSpec, ...]

    @property
    def num_calls(self) -> int:
        """All calls, those of sub-agents included."""
        return sum(len(agent.calls) for agent in every_agent(self.agents))


def every_agent(agents: Sequence[AgentSpec]) -> Iterator[AgentSpec]:
    """Yield agents and their sub-agents, at any depth."""
    for agent in agents:
        yield agent
        for call in agent.calls:
            yield from every_agent(call.spawned)


def is_miss(rate: float, seed: int, agent: str, call: int) -> bool:
    """Say whether prefill's cache is emptied before an agent's call.

    By its place in the workload: the same waits miss in all arms, and in a plan of the same seed.
    """
    draw = random.Random(f"miss-{seed}-{agent}-{call}")  # noqa: S311 - reproducible, not secret
    return draw.random() < rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """A workload in numbers.

    Attributes:
        agents: at the same time.
        calls: of each.
        system: tokens of the system prompt, shared by all agents.
        tools: tokens of the tool schemas, likewise.
        first: tokens of the task, an agent's own.
        new: median tokens that a call adds.
        new_sigma: of their lognormal distribution; 0: always the median.
        answer: tokens of an answer.
        wait_s: median tool wait.
        wait_sigma: of its lognormal distribution.
        compact_at: history, in tokens, beyond which the next call compacts it; 0: never.
        compact_to: tokens of the summary.
        subagent_every: every so many calls a sub-agent runs; 0: never.
        subagent_calls: calls of a sub-agent.
    """

    agents: int = 2
    calls: int = 12
    system: int = 400
    tools: int = 600
    first: int = 1000
    new: int = 250
    new_sigma: float = 0.0
    answer: int = 32
    wait_s: float = 1.0
    wait_sigma: float = 0.0
    compact_at: int = 0
    compact_to: int = 200
    subagent_every: int = 0
    subagent_calls: int = 3


#: Of a lognormal distribution; beyond it one draw is all that a sum consists of.
_MOST_SIGMA: Final = 10


def parametric(numbers: Parameters, *, seed: int) -> Workload:
    """Draw a workload; the same seed gives the same one.

    Raises:
        UsageError: naming the parameter that no workload can have.
    """
    _check(numbers)
    draw = random.Random(f"workload-{seed}")  # noqa: S311 - reproducible, not secret
    agents = tuple(
        _agent(numbers, f"a{number}", numbers.calls, draw, top=True)
        for number in range(1, numbers.agents + 1)
    )
    return Workload(name="parametric", shared=numbers.system + numbers.tools, agents=agents)


def _check(numbers: Parameters) -> None:
    for name in ("agents", "calls", "new", "answer", "first"):
        if getattr(numbers, name) < 1:
            raise UsageError(f"--{name} {getattr(numbers, name)}: expected a number from 1")
    for name in ("system", "tools", "new_sigma", "wait_s", "wait_sigma", "compact_at"):
        value = getattr(numbers, name)
        if not 0 <= value < math.inf:
            option = name.removesuffix("_s").replace("_", "-")
            raise UsageError(f"--{option} {value}: expected a number from 0")
    for name in ("new_sigma", "wait_sigma"):
        if getattr(numbers, name) > _MOST_SIGMA:
            option = name.replace("_", "-")
            raise UsageError(
                f"--{option} {getattr(numbers, name):g}: expected a number up to {_MOST_SIGMA}"
            )
    least = numbers.system + numbers.tools + numbers.compact_to
    if numbers.compact_at and numbers.compact_at <= least:
        raise UsageError(
            f"--compact-at {numbers.compact_at}: expected more than system, tools and summary "
            f"together, which are {least}"
        )


def _agent(
    numbers: Parameters, name: str, num_calls: int, draw: random.Random, *, top: bool
) -> AgentSpec:
    shared = numbers.system + numbers.tools
    calls: list[CallSpec] = []
    length = shared
    for number in range(1, num_calls + 1):
        new = numbers.first if number == 1 else _lognormal(draw, numbers.new, numbers.new_sigma)
        wait_s = 0.0
        if number > 1 and numbers.wait_s:
            wait_s = numbers.wait_s * math.exp(numbers.wait_sigma * draw.gauss(0, 1))
        keep = None
        if number > 1 and numbers.compact_at and length + new > numbers.compact_at:
            keep, new, length = shared, numbers.compact_to, shared
        spawned: tuple[AgentSpec, ...] = ()
        every = numbers.subagent_every
        if top and every and number > 1 and number % every == 0:
            inner = f"{name}.{number}"
            spawned = (_agent(numbers, inner, numbers.subagent_calls, draw, top=False),)
        length += new + numbers.answer
        calls.append(
            CallSpec(new=new, answer=numbers.answer, wait_s=wait_s, keep=keep, spawned=spawned)
        )
    return AgentSpec(name=name, calls=tuple(calls))


def _lognormal(draw: random.Random, median: float, sigma: float) -> int:
    # Beyond three sigma one call would decide the whole run.
    deviation = max(-3.0, min(3.0, draw.gauss(0, 1)))
    return max(1, round(median * math.exp(sigma * deviation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How a recorded workload is brought to the size of a machine.

    Attributes:
        agents: at most so many, the first that start.
        calls: at most so many of each.
        tokens: factor of all counts of tokens.
        waits: factor of all waits.
        max_wait_s: longest wait after that.
        max_context: an agent ends before the call whose prompt and answer exceed this.
    """

    agents: int
    calls: int
    tokens: float = 1.0
    waits: float = 1.0
    max_wait_s: float = math.inf
    max_context: int | None = None


def fitted(workload: Workload, cut: Cut) -> Workload:
    """Return a workload scaled and cut to size.

    Raises:
        UsageError: nothing is left of it.
    """
    shared = round(workload.shared * cut.tokens)
    agents = [_fitted(agent, cut, shared) for agent in workload.agents]
    left = sorted((agent for agent in agents if agent.calls), key=lambda agent: agent.starts_s)
    if not left:
        raise UsageError(
            f"no call of {workload.name} fits --max-context {cut.max_context}: scale tokens down "
            "with --scale-tokens"
        )
    first_s = left[0].starts_s
    kept = tuple(replace(a, starts_s=a.starts_s - first_s) for a in left[: cut.agents])
    return replace(workload, shared=shared, agents=kept)


def _fitted(agent: AgentSpec, cut: Cut, shared: int) -> AgentSpec:
    length = shared
    calls: list[CallSpec] = []
    for call in agent.calls[: cut.calls]:
        new = max(1, round(call.new * cut.tokens))
        answer = max(1, round(call.answer * cut.tokens))
        keep = None if call.keep is None else round(call.keep * cut.tokens)
        if keep is not None:
            length = min(length, keep)
        length += new + answer
        if cut.max_context is not None and length > cut.max_context:
            break
        calls.append(
            CallSpec(
                new=new,
                answer=answer,
                wait_s=min(call.wait_s * cut.waits, cut.max_wait_s),
                keep=keep,
                by_user=call.by_user,
                spawned=tuple(
                    inner
                    for spawned in call.spawned
                    if (inner := _fitted(spawned, cut, shared)).calls
                ),
            )
        )
    starts_s = min(agent.starts_s * cut.waits, cut.max_wait_s)
    return AgentSpec(name=agent.name, calls=tuple(calls), starts_s=starts_s)
