"""Relaying an answer that has begun: engine to client, bytes as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from turncache.protocol import STRIPPED_BODY_MEMBERS
from turncache_server.router.apis.api import Collector
from turncache_server.router.body import drop_members
from turncache_server.router.config import RouterConfig
from turncache_server.router.ending import Ending
from turncache_server.router.errors import SERVER_ERROR, ApiError, LegFailed
from turncache_server.router.opening import Opened
from turncache_server.router.passing import AnswerStream
from turncache_server.router.stream import ClientAnswer

#: A proxy that collects a stream before passing it on would hide every token until the last.
_STREAM_HEADERS: Final = {"cache-control": "no-cache", "x-accel-buffering": "no"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Relayed:
    """How relaying ended.

    Attributes:
        response: the answer, which has been sent.
        code: its HTTP status.
        problem: kind of failure, None when the call ended well.
        ending: how the call ended, None when its answer could not be read.
        failure: what broke the engine's answer.
    """

    response: web.StreamResponse
    code: int
    problem: str | None = None
    ending: Ending | None = None
    failure: LegFailed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """One answer on its way.

    Attributes:
        answer: the answer to the client.
        opened: the engine's answer.
        headers: headers for the client.
        collector: takes the answer's events.
        config: the router's settings.
        completed: called once when the answer is known to have ended well, before its last
            bytes go out.
    """

    answer: ClientAnswer
    opened: Opened
    headers: Mapping[str, str]
    collector: Collector
    config: RouterConfig
    completed: Callable[[Ending], None]

    async def stream(self) -> Relayed:
        """Relay server-sent events; a failure becomes the stream's terminal event.

        Raises:
            ClientGone: the client has left.
        """
        stream = AnswerStream(self.collector, self.completed)
        failure: LegFailed | None = None
        last = b""
        try:
            last = await self._in_time(self._pass_on(stream))
        except LegFailed as error:
            # After its last event the client has everything, however the connection ends.
            failure = None if stream.done else error
        ending = stream.ending
        if failure is None and ending.problem is None:
            return Relayed(response=await self.answer.end(last), code=200, ending=ending)
        if stream.client_knows:
            response = await self.answer.end(last)
        else:
            await self.answer.write(last)
            response = await self.answer.fail(self._error(ending, failure))
        return Relayed(
            response=response,
            code=200,
            problem="incomplete" if failure is None else failure.kind,
            ending=ending,
            failure=failure,
        )

    async def whole(self) -> Relayed:
        """Relay an answer in one piece; one that did not end well becomes a 502.

        Raises:
            ClientGone: the client has left.
        """
        try:
            body = await self._in_time(
                self.opened.leg.rest(self.opened.first, self.config.max_answer_bytes)
            )
        except LegFailed as failure:
            error = failure.to_api_error(self.config.retry_after_s)
            response = await self.answer.fail(error)
            return Relayed(
                response=response, code=error.status, problem=failure.kind, failure=failure
            )
        self.collector.add(body)
        ending = self.collector.ending()
        if ending.problem is not None:
            error = self._error(ending, None)
            response = await self.answer.fail(error)
            return Relayed(
                response=response, code=error.status, problem="incomplete", ending=ending
            )
        self.completed(ending)
        response = await self.answer.whole(
            200, self.headers, drop_members(body, STRIPPED_BODY_MEMBERS)
        )
        return Relayed(response=response, code=200, ending=ending)

    async def _in_time(self, answer: Awaitable[bytes]) -> bytes:
        """Await what is done of an answer, within the time that one may take.

        Raises:
            LegFailed: it took longer.
        """
        limit_s = self.config.answer_timeout_s
        if not limit_s:
            return await answer
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError as error:
            raise LegFailed(
                self.opened.engine.name,
                "too_long",
                f"was still answering after {limit_s:g} s",
                consumed=True,
            ) from error

    async def _pass_on(self, stream: AnswerStream) -> bytes:
        """Pass the events on as they come; return the last of them, which go out with the end.

        Raises:
            ClientGone: the client has left.
            LegFailed: the engine broke its answer off.
        """
        answer, leg, last = self.answer, self.opened.leg, b""

        def take(chunk: bytes) -> bool:
            nonlocal last
            passed = stream.feed(chunk)
            if leg.ended:
                last = passed
                return True
            keeps_up = answer.send(passed)
            self._check_size(stream)
            return keeps_up

        await self._begin(stream.feed(self.opened.first))
        self._check_size(stream)
        goes_on = True
        while goes_on:
            await answer.drained()
            goes_on = await leg.flow(take)
        return last + stream.close()

    def _check_size(self, stream: AnswerStream) -> None:
        """Refuse an event that is too large to wait for its end.

        Raises:
            LegFailed: it is.
        """
        if stream.pending_bytes > self.config.max_event_bytes:
            raise LegFailed(
                self.opened.engine.name,
                "bad_answer",
                f"sent an event of more than {self.config.max_event_bytes} bytes",
                consumed=True,
            )

    async def _begin(self, first: bytes) -> None:
        if self.answer.started:
            await self.answer.write(first)
        else:
            await self.answer.start(200, {**self.headers, **_STREAM_HEADERS}, first)

    def _error(self, ending: Ending, failure: LegFailed | None) -> ApiError:
        if failure is not None:
            return failure.to_api_error(self.config.retry_after_s)
        return ApiError(
            502,
            f"The answer is incomplete: {ending.problem}. Nothing of the session is lost; try "
            "again.",
            kind=SERVER_ERROR,
            code="engine_incomplete",
            retry_after_s=self.config.retry_after_s,
        )
