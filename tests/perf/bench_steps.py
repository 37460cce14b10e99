"""What the extension costs the engine: scheduler steps per second, against vLLM without us.

``python -m tests.perf.bench_steps [--pairs 20 | --bytecodes | --where]``

vLLM's real scheduler and our real connector on a fake executor: the forward pass costs
nothing, so what is left is what the engine's process itself does. Arms run alternately in
one process on the same load; CPU seconds of the whole process are measured, so threads of
ours count and the ghost's own process does not. The requests are made beforehand. The median
of the pairs' ratios is held against the limit; calls with sessions are printed for comparison.

vLLM without us has no connector at all, and with one it does more in every step, whatever the
connector does. So one that does nothing is an arm as well: what it costs is vLLM's own share.

The bytecodes of all are counted as well: on a busy machine their ratio tells two versions of
this code apart, and the times do not. ``--bytecodes`` does nothing else; ``--where`` shows the
code that they are in.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Final

# Read when the builders are imported; the tests' own is smaller than an engine's.
os.environ["TURNCACHE_TEST_BLOCK"] = "16"

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tests.builders import Engine, tokens, world
from tests.perf import empty_connector
from tests.perf.bytecodes import counted, print_places
from tests.perf.empty_connector import EmptyConnector
from tests.perf.figures import Figure, show, write
from turncache.protocol import EngineHints

#: vLLM with a connector that does nothing.
EMPTY: Final = "empty"
#: Without a limit: what vLLM's own share costs is not ours to bound.
LIMITS: Final = {EMPTY: None, "on": 0.98, "observe": 0.97}
#: Steps of the fake executor take about as long; so often is something due that time makes due.
STEP_S: Final = 5e-4
NUM_BLOCKS: Final = 4000
MAX_MODEL_LEN: Final = 4096
CALLS: Final = 150
CONCURRENT: Final = 16
#: Counting takes fifty times as long as serving.
TRACED: Final = 40

#: A call: (conversation, prompt, tokens to sample).
Call = tuple[int, list[int], int]


def load(seed: int) -> list[Call]:
    """Calls of twelve conversations."""
    draw = random.Random(seed)
    lengths = [draw.randint(200, 1000) for _ in range(12)]
    calls = []
    for _ in range(CALLS):
        chat = draw.randrange(len(lengths))
        lengths[chat] = min(lengths[chat] + draw.randint(20, 200), MAX_MODEL_LEN - 200)
        prompt = tokens(lengths[chat], start=17 * chat)
        calls.append((chat, prompt, draw.randint(20, 120)))
    return calls


def requests(engine: Engine, calls: list[Call], *, tagged: bool) -> list[Request]:
    """Make vLLM's requests of some calls."""
    made = []
    for number, (chat, prompt, answer) in enumerate(calls):
        request_id = f"{len(calls)}-{number}"
        hints = EngineHints(session=f"chat-{chat}", request=request_id).to_xargs()
        made.append(
            Request(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(
                    max_tokens=answer, ignore_eos=True, extra_args=hints if tagged else None
                ),
                pooling_params=None,
                block_hasher=engine._hasher,
            )
        )
    return made


def serve(engine: Engine, waiting: list[Request]) -> int:
    """Serve all requests, some at a time; returns the number of steps."""
    scheduler = engine.scheduler
    running: list[Request] = []
    waiting.reverse()
    for steps in itertools.count():
        if not waiting and not running:
            return steps
        while waiting and len(running) < CONCURRENT:
            running.append(waiting.pop())
            scheduler.add_request(running[-1])
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
        running = [request for request in running if not request.is_finished()]
        engine.world.now_s += STEP_S
    raise AssertionError("unreachable")


#: Of what is not ours, by mode.
_CONNECTORS: Final = {None: None, EMPTY: EmptyConnector.__name__}


