"""One run against a stack: what it can show, warm-up, all blocks, and the stack as it was."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from turncache.errors import EngineFault
from turncache_tools.bench.agents import BlockRun, Misses, Setting
from turncache_tools.bench.arms import OFF_AGAIN, Arm, Block, choose_arms, schedule
from turncache_tools.bench.client import Client
from turncache_tools.bench.compare import compare_answers
from turncache_tools.bench.probe import probe
from turncache_tools.bench.report import Report, Run, report_on
from turncache_tools.bench.results import CallResult
from turncache_tools.bench.saved import SavedBlocks
from turncache_tools.bench.stack import Places, Stack
from turncache_tools.bench.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be run.

    Attributes:
        workload: what agents do.
        arms: wanted, by name.
        urls: arms with a stack of their own: one base URL, or prefill's and decode's.
        rounds: of all arms.
        seed: of workload, texts, misses and resampling.
        misses: how caches are emptied, None for not on purpose.
        model: its name, None for the first that the server lists.
        retain_s: that hints ask for.
        verify: compare answers of equal prompts.
        resume: file of finished blocks.
        key: bearer token.
        timeout_s: of one call.
    """

    workload: Workload
    arms: tuple[str, ...]
    urls: Mapping[str, tuple[str, ...]]
    rounds: int
    seed: int
    misses: Misses | None
    model: str | None
    retain_s: float | None
    verify: bool
    resume: Path | None
    key: str
    timeout_s: float

    def settled(self, places: Places) -> dict[str, Any]:
        """Return what must be equal for a run to go on; it may go on with more rounds."""
        return {
            "workload": asdict(self.workload),
            "arms": list(self.arms),
            "urls": {name: list(urls) for name, urls in self.urls.items()},
            "url": places.url,
            "seed": self.seed,
            "misses": None if self.misses is None else asdict(self.misses),
            "model": self.model,
            "retain_s": self.retain_s,
        }


async def run(plan: Plan, places: Places, say: Callable[[str], None]) -> Report:
    """Run a plan and return its report; the stack is left as it was found.

    Args:
        plan: what to run.
        places: of the stack.
        say: told of progress.

    Raises:
        UsageError: nothing can be compared.
        EngineFault: the stack does not answer or does not switch.
    """
    saved = SavedBlocks(plan.resume, plan.settled(places))
    async with Client(plan.key, timeout_s=plan.timeout_s) as client:
        stack = Stack(client, places)
        nonce = secrets.token_hex(4)
        elsewhere = itertools.chain.from_iterable(plan.urls.values())
        urls = tuple(dict.fromkeys([places.url, *elsewhere]))
        probed = await probe(client, urls, model=plan.model, nonce=nonce)
        facts = await stack.facts(ours=probed.ours)
        arms, missing = choose_arms(plan.arms, facts, url=places.url, urls=plan.urls)
        for each in missing:
            say(f"{each.name}: not measurable here: {each.why}")
        setting = Setting(
            workload=plan.workload,
            model=probed.model,
            seed=plan.seed,
            nonce=nonce,
            tokens=probed.tokens,
            body=probed.body,
            misses=plan.misses,
            retain_s=plan.retain_s,
            on_call=lambda _: None,
        )
        compared: Mapping[str, Any] = {}
        try:
            await _blocks(client, stack, setting, arms=arms, plan=plan, saved=saved, say=say)
            if plan.verify:
                say("comparing answers to equal prompts")
                compared = await compare_answers(client, stack, setting, arms)
            described = await stack.described()
        finally:
            await stack.restore()
    fixed = "forced (ignore_eos)" if probed.body else "not forced: answers may end early"
    return report_on(
        Run(
            seed=plan.seed,
            workload=_words(plan.workload),
            shared=plan.workload.shared,
            miss_rate=None if plan.misses is None else plan.misses.rate,
            stack={"model": probed.model, "length of answers": fixed, **described},
        ),
        arms,
        missing,
        [saved.blocks[number] for number in sorted(saved.blocks)],
        compared,
    )


def _words(workload: Workload) -> str:
    return (
        f"{workload.name}: {len(workload.agents)} agents, {workload.num_calls} calls per block, "
        f"{workload.shared:,} shared tokens; live answers are threaded into the history"
    )


async def _blocks(
    client: Client,
    stack: Stack,
    setting: Setting,
    *,
    arms: Sequence[Arm],
    plan: Plan,
    saved: SavedBlocks,
    say: Callable[[str], None],
) -> None:
    by_name = {arm.name: arm for arm in arms} | {OFF_AGAIN: arms[0]}
    blocks = schedule([arm.name for arm in arms], rounds=plan.rounds)
    left = [block for block in blocks if block.number not in saved.blocks]
    if len(left) < len(blocks):
        say(f"{len(blocks) - len(left)} of {len(blocks)} blocks were finished before")
    if left:
        await _warm_up(client, stack, setting, arms, say)
    for block in left:
        arm = by_name[block.arm]
        await stack.switch(arm)
        counted = _Counted(setting.workload.num_calls)

        def on_call(result: CallResult, counted: _Counted = counted, block: Block = block) -> None:
            counted.done += 1
            if result.error:
                say(f"{result.agent} call {result.call}: {result.error}")
            elif counted.done % counted.step == 0:
                say(f"block {block.number + 1}/{len(blocks)} {block.arm}: {counted.text()}")

        told = replace(setting, on_call=on_call)
        found = await BlockRun(client, stack, told, arm, block).run()
        saved.add(found)
        say(f"block {block.number + 1}/{len(blocks)} {block.arm}: {found.seconds:.1f} s")


@dataclass(slots=True)
class _Counted:
    """Progress in a block: a line for about every quarter of it."""

    num_calls: int
    done: int = 0

    @property
    def step(self) -> int:
        return max(1, -(-self.num_calls // 4))

    def text(self) -> str:
        return f"{self.done} of {self.num_calls} calls"


async def _warm_up(
    client: Client,
    stack: Stack,
    setting: Setting,
    arms: Sequence[Arm],
    say: Callable[[str], None],
) -> None:
    """Make each arm's first two calls once, with sessions and content of their own."""
    first = setting.workload.agents[0]
    calls = tuple(replace(call, wait_s=0.0, spawned=()) for call in first.calls[:2])
    short = replace(setting.workload, agents=(replace(first, calls=calls, starts_s=0.0),))
    warm = replace(setting, workload=short, misses=None, nonce=f"{setting.nonce}-warm")
    for at, arm in enumerate(arms):
        say(f"warming up {arm.name}")
        await stack.switch(arm)
        block = Block(number=at, arm=arm.name, round=0)
        done = await BlockRun(client, stack, warm, arm, block).run()
        for call in done.calls:
            if call.error:
                raise EngineFault(arm.url, f"{arm.name}: the warm-up failed: {call.error}")
