"""One streamed answer: from the events of a stream to times, text and counts. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

#: Members of a delta that the model has produced. A role is none of them: servers send it
#: before the model has done anything.
_SAID: Final = ("content", "reasoning_content", "reasoning", "refusal")


class BrokenStream(ValueError):
    """Raised when a stream is not an answer that has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """One answer.

    Attributes:
        first_s: from sending the request to the first delta of any kind, None without one:
            never 0 for "not measured".
        content_s: to the first text for the user, None without one.
        total_s: to the end of the stream.
        between_s: mean time between tokens, None where it cannot be said.
        longest_gap_s: longest time between two deltas, None for fewer than two.
        text: for the user.
        tool_calls: as they go into the history.
        prompt: tokens by ``usage``, None without.
        answer: likewise.
        cached: prompt tokens that the answering engine found, None when it does not say.
    """

    first_s: float | None
    content_s: float | None
    total_s: float
    between_s: float | None
    longest_gap_s: float | None
    text: str
    tool_calls: tuple[dict[str, Any], ...] = ()
    prompt: int | None = None
    answer: int | None = None
    cached: int | None = None


@dataclass(slots=True)
class Collector:
    """Takes the data of a stream's events, in order."""

    _first_s: float | None = None
    _content_s: float | None = None
    _last_s: float | None = None
    _longest_s: float | None = None
    _text: list[str] = field(default_factory=list)
    _calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    _usage: Mapping[str, Any] | None = None
    _finished: bool = False

    def add(self, data: str, at_s: float) -> None:
        """Take the data of one event.

        Args:
            data: behind ``data:``.
            at_s: seconds since the request was sent.

        Raises:
            BrokenStream: no JSON, or an error that the server sent.
        """
        if data == "[DONE]":
            return
        try:
            chunk = json.loads(data)
        except ValueError as error:
            raise BrokenStream(f"an event is no JSON: {data[:80]!r}") from error
        if not isinstance(chunk, dict):
            raise BrokenStream(f"an event is no object: {data[:80]!r}")
        if chunk.get("error"):
            raise BrokenStream(f"the stream carries an error: {str(chunk['error'])[:200]}")
        if isinstance(chunk.get("usage"), dict):
            self._usage = chunk["usage"]
        for choice in (chunk.get("choices") or ())[:1]:
            self._finished = self._finished or choice.get("finish_reason") is not None
            self._delta(choice.get("delta") or {}, at_s)

    def _delta(self, delta: Mapping[str, Any], at_s: float) -> None:
        said = [name for name in _SAID if delta.get(name)]
        calls = delta.get("tool_calls") or ()
        if not said and not calls:
            return
        if self._first_s is None:
            self._first_s = at_s
        if self._last_s is not None:
            self._longest_s = max(self._longest_s or 0.0, at_s - self._last_s)
        self._last_s = at_s
        if delta.get("content"):
            self._text.append(delta["content"])
            if self._content_s is None:
                self._content_s = at_s
        for piece in calls:
            self._tool_call(piece)

    def _tool_call(self, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(
            piece.get("index") or 0,
            {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
        )
        call["id"] = piece.get("id") or call["id"]
        function = piece.get("function") or {}
        call["function"]["name"] += function.get("name") or ""
        call["function"]["arguments"] += function.get("arguments") or ""

    def end(self, at_s: float) -> Streamed:
        """Return the answer of a stream that has ended.

        Raises:
            BrokenStream: it ended without a ``finish_reason``: it was cut off.
        """
        if not self._finished:
            raise BrokenStream("the stream ended without a finish_reason")
        usage = self._usage or {}
        answer = usage.get("completion_tokens")
        between_s = None
        if self._first_s is not None and self._last_s is not None and answer and answer > 1:
            # By tokens that the server counted: one event may hold several.
            between_s = (self._last_s - self._first_s) / (answer - 1)
        details = usage.get("prompt_tokens_details") or {}
        return Streamed(
            first_s=self._first_s,
            content_s=self._content_s,
            total_s=at_s,
            between_s=between_s,
            longest_gap_s=self._longest_s,
            text="".join(self._text),
            tool_calls=tuple(self._calls[index] for index in sorted(self._calls)),
            prompt=usage.get("prompt_tokens"),
            answer=answer,
            cached=details.get("cached_tokens"),
        )


class Lines:
    """Cuts a stream of bytes into the data of its events, however it comes in pieces."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> Iterator[str]:
        """Yield the data of every event line that is complete."""
        *whole, self._rest = (self._rest + piece).split(b"\n")
        yield from _data(whole)


def _data(lines: Iterable[bytes]) -> Iterator[str]:
    for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip().decode("utf-8", "replace")
