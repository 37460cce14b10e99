"""``turncache bench``: options in, report out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from turncache.errors import UsageError
from turncache_server.exits import CHECK_FAILED
from turncache_tools.bench import words
from turncache_tools.bench.agents import Misses
from turncache_tools.bench.arms import check_arms
from turncache_tools.bench.options import WorkloadOptions, workload_options
from turncache_tools.bench.page import page
from turncache_tools.bench.report import Report
from turncache_tools.bench.session import Plan, run
from turncache_tools.bench.stack import Places
from turncache_tools.control import SecretFile, control_addresses, fleet_keys
from turncache_tools.options import with_options
from turncache_tools.outputs import AsJson, HtmlFile, OutFile, check_files, write_files
from turncache_tools.shell import (
    check_seconds,
    progress,
    run_verb,
    write,
    write_json,
    write_table,
    write_titled,
)
from turncache_tools.urls import base_url

_MISS = "Misses on prefill"
#: What a small machine does in minutes.
_AGENTS, _CALLS = 2, 12


def bench(
    *,
    work: WorkloadOptions,
    url: Annotated[str, typer.Option(help="Base URL of the stack.")] = "http://127.0.0.1:8000",
    control: Annotated[
        list[str] | None,
        typer.Option(help="Control socket of an engine, to switch modes; once for every one."),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an engine, for its counters; once for every one."),
    ] = None,
    arms: Annotated[
        str, typer.Option(help="Compared with off: idle, retention, both, ...; by commas.")
    ] = "idle,retention,both",
    arm: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=URL: an arm with a stack of its own; NAME=PREFILL,DECODE: a stock pair, "
            "such as bidirectional=URL,URL."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Blocks of every arm; even ones cancel drift.")] = 2,
    seed: Annotated[int, typer.Option(help="Of workload, texts, misses and resampling.")] = 1,
    model: Annotated[str | None, typer.Option(help="Model; else the first listed.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Key.", show_default=False)
    ] = "-",
    retain: Annotated[
        float | None, typer.Option(help="Seconds that hints ask to keep KV; else auto.")
    ] = None,
    miss_rate: Annotated[
        float | None,
        typer.Option(help="Share of waits that empty prefill's cache.", rich_help_panel=_MISS),
    ] = None,
    miss_by: Annotated[
        str, typer.Option(help="flood (other prompts) or reset.", rich_help_panel=_MISS)
    ] = "flood",
    flood_tokens: Annotated[
        int, typer.Option(help="Tokens of a flood: the pool's size.", rich_help_panel=_MISS)
    ] = 0,
    flood_prompt: Annotated[
        int, typer.Option(help="Tokens of one of its prompts.", rich_help_panel=_MISS)
    ] = 1000,
    reset: Annotated[
        list[str] | None,
        typer.Option(help="Base URL of an engine to reset.", rich_help_panel=_MISS),
    ] = None,
    reset_external: Annotated[
        bool, typer.Option(help="Its outer tiers as well.", rich_help_panel=_MISS)
    ] = False,
    verify: Annotated[bool, typer.Option(help="Compare answers to equal prompts.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one call.")] = 600.0,
    resume: Annotated[
        Path | None, typer.Option(help="Keep finished blocks here, and go on from there.")
    ] = None,
    out: OutFile = None,
    html: HtmlFile = None,
    fleet_secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure whether retention and return pay on a running stack; exit 1 without a clear gain."""
    workload = work.workload(seed=seed)
    if rounds < 1:
        raise UsageError(f"--rounds {rounds}: expected a number from 1")
    check_seconds(timeout, "--timeout")
    check_seconds(retain, "--retain", none_too=True)
    names = tuple(name.strip() for name in arms.split(",") if name.strip())
    urls = _arm_urls(arm or [])
    check_arms(names, urls)
    keys = fleet_keys(fleet_secret_file)
    controls = control_addresses(control, keyed=keys is not None) if control else ()
    places = Places(
        url=base_url(url, "--url"),
        controls=tuple(controls),
        engines=tuple(base_url(each, "--engine") for each in engine or ()),
        keys=keys,
    )
    plan = Plan(
        workload=workload,
        arms=names,
        urls=urls,
        rounds=rounds,
        seed=seed,
        misses=_misses(
            miss_rate,
            miss_by,
            Misses(
                rate=miss_rate or 0.0,
                reset=tuple(base_url(each, "--reset") for each in reset or ()),
                external=reset_external,
                flood_tokens=flood_tokens,
                flood_prompt=flood_prompt,
            ),
        ),
        model=model,
        retain_s=retain,
        verify=verify,
        resume=resume,
        key=api_key,
        timeout_s=timeout,
    )
    check_files(out=out, html=html)
    report = asyncio.run(run(plan, places, progress))
    write_files(report.to_dict(), lambda: page(report), out=out, html=html)
    if as_json:
        write_json(report.to_dict())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(CHECK_FAILED)


def main(arguments: Sequence[str]) -> int:
    """Run the verb; usage errors and faults are raised."""
    shared = {"agents": _AGENTS, "calls": _CALLS}
    verb = with_options(bench, of=workload_options, place="work", defaults=shared)
    return run_verb(verb, arguments, "bench")


def _arm_urls(texts: list[str]) -> dict[str, tuple[str, ...]]:
    out = {}
    for text in texts:
        name, equals, urls = text.partition("=")
        parts = urls.split(",")
        if not equals or not name or len(parts) > 2:
            raise UsageError(f"--arm {text!r}: expected NAME=URL, or NAME=PREFILL,DECODE")
        out[name] = tuple(base_url(each.strip(), f"--arm {name}=") for each in parts)
    return out


def _misses(rate: float | None, by: str, found: Misses) -> Misses | None:
    if rate is None:
        return None
    if not 0 <= rate <= 1:
        raise UsageError(f"--miss-rate {rate}: expected a share from 0 to 1")
    if by == "reset" and not found.reset:
        raise UsageError("--miss-by reset: name prefill's base URL with --reset")
    if by == "flood" and (found.flood_tokens < 1 or found.flood_prompt < 1):
        raise UsageError(
            "--miss-by flood: give the size of prefill's pool, or more, with --flood-tokens"
        )
    if by not in ("flood", "reset") or (by == "flood" and found.reset):
        raise UsageError(f"--miss-by {by}: expected flood, or reset with --reset")
    return found


def _show(report: Report) -> None:
    write(words.headline(report))
    write(report.run.workload + "\n")
    write_table(*words.arm_table(report))
    for title, table in (
        ("Tokens of a prompt, mean of calls 2 and later", words.token_table(report)),
        ("Time to first token by call, medians", words.call_table(report)),
        ("By length of the prompt, medians", words.length_table(report)),
        ("What it costs, per block", words.cost_table(report)),
    ):
        write_titled(title, table)
    write("")
    for note in words.notes(report):
        write(note)
