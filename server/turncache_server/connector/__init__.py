"""The engine extension: vLLM loads it with ``kv_connector_module_path``.

The connector classes are resolved on first use, so that the pure parts of this package
can be imported (and tested) without vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from turncache_server.connector.retention_connector import RetentionConnector
    from turncache_server.connector.turncache_connector import TurncacheConnector

__all__ = ["RetentionConnector", "TurncacheConnector"]


def __getattr__(name: str) -> Any:
    if name == "RetentionConnector":
        from turncache_server.connector.retention_connector import (  # noqa: PLC0415 - needs vLLM
            RetentionConnector,
        )

        return RetentionConnector
    if name == "TurncacheConnector":
        from turncache_server.connector.turncache_connector import (  # noqa: PLC0415 - needs vLLM
            TurncacheConnector,
        )

        return TurncacheConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
