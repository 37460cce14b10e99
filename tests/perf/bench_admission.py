"""What admission by working set gives and takes, at twice the sessions that fit.

``python -m tests.perf.bench_admission [simulated] [measured] [--trace FILE] [--fake]``

* *simulated*: recorded and drawn agents in the planner, on one engine whose pool holds half of
  the sessions at a time, with the router's own admission: stock, retention, and retention with
  admission at the default longest wait and at five times that. A place is taken by the next
  agent when one ends. Waits are cut at 30 s, so that all of these sessions are really at work;
  the first workload also as it was recorded, where people are away for most of the time.
* *measured*: one real engine (CPU, tiny model), two routers in front of it that differ in
  ``admission``, in turns (ABBA). ``--fake`` takes a fake engine, to try this script.

Times to first token are of all calls, from the request on, the wait to be let in included.
Nothing here has a limit: where admission does not pay, the table says so. Writes
``build/perf/admission.json`` with the parts that have run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import openai

from tests.fakes.engine import FakeEngine, fake_engines
from tests.perf.figures import FOLDER
from tests.perf.traces import sessions
from turncache.protocol import FINAL_HEADER, OUTCOME_HEADER, SESSION_HEADER, Outcome
from turncache_server.launch.spec import StackSpec
from turncache_server.launch.stack import start
from turncache_server.router.app import serving
from turncache_server.router.config import parse_config
from turncache_tools.bench.statistics import quantile
from turncache_tools.bench.traces import read_workload
from turncache_tools.bench.workload import (
    Cut,
    Parameters,
    Workload,
    every_agent,
    fitted,
    parametric,
)
from turncache_tools.plan.load import (
    AdmissionRules,
    Load,
    PlanArm,
    mean_context,
    prompts,
    rig_for,
)
from turncache_tools.plan.priors import prior
from turncache_tools.plan.report import again_share, turns_per_min
from turncache_tools.plan.served import SimResult
from turncache_tools.plan.simulator import simulate
from turncache_tools.shell import progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arm under one load, all calls.

    Attributes:
        again: of what could be reused, what was computed again, as a share.
        longest_wait_s: to be let in.
        late: calls that were let in without room.
    """

    load: str
    arm: str
    calls: int
    ttft_p50_s: float
    ttft_p99_s: float
    ttft_mean_s: float
    turns_per_min: float
    again: float
    longest_wait_s: float
    late: int


def row(
    load: str,
    arm: str,
    ttft_s: Sequence[float],
    waits_s: Sequence[float],
    **more: Any,
) -> Row:
    """Sum one arm up."""
    return Row(
        load=load,
        arm=arm,
        calls=len(ttft_s),
        ttft_p50_s=quantile(ttft_s, 0.5),
        ttft_p99_s=quantile(ttft_s, 0.99),
        ttft_mean_s=sum(ttft_s) / len(ttft_s),
        longest_wait_s=max(waits_s, default=0.0),
        **more,
    )


def show(rows: Iterator[Row]) -> list[Row]:
    """Print rows as they come."""
    heads = ("calls", "p50 s", "p99 s", "mean s", "turns/min", "again", "longest", "late")
    print(f"{'load':<44}{'arm':<29}" + "".join(f"{head:>10}" for head in heads))
    shown = []
    for each in rows:
        shown.append(each)
        numbers = (
            f"{each.calls:,}",
            f"{each.ttft_p50_s:.2f}",
            f"{each.ttft_p99_s:.2f}",
            f"{each.ttft_mean_s:.2f}",
            f"{each.turns_per_min:.2f}",
            f"{100 * each.again:.1f} %",
            f"{each.longest_wait_s:.0f} s",
            str(each.late),
        )
        print(f"{each.load:<44}{each.arm:<29}" + "".join(f"{n:>10}" for n in numbers), flush=True)
    return shown


# --- simulated ------------------------------------------------------------------------------

SESSIONS: Final = 32
#: What of a recording is taken: agents, and their longest prompt and answer.
_AGENTS, _MAX_CONTEXT = 96, 200_000
_MAX_WAIT_S: Final = 30.0
_DEFAULT: Final = AdmissionRules()
_ARMS: Final = (
    PlanArm(name="off", what="stock"),
    PlanArm(name="off + admission", what="", admission=_DEFAULT),
    PlanArm(name="retention", what="", retaining=True),
    PlanArm(name="retention + admission", what="", retaining=True, admission=_DEFAULT),
    PlanArm(
        name="retention + admission 600 s",
        what="",
        retaining=True,
        admission=AdmissionRules(wait_s=5 * _DEFAULT.wait_s),
    ),
)


