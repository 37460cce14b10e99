"""The router against vllm-router (Rust, from PyPI) and against calling engines directly.

``python -m tests.perf.bench_router [--quick] [--long [SECONDS]] [--base CHECKOUT]``

Fake engines (prefill and decode, ``router_engine.py``) stream 64 chunks, a load generator
(``router_load.py``) reads them; each is a process of its own, and the candidates take turns
within one run. On a machine of few processors everything shares them, so that rates say how
fast the whole was: the CPU seconds of the router's process beside them say what the router
itself costs. The routers run on the first processor, engines and load on the others.

* *rate*: calls per second at 32 streams, engines as fast as they can.
* *CPU*: of the router's process, per call and per 1,000 chunks, while engines take 10 ms per
  step, so that no two chunks of a stream arrive together.
* *added TTFT*: median at 1 stream minus the median of calling prefill, then decode, directly.
* *TTFT at 32*: median at 32 streams with 10 ms per step.
* ``--long``: 1,000 streams for 5 minutes: every stream complete, memory flat.

``--base`` measures the router of another checkout as well. Prints a table, writes
``build/perf/router.json``, and exits with 1 when a figure is over its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from tests.foreign.environments import prepared
from tests.perf.router_engine import NUM_CHUNKS

ROOT: Final = Path(__file__).resolve().parents[2]
SIZES: Final = {"1 KB": 1000, "100 KB": 100_000, "1 MB": 1_000_000}
OURS, RUST, DIRECT, BASE = "turncache", "vllm-router", "direct", "base"
NUM_STREAMS: Final = 32
_STEP_MS: Final = {"fast": 0.5, "paced": 10.0}
_ADDED_TTFT_LIMIT_MS: Final = {"1 KB": 1.0, "100 KB": 3.0, "1 MB": 15.0}
_MIN_RATE: Final = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of one candidate.

    Attributes:
        figure: what was measured.
        size: of the bodies.
        candidate: who was measured.
        value: the figure in ``unit``.
        limit: what it may be, None where nothing is asked.
        ok: whether it is within the limit.
    """

    figure: str
    size: str
    candidate: str
    value: float
    unit: str
    limit: str | None = None
    ok: bool | None = None


def processors() -> tuple[list[int], list[int]]:
    """Return the processors of the router and those of engines and load."""
    have = sorted(os.sched_getaffinity(0))
    return have[:1], have[1:] or have


class Program:
    """A process that is measured or measures.

    Args:
        command: arguments.
        pins: its processors.
        log: file for what it says, None to read it.
        env: added to the environment.
    """

    def __init__(
        self,
        command: Sequence[str],
        pins: list[int],
        log: Path | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        out: Any = subprocess.PIPE if log is None else log.open("w")
        self.process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=None if log is None else subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, pins),  # noqa: PLW1509 - one thread
        )
        self._view = psutil.Process(self.process.pid)

    def cpu_s(self) -> float:
        """Return the CPU seconds that it and its children have used."""
        views = [self._view, *self._view.children(recursive=True)]
        return sum(view.cpu_times().user + view.cpu_times().system for view in views)

    def memory_mib(self) -> float:
        """Return its resident memory, children included."""
        views = [self._view, *self._view.children(recursive=True)]
        return float(sum(view.memory_info().rss for view in views)) / 2**20

    def stop(self) -> None:
        """End it."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Load:
    """The load generator."""

    def __init__(self, pins: list[int]) -> None:
        self._program = Program([sys.executable, "-m", "tests.perf.router_load"], pins)

    def run(self, **job: Any) -> dict[str, Any]:
        """Run one job and return what it found."""
        process = self._program.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            raise SystemExit("bench: the load generator has ended")
        result: dict[str, Any] = json.loads(line)
        return result

    def stop(self) -> None:
        """End it."""
        self._program.stop()


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def await_http(url: str, program: Program, log: Path) -> None:
    """Wait until a server answers 200.

    Raises:
        SystemExit: it has ended, or says nothing for a minute.
    """
    for _ in range(100):
        if program.process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.1)
    raise SystemExit(f"bench: {url} does not answer; its log ends with\n{log.read_text()[-2000:]}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """Who is measured: the URLs that a call asks in turn, and the router's process."""

    urls: list[str]
    program: Program | None


@contextlib.contextmanager
def running(step_ms: float, names: Sequence[str], base: Path | None) -> Iterator[Any]:
    """Start engines and routers; yields the candidates by name."""
    mine, others = processors()
    programs: list[Program] = []
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str, command: list[str], pins: list[int], url: str, env: Any) -> Program:
            log = Path(folder) / f"{name}.log"
            program = Program(command, pins, log, env)
            programs.append(program)
            await_http(url, program, log)
            return program

        try:
            engines = []
            for side in ("prefill", "decode"):
                port = free_port()
                command = [sys.executable, "-m", "tests.perf.router_engine", "--port", str(port)]
                command += ["--side", side, "--step-ms", str(step_ms)]
                url = f"http://127.0.0.1:{port}"
                start(side, command, others, f"{url}/health", None)
                engines.append(url)
            found = {}
            for name in names:
                if name == DIRECT:
                    found[name] = Candidate(engines, None)
                    continue
                port = free_port()
                url = f"http://127.0.0.1:{port}"
                command, env = router_command(name, port, engines, base)
                found[name] = Candidate([url], start(name, command, mine, f"{url}/health", env))
            yield found
        finally:
            for program in reversed(programs):
                program.stop()


