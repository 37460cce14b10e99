"""A fake vLLM: HTTP server and control socket on free loopback ports.

It speaks chat completions and the APIs of ``engine_apis`` (streaming and not),
``/v1/models``, ``/tokenize``, ``/health`` and ``/metrics`` in vLLM's form, logs every body
and header, and fails on script. Its "KV" is kept by content: a prompt is rendered to text,
cut into blocks, and each block is known by the hash of everything up to it, as in vLLM. So
an outcome of the fake means what an outcome of an engine means: history that was edited is
computed again, a pull brings exactly the common prefix, and nothing is found in an engine
that was flushed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
from aiohttp import web

from tests.fakes import engine_apis
from turncache.protocol import Mode
from turncache_server.control.messages import (
    Call,
    CallReply,
    Hello,
    HelloReply,
    Lacking,
    LackingReply,
    ModeReply,
    Refusal,
    Repeated,
    Reply,
    Request,
    SessionRow,
    Sessions,
    SessionsReply,
    SetDraining,
    SetMode,
    Signal,
    SignalReply,
    Stats,
    StatsReply,
    encode,
)
from turncache_server.control.server import ControlServer

TOKEN_CHARS = 4
BLOCK_TOKENS = 4


@dataclass
class Script:
    """What one chat completion does instead of answering as it should.

    Attributes:
        status: answer with this error status and ``body``.
        body: body of the error, or of a whole answer with status 200.
        headers: more headers of the answer.
        die: ``before`` the first byte, in the ``middle`` of the stream, or at its ``end``,
            after the last event.
        events: raw stream to send instead of the generated one.
        split: size of the pieces that the stream is sent in, 0 for one event each.
        until: nothing is sent before this is set.
        pause_after: number of events after which ``resume`` is awaited; any number stands for
            all of an answer that is not streamed, whose prompt is taken before.
        resume: see ``pause_after``.
        close_early: end the stream in order after this many events.
        kv_transfer_params: put into the answer, as an engine with a connector does.
        arrived: set when the request has been read.
        after_pull: ``status`` is answered only once the prompt has been looked for.
    """

    status: int = 200
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    die: str | None = None
    events: Sequence[bytes] | None = None
    split: int = 0
    until: asyncio.Event | None = None
    pause_after: int | None = None
    resume: asyncio.Event = field(default_factory=asyncio.Event)
    close_early: int | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    after_pull: bool = False


@dataclass(frozen=True)
class Seen:
    """One request as it came."""

    path: str
    raw: bytes
    headers: Mapping[str, str]

    @property
    def body(self) -> dict[str, Any]:
        """The parsed body."""
        parsed: dict[str, Any] = json.loads(self.raw)
        return parsed

    @property
    def xargs(self) -> dict[str, Any]:
        """The parsed ``vllm_xargs``."""
        xargs: dict[str, Any] = self.body.get("vllm_xargs") or {}
        return xargs


class FakeKv:
    """Blocks by the hash of everything up to them.

    Attributes:
        max_blocks: those written longest ago are evicted beyond it; None for any number.
    """

    def __init__(self) -> None:
        self.blocks: dict[bytes, None] = {}
        self.ever: set[bytes] = set()
        self.max_blocks: int | None = None

    def prefix_tokens(self, chain: Sequence[bytes]) -> int:
        """Return how many tokens of a chain are held, from the first."""
        held = 0
        for block in chain:
            if block not in self.blocks:
                break
            held += BLOCK_TOKENS
        return held

    def write(self, chain: Sequence[bytes]) -> None:
        """Hold a chain."""
        for block in chain:
            self.blocks.pop(block, None)
            self.blocks[block] = None
        self.ever.update(chain)
        if self.max_blocks is not None:
            for block in list(self.blocks)[: max(0, len(self.blocks) - self.max_blocks)]:
                del self.blocks[block]

    def flush(self) -> None:
        """Lose everything, as a pool does under pressure."""
        self.blocks.clear()


def render(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """Render a prompt, as a chat template would."""
    parts = [json.dumps(tools)] if tools else []
    for message in messages:
        calls = [
            (call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls") or ()
        ]
        said = (message.get("reasoning") or "") + (message.get("content") or "")
        parts.append(f"<{message.get('role')}>{said}{calls or ''}")
    return "".join(parts)


def num_tokens(text: str) -> int:
    """Count a text's tokens."""
    return -(-len(text) // TOKEN_CHARS)


def chain_of(text: str, salt: str = "") -> list[bytes]:
    """Return the chain hashes of a text's full blocks; calls of another salt share none."""
    size = TOKEN_CHARS * BLOCK_TOKENS
    out: list[bytes] = []
    above = salt.encode()
    for at in range(0, len(text) - size + 1, size):
        above = hashlib.blake2b(above + text[at : at + size].encode(), digest_size=16).digest()
        out.append(above)
    return out


class FakeEngine:
    """One engine.

    Args:
        name: its name and engine id.
        side: ``single``, ``prefill`` or ``decode``.
        fleet: engines by engine id, from which it can pull; it adds itself.
        models: served names.
        control: answer the control socket.

    Attributes:
        seen: calls, as they came.
        passed_on: bodies of ``/tokenize``.
        scripts: consumed one per call, from the first.
        default: used when there is no script.
        healthy: what ``/health`` says.
        num_active: chat completions being served.
        num_cancelled: chat completions whose client left.
        replies: outcomes by ``tc_request``, as the control socket tells them.
        asked: the calls that it was asked about.
        totals: of calls of sessions that have ended, as the control socket tells them.
        signals: what the control socket was told of sessions.
        mode: of the extension; in any but ``on`` it pulls nothing.
        draining: what it was told, and tells routers.
        kept: by session that it keeps the blocks of its history: all that it has answered
            and that were not ended.
        num_starts: how often it was started: another process each time, for routers.
        num_blocks: of its pool, as it tells others; ``kv.max_blocks`` is what it really has.
        turns: calls that are generated at once; the others wait, as ``max_num_seqs`` lets them.
        loses: so many prompts are lost as soon as they have been computed.
        lacking: by call that waits for its prompt to be prefilled again, what it waits for:
            the engine that has done so.
        updated: it knows of repeats; one of a version before does not.
    """

    def __init__(
        self,
        name: str = "single-0",
        side: str = "single",
        *,
        fleet: dict[str, FakeEngine] | None = None,
        models: Sequence[str] = ("fake",),
        control: bool = True,
    ) -> None:
        self.name = name
        self.side = side
        self.fleet = {} if fleet is None else fleet
        self.fleet[name] = self
        self.models = list(models)
        self.max_model_len = 100_000
        self.kv = FakeKv()
        self.seen: list[Seen] = []
        self.passed_on: list[Any] = []
        self.scripts: list[Script] = []
        self.default = Script()
        self.healthy = True
        self.num_active = 0
        self.max_active = 0
        self.num_cancelled = 0
        self.num_model_questions = 0
        self.replies: dict[str, CallReply] = {}
        self.asked: list[str] = []
        self.totals: Counter[str] = Counter()
        self.signals: list[Signal] = []
        self.mode = "on"
        self.draining = False
        self.kept: dict[str, list[bytes]] = {}
        self.num_starts = 0
        self.num_blocks = 0
        self.turns: AbstractAsyncContextManager[Any] = nullcontext()
        self.loses = 0
        self.lacking: dict[str, asyncio.Future[str]] = {}
        self.updated = True
        self.num_lacking_questions = 0
        self.port = 0
        self._with_control = control
        self._control: ControlServer | None = None
        self._runner: web.AppRunner | None = None

    # --- life ----------------------------------------------------------------------------

    async def start(self) -> None:
        """Listen: on a free port at first, later on the same one again."""
        self.num_starts += 1
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.add_routes(
            [
                *(web.post(path, self._call) for path in engine_apis.PATHS),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/health", self._health),
                web.get("/metrics", self._metrics),
            ]
        )
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, backlog=1024).start()
        self.port = self._runner.addresses[0][1]
        if self._with_control and self._control is None:
            self._control = ControlServer("tcp://127.0.0.1:0", self._answer_control)
            self._control.start()

    async def stop(self) -> None:
        """Close every connection and refuse new ones: the process is gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def close(self) -> None:
        """Stop for good."""
        await self.stop()
        if self._control is not None:
            await asyncio.to_thread(_close_control, self._control)
            self._control = None

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def control(self) -> str | None:
        """Address of the control socket."""
        return None if self._control is None else self._control.address

    def as_config(self) -> dict[str, str]:
        """Return the ``[[engines]]`` table that names this engine."""
        table = {"name": self.name, "engine_id": self.name, "side": self.side, "url": self.url}
        return table if self.control is None else {**table, "control": self.control}

    # --- control -------------------------------------------------------------------------

    def _answer_control(self, request: Request) -> Reply:
        self.num_lacking_questions += isinstance(request, Lacking)
        match request:
            case Hello():
                return HelloReply(
                    engine_id=self.name,
                    start_id=f"start-{self.num_starts}",
                    generation=1,
                    side=self.side,
                    mode=self.mode,
                    fingerprint={"model": self.models[0]},
                    block_size=BLOCK_TOKENS,
                    num_blocks=self.num_blocks,
                )
            case Call():
                self.asked.append(request.request)
                return self.replies.get(request.request, CallReply(found=False))
            case SetMode():
                self.mode = request.mode or self.mode
                return self._in_force()
            case SetDraining():
                self.draining = request.draining
                return self._in_force()
            case Sessions() | Stats():
                return self._stats() if isinstance(request, Stats) else self._sessions(request)
            case Signal():
                self.signals.append(request)
                if request.kind == "final":
                    self.kept.pop(request.session, None)
                known = any(seen.xargs.get("tc_session") == request.session for seen in self.seen)
                return SignalReply(accepted=known)
            case Lacking() | Repeated() if self.updated:
                return self._lack(request)
        return Refusal(code="unsupported", why=f"the fake does not know {request!r}")

    def _lack(self, request: Lacking | Repeated) -> LackingReply:
        if isinstance(request, Repeated):
            waits = self.lacking.pop(request.request, None)
            if waits is not None:
                waits.get_loop().call_soon_threadsafe(_set, waits, request.source)
        return LackingReply(requests=list(self.lacking))

    def _in_force(self) -> ModeReply:
        return ModeReply(
            mode=self.mode,
            pulls=self.mode == "on",
            ticket="t",
            draining=self.draining,
            start_id=f"start-{self.num_starts}",
        )

    def _sessions(self, request: Sessions) -> SessionsReply:
        return SessionsReply(
            name=self.name,
            side=self.side,
            rows=[
                SessionRow(
                    session=digest,
                    state="waiting",
                    lineages=1,
                    kept_blocks=self.kv.prefix_tokens(chain) // BLOCK_TOKENS,
                )
                for name, chain in sorted(self.kept.items())
                if request.session in ("", digest := _digest(name))
            ],
            num_sessions=len(self.kept),
            num_handovers=0,
            num_calls=self.num_active,
            block_size=BLOCK_TOKENS,
            draining=self.draining,
        )

    def _stats(self) -> StatsReply:
        """Return totals, and what is kept of sessions, by the names that the extension has."""
        kept = {block for chain in self.kept.values() for block in chain} & self.kv.blocks.keys()
        return StatsReply(
            counters={name: float(value) for name, value in self.totals.items()},
            gauges={
                "blocks": float(self.num_blocks),
                "retained_blocks": float(len(kept)),
                "sessions": float(len(self.kept)),
                "lineages": float(len(self.kept)),
                "calls_in_flight": float(self.num_active),
                "broken": 0.0,
                **{f"mode_{mode.value}": float(mode.value == self.mode) for mode in Mode},
            },
        )

    # --- HTTP ----------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text="vllm:num_requests_running 0\n")

    async def _models(self, _: web.Request) -> web.Response:
        self.num_model_questions += 1
        cards = [
            {"id": model, "object": "model", "max_model_len": self.max_model_len}
            for model in self.models
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.passed_on.append(body)
        return web.json_response({"tokens": [1, 2, 3], "count": 3})

    async def _call(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        seen = Seen(request.path, raw, {k.lower(): v for k, v in request.headers.items()})
        self.seen.append(seen)
        script = self.scripts.pop(0) if self.scripts else self.default
        script.arrived.set()
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        try:
            return await self._scripted(request, seen, script)
        except (asyncio.CancelledError, ConnectionError):
            self.num_cancelled += 1
            raise
        finally:
            self.num_active -= 1
            request_id = seen.xargs.get("tc_request", "")
            reply = self.replies.get(request_id)
            if reply is not None and not reply.done:
                self.replies[request_id] = msgspec.structs.replace(reply, done=True)
                self._count(seen, reply)

    def _count(self, seen: Seen, reply: CallReply) -> None:
        """Count a call of a session that has ended, as the extension does."""
        if "tc_session" not in seen.xargs:
            return
        for name in ("prompt", "local", "returned", "computed", "lost"):
            self.totals[f"{name}_tokens"] += getattr(reply, name)
        self.totals[f"lost_tokens_{reply.reason}"] += reply.lost
        self.totals["calls"] += 1
        self.totals[f"calls_{reply.reason}"] += 1

    async def _scripted(
        self, request: web.Request, seen: Seen, script: Script
    ) -> web.StreamResponse:
        body = seen.body
        if script.until is not None and not body.get("stream"):
            await script.until.wait()
        if script.die == "before":
            _cut(request)
        whole = script.body is not None and not body.get("stream")
        if whole or (script.status != 200 and not script.after_pull):
            return _as_scripted(script)
        async with self.turns:
            return await self._answered(request, seen, script)

    async def _answered(
        self, request: web.Request, seen: Seen, script: Script
    ) -> web.StreamResponse:
        body = seen.body
        asked = engine_apis.as_chat(seen.path, body)
        opened = None
        if body.get("stream") and seen.path == engine_apis.RESPONSES:
            # vLLM's first event of a response does not wait for a token.
            opened = await _opened(request, script)
            await opened.write(b": read\n\n")
        source = await self._pulled_from(seen.xargs, asked)
        if script.after_pull:
            return _as_scripted(script)
        answer = self._generate(seen, asked, source)
        if body.get("stream"):
            return await self._stream(request, answer, script, opened)
        if script.pause_after is not None:
            await script.resume.wait()
        params = script.kv_transfer_params or self._held(seen)
        if seen.path != engine_apis.CHAT:
            return web.json_response(engine_apis.whole(seen.path, answer, params))
        whole = whole_answer(body, answer)
        whole["kv_transfer_params"] = params
        return web.json_response(whole)

    async def _stream(
        self,
        request: web.Request,
        answer: Answer,
        script: Script,
        opened: web.StreamResponse | None,
    ) -> web.StreamResponse:
        response = opened or await _opened(request, script)
        # vLLM's headers come at once, its first event with the first token.
        if script.until is not None:
            await script.until.wait()
        if script.events is not None:
            events = list(script.events)
        elif request.path == engine_apis.CHAT:
            events = answer.events(script)
        else:
            events = engine_apis.events(request.path, answer, script.kv_transfer_params)
        if script.split:
            stream = b"".join(events)
            events = [stream[at : at + script.split] for at in range(0, len(stream), script.split)]
        for number, event in enumerate(events):
            if script.close_early == number:
                return response
            if script.pause_after == number:
                await script.resume.wait()
            if script.die == "middle" and number == 2:
                _cut(request)
            await response.write(event)
            if script.split:
                await asyncio.sleep(0)
        if script.die == "end":
            _cut(request)
        return response

    # --- the model and its KV -------------------------------------------------------------

    def _held(self, seen: Seen) -> dict[str, Any] | None:
        """Answer a stock hand-over's question: where the prompt's KV lies."""
        if seen.xargs.get("tc_stock") != 1:
            return None
        if not (seen.body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            return None
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.name,
            "remote_block_ids": [[1, 2]],
            "remote_host": "127.0.0.1",
            "remote_port": 5600,
        }

    async def _pulled_from(self, xargs: Mapping[str, Any], body: dict[str, Any]) -> str:
        """Return whom a call pulls from; one whose source has lost the prompt waits first."""
        source: str = xargs.get("tc_source", "")
        wait_s = xargs.get("tc_repeat_s") if self.updated else None
        chain = chain_of(render(body["messages"], body.get("tools")), body.get("cache_salt") or "")
        while wait_s and source and chain and not self._in_reach(source, chain):
            request = xargs["tc_request"]
            waits = self.lacking[request] = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout(wait_s):
                    source = await waits
            except TimeoutError:
                return source
            finally:
                self.lacking.pop(request, None)
        return source

    def _in_reach(self, source: str, chain: Sequence[bytes]) -> bool:
        engines = [self, *([self.fleet[source]] if source in self.fleet else [])]
        return any(engine.kv.prefix_tokens(chain) for engine in engines)

    def _generate(self, seen: Seen, body: dict[str, Any], pulled_from: str) -> Answer:
        xargs = seen.xargs
        prompt = render(body["messages"], body.get("tools"))
        salt = body.get("cache_salt") or ""
        chain = chain_of(prompt, salt)
        held = local = self.kv.prefix_tokens(chain)
        stock = (body.get("kv_transfer_params") or {}).get("remote_engine_id")
        names = [stock or pulled_from, *xargs.get("tc_also", "").split()]
        if self.mode != "on" and not stock:
            names = []
        for source in filter(None, map(self.fleet.get, names)):
            held = max(held, source.kv.prefix_tokens(chain))
        total = num_tokens(prompt)
        known = sum(block in self.kv.ever for block in chain) * BLOCK_TOKENS
        self.kv.write(chain)
        if self.loses:
            self.loses -= 1
            self.kv.flush()
        self.replies[xargs.get("tc_request", "")] = CallReply(
            found=True,
            prompt=total,
            local=local,
            returned=held - local,
            computed=total - held,
            lost=max(0, min(known, total) - held),
            reason="ok",
        )
        answer = Answer.to(body, total, held)
        if body.get("max_tokens") != 1:
            message = [*body["messages"], answer.message]
            chain = chain_of(render(message, body.get("tools")), salt)
            self.kv.write(chain)
            self.kept[xargs.get("tc_session", "")] = chain
        return answer


@dataclass(frozen=True)
class Answer:
    """What the model says."""

    model: str
    text: str
    tool_calls: list[dict[str, Any]]
    finish_reason: str
    num_choices: int
    prompt_tokens: int
    cached_tokens: int
    with_usage: bool

    @classmethod
    def to(cls, body: Mapping[str, Any], prompt_tokens: int, cached_tokens: int) -> Answer:
        """Answer a request: a tool call to a user who offers tools, else a sentence."""
        messages, tools = body["messages"], body.get("tools")
        tool_calls: list[dict[str, Any]] = []
        if tools and messages[-1]["role"] == "user" and body.get("tool_choice") != "none":
            function = {
                "name": tools[0]["function"]["name"],
                "arguments": json.dumps({"query": f"step {len(messages)}"}),
            }
            tool_calls = [{"id": f"call_{len(messages)}", "type": "function", "function": function}]
        reason = "tool_calls" if tool_calls else "stop"
        if body.get("max_tokens") == 1:
            reason = "length"
        options = body.get("stream_options") or {}
        return cls(
            model=body.get("model") or "fake",
            text="" if tool_calls else f"This is answer {len(messages)}: 你好🙂.",
            tool_calls=tool_calls,
            finish_reason=reason,
            num_choices=body.get("n") or 1,
            prompt_tokens=prompt_tokens,
            cached_tokens=cached_tokens,
            with_usage=bool(options.get("include_usage")),
        )

    @property
    def message(self) -> dict[str, Any]:
        """The assistant message, as a client appends it."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text or None}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts in OpenAI's form."""
        completion = num_tokens(self.text) + 4 * len(self.tool_calls)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def events(self, script: Script) -> list[bytes]:
        """Return the stream's events."""
        chunks = [
            chunk for index in range(self.num_choices) for chunk in self._choice(index, script)
        ]
        if self.with_usage:
            chunks.append({**self._chunk(0, {}, None), "choices": [], "usage": self.usage})
        return [*map(event, chunks), b"data: [DONE]\n\n"]

    def _choice(self, index: int, script: Script) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{"content": word + " "} for word in self.text.split()]
        for number, call in enumerate(self.tool_calls):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            head = {"index": number, "id": call["id"], "type": "function"}
            deltas.append({"tool_calls": [{**head, "function": {"name": name, "arguments": ""}}]})
            deltas += [
                {"tool_calls": [{"index": number, "function": {"arguments": piece}}]}
                for piece in (arguments[:7], arguments[7:])
            ]
        chunks = [self._chunk(index, delta, None) for delta in deltas]
        last = self._chunk(index, {}, self.finish_reason)
        if script.kv_transfer_params is not None:
            last["kv_transfer_params"] = script.kv_transfer_params
        return [*chunks, last]

    def _chunk(self, index: int, delta: Any, finish_reason: str | None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason}
        return {
            "id": "chatcmpl-fake",
            "object": "chat.completion.chunk",
            "created": 1,
            "model": self.model,
            "choices": [choice],
        }


