"""Random agents on a real pair while engines are frozen, killed and switched: nothing is wrong.

``python -m tests.engine.soak [--seconds 480] [--seed 1]`` (``make soak``, ``SOAK_S=3600``)

Agents continue, edit anywhere, regenerate, fork and retry their conversations, call in
parallel, leave in the middle and pause beyond every deadline. Meanwhile engines are stopped
for a while, killed and restarted, connections of the control plane are cut, and modes are
switched. After every call its outcome adds up and its text is that of a salted
recomputation, up to counted ties; of some calls, blocks on both engines hold what the
recomputation has computed, slot by slot. In the end every block is free, nothing is
remembered or withheld, and all processes have ended.

Writes ``build/perf/soak.json``; exits with 1 and the last events when anything was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import openai
import psutil

from tests.engine.block_reader import chain_hashes
from tests.engine.driving import (
    Answer,
    Driver,
    assert_adds_up,
    assert_same,
    continued,
    conversation,
    words,
)
from turncache import Outcome
from turncache.errors import EngineFault
from turncache_server.control.client import switch_mode
from turncache_server.control.messages import Peek, PeekReply
from turncache_server.launch.stack import StackSpec, start

ROOT: Final = Path(__file__).resolve().parents[2]
BLOCK: Final = 32
AGENTS: Final = 3
#: Characters after which a conversation is begun anew: the context holds about twice as many.
LONGEST: Final = 5200
RETAIN_S: Final = 5
#: Float32: what two ways of computing the same KV differ by at most.
TOLERANCE: Final = 2e-3
#: Errors are a client's to see while an engine is away, and shortly after.
AFTERWARDS_S: Final = 20.0

Messages = list[dict[str, Any]]


@dataclass
class Seen:
    """What has happened; for all threads."""

    counts: Counter[str] = field(default_factory=Counter)
    events: deque[str] = field(default_factory=lambda: deque(maxlen=200))
    wrong: list[str] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def note(self, kind: str, what: str = "") -> None:
        """Count an event."""
        self.counts[kind] += 1
        self.events.append(f"{time.monotonic() - self.began_s:7.1f} {kind} {what}")


class Weather:
    """What is done to the engines. One at a time, by its own thread.

    Attributes:
        rough: an engine is away, or was a moment ago.
    """

    def __init__(self, drive: Driver, seen: Seen, over: threading.Event, seed: int) -> None:
        self._drive = drive
        self._seen = seen
        self._over = over
        self._random = random.Random(seed)
        self._calm_at_s = 0.0
        self._bad = threading.Event()
        self.modes = 0

    @property
    def rough(self) -> bool:
        """Whether a call may fail without anybody being wrong."""
        return self._bad.is_set() or time.monotonic() < self._calm_at_s

    def run(self) -> None:
        """Do one thing after another until it is over."""
        acts: list[Callable[[str], None]] = [
            self.switch,
            self.freeze,
            self.cut,
            self.kill,
            self.switch,
            self.freeze,
            self.cut,
            self.restart,
        ]
        names = [engine.name for engine in self._drive.stack.engines]
        number = self._random.randrange(2)
        while not self._over.wait(self._random.uniform(6, 14)):
            act = acts[number % len(acts)]
            name = names[(number // len(acts) + number) % len(names)]
            number += 1
            self._seen.note(act.__name__, name)
            act(name)

    def switch(self, name: str) -> None:
        """Switch one engine or all off, or to observing, and on again."""
        self.modes += 1
        mode = self._random.choice(["off", "observe"])
        names = [name] if self._random.random() < 0.5 else []
        self._switch(mode, names)
        self._over.wait(self._random.uniform(1, 6))
        self._switch("on", [])

    def _switch(self, mode: str, names: list[str]) -> None:
        for engine in self._drive.stack.engines:
            if not names or engine.name in names:
                assert engine.control_address is not None
                switch_mode(self._drive.control, engine.control_address, mode, timeout_s=10)

    def freeze(self, name: str) -> None:
        """Stop an engine's processes for some seconds."""
        self._bad.set()
        top = psutil.Process(self._drive.engine(name).pid)
        pids = [process.pid for process in (top, *top.children(recursive=True))]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        self._over.wait(self._random.uniform(0.2, 5))
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        self._calm()

    def cut(self, name: str) -> None:
        """Cut every connection to an engine's control socket, some times over.

        Where the system lets nobody do that, it is counted as what was not tried.
        """
        if os.geteuid() or shutil.which("ss") is None:
            self._seen.note("cut_impossible")
            return
        port = self._drive.address(name).rsplit(":", 1)[1]
        for _ in range(self._random.randint(1, 10)):
            for end in ("sport", "dport"):
                subprocess.run(
                    ["ss", "-K", "-t", end, "=", f":{port}"], capture_output=True, check=True
                )
            self._over.wait(0.1)

    def kill(self, name: str) -> None:
        """Kill an engine without a word, and start it anew."""
        self._bad.set()
        top = psutil.Process(self._drive.engine(name).pid)
        for process in (*top.children(recursive=True), top):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._over.wait(self._random.uniform(0, 3))
        self._drive.stack.restart(name)
        self._calm()

    def restart(self, name: str) -> None:
        """Restart an engine as an operator does."""
        self._bad.set()
        self._drive.stack.restart(name)
        self._calm()

    def _calm(self) -> None:
        self._calm_at_s = time.monotonic() + AFTERWARDS_S
        self._bad.clear()