def router_command(
    name: str, port: int, engines: list[str], base: Path | None
) -> tuple[list[str], dict[str, str]]:
    """Return how a router is started: (command, environment)."""
    prefill, decode = engines
    if name == RUST:
        python = prepared("vllm-router", ROOT / "requirements" / "vllm-router.lock")
        command = [str(python), "-m", "vllm_router.launch_router", "--port", str(port)]
        command += ["--vllm-pd-disaggregation", "--prefill", prefill, "--decode", decode]
        command += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
        command += ["--log-level", "error", "--prometheus-port", str(free_port())]
        return command, {"PYTHONPATH": ""}
    home = ROOT if base is None or name == OURS else base
    command = [sys.executable, "-m", "turncache_server.router", "--port", str(port)]
    command += ["--engine", f"name=prefill-0,side=prefill,url={prefill}"]
    command += ["--engine", f"name=decode-0,side=decode,url={decode}"]
    command += ["--log-level", "warning"]  # as vllm-router, which says nothing of a call
    return command, {"PYTHONPATH": f"{home}/sdk:{home}/server"}


def measure(
    load: Load, found: dict[str, Candidate], rounds: int, **job: Any
) -> dict[str, list[dict[str, Any]]]:
    """Run a job on every candidate in turn; the order changes with each round."""
    out: dict[str, list[dict[str, Any]]] = {name: [] for name in found}
    for at in range(rounds):
        names = list(found)
        for name in names if at % 2 == 0 else reversed(names):
            candidate = found[name]
            program = candidate.program
            cpu_s = 0.0 if program is None else program.cpu_s()
            result = load.run(urls=candidate.urls, name=f"{name}-{at}", **job)
            result["cpu_s"] = 0.0 if program is None else program.cpu_s() - cpu_s
            if result["num_errors"]:
                example = result["example"]
                raise SystemExit(f"bench: {result['num_errors']} calls of {name} failed: {example}")
            out[name].append(result)
    return out


def rate(results: list[dict[str, Any]]) -> float:
    """Return calls per second over all rounds."""
    return float(sum(r["num_calls"] for r in results) / sum(r["seconds"] for r in results))


def cpu_ms(results: list[dict[str, Any]]) -> float:
    """Return the router's CPU milliseconds per call."""
    return float(1e3 * sum(r["cpu_s"] for r in results) / sum(r["num_calls"] for r in results))


def ttft_ms(results: list[dict[str, Any]]) -> float:
    """Return the median time to the first event."""
    return 1e3 * statistics.median(value for r in results for value in r["ttft_s"])


def rate_rows(load: Load, found: dict[str, Candidate], size: str, options: Any) -> list[Row]:
    """Measure calls per second with fast engines."""
    seconds = 1.5 if options.quick else 4.0
    job = {"streams": NUM_STREAMS, "size_bytes": SIZES[size]}
    measure(load, found, 1, seconds=0.5, **job)
    runs = measure(load, found, options.rounds, seconds=seconds, **job)
    rows = []
    for name, results in runs.items():
        value = rate(results)
        rows.append(Row(figure="rate", size=size, candidate=name, value=value, unit="calls/s"))
        if name != DIRECT:
            value = cpu_ms(results)
            rows.append(
                Row(
                    figure="CPU at full rate",
                    size=size,
                    candidate=name,
                    value=value,
                    unit="ms/call",
                )
            )
    if RUST in runs:
        share = rate(runs[OURS]) / rate(runs[RUST])
        asked = f">= {_MIN_RATE}" if size != "1 MB" else None
        rows.append(
            Row(
                figure="rate / vllm-router",
                size=size,
                candidate=OURS,
                value=share,
                unit="x",
                limit=asked,
                ok=None if asked is None else share >= _MIN_RATE,
            )
        )
    return rows


