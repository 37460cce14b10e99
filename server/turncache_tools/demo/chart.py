"""A line chart as inline SVG: a few lines over call numbers, labelled directly. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_LABEL_HEIGHT: Final = 17.0
_MARKER: Final = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        name: label at its end.
        colour: as CSS.
        marker: ``circle``, ``square`` or ``diamond``: colour is never the only difference.
        values: one per call, from call 1; not negative.
    """

    name: str
    colour: str
    marker: str
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Where a chart is drawn, in pixels; the margins hold axis and labels."""

    width: float
    height: float
    left: float = 44.0
    right: float = 150.0
    top: float = 12.0
    bottom: float = 40.0


def nice_step(highest: float, most: int = 5) -> float:
    """Return the distance of grid lines: 1, 2 or 5 times a power of ten, ``most`` at most."""
    if highest <= 0:
        return 1.0
    rough = highest / most
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * (1 - 1e-9))


def spread(wanted: Sequence[float], least: float) -> list[float]:
    """Move label positions apart to at least ``least``, keeping their order and their middle."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [wanted[index] for index in order]
    for _ in range(len(placed) * 4):
        for at in range(len(placed) - 1):
            overlap = least - (placed[at + 1] - placed[at])
            if overlap > 0:
                placed[at] -= overlap / 2
                placed[at + 1] += overlap / 2
    out = [0.0] * len(wanted)
    for position, index in enumerate(order):
        out[index] = placed[position]
    return out


def line_chart(
    lines: Sequence[Line],
    frame: Frame,
    *,
    unit: str,
    title: str,
    places: Sequence[str] = (),
    along: str = "call",
) -> str:
    """Draw lines over call numbers, the value axis from 0.

    Args:
        lines: at least one, all of one length.
        frame: where.
        unit: of the values.
        title: for screen readers.
        places: what stands below each value; by default numbers from 1.
        along: what they are.
    """
    step = nice_step(max(max(line.values) for line in lines))
    top = step * math.ceil(max(max(line.values) for line in lines) / step - 1e-9)
    scale = _Scale(frame, num_calls=len(lines[0].values), top=top)
    opening = (
        f'<svg viewBox="0 0 {frame.width:g} {frame.height:g}" width="{frame.width:g}" '
        f'height="{frame.height:g}" role="img" aria-label="{escape(title)}">'
    )
    names = places or [str(call) for call in range(1, scale.num_calls + 1)]
    parts = [opening, *_grid(scale, step, unit), *_places(scale, names, along)]
    ends = spread([scale.y(line.values[-1]) for line in lines], _LABEL_HEIGHT)
    for line, label_y in zip(lines, ends, strict=True):
        parts += _line(scale, line, label_y, unit)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Scale:
    """From calls and values to pixels."""

    frame: Frame
    num_calls: int
    top: float

    def x(self, call: int) -> float:
        inner = self.frame.width - self.frame.left - self.frame.right
        return self.frame.left + inner * (call - 1) / max(1, self.num_calls - 1)

    def y(self, value: float) -> float:
        inner = self.frame.height - self.frame.top - self.frame.bottom
        return self.frame.top + inner * (1 - value / self.top)


def _number(value: float) -> str:
    return f"{value:,.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:,.0f}"


def _grid(scale: _Scale, step: float, unit: str) -> list[str]:
    frame = scale.frame
    out = []
    for number in range(round(scale.top / step) + 1):
        value, y = number * step, scale.y(number * step)
        kind = "axis" if number == 0 else "grid"
        label = _number(value) + (f" {unit}" if value == scale.top else "")
        out.append(
            f'<line class="{kind}" x1="{frame.left:g}" x2="{frame.width - frame.right:.1f}" '
            f'y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{frame.left - 8:g}" y="{y + 4:.1f}" '
            f'text-anchor="end">{label}</text>'
        )
    return out


def _places(scale: _Scale, names: Sequence[str], along: str) -> list[str]:
    frame = scale.frame
    base = frame.height - frame.bottom
    out = [
        f'<text class="tick" x="{scale.x(place):.1f}" y="{base + 17:.1f}" '
        f'text-anchor="middle">{escape(name)}</text>'
        for place, name in enumerate(names, 1)
    ]
    middle = (scale.x(1) + scale.x(scale.num_calls)) / 2
    out.append(
        f'<text class="tick" x="{middle:.1f}" y="{base + 34:.1f}" text-anchor="middle">'
        f"{escape(along)}</text>"
    )
    return out


def _line(scale: _Scale, line: Line, label_y: float, unit: str) -> list[str]:
    points = [(scale.x(call), scale.y(value)) for call, value in enumerate(line.values, 1)]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    end_x, end_y = points[-1]
    drawn = (
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="2.2" '
        'stroke-linejoin="round"/>'
    )
    out = [drawn, *(_mark(line, x, y) for x, y in points)]
    if abs(label_y - end_y) > 2:
        out.append(
            f'<line x1="{end_x + 6:.1f}" y1="{end_y:.1f}" x2="{end_x + 14:.1f}" '
            f'y2="{label_y:.1f}" stroke="{line.colour}" stroke-width="1"/>'
        )
    out.append(
        f'<text class="label" x="{end_x + 17:.1f}" y="{label_y + 4:.1f}" fill="{line.colour}">'
        f"{escape(line.name)} <tspan class='value'>{_number(line.values[-1])} {unit}</tspan>"
        "</text>"
    )
    return out


def _mark(line: Line, x: float, y: float) -> str:
    fill, size = f'fill="{line.colour}"', _MARKER
    if line.marker == "square":
        return (
            f'<rect x="{x - size + 0.5:.1f}" y="{y - size + 0.5:.1f}" width="{2 * size - 1:g}" '
            f'height="{2 * size - 1:g}" {fill}/>'
        )
    if line.marker == "diamond":
        corners = ((x, y - size - 1), (x + size + 1, y), (x, y + size + 1), (x - size - 1, y))
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
        return f'<polygon points="{path}" {fill}/>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size:g}" {fill}/>'
