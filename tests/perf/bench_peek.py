"""Peek and verify of a prompt of 100,000 tokens, and what the source's steps feel of it.

``python -m tests.perf.bench_peek [--count 100]``

The source is vLLM's real scheduler with our real connector, control thread and socket; the
asker is a process of its own. While the source steps, it serves sixteen streams by a forward
pass that only waits, as one on a GPU does: between passes the engine thread and the control
thread want the same interpreter. How much later steps are is the difference of steps that are
asked during and steps that are not, from phases that take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

# Read when vLLM is imported: the builders' model is made for shorter prompts.
os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"

# Read when the builders are imported; the tests' own is smaller than an engine's.
os.environ["TURNCACHE_TEST_BLOCK"] = "32"

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.builders import BLOCK, Engine, tokens, world
from tests.perf.figures import ROOT, Figure, percentile, show, write

NUM_HASHES: Final = 3125
STREAMS: Final = 16
FORWARD_S: Final = 0.010
PAUSE_S: Final = 0.025
PHASES: Final = 4
LIMIT_MS: Final = {"idle": 10.0, "stepping": 25.0}
LATER_LIMIT_MS: Final = 2.0


class Asker:
    """The process that asks."""

    def __init__(self, address: str, session: str, hashes: list[bytes]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.perf.peek_asker"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        job = {"address": address, "session": session, "hashes": [h.hex() for h in hashes]}
        self._say(job)

    def ask(self, count: int) -> dict[str, list[float]]:
        """Ask so often; returns seconds by question."""
        self._say({"count": count, "pause_s": PAUSE_S})
        assert self._process.stdout is not None
        found: dict[str, list[float]] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=10)

    def _say(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


class Steps:
    """The source's engine thread, which is this one: streams that go on and on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._number = 0
        self._running: list[Request] = []

    def run(self, until: threading.Event) -> list[float]:
        """Step until told; returns the seconds of each step beyond its forward pass."""
        scheduler, seconds = self._engine.scheduler, []
        while not until.is_set():
            self._fill()
            began_s = time.perf_counter()
            scheduled = scheduler.schedule()
            scheduled_s = time.perf_counter()
            time.sleep(FORWARD_S)
            passed_s = time.perf_counter()
            sampled: dict[str, list[int]] = {
                request_id: [] if scheduler.requests[request_id].is_prefill_chunk else [7]
                for request_id in scheduled.num_scheduled_tokens
            }
            scheduler.update_from_output(
                scheduled,
                ModelRunnerOutput(
                    req_ids=list(sampled),
                    req_id_to_index={r: i for i, r in enumerate(sampled)},
                    sampled_token_ids=list(sampled.values()),
                ),
            )
            # A wait that ends late, because the interpreter is taken, is the step's as well.
            late_s = max(0.0, passed_s - scheduled_s - FORWARD_S)
            seconds.append(scheduled_s - began_s + late_s + time.perf_counter() - passed_s)
        return seconds

    def _fill(self) -> None:
        self._running = [each for each in self._running if not each.is_finished()]
        while len(self._running) < STREAMS:
            self._number += 1
            request = Request(
                request_id=f"stream-{self._number}",
                prompt_token_ids=tokens(64, start=self._number),
                sampling_params=SamplingParams(max_tokens=400, ignore_eos=True),
                pooling_params=None,
                block_hasher=self._engine._hasher,
            )
            self._engine.scheduler.add_request(request)
            self._running.append(request)


def measure(engine: Engine, asker: Asker, count: int) -> dict[str, Any]:
    """Ask while the source is idle, then in phases while it steps."""
    asker.ask(5)
    found: dict[str, Any] = {"idle": asker.ask(count), "stepping": {"peek": [], "verify": []}}
    steps = Steps(engine)
    quiet: list[float] = []
    asked: list[float] = []
    for phase in range(2 * PHASES + 1):
        over = threading.Event()
        if phase % 2:
            share = -(-count // PHASES)

            def ask(over: threading.Event = over, share: int = share) -> None:
                for name, seconds in asker.ask(share).items():
                    found["stepping"][name] += seconds
                over.set()

            thread = threading.Thread(target=ask)
            thread.start()
            asked += steps.run(over)
            thread.join()
        else:
            threading.Timer(1.5, over.set).start()
            seconds = steps.run(over)
            # The first phase warms up.
            quiet += seconds if phase else []
    return {**found, "quiet": quiet, "asked": asked}


def figures(count: int) -> Iterator[Figure]:
    """Yield latencies, and how much later steps are."""
    with world() as made:
        engine = Engine(
            made,
            peers=[],
            settings={"control_address": "tcp://127.0.0.1:0"},
            num_blocks=NUM_HASHES + 2000,
            max_model_len=NUM_HASHES * BLOCK + 4096,
            batched_tokens=8192,
            max_requests=STREAMS,
        )
        prompt = tokens(NUM_HASHES * BLOCK + 1)
        engine.add("held", prompt, session="s", retain_s=3600.0)
        engine.run()
        control = engine.connector.connector_scheduler._control
        asker = Asker(control.address, "s", engine.hashes(prompt))
        try:
            found = measure(engine, asker, count)
        finally:
            asker.close()
    for state, limit_ms in LIMIT_MS.items():
        for name in ("peek", "verify"):
            seconds = found[state][name]
            for share, limit in ((0.5, limit_ms), (0.99, None)):
                yield Figure(
                    figure=f"{name} of {NUM_HASHES} hashes, source {state}, p{share * 100:g}",
                    unit="ms",
                    value=1e3 * percentile(seconds, share),
                    limit=limit,
                )
    for share, limit in ((0.5, None), (0.99, LATER_LIMIT_MS)):
        asked, quiet = (1e3 * percentile(found[each], share) for each in ("asked", "quiet"))
        yield Figure(
            figure=f"the source's steps beside the forward pass, p{share * 100:g}",
            unit="ms",
            value=asked,
            baseline=quiet,
            limit=limit,
            held=asked - quiet,
        )


def main() -> int:
    """Measure, print and write; returns 1 when a figure misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--count", type=int, default=100)
    options = parser.parse_args()
    return write("peek", show(figures(options.count)))


if __name__ == "__main__":
    sys.exit(main())