def paced_rows(load: Load, found: dict[str, Candidate], size: str, options: Any) -> list[Row]:
    """Measure CPU and TTFT while engines take a real engine's time."""
    rows = []
    routers = {name: found[name] for name in found if name != DIRECT}
    job = {"streams": NUM_STREAMS, "size_bytes": SIZES[size]}
    runs = measure(load, routers, options.rounds, calls=2 if options.quick else 3, **job)
    for name, results in runs.items():
        spent = cpu_ms(results)
        rows.append(Row(figure="CPU", size=size, candidate=name, value=spent, unit="ms/call"))
        rows.append(
            Row(
                figure="CPU per 1,000 chunks",
                size=size,
                candidate=name,
                value=1000 * spent / NUM_CHUNKS,
                unit="ms",
            )
        )
    for name, results in runs.items():
        value, limit = ttft_ms(results), None
        if name == OURS and RUST in runs:
            limit = ttft_ms(runs[RUST])
        rows.append(
            Row(
                figure="TTFT at 32 streams",
                size=size,
                candidate=name,
                value=value,
                unit="ms",
                limit=None if limit is None else f"<= {limit:.1f}",
                ok=None if limit is None else value <= limit,
            )
        )
    return rows


def added_rows(load: Load, found: dict[str, Candidate], size: str, options: Any) -> list[Row]:
    """Measure what routers add to the time to the first event of one stream."""
    calls = 12 if options.quick else 40
    runs = measure(load, found, options.rounds, streams=1, calls=calls, size_bytes=SIZES[size])
    direct = ttft_ms(runs[DIRECT])
    rows = [Row(figure="TTFT", size=size, candidate=DIRECT, value=direct, unit="ms")]
    for name in runs:
        if name == DIRECT:
            continue
        value, most = ttft_ms(runs[name]) - direct, _ADDED_TTFT_LIMIT_MS[size]
        if RUST in runs:
            most = min(most, 2 * (ttft_ms(runs[RUST]) - direct))
        ours = name == OURS
        rows.append(
            Row(
                figure="added TTFT",
                size=size,
                candidate=name,
                value=value,
                unit="ms",
                limit=f"<= {most:.2f}" if ours else None,
                ok=value <= most if ours else None,
            )
        )
    return rows


def long_rows(load: Load, found: dict[str, Candidate], seconds: float) -> list[Row]:
    """Keep 1,000 streams open; the memory after a fifth of the time is the start."""
    program = found[OURS].program
    assert program is not None
    memory: list[float] = []
    calls = 0
    for _ in range(10):
        result = load.run(
            urls=found[OURS].urls, name="long", streams=1000, size_bytes=1000, seconds=seconds / 10
        )
        if result["num_errors"]:
            raise SystemExit(f"bench: {result['num_errors']} streams broke: {result['example']}")
        calls += result["num_calls"]
        memory.append(program.memory_mib())
        print(f"long: {calls} streams, {memory[-1]:.0f} MiB", file=sys.stderr)
    growth = memory[-1] - memory[1]
    common = {"size": "1 KB", "candidate": OURS}
    return [
        Row(figure="1,000 streams: broken", value=0, unit="", limit="<= 0", ok=True, **common),
        Row(figure="1,000 streams: complete", value=calls, unit="", **common),
        Row(
            figure="1,000 streams: memory growth",
            value=growth,
            unit="MiB",
            limit="<= 10",
            ok=growth <= 10,
            **common,
        ),
    ]


def main() -> int:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer calls")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--long", type=float, nargs="?", const=300.0, help="only 1,000 streams")
    parser.add_argument("--base", type=Path, help="another checkout to measure as well")
    parser.add_argument("--no-rust", action="store_true", help="without vllm-router")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--parts", nargs="+", choices=["rate", "paced", "added"])
    options = parser.parse_args()
    parts = options.parts or ["rate", "paced", "added"]
    names = [DIRECT, OURS]
    if not options.no_rust and options.long is None:
        names.append(RUST)
    if options.base is not None:
        names.append(BASE)
    load = Load(processors()[1])
    rows: list[Row] = []
    try:
        if options.long is not None:
            with running(_STEP_MS["paced"] * 10, names, None) as found:
                rows += long_rows(load, found, options.long)
        for kind, part in (("fast", "rate"), ("fast", "added"), ("paced", "paced")):
            if options.long is not None or part not in parts:
                continue
            table = {"rate": rate_rows, "added": added_rows, "paced": paced_rows}[part]
            with running(_STEP_MS[kind], names, options.base) as found:
                for size in options.sizes:
                    rows += table(load, found, size, options)
    finally:
        load.stop()
    show(rows)
    out = ROOT / "build" / "perf" / ("router.json" if options.long is None else "router-long.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0 if all(row.ok is not False for row in rows) else 1


def show(rows: list[Row]) -> None:
    """Print the table."""
    have = os.sched_getaffinity(0)
    print(f"{len(have)} processors, load {os.getloadavg()[0]:.1f}; router on {processors()[0]}")
    print(f"{'figure':30} {'body':7} {'candidate':12} {'value':>10} {'unit':8} {'limit':10}")
    for row in rows:
        verdict = {None: "", True: "ok", False: "over"}[row.ok]
        print(
            f"{row.figure:30} {row.size:7} {row.candidate:12} {row.value:10.2f} {row.unit:8} "
            f"{row.limit or '':10} {verdict}"
        )


if __name__ == "__main__":
    sys.exit(main())
