"""``turncache demo``: options, wiring, files, exit codes."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Final, NoReturn

import typer

from turncache.errors import TurncacheError, UsageError
from turncache_server.exits import CHECK_FAILED, INTERRUPTED, OK, exit_code
from turncache_tools.demo.figures import all_figures, least_ratios
from turncache_tools.demo.leftovers import MARKER, Leftovers, Traces
from turncache_tools.demo.machine import commit, host_facts, num_cores, probed_speed
from turncache_tools.demo.page import page
from turncache_tools.demo.report import Report
from turncache_tools.demo.rigs import MODEL, NUM_ENGINES, Engines, StackStarter, Starter
from turncache_tools.demo.screen import Screen, consoles
from turncache_tools.demo.show import Show, Shown
from turncache_tools.demo.sizes import FULL, PAIR_ALONE, QUICK, WHOLE, Sizes, Speed, choose
from turncache_tools.options import with_options
from turncache_tools.outputs import AsJson
from turncache_tools.shell import progress, run_verb

_FULL_MINUTES: Final = 10.0
_QUICK_MINUTES: Final = 3.0
#: One engine on two cores, side by side with others, before one has been started here.
_GUESSED_START_S: Final = 27.0
#: A demo was seen to take a twentieth longer than estimated.
_ESTIMATE_SHARE: Final = 0.94
_LOGS: Final = Path("build", "demo-logs")
_MOST_MINUTES: Final = 24 * 60
_MOST_RUNS: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line asks for."""

    quick: bool
    full: bool
    minutes: float
    num_runs: int
    as_json: bool
    out: Path
    html: Path
    keep_logs: bool


def demo_options(
    *,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="5 calls, shorter texts, our pair only, one arm after another.",
        ),
    ] = False,
    full: Annotated[
        bool, typer.Option("--full", help="Full lengths and traffic, however long it takes.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            help=f"Time to fit into; else {_FULL_MINUTES:g}, or {_QUICK_MINUTES:g} with --quick."
        ),
    ] = None,
    runs: Annotated[
        int, typer.Option(help="Runs per arm; tables show medians.", min=1, max=_MOST_RUNS)
    ] = 1,
    keep_logs: Annotated[
        bool, typer.Option("--keep-logs", help=f"Keep the engines' logs in {_LOGS}.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Write the figures here, as JSON.")] = Path(
        "build/demo.json"
    ),
    html: Annotated[Path, typer.Option(help="Write one HTML page here.")] = Path("build/demo.html"),
    as_json: AsJson = False,
) -> Options:
    """Turn options into what is asked for.

    Raises:
        UsageError: naming the option, its value and what was expected.
    """
    if minutes is not None and not 0 < minutes < _MOST_MINUTES:
        raise UsageError(f"--minutes {minutes:g}: expected minutes above 0")
    for path in (out, html):
        # It may be in a folder that is still to be made.
        if path.is_dir():
            raise UsageError(f"{path}: a folder; name a file in it")
    return Options(
        quick=quick,
        full=full,
        minutes=runs * (_QUICK_MINUTES if quick else _FULL_MINUTES) if minutes is None else minutes,
        num_runs=runs,
        as_json=as_json,
        out=out,
        html=html,
        keep_logs=keep_logs,
    )


def main(arguments: Sequence[str], *, demo: Callable[[Options], int] | None = None) -> int:
    """Run the demo and return its exit code; a command line that cannot be read is raised.

    Args:
        arguments: the command line, without the verb.
        demo: what runs; :func:`run` by default.
    """

    def perform(options: Options) -> None:
        """Let an agent work on real engines while other sessions flood the caches.

        First on one engine, then on a prefill and decode pair, each with and without turncache,
        in turns, call by call. Then the document in its history is exchanged.
        """
        with _ending_on_sigterm():
            raise typer.Exit((demo or run)(options))

    try:
        return run_verb(with_options(perform, of=demo_options, place="options"), arguments, "demo")
    except TurncacheError as error:
        progress(str(error))
        return exit_code(error)
    except KeyboardInterrupt:
        progress("interrupted; everything was stopped")
        return INTERRUPTED


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the demo as Ctrl-C does: in order."""

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run(
    options: Options,
    *,
    probe: Callable[[], Speed] = probed_speed,
    starter: Callable[[Path, Callable[[str], None], Traces], Starter] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Run the demo.

    Args:
        options: what was asked for.
        probe: guesses the machine's speed.
        starter: makes what starts engines; the launcher's stacks by default.
        clock: monotonic seconds.
    """
    began_s = clock()
    live, out = consoles(data=options.as_json)
    screen = Screen(live, out, stock=not options.quick)
    sizes = _sizes(options, probe)
    with _temporary_folder(keep_logs=options.keep_logs) as traces:
        make = starter or _stacks
        show = Show(
            make(traces.folder, progress, traces),
            screen,
            sizes,
            num_runs=options.num_runs,
            salt=f"demo-{traces.marker}",
            clock=clock,
            deadline_s=float("inf") if options.full else began_s + 60 * options.minutes,
        )
        shown = show.run_pair_alone() if options.quick else show.run()
    left = traces.left()
    if left.processes:
        traces.end()
    report = _report(options, shown, left, seconds=clock() - began_s)
    _write(options, report)
    screen.result(report)
    return _end(options, report)


