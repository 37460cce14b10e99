"""``turncache top`` against control sockets."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.tools.conftest import ControlledEngine, Ran
from turncache.errors import EngineFault
from turncache_server.control.messages import SessionRow, SessionsReply, StatsReply
from turncache_tools.router_looks import TenantWait, Wait
from turncache_tools.top_page import Look, Sight, engine_line, largest, page

Run = Callable[..., Ran]
Control = Callable[..., ControlledEngine]

GAUGES = {"blocks": 100.0, "used_blocks": 25.0, "retained_blocks": 50.0, "mode_on": 1.0}


WAITS = {
    "http://127.0.0.1:8000": [
        Wait(
            name="admission",
            waiting=12_345,
            longest_s=119.4,
            sessions=40,
            tokens=1_976_000,
            fits=2_000_000,
            tenants=[TenantWait(tenant="team-red", waiting=12_345, longest_s=119.4)],
        )
    ]
}


def row(session: str, blocks: int) -> SessionRow:
    """Return a session that waits."""
    return SessionRow(
        session=session, state="waiting", lineages=1, kept_blocks=blocks, expected_s=3, kept_s=60
    )


def look(at_s: float, counters: Mapping[str, float], *rows: SessionRow) -> Look:
    """Return what an engine said."""
    sessions = SessionsReply(
        name="decode-0",
        side="decode",
        rows=list(rows),
        num_sessions=len(rows),
        num_handovers=0,
        num_calls=1,
        block_size=16,
    )
    stats = StatsReply(counters=dict(counters), gauges=GAUGES)
    return Look(at_s=at_s, stats=stats, sessions=sessions)


def test_rates_are_between_two_looks() -> None:
    """Tokens per second of every source, and shares of the pool; the first look has no rates."""
    first = look(10.0, {"prompt_tokens": 100, "local_tokens": 100})
    then = look(12.0, {"prompt_tokens": 400, "local_tokens": 300, "lost_tokens": 40})
    assert engine_line("a", first, None).tokens_per_s is None
    line = engine_line("a", then, first)
    assert line.tokens_per_s == {"local": 100.0, "returned": 0.0, "computed": 0.0, "lost": 20.0}
    assert (line.used, line.retained, line.lost_share, line.state) == (0.25, 0.5, 0.1, "on")


@given(st.integers(0, 1000), st.integers(0, 1000), st.sampled_from(["local", "lost"]))
def test_an_engine_that_began_anew_has_no_rates(before: int, after: int, name: str) -> None:
    """No rate is ever negative."""
    key = f"{name}_tokens"
    line = engine_line("a", look(2.0, {key: after}), look(1.0, {key: before}))
    assert (line.tokens_per_s is None) == (after < before)


def test_the_largest_sessions_of_all_engines_come_first() -> None:
    """By tokens, not by engine; equal ones in an order of their own."""
    looks = {"a": look(1.0, {}, row("x", 3), row("y", 9)), "b": look(1.0, {}, row("z", 5))}
    assert [each[2].session for each in largest(looks, 2)] == ["y", "z"]
    assert largest(looks, 0) == []


def test_engines_and_sessions_are_two_tables(turncache: Run, control: Control) -> None:
    """With what is kept in tokens; one that does not answer is named, and does not end it."""
    engine = control(gauges=GAUGES, stats={"prompt_tokens": 10}, sessions=[row("ab12", 1000)])
    options = ("--count", "2", "--every", "0.1", "--timeout", "0.2")
    ran = turncache("top", engine.address, "tcp://127.0.0.1:1", *options)
    assert ran.code == 0
    assert "16,000" in ran.out
    assert "25.0 %" in ran.out
    assert "tcp://127.0.0.1:1" in ran.out
    assert ran.out.count("ab12") == 2


def test_a_narrow_terminal_folds_no_name() -> None:
    """In 80 columns what happens in a second is a table of its own; a wide one has one for all."""
    counters = {f"{name}_tokens": 4_000_000 for name in ("prompt", "local", "computed", "lost")}
    first, then = look(1.0, {}), look(2.0, counters, row("0123456789ab", 90_000))
    lines = [engine_line("a", then, first)]
    silent = {"tcp://127.0.0.1:5800": EngineFault("tcp://127.0.0.1:5800", "no answer")}
    printed: dict[int, str] = {}
    for width in (80, 200):
        console = Console(width=width, file=StringIO())
        sight = Sight(engines=lines, sessions=largest({"a": then}, 5), waits=WAITS, silent=silent)
        shown = page(sight, width=width)
        with console.capture() as captured:
            console.print(shown)
        printed[width] = captured.get()
    for text in printed.values():
        words = text.split()
        for word in ("decode-0", "0123456789ab", "1,440,000", "4,000,000", "tokens/s"):
            assert word in words
        for word in ("http://127.0.0.1:8000", "admission", "12,345", "team-red", "119", "98.8"):
            assert word in words
        assert max(map(len, text.splitlines())) <= width
        assert text.count("127.0.0.1:5800") == 1
    assert printed[80].split().count("decode-0") == printed[200].split().count("decode-0") + 1


def test_every_look_is_a_line_of_json(turncache: Run, control: Control) -> None:
    """Rates from the second line on."""
    engine = control(gauges=GAUGES, stats={"prompt_tokens": 10}, sessions=[row("ab12", 2)])
    ran = turncache("top", engine.address, "--count", "2", "--every", "0.1", "--json")
    first, second = map(json.loads, ran.out.splitlines())
    assert first["engines"][0]["tokens_per_s"] is None
    assert second["engines"][0]["tokens_per_s"]["local"] == 0.0
    assert second["sessions"][0]["kept_tokens"] == 32


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("tcp://127.0.0.1:1", "--timeout", "0.2"), 4, "tcp://127.0.0.1:1"),
        ((), 2, "nothing to watch"),
        (("--router", "http://127.0.0.1:1", "--timeout", "0.2"), 4, "is it running there?"),
        (("--router", "127.0.0.1:8000"), 2, "--router '127.0.0.1:8000': expected a URL"),
        (("5800", "--every", "0"), 2, "--every 0"),
        (("5800", "--every", "nan"), 2, "--every nan"),
        (("5800", "--rows", "-1"), 2, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_watched(
    turncache: Run, arguments: tuple[str, ...], code: int, says: str
) -> None:
    """Nobody answers at all, or an option is none: said at once."""
    ran = turncache("top", *arguments)
    assert ran.code == code
    assert says in ran.err
