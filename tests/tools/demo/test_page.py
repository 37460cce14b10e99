"""The chart and the slide: self-contained, escaped, labels apart."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tools.demo.support import all_rows, last_act, report, row
from turncache_tools.demo.chart import Frame, Line, line_chart, nice_step, spread
from turncache_tools.demo.figures import all_figures
from turncache_tools.demo.leftovers import Leftovers
from turncache_tools.demo.page import page
from turncache_tools.demo.rows import Arm, Scene
from turncache_tools.demo.sizes import FULL

FRAME = Frame(width=600, height=280)


class Tags(HTMLParser):
    """Collects tags and checks that they are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def parsed(html: str) -> Tags:
    """Parse a page."""
    tags = Tags()
    tags.feed(html)
    tags.close()
    assert tags.open == []
    return tags


def test_the_page_needs_nothing_from_anywhere() -> None:
    """No address, no script, no file: it can be mailed and opened anywhere."""
    html = page(report())
    tags = parsed(html)
    assert not {name for name, _ in tags.attributes} & {"src", "href", "onload", "action"}
    assert "<script" not in html
    assert "http" not in html
    assert "url(" not in html


def test_the_page_says_what_was_measured_on_what() -> None:
    """Ratios, hardware and the other kind of hardware."""
    html = page(report())
    assert "18.6\N{MULTIPLICATION SIGN}" in html
    assert "2 cores of Some CPU" in html
    assert "A GPU's numbers differ" in html.replace("&#x27;", "'")
    assert "from the deleted document" in html
    assert "others bring 3,840 tokens in a wait" in html


def test_answers_are_text_and_never_markup() -> None:
    """The model may say anything."""
    html = page(report(last_act=last_act(ours="<script>alert(1)</script>")))
    parsed(html)
    assert "<script" not in html


def test_failures_are_on_the_page() -> None:
    """A slide of a failed demo does not look like one that held."""
    rows = all_rows()
    rows[-1] = row(Scene.PAIR, Arm.RETURN, 12, ttft_ms=3000.0)
    figures = tuple(all_figures(rows, last_act(), Leftovers(), seconds=1.0))
    assert "Failed: pair_return_ttft_last_call" in page(report(rows, figures=figures))


def test_shortened_texts_are_on_the_page() -> None:
    """Whoever shows the slide can see that lengths were cut."""
    assert "texts have 70%" in page(report(sizes=dict.fromkeys(Scene, FULL.scaled(0.7))))
    assert "texts have" not in page(report())


def test_every_line_has_its_name_and_its_last_value() -> None:
    """Direct labels, and a mark per call."""
    lines = [
        Line(name="off", colour="#111", marker="circle", values=(1.0, 2.0, 7.25)),
        Line(name="on & on", colour="#222", marker="square", values=(1.0, 0.5, 0.5)),
        Line(name="back", colour="#333", marker="diamond", values=(1.0, 0.5, 0.45)),
    ]
    svg = line_chart(lines, FRAME, unit="s", title="TTFT")
    parsed(svg)
    assert svg.count("<circle") == svg.count("<polygon") == svg.count("<rect") == 3
    assert "7.25 s" in svg
    assert "on &amp; on" in svg
    labels = sorted(float(y) for y in re.findall(r'class="label" x="[\d.]+" y="([\d.]+)"', svg))
    assert min(b - a for a, b in pairwise(labels)) >= 16.9


@given(values=st.lists(st.floats(0.001, 1e6), min_size=1, max_size=12))
def test_every_value_is_inside_the_frame(values: list[float]) -> None:
    """Whatever was measured, the marks lie between the axes."""
    line = Line(name="a", colour="#111", marker="circle", values=tuple(values))
    svg = line_chart([line], FRAME, unit="s", title="t")
    for x, y in re.findall(r'<circle cx="([\d.-]+)" cy="([\d.-]+)"', svg):
        assert FRAME.left - 0.1 <= float(x) <= FRAME.width - FRAME.right + 0.1
        assert FRAME.top - 0.1 <= float(y) <= FRAME.height - FRAME.bottom + 0.1


@given(highest=st.floats(1e-3, 1e9))
def test_grid_lines_are_round_and_few(highest: float) -> None:
    """1, 2 or 5 times a power of ten, five at most."""
    step = nice_step(highest)
    assert highest / step <= 5.000001
    assert float(f"{step:.1e}"[:3]) in (1.0, 2.0, 5.0)


def test_nothing_measured_still_has_a_grid() -> None:
    """A line of zeros is drawn on the axis."""
    assert nice_step(0) == 1.0


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([10.0, 50.0], [10.0, 50.0]),
        ([10.0, 10.0], [5.0, 15.0]),
        ([20.0, 10.0, 12.0], [24.0, 4.0, 14.0]),
    ],
)
def test_labels_move_apart_and_keep_their_order(wanted: list[float], placed: list[float]) -> None:
    """No label hides another, and none passes one."""
    assert spread(wanted, 10.0) == pytest.approx(placed, abs=0.8)
