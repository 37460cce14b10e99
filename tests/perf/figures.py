"""Figures of the engine's bench: one line of the table each, and a file for every program."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "build" / "perf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number, held against what it must be.

    Attributes:
        figure: its name.
        unit: of value and baseline.
        value: measured with the extension.
        baseline: the same without it, None where there is nothing to compare.
        limit: what ``held`` is checked against, None for a number that only informs.
        held: what is checked; by default the value.
        at_least: the limit is the least, not the most.
    """

    figure: str
    unit: str
    value: float
    baseline: float | None = None
    limit: float | None = None
    held: float | None = None
    at_least: bool = False

    @property
    def checked(self) -> float:
        """What is held against the limit."""
        return self.value if self.held is None else self.held

    @property
    def ok(self) -> bool:
        """Whether the limit holds."""
        if self.limit is None:
            return True
        return self.checked >= self.limit if self.at_least else self.checked <= self.limit


def show(figures: Sequence[Figure] | Iterator[Figure]) -> list[Figure]:
    """Print figures as they come; returns all of them."""
    print(f"{'figure':<64}{'value':>11}{'without':>11}{'checked':>9}{'limit':>9}")
    shown = []
    for each in figures:
        shown.append(each)
        without = "" if each.baseline is None else f"{each.baseline:.4g}"
        limit, checked = "", ""
        if each.limit is not None:
            limit = f"{'>=' if each.at_least else '<='} {each.limit:g}"
            checked = f"{each.checked:.3f}"
        mark = "" if each.ok else "  MISSES"
        name = f"{each.figure}, {each.unit}"
        line = f"{name:<64}{each.value:>11.4g}{without:>11}{checked:>9}{limit:>9}"
        print(line + mark, flush=True)
    return shown


def write(name: str, figures: Sequence[Figure]) -> int:
    """Write figures to ``build/perf/<name>.json``; returns 1 when one misses its limit."""
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    about = {
        "host": f"{platform.processor() or platform.machine()}, Python {platform.python_version()}",
        "commit": git.stdout.strip(),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(each), "ok": each.ok, **about} for each in figures]
    (FOLDER / f"{name}.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(each.ok for each in figures) else 1


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
