"""Calls over HTTP: streamed, timed from before the request to each delta at the client."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import aiohttp

from turncache.errors import EngineFault, ProtocolError
from turncache.protocol import CALL_HEADER, OUTCOME_HEADER, REQUEST_ID_HEADER, Outcome
from turncache_tools.bench.stream import BrokenStream, Collector, Lines, Streamed

_PATH: Final = "/v1/chat/completions"
_CONNECT_TIMEOUT_S: Final = 10.0
_SHORT_TIMEOUT_S: Final = 10.0
#: How often a record that is not final yet is asked for.
_RECORD_TRIES: Final = 3
_RECORD_PAUSE_S: Final = 0.02


class CallFailed(Exception):
    """Raised when a call has no answer; the text says why, short and without content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """An answer with what the server said about it.

    Attributes:
        streamed: times, text and counts.
        outcome: the final record's, else the header's, None where there is neither.
        ours: the answer carries our header.
    """

    streamed: Streamed
    outcome: Outcome | None
    ours: bool


class Client:
    """One connection pool; nothing is retried.

    Args:
        key: sent as bearer token.
        timeout_s: of one call.
        clock: monotonic seconds.
    """

    def __init__(
        self, key: str, *, timeout_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._headers = {"authorization": f"Bearer {key}"}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=_CONNECT_TIMEOUT_S)
        self._short = aiohttp.ClientTimeout(total=_SHORT_TIMEOUT_S)
        self._clock = clock
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=0)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=self._timeout, headers=self._headers, trust_env=False
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._session is not None
        await self._session.close()

    def now_s(self) -> float:
        """Return what the clock says."""
        return self._clock()

    async def ask(
        self,
        url: str,
        body: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        *,
        since_s: float | None = None,
    ) -> Asked:
        """Make one streamed chat completion.

        Args:
            url: base URL, without ``/v1``.
            body: without ``stream``.
            headers: of the session.
            since_s: where times count from, None for now.

        Raises:
            CallFailed: no connection, an error status, or a stream that is no answer.
        """
        assert self._session is not None
        whole = {**body, "stream": True, "stream_options": {"include_usage": True}}
        collector, lines = Collector(), Lines()
        try:
            started_s = self._clock() if since_s is None else since_s
            async with self._session.post(f"{url}{_PATH}", json=whole, headers=headers) as response:
                if response.status != 200:
                    raise CallFailed(f"status {response.status}: {await _message(response)}")
                async for piece in response.content.iter_any():
                    at_s = self._clock() - started_s
                    for data in lines.feed(piece):
                        collector.add(data, at_s)
                streamed = collector.end(self._clock() - started_s)
                found = response.headers
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}"[:200]) from error
        except BrokenStream as error:
            raise CallFailed(str(error)) from error
        ours = CALL_HEADER in found
        outcome = _outcome(found.get(OUTCOME_HEADER))
        if ours and REQUEST_ID_HEADER in found:
            # Not timed: the record is complete after the last byte only.
            outcome = await self._record(url, found[REQUEST_ID_HEADER]) or outcome
        return Asked(streamed=streamed, outcome=outcome, ours=ours)

    async def whole(
        self, url: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> dict[str, Any]:
        """Make one chat completion that is not streamed; return it.

        Raises:
            CallFailed: no connection, an error status, or no answer.
        """
        assert self._session is not None
        try:
            async with self._session.post(f"{url}{_PATH}", json=body, headers=headers) as response:
                if response.status != 200:
                    raise CallFailed(f"status {response.status}: {await _message(response)}")
                found = _parsed(await response.text(errors="replace"))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CallFailed(f"{type(error).__name__}: {error}"[:200]) from error
        if not isinstance(found, dict) or not found.get("choices"):
            raise CallFailed("the answer is no chat completion")
        return found

    async def _record(self, url: str, request: str) -> Outcome | None:
        outcome = None
        for _ in range(_RECORD_TRIES):
            status, found = await self.json("GET", f"{url}/v1/calls/{request}")
            if status != 200 or not isinstance(found, dict):
                return outcome
            outcome = _of_record(found) or outcome
            if found.get("final"):
                return outcome
            await asyncio.sleep(_RECORD_PAUSE_S)
        return outcome

    async def json(self, method: str, url: str, body: Any = None) -> tuple[int, Any]:
        """Make a short request; return its status and JSON, None where it is none.

        Raises:
            EngineFault: there is no answer.
        """
        status, text = await self.text(method, url, body)
        return status, _parsed(text)

    async def text(self, method: str, url: str, body: Any = None) -> tuple[int, str]:
        """Make a short request; return its status and text.

        Raises:
            EngineFault: there is no answer.
        """
        assert self._session is not None
        try:
            async with self._session.request(
                method, url, json=body, timeout=self._short
            ) as response:
                return response.status, await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFault(url, _said(error)) from error


def _said(error: Exception) -> str:
    """Return what is known of a failure; no connection is the usual one, and needs no more."""
    if isinstance(error, aiohttp.ClientConnectorError):
        known = (error.errno or 0) > 0
        why = os.strerror(error.errno or 0) if known else error.os_error.strerror
        return f"no connection ({why}): is it running there?"
    return f"no answer: {type(error).__name__}: {error}"


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


async def _message(response: aiohttp.ClientResponse) -> str:
    found = _parsed(await response.text(errors="replace"))
    error = found.get("error", found) if isinstance(found, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))[:160]
    return str(error or response.reason)[:160]


def _outcome(text: str | None) -> Outcome | None:
    if text is None:
        return None
    try:
        return Outcome.from_header(text)
    except ProtocolError as error:
        raise CallFailed(f"the answer's tokens do not add up: {error}") from error


def _of_record(record: Mapping[str, Any]) -> Outcome | None:
    numbers = record.get("outcome")
    if not isinstance(numbers, dict):
        return None
    members: Sequence[str] = ("prompt", "local", "returned", "computed", "lost")
    words = ", ".join(f"{name}={numbers.get(name)}" for name in members)
    return _outcome(f"{words}, plan={record.get('plan')}, reason={record.get('reason')}")
