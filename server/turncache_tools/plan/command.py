"""``turncache plan``: options in, report out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turncache.errors import UsageError
from turncache_server.connector.config import DEFAULT_HOST_GB, SECTION, Settings, parse_settings
from turncache_server.cost_profile import CostProfile, load_profile
from turncache_server.retention.trace import Trace, read_trace
from turncache_tools.bench.options import WorkloadOptions, workload_options
from turncache_tools.options import with_options
from turncache_tools.outputs import AsJson, HtmlFile, OutFile, check_files, write_files
from turncache_tools.plan import words
from turncache_tools.plan.load import AdmissionRules, Load, check_load, rig_for
from turncache_tools.plan.page import page
from turncache_tools.plan.priors import PRIORS, prior
from turncache_tools.plan.report import PlanReport
from turncache_tools.plan.search import Planner
from turncache_tools.shell import (
    assignments,
    progress,
    run_verb,
    write,
    write_json,
    write_table,
    write_titled,
)

_RIG = "Engines"
_LOAD = "Load"


def plan(
    *,
    work: WorkloadOptions,
    profile: Annotated[
        Path | None,
        typer.Option(help="Costs, as turncache calibrate wrote them.", rich_help_panel=_RIG),
    ] = None,
    prior_name: Annotated[
        str | None,
        typer.Option(
            "--prior",
            help=f"Costs from published numbers instead: {', '.join(PRIORS)}.",
            rich_help_panel=_RIG,
        ),
    ] = None,
    pool: Annotated[
        int | None,
        typer.Option(
            help="Tokens that the prefill, or only, engine's KV pool holds; else what profile or "
            "trace say.",
            rich_help_panel=_RIG,
        ),
    ] = None,
    decode_pool: Annotated[
        int | None,
        typer.Option(
            help="Likewise of a decode engine; 0: one engine does both.", rich_help_panel=_RIG
        ),
    ] = None,
    host_gb: Annotated[
        list[float] | None,
        typer.Option(
            help="Size of a host tier to try, in 10^9 bytes; once for every size.",
            rich_help_panel=_RIG,
        ),
    ] = None,
    unit: Annotated[
        int,
        typer.Option(
            help="Tokens that pools are reckoned in; 0: chosen by the prompts.",
            rich_help_panel=_RIG,
        ),
    ] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting of the extension: name=value.", rich_help_panel=_RIG),
    ] = None,
    sessions: Annotated[
        int | None,
        typer.Option(
            help="Agents at a time, a place being taken anew when one ends; else they start when "
            "the workload says.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    others: Annotated[
        float,
        typer.Option(help="Ordinary calls per second, without session.", rich_help_panel=_LOAD),
    ] = 0.0,
    others_tokens: Annotated[
        int, typer.Option(help="Tokens of one of them.", rich_help_panel=_LOAD)
    ] = 1000,
    miss_rate: Annotated[
        float,
        typer.Option(
            help="Share of later calls that find nothing on prefill.", rich_help_panel=_LOAD
        ),
    ] = 0.0,
    wait_error: Annotated[
        float,
        typer.Option(
            help="Factor by which expected tool waits may be wrong.", rich_help_panel=_LOAD
        ),
    ] = 2.0,
    admission_wait: Annotated[
        float | None,
        typer.Option(
            help="Also simulate the router's admission, with this longest wait in seconds.",
            rich_help_panel=_LOAD,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 1,
    search: Annotated[
        bool,
        typer.Option(
            "--search/--no-search",
            help="Also seek how many sessions fit, and the best policy and budget.",
        ),
    ] = True,
    out: OutFile = None,
    html: HtmlFile = None,
    as_json: AsJson = False,
) -> None:
    """Simulate what retention, return or more memory would give a workload; needs no engine."""
    costs = _profile(profile, prior_name)
    workload = work.workload(seed=seed)
    load = Load(
        workload=workload,
        sessions=sessions,
        others_per_s=others,
        others_tokens=others_tokens,
        miss_rate=miss_rate,
        wait_error=wait_error,
        seed=seed,
    )
    check_load(load)
    check_files(out=out, html=html)
    observed = _observed(work)
    rig = rig_for(
        costs,
        workload,
        pool=_pool(pool, costs, observed),
        decode_pool=_decode_pool(decode_pool, costs),
        unit=_at_least(unit, "--unit"),
    )
    planner = Planner(
        load=load,
        rig=rig,
        settings=_settings(settings or []),
        host_gb=_sizes(host_gb),
        say=progress,
        admission=_admission(admission_wait),
    )
    started_s = time.perf_counter()
    report = planner.plan(search=search)
    seconds = time.perf_counter() - started_s
    counted = planner.counted
    progress(
        f"{counted.calls:,} calls in {counted.runs} simulations, {seconds:.1f} s: "
        f"{counted.calls / max(seconds, 1e-9):,.0f} calls/s"
    )
    write_files(report.to_dict(), lambda: page(report), out=out, html=html)
    if as_json:
        write_json(report.to_dict())
    else:
        _show(report)


def main(arguments: Sequence[str]) -> int:
    """Run the verb; usage errors are raised."""
    return run_verb(with_options(plan, of=workload_options, place="work"), arguments, "plan")


def _profile(path: Path | None, name: str | None) -> CostProfile:
    if (path is None) == (name is None):
        raise UsageError(
            "costs: give either --profile FILE, as turncache calibrate writes it, or --prior NAME: "
            + ", ".join(PRIORS)
        )
    return load_profile(path) if path is not None else prior(str(name))


def _observed(work: WorkloadOptions) -> Trace | None:
    """Return the trace of mode observe that the workload comes from, if it does."""
    if work.trace is None or '"turncache-trace/' not in (text := work.text())[:400]:
        return None
    return read_trace(text.splitlines(), name=work.trace.name)


def _pool(given: int | None, costs: CostProfile, observed: Trace | None) -> int:
    if given is not None:
        return _at_least(given, "--pool", least=1)
    if costs.pool_tokens is not None:
        return costs.pool_tokens
    if observed is not None:
        return observed.header.num_blocks * observed.header.block_size
    raise UsageError(
        "--pool: how many tokens does the engine's KV pool hold? vLLM says it at its start (GPU KV "
        "cache size); profile and workload do not"
    )


def _decode_pool(given: int | None, costs: CostProfile) -> int | None:
    found = costs.decode_pool_tokens if given is None else _at_least(given, "--decode-pool")
    return found or None


def _at_least(value: int, option: str, least: int = 0) -> int:
    if value < least:
        raise UsageError(f"{option} {value}: expected a number from {least}")
    return value


def _admission(wait_s: float | None) -> AdmissionRules | None:
    if wait_s is None:
        return None
    if not 0 <= wait_s < float("inf"):
        raise UsageError(f"--admission-wait {wait_s}: expected seconds from 0")
    return AdmissionRules(wait_s=wait_s)


def _settings(texts: Sequence[str]) -> Settings:
    return parse_settings({SECTION: assignments(texts, "--set")})


def _sizes(given: Sequence[float] | None) -> Sequence[float]:
    for size in given or ():
        if not 0 < size <= 1e6:
            raise UsageError(f"--host-gb {size:g}: expected a size above 0, in 10^9 bytes")
    return DEFAULT_HOST_GB if given is None else sorted(set(given))


def _show(report: PlanReport) -> None:
    write(words.headline(report))
    write(words.workload_line(report) + "\n")
    write_table(*words.arm_table(report))
    if (admission := words.admission_table(report)) is not None:
        write_titled("New sessions wait for room", admission)
    write_titled("Tokens of a prompt, mean of calls 2 and later", words.token_table(report))
    write_titled("Time to first token by call, medians", words.call_table(report))
    if report.fits is not None:
        write_titled("As sessions become more", words.fit_table(report.fits))
    if report.choices:
        write_titled("Settings tried", words.choice_table(report))
    write("")
    for line in (*words.advice(report), *words.notes(report)):
        write(line)