class Agent:
    """One conversation after another, with everything that happens to conversations."""

    def __init__(self, number: int, seed: int, drive: Driver, weather: Weather, seen: Seen) -> None:
        self._name = f"agent-{number}"
        self._drive = drive
        self._weather = weather
        self._seen = seen
        self._random = random.Random(1000 * seed + number)
        self._new()

    def run(self, over: threading.Event) -> None:
        """Live until it is over; what is wrong is written down, and ends everything."""
        while not over.is_set():
            try:
                self._act()
            except (openai.APIError, EngineFault, OSError) as error:
                if self._weather.rough:
                    self._seen.note("error", f"{self._name} {str(error)[:80]}")
                    over.wait(1)
                    continue
                self._wrong(over)
            except Exception:  # noqa: BLE001 - whatever it is, it is what was looked for
                self._wrong(over)

    def _wrong(self, over: threading.Event) -> None:
        self._seen.wrong.append(f"{self._name}: {traceback.format_exc()}")
        over.set()

    def _new(self) -> None:
        self._session, self._salt = f"s-{uuid.uuid4().hex}", uuid.uuid4().hex
        self._messages: Messages = conversation(self._random.randint(600, 3000))

    def _act(self) -> None:
        kinds: list[tuple[int, Callable[[], None]]] = [
            (10, self._go_on),
            (2, self._edit),
            (2, self._regenerate),
            (2, self._fork),
            (2, self._retry),
            (2, self._in_parallel),
            (3, self._leave),
            (2, self._pause),
            (1, self._new),
        ]
        weights = [weight for weight, _ in kinds]
        ((_, act),) = self._random.choices(kinds, weights)
        self._seen.note(act.__name__.strip("_"), self._name)
        if sum(len(str(message["content"])) for message in self._messages) > LONGEST:
            self._new()
        act()

    def _call(self, messages: Messages, session: str | None = None) -> Answer:
        """Make a call and check all of it."""
        max_tokens = self._random.choice([4, 16, 40])
        modes = self._weather.modes
        answer = self._drive.call(
            messages, session=session or self._session, salt=self._salt, max_tokens=max_tokens
        )
        self._seen.note("call", str(answer.outcome))
        if answer.outcome is None and self._weather.rough:
            # The engine that could have told was away.
            self._seen.note("no_outcome", self._name)
        else:
            self._count(assert_adds_up(answer.outcome))
        reference, salt = self._recomputed(messages, max_tokens)
        self._seen.counts["ties"] += assert_same(answer, reference)
        if self._random.random() < 0.2 and modes == self._weather.modes:
            self._check_blocks(messages, salt)
        return answer

    def _count(self, outcome: Outcome) -> None:
        self._seen.counts["returned_tokens"] += outcome.returned
        self._seen.counts["local_tokens"] += outcome.local
        self._seen.counts["computed_tokens"] += outcome.computed
        self._seen.counts[f"reason_{outcome.reason.value}"] += 1

    def _recomputed(self, messages: Messages, max_tokens: int) -> tuple[Answer, str]:
        """Return what a stranger gets, who shares nothing, and the salt of that call."""
        for _ in range(60):
            # A new one for every try: one that has failed may have left something.
            salt = uuid.uuid4().hex
            try:
                return self._drive.recomputed(messages, salt=salt, max_tokens=max_tokens), salt
            except (openai.APIError, KeyError, AssertionError):
                # It failed, nobody could say its outcome, or a second try of it found the first's.
                if not self._weather.rough:
                    raise
                time.sleep(1)
        raise AssertionError("no engine answers a minute after it was restarted")

    def _check_blocks(self, messages: Messages, salt: str) -> None:
        """Hold blocks of the session against those that were computed under another salt."""
        tokens = self._drive.prompt_tokens(messages)
        reused = chain_hashes(tokens, self._salt, BLOCK)
        fresh = chain_hashes(tokens, salt, BLOCK)
        for engine in ("prefill-0", "decode-0"):
            mine, theirs = (self._peek(engine, hashes) for hashes in (reused, fresh))
            common = min(len(mine.block_ids), len(theirs.block_ids))
            places = self._random.sample(range(common), min(common, 4))
            if not places:
                continue
            found = [
                self._drive.block_values(engine, [each.block_ids[place] for place in places])
                for each in (mine, theirs)
            ]
            again = [self._peek(engine, hashes) for hashes in (reused, fresh)]
            for at, place in enumerate(places):
                if any(
                    place >= len(after.epochs) or after.epochs[place] != before.epochs[place]
                    for before, after in zip((mine, theirs), again, strict=True)
                ):
                    continue  # evicted while we looked
                gap = max(abs(a - b) for a, b in zip(found[0][at], found[1][at], strict=True))
                assert gap < TOLERANCE, f"{engine} block {place} of {common} differs by {gap}"
                self._seen.counts["blocks_compared"] += 1

    def _peek(self, engine: str, hashes: list[bytes]) -> PeekReply:
        """Ask which blocks an engine holds; again, where a question or its answer was cut off."""
        question, address = Peek(session=self._session, hashes=hashes), self._drive.address(engine)
        for _ in range(2):
            with suppress(EngineFault):
                return self._drive.control.ask(address, question, PeekReply, timeout_s=5)
        return self._drive.control.ask(address, question, PeekReply, timeout_s=5)

    # --- what agents do ------------------------------------------------------------------

    def _go_on(self) -> None:
        answer = self._call(self._messages)
        self._messages = list(continued(self._messages, answer, self._random.randint(40, 600)))

    def _edit(self) -> None:
        place = self._random.randrange(len(self._messages))
        old = self._messages[place]
        cut = self._random.randint(0, len(old["content"]))
        text = old["content"][:cut] + words(30) + old["content"][cut + 20 :]
        self._messages[place] = {**old, "content": text}
        self._go_on()

    def _regenerate(self) -> None:
        places = [at for at, each in enumerate(self._messages) if each["role"] == "assistant"]
        if places:
            self._messages = self._messages[: places[-1]]
        self._go_on()

    def _fork(self) -> None:
        self._call(self._messages, f"{self._session}/{uuid.uuid4().hex[:4]}")
        self._go_on()

    def _retry(self) -> None:
        for _ in range(2):
            self._call(self._messages)

    def _in_parallel(self) -> None:
        errors: list[BaseException] = []

        def one(messages: Messages) -> None:
            try:
                self._call(messages)
            except BaseException as error:  # noqa: BLE001 - raised again below
                errors.append(error)

        branches = [[*self._messages, {"role": "user", "content": words(100)}] for _ in range(2)]
        threads = [threading.Thread(target=one, args=(branch,)) for branch in branches]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in errors:
            raise error

    def _leave(self) -> None:
        client = self._drive.client.with_options(
            timeout=self._random.uniform(0.02, 2), max_retries=0
        ).with_session(self._session)
        with suppress(openai.APITimeoutError, openai.APIConnectionError):
            client.chat.completions.create(
                model=self._drive.stack.model,
                messages=self._messages,  # type: ignore[arg-type]
                max_tokens=300,
                extra_body={"cache_salt": self._salt, "ignore_eos": True},
            )

    def _pause(self) -> None:
        time.sleep(self._random.uniform(RETAIN_S, 2 * RETAIN_S))
        self._go_on()


