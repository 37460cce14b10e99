"""What the client costs: per call, per streamed chunk, and in memory.

``python -m tests.perf.bench_client [--rounds N]``

Two stock clients and an own one send to the same mock transport, in turns, in one thread.
All times are CPU time of that thread, and of many rounds the fastest counts: the work is the
same every time, and everything else that a busy machine does only adds to it.

* *call, 10 messages*: fastest own call minus fastest call of the first stock client. Between
  two calls of one client others were made, so that caches are as cold as in a program that
  does something else between two calls.
* *hot call*: the same, with the calls of one client in a row.
* *stock against stock*: fastest call of the second stock client minus that of the first:
  how far a difference can be believed.
* *call, 300 messages*: a stock call of that size takes a thousand times longer than what
  is added, so that its own noise would hide it. It is the figure of 10 messages plus what
  preparing a call costs more at 300, timed inside the same real calls.
* *bytecodes*: instructions of Python that one call runs more. Exact on any machine, however
  busy, and blind to time in C: the figure to compare two versions by.
* *chunk*: iterating a watched stream over ready-made chunks minus iterating them without.
* *memory*: what 10,000 automatic sessions of two calls each leave allocated.

Each conversation grows by an answer and a tool result between two calls, as an agent's
does. Prints a table, writes ``build/perf/client.json``, and exits with 1 when a figure is
over its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import os
import platform
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import openai

import turncache
from turncache import calling, tagging
from turncache.attempt import STREAMS, Attempt
from turncache.family import binding_of
from turncache.records import Call
from turncache.streams import watched

ROOT: Final = Path(__file__).resolve().parents[2]
HTTPX: Any = importlib.import_module(
    "httpx2" if int(openai.__version__.split(".", 1)[0]) >= 3 else "httpx"
)
BASE_URL: Final = "http://127.0.0.1:9/v1"
MESSAGE_CHARS: Final = 1500
NUM_CHUNKS: Final = 2000
NUM_SESSIONS: Final = 10_000

_ANSWER: Final = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "fine"},
        }
    ],
    "usage": {"prompt_tokens": 4171, "completion_tokens": 1, "total_tokens": 4172},
}
_HEADERS: Final = {
    "Turncache": "v=1",
    "Turncache-Outcome": "prompt=4171, local=32, returned=3968, computed=171, lost=0, "
    "plan=return, reason=ok",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured number.

    Attributes:
        figure: what was measured.
        unit: unit of ``value``, ``baseline`` and ``limit``.
        value: what ours adds.
        baseline: what the stock client takes for the whole.
        ratio: ``value`` by ``baseline``, None without a baseline.
        limit: what it may be.
        ok: whether ``value`` is within ``limit``.
        host: processor, Python, and the load of the last minute: over the number of
            processors it makes every figure larger.
        commit: commit of the checkout, with ``+`` when it has changes.
    """

    figure: str
    unit: str
    value: float
    baseline: float | None
    ratio: float | None
    limit: float
    ok: bool
    host: str
    commit: str


def history(num_messages: int) -> list[Any]:
    """Return an agent's history: a question, then tool calls and their results."""

    def text(at: int) -> str:
        return (f"word{at} " * MESSAGE_CHARS)[:MESSAGE_CHARS]

    out: list[Any] = [
        {"role": "system", "content": text(0)},
        {"role": "user", "content": text(1)},
    ]
    while len(out) < num_messages:
        at = len(out)
        function = {"name": "search", "arguments": json.dumps({"q": text(at)})}
        calls = [{"id": f"call{at}", "type": "function", "function": function}]
        out.append({"role": "assistant", "content": None, "tool_calls": calls})
        out.append({"role": "tool", "tool_call_id": f"call{at}", "content": text(at + 1)})
    return out[:num_messages]


def client_of(kind: Any) -> Any:
    """Return a client of ``kind`` that sends to a mock transport."""
    transport = HTTPX.MockTransport(lambda _: HTTPX.Response(200, json=_ANSWER, headers=_HEADERS))
    is_async = issubclass(kind, openai.AsyncOpenAI)
    made = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
    return kind(base_url=BASE_URL, api_key="-", http_client=made(transport=transport))


@contextmanager
def timed_preparation() -> Iterator[list[int]]:
    """Collect the CPU time, in ns, that preparing each of our calls takes."""
    begin, spent = tagging.begin, []

    def timed(*arguments: Any, **more: Any) -> Any:
        start = time.thread_time_ns()
        try:
            return begin(*arguments, **more)
        finally:
            spent.append(time.thread_time_ns() - start)

    calling.begin = timed  # type: ignore[attr-defined]
    try:
        yield spent
    finally:
        calling.begin = begin  # type: ignore[attr-defined]


