"""What every verb shares: errors as messages, flags after ``--``, output of every kind."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from turncache.errors import TurncacheError, UsageError, why_of
from turncache.spelling import did_you_mean
from turncache_server.exits import INTERRUPTED, OK, exit_code

#: What the parser raises on a wrong command line; its place depends on typer's version.
_REFUSED: Final[type[Exception]] = typer.BadParameter.__mro__[1]
_EXTRA_ARGUMENTS: Final = "turncache.extra_arguments"
#: Width of output that goes nowhere a person looks at it: no table is folded there.
_PIPE_WIDTH: Final = 240
_NUMBER: Final = re.compile(r"-|[+-]?[\d,]+(\.\d+)?( ?(%|\u00d7|s|ms))?")


def _clearer(error: Exception, command: Any, ctx: Any, args: Sequence[str]) -> Exception:
    """Let a usage error of the parser's say what was meant, as our own do."""
    known = {name for p in command.get_params(ctx) for name in (*p.opts, *p.secondary_opts)}
    if name := getattr(error, "option_name", None) if hasattr(error, "possibilities") else None:
        error.possibilities = ()  # type: ignore[attr-defined]
        error.message = f"No such option: {name}{did_you_mean(name, known)}"  # type: ignore[attr-defined]
    elif "unexpected extra argument" in str(error) and "--json" in args and "--out" in known:
        error.message += "; --json takes no file, --out does"  # type: ignore[attr-defined]
    return error


class Verbs(TyperGroup):
    """The group of verbs: the one place where errors become messages and exit codes."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read what stands before the verb."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _REFUSED as error:
            raise _clearer(error, self, ctx, given) from None

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except TurncacheError as error:
            progress(str(error))
            raise typer.Exit(exit_code(error)) from error
        except KeyboardInterrupt as error:
            progress("interrupted")
            raise typer.Exit(INTERRUPTED) from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the verbs with all that is said of them, where the base class cuts it off."""
        verbs = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, verb.get_short_help_str(limit=1000)) for name, verb in verbs if verb]
            )


class Verb(TyperCommand):
    """A verb: plain help in sections, in which no name and no value is cut off."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read its command line."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except _REFUSED as error:
            raise _clearer(error, self, ctx, given) from None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return what stands behind the verb's name: arguments as their metavars say."""
        arguments = [p for p in self.get_params(ctx) if p.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(argument.metavar) for argument in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options, those of one subject together."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            argument = param.param_type_name == "argument"
            title = "Arguments" if argument else getattr(param, "rich_help_panel", "") or "Options"
            name = str(param.metavar) if argument else re.sub(r"<list\[(.+)\]>", r"<\1>", record[0])
            sections.setdefault(title, []).append((name, record[1]))
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


class PassingOn(Verb):
    """A verb whose arguments after ``--`` go to somebody else, untouched."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set aside what follows ``--``."""
        if "--" in args:
            at = args.index("--")
            ctx.meta[_EXTRA_ARGUMENTS] = tuple(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


def extra_arguments(ctx: typer.Context) -> tuple[str, ...]:
    """Return what followed ``--``."""
    return tuple(ctx.meta.get(_EXTRA_ARGUMENTS, ()))


def progress(text: str) -> None:
    """Write a line for people."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def write(text: str) -> None:
    """Write data for people."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_json(data: object) -> None:
    """Write data for programs: one JSON value on one line."""
    write(json.dumps(data))


def write_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write a table for people, as wide as its content needs where there is no terminal."""
    show(make_console(), make_table(columns, rows))


def write_titled(title: str, table: tuple[Sequence[str], Sequence[Sequence[str]]]) -> None:
    """Write a table for people, below a title and apart from what stands before it."""
    write(f"\n{title}")
    write_table(*table)


def make_console() -> Console:
    """Return where tables go, as wide as their content needs where there is no terminal."""
    console = Console(file=sys.stdout)
    return console if console.is_terminal else Console(file=sys.stdout, width=_PIPE_WIDTH)


def show(console: Console, what: RenderableType) -> None:
    """Print; where there is no terminal without the blanks that fill lines up."""
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    for line in captured.get().splitlines():
        write(line.rstrip())


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table in the one form that all verbs use: columns of numbers end at one edge."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(columns):
        cells = [row[at] for row in rows if row[at]]
        numbers = bool(cells) and all(_NUMBER.fullmatch(cell) for cell in cells)
        table.add_column(name, overflow="fold", justify="right" if numbers else "left")
    for row in rows:
        table.add_row(*row)
    return table


def run_verb(verb: Callable[..., None], arguments: Sequence[str], name: str) -> int:
    """Run a verb that has a command line of its own; returns its exit code.

    Args:
        verb: with the options of the command line.
        arguments: what followed its name.
        name: its own.

    Raises:
        TurncacheError: whatever the verb raises.
    """
    own = typer.Typer(add_completion=False, rich_markup_mode=None)
    own.command(cls=Verb)(verb)
    code = typer.main.get_command(own).main(
        list(arguments), prog_name=f"turncache {name}", standalone_mode=False
    )
    if code == INTERRUPTED:
        # The parser turned it into a code without a word.
        raise KeyboardInterrupt
    return code if isinstance(code, int) else OK


def check_seconds(value: float | None, option: str, *, none_too: bool = False) -> None:
    """Check before any work that an option is a time; None is none.

    Args:
        value: of the option.
        option: its name.
        none_too: 0 is a time as well.

    Raises:
        UsageError: it is none, or has no end.
    """
    if value is None or 0 < value < math.inf or (none_too and value == 0):
        return
    least = "from 0" if none_too else "above 0"
    raise UsageError(f"{option} {value:g}: expected seconds {least}")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the singular for one."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def check_folder(path: Path | None, option: str) -> None:
    """Check before any work that a file can be made; None is none.

    Raises:
        UsageError: there is no such folder, or one in its place.
    """
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}")
    if path is not None and path.is_dir():
        raise UsageError(f"{option} {path}: a folder; name a file in it")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"{option} {path}: cannot be written: permission denied")


def write_file(path: Path, text: str, option: str) -> None:
    """Write a file that an option names.

    Raises:
        UsageError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{option} {path}: cannot be written: {why_of(error)}") from error


def assignments(texts: Sequence[str], option: str) -> Mapping[str, Any]:
    """Read ``name=value`` options; a value that is JSON is read as such.

    Raises:
        UsageError: an option without ``=``.
    """
    out: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UsageError(f"{option} {text!r}: expected name=value")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out
