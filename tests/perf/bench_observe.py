"""What observing costs the engine: scheduler steps per second, ``observe`` against off.

Run in the engine environment, with the ``server`` and ``sdk`` folders and the checkout on
PYTHONPATH::

    python tests/perf/bench_observe.py [--pairs 20]

vLLM's real scheduler and our real connector on a fake executor: the forward pass costs
nothing, so what is left is what the engine's process itself does. Arms run alternately in
one process on the same load; CPU seconds of the whole process are measured, so threads of
ours count and the ghost's own process does not. The median of the pairs' ratios is printed.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from tests import builders
from tests.builders import Engine, tokens, world

#: The builders read it at every use; the tests' own is smaller than an engine's.
builders.BLOCK = 16
LIMIT = 0.97
NUM_BLOCKS = 4000
MAX_MODEL_LEN = 4096
CALLS = 150
CONCURRENT = 16


def load(seed: int) -> list[tuple[int, list[int], int]]:
    """Calls of twelve conversations: (conversation, prompt, tokens to sample)."""
    draw = random.Random(seed)
    lengths = [draw.randint(200, 1000) for _ in range(12)]
    calls = []
    for _ in range(CALLS):
        chat = draw.randrange(len(lengths))
        lengths[chat] = min(lengths[chat] + draw.randint(20, 200), MAX_MODEL_LEN - 200)
        prompt = tokens(lengths[chat], start=17 * chat)
        calls.append((chat, prompt, draw.randint(20, 120)))
    return calls


def serve(engine: Engine, calls: list[tuple[int, list[int], int]], *, tagged: bool) -> int:
    """Serve all calls, some at a time; returns the number of steps."""
    scheduler = engine.scheduler
    waiting, running, steps = list(enumerate(calls)), [], 0
    while waiting or running:
        while waiting and len(running) < CONCURRENT:
            number, (chat, prompt, answer) = waiting.pop(0)
            session = f"chat-{chat}" if tagged else None
            running.append(
                engine.add(f"{steps}-{number}", prompt, max_tokens=answer, session=session)
            )
        scheduled = scheduler.schedule()
        sampled = {
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
        steps += 1
        running = [request for request in running if not request.is_finished()]
    return steps


def speed(mode: str | None, calls: list[Any], *, tagged: bool) -> tuple[float, float]:
    """Return the steps per CPU second and per second of one run; None is vLLM without us."""
    with world() as made:
        engine = Engine(
            made,
            connector=None if mode is None else "ClockedRetention",
            settings={} if mode is None else {"mode": mode},
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_requests=CONCURRENT,
            batched_tokens=2048,
        )
        if mode is not None:
            engine.extension._clock = time.monotonic
        # All arms alike. Until the ghost's process has started, nothing is handed over.
        serve(engine, calls[:2], tagged=tagged)
        time.sleep(2.5 if mode == "observe" else 0.1)
        gc.collect()
        gc.freeze()
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        steps = serve(engine, calls, tagged=tagged)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        if mode == "observe":
            assert engine.extension.gauges()["observing"] == 1
            assert engine.extension.counters()["observed_dropped_events"] == 0
        return steps / cpu_s, steps / wall_s


def main() -> int:
    """Measure and print; returns 1 when observing costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    options = parser.parse_args()
    ok = True
    print(f"{'steps/s of CPU time (of wall time), medians':<52}{'ratio':>8}{'limit':>8}")
    for tagged in (False, True):
        for base in ("off", None):
            cpu, wall, found = [], [], []
            for number in range(options.pairs):
                calls = load(number)
                arms: dict[str | None, tuple[float, float]] = {}
                order = ("observe", base) if number % 2 else (base, "observe")
                for mode in order:
                    arms[mode] = speed(mode, calls, tagged=tagged)
                cpu.append(arms["observe"][0] / arms[base][0])
                wall.append(arms["observe"][1] / arms[base][1])
                found.append(arms["observe"][0])
            ratio = statistics.median(cpu)
            ok = ok and ratio >= LIMIT
            name = f"{'sessions' if tagged else 'no hints'}: observe / {base or 'vLLM without us'}"
            speeds = f"{statistics.median(found):.0f}/s"
            print(
                f"{name:<40}{speeds:>12}{ratio:>8.3f} ({statistics.median(wall):.3f})"
                f"{LIMIT:>8.2f}{'' if ratio >= LIMIT else '  below'}",
                flush=True,
            )
    return 0 if ok else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    sys.exit(main())
