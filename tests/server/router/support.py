"""What the router's tests share: a running router in front of fake engines, and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2
from openai import AsyncOpenAI

from tests.fakes.engine import FakeEngine
from turncache.protocol import OUTCOME_HEADER, Outcome
from turncache_server.router.app import Router, serving
from turncache_server.router.config import RouterConfig, parse_config
from turncache_server.router.events import Event
from turncache_server.router.traces import Traces

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "You are a careful assistant. " * 4},
    {"role": "user", "content": "Where does Laura live? " * 4},
]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
        },
    }
]
CHAT = "/v1/chat/completions"


def config_for(fakes: Sequence[FakeEngine], **settings: Any) -> RouterConfig:
    """Make settings for fake engines: short intervals, patience, a free port."""
    return parse_config(
        {
            "port": 0,
            **({"engines": [fake.as_config() for fake in fakes]} if fakes else {}),
            "health_interval_s": 0.05,
            # Engines, router and clients share one process here, and perhaps one busy core.
            "connect_timeout_s": 20.0,
            "control_timeout_s": 5.0,
            "health_timeout_s": 20.0,
            "shutdown_s": 2.0,
            **settings,
        }
    )


@dataclass
class Bench:
    """A running router with everything a test looks at."""

    router: Router
    http: httpx2.AsyncClient
    openai: AsyncOpenAI
    events: list[Event] = field(default_factory=list)

    async def chat(self, **members: Any) -> httpx2.Response:
        """Post a chat completion; ``session`` and ``headers`` go into the headers."""
        headers = dict(members.pop("headers", {}))
        if (session := members.pop("session", None)) is not None:
            headers["X-Session-ID"] = session
        body = {"model": "fake", "messages": MESSAGES, **members}
        return await self.http.post(CHAT, json=body, headers=headers)

    async def record(self, response: httpx2.Response) -> dict[str, Any]:
        """Return the final record of a call."""
        path = f"/v1/calls/{response.headers['x-request-id']}"
        answer = await self.eventually(
            lambda: self.http.get(path), lambda answer: answer.json()["final"]
        )
        record: dict[str, Any] = answer.json()
        return record

    async def metric(self, sample: str) -> float:
        """Return the value of a metric's sample, 0 when it is absent."""
        text = (await self.http.get("/metrics")).text
        for line in text.splitlines():
            if line.startswith(sample + " "):
                return float(line.rpartition(" ")[2])
        return 0.0

    async def eventually(self, ask: Callable[[], Any], check: Callable[[Any], bool]) -> Any:
        """Ask until the answer passes the check."""
        answer: Any = None
        for _ in range(2000):
            answer = ask()
            if asyncio.iscoroutine(answer):
                answer = await answer
            if check(answer):
                return answer
            await asyncio.sleep(0.01)
        raise AssertionError(f"never true; last answer: {answer!r}")

    async def ready(self) -> None:
        """Wait until the router finds every side live."""
        await self.eventually(
            lambda: self.http.get("/health"), lambda answer: answer.status_code == 200
        )

    def of_kind(self, kind: type[Event]) -> list[Any]:
        """Return the events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def outcome_of(response: httpx2.Response) -> Outcome:
    """Decode an answer's outcome; decoding checks that it adds up."""
    return Outcome.from_header(response.headers[OUTCOME_HEADER])


async def streamed(client: AsyncOpenAI, **arguments: Any) -> dict[str, Any]:
    """Stream a call and put the assistant's message together, as agents do."""
    text = ""
    calls: dict[int, dict[str, Any]] = {}
    async for chunk in await client.chat.completions.create(stream=True, **arguments):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        for piece in delta.tool_calls or ():
            call = calls.setdefault(
                piece.index,
                {"id": piece.id, "type": "function", "function": {"name": "", "arguments": ""}},
            )
            call["function"]["name"] += piece.function.name or ""
            call["function"]["arguments"] += piece.function.arguments or ""
    message: dict[str, Any] = {"role": "assistant", "content": text.strip() or None}
    return {**message, "tool_calls": list(calls.values())} if calls else message


@asynccontextmanager
async def bench(*fakes: FakeEngine, **settings: Any) -> AsyncIterator[Bench]:
    """Run a router in front of engines that run already; ``traces`` may be ready
    made, ``kubernetes`` is a client.
    """
    events: list[Event] = []
    made = settings.pop("traces", None)
    traces = made if isinstance(made, Traces) else None
    kubernetes = settings.pop("kubernetes", None)
    config = config_for(fakes, **settings, traces=made is True)
    async with (
        serving(config, listeners=[events.append], traces=traces, kubernetes=kubernetes) as router,
        # Making a TLS context costs more than most of these tests.
        httpx2.AsyncClient(base_url=router.url, timeout=20, verify=False) as http,
    ):
        openai = AsyncOpenAI(
            base_url=router.url + "/v1", api_key="-", max_retries=0, http_client=http
        )
        yield Bench(router, http, openai, events)
