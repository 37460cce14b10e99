"""Whether it pays on this machine: ``python -m tests.perf.bench_pays``, as ``make bench``.

``turncache bench`` on real prefill/decode pairs, with prefill's cache emptied in every wait or in
none: off against ours at two lengths of the context, and stock's own off against its
``bidirectional_kv_xfer``. The cache is emptied by vLLM's own reset, which costs nothing: other
traffic that turns over a pool of one session takes two cores longer than the agent does (the demo
does that, at a smaller size). So this shows the return, and that nothing is lost where nothing
presses; retention is the demo's. The host tier is tried, and why it cannot be had is kept.

Two pairs do not fit on two cores, so ours and stock's returns are held against the off of their own
pair. Prints the report of every setting and one table of what must be shown, over all settings that
have been run; writes ``build/perf/bench.json`` and a page per setting. With ``--resume`` finished
blocks stay, and a run can be made in several parts. Runs in the engine environment, one pair at a
time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.perf.real_pair import BLOCK_TOKENS, pair_spec, running
from turncache.errors import TurncacheError
from turncache_server.launch.stack import StackSpec, start
from turncache_tools.bench.command import main as bench
from turncache_tools.figure import SCHEMA, Figure
from turncache_tools.shell import progress, write, write_table

OUT: Final = Path(__file__).resolve().parents[2] / "build" / "perf"
MODEL: Final = "tiny"
_SYSTEM, _TOOLS, _NEW, _ANSWER = 400, 600, 150, 64
#: Tokens that the chat template adds to each answer with what follows it.
_TEMPLATE: Final = 11
#: Room of a pool, in sessions: nothing is evicted within a block.
_ROOM: Final = 4
#: A stock decode engine holds the last answer of every conversation until its TTL has passed.
_STOCK_ROOM: Final = 12
_PORTS: Final = 18600
OURS, STOCK = "both", "bidirectional"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One setting.

    Attributes:
        context: tokens of the last call's prompt.
        calls: of the agent.
        miss_rate: share of waits in which prefill's cache is emptied.
        least: TTFT of off over ours must be at least this, of the last call when prefill
            misses, of calls 2 and later when nothing presses; None where nothing is asked for.
        rounds: of off, the arm, and off again.
        verify: answers are compared.
        stock: vLLM's own returns are measured, not ours.
    """

    context: int
    calls: int = 12
    miss_rate: float
    least: float | None
    rounds: int = 2
    verify: bool = True
    stock: bool = False

    @property
    def name(self) -> str:
        """What figures and files are called by."""
        name = f"{self.context}_tokens_miss_{self.miss_rate:.0%}".rstrip("%")
        return f"{name}_stock" if self.stock else name

    @property
    def arm(self) -> str:
        """What is compared with off."""
        return STOCK if self.stock else OURS

    @property
    def file(self) -> Path:
        """Where the report is kept."""
        return OUT / f"bench_{self.name}.json"

    @property
    def first(self) -> int:
        """Tokens of the task, so that the last prompt has the length that is asked for."""
        grown = (self.calls - 1) * (_NEW + _ANSWER + _TEMPLATE)
        return self.context - grown - _SYSTEM - _TOOLS

    def options(self, rounds: int | None, prefill_url: str, *, verify: bool) -> list[str]:
        """Return the options of ``turncache bench`` but for the stack's places."""
        miss = ("--miss-rate", self.miss_rate, "--miss-by", "reset", "--reset", prefill_url)
        work = ("--system", _SYSTEM, "--tools", _TOOLS, "--first", self.first, "--new", _NEW)
        size = ("--agents", 1, "--calls", self.calls, "--answer", _ANSWER, "--wait", 0)
        what = (*work, *size, *(miss if self.miss_rate else ()))
        kept = OUT / f"bench_{self.name}.jsonl"
        more = ("--rounds", rounds or self.rounds, "--resume", kept)
        files = ("--json", self.file, "--html", self.file.with_suffix(".html"))
        compared = ("--verify",) if self.verify and verify else ()
        return [str(each) for each in (*what, *more, *files, *compared)]


