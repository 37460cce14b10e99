"""Drop-in clients: upstream's, with the session and cause of every call said to the server.

Each is a subclass that overrides the public ``request()`` and ``copy()``. Every resource
method, helper and raw variant comes through ``request()``, once per logical call, with
upstream's retries inside. Constructors, results, types, errors and streams are upstream's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import openai

from turncache.calling import acall, call
from turncache.errors import UsageError
from turncache.family import bind, binding_of
from turncache.sessions import Session, session
from turncache.settings import Profile, parse_hosts, parse_profile, set_up_logging

set_up_logging()


class Bound:
    """What the four clients add to upstream's."""

    def with_session(self, session_or_id: Session | str) -> Self:
        """Return a copy of the client whose calls all belong to one session.

        For web applications, where a streaming answer runs after the handler's block.

        Args:
            session_or_id: a session, or the id of one.

        Raises:
            ProtocolError: on an illegal id.
        """
        owner = session_or_id if isinstance(session_or_id, Session) else session(session_or_id)
        return self._copied(session=owner)

    def with_profile(self, profile: Profile | str, *, hosts: Sequence[str] = ()) -> Self:
        """Return a copy of the client with another profile.

        Args:
            profile: ``auto``, ``vllm`` (the same in the body, for routers that drop
                headers) or ``off``.
            hosts: hosts that may be told about sessions, in addition to what ``auto``
                finds by itself; ``*.example.com`` and ``host:port`` are understood.

        Raises:
            ConfigError: on an unknown profile or something that is no host.
        """
        if isinstance(hosts, str):
            raise UsageError(f"hosts={hosts!r}: expected a list of host names")
        return self._copied(
            profile=parse_profile(str(profile), "profile"),
            hosts=(
                *binding_of(self).hosts,
                *parse_hosts(list(hosts), "hosts"),
            ),
        )

    @property
    def automatic_sessions(self) -> tuple[Session, ...]:
        """Conversations that this client and its copies follow by themselves, latest last."""
        return binding_of(self).family.follower.owners()

    def _copied(self, **changes: Any) -> Self:
        new: Self = self.copy()  # type: ignore[attr-defined]
        bind(new, binding_of(self), **changes)
        return new


# Overrides are hidden from type checkers: upstream's signatures and overloads are what
# they see. ``with_options`` is bound again because upstream's is bound to upstream's copy.
class _SyncCalls(Bound):
    if not TYPE_CHECKING:

        def request(
            self,
            cast_to: Any,
            options: Any,
            *,
            stream: bool = False,
            stream_cls: Any = None,
        ) -> Any:
            upstream = super().request
            return call(self, upstream, cast_to, options, stream=stream, stream_cls=stream_cls)

        def copy(self, **changes: Any) -> Self:
            return _kept(self, super().copy(**changes))

        with_options = copy


class _AsyncCalls(Bound):
    if not TYPE_CHECKING:

        async def request(
            self,
            cast_to: Any,
            options: Any,
            *,
            stream: bool = False,
            stream_cls: Any = None,
        ) -> Any:
            upstream = super().request
            return await acall(
                self, upstream, cast_to, options, stream=stream, stream_cls=stream_cls
            )

        def copy(self, **changes: Any) -> Self:
            return _kept(self, super().copy(**changes))

        with_options = copy


def _kept(client: Bound, new: Bound) -> Bound:
    """Give a copy what its original remembers."""
    bind(new, binding_of(client))
    return new


# Upstream puts the class's name into User-Agent: equal names keep it what it was.
class OpenAI(_SyncCalls, openai.OpenAI):
    """``openai.OpenAI`` that says which session a call belongs to and why it is made."""


class AsyncOpenAI(_AsyncCalls, openai.AsyncOpenAI):
    """``openai.AsyncOpenAI`` that says which session a call belongs to and why it is made."""


class AzureOpenAI(_SyncCalls, openai.AzureOpenAI):
    """``openai.AzureOpenAI``; Azure's own hosts are told nothing unless they are named."""


class AsyncAzureOpenAI(_AsyncCalls, openai.AsyncAzureOpenAI):
    """``openai.AsyncAzureOpenAI``; Azure's own hosts are told nothing unless named."""
