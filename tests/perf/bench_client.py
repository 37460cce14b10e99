"""What the client costs: per call, per streamed chunk, and in memory.

``python -m tests.perf.bench_client [--rounds N | --where]``

An own and a stock client send to mock transports, in turns, in one thread. All times are CPU
time of that thread, and of many rounds the fastest counts: the work is the same every time,
and everything else that a busy machine does only adds to it. A stock call takes so much longer
than what is added to it that a difference of two clients shows mostly noise: what is added is
timed inside the call.

* *added per call*: ours plus upstream's share.
* *ours*: a ``request()`` of the own client, without the time in upstream's ``request()`` and
  ``parse()``. Caches are as cold as they are in a program: upstream has run in between. What
  upstream has made (the response, the request with its body) is let go of outside of the time:
  the stock client pays for that as well, inside its ``request()``.
* *upstream's share*: a stock client's ``post()`` with our headers and the type that we ask for,
  minus its plain ``post()``. *Noise of it* is a plain one minus another plain one. Both are
  small differences of long calls: medians over pairs of neighbours, not the fastest of either.
* *stock*: a whole stock call, ``create()`` included, of the same size; the ratio is to that. A
  machine of half the speed doubles both, and leaves the ratio.
* *bytecodes*: instructions of Python that one call runs more. Exact on any machine, however
  busy, and blind to time in C: the figure to compare two versions by. ``--where`` shows the
  functions that they are in. *tool loop*: the call offers 16 tools and brings a result that the
  answer before asked for.
* *chunk*: iterating a watched stream over ready-made chunks minus iterating them without.
* *memory*: what 10,000 automatic sessions of two calls each leave allocated.

Each conversation grows by an answer and a tool result between two calls, as an agent's does,
and every round has a conversation of its own: of a history that is sent again nothing is new.
Prints a table, writes ``build/perf/client.json``, and exits with 1 when a figure is over its
limit.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import inspect
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Final

import openai

import turncache
from tests.perf.bytecodes import counted, print_places
from turncache import tagging
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
        limit: what it may be, None for a part of another figure.
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
    limit: float | None
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


def client_of(kind: Any, answer: Any = _ANSWER) -> Any:
    """Return a client of ``kind`` that sends to a mock transport."""
    transport = HTTPX.MockTransport(lambda _: HTTPX.Response(200, json=answer, headers=_HEADERS))
    is_async = issubclass(kind, openai.AsyncOpenAI)
    made = openai.DefaultAsyncHttpxClient if is_async else openai.DefaultHttpxClient
    return kind(base_url=BASE_URL, api_key="-", http_client=made(transport=transport))


@contextmanager
def timed() -> Iterator[dict[str, list[tuple[int, Any]]]]:
    """Collect CPU times in ns: of upstream's request() and parse(), and of ours around them.

    Beside each time is what came of it, which is not freed before the time is forgotten.
    """
    spent: dict[str, list[tuple[int, Any]]] = {"upstream": [], "own": []}

    def measured(function: Any, times: list[tuple[int, Any]]) -> Any:
        def sync(*arguments: Any, **more: Any) -> Any:
            start = time.thread_time_ns()
            result = function(*arguments, **more)
            times.append((time.thread_time_ns() - start, result))
            return result

        async def asynchronous(*arguments: Any, **more: Any) -> Any:
            start = time.thread_time_ns()
            result = await function(*arguments, **more)
            times.append((time.thread_time_ns() - start, result))
            return result

        return asynchronous if inspect.iscoroutinefunction(function) else sync

    with ExitStack() as undo:
        for kind in (openai.OpenAI, openai.AsyncOpenAI):
            undo.callback(delattr, kind, "request")
            kind.request = measured(kind.request, spent["upstream"])  # type: ignore[method-assign]
        for owner, name, times in (
            (openai.APIResponse, "parse", spent["upstream"]),
            (openai.AsyncAPIResponse, "parse", spent["upstream"]),
            (turncache.OpenAI, "request", spent["own"]),
            (turncache.AsyncOpenAI, "request", spent["own"]),
        ):
            before = vars(owner).get(name)
            function: Any = getattr(owner, name)
            setattr(owner, name, measured(function, times))
            undo.callback(
                *((delattr, owner, name) if before is None else (setattr, owner, name, before))
            )
        yield spent


def clock_us() -> float:
    """Return what reading the clock costs."""
    now = time.thread_time_ns
    return min(-(now() - now()) for _ in range(1000)) / 1e3


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keep the garbage collector out of what is timed."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def call_figures(kind: str, rounds: int) -> Iterator[tuple[str, float, float, float | None]]:
    """Yield (figure, added us, stock us, limit us) for sync or async calls."""
    loop = asyncio.new_event_loop()

    def finished(answer: Any) -> Any:
        return loop.run_until_complete(answer) if inspect.isawaitable(answer) else answer

    is_async = kind == "async"
    stock = client_of(openai.AsyncOpenAI if is_async else openai.OpenAI)
    own = client_of(turncache.AsyncOpenAI if is_async else turncache.OpenAI)
    share_us, noise_us = upstream_us(stock, finished, rounds)
    for messages, num_rounds, limit in ((10, rounds, 60.0), (300, max(rounds // 20, 5), 250.0)):
        ours, whole = per_call_us(stock, own, finished, messages, num_rounds)
        yield f"added per {kind} call, {messages} messages", ours + share_us, whole, limit
        yield "  ours", ours, whole, None
        yield "  upstream's share", share_us, whole, None
        yield "  noise of upstream's share", noise_us, whole, None
    for client in (stock, own):
        finished(client.close())
    loop.close()


def per_call_us(
    stock: Any, own: Any, finished: Callable[[Any], Any], messages: int, rounds: int
) -> tuple[float, float]:
    """Return the fastest time in our own code, and the fastest whole stock call, in us."""
    whole = history(messages)
    fastest = {"own": float("inf"), "stock": float("inf")}
    # An own call reads the clock at the ends of request(), and of two calls inside.
    clock = 3 * clock_us()
    with timed() as spent, collector_paused():
        for number in range(rounds):
            if number % 20 == 0:
                gc.collect()
            whole[1] = {"role": "user", "content": f"question {number}: {whole[0]['content']}"}
            for client in (stock, own):
                finished(client.chat.completions.create(model="m", messages=whole[:-2]))
                for times in spent.values():
                    times.clear()
                start = time.thread_time_ns()
                finished(client.chat.completions.create(model="m", messages=whole))
                taken = time.thread_time_ns() - start
                if client is own:
                    assert (len(spent["own"]), len(spent["upstream"])) == (1, 2)
                    own_ns, upstream_ns = (
                        sum(time_ns for time_ns, _ in spent[who]) for who in ("own", "upstream")
                    )
                    taken = own_ns - upstream_ns
                name = "own" if client is own else "stock"
                fastest[name] = min(fastest[name], taken / 1e3)
    return fastest["own"] - clock, fastest["stock"]


def upstream_us(stock: Any, finished: Callable[[Any], Any], rounds: int) -> tuple[float, float]:
    """Return what our headers and our response type cost upstream, and the noise of it, in us."""
    answer = openai.types.chat.ChatCompletion
    response = (
        openai.AsyncAPIResponse if isinstance(stock, openai.AsyncOpenAI) else openai.APIResponse
    )
    headers = {"X-Session-ID": f"auto-{0:032x}", "Turncache": "v=1, turn=1, call=5, cause=tool"}
    body = {"model": "m", "messages": history(10)}
    ways: dict[str, dict[str, Any]] = {
        "plain": {"cast_to": answer},
        "ours": {"cast_to": response[answer], "options": {"headers": headers}},
        "again": {"cast_to": answer},
    }

    def post(arguments: dict[str, Any], *, parse: bool) -> Any:
        got = stock.post("/chat/completions", body=body, **arguments)
        return got.parse() if parse else got

    # One coroutine, as in a call of ours: a second one through the loop costs more than parse().
    async def post_async(arguments: dict[str, Any], *, parse: bool) -> Any:
        got = await stock.post("/chat/completions", body=body, **arguments)
        return await got.parse() if parse else got

    send = post_async if isinstance(stock, openai.AsyncOpenAI) else post
    spent: dict[str, list[float]] = {name: [] for name in ways}
    # Whoever follows a call of another kind pays for the caches that it finds: no fixed order.
    order, chance = list(ways), random.Random(0)
    with collector_paused():
        for number in range(4 * rounds):
            if number % 20 == 0:
                gc.collect()
            chance.shuffle(order)
            for name in order:
                start = time.thread_time_ns()
                finished(send(ways[name], parse=name == "ours"))
                spent[name].append((time.thread_time_ns() - start) / 1e3)

    def more_us(name: str) -> float:
        pairs = zip(spent[name], spent["plain"], strict=True)
        return statistics.median(one - plain for one, plain in pairs)

    return more_us("ours"), abs(more_us("again"))


def bytecode_figures() -> Iterator[tuple[str, float, float, float]]:
    """Yield how many bytecodes a call runs more, and how many a stock call runs."""
    for messages, tools in ((10, False), (300, False), (10, True)):
        stock, own = (
            bytecodes(kind, messages, tools=tools).total()
            for kind in (openai.OpenAI, turncache.OpenAI)
        )
        what = f"{messages} messages" + (", tool loop" if tools else "")
        limit = 5_000.0 if tools else 3_500.0
        yield f"added per sync call, {what}", float(own - stock), float(stock), limit


def bytecodes(kind: Any, messages: int, *, tools: bool) -> Counter[CodeType]:
    """Count the bytecodes of one call that goes on with a history, by the code they are in.

    Args:
        kind: class of the client.
        messages: length of the history.
        tools: whether the call offers 16 tools and brings the result of the answer before.
    """
    whole = history(messages)
    more: dict[str, Any] = {"tools": _tools(16)} if tools else {}
    # An answer with the tool call that comes last in the history.
    choice = {"index": 0, "finish_reason": "tool_calls", "message": whole[-2]}
    client = client_of(kind, {**_ANSWER, "choices": [choice]} if tools else _ANSWER)
    # Another conversation comes first, as it does in a program: its tools are known then.
    other = [{"role": "user", "content": "other"}, *whole[2:]]
    for known in (other[:-2], other, whole[:-2]):
        client.chat.completions.create(model="m", messages=known, **more)
    counts = counted(lambda: client.chat.completions.create(model="m", messages=whole, **more))
    client.close()
    return counts


def _tools(number: int) -> list[Any]:
    properties = {"q": {"type": "string", "description": "what to look for"}}
    parameters = {"type": "object", "properties": properties, "required": ["q"]}
    return [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name in ("search", *(f"tool{at}" for at in range(1, number)))
    ]


def show_bytecodes(messages: int, *, tools: bool) -> None:
    """Print where the added bytecodes of a call are, the most first, down to ten."""
    added = bytecodes(turncache.OpenAI, messages, tools=tools)
    added.subtract(bytecodes(openai.OpenAI, messages, tools=tools))
    own = sum(number for code, number in added.items() if "/turncache/" in code.co_filename)
    print(f"{messages} messages, tools: {tools}: {added.total()} added, {own} of them ours")
    print_places(added)


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
    parser.add_argument("--where", action="store_true", help="show where bytecodes are, only")
    arguments = parser.parse_args()
    if arguments.where:
        for messages, tools in ((10, False), (10, True)):
            show_bytecodes(messages, tools=tools)
        return 0
    rounds = arguments.rounds
    rows: list[tuple[str, float, float | None, float | None, str]] = []
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
            ok=limit is None or value <= limit,
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
        limit = "-" if figure.limit is None else f"{figure.limit:,.0f}"
        print(
            f"{figure.figure:<42}{figure.value:>9,.1f} {figure.unit:<10}{stock:>12}{ratio:>8}"
            f"{limit:>8}  {'' if figure.limit is None else 'yes' if figure.ok else 'NO'}"
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
