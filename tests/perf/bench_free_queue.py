"""Speed of our free queue against vLLM's, operation for operation.

Run in an environment with vLLM, with the ``server`` and ``sdk`` folders on PYTHONPATH::

    python tests/perf/bench_free_queue.py [--sizes 10000 100000 1000000]

Two kinds of load, each replayed on both queues from recorded operations:

* *nothing retained*: an engine's mix of calls that hit their prefix, allocate the rest,
  decode block by block and free everything. Recorded once on vLLM's queue.
* *half retained*: the same kinds of operation, with half of the pool on the shelves of 200
  or 10,000 lineages.

Both queues run in turn, several times each, timed in chunks of a fraction of a millisecond,
and each chunk counts with the best of its repetitions: what disturbs a measurement only makes
it slower. CPU time of this thread is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue, KVCacheBlock

from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import ChainBlock, Limits, LineageTable
from turncache_server.retention.mailbox import Mailbox
from turncache_server.retention.policy import Deadline

OUT = Path("build/perf/free_queue.json")
NUM_OPERATIONS = 20_000
CHUNK = 500
REPETITIONS = 7
ORDINARY_LIMIT = 0.8
RETAINED_LIMIT = 0.5

#: (method, argument): a count for ``popleft_n``, a block id for ``remove``, else block ids.
Operation = tuple[str, Any]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the result; ``ratio`` is ours over vLLM's."""

    figure: str
    unit: str
    value: float
    baseline: float
    ratio: float
    limit: float | None
    ok: bool
    host: str
    commit: str


def aged_order(num_blocks: int, rng: random.Random) -> list[int]:
    """Order of a queue after long service: short and long runs, each freed tail first."""
    runs: list[list[int]] = []
    start = 1
    while start < num_blocks:
        length = 1 if rng.random() < 0.5 else rng.randint(2, 400)
        end = min(start + length, num_blocks)
        runs.append(list(range(end - 1, start - 1, -1)))
        start = end
    rng.shuffle(runs)
    return [block_id for run in runs for block_id in run]


