"""An engine for benchmarks of routers: a raw protocol that costs next to nothing.

``python -m tests.perf.router_engine --port N --side prefill|decode``

It works in steps, as an engine does: in each step every stream that is being answered gets
one chunk, in a write of its own. A step that is late is not made up for: a router that
cannot follow is not helped by chunks that arrive together. Prefill answers every call with
one token, after ``--prefill-ms``. Chunks are made once; requests are measured, not parsed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, Final, cast

import uvloop

NUM_CHUNKS: Final = 64
_HEADERS: Final = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: %s\r\n%s\r\n\r\n"


def chunk(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    """Return one event of a chat stream, as vLLM writes it."""
    choice = {
        "index": 0,
        "delta": delta,
        "logprobs": None,
        "finish_reason": finish_reason,
        "token_ids": None,
    }
    data = {
        "id": "chatcmpl-8e4a3c1f0b7d4c6f9a52e1d83b6f7a90",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "m",
        "choices": [choice],
    }
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def framed(body: bytes) -> bytes:
    """Return a chunk of the transfer encoding."""
    return b"%x\r\n%s\r\n" % (len(body), body)


CHUNKS: Final = (
    framed(chunk({"role": "assistant", "content": ""})),
    *(framed(chunk({"content": f" word{at}"})) for at in range(NUM_CHUNKS - 2)),
    framed(chunk({"content": ""}, "stop")) + framed(b"data: [DONE]\n\n") + b"0\r\n\r\n",
)
STREAM: Final = _HEADERS % (b"text/event-stream; charset=utf-8", b"transfer-encoding: chunked")


def _document(value: object) -> bytes:
    body = json.dumps(value).encode()
    return _HEADERS % (b"application/json", b"content-length: %d" % len(body)) + body


PREFILLED: Final = _document(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "x"},
                "finish_reason": "length",
            }
        ],
        "usage": {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10},
        "kv_transfer_params": {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_block_ids": [1, 2, 3],
            "remote_engine_id": "prefill-0",
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        },
    }
)
MODELS: Final = _document(
    {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 1_000_000}]}
)
OTHER: Final = _document({})


class Steps:
    """The engine's loop: one chunk for every stream in each step."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._streams: dict[Connection, int] = {}
        self._running = False

    def add(self, connection: Connection) -> None:
        """Begin a stream with the next step."""
        self._streams[connection] = 0
        if not self._running:
            self._running = True
            asyncio.get_running_loop().call_soon(self._step)

    def drop(self, connection: Connection) -> None:
        """Forget a stream whose reader has left."""
        self._streams.pop(connection, None)

    def _step(self) -> None:
        for connection, at in list(self._streams.items()):
            if connection.paused:
                continue
            connection.transport.write(CHUNKS[at] if at else STREAM + CHUNKS[0])
            if at + 1 == NUM_CHUNKS:
                del self._streams[connection]
            else:
                self._streams[connection] = at + 1
        self._running = bool(self._streams)
        if self._running:
            asyncio.get_running_loop().call_later(self._step_s, self._step)


class Connection(asyncio.Protocol):
    """One connection: requests one after the other."""

    transport: asyncio.Transport

    def __init__(self, side: str, steps: Steps, prefill_s: float) -> None:
        self._side = side
        self._steps = steps
        self._prefill_s = prefill_s
        self._head = b""
        self._left = 0
        self.paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._steps.drop(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        if self._left:
            self._left -= len(data)
        else:
            self._head += data
            end = self._head.find(b"\r\n\r\n")
            if end < 0:
                return
            at = self._head.lower().find(b"content-length:", 0, end)
            size = int(self._head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self._left = size - (len(self._head) - end - 4)
        if self._left <= 0:
            self._left = 0
            head, self._head = self._head, b""
            self._answer(head)

    def _answer(self, head: bytes) -> None:
        if not head.startswith(b"POST /v1/"):
            self.transport.write(MODELS if head.startswith(b"GET /v1/models") else OTHER)
        elif self._side == "decode":
            self._steps.add(self)
        elif self._prefill_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self._prefill_s, self.transport.write, PREFILLED)
        else:
            self.transport.write(PREFILLED)


async def serve(options: argparse.Namespace) -> None:
    """Serve until the process is stopped."""
    steps = Steps(options.step_ms / 1000)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(options.side, steps, options.prefill_ms / 1000),
        "127.0.0.1",
        options.port,
        backlog=4096,
    )
    print("ready", flush=True)
    await server.serve_forever()


def main() -> None:
    """Serve as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--side", choices=("prefill", "decode"), required=True)
    parser.add_argument("--step-ms", type=float, default=0.5)
    parser.add_argument("--prefill-ms", type=float, default=0.0)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