@contextmanager
def loaded(
    mode: str | None, calls: list[Call], *, tagged: bool, timed: bool = True
) -> Iterator[Callable[[], int]]:
    """Make an engine, warm, and what serves the calls on it and returns the number of steps.

    Args:
        mode: ours, EMPTY for a connector that does nothing, None for no connector.
        calls: to serve.
        tagged: the calls name their sessions.
        timed: our clock is the machine's; if not, a step takes :data:`STEP_S`, however long
            it is counted.
    """
    with world() as made:
        ours = mode not in {None, EMPTY}
        engine = Engine(
            made,
            connector=_CONNECTORS.get(mode, "ClockedRetention"),
            transfer={"kv_connector_module_path": empty_connector.__name__} if not ours else {},
            settings={"mode": mode} if ours else {},
            num_blocks=NUM_BLOCKS,
            max_model_len=MAX_MODEL_LEN,
            max_requests=CONCURRENT,
            batched_tokens=2048,
        )
        if ours:
            # Neither runs a bytecode.
            clock = time.monotonic if timed else functools.partial(getattr, made, "now_s")
            engine.extension._clock = engine.connector._reporter._clock = clock
            engine.extension._ranks._clock = clock
        # All arms alike. Until the ghost's process has started, nothing is handed over.
        serve(engine, requests(engine, calls[:2], tagged=tagged))
        time.sleep(2.5 if mode == "observe" else 0.1)
        waiting = requests(engine, calls, tagged=tagged)
        yield lambda: serve(engine, waiting)
        if mode == "observe":
            assert engine.extension.gauges()["observing"] == 1
            assert engine.extension.counters()["observed_dropped_events"] == 0


def speed(mode: str | None, calls: list[Call], *, tagged: bool) -> float:
    """Return the steps per CPU second of one run; None is vLLM without us."""
    with loaded(mode, calls, tagged=tagged) as run:
        gc.collect()
        gc.freeze()
        began_s = time.process_time()
        steps = run()
        cpu_s = time.process_time() - began_s
        gc.unfreeze()
        return steps / cpu_s


def bytecodes(mode: str | None) -> Counter[CodeType]:
    """Count the bytecodes of the engine's thread while it serves calls without hints."""
    with loaded(mode, load(1)[:TRACED], tagged=False, timed=False) as run:
        return counted(run)


def compare_bytecodes() -> Iterator[Figure]:
    """Yield vLLM's bytecodes over those with a connector, by mode."""
    stock = bytecodes(None).total()
    for mode, limit in LIMITS.items():
        total = bytecodes(mode).total()
        yield Figure(
            figure=f"no hints, {_name(mode)}, bytecodes of {TRACED} calls: vLLM's over these",
            unit="bytecodes",
            value=total,
            baseline=stock,
            limit=limit,
            held=stock / total,
            at_least=True,
        )


def _name(mode: str) -> str:
    return "an empty connector" if mode == EMPTY else f"mode {mode}"


def show_bytecodes() -> None:
    """Print where the added bytecodes are, by mode."""
    stock = bytecodes(None)
    for mode in LIMITS:
        added = bytecodes(mode)
        added.subtract(stock)
        print(f"{_name(mode)}: {added.total():,} added to {stock.total():,}")
        print_places(added, least=stock.total() // 2000)


def compare(num_pairs: int) -> Iterator[Figure]:
    """Yield one figure per mode and kind of load."""
    for tagged in (False, True):
        found: dict[str | None, list[float]] = {mode: [] for mode in (None, *LIMITS)}
        for number in range(num_pairs):
            calls = load(number)
            order = list(found) if number % 2 else list(reversed(found))
            for mode in order:
                found[mode].append(speed(mode, calls, tagged=tagged))
        load_name = "sessions" if tagged else "no hints"
        for mode, limit in LIMITS.items():
            yield Figure(
                figure=f"{load_name}, {_name(mode)}, against vLLM without us",
                unit="steps/s",
                value=statistics.median(found[mode]),
                baseline=statistics.median(found[None]),
                limit=None if tagged else limit,
                held=_median_ratio(found[mode], found[None]),
                at_least=True,
            )
            if mode != EMPTY and not tagged:
                yield Figure(
                    figure=f"{load_name}, {_name(mode)}, against an empty connector",
                    unit="ratio",
                    value=_median_ratio(found[mode], found[EMPTY]),
                )


def _median_ratio(ours: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, other, strict=True))


def main() -> int:
    """Measure, print and write; returns 1 when a mode costs more than it may."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--bytecodes", action="store_true", help="count bytecodes, only")
    parser.add_argument("--where", action="store_true", help="show where bytecodes are, only")
    options = parser.parse_args()
    if options.where:
        show_bytecodes()
        return 0
    if options.bytecodes:
        show(compare_bytecodes())
        return 0
    return write("steps", show(itertools.chain(compare_bytecodes(), compare(options.pairs))))


if __name__ == "__main__":
    sys.exit(main())
