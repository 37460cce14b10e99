"""Exit codes of every program here: who must act."""

from __future__ import annotations

from typing import Final

from turncache.errors import EngineFault, EnvironmentFault, TurncacheError, UsageError

OK: Final = 0
CHECK_FAILED: Final = 1
USAGE: Final = 2
ENVIRONMENT: Final = 3
ENGINE: Final = 4
INTERRUPTED: Final = 130


def exit_code(error: TurncacheError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, UsageError):
        return USAGE
    if isinstance(error, EnvironmentFault):
        return ENVIRONMENT
    if isinstance(error, EngineFault):
        return ENGINE
    return CHECK_FAILED
