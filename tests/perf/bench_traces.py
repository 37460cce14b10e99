"""Recorded agents through the real policy objects, against LRU and against clairvoyance.

``python -m tests.perf.bench_traces [--seeds 1 2] [--pools 400000 800000 1600000]``

The same calls (:mod:`tests.perf.traces`) go through three pools of each size: vLLM's LRU,
ours (the planner's pool: table, queue, budgets and policy of mode ``on`` with default
settings), and one that knows every next use. Ours hears the tool waits, wrong by up to a
factor of two either way (log-uniform), and nothing of what users do or of sessions that end.

Counted are prompt tokens that were computed again. The figure is the share of what
clairvoyance saves against LRU that ours saves too. A call takes and leaves its blocks at the
moment of its arrival: what calls in flight hold is not simulated. Nothing here is timed, so
the result depends on the seed only. Writes ``build/perf/traces.json``; exits with 1 when a
figure is below its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.perf.traces import Clairvoyant, StreamCall, stream
from turncache_tools.plan.pools import EnginePool, ended_call, wrong_by

ROOT: Final = Path(__file__).resolve().parents[2]
LIMIT: Final = 0.5
BLOCK_SIZE: Final = 256
NUM_SESSIONS: Final = 110
STARTS_PER_S: Final = 0.02
WRONG_BY: Final = 2.0

#: Serves one call and returns how many leading blocks of its prompt were found.
Serve = Callable[[StreamCall], int]


def clairvoyant(num_blocks: int, calls: list[StreamCall]) -> Serve:
    """Serve from a pool that knows every next use."""
    pool = Clairvoyant(num_blocks, calls)

    def serve(call: StreamCall) -> int:
        num_hits = pool.start(call)
        pool.end(call)
        return num_hits

    return serve


def ghostly(num_blocks: int, *, retaining: bool, seed: int) -> Serve:
    """Serve from an engine's pool, as LRU or with sessions."""
    pool = EnginePool(num_blocks, retaining=retaining)

    def serve(call: StreamCall) -> int:
        now_s, hashes = call.arrives_s, call.hashes
        prompt = hashes[: call.prompt_blocks]
        admission = pool.arrive(call.session, prompt, now_s)
        grant = pool.start(prompt, len(prompt), len(prompt))
        expect_s = None
        if call.tool_wait_s is not None:
            wait_s = wrong_by(call.tool_wait_s, WRONG_BY, seed=seed, place=call.number)
            # The call itself takes its time before the wait begins.
            expect_s = call.ends_s - call.arrives_s + wait_s
        pool.end(grant, admission, hashes, ended_call(len(hashes), now_s, expect_s=expect_s))
        return grant.num_hits

    return serve


def computed_again(calls: list[StreamCall], serve: Serve) -> int:
    """Return how many prompt tokens were computed although a call before had computed them."""
    seen: set[int] = set()
    again = 0
    for call in calls:
        num_seen = 0
        for block in call.hashes[: call.prompt_blocks]:
            if block not in seen:
                break
            num_seen += 1
        again += max(0, num_seen - serve(call))
        seen.update(call.hashes)
    return again * BLOCK_SIZE


def main() -> int:
    """Replay, print a table and write the figures; returns 1 when one misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pools", type=int, nargs="+", default=[400_000, 800_000, 1_600_000])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print("prompt tokens computed again, in millions")
    print(f"{'pool':>10}{'seed':>6}{'LRU':>9}{'ours':>9}{'best':>9}{'closed':>9}{'limit':>8}")
    for seed in options.seeds:
        calls = stream(
            seed=seed,
            num_sessions=NUM_SESSIONS,
            starts_per_s=STARTS_PER_S,
            block_size=BLOCK_SIZE,
        )
        for pool in options.pools:
            blocks = pool // BLOCK_SIZE
            lru = computed_again(calls, ghostly(blocks, retaining=False, seed=seed))
            ours = computed_again(calls, ghostly(blocks, retaining=True, seed=seed))
            best = computed_again(calls, clairvoyant(blocks, calls))
            closed = (lru - ours) / max(1, lru - best)
            row = {"figure": "share of the gap to clairvoyance that is closed", "pool": pool}
            row |= {"seed": seed, "calls": len(calls), "lru": lru, "ours": ours, "best": best}
            rows.append(row | {"value": round(closed, 3), "limit": LIMIT, "ok": closed >= LIMIT})
            numbers = "".join(f"{each / 1e6:>9.1f}" for each in (lru, ours, best))
            mark = "" if closed >= LIMIT else "  below"
            print(f"{pool:>10}{seed:>6}{numbers}{closed:>9.2f}{LIMIT:>8.2f}{mark}", flush=True)
    folder = ROOT / "build" / "perf"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "traces.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