#: At 8,000 tokens an off block of 12 calls takes three minutes on one core: half as many reach the
#: same length. Answers are compared at 4,000: that takes as long as the blocks do.
SWEEPS: Final = (
    Sweep(context=4000, miss_rate=1.0, least=6.0),
    Sweep(context=8000, calls=6, miss_rate=1.0, least=8.0, verify=False),
    Sweep(context=4000, miss_rate=0.0, least=0.97, rounds=4, verify=False),
    Sweep(context=4000, miss_rate=1.0, least=None, stock=True),
)


def measure(sweep: Sweep, rounds: int | None, *, verify: bool) -> None:
    """Start what a sweep needs and run the bench on it."""
    write(f"\n{sweep.context} tokens at call {sweep.calls}, prefill misses {sweep.miss_rate:.0%}")
    context = sweep.context + 4 * _ANSWER
    ours = pair_spec(model=MODEL, context=context, sessions=_ROOM, ports=_PORTS)
    if not sweep.stock:
        with running(ours) as pair:
            options = sweep.options(rounds, pair.prefill, verify=verify)
            bench([*pair.places, "--arms", OURS, *options])
        return
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    with start(_stock_spec(ours, context), progress=progress) as stack:
        prefill, plain, returning = (each.url for each in stack.engines)
        places = ["--url", plain]
        for engine in stack.engines:
            places += ["--engine", engine.url]
        arms = ["--arms", "", "--arm", f"off={prefill},{plain}"]
        arms += ["--arm", f"{STOCK}={prefill},{returning}"]
        bench([*places, *arms, *sweep.options(rounds, prefill, verify=verify)])


def _stock_spec(ours: StackSpec, context: int) -> StackSpec:
    """Return a stock pair with a second decode engine, which alone returns KV."""
    blocks = _STOCK_ROOM * (-(-context // BLOCK_TOKENS) + 2)
    return StackSpec(
        model=ours.model,
        kind="nixl-bidirectional",
        prefill=1,
        decode=2,
        # Prefill's flag does nothing to a call that brings nothing back.
        stock_returns=("prefill-0", "decode-1"),
        engine_port=ours.engine_port,
        decode_port=ours.decode_port,
        nixl_port=ours.nixl_port,
        dtype=ours.dtype,
        max_model_len=ours.max_model_len,
        num_blocks={"prefill": ours.num_blocks["prefill"], "decode": blocks},
    )


def try_host_tier() -> dict[str, str]:
    """Start an engine with vLLM's own host tier; return what came of it."""
    spec = StackSpec(
        model=MODEL,
        kind="plain",
        prefill=1,
        router_port=0,
        max_model_len=1024,
        engine_args=("--kv-offloading-size", "1"),
    )
    try:
        with start(spec, progress=progress):
            return {"offload": "it starts here, and is not measured: give its URL to the bench"}
    except TurncacheError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "Error" in line), lines[0])
        return {"offload": f"not measurable here: {why}"}


def figures_of(sweep: Sweep, report: Mapping[str, Any]) -> list[Figure]:
    """Return what a report must show, and what it shows besides."""
    arm = next(each for each in report["bench"]["arms"] if each["arm"]["name"] == sweep.arm)
    off = report["bench"]["arms"][0]
    by_call = {
        name: {line["call"]: line["ttft_ms"]["value"] for line in each["by_call"]}
        for name, each in (("off", off), ("arm", arm))
    }
    # Not through a mapping: JSON has made strings of the numbers of calls.
    gains = {int(call): gain for call, gain in (arm["gain_by_call"] or {}).items()}
    gain = gains.get(sweep.calls) if sweep.miss_rate else arm["gain"]
    value, baseline = (
        (by_call["arm"][sweep.calls], by_call["off"][sweep.calls])
        if sweep.miss_rate
        else (arm["later"]["p50"], off["later"]["p50"])
    )
    ratio = None if gain is None else gain["value"]
    again = report["bench"]["again"]
    same = not any(each["check"] == "off_differs_from_off" for each in arm["refused"])
    out = [
        Figure(
            figure=f"ttft_{sweep.name}",
            unit="ms",
            value=value,
            baseline=baseline,
            ratio=ratio,
            limit=sweep.least,
            ok=ratio is not None and (sweep.least is None or ratio >= sweep.least),
        ),
        Figure(figure=f"off_against_off_{sweep.name}", unit="ratio", value=again["value"], ok=same),
    ]
    found = report["bench"]["compared"].get(sweep.arm)
    if found is not None and "why" not in found:
        differ = found["different"] + found["edited_differs"]
        out.append(
            Figure(
                figure=f"answers_differ_{sweep.name}",
                unit=f"of {found['compared'] + 1} answers",
                value=float(differ),
                limit=None if sweep.stock else 0.0,
                ok=sweep.stock or differ == 0,
            )
        )
    return out


