"""A stack of fake engines and the real router: started, watched, stopped, nobody left."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fakes.vllm_program import processes_with
from turncache.errors import ConfigError, EngineFault, EnvironmentFault
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.stack import Stack, start

MakeSpec = Callable[..., StackSpec]


def quiet(_text: str) -> None:
    """Take progress lines and drop them."""


def ask(stack: Stack, path: str, body: object = None) -> tuple[int, str]:
    """Send one request to where clients go."""
    parts = urlsplit(stack.base_url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    try:
        connection.request(
            "GET" if body is None else "POST",
            path,
            None if body is None else json.dumps(body),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def wait_until(condition: Callable[[], bool], *, timeout_s: float = 20) -> None:
    """Wait for something that another process does."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_one_engine_and_router_serve_a_call_and_end_without_a_trace(
    make_spec: MakeSpec, mark: str
) -> None:
    """One engine with a router answers clients, and stopping leaves no process of either."""
    lines: list[str] = []
    with start(make_spec(), progress=lines.append) as stack:
        assert [engine.side for engine in stack.engines] == ["single"]
        body = {"model": stack.model, "messages": [{"role": "user", "content": "hi"}]}
        status, text = ask(stack, "/v1/chat/completions", body)
        assert (status, "hello" in text) == (200, True)
        assert len(processes_with(mark)) >= 5  # two reapers, router, engine, its children
    assert processes_with(mark) == []
    assert any("single-0: ready" in line for line in lines)
    assert any(line.startswith("warm-up took") for line in lines)


def test_a_pair_is_described_with_every_address(make_spec: MakeSpec, mark: str) -> None:
    """A pair has control addresses and NIXL ports of its own, and says where its logs are."""
    with start(make_spec(prefill=1, decode=2, router=False), progress=quiet) as stack:
        data = json.loads(json.dumps(stack.describe()))
        assert [e["name"] for e in data["engines"]] == ["prefill-0", "decode-0", "decode-1"]
        addresses = {e["control_address"] for e in data["engines"]}
        ports = {e["nixl_port"] for e in data["engines"]}
        assert len(addresses) == len(ports) == 3
        for engine in stack.engines:
            os.kill(engine.pid, 0)
            assert engine.log_path.is_file()
    assert processes_with(mark) == []


@pytest.mark.parametrize("kind", ["nixl", "nixl-bidirectional"])
def test_a_stock_pair_has_no_router_and_is_warmed_up_through_both_engines(
    make_spec: MakeSpec, kind: str
) -> None:
    """A stock pair is called prefill first, then decode, which is also its address."""
    with start(make_spec(prefill=1, decode=1, kind=kind), progress=quiet) as stack:
        assert stack.router_pid is None
        assert stack.base_url == stack.engines[1].url
        assert stack.engines[0].control_address is None
        for engine in stack.engines:
            assert "POST /v1/completions" in engine.log_path.read_text()


def test_engines_get_our_flags_then_the_callers(make_spec: MakeSpec) -> None:
    """Flags of the caller come last, so that they win; the environment has the CPU rig."""
    spec = make_spec(
        prefill=1,
        decode=1,
        engine_args=("--echo-facts", "--block-size", "16"),
        router=False,
        warm_up=False,
    )
    with start(spec, progress=quiet) as stack:
        facts = json.loads(stack.engines[0].log_path.read_text().splitlines()[0])
    argv = facts["argv"]
    assert argv[-3:] == ["--echo-facts", "--block-size", "16"]
    assert argv.index("--block-size") < len(argv) - 2
    assert facts["environ"]["UCX_TLS"] == "tcp"
    assert facts["environ"]["PYTHONPATH"].split(":")[0].endswith("cpu_rig")


def test_an_engine_that_fails_names_the_cause_and_stops_the_others(
    make_spec: MakeSpec, mark: str
) -> None:
    """A death during start ends everything, and the error has cause, way out and log lines."""
    spec = make_spec(router=False, engine_args=("--fail", "RuntimeError: Address already in use"))
    with pytest.raises(EngineFault) as caught:
        start(spec, progress=quiet)
    text = str(caught.value)
    assert caught.value.engine == "single-0"
    assert "ended with exit code 1 during start: a port that it needs is in use" in text
    assert "move the base ports" in text
    assert "  RuntimeError: Address already in use" in text
    assert processes_with(mark) == []