def _sizes(options: Options, probe: Callable[[], Speed]) -> Sizes:
    asked = QUICK if options.quick else FULL
    started = [Engines.PAIR] if options.quick else list(Engines)
    if options.full:
        return asked
    chosen = choose(
        asked,
        probe(),
        num_cores=num_cores(),
        num_runs=options.num_runs,
        start_s=_GUESSED_START_S * sum(NUM_ENGINES[kind] for kind in started),
        limit_s=_ESTIMATE_SHARE * 60 * options.minutes,
        arms=PAIR_ALONE if options.quick else WHOLE,
    )
    if chosen.scale < 1:
        progress(
            f"{options.minutes:g} minutes are too short for the full lengths on this machine: "
            f"texts get {chosen.scale:.0%} of them (--full runs them whole, --minutes gives time)"
        )
    return chosen


def _stacks(folder: Path, say: Callable[[str], None], traces: Traces) -> Starter:
    return StackStarter(folder / "logs", say, started=lambda _: traces.note())


@contextmanager
def _temporary_folder(*, keep_logs: bool) -> Iterator[Traces]:
    """Give everything that is started a temporary folder and a mark, and take both away."""
    folder = Path(tempfile.mkdtemp(prefix="turncache-demo-"))
    ours = {MARKER: secrets.token_hex(4), "TMPDIR": str(folder)}
    # The engines are on this machine: a proxy that is configured for the network is not asked.
    for name in ("no_proxy", "NO_PROXY"):
        ours[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1,localhost")))
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    traces = Traces(marker=ours[MARKER], folder=folder, since_ns=folder.stat().st_ctime_ns)
    try:
        yield traces
    except BaseException:
        # A stack that was still starting has no owner yet.
        traces.end()
        _save_logs(folder)
        raise
    else:
        if keep_logs:
            _save_logs(folder)
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)


def _save_logs(folder: Path) -> None:
    logs = folder / "logs"
    if logs.is_dir():
        shutil.rmtree(_LOGS, ignore_errors=True)
        shutil.copytree(logs, _LOGS)
        progress(f"The engines' logs are in {_LOGS}")


def _report(options: Options, shown: Shown, left: Leftovers, *, seconds: float) -> Report:
    assert shown.last_act is not None
    for what in (*left.processes, *left.files, *(f"port {port}" for port in left.ports)):
        progress(f"left over: {what}")
    return Report(
        host=host_facts(),
        commit=commit(),
        model=MODEL,
        num_runs=options.num_runs,
        sizes=shown.sizes,
        groups=shown.groups,
        seconds=seconds,
        act_seconds=shown.act_seconds,
        rows=tuple(shown.rows),
        last_act=shown.last_act,
        figures=tuple(
            all_figures(
                shown.rows,
                shown.last_act,
                left,
                seconds=seconds,
                # After five short calls there is little to gain: then the ratio only informs.
                least_ratio={} if options.quick else least_ratios(shown.sizes),
            )
        ),
    )


def _write(options: Options, report: Report) -> None:
    for path, text in (
        (options.out, json.dumps(report.to_dict(), indent=1, ensure_ascii=False) + "\n"),
        (options.html, page(report)),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _end(options: Options, report: Report) -> int:
    if options.as_json:
        sys.stdout.write(json.dumps(report.to_dict(), ensure_ascii=False) + "\n")
    progress(f"{options.out} and {options.html} after {report.seconds / 60:.1f} minutes")
    failed = [figure for figure in report.figures if not figure.ok]
    for figure in failed:
        progress(
            f"FAILED: {figure.figure} is {figure.value:g} {figure.unit}"
            + (f", ratio {figure.ratio:.2f}" if figure.ratio is not None else "")
            + f", limit {figure.limit:g}"
        )
    return CHECK_FAILED if failed else OK
