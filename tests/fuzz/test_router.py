"""A slice of ``make fuzz-router``."""

from __future__ import annotations

import pytest

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