def event(chunk: Mapping[str, Any]) -> bytes:
    """Encode a chunk as vLLM does."""
    text = json.dumps(chunk, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def whole_answer(body: Mapping[str, Any], answer: Answer) -> dict[str, Any]:
    """Return a chat completion that was not streamed."""
    return {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 1,
        "model": answer.model,
        "choices": [
            {
                "index": index,
                "message": answer.message,
                "finish_reason": answer.finish_reason,
            }
            for index in range(answer.num_choices)
        ],
        "usage": answer.usage,
    }


def _digest(session: str) -> str:
    """Return what engines show of a session's name."""
    return hashlib.blake2b(session.encode(), digest_size=6).hexdigest()


def _as_scripted(script: Script) -> web.Response:
    return web.Response(
        status=script.status,
        body=script.body or b'{"error":{"message":"scripted","code":0}}',
        content_type="application/json",
        headers=dict(script.headers),
    )


async def _opened(request: web.Request, script: Script) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"content-type": "text/event-stream; charset=utf-8", **script.headers}
    )
    await response.prepare(request)
    return response


def _set(future: asyncio.Future[str], value: str) -> None:
    if not future.done():
        future.set_result(value)


def _close_control(control: ControlServer) -> None:
    """Close a control socket, and poke its thread, which else looks up every 200 ms."""
    closing = threading.Thread(target=control.close)
    closing.start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(control.address)
        socket.send(encode(1, Hello()))
        closing.join()


def _cut(request: web.Request) -> None:
    """Break the connection, as a process that dies does."""
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionResetError


@asynccontextmanager
async def fake_engines(*engines: FakeEngine) -> AsyncIterator[None]:
    """Run engines for the length of the block."""
    try:
        for engine in engines:
            await engine.start()
        yield
    finally:
        await asyncio.gather(*(engine.close() for engine in engines))


@asynccontextmanager
async def fake_pair(
    *, prefills: int = 1, decodes: int = 1
) -> AsyncIterator[tuple[list[FakeEngine], list[FakeEngine]]]:
    """Run prefill and decode engines that can pull from each other."""
    fleet: dict[str, FakeEngine] = {}
    prefill = [FakeEngine(f"prefill-{i}", "prefill", fleet=fleet) for i in range(prefills)]
    decode = [FakeEngine(f"decode-{i}", "decode", fleet=fleet) for i in range(decodes)]
    async with fake_engines(*prefill, *decode):
        yield prefill, decode
