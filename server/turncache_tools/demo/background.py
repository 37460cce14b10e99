"""Starting a rig while another one starts. Owner of the thread that does it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from turncache_tools.demo.rigs import Rig


class InBackground:
    """Starts a rig in a thread of its own."""

    def __init__(self, start: Callable[[], Rig]) -> None:
        self._rig: Rig | None = None
        self._error: BaseException | None = None
        self._start = start
        # A daemon: the program's end must not wait for engines that are still starting.
        self._thread = threading.Thread(target=self._run, name="start engines", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._rig = self._start()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self._error = error

    def result(self) -> Rig:
        """Wait for the rig; raises what its start raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._rig is not None
        return self._rig

    def discard(self) -> None:
        """Wait for the rig and stop it; how its start failed does not matter any more."""
        self._thread.join()
        if self._rig is not None:
            self._rig.stop()
