"""Load for benchmarks of routers: streams that are read as cheaply as possible.

``python -m tests.perf.router_load``, with jobs as lines of JSON on stdin; each is answered
with a line of JSON on stdout. A job keeps ``streams`` calls open for ``seconds``, or makes
``calls`` of them one after the other on each stream. ``urls`` are asked in order for every
call: one router, or prefill and decode themselves.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final, cast
from urllib.parse import urlsplit

import uvloop

from tests.perf.router_engine import NUM_CHUNKS

_PATH: Final = "/v1/chat/completions"
_EVENTS: Final = NUM_CHUNKS + 1


def request(url: str, size_bytes: int, session: str) -> bytes:
    """Return a request whose body is an agent's history of about this size."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are an agent.\n" * 10}]
    text = 'def function(name):\n    return "value"  # a line of a file\n' * 30
    length = len(json.dumps(messages))
    while length < size_bytes - 400:
        at = len(messages)
        arguments = json.dumps({"path": f"src/file{at}.py", "limit": 100})
        call = {
            "id": f"call_{at}",
            "type": "function",
            "function": {"name": "read_file", "arguments": arguments},
        }
        more: list[dict[str, Any]] = [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"call_{at}", "content": text},
        ]
        messages += more
        length += len(json.dumps(more))
    messages.append({"role": "user", "content": "go on"})
    body = {"model": "m", "messages": messages, "stream": True, "max_tokens": NUM_CHUNKS}
    raw = json.dumps(body).encode()
    head = (
        f"POST {_PATH} HTTP/1.1\r\nhost: {urlsplit(url).netloc}\r\ncontent-type: application/json"
        f"\r\nx-session-id: {session}\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


@dataclass(slots=True)
class Result:
    """What a job has found.

    Attributes:
        num_calls: calls that were complete.
        num_errors: calls that were not.
        seconds: how long it took.
        ttft_s: seconds to the first event of each call.
        example: what was wrong with one of the failed calls.
    """

    num_calls: int = 0
    num_errors: int = 0
    seconds: float = 0.0
    ttft_s: list[float] = field(default_factory=list)
    example: str = ""


class Reader(asyncio.Protocol):
    """One connection: what arrives is kept until the answer is complete."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._done: asyncio.Future[bytes] | None = None
        self.first_s = 0.0
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self._end()

    def data_received(self, data: bytes) -> None:
        if not self.first_s and b"\r\n\r\n" in data:
            body = data.split(b"\r\n\r\n", 1)[1]
            if body:
                self.first_s = time.perf_counter()
        elif not self.first_s:
            self.first_s = time.perf_counter()
        self._parts.append(data)
        # A header may end in 0 as well: only a line of its own is the last chunk.
        ended = data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n"
        if ended or (len(self._parts) < 3 and self._is_whole()):
            self._end()

    def _is_whole(self) -> bool:
        """Say whether what has arrived is an answer with a length."""
        head, _, body = b"".join(self._parts).partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        return at >= 0 and len(body) >= int(head[at + 15 :].split(b"\r\n", 1)[0])

    def _end(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(b"".join(self._parts))

    async def ask(self, data: bytes) -> bytes:
        """Send a request and return the whole answer with its head."""
        self._parts, self.first_s = [], 0.0
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._done


async def stream(job: dict[str, Any], name: str, end_s: float, result: Result) -> None:
    """Make one call after the other."""
    urls: list[str] = job["urls"]
    requests = [request(url, job["size_bytes"], name) for url in urls]
    readers: list[Reader | None] = [None] * len(urls)
    loop = asyncio.get_running_loop()
    for _ in range(job.get("calls") or sys.maxsize):
        began_s = time.perf_counter()
        if began_s > end_s:
            break
        answer, reader = b"", None
        try:
            for at, url in enumerate(urls):
                reader = readers[at]
                if reader is None or reader.lost:
                    port = urlsplit(url).port
                    _, reader = await loop.create_connection(Reader, "127.0.0.1", port)
                    readers[at] = reader
                answer = await reader.ask(requests[at])
        except OSError as error:
            answer = repr(error).encode()
        assert reader is not None
        if answer.count(b"data: ") == _EVENTS and b"[DONE]" in answer:
            result.num_calls += 1
            result.ttft_s.append(reader.first_s - began_s)
        else:
            result.num_errors += 1
            result.example = answer[:600].decode(errors="replace")
            await asyncio.sleep(0.05)
    for reader in readers:
        if reader is not None:
            reader.transport.close()


async def run(job: dict[str, Any]) -> Result:
    """Run one job."""
    result = Result()
    began_s = time.perf_counter()
    end_s = began_s + (job.get("seconds") or 600.0)
    names = [f"{job['name']}-{at}" for at in range(job["streams"])]
    await asyncio.gather(*(stream(job, name, end_s, result) for name in names))
    result.seconds = time.perf_counter() - began_s
    return result


def main() -> None:
    """Run the jobs on stdin."""
    for line in sys.stdin:
        result = uvloop.run(run(json.loads(line)))
        print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
