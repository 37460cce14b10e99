"""Malformed and hostile requests against a running router in front of fake engines.

Each request is grown from a seed of numbered choices, so that a finding can be repeated:
``python -m tests.fuzz.router --first 4711 --requests 1``. Broken are these rules, and no other
thing counts as a finding:

* every request is answered or its connection closed, within 20 s;
* no answer has a status of 500 or above: the engines are healthy, and answer completely;
* one request has one answer, and what can be read as more than one is not answered twice;
* no answer names an engine's address, or the library that reads HTTP;
* an engine gets valid JSON objects on listed paths only, with the router's request ids,
  and nothing that was marked as forged under a name that an engine reads.

Even numbers go to a router in front of one engine, odd ones to a pair's. The engines keep
nothing of a request that has been judged: a long run needs no more memory than a short one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from tests.fakes import engine_apis
from tests.fakes.engine import FakeEngine, FakeKv, Script, Seen, fake_engines
from tests.fuzz.raw import RawAnswer, leaves_more, request, send
from turncache_server.router.app import serving
from turncache_server.router.config import parse_config

_FORGED: Final = "F0RGED"
_FORGED_NAMES: Final = ("kv_transfer_params", "kv_hints", "tc_source", "tc_tenant")
_CARRIERS: Final = ("extra_body", "vllm_xargs", "extra_args")
_LISTED: Final = (*engine_apis.PATHS, "/tokenize")
_AT_ONCE: Final = 16
#: Choices of a call that vLLM takes (``VLLM_MAX_N_SEQUENCES``).
_MAX_CHOICES: Final = 16_384
#: Blocks of a fake engine's KV above which it starts afresh.
_MAX_BLOCKS: Final = 10_000

PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
    "/v1/sessions",
    "/v1/calls/x",
    "/v1/models",
    "/admin/return",
    "/collective_rpc",
    "/health",
)
MEMBERS: Final = (
    "model", "messages", "prompt", "input", "tools", "tool_choice", "stream",
    "stream_options", "max_tokens", "n", "stop", "max_completion_tokens", "max_output_tokens",
    "min_tokens", "logprobs", "top_logprobs", "echo", "suffix", "prompt_logprobs",
    "response_format", "session_id", "conversation_id", "prompt_cache_key", "metadata",
    "cache_salt", "request_id", "priority", "vllm_xargs", "extra_args", "extra_body",
    "kv_transfer_params", "kv_hints", "tc_source", "previous_response_id", "store",
    "background", "system", "use_beam_search", "truncate_prompt_tokens", "instructions",
    "user", "temperature", "notice", "expect_s",
)  # fmt: skip
HEADERS: Final = (
    "X-Session-ID", "X-Parent-Session-ID", "X-Session-Final", "Turncache", "Turncache-Tools",
    "X-Request-Id", "X-Session-Affinity", "session-id", "x-claude-code-session-id",
    "Authorization", "x-api-key", "Host", "Content-Length", "Transfer-Encoding",
    "Content-Encoding", "Content-Type", "Expect", "Upgrade", "Connection", "X-data-parallel-rank",
    "X-Forwarded-For", "traceparent", "Range", "Accept-Encoding",
)  # fmt: skip
VALUES: Final = (
    b"", b"1", b"-1", b"a", b"true", b"chunked", b"identity", b"gzip", b"close", b"keep-alive",
    b"100-continue", b"websocket", b"v=1", b"v=1, retain=1e999", b"v=1, turn=-1", b"search=2.1",
    b"*=9, *=8", b"\xff\xfe", b"a\rb", b"a\r\n b", b"\0", b"x" * 300, b"x" * 40_000,
    b'"', b"(;=", b"Bearer x", b"../..", b"%0d%0aX-Evil: 1", b"application/json",
)  # fmt: skip
SCALARS: Final = (
    None, True, False, 0, 1, -1, 2, 10**30, -0.5, 1e308, "", "fake", "\u0000", "\ud800", "a\r\nb",
    "x" * 2000, "tool", "auto", "required", "0" * 300, [], {}, [[]], [None], [1, 2, 3], {"": None},
)  # fmt: skip


@dataclass
class Findings:
    """What came of the requests."""

    statuses: Counter[str] = field(default_factory=Counter)
    forwarded: int = 0
    broken: list[str] = field(default_factory=list)

    def judge(
        self, number: int, raw: bytes, answer: RawAnswer | None, engines: list[FakeEngine]
    ) -> None:
        """Compare the answer to a request with the rules."""
        status = "hangs" if answer is None else str(answer.status or "closed")
        self.statuses[status] += 1
        if answer is None:
            self.broken.append(f"{number}: no answer and no end")
            return
        text = answer.head + answer.body + answer.rest
        if (answer.status or 0) >= 500:
            self.broken.append(f"{number}: {answer.status} {answer.body[:200]!r}")
        if b"HTTP/1." in answer.rest and not leaves_more(raw):
            self.broken.append(f"{number}: answered twice")
        for word in (b"aiohttp", b"Traceback", *(f":{e.port}".encode() for e in engines)):
            if word in text:
                self.broken.append(f"{number}: {word.decode()} in the answer")

    def judge_forwarded(self, seen: Seen) -> None:
        """Compare what an engine got with the rules."""
        self.forwarded += 1
        problem = None
        try:
            body = json.loads(seen.raw)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            problem = "no JSON object"
        elif seen.path not in _LISTED:
            problem = f"path {seen.path}"
        elif _is_forged(body) or _FORGED in str(seen.headers):
            problem = "what was forged"
        elif not seen.headers["x-request-id"].startswith(body["vllm_xargs"]["tc_request"] + "-"):
            problem = "a request id that is not the router's"
        if problem is not None:
            self.broken.append(f"an engine got {problem}: {seen.raw[:300]!r}")


def _is_forged(body: dict[str, Any]) -> bool:
    """Tell whether a forged value has a name that an engine reads, at a place where it does.

    A name that was mutated is nobody's: it is the client's own member, and passed on.
    """
    return any(
        value == _FORGED
        if name in _FORGED_NAMES
        else name in _CARRIERS and isinstance(value, dict) and _is_forged(value)
        for name, value in body.items()
    )


def make_request(number: int) -> bytes:
    """Make the request of a number; equal numbers make equal requests."""
    dice = random.Random(number)
    path = dice.choice(PATHS[:4] if dice.random() < 0.7 else PATHS)
    body = json.dumps(_body(dice, path)).encode()
    if dice.random() < 0.2:
        body = _mutated(dice, body)
    lines = [
        dice.choice(HEADERS).encode() + b": " + dice.choice(VALUES)
        for _ in range(dice.choice((0, 0, 1, 1, 2, 4)))
    ]
    length: bytes | None = None
    if dice.random() < 0.05:
        length = dice.choice((b"", b"0", b"-1", b"+5", b"5", b"0x10", b"9" * 30))
    if dice.random() < 0.05:
        path = dice.choice(
            ("/" + path, path + "/", path.replace("/", "%2f"), path + "?" + "a" * 99)
        )
        path = dice.choice((path, "http://other.example" + path, "/.." + path, path + "\x7f"))
    raw = request(
        body,
        method="POST" if dice.random() < 0.93 else dice.choice(("GET", "PUT", "TRACE", "X" * 50)),
        target=path,
        headers=lines,
        length=length,
    )
    return _mutated(dice, raw) if dice.random() < 0.1 else raw


def _body(dice: random.Random, path: str) -> dict[str, Any]:
    message = {"role": "user", "content": "Where does Laura live?"}
    body: dict[str, Any] = {"model": "fake", "max_tokens": 4}
    if path == "/v1/completions":
        body["prompt"] = "Where does Laura live?"
    elif path == "/v1/responses":
        body["input"] = "Where does Laura live?"
        body["max_output_tokens"] = body.pop("max_tokens")
    else:
        body["messages"] = [message]
    for _ in range(dice.choice((0, 1, 1, 2, 3))):
        body[dice.choice(MEMBERS)] = _value(dice, 0)
    if dice.random() < 0.3:
        forged: dict[str, Any] = {dice.choice(_FORGED_NAMES): _FORGED}
        for carrier in dice.choices(_CARRIERS, k=dice.choice((0, 1, 1, 2, 3))):
            forged = {carrier: forged}
        body.update(forged)
    return body


def _value(dice: random.Random, depth: int) -> Any:
    kind = dice.random()
    if kind < 0.7 or depth > 3:
        return dice.choice(SCALARS)
    if kind < 0.85:
        return [_value(dice, depth + 1) for _ in range(dice.randrange(3))]
    if kind < 0.87:
        deep: Any = 1
        for _ in range(dice.choice((90, 101, 400))):
            deep = [deep]
        return deep
    return {dice.choice(MEMBERS): _value(dice, depth + 1) for _ in range(dice.randrange(3))}


def _mutated(dice: random.Random, raw: bytes) -> bytes:
    at, to = sorted((dice.randrange(len(raw)), dice.randrange(len(raw))))
    kind = dice.randrange(5)
    if kind == 0:
        return raw[:at] + bytes([dice.randrange(256)]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + raw[min(to, at + 8) :]
    if kind == 2:
        return raw[:to] + raw[at : min(to, at + 64)] + raw[to:]
    if kind == 3:
        return raw[:at] + bytes(dice.randrange(256) for _ in range(4)) + raw[at:]
    return raw[: max(1, at)]


class _Tolerant(FakeEngine):
    """Refuses what it cannot read, as vLLM does: a 500 is then the router's."""

    async def _scripted(self, request: Any, seen: Seen, script: Script) -> web.StreamResponse:
        try:
            if (seen.body.get("n") or 1) <= _MAX_CHOICES:
                return await super()._scripted(request, seen, script)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
            pass
        return web.json_response({"error": {"message": "cannot read this"}}, status=400)


