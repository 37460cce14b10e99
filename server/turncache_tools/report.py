"""``turncache report``: what observed engines computed again, and what would save it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from turncache.errors import EngineFault, UsageError
from turncache_server.control.client import ControlClient
from turncache_server.control.keys import FleetKeys
from turncache_server.control.messages import Hello, HelloReply, Stats, StatsReply
from turncache_server.exits import CHECK_FAILED
from turncache_server.retention.trace import Trace, read_trace
from turncache_tools.control import (
    TIMEOUT_S,
    SecretFile,
    control_addresses,
    fleet_keys,
    is_port,
)
from turncache_tools.observed.page import page
from turncache_tools.observed.remedies import Report, report_on
from turncache_tools.observed.usage import Usage, of_counters, of_traces, total
from turncache_tools.observed.words import (
    Table,
    breaker_table,
    headline,
    notes,
    reason_table,
    remedy_table,
)
from turncache_tools.outputs import AsJson, HtmlFile, OutFile, check_files, write_files
from turncache_tools.shell import (
    check_seconds,
    progress,
    write,
    write_json,
    write_table,
    write_titled,
)


def report(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Traces (setting trace_file; all parts of it), or control sockets of engines in "
            "mode observe: tcp://127.0.0.1:5800, 127.0.0.1:5800 or 5800.",
        ),
    ],
    *,
    prefill_speed: Annotated[
        float | None,
        typer.Option(help="Prompt tokens per second of one accelerator, instead of measured."),
    ] = None,
    out: OutFile = None,
    html: HtmlFile = None,
    fleet_secret_file: SecretFile = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for an answer.")] = TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show what was computed twice, and what retention or more memory would save."""
    if prefill_speed is not None and not prefill_speed > 0:
        raise UsageError(f"--prefill-speed {prefill_speed}: expected tokens per second above 0")
    check_seconds(timeout, "--timeout")
    check_files(out=out, html=html)
    files = [Path(text) for text in sources if Path(text).is_file()]
    addresses = [text for text in sources if not Path(text).is_file()]
    for text in addresses:
        is_address = "://" in text or is_port(text) or (":" in text and "/" not in text)
        if not is_address:
            what = "neither a file nor a port" if text.isdecimal() else "no such file"
            raise UsageError(f"{text!r}: {what}; give a trace or a control socket")
    usages = _of_files(files)
    if addresses or not files:
        keys = fleet_keys(fleet_secret_file)
        engines = control_addresses(addresses, keyed=keys is not None)
        try:
            usages += _of_engines(engines, keys, timeout_s=timeout)
        except EngineFault as error:
            port = error.engine.rpartition(":")[2]
            if port in addresses:
                progress(f"{port}: there is no such file, so that it is taken for a port")
            raise
    made = report_on(usages, total(usages), speed=prefill_speed)
    write_files(made.to_dict(), lambda: page(made), out=out, html=html)
    if as_json:
        write_json(made.to_dict())
    else:
        _show(made)
    if not made.total.calls:
        progress("no call was observed: is an engine in mode observe (turncache mode)?")
        raise typer.Exit(CHECK_FAILED)
    if not made.ok:
        failed = ", ".join(figure.figure for figure in made.figures if not figure.ok)
        progress(f"not to be relied on: {failed}")
        raise typer.Exit(CHECK_FAILED)


def _of_files(files: Sequence[Path]) -> list[Usage]:
    """Read files; parts of one trace are one engine."""
    parts: defaultdict[str, list[tuple[Path, Trace]]] = defaultdict(list)
    for path in files:
        with path.open(encoding="utf-8", errors="replace") as lines:
            trace = read_trace(lines, name=str(path))
        if trace.truncated:
            progress(f"{path}: the last line is cut off and left out")
        parts[trace.header.trace].append((path, trace))
    usages = []
    for found in parts.values():
        found.sort(key=lambda each: each[1].header.part)
        usages.append(of_traces(str(found[-1][0]), [trace for _, trace in found]))
    return usages


def _of_engines(
    addresses: Sequence[str], keys: FleetKeys | None, *, timeout_s: float
) -> list[Usage]:
    usages = []
    with closing(ControlClient(keys)) as client:
        for address in addresses:
            hello = client.ask(address, Hello(), HelloReply, timeout_s=timeout_s)
            stats = client.ask(address, Stats(), StatsReply, timeout_s=timeout_s)
            usages.append(of_counters(address, stats.counters, side=hello.side, mode=hello.mode))
    return usages


def _show(made: Report) -> None:
    write(headline(made) + "\n")
    write_table(*remedy_table(made))
    _show_titled("Why sessions lost what they had", reason_table(made))
    if made.total.breakers is not None:
        _show_titled("Sessions that break their own cache", breaker_table(made))
    write("")
    for note in notes(made):
        write(note)


def _show_titled(title: str, table: Table) -> None:
    if table[1]:
        write_titled(title, table)
