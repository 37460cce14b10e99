"""What other threads have left in the mailbox, obeyed by the engine thread.

Owner of how many commands a step has obeyed. A mailbox can fill while an engine is idle, and the
first call after that must not wait for all of it: what is too much for one step stays, in its
order, for the next ones. Only a switch of the mode is obeyed in the step that finds it, with what
was posted before it: whoever switches off does not wait for a backlog.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from turncache_server.retention.mailbox import Command, Mailbox, Signalled, SwitchMode

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
        if len(self.waiting) > MOST_PER_STEP:
            switched = self._last(lambda command: isinstance(command, SwitchMode))
            self._left = max(MOST_PER_STEP, switched)
        self.obey()

    def obey(self) -> None:
        """Obey what is waiting, as far as the step goes."""
        self._take(self._left)

    def obey_for(self, session: str) -> None:
        """Obey whatever was said of a session, and before: its next call is about to be let in."""
        self._take(self._last(lambda said: isinstance(said, Signalled) and said.session == session))

    def _last(self, meant: Callable[[Command], bool]) -> int:
        """Return how many commands wait up to the last one that is meant, 0 without one."""
        numbers = (number for number, said in enumerate(self.waiting.copy(), 1) if meant(said))
        return max(numbers, default=0)

    def _take(self, most: int) -> None:
        commands = self._mailbox.drain(most)
        self._left = max(0, self._left - len(commands))
        for command in commands:
            self._obey[type(command)](command)
