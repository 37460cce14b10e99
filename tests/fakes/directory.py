"""A directory of sessions whose answers the test gives."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future


class SlowDirectory:
    """Stands for a directory whose answers come when the test says so, whatever they are.

    Attributes:
        says: what it answers at once, None to wait for the test.
        open: searches that wait: (session, names to be).
        kept: sessions that the engine has said it keeps, with seconds.
    """

    def __init__(self, says: Sequence[str] | None = None) -> None:
        self.says = says
        self.open: list[tuple[str, Future[Sequence[str]]]] = []
        self.kept: list[tuple[str, float]] = []

    def find(self, session: str) -> Future[Sequence[str]]:
        """Keep the search."""
        names: Future[Sequence[str]] = Future()
        self.open.append((session, names))
        if self.says is not None:
            self.answer(self.says)
        return names

    def answer(self, answer: Sequence[str] | Exception) -> None:
        """End the oldest search."""
        _, names = self.open.pop(0)
        if isinstance(answer, Exception):
            names.set_exception(answer)
        else:
            names.set_result(answer)

    def keeps(self, session: str, retain_s: float) -> None:
        """Keep what is said."""
        self.kept.append((session, retain_s))

    def close(self) -> None:
        """Nothing to end."""
