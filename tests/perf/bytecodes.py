"""Bytecodes that a piece of code runs: exact on any machine, however busy, and blind to time in C.

They are no time. They are the figure to compare two versions by.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType
from typing import Any


def counted(run: Callable[[], object]) -> Counter[CodeType]:
    """Run something in this thread and count its bytecodes by the code that they are in."""
    counts: Counter[CodeType] = Counter()

    def trace(frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[frame.f_code] += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
    return counts


def print_places(added: Counter[CodeType], *, least: int = 10) -> None:
    """Print where bytecodes are, the most first, down to ``least``."""
    for code, number in added.most_common():
        if number >= least:
            file = "/".join(Path(code.co_filename).parts[-2:])
            print(f"{number:>9,}  {file}:{code.co_firstlineno} {code.co_qualname}")
