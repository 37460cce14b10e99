"""Retries where the stock client has none: a stream that dies before its first chunk, and
fail-over between routers.

Needs the extra ``retry`` (tenacity). Around anything else a second layer only multiplies
upstream's own retries. Every try of a call carries the same session, turn and call.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Generic, Self, TypeVar

import openai

from turncache.errors import EnvironmentFault, UsageError

ClientT = TypeVar("ClientT", bound=openai.OpenAI | openai.AsyncOpenAI)
R = TypeVar("R")

ATTEMPTS: Final = 3
FIRST_WAIT_S: Final = 0.05
LONGEST_WAIT_S: Final = 2.0
#: Packages whose errors upstream lets out of a stream: openai 2 does not wrap them.
_TRANSPORTS: Final = frozenset({"httpx", "httpx2", "httpcore", "httpcore2"})


class OpenedStream:
    """An iterator over the chunks of a stream whose first one has arrived.

    Attributes:
        stream: upstream's stream.
        response: its HTTP response.
    """

    def __init__(self, stream: Any, first: list[Any]) -> None:
        """Go on with ``stream`` after ``first``."""
        self.stream = stream
        self.response = stream.response
        self._chunks = itertools.chain(first, stream)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._chunks)

    def close(self) -> None:
        """Close the stream."""
        self.stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncOpenedStream:
    """What :class:`OpenedStream` is, of an async client."""

    def __init__(self, stream: Any, first: list[Any]) -> None:
        """Go on with ``stream`` after ``first``."""
        self.stream = stream
        self.response = stream.response
        self._first = first
        self._rest = aiter(stream)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        return self._first.pop() if self._first else await anext(self._rest)

    async def close(self) -> None:
        """Close the stream."""
        await self.stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def open_stream(make: Callable[[], Any], *, attempts: int = ATTEMPTS) -> OpenedStream:
    """Open a stream, and open it again when its connection breaks before the first chunk.

    ::

        with turncache.open_stream(
            lambda: client.chat.completions.create(..., stream=True)
        ) as stream:
            for chunk in stream: ...

    The first chunk has arrived when this returns. From then on errors pass through,
    because a second try would show what was generated twice.

    Args:
        make: makes the call; called once per try.
        attempts: tries in all.

    Raises:
        EnvironmentFault: when tenacity is not installed.
    """

    def try_once() -> tuple[Any, list[Any]]:
        stream = make()
        try:
            return stream, [next(iter(stream))]
        except StopIteration:
            return stream, []
        except BaseException:
            stream.close()
            raise

    stream, first = _tenacity().Retrying(**_policy(_broke, attempts))(try_once)
    return OpenedStream(stream, first)


async def aopen_stream(
    make: Callable[[], Awaitable[Any]], *, attempts: int = ATTEMPTS
) -> AsyncOpenedStream:
    """Do for an async client what :func:`open_stream` does for a sync one."""

    async def try_once() -> tuple[Any, list[Any]]:
        stream = await make()
        try:
            return stream, [await anext(aiter(stream))]
        except StopAsyncIteration:
            return stream, []
        except BaseException:
            await stream.close()
            raise

    stream, first = await _tenacity().AsyncRetrying(**_policy(_broke, attempts))(try_once)
    return AsyncOpenedStream(stream, first)


class Failover(Generic[ClientT]):
    """Calls that go to the next router when one does not answer.

    ::

        calls = turncache.Failover(client, ["http://router-a:8000/v1", "http://router-b:8000/v1"])
        answer = calls(lambda client: client.chat.completions.create(...))

    It stays with the router that answered last: that is where the KV is. Upstream's own
    retries are off inside. An error of the caller's (4xx) passes through at once.

    Args:
        client: one of ours, or any openai client; its copies make the calls.
        base_urls: one router each, in order of preference.
        attempts: tries in all; every router twice unless given.

    Raises:
        UsageError: without any router.
    """

    def __init__(
        self, client: ClientT, base_urls: Sequence[str], *, attempts: int | None = None
    ) -> None:
        """Make a copy of ``client`` per router."""
        if isinstance(base_urls, str) or not base_urls:
            raise UsageError(f"base_urls={base_urls!r}: expected a list with at least one URL")
        self._clients: list[ClientT] = [
            client.with_options(base_url=url, max_retries=0)  # type: ignore[misc]
            for url in base_urls
        ]
        self._attempts = attempts or 2 * len(self._clients)
        self._at = 0

    @property
    def client(self) -> ClientT:
        """The client of the router that answered last."""
        return self._clients[self._at]

    def __call__(self, use: Callable[[ClientT], R]) -> R:
        """Return what ``use`` makes with a client, trying one router after the other."""
        used: list[int] = []

        def try_once() -> R:
            used.append(self._at)
            return use(self._clients[self._at])

        result: R = _tenacity().Retrying(**self._policy(used))(try_once)
        return result

    async def acall(self, use: Callable[[ClientT], Awaitable[R]]) -> R:
        """Do for an async client what calling does for a sync one."""
        used: list[int] = []

        async def try_once() -> R:
            used.append(self._at)
            return await use(self._clients[self._at])

        result: R = await _tenacity().AsyncRetrying(**self._policy(used))(try_once)
        return result

    def _policy(self, used: list[int]) -> dict[str, Any]:
        def go_on(_: Any) -> None:
            # Another thread may have left the silent router already.
            if self._at == used[-1]:
                self._at = (self._at + 1) % len(self._clients)

        return {**_policy(_does_not_answer, self._attempts), "before_sleep": go_on}


def _broke(error: BaseException) -> bool:
    """Whether the connection broke; an error that the server states is no reason to ask again."""
    family = type(error).__module__.partition(".")[0]
    return isinstance(error, openai.APIConnectionError) or family in _TRANSPORTS


def _does_not_answer(error: BaseException) -> bool:
    return isinstance(error, (openai.APIConnectionError, openai.InternalServerError))


def _policy(is_worth: Callable[[BaseException], bool], attempts: int) -> dict[str, Any]:
    tenacity = _tenacity()
    return {
        "retry": tenacity.retry_if_exception(is_worth),
        "stop": tenacity.stop_after_attempt(attempts),
        "wait": tenacity.wait_random_exponential(FIRST_WAIT_S, max=LONGEST_WAIT_S),
        "reraise": True,
    }


def _tenacity() -> Any:
    try:
        return importlib.import_module("tenacity")
    except ImportError:
        raise EnvironmentFault(
            "retries of streams and between routers need tenacity: pip install 'turncache[retry]'"
        ) from None
