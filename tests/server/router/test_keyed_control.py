"""The router asks engines with the fleet's keys, and says when they do not fit."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.engine import FakeEngine, fake_engines
from tests.server.router.support import Bench, bench, outcome_of
from turncache.errors import ConfigError
from turncache.protocol import OUTCOME_HEADER
from turncache_server.control.keys import FleetKeys, read_fleet_keys
from turncache_server.control.server import ControlServer
from turncache_server.router.config import parse_config
from turncache_server.router.events import OutcomeMissing

pytestmark = pytest.mark.anyio


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A fleet's secret."""
    path = tmp_path / "fleet.secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


@asynccontextmanager
async def in_front(
    keys: FleetKeys | None, name: str = "single-0", **settings: object
) -> AsyncIterator[tuple[Bench, ControlServer]]:
    """Run a router in front of an engine whose control socket has keys and a name."""
    engine = FakeEngine()
    server = ControlServer("tcp://127.0.0.1:0", engine._answer_control, keys=keys, name=name)
    server.start()
    try:
        async with fake_engines(engine):
            config = {**engine.as_config(), "engine_id": "single-0", "control": server.address}
            async with bench(engine, engines=[config], **settings) as running:
                await running.ready()
                yield running, server
    finally:
        await asyncio.to_thread(server.close)


async def test_outcomes_come_with_the_secret(secret: Path) -> None:
    """Same answers as without keys."""
    keys = read_fleet_keys(secret)
    async with in_front(keys, fleet_secret_file=str(secret)) as (running, server):
        assert outcome_of(await running.chat(session="s")).prompt > 0
        assert server.dropped["unauthenticated"] == 0


@pytest.mark.parametrize(
    ("name", "with_secret", "why"),
    [
        ("single-0", False, "this side has none: give this side fleet_secret_file"),
        ("other-7", True, "this is other-7, the question is for single-0"),
    ],
)
async def test_a_refusal_is_in_the_log_and_the_metrics(
    name: str, with_secret: bool, why: str, secret: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The call is served all the same; the operator reads what to change."""
    caplog.set_level(logging.WARNING)
    settings = {"fleet_secret_file": str(secret)} if with_secret else {}
    async with in_front(read_fleet_keys(secret), name, **settings) as (running, _):
        answer = await running.chat(session="s")
        assert answer.status_code == 200
        assert OUTCOME_HEADER not in answer.headers
        (missing,) = running.of_kind(OutcomeMissing)
        assert missing.why == "refused"
        assert why in missing.detail
        assert await running.metric('turncache_router_outcome_missing_total{why="refused"}') == 1
    assert any(why in record.getMessage() for record in caplog.records)


async def test_a_secret_that_cannot_be_used_ends_the_start() -> None:
    """Before anything listens."""
    with pytest.raises(ConfigError, match="cannot read '/no/such/secret'"):
        async with in_front(None, fleet_secret_file="/no/such/secret"):
            pass


async def test_two_engines_cannot_share_a_control_socket() -> None:
    """A copied line would have every outcome asked of one of them."""
    one = {"side": "prefill", "url": "http://h:1", "control": "tcp://127.0.0.1:1", "name": "a"}
    two = {**one, "name": "b", "url": "http://h:2", "side": "decode"}
    with pytest.raises(ConfigError, match="occurs twice") as caught:
        parse_config({"engines": [one, two]})
    assert caught.value.setting == "engines.control"
