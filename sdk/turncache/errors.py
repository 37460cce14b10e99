"""Errors of turncache, split by who must act.

::

    TurncacheError
    ├── UsageError            the caller's mistake: change the call or the configuration
    │   ├── ProtocolError     a header or field that the wire contract does not allow
    │   └── ConfigError       a setting that cannot work
    ├── EnvironmentFault      this machine or installation lacks something
    └── EngineFault           an engine or a peer failed, refused or did not answer
        └── EngineRefusal     it was reached, and would not do what it was asked

A lost cache entry is none of these: it is recomputed and counted.
"""

from __future__ import annotations


class TurncacheError(Exception):
    """Base of every error that turncache raises itself."""


class UsageError(TurncacheError, ValueError):
    """Raised when the caller passed a value that cannot be used."""


class ProtocolError(UsageError):
    """Raised when a header or field breaks the wire contract.

    Attributes:
        field: name of the header or body field that was refused.
    """

    def __init__(self, field: str, problem: str) -> None:
        """Keep the field's name beside the message."""
        super().__init__(f"{field}: {problem}")
        self.field = field


class ConfigError(UsageError):
    """Raised when a setting has an unknown name or an impossible value.

    Attributes:
        setting: dotted name of the setting.
    """

    def __init__(self, setting: str, problem: str) -> None:
        """Keep the setting's name beside the message."""
        super().__init__(f"{setting}: {problem}")
        self.setting = setting


class EnvironmentFault(TurncacheError):
    """Raised when the machine or the installation lacks what is needed."""


class EngineFault(TurncacheError):
    """Raised when an engine or a peer failed, refused or did not answer.

    Attributes:
        engine: name or address of the engine.
    """

    def __init__(self, engine: str, problem: str) -> None:
        """Keep the engine's name beside the message."""
        super().__init__(f"{engine}: {problem}")
        self.engine = engine


class EngineRefusal(EngineFault):
    """Raised when an engine or a peer was reached and refused, so that asking again is no use.

    Attributes:
        code: why, one of ``DROP_CODES`` of ``turncache_server.control.messages``.
    """

    def __init__(self, engine: str, code: str, why: str) -> None:
        """Keep the code beside the message."""
        super().__init__(engine, f"refused ({code}): {why}")
        self.code = code


def why_of(error: Exception) -> str:
    """Return what is wrong with a file, without the file's name: the message names it already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
