"""Errors that the router answers with, in the shape that OpenAI clients parse."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from turncache.errors import EngineFault, TurncacheError

INVALID_REQUEST: Final = "invalid_request_error"
SERVER_ERROR: Final = "server_error"
#: Kinds of :class:`LegFailed` that are about time.
_LATE: Final = ("timeout", "too_long")


class ApiError(TurncacheError):
    """Raised when a call is to be answered with an error of the router's own.

    Attributes:
        status: HTTP status of the answer.
        message: what was wrong, what was expected and the way out, for the client.
        kind: ``error.type`` of the answer.
        param: member of the request that was refused.
        code: ``error.code`` of the answer.
        retry_after_s: seconds after which the client may try again, None for never.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Keep the parts of the answer beside the message."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def to_json(self) -> bytes:
        """Encode as the body of an answer, or as the data of a terminal event."""
        error = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        # ASCII: a member's name may hold half a surrogate pair, which UTF-8 cannot carry.
        return json.dumps({"error": error}).encode()

    def to_event(self) -> bytes:
        """Encode as the terminal event of a stream."""
        return b"data: " + self.to_json() + b"\n\n"


def invalid(message: str, *, param: str | None = None, code: str | None = None) -> ApiError:
    """Make the error for a request that the client has to change."""
    return ApiError(400, message, param=param, code=code)


def shutting_down(retry_after_s: float) -> ApiError:
    """Make the error for a request that comes, or still waits, when the router ends."""
    return ApiError(
        503,
        "The router is shutting down.",
        kind=SERVER_ERROR,
        code="draining",
        retry_after_s=retry_after_s,
    )


class EngineRefused(EngineFault):
    """Raised when an engine answered a leg with an error status: it goes to the client as is.

    Attributes:
        status: HTTP status.
        headers: headers that a client may see.
        body: the engine's error body.
    """

    def __init__(self, engine: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Keep the answer beside the message."""
        super().__init__(engine, f"answered {status}")
        self.status = status
        self.headers = headers
        self.body = body

    def to_api_error(self) -> ApiError:
        """Make the error for a stream whose headers are out: the engine's own message."""
        try:
            message = json.loads(self.body)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = None
        if not isinstance(message, str):
            message = f"The engine refused the call with status {self.status}."
        return ApiError(
            self.status, message, kind=INVALID_REQUEST if self.status < 500 else SERVER_ERROR
        )


class LegFailed(EngineFault):
    """Raised when a leg got no usable answer from its engine.

    Attributes:
        kind: ``refused``, ``unavailable``, ``timeout``, ``too_long`` (an answer that goes on
            beyond its time), ``disconnected`` or ``bad_answer``; a closed list, it is a metric
            label.
        problem: what the engine did, in words without its name or address.
        consumed: whether the engine may have worked on the request: another engine is only
            tried when it has not.
        refusal: the engine's own answer, where it gave one (503).
    """

    def __init__(
        self,
        engine: str,
        kind: str,
        problem: str,
        *,
        consumed: bool,
        refusal: EngineRefused | None = None,
    ) -> None:
        """Keep what decides about another try beside the message."""
        super().__init__(engine, problem)
        self.kind = kind
        self.problem = problem
        self.consumed = consumed
        self.refusal = refusal

    @property
    def engine_at_fault(self) -> bool:
        """Whether it says something about the engine's health: a 503 is a living engine's."""
        return self.kind in ("refused", "timeout", "disconnected")

    def to_api_error(self, retry_after_s: float) -> ApiError:
        """Make the client's error: 503 when nothing was consumed, else 502, or 504 in time."""
        status = 503 if not self.consumed else 504 if self.kind in _LATE else 502
        return ApiError(
            status,
            f"The engine {self.problem}. Nothing of the session is lost; try again.",
            kind=SERVER_ERROR,
            code=f"engine_{self.kind}",
            retry_after_s=retry_after_s,
        )
