"""The command line as a whole: exit codes, help, and what it needs."""

from __future__ import annotations

import builtins
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from types import ModuleType

import pytest

from tests.tools.conftest import Ran
from turncache.errors import (
    ConfigError,
    EngineFault,
    EnvironmentFault,
    ProtocolError,
    TurncacheError,
    UsageError,
)
from turncache_server.exits import exit_code
from turncache_tools.__main__ import main
from turncache_tools.shell import write_table

Run = Callable[..., Ran]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (ConfigError("x", "y"), 2),
        (ProtocolError("x", "y"), 2),
        (EnvironmentFault("x"), 3),
        (EngineFault("x", "y"), 4),
        (TurncacheError("x"), 1),
    ],
)
def test_the_exit_code_says_who_must_act(error: TurncacheError, code: int) -> None:
    """Usage 2, environment 3, engine 4."""
    assert exit_code(error) == code


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("fly",),
        ("serve",),
        ("serve", "--model"),
        ("serve", "--model", "m", "--wings", "2"),
        ("serve", "--model", "m", "stray"),
        ("serve", "--model", "m", "--prefill", "one"),
        ("serve", "--model", "m", "--prefill", "1"),
        ("serve", "--model", "m", "--mode", "loud"),
        ("serve", "--model", "m", "--num-blocks", "prefill"),
        ("serve", "--model", "m", "--num-blocks", "prefill=many"),
        ("serve", "--model", "m", "--", "--port", "1"),
        ("flags",),
        ("flags", "--model", "m", "--merge", "{"),
        ("flags", "--model", "m", "--merge", "[]"),
        ("flags", "--model", "m", "--set", "colour=red"),
        ("router",),
        ("router", "--config", "/no/such/file"),
        ("mode",),
        ("mode", "on"),
        ("mode", "tcp://192.0.2.1:5800", "on"),
        ("stats", "somewhere"),
        ("doctor", "ftp://127.0.0.1:1"),
        ("stats", "99999"),
        ("stats", "0"),
        ("stats", "5800", "--timeout", "nan"),
        ("sessions", "5800", "--timeout", "0"),
        ("mode", "5800", "on", "--timeout", "-3"),
        ("top", "5800", "--timeout", "inf"),
        ("drain", "5800", "--timeout", "-1"),
        ("drain", "5800", "--settle", "nan"),
        ("report", "99999"),
        ("report", "5800", "--timeout", "-1"),
        ("report", "5800", "--html", "/"),
        ("router", "--config", "/no/such/file", "--json"),
        ("router", "--config", "/no/such/file", "--admin-key"),
        ("bench", "--arms", "both,nope"),
        ("bench", "--timeout", "0"),
        ("bench", "--retain", "-3"),
        ("bench", "--json", "/"),
        ("bench", "--out", "/"),
        ("bench", "--control", "70000"),
        ("calibrate", "--timeout", "-1"),
        ("calibrate", "--most-seconds", "nan"),
        ("plan", "--prior", "qwen3-8b", "--pool", "100000", "--wait-sigma", "1e9"),
        ("plan", "--prior", "qwen3-8b", "--pool", "100000", "--new-sigma", "500"),
        ("bench", "--trace", "x", "--max-wait", "nan"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_line_is_refused(turncache: Run, arguments: Sequence[str]) -> None:
    """The code is 2, the message is on standard error, and no data is printed."""
    ran = turncache(*arguments)
    assert (ran.code, ran.out if arguments else "") == (2, "")
    assert ran.err or not arguments
    assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("stats", "99999"), "99999: expected a port from 1 to 65535"),
        (("report", "99999"), "'99999': neither a file nor a port"),
        (("bench", "--arms", "nope"), "--arms nope: expected off, idle, retention, both"),
        (("drain", "5800", "--timeout", "-1"), "--timeout -1: expected seconds from 0"),
        (("router", "--config", "x", "--json"), "--json: it goes with --check"),
        (("bench", "--out", "/"), "--out /: a folder"),
        (("plan", "--prior", "qwen3-8b", "--pool", "9", "--out", "/"), "--out /: a folder"),
        (("report", "5800", "--html", "/"), "--html /: a folder"),
    ],
    ids=str,
)
def test_the_message_says_what_is_wrong_with_it(
    turncache: Run, arguments: Sequence[str], words: str
) -> None:
    """With the option, its value and what was expected."""
    assert turncache(*arguments).err.startswith(words)


