"""Behind the real vllm-router: ``python -m tests.perf.foreign_router [--find peers]``.

``make perf-foreign-router``. vllm-router from PyPI, in an environment of its own, hands the calls
of our client (profile ``vllm``, because it drops headers) to a real pair; a real Redis holds the
directory of sessions, or prefill asks its peers. Prefill's pool hardly holds one session and is
flooded between the calls, so that what it has of a history has come back from decode. Each answer
is compared with that of prefill alone under a salt of its own, which reuses nothing.

Then Redis is killed, and both engines are switched off and on again. Writes
``build/perf/foreign-router-FIND.json``; exits with 1 when a text differs, a hand-over or a return
is missing, or what goes wrong is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import openai

import turncache
from tests.engine.driving import Answer, assert_same, conversation, read_answer, words
from tests.fakes.redis_server import RedisServer
from tests.foreign.environments import prepared
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.messages import Stats, StatsReply
from turncache_server.launch.machine import free_ports
from turncache_server.launch.stack import Engine, Stack, StackSpec, start
from turncache_tools.shell import progress, write_table

ROOT: Final = Path(__file__).resolve().parents[2]
#: By side: what is read after each call.
COUNTED: Final = {
    "prefill": (
        *("local_tokens", "returned_tokens", "computed_tokens", "lost_tokens"),
        *("finds_found", "finds_nothing", "finds_failed", "stock_handovers"),
    ),
    "decode": ("local_tokens", "returned_tokens", "computed_tokens", "stock_handovers"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call, and what the engines counted of it.

    Attributes:
        name: which one it was.
        first_s: seconds to the first token.
        ties: 1 when the text leaves the recomputed one at a tie of two tokens.
        counts: by side, what each of :data:`COUNTED` has grown by.
        wrong: what should have been otherwise.
    """

    name: str
    first_s: float
    ties: int
    counts: dict[str, dict[str, int]]
    wrong: list[str] = field(default_factory=list)


@contextlib.contextmanager
def vllm_router(stack: Stack) -> Iterator[str]:
    """Start the real vllm-router in front of a pair; yields its URL."""
    python = prepared("vllm-router", ROOT / "requirements" / "vllm-router.lock")
    port, metrics_port = free_ports(2)
    urls = {engine.side: engine.url for engine in stack.engines}
    command = [str(python), "-m", "vllm_router.launch_router", "--port", str(port)]
    command += ["--vllm-pd-disaggregation"]
    command += ["--prefill", urls["prefill"], "--decode", urls["decode"]]
    command += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
    command += ["--log-level", "error", "--prometheus-port", str(metrics_port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": ""}
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _await(f"{url}/health", process)
            yield url
        finally:
            process.terminate()
            process.wait(20)


def _await(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s and process.poll() is None:
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            urllib.request.urlopen(url, timeout=2) as answer,
        ):
            if answer.status == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"vllm-router does not answer at {url}")


class Run:
    """A conversation behind the foreign router.

    Args:
        stack: the pair.
        url: of the foreign router.
    """

    def __init__(self, stack: Stack, url: str) -> None:
        self._stack = stack
        self._control = ControlClient()
        client = turncache.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=120)
        self._client = client.with_profile("vllm").with_session(f"s-{uuid.uuid4().hex}")
        self._engines = {engine.side: engine for engine in stack.engines}
        self._alone = openai.OpenAI(
            base_url=f"{self._engines['prefill'].url}/v1", api_key="-", timeout=120
        )
        self._messages = conversation(3000)
        self.calls: list[Call] = []

    def close(self) -> None:
        """Close the clients."""
        self._client.close()
        self._alone.close()
        self._control.close()

    def call(self, name: str, **expected: int) -> None:
        """Make the next call and compare it.

        Args:
            name: of the call.
            expected: by side and count, the least that is asked; ``lost`` is the most.
        """
        self._flood()
        before = self._counts()
        times_s = [time.monotonic()]
        chunks = self._client.chat.completions.create(**self._arguments())
        answer = read_answer(_timed(chunks, times_s), lambda: None, stream=True)
        after = self._counts()
        counts = {
            side: {what: after[side][what] - before[side][what] for what in COUNTED[side]}
            for side in COUNTED
        }
        ties, wrong = self._compared(answer)
        for member, least in expected.items():
            side, _, what = member.partition("_")
            if counts[side][what] < least:
                wrong.append(f"{what} of {side}: {counts[side][what]}, expected {least} or more")
        self.calls.append(
            Call(name=name, first_s=times_s[1] - times_s[0], ties=ties, counts=counts, wrong=wrong)
        )
        progress(f"{name}: {counts} {wrong or 'ok'}")
        self._messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": words(350)},
        ]

    def switch(self, mode: str) -> None:
        """Switch both engines, and let each step, so that the switch is taken."""
        for engine in self._engines.values():
            switch_mode(self._control, _address(engine), mode, timeout_s=5)
            with openai.OpenAI(base_url=f"{engine.url}/v1", api_key="-") as client:
                client.completions.create(model=self._stack.model, prompt="Step.", max_tokens=1)

    def _compared(self, answer: Answer) -> tuple[int, list[str]]:
        reference = read_answer(
            self._alone.chat.completions.create(**self._arguments(cache_salt=uuid.uuid4().hex)),
            lambda: None,
            stream=True,
        )
        try:
            return assert_same(answer, reference), []
        except AssertionError as error:
            return 0, [f"the text differs from the recomputed one: {error}"]

    def _flood(self) -> None:
        """Fill prefill's pool with what does not come back."""
        for _ in range(4):
            self._alone.chat.completions.create(
                model=self._stack.model,
                messages=[{"role": "user", "content": words(2600)}],
                max_tokens=1,
            )

    def _counts(self) -> dict[str, dict[str, int]]:
        out = {}
        for side, engine in self._engines.items():
            reply = self._control.ask(_address(engine), Stats(), StatsReply, timeout_s=5)
            out[side] = {what: int(reply.counters.get(what, 0)) for what in COUNTED[side]}
        return out

    def _arguments(self, **body: Any) -> dict[str, Any]:
        return {
            "model": self._stack.model,
            "messages": self._messages,
            "max_tokens": 48,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": True,
            "extra_body": {"ignore_eos": True, **body},
        }


