"""Cores of their own for CPU engines.

vLLM's NIXL worker pins itself to the last core of each NUMA node on CPU platforms, so two
engines on one machine share that core, and one that spins starves the other. Threads
started later inherit the mask of the thread that started them, therefore every thread of an
engine's process tree is pinned: while it starts, when it is healthy, after its first call.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from turncache_server.launch.supervise import descendants


def pin_tree(pid: int, cores: Collection[int]) -> int:
    """Pin every thread of ``pid`` and its descendants; return how many threads that were.

    Threads that end meanwhile are skipped. No ``cores``, no pinning.
    """
    if not cores:
        return 0
    num_pinned = 0
    for process in (pid, *descendants(pid)):
        with suppress(OSError):
            for task in Path("/proc", str(process), "task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(task.name), cores)
                    num_pinned += 1
    return num_pinned
