"""What other threads have left in the mailbox, obeyed by the engine thread.

Owner of how many commands a step has obeyed. A mailbox can fill while an engine is idle, and the
first call after that must not wait for all of it: what is too much for one step stays, in its
order, for the next ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from turncache_server.retention.mailbox import Command, Mailbox, Signalled

#: Commands that one step obeys: a few milliseconds. A full mailbox takes thirty-two steps.
MOST_PER_STEP: Final = 512


class Orders:
    """The engine thread's side of the mailbox.

    Args:
        mailbox: where other threads post.
        obey: what each kind of command does.

    Attributes:
        waiting: what is in the mailbox; to be looked at only.
    """

    def __init__(
        self, mailbox: Mailbox, obey: Mapping[type[Command], Callable[[Any], None]]
    ) -> None:
        self.waiting = mailbox.commands
        self._mailbox = mailbox
        self._obey = dict(obey)
        self._left = MOST_PER_STEP

    def step(self) -> None:
        """Obey in a new step."""
        self._left = MOST_PER_STEP
        self.obey()

    def obey(self) -> None:
        """Obey what is waiting, as far as the step goes."""
        self._take(self._left)

    def obey_for(self, session: str) -> None:
        """Obey whatever was said of a session, and before: its next call is about to be let in."""
        last = 0
        for number, command in enumerate(self.waiting.copy(), 1):
            if isinstance(command, Signalled) and command.session == session:
                last = number
        self._take(last)

    def _take(self, most: int) -> None:
        commands = self._mailbox.drain(most)
        self._left = max(0, self._left - len(commands))
        for command in commands:
            self._obey[type(command)](command)
