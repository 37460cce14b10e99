"""What every verb shares: exit codes, flags after ``--``, output for people and for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand, TyperGroup

from turncache.errors import EngineFault, EnvironmentFault, TurncacheError, UsageError

OK: Final = 0
CHECK_FAILED: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3
ENGINE: Final = 4
INTERRUPTED: Final = 130

_EXTRA_ARGUMENTS: Final = "turncache.extra_arguments"


def exit_code(error: TurncacheError) -> int:
    """Return the exit code for an error, by who must act."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, EnvironmentFault):
        return ENVIRONMENT
    if isinstance(error, EngineFault):
        return ENGINE
    return CHECK_FAILED


class Verbs(TyperGroup):
    """The group of verbs: the one place where errors become messages and exit codes."""

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


class PassingOn(TyperCommand):
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
    console = Console(file=sys.stdout)
    if not console.is_terminal:
        console = Console(file=sys.stdout, width=240)
    console.print(make_table(columns, rows))


def make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table in the one form that all verbs use."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


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
