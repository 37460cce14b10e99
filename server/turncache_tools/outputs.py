"""Where the verbs that measure or reckon put what they found: screen, JSON, files.

In all of them ``--json`` prints the figures instead of tables, ``--out`` also writes them into a
file, and ``--html`` writes a page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from turncache_tools.shell import check_folder, write_file

AsJson = Annotated[bool, typer.Option("--json", help="Print figures as JSON, not as tables.")]
OutFile = Annotated[
    Path | None, typer.Option("--out", help="Also write the figures here, as JSON.")
]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Also write one HTML page here.")]


def check_files(*, out: Path | None, html: Path | None) -> None:
    """Check before any work that the files can be made.

    Raises:
        UsageError: naming the option, and what is in the way.
    """
    check_folder(out, "--out")
    check_folder(html, "--html")


def write_files(
    data: Mapping[str, Any], page: Callable[[], str], *, out: Path | None, html: Path | None
) -> None:
    """Write what was found into the files that were asked for.

    Args:
        data: the figures.
        page: makes the page.
        out: for the figures.
        html: for the page.

    Raises:
        UsageError: one cannot be written.
    """
    if out is not None:
        write_file(out, json.dumps(data) + "\n", "--out")
    if html is not None:
        write_file(html, page(), "--html")