def at_the_end(drive: Driver, seen: Seen) -> None:
    """Check that nothing is left of anybody, on engines that are all alive."""
    drive.set_mode("on")
    drive.wait_for_pulls(wanted=True, timeout_s=60)
    drive.end_sessions()
    drive.stack.check()
    for engine in drive.stack.engines:
        wanted = {"calls_in_flight": 0, "retained_blocks": 0, "broken": 0, "in_order": 1}
        blocks = drive.stats(engine.name).gauges["blocks"]
        wanted |= {"free_blocks": blocks - 1, "abandoned_blocks": 0, "pulls_in_flight": 0}
        for gauge, value in wanted.items():
            found = _settled(drive, engine.name, gauge, value)
            assert found == value, f"{engine.name}: {gauge} is {found}, not {value}"
        counters = drive.stats(engine.name).counters
        for name in ("pulled_blocks", "pulls_verified", "pulls_failed", "reads_abandoned"):
            seen.counts[f"{engine.name} {name}"] = int(counters.get(name, 0))


def _settled(drive: Driver, name: str, gauge: str, value: float) -> float:
    """Wait until a gauge has a value; an engine lets go what is due when it steps."""
    found = drive.settle(name, gauge, value, timeout_s=3)
    until_s = time.monotonic() + 60
    while found != value and time.monotonic() < until_s:
        drive.step(name)
        found = drive.settle(name, gauge, value, timeout_s=3)
    return found