def test_a_cause_far_above_the_end_of_the_log_is_found_and_shown(make_spec: MakeSpec) -> None:
    """An engine core's error is followed by tracebacks of everybody who waited for it."""
    text = "MemoryError: the cause\n" + "traceback\n" * 200 + "RuntimeError: see above"
    with pytest.raises(EngineFault, match="there is too little memory") as caught:
        start(make_spec(router=False, engine_args=("--fail", text)), progress=quiet)
    lines = str(caught.value).splitlines()
    assert "  MemoryError: the cause" in lines
    assert lines[-1] == "  RuntimeError: see above"
    assert lines.count("  traceback") == 59


def test_a_refused_flag_is_the_callers_mistake(make_spec: MakeSpec) -> None:
    """A flag that vLLM does not know is reported as configuration, with the flag's name."""
    spec = make_spec(
        router=False, engine_args=("--fail", "api_server.py: error: unrecognized arguments: --foo")
    )
    with pytest.raises(ConfigError, match="vLLM knows no such flag: --foo"):
        start(spec, progress=quiet)


def test_an_engine_that_is_never_ready_is_given_up(make_spec: MakeSpec, mark: str) -> None:
    """The time limit of a start is kept, and what was started is ended."""
    with pytest.raises(EngineFault, match=r"was not ready within 0\.3 s"):
        start(make_spec(engine_args=("--never-ready",)), progress=quiet, timeout_s=0.3)
    assert processes_with(mark) == []


def test_a_part_that_dies_while_serving_stops_the_stack(make_spec: MakeSpec, mark: str) -> None:
    """Waiting on a stack ends when an engine dies, with its name and last lines."""
    spec = make_spec(engine_args=("--die-on-call",), router=False, warm_up=False)
    stack = start(spec, progress=quiet)
    with pytest.raises(http.client.RemoteDisconnected):
        ask(stack, "/v1/chat/completions", {"model": stack.model, "messages": []})
    with pytest.raises(EngineFault, match="a bad thing happened in the engine") as caught:
        stack.wait()
    assert caught.value.engine == "single-0"
    assert processes_with(mark) == []


def test_an_engine_that_dies_in_the_warm_up_fails_the_start(make_spec: MakeSpec) -> None:
    """The first call belongs to the start: whoever dies in it is named, with its last lines."""
    with pytest.raises(EngineFault, match="a bad thing happened in the engine") as caught:
        start(make_spec(engine_args=("--die-on-call",)), progress=quiet)
    assert caught.value.engine == "single-0"


def test_the_log_of_an_earlier_run_explains_nothing(make_spec: MakeSpec) -> None:
    """The same folder is used again and again; only this run's lines count."""
    refused = ("--fail", "api_server.py: error: unrecognized arguments: --foo")
    with pytest.raises(ConfigError, match="knows no such flag"):
        start(make_spec(engine_args=refused, router=False), progress=quiet)
    with pytest.raises(EngineFault) as caught:
        start(make_spec(engine_args=("--die-on-call",), router=False), progress=quiet)
    assert "knows no such flag" not in str(caught.value)


@pytest.mark.parametrize("name", ["prefill-0", "router"])
def test_one_part_is_restarted_in_place(make_spec: MakeSpec, name: str) -> None:
    """A restarted part is another process at the same address; the rest keeps running."""
    with start(make_spec(prefill=1, decode=1, warm_up=False), progress=quiet) as stack:
        before = {e.name: (e.pid, e.url) for e in stack.engines} | {
            "router": (stack.router_pid, stack.base_url)
        }
        stack.restart(name)
        after = {e.name: (e.pid, e.url) for e in stack.engines} | {
            "router": (stack.router_pid, stack.base_url)
        }
        assert [part for part in before if before[part][0] != after[part][0]] == [name]
        assert before[name][1] == after[name][1]
        assert ask(stack, "/health")[0] == 200


def test_restarting_an_unknown_part_names_the_parts(make_spec: MakeSpec) -> None:
    """A wrong name is refused with the right ones."""
    with (
        start(make_spec(router=False), progress=quiet) as stack,
        pytest.raises(ConfigError, match="expected one of single-0"),
    ):
        stack.restart("decode-7")


def test_an_untested_vllm_only_observes(make_spec: MakeSpec) -> None:
    """A newer vLLM starts in mode observe, and the operator is told."""
    lines: list[str] = []
    spec = make_spec(
        facts={"version": "0.33.0"}, engine_args=("--echo-facts",), router=False, warm_up=False
    )
    with start(spec, progress=lines.append) as stack:
        argv = json.loads(stack.engines[0].log_path.read_text().splitlines()[0])["argv"]
    transfer = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"]["turncache"]["mode"] == "observe"
    assert any("vLLM 0.33.0 is untested" in line for line in lines)


