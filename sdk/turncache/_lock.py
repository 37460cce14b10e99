"""The one lock of the client's bookkeeping.

Held for microseconds while a call begins or ends, never during a request. One lock
instead of one per session: there is no order to get wrong, and a forked child has one to
renew.
"""

from __future__ import annotations

import os
import threading
from typing import Final


class _Lock:
    """Holds a re-entrant lock, made anew in a forked child: ``with LOCK.held: ...``.

    A fork may happen while another thread holds it. It is re-entrant because a stream
    that is collected as garbage ends its call wherever the collector happens to run.

    Attributes:
        held: the lock of this process.
    """

    def __init__(self) -> None:
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self.held = threading.RLock()


LOCK: Final = _Lock()
