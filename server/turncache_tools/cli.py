"""The command line: verbs are wired here and live in modules of their own."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from turncache_server.exits import OK
from turncache_tools.control import mode, sessions, stats
from turncache_tools.doctor import doctor
from turncache_tools.draining import drain
from turncache_tools.flags import flags
from turncache_tools.report import report
from turncache_tools.router_verb import router, takes_settings
from turncache_tools.serve import serve
from turncache_tools.shell import PassingOn, Verb, Verbs, write
from turncache_tools.stack_options import takes_stack
from turncache_tools.top import top

app = typer.Typer(
    cls=Verbs,
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Keep an agent's KV cache alive while its tools run.",
    epilog="Exit codes: 0 ok, 1 a check failed, 2 usage or configuration, 3 environment, "
    "4 engine, 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write(f"turncache {version('turncache')}")
        raise typer.Exit(OK)


@app.callback()
def common(
    _version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_print_version, help="Show version."),
    ] = False,
) -> None:
    """Keep an agent's KV cache alive while its tools run."""


app.command(cls=PassingOn)(takes_stack(serve))
app.command(cls=PassingOn)(takes_stack(flags))
app.command(cls=Verb)(takes_settings(router))
app.command(cls=Verb)(mode)
app.command(cls=Verb)(stats)
app.command(cls=Verb)(sessions)
app.command(cls=Verb)(top)
app.command(cls=Verb)(drain)
app.command(cls=Verb)(report)
app.command(cls=Verb)(doctor)


def _add_separate(name: str, text: str) -> None:
    """Add a verb with a command line of its own, in ``<name>/command.py``.

    It is imported when it is called: the other verbs must not wait for what it imports.
    """

    def verb(ctx: typer.Context) -> None:
        command = importlib.import_module(f"turncache_tools.{name}.command")
        raise typer.Exit(command.main(ctx.args))

    app.command(
        name,
        help=f"{text}.",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(verb)


_add_separate("bench", "Measure whether it pays on a workload, against a running stack")
_add_separate("calibrate", "Measure what prefill, host and transfers cost on a running stack")
_add_separate("plan", "Simulate what retention, return or more memory would give a workload")
_add_separate("demo", "Show what retention and return are worth, on this machine")


def run(argv: Sequence[str] | None = None) -> int:
    """Run a verb and return its exit code."""
    try:
        app(args=None if argv is None else list(argv), prog_name="turncache")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else OK if end.code is None else 1
    return OK
