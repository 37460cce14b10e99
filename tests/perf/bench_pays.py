"""Whether it pays on this machine: ``python -m tests.perf.bench_pays``, as ``make bench``.

``turncache bench`` on a real prefill/decode pair, at several lengths of the context, with
prefill's cache emptied in every wait or in none. It is emptied by vLLM's own reset, which costs
nothing: other traffic that turns over a pool of one session takes two cores longer than the
agent does (the demo does that, at a smaller size). So this shows the return, and that nothing is
lost where nothing presses; retention is the demo's. Prints the report of every setting and one
table of what must be shown, and writes ``build/perf/bench.json`` and a page per setting. Runs
in the engine environment, one pair at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turncache_server.launch.stack import StackSpec, start
from turncache_tools.bench.command import main as bench
from turncache_tools.figure import SCHEMA, Figure
from turncache_tools.shell import progress, write, write_table

OUT: Final = Path(__file__).resolve().parents[2] / "build" / "perf"
CALLS: Final = 12
_SYSTEM, _TOOLS, _NEW, _ANSWER = 400, 600, 150, 64
#: Tokens that the chat template adds to each answer with what follows it.
_TEMPLATE: Final = 11
_BLOCK: Final = 32
#: Room of a pool, in sessions: nothing is evicted within a block.
_ROOM: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One setting.

    Attributes:
        context: tokens of the last call's prompt.
        miss_rate: share of waits in which prefill's cache is emptied.
        least: TTFT of off over ours must be at least this, of the last call when prefill
            misses, of calls 2 and later when nothing presses.
    """

    context: int
    miss_rate: float
    least: float

    @property
    def name(self) -> str:
        """What figures and files are called by."""
        return f"{self.context}_tokens_miss_{self.miss_rate:.0%}".rstrip("%")

    @property
    def first(self) -> int:
        """Tokens of the task, so that the last prompt has the length that is asked for."""
        grown = (CALLS - 1) * (_NEW + _ANSWER + _TEMPLATE)
        return self.context - grown - _SYSTEM - _TOOLS

    @property
    def num_blocks(self) -> int:
        """Blocks of either pool."""
        return _ROOM * (-(-(self.context + _ANSWER) // _BLOCK) + 2)

    def spec(self) -> StackSpec:
        """Return the pair: float32, so that texts can be compared."""
        return StackSpec(
            model="tiny",
            prefill=1,
            decode=1,
            router_port=0,
            dtype="float32",
            max_model_len=-(-(self.context + 4 * _ANSWER) // _BLOCK) * _BLOCK,
            num_blocks={"prefill": self.num_blocks, "decode": self.num_blocks},
            router_settings={"admin": True},
        )

    def options(self, rounds: int, prefill_url: str) -> list[str]:
        """Return the options of ``turncache bench``."""
        miss = ("--miss-rate", self.miss_rate, "--miss-by", "reset", "--reset", prefill_url)
        work = ("--system", _SYSTEM, "--tools", _TOOLS, "--first", self.first, "--new", _NEW)
        size = ("--agents", 1, "--calls", CALLS, "--answer", _ANSWER, "--wait", 0)
        what = (*work, *size, *(miss if self.miss_rate else ()), "--rounds", rounds)
        return [str(each) for each in (*what, "--arms", "both", "--verify")]


SWEEPS: Final = (
    Sweep(context=4000, miss_rate=1.0, least=6.0),
    Sweep(context=8000, miss_rate=1.0, least=8.0),
    Sweep(context=4000, miss_rate=0.0, least=0.97),
)


def figures_of(sweep: Sweep, report: dict[str, Any]) -> list[Figure]:
    """Return what a report must show, and what it shows besides."""
    ours = next(arm for arm in report["bench"]["arms"] if arm["arm"]["name"] == "both")
    off = report["bench"]["arms"][0]
    lines = {
        name: {line["call"]: line["ttft_ms"]["value"] for line in arm["by_call"]}
        for name, arm in (("off", off), ("both", ours))
    }
    # Not through a mapping: JSON has made strings of the numbers of calls.
    gains = {int(call): gain for call, gain in (ours["gain_by_call"] or {}).items()}
    gain = gains.get(CALLS) if sweep.miss_rate else ours["gain"]
    value, baseline = (
        (lines["both"][CALLS], lines["off"][CALLS])
        if sweep.miss_rate
        else (ours["later"]["p50"], off["later"]["p50"])
    )
    ratio = None if gain is None else gain["value"]
    again = report["bench"]["again"]
    return [
        Figure(
            figure=f"ttft_{sweep.name}",
            unit="ms",
            value=value,
            baseline=baseline,
            ratio=ratio,
            limit=sweep.least,
            ok=ratio is not None and ratio >= sweep.least,
        ),
        Figure(
            figure=f"off_against_off_{sweep.name}",
            unit="ratio",
            value=again["value"],
            ok=not any(each["check"] == "off_differs_from_off" for each in ours["refused"]),
        ),
        Figure(
            figure=f"answers_differ_{sweep.name}",
            unit="answers",
            value=report["bench"]["compared"]["both"]["different"],
            limit=0.0,
            ok=report["bench"]["compared"]["both"]["different"] == 0,
        ),
    ]


def run(sweep: Sweep, rounds: int) -> list[Figure]:
    """Start a pair, run the bench on it, and read its figures."""
    file = OUT / f"bench_{sweep.name}.json"
    with start(sweep.spec(), progress=progress) as stack:
        places = ["--url", stack.base_url]
        for engine in stack.engines:
            assert engine.control_address is not None
            places += ["--control", engine.control_address, "--engine", engine.url]
        files = ["--json", str(file), "--html", str(file.with_suffix(".html"))]
        write(f"\n{sweep.context} tokens at call {CALLS}, prefill misses {sweep.miss_rate:.0%}")
        prefill = next(each.url for each in stack.engines if each.side == "prefill")
        bench([*places, *sweep.options(rounds, prefill), *files])
    return figures_of(sweep, json.loads(file.read_text()))


def main(arguments: Sequence[str]) -> int:
    """Run the sweeps that were chosen; 1 when one does not show what it must."""
    parser = argparse.ArgumentParser(description="does it pay on this machine")
    parser.add_argument("--only", type=int, nargs="*", help="sweeps by number, from 1")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args(arguments)
    OUT.mkdir(parents=True, exist_ok=True)
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the reset is one of its paths
    chosen = [SWEEPS[number - 1] for number in options.only or range(1, len(SWEEPS) + 1)]
    found: list[Figure] = []
    for sweep in chosen:
        found += run(sweep, options.rounds)
        done = {"schema": SCHEMA, "figures": [each.to_dict() for each in found]}
        (OUT / "bench.json").write_text(json.dumps(done, indent=1) + "\n")
    write("")
    write_table(
        ("figure", "off", "ours", "off / ours", "must be", ""),
        [
            (
                each.figure.replace("_", " "),
                "-" if each.baseline is None else f"{each.baseline:.0f} {each.unit}",
                f"{each.value:.2f} {each.unit}",
                "-" if each.ratio is None else f"{each.ratio:.2f}",
                "-" if each.limit is None else f"{each.limit:g}",
                "ok" if each.ok else "missed",
            )
            for each in found
        ],
    )
    return 0 if all(each.ok for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
