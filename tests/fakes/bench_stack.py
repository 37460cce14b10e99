"""A fake stack for ``turncache bench``: chat completions over "KV" that is kept by words.

One router in front of a prefill and a decode engine, in one server of the standard library,
with a control socket. Prompts are found again as a prefix cache would; the answers' words
are found only where something returns them. A prompt without a system message is other
traffic: it pushes out what is not retained.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from turncache.protocol import Outcome, Plan, Reason
from turncache_server.control.messages import (
    ModeReply,
    Refusal,
    Reply,
    Request,
    SetMode,
    Stats,
    StatsReply,
)
from turncache_server.control.server import ControlServer

# Words that two prompts must begin with in common to share KV.
LEAST_SHARED = 4

STANDARD = {
    "model",
    "messages",
    "max_tokens",
    "temperature",
    "stream",
    "stream_options",
}


@dataclass(frozen=True)
class Seen:
    """One chat completion as it came."""

    body: Mapping[str, Any]
    headers: Mapping[str, str]
    mode: str
    returns: bool

    @property
    def session(self) -> str | None:
        """The session's id."""
        return self.headers.get("x-session-id")

    @property
    def of_agent(self) -> bool:
        """It is an agent's, not other traffic."""
        return bool(self.body["messages"][0]["role"] == "system")


@dataclass
class FakeStack:
    """The server.

    Attributes:
        ours: answers carry our headers, and there is a switch for returns.
        strict: members that are not in the standard are refused.
        returns_work: returns bring what they should; else nothing.
        answers_return: the answers' words are among what is returned.
        reset: what ``/reset_prefix_cache`` answers.
        deltas: of every answer, None for its words.
        fails: agents' calls that get status 500, by their number from 0.
        notices_every: looks at ``/health`` until the router notices a switch of modes.
        warm: words that every prompt seems to be cached with.
    """

    ours: bool = True
    strict: bool = False
    returns_work: bool = True
    answers_return: bool = True
    reset: tuple[int, Mapping[str, Any]] = (200, {"success": True})
    deltas: Sequence[Mapping[str, Any]] | None = None
    fails: frozenset[int] = frozenset()
    warm: int = 0
    mode: str = "on"
    returns: bool = True
    seen: list[Seen] = field(default_factory=list)
    num_resets: int = 0
    notices_every: int = 1

    def __post_init__(self) -> None:
        self._num_looks = 0
        self._noticed = self.mode
        self._lock = threading.Lock()
        self._prefill: list[tuple[list[str], bool]] = []
        self._decode: list[list[str]] = []
        self._num_agents_calls = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._control = ControlServer("tcp://127.0.0.1:0", self._answer_control)

    def __enter__(self) -> Self:
        threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        self._control.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._control.close()

    @property
    def url(self) -> str:
        """Base URL, of the router and of its engines."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def control(self) -> str:
        """Address of the control socket."""
        return self._control.address

    @property
    def agents_calls(self) -> list[Seen]:
        """Calls that are not other traffic."""
        return [seen for seen in self.seen if seen.of_agent]

    def sides(self) -> Mapping[str, Mapping[str, int]]:
        """Return what the router knows of its engines: a switch is noticed a little late."""
        self._num_looks += 1
        if self._num_looks >= self.notices_every:
            self._noticed = self.mode
        pulling = int(self._noticed == "on")
        # One control socket stands for the pair.
        return {
            "prefill": {"live": 1, "pulling": pulling},
            "decode": {"live": 0, "pulling": 0},
        }

    def _answer_control(self, request: Request) -> Reply:
        match request:
            case SetMode():
                if request.mode and request.mode != self.mode:
                    self.mode = request.mode
                    self._num_looks, self._noticed = 0, ""
                return ModeReply(mode=self.mode, ticket="t:0")
            case Stats():
                return StatsReply(counters={}, gauges={"blocks": 100.0, "retained_blocks": 25.0})
        return Refusal(code="unsupported", why="not in this fake")

    # --- the model and its KV -----------------------------------------------------------

    def complete(self, body: dict[str, Any], headers: Mapping[str, str]) -> tuple[int, Any, Any]:
        """Return (status, outcome, usage) of a call."""
        with self._lock:
            seen = Seen(body, headers, self.mode, self.returns)
            self.seen.append(seen)
            if self.strict and set(body) - STANDARD:
                return 400, None, None
            if seen.of_agent:
                self._num_agents_calls += 1
                if self._num_agents_calls - 1 in self.fails:
                    return 500, None, None
            words = [w for m in body["messages"] for w in (m.get("content") or "").split()]
            on = seen.mode == "on" and seen.session is not None
            local = max((_common(old, words) for old, _ in self._prefill), default=0)
            local = min(max(local, self.warm), len(words) - 1)
            returned = 0
            if on and self._noticed == "on" and seen.returns and self.returns_work:
                known = self._decode
                if not self.answers_return:
                    known = [old[: -self.answer_tokens(body)] for old in known]
                held = max((_common(old, words) for old in known), default=0)
                returned = max(0, min(held, len(words) - 1) - local)
            if not seen.of_agent:
                self._prefill = [each for each in self._prefill if each[1]]
            else:
                self._prefill.append((words, on))
            said = [] if self.deltas is not None else ["said"] * self.answer_tokens(body)
            self._decode.append([*words, *said])
            outcome = Outcome(
                prompt=len(words),
                local=local,
                returned=returned,
                computed=len(words) - local - returned,
                plan=Plan.RETURN if returned else Plan.COLD,
                reason=Reason.OK if returned else Reason.EVICTED,
            )
        usage = {
            "prompt_tokens": len(words),
            "completion_tokens": self.answer_tokens(body),
            "prompt_tokens_details": {"cached_tokens": local + returned},
        }
        return 200, outcome, usage

    @staticmethod
    def answer_tokens(body: Mapping[str, Any]) -> int:
        """Return the words of an answer."""
        return int(body["max_tokens"])

    def answer_deltas(self, body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Return the deltas of an answer."""
        if self.deltas is not None:
            return list(self.deltas)
        return [{"content": "said "} for _ in range(self.answer_tokens(body))]


