"""One call, from the caller's options to the caller's result: the sync and the async shell."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from turncache.attempt import Attempt
from turncache.family import binding_of
from turncache.streams import watched
from turncache.tagging import begin


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
        answer = upstream(
            cast_to, attempt.options, stream=stream, stream_cls=_watched(stream, stream_cls)
        )
        parse = _taken(attempt, answer, stream)
        return answer if parse is None else parse()
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
        answer = await upstream(
            cast_to, attempt.options, stream=stream, stream_cls=_watched(stream, stream_cls)
        )
        parse = _taken(attempt, answer, stream)
        if parse is None:
            return answer
        parsed = parse()
        # Upstream has announced that parse() of async raw responses becomes a coroutine.
        return await parsed if inspect.isawaitable(parsed) else parsed
    except BaseException as error:
        attempt.failed(error)
        raise


def _watched(stream: bool, stream_cls: Any) -> Any:
    return watched(stream_cls) if stream and stream_cls is not None else stream_cls


def _taken(attempt: Attempt, answer: Any, stream: bool) -> Callable[[], Any] | None:
    """Take upstream's answer; return how to parse it when it is raw because we asked."""
    attempt.answered(answer, stream=stream)
    # Another library that wraps request() may have parsed it already.
    return getattr(answer, "parse", None) if attempt.asks_raw else None
