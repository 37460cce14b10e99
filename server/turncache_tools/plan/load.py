"""What is simulated: the load, the rig that it meets, and the arms that are compared. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from turncache.errors import UsageError
from turncache_server.connector.config import DEFAULT_RECOMPUTE_THRESHOLD, Settings
from turncache_server.cost_profile import CostProfile
from turncache_tools.bench.workload import AgentSpec, Workload, every_agent
from turncache_tools.plan.pools import DEFAULTS

#: Units of a mean prompt: more are slower to simulate, fewer are coarser.
_UNITS_PER_PROMPT: Final = 12
#: A pool of fewer units tells lineages apart too coarsely.
_LEAST_POOL_UNITS: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Calls and when they come.

    Attributes:
        workload: what agents do.
        sessions: so many agents at a time, each place taken by the next agent when one ends;
            None: agents start when the workload says.
        num_agents: agents in all, the workload's over and over; None for each once.
        others_per_s: ordinary calls per second, at random: they have no session.
        others_tokens: of the prompt of one of them.
        miss_rate: share of later calls that find nothing in prefill's pool, whatever keeps it.
        wait_error: tool waits are expected wrong by up to this factor; user waits by nobody.
        seed: of misses, expectations and ordinary calls.
    """

    workload: Workload
    sessions: int | None = None
    num_agents: int | None = None
    others_per_s: float = 0.0
    others_tokens: int = 1000
    miss_rate: float = 0.0
    wait_error: float = 2.0
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """The engine, or prefill and decode engine.

    Attributes:
        profile: what things cost.
        pool_tokens: of the prefill, or only, engine.
        decode_pool_tokens: of the decode engine; None: one engine does both.
        unit_tokens: what pools are reckoned in, a multiple of the profile's block.
    """

    profile: CostProfile
    pool_tokens: int
    decode_pool_tokens: int | None
    unit_tokens: int

    @property
    def pair(self) -> bool:
        """Say whether prefill and decode are apart."""
        return self.decode_pool_tokens is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRules:
    """Settings of the router's admission; the router's README has them.

    Attributes:
        share: of the pool that may be promised to sessions.
        idle_s: for which a session is expected back.
        wait_s: longest wait.
        max_waiting: longest queue.
    """

    share: float = 0.9
    idle_s: float = 120.0
    wait_s: float = 120.0
    max_waiting: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArm:
    """One thing that could be done.

    Attributes:
        name: ``off`` is what the others are compared with.
        what: for people.
        retaining: sessions are kept by the rules of mode ``on``.
        returning: prefill pulls from decode what it lacks.
        pool_factor: of both pools.
        host_gb: host tier of the prefill, or only, engine in 10^9 bytes.
        settings: of the extension.
        admission: the router lets new sessions wait for room, None for never.
    """

    name: str
    what: str
    retaining: bool = False
    returning: bool = False
    pool_factor: float = 1.0
    host_gb: float = 0.0
    settings: Settings = DEFAULTS
    admission: AdmissionRules | None = None

    def pulls(self, profile: CostProfile, start: int, tokens: int) -> bool:
        """Decide as the connector does: by a threshold that is named, else by cost."""
        threshold = self.settings.recompute_threshold
        if threshold is not None:
            return tokens >= max(1, threshold)
        if tokens < DEFAULT_RECOMPUTE_THRESHOLD:
            return False
        return profile.pull_s(tokens) <= profile.compute_s(start, tokens)


OFF: Final = "off"
ADMISSION: Final = "admission"


def arms_for(
    rig: Rig,
    settings: Settings,
    host_gb: Sequence[float],
    admission: AdmissionRules | None = None,
) -> list[PlanArm]:
    """Return the arms that a rig can have, off first; with rules also one of admission."""
    arms = [
        PlanArm(name=OFF, what="stock"),
        PlanArm(name="retention", what="sessions kept", retaining=True, settings=settings),
    ]
    if rig.pair:
        arms += [
            PlanArm(name="return", what="answers returned", returning=True, settings=settings),
            PlanArm(
                name="both",
                what="kept and returned",
                retaining=True,
                returning=True,
                settings=settings,
            ),
        ]
    if admission is not None:
        what = f"{arms[-1].what}, new sessions wait for room"
        arms.append(replace(arms[-1], name=ADMISSION, what=what, admission=admission))
    arms.append(PlanArm(name="pool x2", what="stock, twice the pool", pool_factor=2.0))
    if rig.profile.kv_token_bytes:
        arms += [
            PlanArm(name=f"host {gb:g} GB", what="stock with a host tier", host_gb=gb)
            for gb in host_gb
        ]
    return arms


