"""What a person sees in the terminal: live answers on stderr, tables on stdout."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from turncache_tools.demo.answers import Answer
from turncache_tools.demo.arms import Sources
from turncache_tools.demo.compare import Verdict
from turncache_tools.demo.figures import Figure
from turncache_tools.demo.report import (
    Report,
    earned_lines,
    hardware_line,
    load_line,
    order_lines,
    scale_line,
)
from turncache_tools.demo.rows import ARMS, Arm, CallRow, Scene, arm_name, rows_of, ttft_by_call

_WIDTH_WITHOUT_TERMINAL = 132
_SCENE_NAMES = {Scene.SINGLE: "One engine", Scene.PAIR: "Pair"}
_VERDICTS = {
    Verdict.REFERENCE: "reference",
    Verdict.EQUAL: "equal",
    Verdict.TIE: "tie",
    Verdict.DIFFERENT: "[bold red]different[/]",
}


def consoles(*, data: bool) -> tuple[Console, Console | None]:
    """Return (console for progress, console for tables or None).

    Args:
        data: stdout is for JSON: no tables.
    """
    live = Console(stderr=True, highlight=False)
    out = Console(highlight=False)
    if not out.is_terminal:
        out = Console(highlight=False, width=_WIDTH_WITHOUT_TERMINAL)
    return live, None if data else out


class Screen:
    """Shows the demo while it runs, and its result.

    Args:
        live: for progress and the model's words.
        out: for tables; None leaves them out.
        stock: the pair's *off* runs on stock engines.
    """

    def __init__(self, live: Console, out: Console | None, *, stock: bool = True) -> None:
        self._live = live
        self._out = out
        self._stock = stock
        self._in_turns = False

    # --- while it runs ------------------------------------------------------------------------

    def act_begins(self, title: str) -> None:
        """Show the title of an act."""
        self._live.rule(f"[bold]{title}", align="left")

    def notes(self, text: str) -> None:
        """Show a line."""
        self._live.print(Text(text, style="dim"))

    def arms_begin(self, scene: Scene, arms: Sequence[Arm], run: int) -> None:
        """Show which arms begin."""
        again = "" if run == 1 else f", run {run}"
        self._in_turns = len(arms) > 1
        names = " and ".join(arm_name(scene, arm, stock=self._stock) for arm in arms)
        turns = ", in turns" if self._in_turns else ""
        self._live.print(f"\n[bold]{_SCENE_NAMES[scene]}: {names}[/]{turns}{again}")

    def call_begins(self, arm: Arm, call: int, brings: str) -> None:
        """Show what a call brings."""
        whose = f"{arm.value}: " if self._in_turns else ""
        self._live.print(Text.assemble((f"{call:>3}  {whose}", "bold"), brings))
        self._live.print("     ", end="")

    def says(self, text: str) -> None:
        """Show what the model says, as it comes, on one line."""
        self._live.print(Text(text.replace("\n", " "), style="italic"), end="", soft_wrap=True)

    def call_ended(self, answer: Answer, sources: Sources) -> None:
        """Show what a call cost."""
        self._live.print()
        parts = [f"{sources.local:,} local"]
        parts += [f"{sources.returned:,} returned"] if sources.returned else []
        parts += [f"{sources.computed:,} computed"]
        self._live.print(
            Text(
                f"     first token {answer.first_s * 1e3:,.0f} ms; prompt "
                f"{len(answer.prompt_ids):,} = {' + '.join(parts)}",
                style="dim",
            )
        )

    def arm_ended(self, rows: list[CallRow]) -> None:
        """Show an arm's table."""
        if self._out is not None:
            first = rows[0]
            name = arm_name(first.scene, first.arm, stock=self._stock)
            self._out.print(_arm_table(rows, f"{_SCENE_NAMES[first.scene]}: {name}"))

    # --- the result ---------------------------------------------------------------------------

    def result(self, report: Report) -> None:
        """Show the summary."""
        if self._out is None:
            return
        out = self._out
        for scene in report.scenes:
            out.print(_ttft_table(report, scene))
        out.print("\n[bold]Who called when[/]")
        for line in order_lines(report):
            out.print(line)
        out.print("\n[bold]Who earned what[/]")
        for line in earned_lines(report):
            out.print(line)
        self._show_last_act(out, report)
        out.print(_figures_table(report.figures))
        out.print(hardware_line(report))
        if shortened := scale_line(report):
            out.print(shortened)

    def _show_last_act(self, out: Console, report: Report) -> None:
        act = report.last_act
        out.print(f"\n[bold]The exchanged document:[/] {act.question}")
        said = [("turncache", act.ours, act.ours_is_from_the_deleted)]
        if act.stock is not None:
            stock = ("stock bidirectional_kv_xfer", act.stock.answer, act.stock_is_from_the_deleted)
            said.insert(0, stock)
        for who, answer, wrong in said:
            verdict = "[red]from the deleted document[/]" if wrong else "[green]not from it[/]"
            out.print(Text(f"  {who}: “{answer}”  "), verdict)


def _arm_table(rows: Sequence[CallRow], title: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("call", justify="right")
    table.add_column("brings", no_wrap=True, max_width=30)
    for name in ("prompt", "local", "returned", "computed", "again"):
        table.add_column(f"{name}\n(tokens)", justify="right")
    table.add_column("reason")
    table.add_column("TTFT\n(ms)", justify="right")
    table.add_column("answer")
    for row in rows:
        table.add_row(
            str(row.call),
            row.brings,
            *(f"{n:,}" for n in (row.prompt, row.local, row.returned, row.computed, row.again)),
            row.reason or "-",
            f"{row.ttft_ms:,.0f}",
            _VERDICTS[row.verdict],
        )
    return table


def _ttft_table(report: Report, scene: Scene) -> Table:
    """Return the TTFT of all arms side by side, and what off takes relative to the last."""
    table = Table(
        title=f"{_SCENE_NAMES[scene]}: time to first token ({load_line(report, scene)})",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    table.add_column("call", justify="right")
    columns = []
    for arm in ARMS[scene]:
        table.add_column(f"{report.arm_name(scene, arm)}\n(ms)", justify="right")
        columns.append(ttft_by_call(rows_of(report.rows, scene, arm)))
    table.add_column("off / on", justify="right")
    for call, values in enumerate(zip(*columns, strict=True), 1):
        table.add_row(
            str(call), *(f"{value:,.0f}" for value in values), f"{values[0] / values[-1]:.1f}"
        )
    return table


def _figures_table(figures: Sequence[Figure]) -> Table:
    table = Table(title="Figures", title_justify="left", title_style="bold", box=None)
    table.add_column("figure")
    for name in ("value", "without", "ratio", "limit"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    table.add_column("")
    for figure in figures:
        table.add_row(
            figure.figure,
            _shown(figure.value),
            _shown(figure.baseline),
            _shown(figure.ratio),
            _shown(figure.limit),
            figure.unit,
            "" if figure.limit is None else "[green]ok[/]" if figure.ok else "[bold red]FAILED[/]",
        )
    return table


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"