@pytest.mark.parametrize(
    ("facts", "changes", "message"),
    [
        pytest.param({"version": None}, {}, "vLLM is not installed", id="no vllm"),
        pytest.param({"version": "0.31.2"}, {}, "0.31.2 is too old: 0.32 or", id="old vllm"),
        pytest.param({"turncache": False}, {}, "turncache is not installed", id="no turncache"),
        pytest.param({"nixl": False}, {"prefill": 1, "decode": 1}, "NIXL is not", id="no nixl"),
        pytest.param({}, {"kv_space_gib": 4000}, "too little memory: 1 x", id="memory"),
    ],
)
def test_a_machine_that_lacks_something_is_refused_before_anything_starts(
    make_spec: MakeSpec, mark: str, facts: dict[str, object], changes: dict[str, int], message: str
) -> None:
    """What is missing is named, and no process was started for it."""
    with pytest.raises(EnvironmentFault, match=message):
        start(make_spec(facts=facts, **changes), progress=quiet)
    assert processes_with(mark) == []


def test_a_port_in_use_is_named_with_purpose_and_user(make_spec: MakeSpec, mark: str) -> None:
    """The message says which port, what for, and which process has it."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            start(make_spec(engine_port=port), progress=quiet)
    assert f"127.0.0.1:{port} (single-0) is in use" in str(caught.value)
    assert f"process {os.getpid()}" in str(caught.value)
    assert processes_with(mark) == []


def test_a_setting_that_the_router_refuses_costs_no_engine_start(
    make_spec: MakeSpec, mark: str
) -> None:
    """Router settings are checked before engines start."""
    with pytest.raises(ConfigError, match="no such setting"):
        start(make_spec(router_settings={"colour": "red"}), progress=quiet)
    assert processes_with(mark) == []


def test_a_stack_outlives_the_thread_that_started_it(make_spec: MakeSpec) -> None:
    """The end of a thread is not the end of the launcher."""
    stacks: list[Stack] = []
    spec = make_spec(router=False, warm_up=False)
    thread = threading.Thread(target=lambda: stacks.append(start(spec, progress=quiet)))
    thread.start()
    thread.join()
    (stack,) = stacks
    with stack:
        for _ in range(10):
            time.sleep(0.02)
            stack.check()
        assert ask(stack, "/health")[0] == 200


LAUNCHER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
from turncache_server.launch.stack import StackSpec, start
model, python, logs = sys.argv[1:4]
spec = StackSpec(
    model=model, python=python, log_dir=logs, router_port=0, prefill=1, decode=1, stop_grace_s=0.1
)
with start(spec, progress=print) as stack:
    print("UP", flush=True)
    stack.wait()
"""


@pytest.mark.parametrize(
    ("number", "moment"),
    [
        pytest.param(signal.SIGKILL, "UP", id="killed while serving"),
        pytest.param(signal.SIGKILL, "prefill-0: starting", id="killed while starting"),
        pytest.param(signal.SIGINT, "prefill-0: starting", id="Ctrl-C while starting"),
    ],
)
def test_nothing_outlives_the_launcher(
    make_spec: MakeSpec, mark: str, number: signal.Signals, moment: str
) -> None:
    """Whatever ends the launcher, and whenever: no process of the stack is left."""
    spec = make_spec()
    command = [sys.executable, "-u", "-c", LAUNCHER]
    with subprocess.Popen(
        [*command, spec.model, str(spec.python), str(spec.log_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        try:
            for line in launcher.stdout:
                if line.startswith(moment):
                    break
            assert processes_with(mark)
            launcher.send_signal(number)
            launcher.wait(timeout=30)
        finally:
            launcher.kill()
    wait_until(lambda: not processes_with(mark), timeout_s=5)


def test_what_a_killed_reaper_leaves_is_ended_by_the_launcher(
    make_spec: MakeSpec, mark: str
) -> None:
    """Killing the reaper itself ends its program, and stopping the stack ends the rest."""
    stack = start(make_spec(router=False, warm_up=False), progress=quiet)
    engine = stack.engines[0]
    reaper = int(Path("/proc", str(engine.pid), "stat").read_text().rpartition(")")[2].split()[1])
    os.kill(reaper, signal.SIGKILL)
    with pytest.raises(EngineFault, match="ended with exit code -9"):
        stack.wait()
    left = processes_with(mark)
    # The child that left the session has no reaper any more to be found by.
    assert len(left) <= 1
