"""A small OpenAI-compatible server for tests: standard library only, in this process.

::

    with FakeServer() as server:
        client = turncache.OpenAI(base_url=server.url, api_key="-")
        client.chat.completions.create(model="m", messages=[...], tools=[...])
        server.requests[0].headers["x-session-id"]

It answers chat completions and responses, streamed or not, on a free port of the loopback
interface. Without a script a request that offers tools and brings no result is answered
with a call of the first tool, any other with a text. :meth:`FakeServer.script` puts other
replies and failures before that. Every answer has a ``Turncache`` header and a
``Turncache-Outcome`` whose numbers add up: the server remembers prompts, as a prefix cache
without limits would, and counts words as tokens.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from turncache._fake_forms import Chat, Completions, Form, Reply, Responses
from turncache.advice import ADVISER
from turncache.attempt import forget_problems
from turncache.hosts import forget_answers
from turncache.notices import NOTIFIER
from turncache.protocol import (
    CALL_HEADER,
    NOTICES_PATH,
    OUTCOME_HEADER,
    PROTOCOL_VERSION,
    REQUEST_ID_HEADER,
    SESSION_HEADER,
    Outcome,
    Plan,
    Reason,
    format_dictionary,
)
from turncache.sessions import TOOL_DURATIONS, forget_sessions
from turncache.untagged import forget_counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failed answer.

    Attributes:
        status: HTTP status; 0 closes the connection without an answer.
        message: text of the error.
        headers: further answer headers.
    """

    status: int = 503
    message: str = "try again"
    headers: Mapping[str, str] = field(default_factory=lambda: {"retry-after-ms": "1"})


