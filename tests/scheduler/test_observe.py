"""Mode ``observe`` on vLLM's real scheduler: as without us, and the ghost is right."""

from __future__ import annotations

import random
from pathlib import Path

from tests.builders import BLOCK, Engine, tokens, world
from turncache_server.retention.trace import read_trace


def test_hits_are_those_of_an_engine_without_us_and_the_ghost_knows_them(tmp_path: Path) -> None:
    """The same calls on stock and on an observed engine; the ghost's process and its trace.

    Its stock pool has what the real engine had, and its pool in mode on has more.
    """
    path = tmp_path / "trace.jsonl"
    with world() as made:
        observe = {"mode": "observe", "trace_file": str(path), "retain_default_s": 1000}
        ours = Engine(made, "ours", connector="ClockedRetention", settings=observe)
        stock = Engine(made, "stock", connector=None)
        draw = random.Random(3)
        length = dict.fromkeys(("a", "b", "c"), 20)
        hits = []
        for number in range(60):
            session = draw.choice([*length, None])
            if session is None:
                prompt = tokens(draw.randint(30, 120), start=2000 + 7 * number)
            else:
                length[session] += draw.randint(1, 6)
                prompt = tokens(length[session], start=100 * ord(session))
            found = [engine.hit(prompt) for engine in (ours, stock)]
            assert found[0] == found[1]
            hits.append(found[0])
            ours.call(f"r{number}", prompt, session=session, max_tokens=1 + number % 6)
            stock.call(f"r{number}", prompt, max_tokens=1 + number % 6)
            made.now_s += 1.0
        order = [
            [b.block_id for b in engine.pool.free_block_queue.get_all_free_blocks()]
            for engine in (ours, stock)
        ]
        assert order[0] == order[1]
        ours.close()
        counters = ours.extension.counters()
        assert ours.extension.broken is None
    assert counters["observed_calls"] == 60
    assert counters["observed_local_tokens"] == counters["observed_stock_local_tokens"]
    assert counters["observed_again_tokens"] == counters["observed_again_tokens_stock"] > 0
    assert counters["observed_again_tokens_retention"] < counters["observed_again_tokens_stock"]
    with path.open() as lines:
        trace = read_trace(lines)
    assert [call.local for call in trace.calls] == hits
    assert [call.stock for call in trace.calls] == hits
    assert trace.header.block_bytes == 2 * 4 * 16 * BLOCK
    assert sum(call.again for call in trace.calls) == counters["observed_again_tokens"]