class Recorder:
    """Serves made-up conversations on vLLM's queue and writes down what it is asked for."""

    def __init__(self, num_blocks: int, order: list[int], rng: random.Random) -> None:
        self.operations: list[Operation] = []
        self._rng = rng
        self._blocks = {block_id: KVCacheBlock(block_id) for block_id in order}
        self._queue = FreeKVCacheBlockQueue(list(self._blocks.values()))
        self._max_running = max(4, min(64, num_blocks // 400))
        self._chains: list[list[int]] = [[] for _ in range(max(20, num_blocks // 150))]
        self._holder: dict[int, int] = {}
        self._running: dict[int, tuple[list[int], int]] = {}

    def run(self) -> list[Operation]:
        """Serve until enough operations are recorded."""
        while len(self.operations) < NUM_OPERATIONS:
            if len(self._running) < self._max_running:
                self._start(self._rng.randrange(len(self._chains)))
            for session in list(self._running):
                if self._rng.random() < 0.3:
                    self._decode(session)
        return self.operations

    def _pop(self, count: int) -> list[int]:
        popped = [block.block_id for block in self._queue.popleft_n(count)]
        for block_id in popped:
            self._holder.pop(block_id, None)
        self.operations.append(("popleft_n", count))
        return popped

    def _free(self, method: str, block_ids: list[int]) -> None:
        getattr(self._queue, method)([self._blocks[block_id] for block_id in block_ids])
        self.operations.append((method, block_ids))

    def _start(self, session: int) -> None:
        if session in self._running:
            return
        rng = self._rng
        chain = self._chains[session]
        if len(chain) > rng.randint(60, 400):
            chain = []
        hits = []
        for block_id in chain:
            if self._holder.get(block_id) != session:
                break
            hits.append(block_id)
        new = rng.randint(4, 40) + len(chain) - len(hits)
        new += 0 if chain else rng.randint(20, 100)
        if self._queue.num_free_blocks < len(hits) + new + 100:
            return
        for block_id in hits:
            self._queue.remove(self._blocks[block_id])
            self.operations.append(("remove", block_id))
        self._running[session] = ([*hits, *self._pop(new)], rng.randint(2, 20))

    def _decode(self, session: int) -> None:
        blocks, left = self._running[session]
        if self._queue.num_free_blocks:
            blocks += self._pop(1)
        if left > 1:
            self._running[session] = (blocks, left - 1)
            return
        del self._running[session]
        # The last block is not full, so it has no hash.
        self._chains[session] = full = blocks[:-1]
        self._holder.update(dict.fromkeys(full, session))
        self._free("prepend_n", blocks[-1:])
        self._free("append_n", full[::-1])


def half_retained_load(
    order: list[int], chains: list[list[int]], rng: random.Random
) -> list[Operation]:
    """Calls that hit their retained chain, and others that allocate and free ordinary blocks.

    Everything that is popped is put back before the next hit, so that both queues find a
    chain's blocks free whatever they chose to hand out.
    """
    operations: list[Operation] = []
    while len(operations) < NUM_OPERATIONS:
        chain = rng.choice(chains)
        operations += [("remove", block_id) for block_id in chain]
        operations.append(("append_n", chain[::-1]))
        count = min(rng.randint(4, 40), len(order) // 4)
        operations += [("popleft_n", count), ("put back", None)]
        operations += [op for _ in range(4) for op in (("popleft_n", 1), ("put back", None))]
    return operations


def our_queue(stock: Any, blocks: list[Any], chains: list[list[int]]) -> Any:
    """Adopt a stock queue as the connector does, with chains that are wanted."""
    num_blocks = len(blocks)
    ledger = Ledger(num_blocks)
    limits = Limits(
        num_blocks=num_blocks, retain_budget=1.0, tenant_budget=1.0, max_sessions=1 << 30
    )
    table = LineageTable(limits, Deadline())
    mailbox = Mailbox()
    queue = FreeQueue.adopt(
        stock,
        num_blocks=num_blocks,
        ledger=ledger,
        table=table,
        before_choice=mailbox.drain,
        pending=mailbox.commands,
        blocks=blocks,
    )
    for number, chain in enumerate(chains):
        admission = table.admit(session=str(number), tenant=None, hashes=[], now_s=0)
        effect = table.finish(
            admission,
            [ChainBlock(i, ledger.epoch[i], b"%d %d" % (number, i)) for i in chain],
            retain_s=1000,
            expect_s=None,
            priority=50,
            final=False,
            compaction=False,
            handover=False,
            now_s=0,
        )
        queue.reclassify(effect.changed)
    if chains:
        queue.rank(table.victims(0))
    return queue


class Replay:
    """Operations bound to one queue, to be run in short chunks."""

    def __init__(self, queue: Any, blocks: list[Any], operations: list[Operation]) -> None:
        self._popped: list[Any] = []
        self._put_back = queue.append_n
        methods: dict[str, Callable[[Any], Any]] = {
            "popleft_n": queue.popleft_n,
            "remove": queue.remove,
            "append_n": queue.append_n,
            "prepend_n": queue.prepend_n,
            "put back": lambda _: self._put_back(self._popped),
        }
        self._bound = [
            (methods[method], self._argument(method, argument, blocks))
            for method, argument in operations
        ]

    @staticmethod
    def _argument(method: str, argument: Any, blocks: list[Any]) -> Any:
        if method == "remove":
            return blocks[argument]
        if method in {"append_n", "prepend_n"}:
            return [blocks[block_id] for block_id in argument]
        return argument

    def run(self, start: int) -> float:
        """Run the chunk that begins at operation ``start``; returns its CPU seconds."""
        chunk = self._bound[start : start + CHUNK]
        begin_s = time.thread_time()
        for method, argument in chunk:
            result = method(argument)
            if result is not None:
                self._popped = result
        return time.thread_time() - begin_s


def compare(
    num_blocks: int, order: list[int], chains: list[list[int]], operations: list[Operation]
) -> tuple[float, float]:
    """Return the operations per second of ours and of vLLM's queue, each chunk at its best."""
    starts = range(0, len(operations), CHUNK)
    best = {name: [float("inf")] * len(starts) for name in ("ours", "vllm")}
    for _ in range(REPETITIONS):
        for name, seconds in best.items():
            blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
            queue: Any = FreeKVCacheBlockQueue([blocks[block_id] for block_id in order])
            if name == "ours":
                queue = our_queue(queue, blocks, chains)
            replay = Replay(queue, blocks, operations)
            gc.collect()
            gc.disable()
            for place, start in enumerate(starts):
                seconds[place] = min(seconds[place], replay.run(start))
            gc.enable()
    return len(operations) / sum(best["ours"]), len(operations) / sum(best["vllm"])


def figures(sizes: list[int]) -> Iterator[tuple[str, float, float, float]]:
    """Yield (name, ours, vLLM's, limit), in operations per second."""
    for size in sizes:
        rng = random.Random(size)
        order = aged_order(size, rng)
        ours, vllm = compare(size, order, [], Recorder(size, order, rng).run())
        yield f"{size} blocks, nothing retained", ours, vllm, ORDINARY_LIMIT
        for wanted in (200, 10_000):
            half = order[: size // 2]
            lineages = min(wanted, len(half))
            length = len(half) // lineages
            chains = [half[k * length : (k + 1) * length][::-1] for k in range(lineages)]
            ours, vllm = compare(size, order, chains, half_retained_load(order, chains, rng))
            name = f"{size} blocks, half retained by {lineages} lineages"
            yield name, ours, vllm, RETAINED_LIMIT


def main() -> int:
    """Measure, print a table and write the figures; returns 1 when one misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    host = f"{platform.processor() or platform.machine()}, Python {platform.python_version()}"
    rows: list[Figure] = []
    print(f"{'figure':<52}{'ours/s':>12}{'vLLM/s':>12}{'ratio':>8}{'limit':>8}")
    for name, ours, vllm, limit in figures(options.sizes):
        row = Figure(
            figure=name,
            unit="operations/s",
            value=round(ours),
            baseline=round(vllm),
            ratio=round(ours / vllm, 3),
            limit=limit,
            ok=ours / vllm >= limit,
            host=host,
            commit=git.stdout.strip(),
        )
        rows.append(row)
        mark = "" if row.ok else "  below"
        print(
            f"{name:<52}{row.value:>12.0f}{row.baseline:>12.0f}{row.ratio:>8.2f}"
            f"{limit:>8.2f}{mark}",
            flush=True,
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
