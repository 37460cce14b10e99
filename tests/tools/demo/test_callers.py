"""Calls over HTTP: what is sent to a router and to a stock pair, and what comes back."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from turncache.errors import EngineFault
from turncache.protocol import (
    CALL_HEADER,
    FINAL_HEADER,
    OUTCOME_HEADER,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
)
from turncache_tools.demo.callers import Question, RoutedCaller, StockPairCaller

MESSAGES = [{"role": "user", "content": "Who?"}]
PARAMS = {"remote_engine_id": "prefill-0", "remote_block_ids": [[1, 2]]}


class Engine:
    """A server that answers one sentence, with token ids, and logs what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status = 200
        self.params: dict[str, Any] | None = PARAMS
        self.outcome: str | None = None
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.bodies.append(body)
                engine.headers.append({k.lower(): v for k, v in self.headers.items()})
                stream = bool(body.get("stream"))
                data = _events() if stream else json.dumps(engine.whole()).encode()
                self.send_response(engine.status)
                kind = "text/event-stream" if stream else "application/json"
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                if engine.outcome is not None:
                    self.send_header(CALL_HEADER, "v=1")
                    self.send_header(OUTCOME_HEADER, engine.outcome)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def whole(self) -> dict[str, Any]:
        """Return an answer without streaming."""
        if self.status != 200:
            return {"error": {"message": "the pool is full", "type": "x", "code": self.status}}
        message = {"role": "assistant", "content": "Rome."}
        return {
            "id": "a",
            "object": "chat.completion",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
            "kv_transfer_params": self.params,
        }

    def stop(self) -> None:
        """Stop serving."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _events() -> bytes:
    tops = [{"token": "token_id:1", "logprob": -0.1}, {"token": "token_id:2", "logprob": -0.3}]
    said = {"token": "token_id:1", "logprob": -0.1, "top_logprobs": tops}
    chunks: list[dict[str, Any]] = [
        {
            "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}],
            "prompt_token_ids": [5, 6, 7],
        },
        {
            "choices": [
                {
                    "index": 0,
                    "delta": {"content": "Rome."},
                    "token_ids": [1],
                    "logprobs": {"content": [said]},
                    "finish_reason": "stop",
                }
            ]
        },
        {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}},
    ]
    common = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    lines = [json.dumps(common | chunk) for chunk in chunks]
    return "".join(f"data: {line}\n\n" for line in (*lines, "[DONE]")).encode()


@pytest.fixture
def prefill() -> Iterator[Engine]:
    """An engine; the router in tests of one."""
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
def decode() -> Iterator[Engine]:
    """Another engine."""
    engine = Engine()
    yield engine
    engine.stop()


@pytest.fixture
def routed(prefill: Engine) -> Iterator[RoutedCaller]:
    """A caller through a router."""
    caller = RoutedCaller(prefill.url, "m")
    yield caller
    caller.close()


@pytest.fixture
def stock(prefill: Engine, decode: Engine) -> Iterator[StockPairCaller]:
    """A caller of a stock pair."""
    caller = StockPairCaller(prefill.url, decode.url, "m")
    yield caller
    caller.close()


def question(**changes: Any) -> Question:
    """Return a question of a session."""
    values: dict[str, Any] = {
        "messages": MESSAGES,
        "salt": "salt-1",
        "session": "session-1",
        "max_tokens": 5,
    }
    return Question(**values | changes)


def test_the_agent_calls_with_its_session(routed: RoutedCaller, prefill: Engine) -> None:
    """Greedy, salted, with token ids; the outcome comes back with the answer."""
    prefill.outcome = "prompt=3, local=1, returned=1, computed=1, lost=0, plan=return, reason=ok"
    heard: list[str] = []
    reply = routed.ask(question(), heard.append)
    body, headers = prefill.bodies[0], prefill.headers[0]
    assert headers[SESSION_HEADER.lower()] == "session-1"
    assert FINAL_HEADER.lower() not in headers
    assert (body["temperature"], body["cache_salt"], body["max_tokens"]) == (0, "salt-1", 5)
    assert body["return_token_ids"] is True
    assert reply.answer.prompt_ids == (5, 6, 7)
    assert reply.answer.runners_up == (2,)
    assert heard == ["Rome."]
    assert reply.outcome is not None
    assert reply.outcome.returned == 1


def test_the_last_call_says_so(routed: RoutedCaller, prefill: Engine) -> None:
    """The session gives its room back before the next arm begins."""
    routed.ask(question(final=True))
    assert prefill.headers[0][FINAL_HEADER.lower()] == "true"


def test_the_others_have_no_session(routed: RoutedCaller, prefill: Engine) -> None:
    """They are nobody's agent: one token each, and nothing of theirs is kept."""
    assert routed.fill(MESSAGES, "salt-2") == 7
    routed.ask(question(session=None))
    for body, headers in zip(prefill.bodies, prefill.headers, strict=True):
        assert SESSION_HEADER.lower() not in headers
        assert "vllm_xargs" not in body
    assert prefill.bodies[0]["max_tokens"] == 1


def test_a_stock_call_takes_two_legs_with_one_id(
    stock: StockPairCaller, prefill: Engine, decode: Engine
) -> None:
    """What prefill answered goes to decode as it came."""
    reply = stock.ask(question())
    first, second = prefill.bodies[0], decode.bodies[0]
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert (first["max_tokens"], first["stream"]) == (1, False)
    assert "logprobs" not in first
    assert second["kv_transfer_params"] == PARAMS
    assert first["cache_salt"] == second["cache_salt"] == "salt-1"
    one, other = prefill.headers[0], decode.headers[0]
    assert one[REQUEST_ID_HEADER.lower()] == other[REQUEST_ID_HEADER.lower()]
    assert reply.answer.token_ids == (1,)
    assert reply.outcome is None


def test_a_stock_return_hands_back_what_decode_said(
    stock: StockPairCaller, prefill: Engine
) -> None:
    """The next call's prefill leg carries it, as the stock feature wants it."""
    _, returned = stock.whole(MESSAGES, "s", max_tokens=4)
    assert returned == PARAMS
    stock.whole(MESSAGES, "s", max_tokens=4, returned=returned)
    params = prefill.bodies[1]["kv_transfer_params"]
    assert params["remote_block_ids"] == [[1, 2]]
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)


def test_a_prefill_that_hands_nothing_over_is_a_fault(
    stock: StockPairCaller, prefill: Engine
) -> None:
    """Decode would compute everything itself, and the off arm would be no disaggregation."""
    prefill.params = None
    with pytest.raises(EngineFault, match="no kv_transfer_params"):
        stock.ask(question())


def test_an_error_names_the_engine(stock: StockPairCaller, decode: Engine) -> None:
    """Once: a retry would be in the measured time."""
    decode.status = 503
    with pytest.raises(EngineFault, match=rf"{decode.url}: answered 503: .*pool is full"):
        stock.fill(MESSAGES, "s")
    assert len(decode.bodies) == 1


def test_a_server_that_is_gone_is_a_fault() -> None:
    """Nobody listens there any more."""
    engine = Engine()
    engine.stop()
    caller = RoutedCaller(engine.url, "m")
    with pytest.raises(EngineFault, match="the call failed: Connection error"):
        caller.fill(MESSAGES, "s")
    caller.close()
