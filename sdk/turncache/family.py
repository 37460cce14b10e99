"""What a client remembers between calls: shared with its copies, kept beside the client.

A *family* is a client and the copies made of it with ``copy()``, ``with_options()`` or
``with_session()``: they follow the same conversations. A *binding* is what one client of
a family adds. Both are kept in a weak table, so that upstream's constructor, attributes
and copies stay what they are; a client that was copied in another way starts a family of
its own.
"""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from turncache._lock import LOCK
from turncache.follow import Follower
from turncache.hosts import Server
from turncache.memo import Memo
from turncache.results import WeakTable
from turncache.sessions import Session
from turncache.settings import Profile, Settings, from_environment
from turncache.speaker import Speaker
from turncache.wire import RELEVANT


class Family:
    """What a client and its copies share.

    Attributes:
        settings: the environment, as it was at the family's first call.
        clock: monotonic seconds.
        memo: fingerprints of the latest histories.
        follower: conversations that are followed without a session.
    """

    def __init__(
        self, settings: Settings, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Start without conversations."""
        self.settings = settings
        self.clock = clock
        self.start()
        _families.add(self)

    def start(self) -> None:
        """Follow no conversation."""
        self.memo = Memo()
        self.follower: Follower[Session] = Follower(_automatic)


_families: Final[weakref.WeakSet[Family]] = weakref.WeakSet()


def _start_anew() -> None:
    """Start anew in a forked child: two processes must not share automatic sessions."""
    for family in list(_families):
        family.start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """What one client adds to its family.

    Attributes:
        family: shared with the client's copies.
        session: session of every call, or None.
        profile: which servers are told, and how; off as well when the environment says so.
        hosts: hosts that the user named, those of the environment included.
        server: the server of the client's calls, and whether it is told anything.
        speaker: the client, for what is said between two calls.
        defaults: headers of every call that the caller gave to the constructor, names in
            lower case; only those that matter to us.
        ambient: how a framework's integration finds the session of the running code; it
            is asked instead of the innermost block, or None.
    """

    family: Family
    server: Server
    speaker: Speaker
    session: Session | None = None
    profile: Profile
    hosts: tuple[str, ...] = ()
    defaults: Mapping[str, Any]
    ambient: Callable[[], Session | None] | None = None


_bindings: Final[WeakTable[Binding]] = WeakTable()


def binding_of(client: Any) -> Binding:
    """Return the client's binding, made at its first call.

    Args:
        client: any openai client.

    Raises:
        ConfigError: on a variable of the environment that cannot be used.
    """
    found = _bindings.get(client)
    if found is None:
        settings = from_environment()
        with LOCK.held:
            found = _bindings.get(client) or Binding(
                family=Family(settings),
                server=Server(settings.hosts),
                speaker=Speaker(client),
                profile=Profile.OFF if settings.disabled else settings.profile,
                hosts=settings.hosts,
                defaults=_defaults(client),
            )
            _bindings.put(client, found)
    return found


def bind(client: Any, binding: Binding, **changes: Any) -> None:
    """Give a copy of a client the binding of its original, with ``changes``."""
    if binding.family.settings.disabled:
        changes["profile"] = Profile.OFF
    own = dataclasses.replace(
        binding,
        server=Server(changes.get("hosts", binding.hosts)),
        speaker=Speaker(client),
        defaults=_defaults(client),
        **changes,
    )
    _bindings.put(client, own)


def _defaults(client: Any) -> dict[str, Any]:
    headers = client.default_headers
    return {name.lower(): value for name, value in headers.items() if name.lower() in RELEVANT}


def _automatic(parent: Session | None) -> Session:
    return Session(
        f"auto-{uuid.uuid4().hex}",
        parent_id=None if parent is None else parent.id,
        automatic=True,
    )
