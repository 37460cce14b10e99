"""The scheduler-level twin for as many steps as one has time for.

``python -m tests.scheduler.twin [--steps 1000000] [--first-seed 100000] [--mutant NAME]``

Runs seed after seed (:mod:`tests.scheduler.soak`) until so many random events have happened,
and prints what they were. A seed that fails is printed and the run goes on; the exit code is 1
when one has failed. With ``--mutant`` one rule is switched off, and the seeds that notice it
are what is looked for.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Final

from tests.scheduler.mutants import MUTANTS
from tests.scheduler.soak import Events, Soak

ROOT: Final = Path(__file__).resolve().parents[2]
EVENTS_PER_SEED: Final = 600
REPORT_EVERY_S: Final = 60.0


def run(
    seed: int,
    mutant: str | None = None,
    num_events: int = EVENTS_PER_SEED,
    *,
    stock: bool = False,
    finding: bool = False,
    repeating: bool = False,
) -> Events:
    """Run one seed to its end; raises AssertionError (WrongKV among them) when it fails."""
    broken = None if mutant is None else MUTANTS[mutant]
    soak = Soak(seed, mutant=broken, stock=stock, finding=finding, repeating=repeating)
    try:
        return soak.run(num_events)
    finally:
        soak.world.close()


def main() -> int:
    """Run until the steps are done; returns 1 when a seed has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=1_000_000, help="random events, in all")
    parser.add_argument("--first-seed", type=int, default=100_000)
    parser.add_argument("--mutant", choices=sorted(MUTANTS), help="switch a rule off")
    parser.add_argument("--stop", action="store_true", help="end with the first failing seed")
    options = parser.parse_args()
    began_s = told_s = time.monotonic()
    events, steps, seed, failing = Events(), 0, options.first_seed, {}
    while steps < options.steps and not (options.stop and failing):
        try:
            kinds = {"stock": 2, "finding": 4, "repeating": 8}
            chosen = {name: seed // period % 2 == 1 for name, period in kinds.items()}
            events.add(run(seed, options.mutant, **chosen))
        except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
            failing[seed] = f"{type(error).__name__}: {error}"[:200]
            print(f"seed {seed}: {failing[seed]}", flush=True)
        seed, steps = seed + 1, steps + EVENTS_PER_SEED
        if time.monotonic() - told_s > REPORT_EVERY_S:
            told_s = time.monotonic()
            print(f"{steps} steps, {len(failing)} seeds failed", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began_s
    print(f"{steps} steps in {seconds:.0f} s, {len(failing)} of {seed - options.first_seed} seeds")
    print(", ".join(f"{count} {name}" for name, count in vars(events).items()))
    folder = ROOT / "build" / "perf"
    folder.mkdir(parents=True, exist_ok=True)
    result = {"steps": steps, "seconds": round(seconds), "failing": failing, **vars(events)}
    (folder / f"twin{'-' + options.mutant if options.mutant else ''}.json").write_text(
        json.dumps(result, indent=1) + "\n"
    )
    return 1 if failing else 0


if __name__ == "__main__":
    sys.exit(main())
