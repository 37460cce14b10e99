"""One call, from the caller's options to the caller's result: the sync and the async shell."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from turncache.family import binding_of
from turncache.streams import watched
from turncache.tagging import begin
from turncache.wire import araw_of, raw_of


def call(
    client: Any,
    upstream: Callable[..., Any],
    cast_to: Any,
    options: Any,
    *,
    stream: bool,
    stream_cls: Any,
) -> Any:
    """Make one call with ``upstream``, the ``request()`` of an openai client.

    Returns what upstream returns, and raises what it raises.
    """
    attempt = begin(binding_of(client), client.base_url, cast_to, options, stream=stream)
    if attempt is None:
        return upstream(cast_to, options, stream=stream, stream_cls=stream_cls)
    try:
        if not attempt.asks_raw:
            kind = watched(stream_cls) if stream and stream_cls is not None else stream_cls
            answer = upstream(cast_to, attempt.options, stream=stream, stream_cls=kind)
            attempt.answered(answer, stream=stream)
            return answer
        answer = upstream(raw_of(cast_to), attempt.options, stream=False, stream_cls=stream_cls)
        parse = attempt.answered_raw(answer)
        return attempt.result(answer if parse is None else parse())
    except BaseException as error:
        attempt.failed(error)
        raise


async def acall(
    client: Any,
    upstream: Callable[..., Awaitable[Any]],
    cast_to: Any,
    options: Any,
    *,
    stream: bool,
    stream_cls: Any,
) -> Any:
    """Make one call with ``upstream``, the ``request()`` of an async openai client."""
    binding = binding_of(client)
    attempt = begin(binding, client.base_url, cast_to, options, stream=stream)
    if attempt is None:
        return await upstream(cast_to, options, stream=stream, stream_cls=stream_cls)
    binding.speaker.use_running_loop()
    try:
        if not attempt.asks_raw:
            kind = watched(stream_cls) if stream and stream_cls is not None else stream_cls
            answer = await upstream(cast_to, attempt.options, stream=stream, stream_cls=kind)
            attempt.answered(answer, stream=stream)
            return answer
        answer = await upstream(
            araw_of(cast_to), attempt.options, stream=False, stream_cls=stream_cls
        )
        parse = attempt.answered_raw(answer)
        return attempt.result(answer if parse is None else await parse())
    except BaseException as error:
        attempt.failed(error)
        raise
