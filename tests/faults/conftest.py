"""The fixtures of the client's tests, for the faults that clients had elsewhere."""

from tests.sdk.conftest import (
    client,
    fresh_process,
    pytest_configure,
    running_client,
    running_server,
    server,
)

__all__ = [
    "client",
    "fresh_process",
    "pytest_configure",
    "running_client",
    "running_server",
    "server",
]
