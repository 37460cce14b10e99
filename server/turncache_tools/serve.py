"""``turncache serve``: engines and router on this machine, until Ctrl-C."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated, NoReturn

import typer

from turncache_server.exits import OK
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.stack import START_TIMEOUT_S, start
from turncache_tools.shell import progress, write, write_json, write_table


def serve(
    spec: StackSpec,
    *,
    timeout: Annotated[
        float, typer.Option(help="Seconds for all engines to become ready.")
    ] = START_TIMEOUT_S,
    as_json: Annotated[bool, typer.Option("--json", help="Describe the stack as JSON.")] = False,
) -> None:
    """Start one engine, or prefill and decode engines, with the router in front.

    What follows -- goes to every engine: any flag of vllm serve. Serves until Ctrl-C; when a
    part ends by itself everything is stopped and its last log lines are shown.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    with start(spec, progress=progress, timeout_s=timeout) as stack:
        if as_json:
            write_json(stack.describe())
        else:
            write(f"{stack.model} on {stack.base_url}/v1")
            write_table(
                ("engine", "side", "url", "control", "log"),
                [
                    (e.name, e.side, e.url, e.control_address or "-", str(e.log_path))
                    for e in stack.engines
                ],
            )
        stack.wait()


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """End in order, as after Ctrl-C; being told to end is no error."""
    raise SystemExit(OK)