def test_a_number_that_is_no_file_is_said_to_be_taken_for_a_port(turncache: Run) -> None:
    """Whoever meant a file sees why a socket is asked."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = str(nobody.getsockname()[1])
        ran = turncache("report", port, "--timeout", "0.01")
    assert (ran.code, ran.out) == (4, "")
    assert f"{port}: there is no such file, so that it is taken for a port" in ran.err


@pytest.mark.parametrize("verb", ["stats", "sessions"])
def test_an_engine_that_does_not_answer_is_told_once(turncache: Run, verb: str) -> None:
    """And there is no table without anything in it."""
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = str(nobody.getsockname()[1])
        ran = turncache(verb, port, "--timeout", "0.01")
    assert (ran.code, ran.out) == (4, "")
    assert ran.err.count("no answer on the control socket") == 1


@pytest.mark.parametrize(
    "verb",
    [
        *("serve", "flags", "router", "mode", "stats", "sessions", "top", "drain", "report"),
        *("doctor", "bench", "calibrate", "plan", "demo"),
    ],
    ids=str,
)
def test_every_verb_has_help_and_json(turncache: Run, verb: str) -> None:
    """Help names the verb's options, and every verb speaks JSON: the flag takes no value."""
    ran = turncache(verb, "--help")
    assert ran.code == 0
    assert re.search(r"^  --json +[A-Z]", ran.out, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--vresion",), "No such option: --vresion (did you mean --version?)"),
        (("plna",), "Did you mean 'plan'?"),
        (("stats", "5800", "--tiemout", "1"), "--tiemout (did you mean --timeout?)"),
        (("serve", "--model", "m", "--prefil", "1"), "--prefil (did you mean --prefill?)"),
        (("plan", "--prio", "x"), "--prio (did you mean --prior?)"),
        (("demo", "--qiuck"), "--qiuck (did you mean --quick?)"),
        (("router", "--chekc"), "--chekc (did you mean --check?)"),
        (("top", "--xyzzy"), "No such option: --xyzzy"),
        (("bench", "--json", "f.json"), "--json takes no file, --out does"),
        (("mode", "5800", "onn"), "mode 'onn' (did you mean on?)"),
        (("bench", "--arms", "boht"), "--arms boht (did you mean both?)"),
        (("plan", "--prior", "qwen3-8"), "'qwen3-8' (did you mean qwen3-8b?)"),
        (("flags", "--model", "m", "--set", "retain_buget=1"), "(did you mean retain_budget?)"),
        (("flags", "--model", "m", "--set-router", "admision=1"), "(did you mean admission?)"),
    ],
    ids=str,
)
def test_a_slip_is_told_what_is_meant(turncache: Run, arguments: Sequence[str], words: str) -> None:
    """Of a verb, an option, a setting or a value; what is like nothing is guessed nothing."""
    ran = turncache(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert ("did you mean" in ran.err.lower()) == ("did you mean" in words.lower())


@pytest.mark.parametrize("verb", ["plan", "stats"])
def test_ctrl_c_is_said_once(verb: str, turncache: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the verb has a command line of its own or not."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    # Nobody's fingers are in this process.
    monkeypatch.setattr("turncache_tools.control.control_addresses", interrupted)
    monkeypatch.setattr("turncache_tools.plan.command.check_files", interrupted)
    arguments = {"plan": ("--prior", "qwen3-8b", "--pool", "9"), "stats": ("5800",)}[verb]
    ran = turncache(verb, *arguments)
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("verb", ["bench", "calibrate"])
def test_a_stack_that_is_not_there(turncache: Run, verb: str) -> None:
    """One line says where and why, without the layers below; the code is 4."""
    ran = turncache(verb, "--url", "http://127.0.0.1:1")
    assert (ran.code, ran.out) == (4, "")
    assert ran.err == (
        "http://127.0.0.1:1/v1/models: no connection (Connection refused): is it running there?\n"
    )


@pytest.mark.parametrize(
    ("verb", "names"),
    [
        ("serve", ("--tensor-parallel-size", "--return / --no-return", "Ports and places:")),
        ("calibrate", ("http://127.0.0.1:8000", "turncache-profile.toml", "VLLM_SERVER_DEV_MODE")),
        ("mode", ("Usage: turncache mode [OPTIONS] ENGINE... [on|observe|off]",)),
        ("doctor", ("Usage: turncache doctor [OPTIONS] [ENGINE...]",)),
        ("--help", ("return or more memory would give a workload.",)),
    ],
    ids=str,
)
def test_help_of_80_columns_cuts_nothing_off(
    turncache: Run, monkeypatch: pytest.MonkeyPatch, verb: str, names: Sequence[str]
) -> None:
    """Names, values and the subjects of options are whole, and no line is wider."""
    monkeypatch.setenv("COLUMNS", "80")
    ran = turncache(verb, "--help")
    told = " ".join(ran.out.split())
    assert all(name in told for name in names)
    assert "\u2026" not in told
    assert max(map(len, ran.out.splitlines())) <= 80


def test_tables_in_a_pipe_are_as_wide_as_they_need(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers end at one edge, words begin at one, and nothing fills a line up."""
    write_table(("name", "tokens", "why"), [("a", "12,345", ""), ("bcdefg", "-", "it is so")])
    assert capsys.readouterr().out == (
        "name    tokens  why\na       12,345\nbcdefg       -  it is so\n"
    )


def test_the_version_is_ours(turncache: Run) -> None:
    """The version of the distribution is printed."""
    ran = turncache("--version")
    assert ran.code == 0
    assert ran.out.startswith("turncache ")


def test_the_command_is_installed() -> None:
    """The distribution has one command, and it is this one."""
    (command,) = entry_points(group="console_scripts", name="turncache")
    assert command.load() is main


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_way_out_is_printed(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The code is 3, and the line to install is in the message."""
    real = builtins.__import__

    def refuse(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if name.partition(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)
        return real(name, globals_, locals_, fromlist, level)

    for name in [name for name in sys.modules if name.startswith("turncache_tools.")]:
        if not name.startswith(("turncache_tools.demo", "turncache_tools.__main__")):
            monkeypatch.delitem(sys.modules, name)
    # There is no environment without the extra to run this in.
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert main(["--help"]) == 3
    assert "pip install 'turncache[tools]'" in capsys.readouterr().err


def test_it_runs_as_a_module() -> None:
    """``python -m turncache_tools`` is the command."""
    done = subprocess.run(
        [sys.executable, "-m", "turncache_tools", "fly"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such command 'fly'" in done.stderr


def test_the_demo_gets_its_arguments_untouched(turncache: Run) -> None:
    """Options of the demo, help included, are the demo's own to read."""
    ran = turncache("demo", "--help")
    assert ran.code == 0
    assert "--quick" in ran.out
    assert turncache("demo", "--no-such-option").code == 2
