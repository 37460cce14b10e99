"""Which session a piece of code runs in: a context variable, and blocks that open and close.

Owns the context variable. A *scope* is one entered ``with`` block. Threads and tasks that
copy a context copy the scope with it; when the block has ended, they find it closed.

A generator shares its consumer's context, so that a block inside it would reach the
consumer between two items. Such a scope counts only for code that runs inside the
generator. A generator that stands for a ``with`` block itself (``contextlib``, a pytest
fixture) means the opposite, and is treated as the block that it is.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from contextvars import Context, ContextVar, copy_context
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from turncache.sessions import Session

_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = "contextlib"
#: Modules that run a generator up to its ``yield`` to enter a block, and on to leave it.
_DRIVERS = frozenset({_CONTEXTLIB, "_pytest.fixtures", "pytest_asyncio.plugin"})

_current: ContextVar[Scope | None] = ContextVar("turncache_scope", default=None)


class Scope:
    """One entered block of a session.

    Attributes:
        session: session of the calls inside.
        outer: scope around this one, or None.
        frame: frame that entered the block, while it is open.
        open: whether the block has not ended.
        context: context that the block was entered in, while it is open: an integration
            reads from it where in a framework's run that was.
    """

    __slots__ = (
        "_generator",
        "_in_generator",
        "_owner",
        "context",
        "frame",
        "open",
        "outer",
        "session",
    )

    def __init__(self, session: Session, frame: FrameType | None) -> None:
        """Open a scope for code called from ``frame``."""
        self.session = session
        self.outer = _current.get()
        self.frame = frame
        self.open = True
        # A snapshot costs no copy: contexts share their content.
        self.context: Context | None = copy_context()
        self._generator = _generator_around(frame)
        self._in_generator = self._generator is not None
        self._owner = (threading.get_ident(), _task()) if self._in_generator else None

    def close(self) -> None:
        """Close the block, and let go of the frames and the context that it was entered in."""
        self.open = False
        self.frame = self._generator = self._owner = self.context = None

    def counts_here(self) -> bool:
        """Whether the running code is inside the block, as far as generators tell."""
        if not self._in_generator:
            return True
        if not self.open:
            return False
        if self._owner != (threading.get_ident(), _task()):
            # A task or thread that was started inside the block took the scope along.
            return True
        frame = inspect.currentframe()
        while frame is not None:
            if frame is self._generator:
                return True
            frame = frame.f_back
        return False


def enter(session: Session, frame: FrameType | None) -> Scope:
    """Open a block: calls made under it belong to ``session``."""
    scope = Scope(session, frame)
    _current.set(scope)
    return scope


def leave(scope: Scope) -> None:
    """Close a block, from whatever context; harmless when it is closed already."""
    scope.close()
    if _current.get() is scope:
        _current.set(scope.outer)


def innermost() -> Scope | None:
    """Return the scope of the running code, open or closed, or None outside any block."""
    scope = _current.get()
    while scope is not None and not scope.counts_here():
        scope = scope.outer
    return scope


def _task() -> object | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


def _generator_around(frame: FrameType | None) -> FrameType | None:
    """Return the frame of the generator that iterates over ``frame``'s block, if one does."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _CONTEXTLIB:
            frame = frame.f_back
            continue
        if not frame.f_code.co_flags & _GENERATOR:
            return None
        driver = frame.f_back
        if driver is None or driver.f_globals.get("__name__") not in _DRIVERS:
            return frame
        frame = driver
    return None
