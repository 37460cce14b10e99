"""Driving a real stack through our own client, and the oracle for its answers."""

from __future__ import annotations

import inspect
import itertools
import json
import time
import typing
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import openai

import turncache
from turncache import Outcome
from turncache.errors import EngineFault
from turncache.protocol import FINAL_HEADER, OUTCOME_HEADER, SESSION_HEADER
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.messages import (
    Peek,
    PeekReply,
    Stats,
    StatsReply,
)
from turncache_server.launch.stack import Engine, Stack

#: English and code in one: tokens of every kind, the same on every machine.
TEXT = inspect.getsource(typing) + inspect.getsource(inspect)
#: In float32, KV that decode computed differs from prefill's by rounding; where the two
#: best tokens are closer than this, either is right.
TIE_GAP = 1e-3

_offsets = itertools.count(0, 700)


def words(num_chars: int) -> str:
    """Return text that no earlier call of this process has used."""
    start = next(_offsets) % 60_000
    return f"[{uuid.uuid4().hex[:8]}] " + TEXT[start : start + num_chars]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One call's answer.

    Attributes:
        gaps: difference of the two best log-probabilities at each token.
    """

    text: str
    tokens: tuple[str, ...]
    gaps: tuple[float, ...]
    outcome: Outcome | None


class Driver:
    """Calls a stack through the drop-in client.

    Args:
        stack: the stack.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        url = f"{stack.base_url}/v1"
        self.client = turncache.OpenAI(base_url=url, api_key="-", timeout=120)
        self.stock = openai.OpenAI(base_url=url, api_key="-", timeout=120)
        self.control = ControlClient()
        self._sessions: set[str] = set()

    def end_sessions(self) -> None:
        """Say of every session that nothing follows: pools here hold one session, not two."""
        bye = [{"role": "user", "content": "Bye."}]
        for session in sorted(self._sessions):
            self.client.with_session(session).chat.completions.create(
                **self._arguments(bye, uuid.uuid4().hex, 1, stream=False),
                extra_headers={FINAL_HEADER: "true"},
            )
        self._sessions.clear()

    def close(self) -> None:
        """Close the clients."""
        self.client.close()
        self.stock.close()
        self.control.close()

    def call(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        session: str,
        salt: str,
        max_tokens: int = 24,
        stream: bool = True,
    ) -> Answer:
        """Make one call of a session, greedy."""
        self._sessions.add(session)
        client = self.client.with_session(session)
        result = client.chat.completions.create(
            **self._arguments(messages, salt, max_tokens, stream=stream)
        )
        return read_answer(result, lambda: turncache.outcome(result), stream=stream)

    def recomputed(
        self, messages: Sequence[dict[str, Any]], *, salt: str | None = None, max_tokens: int = 24
    ) -> Answer:
        """Make the same call as a stranger: stock client, no session, another salt."""
        arguments = self._arguments(messages, salt or uuid.uuid4().hex, max_tokens, stream=True)
        raw = self.stock.chat.completions.with_raw_response.create(**arguments)
        header = raw.headers["Turncache-Outcome"]
        answer = read_answer(raw.parse(), lambda: Outcome.from_header(header), stream=True)
        assert answer.outcome is not None
        assert answer.outcome.reused == 0
        return answer

    def _arguments(
        self, messages: Sequence[dict[str, Any]], salt: str, max_tokens: int, *, stream: bool
    ) -> dict[str, Any]:
        return {
            "model": self.stack.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": 2,
            "stream": stream,
            "extra_body": {"cache_salt": salt, "ignore_eos": True},
        }

    def flood(self, num_calls: int = 4, num_chars: int = 2600) -> None:
        """Let traffic that does not come back fill the caches: a stock client, no session.

        By default more tokens than a pool of 96 blocks holds, in requests that find room
        beside a session of 60 blocks.
        """
        for _ in range(num_calls):
            messages = [{"role": "user", "content": words(num_chars)}]
            arguments = self._arguments(messages, uuid.uuid4().hex, 1, stream=False)
            self.stock.chat.completions.create(**arguments)

    def stats(self, name: str) -> StatsReply:
        """Ask an engine for its counters and gauges."""
        return self.control.ask(self.address(name), Stats(), StatsReply, timeout_s=5)

    def set_mode(self, mode: str) -> None:
        """Switch every engine, and make each step once so that the switch is taken."""
        for engine in self.stack.engines:
            assert engine.control_address is not None
            switch_mode(self.control, engine.control_address, mode, timeout_s=5)
        self.flood(1, 200)

    def wait_for_pulls(self, *, wanted: bool, timeout_s: float = 20.0) -> None:
        """Wait until the router has noticed that its engines pull, or that none does."""
        deadline = time.monotonic() + timeout_s
        while True:
            with urllib.request.urlopen(f"{self.stack.base_url}/health", timeout=10) as reply:
                sides = json.load(reply)["sides"].values()
            if {side["pulling"] == side["engines"] for side in sides} == {wanted}:
                return
            assert time.monotonic() < deadline, sides
            time.sleep(0.05)

    def address(self, name: str) -> str:
        """Return the control address of an engine."""
        address = self.engine(name).control_address
        assert address is not None
        return address

    def engine(self, name: str) -> Engine:
        """Return an engine by name."""
        return next(engine for engine in self.stack.engines if engine.name == name)

    def post(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Post to any URL; returns status and JSON."""
        request = urllib.request.Request(
            url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def post_call(
        self, path: str, body: dict[str, Any], *, session: str
    ) -> tuple[dict[str, Any], Outcome]:
        """Make a call of any API; returns its answer and what happened to its KV."""
        self._sessions.add(session)
        request = urllib.request.Request(
            self.stack.base_url + path,
            data=json.dumps(body).encode(),
            headers={"content-type": "application/json", SESSION_HEADER: session},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            outcome = assert_adds_up(Outcome.from_header(reply.headers[OUTCOME_HEADER]))
            return json.load(reply), outcome

    def prompt_tokens(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Return a call's prompt as the engine sees it."""
        engine = self.stack.engines[0]
        body = {"model": self.stack.model, "messages": list(messages)}
        status, reply = self.post(f"{engine.url}/tokenize", body)
        assert status == 200, reply
        tokens: list[int] = reply["tokens"]
        return tokens

    def held_blocks(self, name: str, session: str, hashes: list[bytes]) -> list[int]:
        """Ask an engine's control socket which blocks hold a chain, as a peer does."""
        question = Peek(session=session, hashes=hashes)
        reply = self.control.ask(self.address(name), question, PeekReply, timeout_s=5)
        return reply.block_ids

    def block_digests(self, name: str, block_ids: Sequence[int]) -> list[str]:
        """Return digests of the bytes in an engine's blocks, in order."""
        ids = [str(block_id) for block_id in block_ids]
        body = {"method": "block_digests", "args": [",".join(ids)]}
        status, reply = self.post(f"{self.engine(name).url}/collective_rpc", body)
        assert status == 200, reply
        (digests,) = reply["results"]
        return [digests[block_id] for block_id in ids]

    def block_values(self, name: str, block_ids: Sequence[int]) -> list[list[float]]:
        """Return some numbers of each of an engine's blocks, in order."""
        ids = [str(block_id) for block_id in block_ids]
        body = {"method": "block_values", "args": [",".join(ids)]}
        status, reply = self.post(f"{self.engine(name).url}/collective_rpc", body)
        if status != 200:
            raise EngineFault(name, f"/collective_rpc answered {status}: {reply}")
        (values,) = reply["results"]
        return [values[block_id] for block_id in ids]

    def step(self, name: str) -> None:
        """Let an engine step: it has nothing to do, and a call of nobody comes."""
        body = {"model": self.stack.model, "prompt": "Step.", "max_tokens": 1}
        status, reply = self.post(f"{self.engine(name).url}/v1/completions", body)
        assert status == 200, reply

    def number(self, name: str, what: str) -> float:
        """Return a gauge or a counter of an engine."""
        stats = self.stats(name)
        return {**stats.counters, **stats.gauges}[what]

    def settle(self, name: str, gauge: str, value: float, *, timeout_s: float = 20.0) -> float:
        """Wait until a gauge has a value; returns the last reading."""
        deadline = time.monotonic() + timeout_s
        reading = self.number(name, gauge)
        while reading != value and time.monotonic() < deadline:
            time.sleep(0.05)
            reading = self.number(name, gauge)
        return reading


def read_answer(result: Any, outcome: Callable[[], Outcome | None], *, stream: bool) -> Answer:
    """Read an answer, or its stream to the end; ``outcome`` is asked when it has ended."""
    choices = [chunk.choices[0] for chunk in result if chunk.choices] if stream else result.choices
    found = [lp for choice in choices if choice.logprobs for lp in choice.logprobs.content or []]
    return Answer(
        text="".join(lp.token for lp in found),
        tokens=tuple(lp.token for lp in found),
        gaps=tuple(
            lp.top_logprobs[0].logprob - lp.top_logprobs[1].logprob
            if len(lp.top_logprobs) > 1
            else float("inf")
            for lp in found
        ),
        outcome=outcome(),
    )


def assert_same(answer: Answer, reference: Answer) -> int:
    """Check that an answer is the reference's, or leaves it at a tie; returns 1 for a tie."""
    for index, (mine, theirs) in enumerate(zip(answer.tokens, reference.tokens, strict=False)):
        if mine != theirs:
            assert reference.gaps[index] < TIE_GAP, (
                f"token {index} is {mine!r}, recomputed it is {theirs!r} "
                f"by a gap of {reference.gaps[index]:.2e}"
            )
            return 1
    assert len(answer.tokens) == len(reference.tokens)
    return 0


def assert_adds_up(outcome: Outcome | None) -> Outcome:
    """Check that an outcome came and its counts add up."""
    assert outcome is not None, "no Turncache-Outcome on the answer"
    assert outcome.local + outcome.returned + outcome.computed == outcome.prompt
    assert 0 <= outcome.lost <= outcome.computed
    return outcome


def conversation(first_chars: int = 5000) -> list[dict[str, Any]]:
    """Return a history that ends in a long first question."""
    return [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": words(first_chars)},
    ]


def continued(
    messages: list[dict[str, Any]], answer: Answer, num_chars: int = 500
) -> Iterator[dict[str, Any]]:
    """Yield the history, the answer, and a tool's result."""
    yield from messages
    yield {"role": "assistant", "content": answer.text}
    yield {"role": "tool", "content": words(num_chars), "tool_call_id": "call-1"}
