"""Whether it pays on this machine: ``python -m tests.perf.bench_pays``, as ``make bench``.

``turncache bench`` on real prefill/decode pairs, with prefill's cache emptied in every wait or in
none: off against ours at two lengths of the context, and stock's own off against its
``bidirectional_kv_xfer``. The cache is emptied by vLLM's own reset, which costs nothing: other
traffic that turns over a pool of one session takes two cores longer than the agent does (the demo
does that, at a smaller size). So this shows the return, and that nothing is lost where nothing
presses; retention is the demo's. The host tier is tried, and why it cannot be had is kept.

Two pairs do not fit on two cores, so ours and stock's returns are held against the off of their own
pair. Prints the report of every setting and one table of what must be shown, over all settings that
have been run; writes ``build/perf/bench.json`` and a page per setting. With ``--resume`` finished
blocks stay, and a run can be made in several parts. Runs in the engine environment, one pair at a
time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from tests.perf.pays import (
    MODEL,
    OURS,
    OUT,
    STOCK,
    SWEEPS,
    Sweep,
    gathered,
    report_kept,
    show,
)
from tests.perf.real_pair import BLOCK_TOKENS, pair_spec, running
from turncache.errors import TurncacheError
from turncache_server.launch.stack import StackSpec, start
from turncache_tools.bench.command import main as bench
from turncache_tools.figure import SCHEMA
from turncache_tools.shell import progress, write

#: Answers of random weights are text that may have more tokens than were generated.
_SLACK: Final = 1024
#: Room of a pool, in sessions: nothing is evicted within a block.
_ROOM: Final = 4
#: A stock decode engine holds the last answer of every conversation until its TTL has passed.
_STOCK_ROOM: Final = 12
_PORTS: Final = 18600


def measure(sweep: Sweep, rounds: int | None, *, verify: bool) -> None:
    """Start what a sweep needs and run the bench on it."""
    write(f"\n{sweep.context} tokens at call {sweep.calls}, prefill misses {sweep.miss_rate:.0%}")
    context = sweep.context + _SLACK
    ours = pair_spec(model=MODEL, context=context, sessions=_ROOM, ports=_PORTS)
    if not sweep.stock:
        with running(ours) as pair:
            options = sweep.options(rounds, pair.prefill, verify=verify)
            bench([*pair.places, "--arms", OURS, *options])
        return
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    with start(_stock_spec(ours, context), progress=progress) as stack:
        prefill, decode = (each.url for each in stack.engines)
        places = ["--url", decode, "--engine", prefill, "--engine", decode]
        arms = ["--arms", "", "--arm", f"off={prefill},{decode}"]
        arms += ["--arm", f"{STOCK}={prefill},{decode}"]
        bench([*places, *arms, *sweep.options(rounds, prefill, verify=verify)])


def _stock_spec(ours: StackSpec, context: int) -> StackSpec:
    """Return a stock pair that returns KV where it is asked to.

    Off runs on it as well: a third engine takes so much of two cores that off's first tokens
    come after twice the time, and the arms could not be held against ours. What off pays for
    the flag is room on decode, which holds the blocks of its calls too.
    """
    blocks = _STOCK_ROOM * (-(-context // BLOCK_TOKENS) + 2)
    return StackSpec(
        model=ours.model,
        kind="nixl-bidirectional",
        prefill=1,
        decode=1,
        engine_port=ours.engine_port,
        decode_port=ours.decode_port,
        nixl_port=ours.nixl_port,
        dtype=ours.dtype,
        max_model_len=ours.max_model_len,
        num_blocks={"prefill": ours.num_blocks["prefill"], "decode": blocks},
    )


def try_host_tier() -> dict[str, str]:
    """Start an engine with vLLM's own host tier; return what came of it."""
    spec = StackSpec(
        model=MODEL,
        kind="plain",
        prefill=1,
        router_port=0,
        max_model_len=1024,
        engine_args=("--kv-offloading-size", "1"),
    )
    try:
        with start(spec, progress=progress):
            return {"offload": "it starts here, and is not measured: give its URL to the bench"}
    except TurncacheError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = next((line for line in reversed(lines) if "Error" in line), lines[0])
        return {"offload": f"not measurable here: {why}"}


def main(arguments: Sequence[str]) -> int:
    """Run the sweeps that were chosen; 1 when one does not show what it must."""
    parser = argparse.ArgumentParser(description="does it pay on this machine")
    parser.add_argument("--only", type=int, nargs="*", help="sweeps by number, from 1")
    parser.add_argument("--rounds", type=int, help="instead of each sweep's own")
    parser.add_argument("--calls", type=int, help="likewise: fewer reach the same length sooner")
    parser.add_argument("--context", type=int, help="likewise, tokens of the last prompt")
    parser.add_argument("--resume", action="store_true", help="go on with finished blocks")
    parser.add_argument("--no-verify", action="store_true", help="compare no answers")
    parser.add_argument(
        "--report", action="store_true", help="measure nothing, report on the rounds that are whole"
    )
    parser.add_argument("--host-tier", action="store_true", help="only try vLLM's host tier")
    options = parser.parse_args(arguments)
    OUT.mkdir(parents=True, exist_ok=True)
    tried = OUT / "bench_host_tier.json"
    chosen = [SWEEPS[number - 1] for number in options.only or range(1, len(SWEEPS) + 1)]
    chosen = [
        replace(sweep, calls=options.calls or sweep.calls, context=options.context or sweep.context)
        for sweep in chosen
    ]
    if options.host_tier or not (options.only or options.report):
        tried.write_text(json.dumps(try_host_tier()) + "\n")
    for sweep in () if options.host_tier else chosen:
        if options.report:
            if sweep.kept.exists():
                report_kept(sweep)
            continue
        if not options.resume:
            sweep.kept.unlink(missing_ok=True)
        measure(sweep, options.rounds, verify=not options.no_verify)
    found = gathered()
    elsewhere = json.loads(tried.read_text()) if tried.exists() else {}
    done = {
        "schema": SCHEMA,
        "figures": [each.to_dict() for each in found],
        "elsewhere": elsewhere,
    }
    (OUT / "bench.json").write_text(json.dumps(done, indent=1) + "\n")
    show(found, elsewhere)
    return 0 if all(each.ok for each in found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
