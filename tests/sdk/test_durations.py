"""Tool durations: medians per name, bounded, and what several tools at once teach."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.durations import MAX_NAMES, MAX_SAMPLES, Durations
from turncache.protocol import MAX_TOOLS_BYTES, format_tools, parse_tools, tool_key


def test_nothing_measured_says_nothing() -> None:
    """Without a measurement there is no row, not even for any other tool."""
    assert Durations().rows(["search"]) == {}


def test_rows_are_for_the_tools_asked_for() -> None:
    """Only tools that a request offers leave the process, and a row for any other."""
    table = Durations()
    table.observe(["search"], 2.0)
    table.observe(["secret"], 4.0)
    assert table.rows(["search", "never_ran"]) == {"*": 3.0, "search": 2.0}


@given(samples=st.lists(st.floats(0, 3600), min_size=1, max_size=80))
def test_a_row_is_the_median_of_the_latest(samples: list[float]) -> None:
    """The latest 32 durations count, to three digits."""
    table = Durations()
    for seconds in samples:
        table.observe(["search"], seconds)
    expected = statistics.median(samples[-MAX_SAMPLES:])
    assert table.rows(["search"])["search"] == pytest.approx(expected, rel=0.01)


def test_an_outlier_does_not_move_a_row() -> None:
    """One call that waited for a person over lunch is not the tool's duration."""
    table = Durations()
    for seconds in (2.0, 2.1, 1.9, 5000.0):
        table.observe(["search"], seconds)
    assert table.rows(["search"])["search"] == 2.05


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_what_is_no_duration_is_ignored(seconds: float) -> None:
    """A clock that went wrong teaches nothing."""
    table = Durations()
    table.observe(["search"], seconds)
    assert table.rows(["search"]) == {}


def test_an_hour_is_the_most() -> None:
    """A wait of days counts as an hour: nobody keeps KV longer."""
    table = Durations()
    table.observe(["search"], 1e6)
    assert table.rows(["search"])["search"] == 3600.0


def test_several_tools_teach_about_the_slowest() -> None:
    """Results of several tools come together: the wait is the slowest tool's."""
    table = Durations()
    table.observe(["fast"], 1.0)
    table.observe(["slow"], 60.0)
    table.observe(["fast", "slow"], 80.0)
    rows = table.rows(["fast", "slow"])
    assert (rows["fast"], rows["slow"]) == (1.0, 70.0)
    table.observe(["fast", "new"], 30.0)
    assert table.rows(["fast", "new"])["new"] == 30.0
    assert table.rows(["fast"])["fast"] == 1.0
    table.observe(["slow", "newer"], 10.0)
    assert "newer" not in table.rows(["newer"])


def test_unknown_tools_share_their_first_wait() -> None:
    """Before anything is known, each of the tools may be the slow one."""
    table = Durations()
    table.observe(["a", "b"], 5.0)
    assert table.rows(["a", "b"]) == {"*": 5.0, "a": 5.0, "b": 5.0}


def test_names_are_bounded() -> None:
    """A process that makes up tool names does not grow for ever."""
    table = Durations()
    for number in range(2 * MAX_NAMES):
        table.observe([f"tool{number}"], 1.0)
    assert len(table._rows) == MAX_NAMES
    assert "tool0" not in table.rows(["tool0"])


@given(names=st.lists(st.text(min_size=1, max_size=40), max_size=40))
def test_every_name_fits_the_header(names: list[str]) -> None:
    """Whatever tools are called, the header is legal and holds rows under their keys."""
    table = Durations()
    for name in names:
        table.observe([name], 1.5)
    text = format_tools(table.rows(names))
    rows = parse_tools(text)
    assert len(text) <= MAX_TOOLS_BYTES
    assert set(rows) <= {"*", *map(tool_key, names)}


def test_capitals_travel_as_lower_case() -> None:
    """``Bash`` has a row, although keys of the header are lower case."""
    table = Durations()
    table.observe(["Bash"], 2.0)
    assert parse_tools(format_tools(table.rows(["Bash"])))["bash"] == 2.0