def soak(seconds: float, seed: int) -> Seen:
    """Let it all happen for a while; returns what was seen."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    spec = StackSpec(
        model="tiny",
        prefill=1,
        decode=1,
        router_port=0,
        dtype="float32",
        max_model_len=2560,
        num_blocks={"prefill": 160, "decode": 256},
        settings={"retain_budget": 0.9, "tenant_budget": 0.9, "retain_default_s": RETAIN_S},
        engine_args=("--worker-extension-cls", "tests.engine.block_reader.BlockReader"),
        log_dir=Path(tempfile.mkdtemp(prefix="soak-")),
    )
    seen = Seen()
    with start(spec, progress=lambda line: print(line, file=sys.stderr)) as stack:
        drive = Driver(stack)
        try:
            _live(drive, seen, seconds, seed)
            if not seen.wrong:
                at_the_end(drive, seen)
        except Exception:  # noqa: BLE001 - reported with everything else
            seen.wrong.append(traceback.format_exc())
        drive.close()
        family = psutil.Process().children(recursive=True)
    # Python's resource tracker ends when it hears that its parent has.
    _, alive = psutil.wait_procs(family, timeout=10)
    if left := [_words_of(each) for each in alive]:
        seen.wrong.append(f"processes that have not ended: {left}")
    return seen


def _words_of(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.status()}: {' '.join(process.cmdline())[:200]}"
    return f"{process.pid}: ended late"


def _live(drive: Driver, seen: Seen, seconds: float, seed: int) -> None:
    over, calm = threading.Event(), threading.Event()
    weather = Weather(drive, seen, calm, seed)
    agents = [Agent(number, seed, drive, weather, seen) for number in range(AGENTS)]
    threads = [threading.Thread(target=agent.run, args=(over,), daemon=True) for agent in agents]
    for thread in threads:
        thread.start()
    storm = threading.Thread(target=_stormy, args=(weather, seen, over), daemon=True)
    storm.start()
    over.wait(seconds)
    # First the weather, which brings back what it has taken away; then the agents.
    calm.set()
    storm.join(timeout=180)
    over.set()
    for thread in threads:
        thread.join(timeout=180)
        if thread.is_alive():
            seen.wrong.append(f"{thread.name}: a call has not ended after three minutes")


def _stormy(weather: Weather, seen: Seen, over: threading.Event) -> None:
    try:
        weather.run()
    except Exception:  # noqa: BLE001 - reported with everything else
        seen.wrong.append(f"weather: {traceback.format_exc()}")
        over.set()


def main() -> int:
    """Soak, print and write; returns 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    began_s = time.monotonic()
    seen = soak(options.seconds, options.seed)
    result = {"seconds": round(time.monotonic() - began_s), "seed": options.seed}
    result |= {"wrong": seen.wrong, "seen": dict(sorted(seen.counts.items()))}
    folder = ROOT / "build" / "perf"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    if seen.wrong:
        print("\n".join(seen.events))
        print("\n".join(seen.wrong))
    print(json.dumps(result["seen"], indent=1))
    print(f"{result['seconds']} s, {seen.counts['call']} calls, {len(seen.wrong)} wrong")
    return 1 if seen.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