_NOT_FOUND = Failure(status=404, message="not found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it arrived.

    Attributes:
        method: HTTP method.
        path: path with its query.
        headers: headers with lower-case names.
        body: the parsed JSON body, None when there was none.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


__all__ = ["Failure", "FakeServer", "Reply", "Request", "forget_everything"]


def forget_everything() -> None:
    """Forget what the clients of this process have learned, for tests that start afresh.

    That is: sessions by id, how long tools run, which hosts answered with a ``Turncache``
    header and which do not know notices, what advice and warnings were given,
    and which calls were untagged.
    """
    forget_sessions()
    forget_problems()
    TOOL_DURATIONS.forget()
    ADVISER.forget()
    NOTIFIER.forget()
    forget_counts()
    forget_answers()


class FakeServer:
    """An OpenAI-compatible server on a free loopback port, in threads of this process.

    Attributes:
        knows_notices: whether notices about sessions are taken.
        requests: what has arrived, in order.
    """

    def __init__(self, *, knows_notices: bool = True) -> None:
        """Bind a port; requests are served from :meth:`start` or ``with`` on.

        Args:
            knows_notices: whether ``/v1/sessions`` takes notices, or is not found.
        """
        self.knows_notices = knows_notices
        self.requests: list[Request] = []
        self._script: deque[Reply | Failure] = deque()
        self._prompts: dict[str, list[list[str]]] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._http = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        )

    @property
    def url(self) -> str:
        """The ``base_url`` for a client."""
        return f"{self.azure_endpoint}/v1"

    @property
    def azure_endpoint(self) -> str:
        """The ``azure_endpoint`` for an Azure client."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def script(self, *replies: Reply | Failure) -> None:
        """Answer the next requests of a model with ``replies``, one each, then as before."""
        with self._lock:
            self._script.extend(replies)

    def clear(self) -> None:
        """Forget requests, script and prompts."""
        with self._lock:
            self.requests.clear()
            self._script.clear()
            self._prompts.clear()

    def start(self) -> Self:
        """Serve requests until :meth:`stop`."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving and free the port."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def take(self, request: Request, *, model_call: bool) -> tuple[Reply | Failure, int]:
        """Record a request; return what it is answered with, and the answer's number."""
        with self._lock:
            self.requests.append(request)
            number = next(self._numbers)
            if model_call and self._script:
                return self._script.popleft(), number
        return _default_reply(request.body if model_call else {}), number

    def outcome(self, request: Request) -> Outcome:
        """Return what a prefix cache without limits would say, and remember the prompt."""
        words = _words(request.body)
        lineage = request.headers.get(SESSION_HEADER.lower(), "")
        with self._lock:
            known = [old for prompts in self._prompts.values() for old in prompts]
            local = max((_num_common(old, words) for old in known), default=0)
            reason = Reason.OK if lineage in self._prompts else Reason.NEW_SESSION
            self._prompts.setdefault(lineage, []).append(words)
        # An engine computes at least the last token.
        local = min(local, max(len(words) - 1, 0))
        return Outcome(
            prompt=len(words),
            local=local,
            returned=0,
            computed=len(words) - local,
            plan=Plan.SINGLE,
            reason=reason,
        )


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Let clients leave in the middle of an answer; other errors are shown."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server_of: FakeServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        """Keep quiet: tests read :attr:`FakeServer.requests`."""

    def _serve(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        body = json.loads(raw) if raw else None
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(method=self.command, path=self.path, headers=headers, body=body)
        kind = _kind(self.path)
        reply, number = self.server_of.take(request, model_call=kind is not None)
        if isinstance(reply, Failure):
            self._fail(reply)
        elif self.path.endswith(NOTICES_PATH):
            if self.server_of.knows_notices:
                self._send_json({"accepted": True, "clipped_s": None, "why": None}, {}, 202)
            else:
                self._fail(_NOT_FOUND)
        elif kind is None:
            self._send_json(_other(self.path), {})
        else:
            self._answer(request, reply, kind(number, request.body, reply))

    def _answer(self, request: Request, reply: Reply, form: Form) -> None:
        outcome = self.server_of.outcome(request)
        form.outcome = outcome
        headers: dict[str, str | None] = {
            CALL_HEADER: format_dictionary({"v": PROTOCOL_VERSION}),
            OUTCOME_HEADER: outcome.to_header(),
            REQUEST_ID_HEADER: form.answer_id,
            **reply.headers,
        }
        if request.body.get("stream"):
            self._send_events(form.events(), headers, reply.cut_after)
        else:
            self._send_json(form.whole(), headers)

    def _fail(self, failure: Failure) -> None:
        if failure.status == 0:
            self.close_connection = True
            return
        error = {"error": {"message": failure.message, "type": "fake", "code": None}}
        self._send_json(error, failure.headers, failure.status)

    def _send_json(self, answer: Any, headers: Mapping[str, str | None], status: int = 200) -> None:
        raw = json.dumps(answer).encode()
        self._start(status, {"Content-Type": "application/json", **headers})
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _send_events(
        self, events: Iterator[bytes], headers: Mapping[str, str | None], cut_after: int | None
    ) -> None:
        self._start(200, {"Content-Type": "text/event-stream", **headers})
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for sent, event in enumerate(events):
            if sent == cut_after:
                self.close_connection = True
                return
            self.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
        self.wfile.write(b"0\r\n\r\n")

    def _start(self, status: int, headers: Mapping[str, str | None]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)


def _kind(path: str) -> type[Form] | None:
    path = path.partition("?")[0]
    if path.endswith("/chat/completions"):
        return Chat
    if path.endswith("/completions"):
        return Completions
    return Responses if path.endswith("/responses") else None


def _other(path: str) -> dict[str, Any]:
    if path.partition("?")[0].endswith("/embeddings"):
        row = {"object": "embedding", "index": 0, "embedding": [0.0]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return {"object": "list", "model": "fake", "data": [row], "usage": usage}
    model = {"id": "fake", "object": "model", "created": 1, "owned_by": "turncache"}
    return {"object": "list", "data": [model]}


def _default_reply(body: Mapping[str, Any]) -> Reply:
    items = body.get("messages", body.get("input"))
    last = items[-1] if isinstance(items, list) and items else {}
    last = last if isinstance(last, Mapping) else {}
    brings = last.get("role") == "tool" or str(last.get("type")).endswith("_output")
    names = [tool.get("function", tool).get("name") for tool in body.get("tools") or ()]
    if names and names[0] and not brings:
        return Reply(tools=[(names[0], "{}")])
    return Reply()


def _words(body: Any) -> list[str]:
    """Return the prompt as words: tools and system first, as templates have it."""
    parts = [body.get("tools"), body.get("instructions")]
    parts += body.get("messages") or []
    rest = body.get("input", body.get("prompt"))
    parts += rest if isinstance(rest, list) else [rest]
    return " ".join(json.dumps(part) for part in parts if part is not None).split()


def _num_common(old: Sequence[str], new: Sequence[str]) -> int:
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))
