"""What ``make bench`` runs, and what of its reports must be shown: settings, figures, one table."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from turncache_tools.bench.arms import OFF, StackFacts, choose_arms
from turncache_tools.bench.report import Run, report_on
from turncache_tools.bench.results import BlockResult
from turncache_tools.bench.words import call_table, notes
from turncache_tools.figure import Figure
from turncache_tools.shell import write, write_table

OUT: Final = Path(__file__).resolve().parents[2] / "build" / "perf"
MODEL: Final = "tiny"
SYSTEM, TOOLS, NEW, ANSWER = 400, 600, 150, 64
SHARED: Final = SYSTEM + TOOLS
#: An engine whose cache was emptied by a reset introduces itself to its peers again, which one
#: that has evicted does not: no call is to wait for that.
WAIT_S: Final = 1.0
#: Tokens that the chat template adds to each answer with what follows it.
_TEMPLATE: Final = 11
#: Of the file of a setting.
_NAME: Final = re.compile(r"bench_(?P<context>\d+)_tokens_miss_(?P<miss>\d+)(?P<stock>_stock)?")
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
    def kept(self) -> Path:
        """Where finished blocks are kept."""
        return OUT / f"bench_{self.name}.jsonl"

    @property
    def first(self) -> int:
        """Tokens of the task, so that the last prompt has the length that is asked for."""
        grown = (self.calls - 1) * (NEW + ANSWER + _TEMPLATE)
        return self.context - grown - SYSTEM - TOOLS

    def options(self, rounds: int | None, prefill_url: str, *, verify: bool) -> list[str]:
        """Return the options of ``turncache bench`` but for the stack's places."""
        miss = ("--miss-rate", self.miss_rate, "--miss-by", "reset", "--reset", prefill_url)
        work = ("--system", SYSTEM, "--tools", TOOLS, "--first", self.first, "--new", NEW)
        size = ("--agents", 1, "--calls", self.calls, "--answer", ANSWER, "--wait", WAIT_S)
        what = (*work, *size, *(miss if self.miss_rate else ()))
        more = ("--rounds", rounds or self.rounds, "--resume", self.kept)
        files = ("--out", self.file, "--html", self.file.with_suffix(".html"))
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


def report_kept(sweep: Sweep) -> None:
    """Write the report of finished blocks, without a stack; what ``--verify`` found stays."""
    _, *lines = sweep.kept.read_text().splitlines()
    blocks = [BlockResult.from_dict(json.loads(line)) for line in lines]
    known = json.loads(sweep.file.read_text())["bench"] if sweep.file.exists() else {}
    facts = StackFacts(ours=not sweep.stock, pair=True, controls=2, admin=True, returns=True)
    urls = dict.fromkeys((OFF, STOCK), ("", "")) if sweep.stock else {}
    arms, _ = choose_arms(() if sweep.stock else (OURS,), facts, url="", urls=urls)
    stack = known.get("run", {}).get("stack", {"model": MODEL})
    about = {"workload": f"{sweep.calls} calls", "shared": SHARED}
    report = report_on(
        Run(seed=1, miss_rate=sweep.miss_rate or None, stack=stack, **about),
        arms,
        [],
        _whole_rounds(blocks, len(arms) + 1),
        known.get("compared", {}),
    )
    sweep.file.write_text(json.dumps(report.to_dict()) + "\n")
    write("")
    write_table(*call_table(report))
    for note in notes(report):
        write(note)


def _whole_rounds(blocks: Sequence[BlockResult], num_blocks: int) -> list[BlockResult]:
    """Return the blocks of rounds that have all of theirs."""
    rounds = Counter(block.round for block in blocks)
    return [block for block in blocks if rounds[block.round] == num_blocks]


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
    last = max(by_call["off"])
    gain = gains.get(last) if sweep.miss_rate else arm["gain"]
    value, baseline = (
        (by_call["arm"][last], by_call["off"][last])
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
    """Return how much more waiting ours saves than stock's own returns do, at equal settings."""
    by_name = {each.figure: each for each in found}
    out = []
    for name, mine in by_name.items():
        stock = by_name.get(f"{name}_stock")
        if stock is None or mine.ratio is None or stock.ratio is None or mine.unit != "ms":
            continue
        out.append(
            Figure(
                figure=f"off_over_on_{name}_against_stock",
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
    for file in sorted(OUT.glob("bench_*_tokens_miss_*.json")):
        read = _NAME.fullmatch(file.stem)
        if read is None:
            continue
        name = file.stem.removeprefix("bench_")
        asked = {sweep.name: sweep for sweep in SWEEPS}.get(name)
        sweep = asked or Sweep(
            context=int(read["context"]),
            miss_rate=int(read["miss"]) / 100,
            least=None,
            stock=bool(read["stock"]),
        )
        found += figures_of(sweep, json.loads(file.read_text()))
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
