"""The ghost's process: fed from a recorder, writing its trace, ending with the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.connector.pool_fakes import facts, request
from turncache_server.connector import ghost_process
from turncache_server.connector.config import Settings
from turncache_server.connector.ghost_process import GhostHost, GhostProcess, encode_events
from turncache_server.connector.observing import Observer, ghost_task
from turncache_server.connector.recorder import Recorder
from turncache_server.connector.trace_files import TraceFiles
from turncache_server.retention.events import Ticked
from turncache_server.retention.trace import read_trace


def recorded(num_calls: int) -> Recorder:
    """A recorder that has seen some calls of one session."""
    recorder = Recorder()
    recorder.forgotten(10.0)
    for number in range(num_calls):
        served = request(f"r{number}", num_blocks=3 + number)
        now_s = 10.0 + number
        recorder.arrived(served, None, now_s)
        recorder.started(served.request_id, now_s)
        recorder.ended(
            served,
            None,
            None,
            num_blocks=4 + number,
            rest=False,
            complete=3 + number,
            answered=True,
            now_s=now_s,
        )
        recorder.step_scheduled(0, now_s)
    return recorder


def test_the_process_counts_writes_its_trace_and_ends(tmp_path: Path) -> None:
    """The real one, over its pipe: what the recorder saw comes back as counts."""
    path = tmp_path / "trace.jsonl"
    recorder = recorded(4)
    task = ghost_task(facts(block_bytes=1000), Settings(trace_file=str(path)))
    process = GhostProcess(recorder, task)
    process.start()
    process.close()
    assert recorder.broken is None
    assert recorder.counters["observed_calls"] == 4
    assert recorder.counters["observed_seen_tokens"] == 4 * (3 + 4 + 5)
    assert recorder.gauges["ghost_calls_in_flight"] == 0
    with path.open() as lines:
        trace = read_trace(lines)
    assert [call.prompt for call in trace.calls] == [13, 17, 21, 25]
    assert path.stat().st_mode & 0o077 == 0


def test_a_process_that_cannot_start_is_told_and_nothing_more_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine goes on."""
    monkeypatch.setattr(ghost_process.sys, "executable", "/no/such/python")
    recorder = recorded(1)
    process = GhostProcess(recorder, ghost_task(facts(), Settings()))
    process.start()
    process.close()
    assert recorder.broken is not None
    assert "FileNotFoundError" in recorder.broken
    recorder.arrived(request("more"), None, 20.0)
    assert recorder.drain() == []


def test_the_process_ends_when_the_engine_is_gone() -> None:
    """Its end of the pipe closes however the engine dies; nobody has to tell it."""
    task = ghost_task(facts(), Settings())
    data = encode_events(recorded(2).drain())
    ran = subprocess.run(
        [sys.executable, "-m", ghost_process.__name__, task.to_json()],
        input=data,
        capture_output=True,
        timeout=30,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    counts = json.loads(ran.stdout.splitlines()[-1])
    assert counts["counters"]["observed_calls"] == 2


def test_an_engine_that_is_not_observed_has_no_process() -> None:
    """Closing it is nothing."""
    observer = Observer(facts(), Settings())
    observer.close()
    assert observer.recorder.drain() == []


def test_a_full_part_is_kept_beside_the_next(tmp_path: Path) -> None:
    """Each part can be read alone; an earlier start's file is kept as well."""
    path = tmp_path / "trace.jsonl"
    path.write_text("of an earlier start\n")
    task = ghost_task(facts(block_bytes=1000), Settings(trace_file=str(path)))
    small = ghost_process.GhostTask(
        spec=task.spec, header=task.header, trace_file=str(path), trace_part_bytes=900
    )
    host = GhostHost(small, key=b"k" * 32)
    for event in recorded(8).drain():
        host.take(event)
    host.close(20.0)
    kept = sorted(tmp_path.iterdir())
    assert kept[1].read_text() == "of an earlier start\n"
    traces = [read_trace(each.read_text().splitlines()) for each in [*kept[2:], kept[0]]]
    assert len(traces) > 2
    assert [trace.header.part for trace in traces] == list(range(1, len(traces) + 1))
    assert sum(len(trace.calls) for trace in traces) == 8
    for trace in traces:
        list(trace.chains())


def test_the_oldest_parts_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is bounded."""
    monkeypatch.setattr("turncache_server.connector.trace_files.KEPT_PARTS", 2)
    files = TraceFiles(tmp_path / "t", lambda: "header\n", part_bytes=10)
    for number in range(9):
        files.room()
        files.write(f"line {number}\n")
    files.close()
    names = sorted(each.name for each in tmp_path.iterdir())
    assert len(names) == 3
    assert names[0] == "t"


def test_the_speed_of_prefill_is_written_from_time_to_time(tmp_path: Path) -> None:
    """Once a minute, and at the end."""
    path = tmp_path / "trace.jsonl"
    host = GhostHost(ghost_task(facts(), Settings(trace_file=str(path))), key=b"k" * 32)
    for second in range(100):
        host.take(Ticked(float(second), 100 * second, 0.1 * second))
    host.close(100.0)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    speeds = [line for line in lines if line["kind"] == "speed"]
    assert [line["t"] for line in speeds] == [0.0, 60.0, 100.0]
    assert speeds[-1]["prefill_tokens"] == 9900
