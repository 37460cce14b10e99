"""A fake vLLM as a program, for what happens around an engine: start, death, left-overs.

Standard library only. ``write_python`` makes an executable that stands for the interpreter of
an engine environment: asked for its facts it names a vLLM, told to run vLLM's API server it
runs this one, which answers ``/health``, ``/v1/models`` and completions, and starts children
that are as hard to end as an engine's: they ignore TERM, and one leaves the session.

Everything that a test starts carries :data:`MARK` in its environment, so that it can be found.

Flags of its own: ``--fail TEXT`` prints TEXT and exits with 1; ``--never-ready``;
``--die-on-call``; ``--echo-facts`` logs arguments and environment.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SERVER_MODULE = "vllm.entrypoints.openai.api_server"
FACTS: Mapping[str, Any] = {
    "version": "0.32.0",
    "cuda": False,
    "nixl": True,
    "turncache": True,
}
#: Name of the variable by which :func:`processes_with` finds processes.
MARK = "TURNCACHE_TEST_MARK"

_STUBBORN = ("bash", "-c", "trap '' TERM; exec sleep 300")


def write_python(folder: Path, **facts: Any) -> str:
    """Write the fake interpreter and return its path.

    Args:
        folder: where it goes.
        facts: over :data:`FACTS`; ``version=None`` is an environment without vLLM.
    """
    path = folder / "python"
    words = (sys.executable, __file__, json.dumps({**FACTS, **facts}))
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
    path.chmod(0o755)
    return str(path)


def processes_with(mark: str) -> list[int]:
    """Return the live processes that were started with ``mark`` in their environment."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes()  # a zombie's is empty
        except OSError:
            continue
        if f"{MARK}={mark}".encode() in environment.split(b"\0"):
            found.append(int(entry.name))
    return found


class _Handler(BaseHTTPRequestHandler):
    options: Mapping[str, str]

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer({} if "never-ready" not in self.options else None)
        else:
            name = self.options["served-model-name"]
            self._answer({"object": "list", "data": [{"id": name, "object": "model"}]})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "die-on-call" in self.options:
            print("a bad thing happened in the engine", flush=True)
            os._exit(1)
        self._answer(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": self.options["served-model-name"],
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "hello"},
                        "text": "hello",
                        "finish_reason": "stop",
                    }
                ],
                "usage": {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101},
                "kv_transfer_params": {"remote_engine_id": "fake"},
            }
        )

    def _answer(self, data: Mapping[str, Any] | None) -> None:
        body = json.dumps(data).encode()
        self.send_response(503 if data is None else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        print(format % args, flush=True)


def _serve(arguments: list[str]) -> None:
    options = _options(arguments)
    if "fail" in options:
        sys.exit(options["fail"])
    if "echo-facts" in options:
        print(json.dumps({"argv": arguments, "environ": dict(os.environ)}), flush=True)
    subprocess.Popen(_STUBBORN)
    subprocess.Popen(("setsid", "--fork", *_STUBBORN)).wait()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _Handler.options = options
    ThreadingHTTPServer((options["host"], int(options["port"])), _Handler).serve_forever()


def _options(arguments: list[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    name = ""
    for argument in arguments:
        if argument.startswith("--"):
            name = argument.removeprefix("--")
            options[name] = ""
        else:
            options[name] = argument
    return options


def main() -> None:
    """Be the interpreter: a probe, or vLLM's API server."""
    facts, *arguments = sys.argv[1:]
    if arguments[0] == "-c":
        print(facts)
    elif arguments[:2] == ["-m", SERVER_MODULE]:
        _serve(arguments[2:])
    else:
        sys.exit(f"the fake interpreter cannot run {arguments}")


if __name__ == "__main__":
    main()
