"""Clients that somebody else makes: a framework's own, or the module-level ``openai.chat``.

Opt-in, because it changes upstream's classes for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import openai

from turncache._lock import LOCK
from turncache.calling import acall, call
from turncache.client import Bound

# Upstream's class -> (the request() that was set by instrument(), what it replaced in the
# class itself, or None when the class inherited it).
_patched: Final[dict[type, tuple[Callable[..., Any], Callable[..., Any] | None]]] = {}


def instrument() -> None:
    """Give every openai client of this process what our clients have, existing ones too.

    Calls of our own clients stay as they are. Doing it twice is doing it once.
    """
    with LOCK.held:
        for upstream, made in ((openai.OpenAI, _sync), (openai.AsyncOpenAI, _async)):
            if upstream not in _patched:
                request = made(upstream.request)
                _patched[upstream] = (request, vars(upstream).get("request"))
                upstream.request = request  # type: ignore[method-assign]


def uninstrument() -> None:
    """Undo :func:`instrument`.

    A class that another library has patched since is left alone: putting back what was
    there before would undo the other's work too. Our part of it then passes calls on.
    """
    with LOCK.held:
        for upstream, (request, before) in list(_patched.items()):
            del _patched[upstream]
            if vars(upstream).get("request") is not request:
                continue
            if before is None:
                del upstream.request  # type: ignore[attr-defined]
            else:
                upstream.request = before  # type: ignore[attr-defined]


def _sync(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def request(
        self: Any, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None
    ) -> Any:
        plain = upstream.__get__(self)
        if isinstance(self, Bound) or not _is_on(request):
            return plain(cast_to, options, stream=stream, stream_cls=stream_cls)
        return call(self, plain, cast_to, options, stream=stream, stream_cls=stream_cls)

    return request


def _async(upstream: Callable[..., Any]) -> Callable[..., Any]:
    async def request(
        self: Any, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None
    ) -> Any:
        plain = upstream.__get__(self)
        if isinstance(self, Bound) or not _is_on(request):
            return await plain(cast_to, options, stream=stream, stream_cls=stream_cls)
        return await acall(self, plain, cast_to, options, stream=stream, stream_cls=stream_cls)

    return request


def _is_on(request: Callable[..., Any]) -> bool:
    return any(made is request for made, _ in _patched.values())