async def fuzz(first: int, num_requests: int, *, told: bool = False) -> Findings:
    """Send requests ``first`` and following to routers of its own, and judge what happens.

    Args:
        first: number of the first request.
        num_requests: how many.
        told: show progress.
    """
    findings = Findings()
    single: list[FakeEngine] = [_Tolerant()]
    fleet: dict[str, FakeEngine] = {}
    pair: list[FakeEngine] = [
        _Tolerant("prefill-0", "prefill", fleet=fleet),
        _Tolerant("decode-0", "decode", fleet=fleet),
    ]
    numbers = range(first, first + num_requests)
    async with fake_engines(*single, *pair):
        for remainder, engines in enumerate((single, pair)):
            config = parse_config(
                {
                    "port": 0,
                    "engines": [engine.as_config() for engine in engines],
                    "admin": True,
                    "header_timeout_s": 0.5,
                    "body_timeout_s": 0.5,
                    "connect_timeout_s": 20.0,
                    "control_timeout_s": 5.0,
                    "health_timeout_s": 20.0,
                    "shutdown_s": 0.5,
                }
            )
            mine = numbers[(remainder - first) % 2 :: 2]
            async with serving(config) as router:
                await _run(router.url, mine, engines, findings, told=told)
    return findings


async def _run(
    url: str, numbers: range, engines: list[FakeEngine], findings: Findings, *, told: bool
) -> None:
    left = iter(numbers)

    async def work() -> None:
        for number in left:
            raw = make_request(number)
            try:
                answer: RawAnswer | None = await send(url, raw)
            except TimeoutError:
                answer = None
            findings.judge(number, raw, answer, engines)
            if told and number % 5000 < 2:
                print(f"{number}: {len(findings.broken)} findings", flush=True)
            for engine in engines:
                _forget(engine, findings)

    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    alive = await send(url, request())
    if alive.status != 200:
        findings.broken.append(f"a good call at the end got {alive.status}")


def _forget(engine: FakeEngine, findings: Findings) -> None:
    """Judge what an engine has got, and drop what it keeps."""
    while engine.seen:
        findings.judge_forwarded(engine.seen.pop())
    engine.replies.clear()
    engine.passed_on.clear()
    engine.signals.clear()
    engine.kept.clear()
    if len(engine.kv.ever) > _MAX_BLOCKS:
        engine.kv = FakeKv()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--out", type=Path, default=Path("build/fuzz/router.json"))
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    began_s = time.monotonic()
    found = asyncio.run(fuzz(given.first, given.requests, told=True))
    seconds = time.monotonic() - began_s
    for status, count in sorted(found.statuses.items()):
        print(f"  {status:>8} {count:>9,}")
    print(
        f"{given.requests:,} requests in {seconds:.0f} s, {found.forwarded:,} forwarded, "
        f"{len(found.broken)} findings"
    )
    for line in found.broken[:50]:
        print("  " + line)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "requests": given.requests,
        "seconds": round(seconds, 1),
        "statuses": dict(sorted(found.statuses.items())),
        "forwarded": found.forwarded,
        "findings": found.broken,
    }
    given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if found.broken else 0


if __name__ == "__main__":
    sys.exit(main())
