"""The end of a call, read from the bytes of its answer. Pure.

A side channel: nothing here changes a byte. Events are split on bytes, before any
decoding, so that a network read may end inside a character, a line end or a name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from turncache.protocol import Boundary
from turncache_server.router.following import Said

DONE: Final = b"[DONE]"
#: What vLLM says of an answer that it has not finished. One that it breaks off (``abort``: it is
#: stopped, put to sleep, or paused for new weights) comes with status 200 and with the words so
#: far; OpenAI's API has no such reason, and a client would take half an answer for all of it.
_GIVEN_UP: Final = frozenset({"error", "abort"})

_BOM: Final = b"\xef\xbb\xbf"
# A CR that is followed by LF is half of a line end.
_LINE_END: Final = re.compile(rb"\r\n|\n|\r(?!\n)")
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n)){2}")
#: Bytes before the end of what was searched in which an event's end may have begun.
_END_BYTES: Final = 4
_DATA: Final = b"data: "
#: Bytes of a plain event that are not data.
PLAIN_FRAME: Final = len(_DATA + b"\n\n")


class SseEvent(NamedTuple):
    """One event of a stream.

    Attributes:
        raw: its bytes, comments and the blank line included.
        data: the value of its data lines, None for comments and other fields alone.
    """

    raw: bytes
    data: bytes | None


class SseSplitter:
    """Splits a byte stream into events (WHATWG HTML, 9.2).

    The concatenated ``raw`` is the stream, and the sequence of ``data`` is the same for
    every way of cutting it into chunks.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._after_cr = False
        self._started = False

    @property
    def pending_bytes(self) -> int:
        """Size of the event that has begun and not ended."""
        return len(self._buffer)

    def plain(self, chunk: bytes) -> list[bytes] | None:
        """Return the data of the events in a chunk of whole events of one data line each.

        Nearly every read from an engine is one. None for any other, which has not been taken.
        """
        if self._buffer or self._after_cr or not chunk.startswith(_DATA):
            return None
        if b"\r" in chunk or not chunk.endswith(b"\n\n"):
            return None
        # With two line ends for each of them, every event is one line.
        data = chunk[len(_DATA) : -2].split(b"\n\n" + _DATA)
        if chunk.count(b"\n") != 2 * len(data):
            return None
        self._started = True
        return data

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Return the events that end in ``chunk``."""
        events: list[SseEvent] = []
        if self._after_cr and chunk:
            self._after_cr = False
            if chunk.startswith(b"\n"):  # the second half of the last event's line end
                events.append(SseEvent(b"\n", None))
                chunk = chunk[1:]
        self._buffer += chunk
        while end := self._event_end():
            raw = bytes(self._buffer[:end])
            del self._buffer[:end]
            self._searched = 0
            events.append(self._event(raw))
            self._after_cr = not self._buffer and raw.endswith(b"\r")
        self._searched = len(self._buffer)
        return events

    def close(self) -> list[SseEvent]:
        """Return the last event of a stream that ended without a blank line."""
        raw = bytes(self._buffer)
        self._buffer.clear()
        self._searched = 0
        return [self._event(raw)] if raw else []

    def _event_end(self) -> int:
        """Return the index after the first event in the buffer, 0 when none has ended."""
        start = max(0, self._searched - _END_BYTES)
        if b"\r" not in self._buffer:  # no engine writes one, and this is 50 times as fast
            found = self._buffer.find(b"\n\n", start)
            return 0 if found < 0 else found + 2
        match = _EVENT_END.search(self._buffer, start)
        return 0 if match is None else match.end()

    def _event(self, raw: bytes) -> SseEvent:
        text = raw
        if not self._started:
            self._started = True
            text = raw.removeprefix(_BOM)
        lines = _LINE_END.split(text) if b"\r" in text else text.split(b"\n")
        values = [
            line[5:].removeprefix(b" ")
            for line in lines
            if line.startswith(b"data") and line[4:5] in (b"", b":")
        ]
        return SseEvent(raw, b"\n".join(values) if values else None)


_NULL: Final = msgspec.Raw(b"null")


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a call, as the engine that answered counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Function(msgspec.Struct, frozen=True, gc=False):
    name: str | None = None
    arguments: str | None = None


class _ToolCall(msgspec.Struct, frozen=True, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Message(msgspec.Struct, frozen=True, gc=False):
    content: Any = None
    tool_calls: list[_ToolCall] | None = None


class _Choice(msgspec.Struct, frozen=True, gc=False):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Answer(msgspec.Struct, frozen=True, gc=False):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: msgspec.Raw = _NULL


_answers: Final = msgspec.json.Decoder(_Answer)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """How a call ended.

    Attributes:
        problem: why the call counts as failed, None when it ended well.
        finish_reason: of the first choice.
        boundary: which wait begins, None when the call failed.
        tool_names: names of the complete tool calls, in order.
        usage: tokens, when the engine reported them.
        answer_id: by which a later request may continue an answer that the engine keeps.
    """

    problem: str | None
    finish_reason: str | None = None
    boundary: Boundary | None = None
    tool_names: tuple[str, ...] = ()
    usage: Usage | None = None
    answer_id: str | None = None


@dataclass(slots=True)
class ToolState:
    """One tool call, as far as it has been seen."""

    name: str = ""
    arguments: list[str] = field(default_factory=list)
    id: str = ""

    def add(self, name: str | None, arguments: str | None) -> None:
        """Take a piece: the name comes once, the arguments come in pieces."""
        self.name = self.name or name or ""
        if arguments:
            self.arguments.append(arguments)

    @property
    def complete(self) -> bool:
        """Whether a client can execute it."""
        if not self.name:
            return False
        text = "".join(self.arguments)
        if not text.strip():
            return True  # a tool without parameters
        try:
            return isinstance(msgspec.json.decode(text), dict)
        except msgspec.DecodeError:
            return False


class ChatEnding:
    """Collects how a chat completion ends, from its chunks or from its whole body.

    Args:
        num_choices: answers that were asked for; all of them must finish.
        final: the client said that nothing follows this call.
    """

    def __init__(self, *, num_choices: int, final: bool = False) -> None:
        self._num_choices = num_choices
        self._final = final
        self._finished: dict[int, str] = {}
        self._tools: dict[tuple[int, int], ToolState] = {}
        self._usage: Usage | None = None
        self._error = False
        self._text: list[str] = []
        self.num_unreadable = 0

    @property
    def engine_reported_error(self) -> bool:
        """The engine itself has told the client that the call failed."""
        return self._error

    def add(self, data: bytes) -> bool:
        """Take one chunk's data, or the whole body of an answer without streaming.

        What does not read as an answer is counted and otherwise ignored: it goes to the
        client all the same.

        Returns:
            Whether it is ``[DONE]``: the engine tells the client that the answer is over.
        """
        if data == DONE:
            return True
        try:
            answer = _answers.decode(data)
        except msgspec.DecodeError:
            self.num_unreadable += 1
            return False
        if answer.error is not _NULL and bytes(answer.error) != b"null":
            self._error = True
        if answer.usage is not None:
            self._usage = answer.usage
        for choice in answer.choices:
            message = choice.delta or choice.message
            if message is not None:
                if message.content and choice.index == 0:
                    self._text.append(message.content)
                if message.tool_calls:
                    self._add_calls(choice.index, message.tool_calls)
            if choice.finish_reason is not None:
                self._finished[choice.index] = choice.finish_reason
        return False

    def _add_calls(self, choice: int, calls: list[_ToolCall]) -> None:
        for at, call in enumerate(calls):
            index = at if call.index is None else call.index
            tool = self._tools.setdefault((choice, index), ToolState())
            tool.id = tool.id or call.id or ""
            if call.function is not None:
                tool.add(call.function.name, call.function.arguments)

    def ending(self) -> Ending:
        """Judge what has been seen so far as the whole answer."""
        problem = self._problem()
        if problem is not None:
            return Ending(problem=problem, finish_reason=self._finished.get(0), usage=self._usage)
        names = complete_names(self._tools[key] for key in sorted(self._tools))
        return Ending(
            problem=None,
            finish_reason=self._finished[min(self._finished)],
            boundary=boundary_after(names, final=self._final),
            tool_names=names,
            usage=self._usage,
        )

    def said(self) -> Said:
        """Return what the model has said in its first choice, tool calls as it wrote them."""
        tools = [self._tools[key] for key in sorted(self._tools) if key[0] == 0]
        return Said(
            text="".join(map(str, self._text)),
            calls=tuple((tool.name, "".join(tool.arguments)) for tool in tools),
            call_ids=tuple(tool.id for tool in tools),
        )

    def _problem(self) -> str | None:
        if self._error:
            return "the engine reported an error"
        for reason in self._finished.values():
            if reason in _GIVEN_UP:
                return f"the engine gave up on the answer (finish_reason {reason})"
        if len(self._finished) < self._num_choices:
            return "the answer ended without a finish_reason"
        return None


def complete_names(tools: Iterable[ToolState]) -> tuple[str, ...]:
    """Return the names of the tool calls that a client can execute, in order."""
    return tuple(tool.name for tool in tools if tool.complete)


def boundary_after(tool_names: tuple[str, ...], *, final: bool) -> Boundary:
    """Say which wait begins after an answer that ended well.

    finish_reason alone does not tell: vLLM says "stop" for a call of a named function, and
    "length" may have cut a tool call in half, which no client can execute.
    """
    if final:
        return Boundary.FINAL
    return Boundary.TOOL if tool_names else Boundary.USER
