"""The process in which the ghost lives, and the thread that feeds it.

The ghost costs time for every block of every call. In the engine's process it would take
that time from the scheduler, whatever thread it ran on; so it has a process of its own,
which ends when the engine's end of the pipe closes. The engine never waits for it.

Frames on the pipe are a length and a msgpack array of events: the kind of each and its members.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from turncache_server.connector.recorder import Recorder
from turncache_server.connector.trace_files import TraceFiles
from turncache_server.retention.events import (
    Arrived,
    Ended,
    Event,
    Forgotten,
    Signalled,
    Started,
    TailVerified,
    Ticked,
)
from turncache_server.retention.ghost import Ghost, GhostSpec
from turncache_server.retention.trace import TraceHeader
from turncache_server.retention.trace_writer import TraceWriter
from turncache_server.retention.values import Limits

logger = logging.getLogger(__name__)

#: How often the engine's events are taken, and how often the ghost reports.
SHIP_EVERY_S: Final = 0.1
#: So many are encoded at once: meanwhile the engine's thread does not run.
_FRAME_EVENTS: Final = 64
REPORT_EVERY_S: Final = 1.0
#: How often the speed of prefill is written into the trace.
SPEED_EVERY_S: Final = 60.0
#: Bytes of a chain hash that are told apart here, its last ones.
_HASH_BYTES: Final = 16

_KINDS: Final[tuple[type[Any], ...]] = (
    Arrived,
    Started,
    Ended,
    Ticked,
    Signalled,
    TailVerified,
    Forgotten,
)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind) for kind in _KINDS)
_FRAME: Final = msgspec.msgpack.Decoder(list[tuple[int, msgspec.Raw]])
_LENGTH: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, kw_only=True)
class GhostTask:
    """What the process is told at its start.

    Attributes:
        spec: what to simulate.
        header: of the trace.
        trace_file: where to write it, None for no trace.
        trace_part_bytes: size at which a part of it is full.
    """

    spec: GhostSpec
    header: TraceHeader
    trace_file: str | None = None
    trace_part_bytes: int = 16_000_000

    def to_json(self) -> str:
        """Encode for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> GhostTask:
        """Decode what :meth:`to_json` has encoded."""
        values = json.loads(text)
        spec, header = values.pop("spec"), values.pop("header")
        spec["limits"] = Limits(**spec["limits"])
        for part in (spec, header):
            part["host_gb"] = tuple(part["host_gb"])
        return cls(spec=GhostSpec(**spec), header=TraceHeader(**header), **values)


# --- on the wire ---------------------------------------------------------------------------


def encode_events(events: Iterable[Event]) -> bytes:
    """Return events as one frame, as they are: what can be done at the other end is done there."""
    body = _ENCODER.encode([(_NUMBERS[type(event)], event) for event in events])
    return _LENGTH.pack(len(body)) + body


def _cut(event: Event) -> Event:
    """Cut an event's hashes to what is told apart: a ghost remembers many."""
    if isinstance(event, Arrived):
        return event._replace(hashes=tuple(each[-_HASH_BYTES:] for each in event.hashes))
    if isinstance(event, Ended):
        hashes = tuple(each[-_HASH_BYTES:] for each in event.more_hashes)
        return event._replace(more_hashes=hashes)
    if isinstance(event, TailVerified):
        return event._replace(tail_hash=event.tail_hash[-_HASH_BYTES:])
    return event


