"""A slice of ``make fuzz-router``."""

from __future__ import annotations

import pytest

from tests.fuzz.raw import leaves_more, request
from tests.fuzz.router import fuzz

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """The router runs on asyncio."""
    return "asyncio"


async def test_hostile_requests_break_nothing() -> None:
    """No 5xx, no hang, nothing internal out, nothing forged in; good calls are served after."""
    findings = await fuzz(0, 400)
    assert findings.broken == []
    assert findings.forwarded > 50
    assert findings.statuses["200"] > 50
    assert findings.statuses["400"] > 50


@pytest.mark.parametrize(
    ("raw", "more"),
    [
        (request(), False),
        (request(length=b"5"), True),
        (request(b"", length=b""), False),
        (request(length=b""), True),
        (request(length=b"+5"), False),
        (request(length=b"5", headers=[b"Content-Length: 5"]), False),
        (request(length=b"", headers=[b"Content-Length : 5"]), False),
        (request(length=b"5", headers=[b"Transfer-Encoding: chunked"]), False),
    ],
)
def test_only_what_follows_a_plain_length_is_another_request(raw: bytes, more: bool) -> None:
    """A second answer to anything else is a finding."""
    assert leaves_more(raw) is more
