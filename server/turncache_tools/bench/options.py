"""The options that describe a workload, defined once for the verbs that take one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from turncache.errors import UsageError, why_of
from turncache_tools.bench.traces import read_workload
from turncache_tools.bench.workload import Cut, Parameters, Workload, fitted, parametric

_WORK = "Workload"
_CUT = "Recorded workloads"
#: Agents, and calls of one, where neither a verb nor a user says how many.
_AGENTS, _CALLS = 8, 12
_EVERY = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """A workload as it was asked for; read when the seed is known.

    Attributes:
        numbers: of one that is drawn.
        trace: file of a recorded one, None to draw one.
        cut: how a recorded one is brought to size.
    """

    numbers: Parameters
    trace: Path | None
    cut: Cut

    def workload(self, *, seed: int) -> Workload:
        """Return the workload.

        Raises:
            UsageError: naming the option or the line of the file.
        """
        if self.trace is None:
            return parametric(self.numbers, seed=seed)
        cut = self.cut
        for option, factor in (("--scale-tokens", cut.tokens), ("--scale-waits", cut.waits)):
            if not 0 <= factor < math.inf or (option == "--scale-tokens" and not factor):
                raise UsageError(f"{option} {factor}: expected a factor above 0")
        if not cut.max_wait_s >= 0:
            raise UsageError(f"--max-wait {cut.max_wait_s:g}: expected seconds from 0")
        for option, count in (("--agents", cut.agents), ("--calls", cut.calls)):
            if count < 1:
                raise UsageError(f"{option} {count}: expected a number from 1")
        return fitted(read_workload(self.text(), name=self.trace.name), cut)

    def text(self) -> str:
        """Return what the trace's file holds.

        Raises:
            UsageError: it cannot be read.
        """
        assert self.trace is not None
        try:
            return self.trace.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise UsageError(f"--trace {self.trace}: cannot be read: {why_of(error)}") from error


def workload_options(
    *,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded workload: weka, Mooncake, aiperf, or a trace of mode observe.",
            rich_help_panel=_CUT,
        ),
    ] = None,
    scale_tokens: Annotated[
        float, typer.Option(help="Factor of token counts.", rich_help_panel=_CUT)
    ] = 1.0,
    scale_waits: Annotated[
        float, typer.Option(help="Factor of waits.", rich_help_panel=_CUT)
    ] = 1.0,
    max_wait: Annotated[
        float, typer.Option(help="Longest wait in seconds.", rich_help_panel=_CUT)
    ] = math.inf,
    max_context: Annotated[
        int | None,
        typer.Option(help="An agent ends before a longer prompt.", rich_help_panel=_CUT),
    ] = None,
    agents: Annotated[
        int | None,
        typer.Option(help="How many; all of a trace, or 8.", rich_help_panel=_WORK),
    ] = None,
    calls: Annotated[
        int | None,
        typer.Option(help="Of each agent; all of a trace, or 12.", rich_help_panel=_WORK),
    ] = None,
    system: Annotated[int, typer.Option(help="Tokens.", rich_help_panel=_WORK)] = 400,
    tools: Annotated[
        int, typer.Option(help="Tokens of tool schemas.", rich_help_panel=_WORK)
    ] = 600,
    first: Annotated[int, typer.Option(help="Tokens of the task.", rich_help_panel=_WORK)] = 1000,
    new: Annotated[
        int, typer.Option(help="Median tokens that a call adds.", rich_help_panel=_WORK)
    ] = 250,
    new_sigma: Annotated[
        float, typer.Option(help="Of their lognormal distribution.", rich_help_panel=_WORK)
    ] = 0.0,
    answer: Annotated[int, typer.Option(help="Tokens.", rich_help_panel=_WORK)] = 32,
    wait: Annotated[
        float, typer.Option(help="Median tool wait in seconds.", rich_help_panel=_WORK)
    ] = 1.0,
    wait_sigma: Annotated[
        float, typer.Option(help="Of its lognormal distribution.", rich_help_panel=_WORK)
    ] = 0.0,
    compact_at: Annotated[
        int, typer.Option(help="Tokens at which history is compacted.", rich_help_panel=_WORK)
    ] = 0,
    compact_to: Annotated[
        int, typer.Option(help="Tokens of the summary.", rich_help_panel=_WORK)
    ] = 200,
    subagent_every: Annotated[
        int, typer.Option(help="Every so many calls, a sub-agent.", rich_help_panel=_WORK)
    ] = 0,
    subagent_calls: Annotated[
        int, typer.Option(help="Calls of a sub-agent.", rich_help_panel=_WORK)
    ] = 3,
) -> WorkloadOptions:
    """Turn options into the description of a workload; nothing is read yet."""
    numbers = Parameters(
        agents=_AGENTS if agents is None else agents,
        calls=_CALLS if calls is None else calls,
        system=system,
        tools=tools,
        first=first,
        new=new,
        new_sigma=new_sigma,
        answer=answer,
        wait_s=wait,
        wait_sigma=wait_sigma,
        compact_at=compact_at,
        compact_to=compact_to,
        subagent_every=subagent_every,
        subagent_calls=subagent_calls,
    )
    cut = Cut(
        agents=_EVERY if agents is None else agents,
        calls=_EVERY if calls is None else calls,
        tokens=scale_tokens,
        waits=scale_waits,
        max_wait_s=max_wait,
        max_context=max_context,
    )
    return WorkloadOptions(numbers=numbers, trace=trace, cut=cut)
