"""Every engine of two pairs is drained and restarted in turn, under load: nothing is lost.

``python -m tests.engine.drain`` (``make drain``)

Agents go on with their conversations all the time. Each engine is drained with ``turncache
drain`` until nothing is left on it, restarted, and the next one follows. What calls lost
(tokens computed again that their session had computed before) is held against all prompt
tokens; no call may fail. Writes ``build/perf/drain.json``.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.engine.driving import Driver, assert_adds_up, continued, conversation
from tests.perf.figures import Figure, show, write
from turncache import Outcome
from turncache.protocol import FINAL_HEADER
from turncache_server.launch.stack import Stack, StackSpec, start

AGENTS: Final = 4
LOST_LIMIT: Final = 0.02
#: Characters after which a conversation ends and another begins.
LONGEST: Final = 5000
DRAIN_S: Final = 60


@dataclass
class Load:
    """Agents at work; what they saw.

    Attributes:
        outcomes: of all calls, and the engine that was away or being drained then.
        failed: calls that failed.
    """

    drive: Driver
    phase: str = "all there"
    outcomes: list[tuple[str, Outcome]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def agent(self, number: int) -> None:
        """Go on with conversations until it is over."""
        draw = random.Random(number)
        while not self.over.is_set():
            try:
                self._conversation(draw)
            except Exception:  # noqa: BLE001 - every failure counts
                self.failed.append(f"{self.phase}: {traceback.format_exc(limit=-2)}")
                self.over.wait(1)

    def _conversation(self, draw: random.Random) -> None:
        session, salt = f"s-{uuid.uuid4().hex}", uuid.uuid4().hex
        messages = conversation(draw.randint(1000, 2000))
        try:
            while not self.over.is_set():
                phase = self.phase
                answer = self.drive.call(messages, session=session, salt=salt, max_tokens=12)
                self.outcomes.append((phase, assert_adds_up(answer.outcome)))
                if sum(len(str(each["content"])) for each in messages) > LONGEST:
                    break
                messages = list(continued(messages, answer, draw.randint(50, 400)))
                self.over.wait(draw.uniform(0.3, 2.5))
        finally:
            self._end(session, salt)

    def _end(self, session: str, salt: str) -> None:
        self.drive.client.with_session(session).chat.completions.create(
            model=self.drive.stack.model,
            messages=[{"role": "user", "content": "Bye."}],
            max_tokens=1,
            extra_headers={FINAL_HEADER: "true"},
            extra_body={"cache_salt": salt},
        )


def in_turn(stack: Stack, load: Load) -> Iterator[tuple[str, float]]:
    """Drain and restart every engine; yield its name and how long draining took."""
    for engine in stack.engines:
        load.phase = engine.name
        began_s = time.monotonic()
        assert engine.control_address is not None
        verb = [sys.executable, "-m", "turncache_tools", "drain", engine.control_address]
        drained = subprocess.run(
            [*verb, "--timeout", str(DRAIN_S)], capture_output=True, text=True, check=False
        )
        if drained.returncode:
            load.failed.append(f"{engine.name} was not drained: {drained.stdout[-300:]}")
        yield engine.name, time.monotonic() - began_s
        stack.restart(engine.name)
        time.sleep(3)


def figures() -> Iterator[Figure]:
    """Let it happen and yield what was lost and what failed."""
    spec = StackSpec(
        model="tiny",
        prefill=2,
        decode=2,
        router_port=0,
        dtype="float32",
        max_model_len=2560,
        num_blocks={"prefill": 200, "decode": 400},
        log_dir=Path(tempfile.mkdtemp(prefix="drain-")),
    )
    with start(spec, progress=lambda line: print(line, file=sys.stderr)) as stack:
        drive = Driver(stack)
        load = Load(drive)
        threads = [threading.Thread(target=load.agent, args=(n,)) for n in range(AGENTS)]
        for thread in threads:
            thread.start()
        time.sleep(10)
        took = dict(in_turn(stack, load))
        load.phase = "afterwards"
        time.sleep(5)
        load.over.set()
        for thread in threads:
            thread.join()
        stack.check()
        drive.close()
    prompt = sum(outcome.prompt for _, outcome in load.outcomes)
    lost = sum(outcome.lost for _, outcome in load.outcomes)
    for name, seconds in took.items():
        calls = [outcome for phase, outcome in load.outcomes if phase == name]
        yield Figure(
            figure=f"{name}: lost of {sum(each.prompt for each in calls)} tokens, "
            f"drained in {seconds:.0f} s",
            unit="tokens",
            value=sum(each.lost for each in calls),
        )
    yield Figure(
        figure=f"lost of {prompt} prompt tokens in {len(load.outcomes)} calls",
        unit="share",
        value=lost / prompt,
        limit=LOST_LIMIT,
    )
    yield Figure(figure="calls and drains that failed", unit="", value=len(load.failed), limit=0)
    for each in load.failed:
        print(each, file=sys.stderr)


def main() -> int:
    """Drain, print and write; returns 1 when something was lost or failed."""
    return write("drain", show(figures()))


if __name__ == "__main__":
    sys.exit(main())