def against_stock(found: Sequence[Figure]) -> list[Figure]:
    """Return how much more waiting ours saves than stock's own returns do."""
    by_name = {each.figure: each for each in found}
    out = []
    for sweep in SWEEPS:
        mine = by_name.get(f"ttft_{sweep.name}")
        stock = by_name.get(f"ttft_{sweep.name}_stock")
        if mine is None or stock is None or mine.ratio is None or stock.ratio is None:
            continue
        out.append(
            Figure(
                figure=f"off_over_on_{sweep.name}_against_stock",
                unit="ratio",
                value=mine.ratio,
                baseline=stock.ratio,
                ratio=mine.ratio / stock.ratio,
                limit=1.0,
                ok=mine.ratio >= stock.ratio,
            )
        )
    return out


def gathered() -> list[Figure]:
    """Return the figures of every setting that has been run, just now or before."""
    found: list[Figure] = []
    for sweep in SWEEPS:
        if sweep.file.exists():
            found += figures_of(sweep, json.loads(sweep.file.read_text()))
    return [*found, *against_stock(found)]


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.2f} {unit}".strip()


def show(found: Sequence[Figure], elsewhere: Mapping[str, str]) -> None:
    """Print the table."""
    write("")
    write_table(
        ("figure", "off or stock", "ours", "ratio", "must be", ""),
        [
            (
                each.figure.replace("_", " "),
                _number(each.baseline, each.unit),
                _number(each.value, each.unit),
                _number(each.ratio),
                "-" if each.limit is None else f"{each.limit:g}",
                "ok" if each.ok else "missed",
            )
            for each in found
        ],
    )
    for name, why in elsewhere.items():
        write(f"{name}: {why}")


def main(arguments: Sequence[str]) -> int:
    """Run the sweeps that were chosen; 1 when one does not show what it must."""
    parser = argparse.ArgumentParser(description="does it pay on this machine")
    parser.add_argument("--only", type=int, nargs="*", help="sweeps by number, from 1")
    parser.add_argument("--rounds", type=int, help="instead of each sweep's own")
    parser.add_argument("--resume", action="store_true", help="go on with finished blocks")
    parser.add_argument("--no-verify", action="store_true", help="compare no answers")
    parser.add_argument("--host-tier", action="store_true", help="only try vLLM's host tier")
    options = parser.parse_args(arguments)
    OUT.mkdir(parents=True, exist_ok=True)
    tried = OUT / "bench_host_tier.json"
    chosen = [SWEEPS[number - 1] for number in options.only or range(1, len(SWEEPS) + 1)]
    if options.host_tier or not options.only:
        tried.write_text(json.dumps(try_host_tier()) + "\n")
    for sweep in () if options.host_tier else chosen:
        if not options.resume:
            (OUT / f"bench_{sweep.name}.jsonl").unlink(missing_ok=True)
        measure(sweep, options.rounds, verify=not options.no_verify)
    found = gathered()
    elsewhere = json.loads(tried.read_text()) if tried.exists() else {}
    done = {
        "schema": SCHEMA,
        "figures": [each.to_dict() for each in found],
        "elsewhere": elsewhere,
    }
    (OUT / "bench.json").write_text(json.dumps(done, indent=1) + "\n")
    show(found, elsewhere)
    return 0 if all(each.ok for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