def _timed(chunks: Iterable[Any], times_s: list[float]) -> Iterator[Any]:
    """Note when each chunk came."""
    for chunk in chunks:
        times_s.append(time.monotonic())
        yield chunk


def _address(engine: Engine) -> str:
    assert engine.control_address is not None
    return engine.control_address


def spec(find: str, redis_url: str) -> StackSpec:
    """Return a pair whose prefill pool holds little more than one session."""
    return StackSpec(
        model="tiny",
        prefill=1,
        decode=1,
        router_port=0,
        dtype="float32",
        max_model_len=2560,
        num_blocks={"prefill": 96, "decode": 256},
        settings={
            "retain_budget": 0.9,
            "tenant_budget": 0.9,
            "foreign_router": True,
            "find": find,
            **({"redis_url": redis_url} if find == "redis" else {}),
        },
    )


def converse(run: Run, redis: RedisServer | None) -> None:
    """Make the calls; each says what it must have brought."""
    run.call("first", decode_returned_tokens=600)
    for number in range(2, 5):
        run.call(
            f"call {number}",
            prefill_returned_tokens=600,
            prefill_finds_found=1,
            decode_returned_tokens=32,
        )
    run.switch("off")
    run.call("switched off", prefill_stock_handovers=1, decode_stock_handovers=1)
    run.switch("on")
    run.call("switched on", decode_returned_tokens=32)
    run.call("and again", prefill_returned_tokens=600, prefill_finds_found=1)
    if redis is not None:
        redis.kill()
        run.call("without Redis", prefill_computed_tokens=600, prefill_finds_failed=1)


def main(arguments: Sequence[str]) -> int:
    """Run and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--find", choices=["peers", "redis"], default="redis")
    options = parser.parse_args(arguments)
    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(RedisServer()) if options.find == "redis" else None
        pair = stack.enter_context(
            start(spec(options.find, redis.url if redis else ""), progress=progress)
        )
        run = Run(pair, stack.enter_context(vllm_router(pair)))
        stack.callback(run.close)
        converse(run, redis)
        pair.check()
    show(run.calls)
    out = ROOT / "build" / "perf"
    out.mkdir(parents=True, exist_ok=True)
    (out / f"foreign-router-{options.find}.json").write_text(
        json.dumps([asdict(call) for call in run.calls], indent=1) + "\n"
    )
    wrong = [f"{call.name}: {what}" for call in run.calls for what in call.wrong]
    for line in wrong:
        progress(line)
    return 1 if wrong else 0


def show(calls: Sequence[Call]) -> None:
    """Print the table."""
    columns = ["call", "first token", "prefill local", "returned", "computed", "decode returned"]
    rows = []
    for call in calls:
        prefill, decode = call.counts["prefill"], call.counts["decode"]
        counts = [prefill[f"{w}_tokens"] for w in ("local", "returned", "computed")]
        counts.append(decode["returned_tokens"])
        rows.append([call.name, f"{1e3 * call.first_s:.0f} ms", *map(str, counts)])
    write_table(columns, rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
