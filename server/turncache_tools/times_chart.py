"""The chart of times that several reports have: one line for every arm. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from turncache_tools.demo.chart import Frame, Line, line_chart
from turncache_tools.html import LOOKS

_FRAME: Final = Frame(width=928, height=320, right=190)


def times_chart(
    lines: Mapping[str, Sequence[float]],
    *,
    title: str,
    places: Sequence[str] = (),
    along: str = "call",
) -> str:
    """Draw times in milliseconds, or in seconds where one of them has several.

    Args:
        lines: by name; at least one, all of one length.
        title: for screen readers.
        places: what stands below each value; by default numbers from 1.
        along: what they are.
    """
    most = max(max(values) for values in lines.values())
    scale, unit = (1e-3, "s") if most >= 1000 else (1.0, "ms")
    drawn = [
        Line(
            name=name,
            colour=LOOKS[at % len(LOOKS)][0],
            marker=LOOKS[at % len(LOOKS)][1],
            values=tuple(value * scale for value in values),
        )
        for at, (name, values) in enumerate(lines.items())
    ]
    return line_chart(drawn, _FRAME, unit=unit, title=title, places=places, along=along)