def loads(files: Sequence[Path]) -> Iterator[tuple[str, Workload]]:
    """Yield the workloads by name."""
    recorded = "\n".join(json.dumps(each) for each in sessions())
    found = [("Claude Code", recorded)] + [(file.stem[:20], file.read_text()) for file in files]
    for name, text in found:
        for most_s in (_MAX_WAIT_S, float("inf")) if text is recorded else (_MAX_WAIT_S,):
            cut = Cut(agents=_AGENTS, calls=1000, max_context=_MAX_CONTEXT, max_wait_s=most_s)
            cut_s = "as recorded" if most_s == float("inf") else f"waits to {most_s:g} s"
            yield f"{name}, {cut_s}", fitted(read_workload(text, name=name), cut)
    numbers = Parameters(
        agents=_AGENTS,
        calls=20,
        system=2000,
        tools=6000,
        first=4000,
        new=1500,
        new_sigma=0.8,
        answer=250,
        wait_s=6.0,
        wait_sigma=1.2,
    )
    yield "drawn, tool waits of 6 s", parametric(numbers, seed=1)


def simulated(files: Sequence[Path]) -> Iterator[Row]:
    """Yield what the planner says."""
    for name, workload in loads(files):
        longest = max(
            prompt + answer
            for agent in every_agent(workload.agents)
            for prompt, answer in prompts(agent, workload.shared)
        )
        context = mean_context(workload)
        # Of a pool that hardly holds the longest call no session would ever share.
        at_a_time = max(SESSIONS, round(4 * longest / context))
        pool = round(context * at_a_time / 2)
        rig = rig_for(prior("qwen3-32b"), workload, pool=pool, decode_pool=None, unit=0)
        for arm in _ARMS:
            progress(f"{name}: {arm.name}")
            load = Load(workload=workload, sessions=at_a_time)
            yield _simulated_row(f"{name}, {at_a_time}", simulate(load, rig, arm))


def _simulated_row(name: str, result: SimResult) -> Row:
    served = result.served
    return row(
        name,
        result.arm.name,
        [each.ttft_s for each in served],
        [each.admitted_s for each in served],
        turns_per_min=turns_per_min(served),
        again=again_share(served),
        late=result.num_late,
    )


# --- measured -------------------------------------------------------------------------------

BLOCK: Final = 32
#: Sessions at a time, and in one block of the measurement.
PLACES, TOTAL = 6, 10
TURNS, CALLS, WAIT_S, ANSWER = 2, 2, 0.5, 4
FIRST, NEW = 400, 24
#: Mean tokens of a session, with the template and its answers, about.
MEAN: Final = FIRST + (TURNS * CALLS // 2) * (NEW + ANSWER + 12)
POOL_BLOCKS: Final = PLACES * MEAN // (2 * BLOCK)
_CHARS_PER_TOKEN: Final = 2.9


@dataclass(slots=True, kw_only=True)
class Block:
    """What one block gave: seconds, and tokens of the outcomes."""

    ttft_s: list[float]
    lost: int = 0
    prompt: int = 0
    span_s: float = 0.0


class Agents:
    """Sessions of turns with tools, at most :data:`PLACES` at a time.

    Args:
        url: of a router.
        model: its name.
    """

    def __init__(self, url: str, model: str) -> None:
        self._client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=300, max_retries=0)
        self._model = model
        self._lock = threading.Lock()

    def run(self) -> Block:
        """Let all sessions run to their end."""
        done = Block(ttft_s=[])
        began_s = time.perf_counter()
        with ThreadPoolExecutor(PLACES) as pool:
            for each in [pool.submit(self._session, done) for _ in range(TOTAL)]:
                each.result()
        done.span_s = time.perf_counter() - began_s
        return done

    def close(self) -> None:
        """Close connections."""
        self._client.close()

    def _session(self, done: Block) -> None:
        name = uuid.uuid4().hex
        messages: list[dict[str, Any]] = []
        for number in range(TURNS * CALLS):
            if number:
                time.sleep(WAIT_S)
            in_turn = number % CALLS > 0
            text = _text(NEW if number else FIRST)
            more = {"tool_call_id": "call-1"} if in_turn else {}
            messages.append({"role": "tool" if in_turn else "user", "content": text, **more})
            last = number == TURNS * CALLS - 1
            messages.append(
                {"role": "assistant", "content": self._call(done, name, messages, last)}
            )

    def _call(self, done: Block, session: str, messages: list[dict[str, Any]], last: bool) -> str:
        headers = {SESSION_HEADER: session, **({FINAL_HEADER: "true"} if last else {})}
        began_s = time.perf_counter()
        stream = self._client.chat.completions.create(
            model=self._model,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=ANSWER,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers=headers,
        )
        said, first_s = "", 0.0
        for chunk in stream:
            first_s = first_s or time.perf_counter() - began_s
            if chunk.choices:
                said += chunk.choices[0].delta.content or ""
        outcome = Outcome.from_header(stream.response.headers[OUTCOME_HEADER])
        with self._lock:
            done.ttft_s.append(first_s)
            done.lost += outcome.lost
            done.prompt += outcome.prompt
        return said or "-"


