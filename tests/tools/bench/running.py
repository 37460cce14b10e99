"""Running ``turncache bench`` against a fake stack."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.fakes.bench_stack import FakeStack
from turncache_tools.__main__ import main

SMALL = (
    *("--agents", "1", "--calls", "3", "--rounds", "1", "--system", "20", "--tools", "20"),
    *("--first", "60", "--new", "30", "--answer", "40", "--wait", "0"),
)


def bench(stack: FakeStack, *arguments: str, out: Path | None = None) -> tuple[int, Any]:
    """Run the command; return its exit code and the figures, None without a file for them."""
    places = ["--url", f"{stack.url}/v1", "--engine", stack.url]
    if stack.ours:
        places += ["--control", stack.control]
    written = [] if out is None else ["--out", str(out)]
    code = main(["bench", *places, *arguments, *written])
    return code, None if out is None else json.loads(out.read_text())
