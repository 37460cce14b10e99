"""``turncache calibrate``: options in, a profile out."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from turncache.errors import TurncacheError, UsageError
from turncache_server.cost_profile import CostProfile, dump_profile
from turncache_tools.bench.stack import Places
from turncache_tools.bench.statistics import quantile
from turncache_tools.calibrate import words
from turncache_tools.calibrate.fit import median_error
from turncache_tools.calibrate.measure import LEAST_LENGTHS
from turncache_tools.calibrate.run import Calibration
from turncache_tools.control import SecretFile, control_addresses, fleet_keys
from turncache_tools.figure import SCHEMA
from turncache_tools.outputs import AsJson
from turncache_tools.shell import (
    check_folder,
    check_seconds,
    progress,
    run_verb,
    write,
    write_file,
    write_json,
    write_table,
    write_titled,
)
from turncache_tools.urls import base_url

_LEAST_LENGTH: Final = 128


class TooNoisy(TurncacheError):
    """Raised when what was measured does not fit together: no profile is written."""


def calibrate(
    *,
    url: Annotated[
        str, typer.Option(help="Base URL of the stack; nothing else may use it meanwhile.")
    ] = "http://127.0.0.1:8000",
    out: Annotated[Path, typer.Option(help="Write the profile here.")] = Path(
        "turncache-profile.toml"
    ),
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of an engine, for sizes of pool and KV; prefill first, then decode."
        ),
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Control socket of an engine, for its id.")
    ] = None,
    reset: Annotated[
        str | None,
        typer.Option(
            help="Base URL of prefill, to empty its cache (VLLM_SERVER_DEV_MODE=1): returns of "
            "whole prompts are measured, else those of long answers."
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of prompts, by commas; else 256, 512, ...")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of every measurement; medians count.")] = 3,
    most_seconds: Annotated[
        float, typer.Option(help="No longer prompts once a cold one takes as long, but three.")
    ] = 10.0,
    returns: Annotated[
        bool,
        typer.Option(
            "--with-returns/--without-returns", help="On a pair, also measure what returns cost."
        ),
    ] = True,
    accelerators: Annotated[int, typer.Option(help="Of one prefill engine, to reckon with.")] = 1,
    model: Annotated[str | None, typer.Option(help="Model; else the first listed.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Key.", show_default=False)
    ] = "-",
    timeout: Annotated[float, typer.Option(help="Seconds for one call.")] = 600.0,
    fleet_secret_file: SecretFile = None,
    as_json: AsJson = False,
) -> None:
    """Measure what prefill, host work and transfers cost; exit 1 when it is too noisy to tell."""
    check_folder(out, "--out")
    for option, count in (("--repeats", repeats), ("--accelerators", accelerators)):
        if count < 1:
            raise UsageError(f"{option} {count}: expected a number from 1")
    check_seconds(timeout, "--timeout")
    check_seconds(most_seconds, "--most-seconds")
    keys = fleet_keys(fleet_secret_file)
    controls = control_addresses(control, keyed=keys is not None) if control else ()
    run = Calibration(
        places=Places(
            url=base_url(url, "--url"),
            controls=tuple(controls),
            engines=tuple(base_url(each, "--engine") for each in engine or ()),
            keys=keys,
        ),
        reset=None if reset is None else base_url(reset, "--reset"),
        lengths=_lengths(lengths),
        repeats=repeats,
        most_s=most_seconds,
        returns=returns,
        accelerators=accelerators,
        model=model,
        key=api_key,
        timeout_s=timeout,
        say=progress,
    )
    profile = asyncio.run(run.profile())
    _check(profile, shown=as_json)
    write_file(out, dump_profile(profile), "--out")
    if as_json:
        write_json(
            {"schema": SCHEMA, "figures": [each.to_dict() for each in words.figures(profile)]}
        )
    else:
        _show(profile)
    progress(f"written to {out}: turncache plan --profile {out}")


def main(arguments: Sequence[str]) -> int:
    """Run the verb; usage errors and faults are raised."""
    return run_verb(calibrate, arguments, "calibrate")


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*\d{1,8}\s*", part) or int(part) < _LEAST_LENGTH:
            raise UsageError(
                f"--lengths {text}: {part.strip()!r} is no length: expected tokens from "
                f"{_LEAST_LENGTH}, by commas"
            )
        found.append(int(part))
    if len(set(found)) < LEAST_LENGTHS:
        raise UsageError(
            f"--lengths {text}: expected at least {LEAST_LENGTHS}, or costs cannot be told apart"
        )
    return tuple(sorted(set(found)))


def _check(profile: CostProfile, *, shown: bool) -> None:
    """Refuse a profile that does not fit what was measured.

    Raises:
        TooNoisy: residuals or repetitions lie too far apart.
    """
    error = median_error(profile)
    spread = quantile([point.spread for point in profile.points], 0.5)
    if error <= words.MOST_ERROR and spread <= words.MOST_SPREAD:
        return
    if not shown:
        write_table(*words.point_table(profile))
    off, apart = f"{100 * error:.0f} %", f"{100 * spread:.0f} %"
    most, farthest = f"{100 * words.MOST_ERROR:.0f} %", f"{100 * words.MOST_SPREAD:.0f} %"
    raise TooNoisy(
        f"too noisy for a profile, none is written: the fit is off by {off} in the median (at most "
        f"{most}), repetitions lie {apart} apart (at most {farthest}): is something else running "
        "on this machine or stack? More --repeats help against single outliers"
    )


def _show(profile: CostProfile) -> None:
    write_table(*words.cost_table(profile))
    write_titled("Measured and fitted, medians of time to first token", words.point_table(profile))
    if not profile.pulls:
        write("\nNo cost of returns: one engine, or not asked for. plan then takes one engine.")