def rig_for(
    profile: CostProfile, workload: Workload, *, pool: int, decode_pool: int | None, unit: int
) -> Rig:
    """Return a rig that can hold every call of a workload.

    Args:
        profile: what things cost.
        workload: that it is to serve.
        pool: tokens of the prefill, or only, engine.
        decode_pool: of the decode engine, None for one engine.
        unit: tokens to reckon in, 0 to choose: so that a mean prompt has about 12.

    Raises:
        UsageError: a pool is too small for one call, or engines cannot hand prompts over.
    """
    if decode_pool is not None and not profile.pulls:
        raise UsageError(
            f"profile {profile.name}: it has no cost of transfers, which prefill and decode apart "
            "need: calibrate on a pair, or plan one engine (without --decode-pool)"
        )
    longest, mean = _lengths(workload)
    block = profile.block_tokens
    if not unit:
        smallest = min(pool, decode_pool or pool)
        wanted = min(mean / _UNITS_PER_PROMPT, smallest / _LEAST_POOL_UNITS)
        unit = max(1, round(wanted / block)) * block
    elif unit % block:
        raise UsageError(f"--unit {unit}: expected a multiple of the KV block of {block} tokens")
    for option, size in (("--pool", pool), ("--decode-pool", decode_pool)):
        if size is not None and size // unit < -(-longest // unit) + 1:
            raise UsageError(
                f"{option} {size}: the longest call has {longest} tokens, which such a pool does "
                f"not hold (in units of {unit}); leave such agents out with --max-context, or "
                "give a larger pool"
            )
    return Rig(profile=profile, pool_tokens=pool, decode_pool_tokens=decode_pool, unit_tokens=unit)


def _lengths(workload: Workload) -> tuple[int, float]:
    """Return (longest call, mean prompt), both in tokens."""
    longest, total, count = 0, 0, 0
    for agent in every_agent(workload.agents):
        for prompt, answer in prompts(agent, workload.shared):
            longest = max(longest, prompt + answer)
            total += prompt
            count += 1
    return longest, total / count


def prompts(agent: AgentSpec, shared: int) -> list[tuple[int, int]]:
    """Return (prompt, answer) of each call."""
    out = []
    history = max(0, shared)
    for call in agent.calls:
        kept = history if call.keep is None else min(history, call.keep)
        out.append((kept + call.new, call.answer))
        history = kept + call.new + call.answer
    return out


def mean_context(workload: Workload) -> float:
    """Return the mean over calls of prompt and answer, in tokens."""
    sizes = [
        prompt + answer
        for agent in every_agent(workload.agents)
        for prompt, answer in prompts(agent, workload.shared)
    ]
    return sum(sizes) / len(sizes)


def with_sessions(load: Load, sessions: int, *, num_agents: int) -> Load:
    """Return a load of so many agents at a time."""
    return replace(load, sessions=sessions, num_agents=num_agents)


def check_load(load: Load) -> None:
    """Refuse numbers that no load can have.

    Raises:
        UsageError: naming the option.
    """
    if load.sessions is not None and load.sessions < 1:
        raise UsageError(f"--sessions {load.sessions}: expected a number from 1")
    if not 0 <= load.others_per_s < math.inf:
        raise UsageError(f"--others {load.others_per_s}: expected calls per second from 0")
    if load.others_tokens < 1:
        raise UsageError(f"--others-tokens {load.others_tokens}: expected tokens from 1")
    if not 0 <= load.miss_rate <= 1:
        raise UsageError(f"--miss-rate {load.miss_rate}: expected a share from 0 to 1")
    if not 1 <= load.wait_error < math.inf:
        raise UsageError(f"--wait-error {load.wait_error}: expected a factor from 1")