_numbers = itertools.count()


def _text(num_tokens: int) -> str:
    """Return text of about so many tokens of the tiny model that nobody has used before."""
    size, text = int(num_tokens * _CHARS_PER_TOKEN), ""
    while len(text) < size:
        text += f"Item {next(_numbers)} was found in the house behind the garden. "
    return text[:size]


class Routers:
    """Two routers in front of one engine, in a thread of their own.

    Args:
        engine: its table, None for a fake one.
    """

    def __init__(self, engine: Mapping[str, str] | None) -> None:
        self._engine = engine
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.urls: dict[bool, str] = {}
        self.events: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._run()))

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._ready.wait(60):
            raise RuntimeError("the routers do not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _run(self) -> None:
        async with AsyncExitStack() as opened:
            table = self._engine
            if table is None:
                fake = FakeEngine()
                fake.num_blocks = POOL_BLOCKS * BLOCK // 4
                await opened.enter_async_context(fake_engines(fake))
                table = fake.as_config()
            for admission in (False, True):
                config = parse_config({"port": 0, "engines": [table], "admission": admission})
                listeners = [self.events.append] if admission else []
                router = await opened.enter_async_context(serving(config, listeners=listeners))
                self.urls[admission] = router.url
            self._ready.set()
            await self._stop.wait()


@contextmanager
def engine(*, fake: bool) -> Iterator[tuple[Mapping[str, str] | None, str]]:
    """Start the engine; yields (its table, the model's name)."""
    if fake:
        yield None, "fake"
        return

    spec = StackSpec(
        model="tiny",
        router=False,
        router_port=0,
        dtype="float32",
        max_model_len=1024,
        num_blocks={"single": POOL_BLOCKS},
        # As behind a router of its own.
        settings={"trust_hints": True},
    )
    with start(spec, progress=progress) as stack:
        (one,) = stack.engines
        assert one.control_address is not None
        yield (
            {"name": one.name, "side": "single", "url": one.url, "control": one.control_address},
            stack.model,
        )


def measured(*, fake: bool, rounds: int) -> Iterator[Row]:
    """Yield the two arms on a real engine, in turns."""
    found: dict[bool, list[Block]] = {False: [], True: []}
    with engine(fake=fake) as (table, model), Routers(table) as routers:
        callers = {on: Agents(url, model) for on, url in routers.urls.items()}
        for number in range(rounds):
            for on in (False, True) if number % 2 == 0 else (True, False):
                found[on].append(callers[on].run())
                progress(f"round {number + 1}, admission {on}: {found[on][-1].span_s:.1f} s")
        for caller in callers.values():
            caller.close()
        admitted = [e for e in routers.events if type(e).__name__ == "CallAdmitted"]
    for on, blocks in found.items():
        waits = [event.waited_s for event in admitted] if on else []
        span_s = sum(block.span_s for block in blocks)
        yield row(
            "real engine" if not fake else "fake engine",
            "retention + admission" if on else "retention",
            [each for block in blocks for each in block.ttft_s],
            waits,
            turns_per_min=60 * TURNS * TOTAL * rounds / span_s,
            again=sum(b.lost for b in blocks) / max(1, sum(b.prompt for b in blocks)),
            late=sum(event.result == "late" for event in admitted) if on else 0,
        )
        each_s = ", ".join(f"{block.span_s:.1f}" for block in blocks)
        print(f"    blocks: {each_s} s", flush=True)


def main(arguments: Sequence[str]) -> int:
    """Run the parts that were chosen, all by default; always 0."""
    parser = argparse.ArgumentParser(description="what admission by working set gives and takes")
    parser.add_argument("parts", nargs="*", help="simulated, measured; both by default")
    parser.add_argument("--trace", type=Path, action="append", default=[], help="more recordings")
    parser.add_argument("--fake", action="store_true", help="measure on a fake engine")
    parser.add_argument("--rounds", type=int, default=2, help="of the measurement")
    options = parser.parse_args(arguments)
    parts = options.parts or ["simulated", "measured"]
    FOLDER.mkdir(parents=True, exist_ok=True)
    kept = FOLDER / "admission.json"
    told: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    if "simulated" in parts:
        told["simulated"] = [asdict(each) for each in show(simulated(options.trace))]
    if "measured" in parts:
        rows = show(measured(fake=options.fake, rounds=options.rounds))
        if not options.fake:
            told["measured"] = [asdict(each) for each in rows]
    kept.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