def per_call_us(
    ask: Callable[[Any, list[Any]], None],
    clients: Sequence[Any],
    messages: int,
    rounds: int,
    in_a_row: int = 1,
) -> tuple[list[float], float]:
    """Return the fastest call of each client and the fastest preparation of an own one, in us."""
    whole = history(messages)
    fastest = [float("inf")] * len(clients)
    preparation = float("inf")
    order = list(range(len(clients)))
    with timed_preparation() as spent, collector_paused():
        for number in range(rounds):
            if number % 20 == 0:
                gc.collect()
            order.append(order.pop(0))
            for at in order:
                for _ in range(in_a_row):
                    ask(clients[at], whole[:-2])
                    spent.clear()
                    start = time.thread_time_ns()
                    ask(clients[at], whole)
                    fastest[at] = min(fastest[at], (time.thread_time_ns() - start) / 1e3)
                    preparation = min([preparation, *(ns / 1e3 for ns in spent)])
    return fastest, preparation


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector out of what is timed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def call_figures(kind: str, rounds: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield (figure, added us, stock us, limit us) for sync or async calls."""
    loop = asyncio.new_event_loop()

    def ask(client: Any, messages: list[Any]) -> None:
        client.chat.completions.create(model="m", messages=messages)

    def ask_async(client: Any, messages: list[Any]) -> None:
        loop.run_until_complete(client.chat.completions.create(model="m", messages=messages))

    kinds: tuple[Any, ...]
    if kind == "sync":
        kinds, way = (openai.OpenAI, openai.OpenAI, turncache.OpenAI), ask
    else:
        kinds = (openai.AsyncOpenAI, openai.AsyncOpenAI, turncache.AsyncOpenAI)
        way = ask_async
    clients = [client_of(made) for made in kinds]
    (stock, again, own), few = per_call_us(way, clients, 10, rounds)
    (hot_stock, _, hot_own), _ = per_call_us(way, clients, 10, max(rounds // 10, 5), in_a_row=20)
    (long_stock, _, _), many = per_call_us(way, clients, 300, max(rounds // 20, 5))
    yield f"stock against stock, {kind}, 10 messages", abs(again - stock), stock, 60.0
    yield f"added per {kind} call, 10 messages", own - stock, stock, 60.0
    yield f"added per hot {kind} call, 10 messages", hot_own - hot_stock, hot_stock, 60.0
    yield f"added per {kind} call, 300 messages", own - stock + many - few, long_stock, 250.0
    if kind == "async":
        for client in clients:
            loop.run_until_complete(client.close())
    loop.close()


def bytecode_figures() -> Iterator[tuple[str, float, float, float]]:
    """Yield how many bytecodes a call runs more, and how many a stock call runs."""
    clients = client_of(openai.OpenAI), client_of(turncache.OpenAI)
    for messages, limit in ((10, 6_000.0), (300, 8_000.0)):
        whole = history(messages)
        counts = []
        for client in clients:
            for _ in range(3):
                client.chat.completions.create(model="m", messages=whole[:-2])
            counts.append(num_bytecodes(client, whole))
        added = float(counts[1] - counts[0])
        yield f"added per sync call, {messages} messages", added, float(counts[0]), limit


def num_bytecodes(client: Any, messages: list[Any]) -> int:
    """Return how many bytecodes one call runs."""
    count = 0

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        client.chat.completions.create(model="m", messages=messages)
    finally:
        sys.settrace(before)
    return count


def chunk_figure(rounds: int) -> tuple[str, float, float, float]:
    """Return what one streamed chunk costs more, and what upstream takes to make one."""
    chunk = openai.types.chat.ChatCompletionChunk.model_validate(
        {
            "id": "a",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": "m",
            "choices": [{"index": 0, "delta": {"content": "word"}, "finish_reason": None}],
        }
    )

    class Ready(openai.Stream[Any]):
        def __stream__(self) -> Iterator[Any]:
            for _ in range(NUM_CHUNKS):
                yield chunk

    client = client_of(openai.OpenAI)

    def drain_ns(kind: Any, response: Any) -> int:
        stream = kind(cast_to=object, response=response, client=client)
        start = time.thread_time_ns()
        for _ in stream:
            pass
        return time.thread_time_ns() - start

    plain, own = float("inf"), float("inf")
    for _ in range(max(rounds // 10, 10)):
        plain = min(plain, drain_ns(Ready, HTTPX.Response(200)))
        response = HTTPX.Response(200)
        attempt = Attempt(
            call=Call(started_s=0.0, model="m"),
            session=None,
            host=("", None),
            clock=time.perf_counter,
        )
        STREAMS.put(response, attempt)
        own = min(own, drain_ns(watched(Ready), response))
    text = f"data: {chunk.model_dump_json()}\n\n" * NUM_CHUNKS + "data: [DONE]\n\n"
    kind: Any = openai.Stream[openai.types.chat.ChatCompletionChunk]
    stock = min(
        drain_ns(kind, HTTPX.Response(200, text=text, request=HTTPX.Request("POST", BASE_URL)))
        for _ in range(3)
    )
    return (
        "added per streamed chunk",
        (own - plain) / NUM_CHUNKS / 1e3,
        stock / NUM_CHUNKS / 1e3,
        2.0,
    )


def memory_figure() -> tuple[str, float, None, float]:
    """Return what 10,000 automatic sessions of two calls hold, in MB."""
    with client_of(turncache.OpenAI) as client:
        binding = binding_of(client)
        seen: list[Any] = []

        class Catch(openai.OpenAI):
            def request(self, cast_to: Any, options: Any, **more: Any) -> Any:
                seen.append(options)
                return super().request(cast_to, options, **more)

        with client_of(Catch) as catching:
            catching.chat.completions.create(model="m", messages=history(2))
        options = seen[0]

        def begin(messages: list[Any]) -> None:
            options.json_data = {"model": "m", "messages": messages}
            attempt = tagging.begin(
                binding, client.base_url, openai.types.chat.ChatCompletion, options, stream=False
            )
            assert attempt is not None
            attempt.parsed(_ANSWER)

        tracemalloc.start()
        begin(history(2))
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(NUM_SESSIONS):
            first = [{"role": "user", "content": f"question {number}"}]
            begin(first)
            begin([*first, {"role": "assistant", "content": "fine"}, first[0]])
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert len(client.automatic_sessions) == NUM_SESSIONS
    return "memory of 10,000 automatic sessions", held / 1e6, None, 50.0


def main() -> int:
    """Measure, print the table, and write the JSON."""
    parser = argparse.ArgumentParser(description="measure what the client costs")
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    rows: list[tuple[str, float, float | None, float, str]] = []
    for kind in ("sync", "async"):
        rows += [(*row, "us") for row in call_figures(kind, rounds)]
    rows += [(*row, "bytecodes") for row in bytecode_figures()]
    rows.append((*chunk_figure(rounds), "us"))
    rows.append((*memory_figure(), "MB"))
    host, commit = where(), revision()
    figures = [
        Figure(
            figure=figure,
            unit=unit,
            value=round(value, 2),
            baseline=None if baseline is None else round(baseline, 2),
            ratio=None if baseline is None else round(value / baseline, 4),
            limit=limit,
            ok=value <= limit,
            host=host,
            commit=commit,
        )
        for figure, value, baseline, limit, unit in rows
    ]
    show(figures)
    out = ROOT / "build" / "perf" / "client.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps([asdict(figure) for figure in figures], indent=1) + "\n")
    return 0 if all(figure.ok for figure in figures) else 1


def show(figures: list[Figure]) -> None:
    """Print the figures as a table."""
    print(f"{figures[0].host}, commit {figures[0].commit}, openai {openai.__version__}")
    print(f"{'figure':<42}{'added':>9} {'unit':<10}{'stock':>12}{'ratio':>8}{'limit':>8}  ok")
    for figure in figures:
        stock = "-" if figure.baseline is None else f"{figure.baseline:,.1f}"
        ratio = "-" if figure.ratio is None else f"{figure.ratio:.1%}"
        print(
            f"{figure.figure:<42}{figure.value:>9,.1f} {figure.unit:<10}{stock:>12}{ratio:>8}"
            f"{figure.limit:>8,.0f}  {'yes' if figure.ok else 'NO'}"
        )


def where() -> str:
    """Return the processor, the Python and the load that were measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.processor()
    load = f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    return f"{name}, Python {platform.python_version()}, {load}"


def revision() -> str:
    """Return the commit of the checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "sdk")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


if __name__ == "__main__":
    sys.exit(main())