class Frames:
    """Puts events together again from pieces of any length."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Event]:
        """Yield the events that are complete with ``data``, their hashes cut."""
        buffer = self._buffer
        buffer += data
        at = 0
        while len(buffer) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(buffer, at)
            end = at + _LENGTH.size + length
            if len(buffer) < end:
                break
            events = _FRAME.decode(buffer[at + _LENGTH.size : end])
            at = end
            for number, event in events:
                yield _cut(_DECODERS[number].decode(event))
        del buffer[:at]


# --- in the engine's process ---------------------------------------------------------------


class GhostProcess:
    """Feeds the ghost from a recorder, on a thread of its own.

    Args:
        recorder: what the engine thread writes down; hears the ghost's counts.
        task: what the process does.
    """

    def __init__(self, recorder: Recorder, task: GhostTask) -> None:
        self._recorder = recorder
        self._task = task
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turncache-ghost", daemon=True)

    def start(self) -> None:
        """Start the thread, which starts the process."""
        self._thread.start()

    def close(self) -> None:
        """Hand over what is there, and let the process end."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=10)

    def _run(self) -> None:
        try:
            self._feed()
        except (OSError, ValueError) as error:
            # The engine needs no ghost: it is told, and nothing is recorded any more.
            self._recorder.broken = f"{type(error).__name__}: {error}"
            self._recorder.drain()
            logger.exception("turncache: the ghost is gone, nothing is observed")

    def _feed(self) -> None:
        command = [sys.executable, "-m", __name__, self._task.to_json()]
        with subprocess.Popen(  # noqa: S603 - our own module
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            listener = threading.Thread(
                target=self._listen, args=(process.stdout,), name="turncache-ghost-counts"
            )
            listener.start()
            stopping = False
            while not stopping:
                stopping = self._stop.wait(SHIP_EVERY_S)
                events = self._recorder.drain()
                for first in range(0, len(events), _FRAME_EVENTS):
                    frame = events[first : first + _FRAME_EVENTS]
                    process.stdin.write(encode_events(frame))
                if events:
                    process.stdin.flush()
            process.stdin.close()
            listener.join()

    def _listen(self, stdout: BinaryIO) -> None:
        """Take the ghost's counts until it ends."""
        for line in stdout:
            counts = json.loads(line)
            self._recorder.counters = counts["counters"]
            self._recorder.gauges = counts["gauges"]


def _environment() -> dict[str, str]:
    """Return this process's environment, with its import path: a ghost imports what we did."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


# --- in the ghost's process ----------------------------------------------------------------


class GhostHost:
    """The ghost and its trace, told events.

    Args:
        task: what to do.
        key: secret of the trace.
    """

    def __init__(self, task: GhostTask, *, key: bytes) -> None:
        self.ghost = Ghost(task.spec)
        self._task = task
        self._key = key
        self._writer: TraceWriter | None = None
        self._files: TraceFiles | None = None
        self._speed_at_s = float("-inf")

    def take(self, event: Event) -> None:
        """Follow one event, and write down the call that it ends."""
        call = self.ghost.take(event)
        if self._task.trace_file is None:
            return
        if self._files is None or self._writer is None:
            self._writer = TraceWriter(self._task.header, key=self._key, origin_s=event.now_s)
            self._files = TraceFiles(
                Path(self._task.trace_file),
                self._writer.begin_part,
                part_bytes=self._task.trace_part_bytes,
            )
        if call is not None:
            self._files.room()
            self._files.write(self._writer.call(call))
        if isinstance(event, Ticked) and event.now_s - self._speed_at_s >= SPEED_EVERY_S:
            self._speed_at_s = event.now_s
            self._files.write(self._speed_line(self._writer, event.now_s))

    def _speed_line(self, writer: TraceWriter, now_s: float) -> str:
        return writer.speed(now_s, *self.ghost.prefill)

    def flush(self) -> None:
        """Let readers see what was written."""
        if self._files is not None:
            self._files.flush()

    def close(self, now_s: float) -> None:
        """Write the last measurement, and close the trace."""
        if self._files is not None and self._writer is not None:
            self._files.write(self._speed_line(self._writer, now_s))
            self._files.close()

    def report(self) -> str:
        """Return the counts as one line."""
        tokens, seconds = self.ghost.prefill
        counters = {f"observed_{name}": float(n) for name, n in self.ghost.totals.items()}
        counters |= {"observed_prefill_tokens": tokens, "observed_prefill_seconds": seconds}
        gauges = {f"ghost_{name}": value for name, value in self.ghost.gauges().items()}
        return json.dumps({"counters": counters, "gauges": gauges}) + "\n"


def main(argv: list[str]) -> int:
    """Run the ghost until the engine closes the pipe."""
    task = GhostTask.from_json(argv[0])
    # An interrupt at the terminal is the engine's affair; its end of the pipe says when.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.nice(10)
    host = GhostHost(task, key=secrets.token_bytes(32))
    frames, now_s, reported_at_s = Frames(), 0.0, float("-inf")
    while True:
        readable, _, _ = select.select([0], [], [], REPORT_EVERY_S)
        data = os.read(0, 1 << 20) if readable else None
        if data == b"":
            break
        for event in frames.feed(data or b""):
            host.take(event)
            now_s = event.now_s
        if time.monotonic() - reported_at_s >= REPORT_EVERY_S:
            reported_at_s = time.monotonic()
            host.flush()
            _say(host.report())
    host.close(now_s)
    _say(host.report())
    return 0


def _say(line: str) -> None:
    # The engine may have been killed: then nobody listens any more.
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(line)
        sys.stdout.flush()


def now_iso() -> str:
    """Return the wall time, for the header of a trace."""
    return datetime.now(UTC).isoformat(timespec="seconds")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
