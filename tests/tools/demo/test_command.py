"""The command: exit codes, files, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.demo.fake_rig import FakeClock, FakeStarter, Faults
from tests.tools.demo.support import FAST
from turncache.errors import ConfigError, EngineFault, EnvironmentFault, TurncacheError
from turncache_tools.__main__ import main as turncache
from turncache_tools.demo import command
from turncache_tools.demo.leftovers import MARKER, Traces
from turncache_tools.demo.rigs import Engines
from turncache_tools.demo.sizes import Sizes, Speed

QUIET_FIGURE_KEYS = {"figure", "unit", "value", "baseline", "ratio", "limit", "ok"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run in a folder of the test's own, with temporary files in it."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert list(temporary.iterdir()) == []
    assert MARKER not in os.environ


def demo_with(
    faults: Faults | None = None, speed: Speed = FAST
) -> Callable[[command.Options], int]:
    """Return a demo on fake engines."""
    clock = FakeClock()

    def starter(_: Path, __: Callable[[str], None], ___: Traces) -> FakeStarter:
        return FakeStarter(clock, faults)

    def demo(options: command.Options) -> int:
        return command.run(options, probe=lambda: speed, starter=starter, clock=clock)

    return demo


def raising(error: BaseException) -> Callable[[command.Options], int]:
    """Return a demo whose engines do not start."""

    def starter(folder: Path, _: Callable[[str], None], __: Traces) -> Any:
        def start(engines: Engines, ___: Sizes) -> Any:
            if engines is Engines.PAIR:
                logs = folder / "logs" / "pair"
                logs.mkdir(parents=True)
                (logs / "decode-0.log").write_text("why it died\n")
            raise error

        return start

    return lambda options: command.run(options, probe=lambda: FAST, starter=starter)


def test_a_good_demo_ends_with_0_and_writes_both_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One schema for figures; tables on stdout."""
    assert command.main([], demo=demo_with()) == 0
    result = json.loads(Path("build/demo.json").read_text())
    assert result["schema"] == "turncache-figures/1"
    assert result["exact"] is True
    assert result["ok"] is True
    assert {"cpu", "num_cores", "vllm"} <= set(result["host"])
    assert all(set(figure) == QUIET_FIGURE_KEYS for figure in result["figures"])
    assert len(result["arms"]) == 5 * 12 + 2 * 2
    assert result["in_turns"] == {
        "single": [["off", "retention"]],
        "pair": [["off", "return"], ["retention"]],
    }
    assert {"local", "returned", "computed", "again", "reason"} <= set(result["arms"][0])
    assert result["last_act"]["stock_is_from_the_deleted"] is True
    assert "<svg" in Path("build/demo.html").read_text()
    shown = capsys.readouterr()
    assert "Who earned what" in shown.out
    told = " ".join(shown.out.split())
    assert "One engine: off and retention in turns, call by call" in told
    assert "off (stock NixlConnector) and retention and return in turns, call by call" in told
    assert "By itself: retention." in told
    assert "Pair: the last call in turns was made 3 times" in told
    html = Path("build/demo.html").read_text()
    assert "off and on in turns" in html
    assert html.count("The last call in turns: median of 3.") == 1
    assert "build/demo.html" in shown.err


def test_a_failed_check_ends_with_1_and_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """The files are written all the same: they show what was measured."""
    code = command.main(["--quick"], demo=demo_with(Faults(swap_call=2, gap=0.5)))
    assert code == 1
    assert "FAILED: answers_different is 2 answers, limit 0" in capsys.readouterr().err
    assert json.loads(Path("build/demo.json").read_text())["exact"] is False


def test_json_is_all_that_goes_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """For programs; people read stderr."""
    arguments = ["--quick", "--json", "--out", "a/b.json", "--html", "c.html"]
    assert command.main(arguments, demo=demo_with()) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(Path("a/b.json").read_text())
    assert Path("c.html").is_file()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("dtype", "wrong"), 2),
        (EnvironmentFault("no NIXL"), 3),
        (EngineFault("single-0", "ended"), 4),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_end_with_their_code_and_keep_the_logs(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever has to act finds the engines' logs; no result is written."""
    assert command.main(["--quick"], demo=raising(error)) == code
    said = capsys.readouterr().err
    assert ("interrupted" in said) if code == 130 else (str(error) in said)
    assert Path("build/demo-logs/pair/decode-0.log").read_text() == "why it died\n"
    assert not Path("build/demo.json").exists()


def test_sigterm_ends_like_ctrl_c() -> None:
    """A supervisor that stops the demo leaves no engines behind."""

    def told_to_end(_: command.Options) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
        return 0

    assert command.main([], demo=told_to_end) == 130
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--runs", "0"], "--runs"),
        (["--runs", "many"], "--runs"),
        (["--minutes", "-1"], "--minutes -1: expected minutes above 0"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--out", "/"], "/: a folder"),
        (["--qiuck"], "No such option: --qiuck"),
        (["stray"], "stray"),
    ],
)
def test_a_wrong_command_line_ends_with_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says what was expected, before anything is started."""
    assert turncache(["demo", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err


def test_help_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    """It says what will be seen, and every option."""
    assert command.main(["--help"], demo=demo_with()) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Usage: turncache demo [OPTIONS]" in told
    assert "the document in its history is exchanged" in told
    assert "3 with --quick" in told


@pytest.mark.parametrize(
    ("arguments", "minutes"),
    [
        ([], 10.0),
        (["--quick"], 3.0),
        (["--runs", "3"], 30.0),
        (["--runs", "3", "--minutes", "4"], 4.0),
    ],
)
def test_more_runs_get_more_time_unless_a_time_was_named(
    arguments: list[str], minutes: float
) -> None:
    """What is promised holds for one run of every arm."""
    seen: list[command.Options] = []

    def look(options: command.Options) -> int:
        seen.append(options)
        return 0

    assert command.main(arguments, demo=look) == 0
    assert seen[0].minutes == minutes


def test_quick_makes_five_calls_on_our_pair(capsys: pytest.CaptureFixture[str]) -> None:
    """Page and tables do not speak of stock engines that have not run."""
    assert command.main(["--quick"], demo=demo_with()) == 0
    result = json.loads(Path("build/demo.json").read_text())
    assert len(result["arms"]) == 3 * 5
    assert result["last_act"]["stock"] is None
    out = capsys.readouterr().out
    assert "stock" not in out
    assert "one after another on the same engines" in " ".join(out.split())
    html = Path("build/demo.html").read_text()
    assert html.count("<svg") == 1
    assert "in turns" not in html
    assert "stock" not in html


SLOW = Speed(token_s=0.008, attention_s=8e-6, decode_s=0.3)


def test_a_slow_machine_is_told_that_texts_are_shortened(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before anything starts, and in the result."""
    assert command.main(["--json", "--quick"], demo=demo_with(speed=SLOW)) == 0
    assert "texts get 50% of them" in capsys.readouterr().err
    assert json.loads(Path("build/demo.json").read_text())["sizes"]["pair"]["scale"] == 0.5


def test_full_shortens_nothing() -> None:
    """However long it takes."""
    assert command.main(["--json", "--quick", "--full"], demo=demo_with(speed=SLOW)) == 0
    sizes = json.loads(Path("build/demo.json").read_text())["sizes"]
    assert {scene["scale"] for scene in sizes.values()} == {1.0}


def test_every_error_of_ours_has_a_code() -> None:
    """Also one that nobody has thought of ends the demo in order."""
    assert command.main([], demo=raising(TurncacheError("something else"))) == 1