def _common(first: Sequence[str], second: Sequence[str]) -> int:
    at = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        at += 1
    # As with blocks: random texts whose first words happen to be equal share nothing.
    return at if at >= LEAST_SHARED else 0


def _handler(stack: FakeStack) -> type[BaseHTTPRequestHandler]:
    return type("Handler", (_Handler,), {"stack": stack})


class _Handler(BaseHTTPRequestHandler):
    stack: FakeStack
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._json(200, {"data": [{"id": "fake"}]})
        elif self.path == "/health" and self.stack.ours:
            sides = self.stack.sides()
            self._json(200, {"sides": sides, "return_enabled": self.stack.returns})
        elif self.path == "/metrics":
            self._send(200, b"vllm:num_preemptions_total 3.0\nvllm:kv_cache_usage_perc 0.5\n")
        else:
            self._json(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else {}
        if self.path == "/admin/return" and self.stack.ours:
            self.stack.returns = body["enabled"]
            self._json(200, {"return_enabled": self.stack.returns})
        elif self.path.startswith("/reset_prefix_cache"):
            self.stack.num_resets += 1
            self._json(*self.stack.reset)
        elif self.path == "/v1/chat/completions":
            self._complete(body)
        else:
            self._json(404, {"error": {"message": "no such path"}})

    def _complete(self, body: dict[str, Any]) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, outcome, usage = self.stack.complete(body, headers)
        if status != 200:
            self._json(status, {"error": {"message": "scripted"}})
            return
        chunks: list[Any] = [{"choices": [{"delta": {"role": "assistant", "content": ""}}]}]
        chunks += [{"choices": [{"delta": delta}]} for delta in self.stack.answer_deltas(body)]
        chunks.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        chunks.append({"choices": [], "usage": usage})
        data = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
        more = {"content-type": "text/event-stream"}
        if self.stack.ours:
            more |= {"Turncache": "v=1", "Turncache-Outcome": outcome.to_header()}
        self._send(200, f"{data}data: [DONE]\n\n".encode(), more)

    def _json(self, status: int, value: Any) -> None:
        self._send(status, json.dumps(value).encode(), {"content-type": "application/json"})

    def _send(self, status: int, data: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
