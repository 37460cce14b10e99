"""What turncache saves a LangGraph agent on a real pair: ``python -m tests.perf.langgraph_shares``.

One agent of five model calls, four of them after a tool, on real engines; other traffic
floods prefill while each tool runs. Once with the middleware, once with the stock model on
the same engines switched off. The shares are of vLLM's own counters at prefill, so that both
runs are counted by the same witness. Prints a table and writes
``build/perf/langgraph_shares.json``. Runs in the engine environment.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from tests.engine.driving import Driver
from tests.engine.forced_agent import (
    ENGINE_ARGS,
    ENVIRONMENT,
    Said,
    prefill_tokens,
    run_agent,
)
from turncache_server.launch.stack import Stack, StackSpec, start

ROOT: Final = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One run of the agent.

    Attributes:
        prompt: prompt tokens of the calls after tools.
        local: of them found in prefill's cache, by vLLM's counter.
        pulled: of them taken from decode, likewise.
    """

    prompt: int
    local: int
    pulled: int

    @property
    def kept(self) -> float:
        """Share of the prompt tokens that were not computed again."""
        return (self.local + self.pulled) / self.prompt


def measured(driver: Driver, *, ours: bool) -> tuple[Share, Said]:
    """Run the agent and read the counters before and after."""
    # The floods are prompts that nobody has seen: what prefill has of them is nothing. One
    # before the run takes what the other run has left, so that its first call finds nothing.
    driver.flood()
    before = prefill_tokens(driver.stack)
    said = run_agent(driver.stack, f"shares-{ours}", ours=ours, in_wait=driver.flood)
    spent = prefill_tokens(driver.stack) - before
    prompt = sum(said.prompt_tokens[1:])
    return Share(prompt=prompt, local=spent.local, pulled=spent.external), said


def compare(stack: Stack) -> tuple[Share, Share, bool]:
    """Measure with and without; the third value tells whether the model said the same."""
    driver = Driver(stack)
    try:
        on, said = measured(driver, ours=True)
        driver.set_mode("off")
        driver.wait_for_pulls(wanted=False)
        off, said_off = measured(driver, ours=False)
    finally:
        driver.close()
    return on, off, said == said_off


def main() -> int:
    """Start a pair, measure, print and write; 1 when the model did not say the same."""
    os.environ.update(ENVIRONMENT)
    spec = StackSpec(
        model="tiny",
        router_port=0,
        dtype="float32",
        max_model_len=2560,
        prefill=1,
        decode=1,
        num_blocks={"prefill": 96, "decode": 256},
        settings={"retain_budget": 0.9, "tenant_budget": 0.9},
        engine_args=ENGINE_ARGS,
        log_dir=Path(tempfile.mkdtemp(prefix="langgraph-shares-")),
    )
    with start(spec, progress=lambda line: print(line, file=sys.stderr)) as stack:
        on, off, same = compare(stack)
    table = Table("", "prompt tokens", "local", "returned", "not computed again")
    for name, share in (("with turncache", on), ("without", off)):
        counts = (str(n) for n in (share.prompt, share.local, share.pulled))
        table.add_row(name, *counts, f"{share.kept:.1%}")
    Console().print(table)
    print(f"the model said {'the same' if same else 'something else'}")
    folder = ROOT / "build" / "perf"
    folder.mkdir(parents=True, exist_ok=True)
    found = {
        name: {**asdict(share), "kept": share.kept} for name, share in (("on", on), ("off", off))
    }
    (folder / "langgraph_shares.json").write_text(
        json.dumps({**found, "same_text": same}, indent=2) + "\n"
    )
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
