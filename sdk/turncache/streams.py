"""Streams that tell when the first token came and how the call ended.

Upstream makes the stream itself, of the class that it is given: ours is a subclass of the
one that the caller asked for, made once per class. Results stay upstream's; nothing is
wrapped.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai

from turncache.attempt import STREAMS, Attempt


@functools.lru_cache(maxsize=64)
def watched(stream_cls: Any) -> Any:
    """Return the subclass of ``stream_cls`` that reports to the attempt of its response.

    Args:
        stream_cls: ``Stream[Chunk]``, ``AsyncStream[Chunk]`` or a subclass of either.
    """
    base = typing.get_origin(stream_cls) or stream_cls
    if not isinstance(base, type):
        return stream_cls
    if issubclass(base, openai.AsyncStream):
        made: Any = _async_class(stream_cls)
    elif issubclass(base, openai.Stream):
        made = _sync_class(stream_cls)
    else:
        return stream_cls
    made.__name__, made.__qualname__ = base.__name__, base.__qualname__
    made.__module__, made.__doc__ = base.__module__, base.__doc__
    return made


def _sync_class(stream_cls: Any) -> type:
    class Watched(stream_cls):  # type: ignore[misc]
        def __stream__(self) -> Iterator[Any]:
            chunks = super().__stream__()
            attempt = STREAMS.get(self.response)
            if attempt is None:
                yield from chunks
                return
            take = attempt.chunk
            try:
                for chunk in chunks:
                    take(chunk)
                    yield chunk
                attempt.stream_ended()
            except Exception as error:
                attempt.failed(error)
                raise
            finally:
                attempt.stream_left()
                chunks.close()

        def close(self) -> None:
            super().close()
            attempt = STREAMS.get(self.response)
            if attempt is not None:
                attempt.stream_left()

    return Watched


def _async_class(stream_cls: Any) -> type:
    class Watched(stream_cls):  # type: ignore[misc]
        def __stream__(self) -> AsyncIterator[Any]:
            return _AsyncChunks(super().__stream__(), self.response)

        async def close(self) -> None:
            await super().close()
            attempt = STREAMS.get(self.response)
            if attempt is not None:
                attempt.stream_left()

    return Watched


class _AsyncChunks:
    """Upstream's chunks, told to the attempt of their response.

    No generator: one around upstream's would close it a second time when both are
    collected, which event loops complain about.
    """

    __slots__ = ("_attempt", "_chunks", "_response")

    def __init__(self, chunks: AsyncIterator[Any], response: Any) -> None:
        self._chunks = chunks
        self._response = response
        self._attempt: Attempt | None = None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        attempt = self._attempt
        if attempt is None:
            # Upstream makes the iterator before the call that it belongs to is answered.
            attempt = self._attempt = STREAMS.get(self._response)
            if attempt is None:
                return await anext(self._chunks)
        try:
            chunk = await anext(self._chunks)
        except StopAsyncIteration:
            if attempt.call.ended_s is None:
                attempt.stream_ended()
            raise
        except Exception as error:
            attempt.failed(error)
            raise
        except BaseException:
            attempt.stream_left()
            raise
        attempt.chunk(chunk)
        return chunk

    async def aclose(self) -> None:
        await self._chunks.aclose()  # type: ignore[attr-defined]

    def __del__(self) -> None:
        if self._attempt is not None:
            self._attempt.stream_left()
