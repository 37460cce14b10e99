"""``turncache report``: traces and live engines, as tables, as figures and as a page."""

from __future__ import annotations

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.server.retention.ghost_calls import flood, serve, spec
from tests.tools.conftest import ControlledEngine, Ran
from turncache_server.retention.ghost import Ghost, ObservedCall
from turncache_server.retention.trace import TraceHeader
from turncache_server.retention.trace_writer import TraceWriter

Run = Callable[..., Ran]
Control = Callable[..., ControlledEngine]


class Day:
    """A short day of an engine: one session that a flood pushes out, one that breaks itself."""

    def __init__(self, *, side: str = "single", mode: str = "observe", error: int = 0) -> None:
        self.calls: list[ObservedCall] = []
        ghost = Ghost(spec(num_blocks=40, block_bytes=10**8, host_gb=(10.0,)))
        ghost.take = self._keeping(ghost.take)  # type: ignore[method-assign]
        serve(ghost, "abcdef", "gh", session="agent")
        serve(ghost, "uvwxyz", session="breaker")
        serve(ghost, "uvWxyz12", session="breaker", local=8)
        flood(ghost, 44)
        serve(ghost, "abcdefghij", session="agent", lost=32, reason="evicted", local=error)
        self.header = TraceHeader(
            trace=f"t-{side}", side=side, mode=mode, block_size=4, num_blocks=40, host_gb=(10.0,)
        )

    def _keeping(self, take: Callable[..., Any]) -> Callable[..., Any]:
        def keeping(event: Any) -> Any:
            call = take(event)
            if call is not None:
                self.calls.append(call)
            return call

        return keeping

    def write(self, path: Path, *, parts: int = 1) -> list[str]:
        """Write the trace in some parts; returns their names."""
        pen = TraceWriter(self.header, key=b"k" * 32, origin_s=0.0)
        names = []
        size = -(-len(self.calls) // parts)
        for part in range(parts):
            name = path.with_name(f"{path.name}.{part}")
            lines = [pen.begin_part(), *map(pen.call, self.calls[part * size :][:size])]
            name.write_text("".join([*lines, pen.speed(9.0, 5000, 10.0)]))
            names.append(str(name))
        return names


def figures(ran: Ran) -> dict[str, dict[str, Any]]:
    """Read figures by name."""
    data = json.loads(ran.out)
    assert data["schema"] == "turncache-figures/1"
    for figure in data["figures"]:
        assert set(figure) == {"figure", "unit", "value", "baseline", "ratio", "limit", "ok"}
    return {figure["figure"]: figure for figure in data["figures"]}


def test_a_trace_becomes_figures(turncache: Run, tmp_path: Path) -> None:
    """What was computed again, what each remedy would save, and the ghost's own check."""
    out = tmp_path / "figures.json"
    ran = turncache("report", *Day().write(tmp_path / "t"), "--json", "--out", str(out))
    assert ran.code == 0, ran.err
    assert ran.out == out.read_text()
    found = figures(ran)
    assert found["computed_again"]["value"] == found["computed_again"]["baseline"] == 32
    assert found["computed_again_retention"]["value"] == 0
    assert found["computed_again_double_pool"]["value"] == 0
    assert found["computed_again_host_10gb"]["value"] == 0
    assert found["prefill_speed"]["value"] == 500
    assert found["saved_retention_seconds"]["value"] == pytest.approx(32 / 500)
    (check,) = (each for name, each in found.items() if name.startswith("ghost_error"))
    assert (check["value"], check["ok"]) == (0, True)
    data = json.loads(ran.out)
    assert data["lost_tokens"] == {"evicted": 32}
    assert [(b["breaks"], b["tokens"], b["worst_at"]) for b in data["breakers"]] == [(1, 16, 8)]


def test_people_get_tables_with_units(turncache: Run, tmp_path: Path) -> None:
    """One page: the first number, remedies, reasons, the session that breaks its own cache."""
    ran = turncache("report", *Day().write(tmp_path / "t"))
    assert ran.code == 0, ran.err
    assert "had been computed before: 32 of" in ran.out
    for text in (
        "computed again, tokens",
        "saved, accelerator s",
        "simulated: retention (mode on)",
        "simulated: a host tier of 10 GB",
        "Sessions that break their own cache",
        "8 of 33",
        "evicted",
        "off by 0.0% of all prompt tokens",
    ):
        assert text in ran.out, text
    assert "agent" not in ran.out
    assert "breaker" not in ran.out


def test_parts_of_a_trace_are_one_engine(turncache: Run, tmp_path: Path) -> None:
    """In any order."""
    names = Day().write(tmp_path / "t", parts=3)
    whole = figures(turncache("report", *Day().write(tmp_path / "w"), "--json"))
    found = figures(turncache("report", *reversed(names), "--json"))
    assert len([name for name in found if name.startswith("ghost_error")]) == 1
    for name in ("calls", "computed_again", "computed_again_retention", "prefill_speed"):
        assert found[name] == whole[name]


def test_a_decode_engine_says_what_return_would_save(turncache: Run, tmp_path: Path) -> None:
    """Answers that decode held when the next prompt came; a single engine has none to give."""
    single = figures(turncache("report", *Day().write(tmp_path / "s"), "--json"))
    assert "saved_return" not in single
    day = Day(side="decode")
    again = [call for call in day.calls if call.from_answers]
    ran = turncache("report", *day.write(tmp_path / "d"), "--json")
    assert figures(ran)["saved_return"]["value"] == sum(call.from_answers for call in again)


def test_a_ghost_that_is_off_is_not_relied_on(turncache: Run, tmp_path: Path) -> None:
    """The engine really had what the ghost says it had not: code 1, and said in words."""
    ran = turncache("report", *Day(error=32).write(tmp_path / "t"))
    assert ran.code == 1
    assert "do not rely on the simulated rows" in ran.out
    assert "not to be relied on: ghost_error" in ran.err


def test_the_page_is_self_contained(turncache: Run, tmp_path: Path) -> None:
    """One file, nothing fetched, well-formed."""
    path = tmp_path / "report.html"
    assert turncache("report", *Day().write(tmp_path / "t"), "--html", str(path)).code == 0
    text = path.read_text()
    assert "http" not in text
    assert "<script" not in text

    class Check(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open_tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: Any) -> None:
            if tag != "meta":
                self.open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            assert self.open_tags.pop() == tag

    checker = Check()
    checker.feed(text)
    assert checker.open_tags == []
    assert "simulated: retention (mode on)" in text


def test_live_engines_are_reported_too(turncache: Run, control: Control) -> None:
    """From their counters; who breaks the cache is in a trace only."""
    engine = control(
        mode="observe",
        stats={
            "observed_calls": 5,
            "observed_prompt_tokens": 1000,
            "observed_computed_tokens": 800,
            "observed_seen_tokens": 500,
            "observed_local_tokens": 200,
            "observed_local_seen_tokens": 200,
            "observed_again_tokens": 300,
            "observed_again_tokens_stock": 300,
            "observed_again_tokens_retention": 100,
            "observed_again_tokens_double": 50,
            "observed_again_tokens_host_64gb": 0,
            "observed_unkept_tokens_expired": 100,
            "observed_prefill_tokens": 4000,
            "observed_prefill_seconds": 2.0,
        },
    )
    found = figures(turncache("report", engine.address, "--json"))
    assert found["computed_again_share"]["value"] == pytest.approx(300 / 800)
    assert found["computed_again_host_64gb"]["value"] == 0
    assert found["saved_retention_seconds"]["value"] == pytest.approx(200 / 2000)
    faster = figures(turncache("report", engine.address, "--prefill-speed", "400", "--json"))
    assert faster["saved_retention_seconds"]["value"] == pytest.approx(0.5)
    ran = turncache("report", engine.address)
    assert "is in a trace only" in ran.out
    assert "expired" in ran.out


def test_nothing_observed_fails_the_command(turncache: Run, control: Control) -> None:
    """With the way out."""
    ran = turncache("report", control().address)
    assert ran.code == 1
    assert "turncache mode" in ran.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, ""),
        (("no/such/file.jsonl",), 2, "no such file"),
        (("nosuchfile",), 2, "no such file"),
        (("tcp://127.0.0.1:1", "--timeout", "0.2"), 4, "tcp://127.0.0.1:1"),
        (("5800", "--prefill-speed", "0"), 2, "above 0"),
    ],
)
def test_what_cannot_be_read_has_the_exit_code_of_who_must_act(
    turncache: Run, arguments: tuple[str, ...], code: int, words: str
) -> None:
    """2 for the caller, 4 for an engine."""
    ran = turncache("report", *arguments)
    assert ran.code == code
    assert words in ran.err


def test_a_newer_trace_is_refused_by_its_name(turncache: Run, tmp_path: Path) -> None:
    """Code 2, and both schemas are named."""
    (name,) = Day().write(tmp_path / "t")
    path = Path(name)
    path.write_text(path.read_text().replace("turncache-trace/1", "turncache-trace/9"))
    ran = turncache("report", name)
    assert ran.code == 2
    assert "turncache-trace/9" in ran.err
    assert "turncache-trace/1" in ran.err
