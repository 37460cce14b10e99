"""What ``turncache top`` and ``turncache doctor`` see of a running router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine, Script, fake_engines, fake_pair
from tests.server.router.support import CHAT, MESSAGES, Bench, bench, outcome_of
from turncache_server.router.keys import add_key
from turncache_tools.__main__ import main

pytestmark = pytest.mark.anyio
ADMISSION = {"admission": True, "admission_tokens": 100, "admission_idle_s": 60.0}


async def turncache(*arguments: str) -> int:
    """Run the command as an operator does, beside what goes on here."""
    return await asyncio.to_thread(main, list(arguments))


@asynccontextmanager
async def crowded(**settings: Any) -> AsyncIterator[Bench]:
    """Run a router whose pool one session fills."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, **ADMISSION, **settings) as running:
        yield running


def ask(running: Bench, session: str, key: str | None = None) -> asyncio.Task[Any]:
    """Make a call of a session, which may have to wait."""
    headers = {"X-Session-ID": session, **({} if key is None else {"x-api-key": key})}
    body = {"model": "fake", "messages": MESSAGES}
    return asyncio.create_task(running.http.post(CHAT, json=body, headers=headers))


async def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that ends well; return what it prints."""
    assert await turncache(*arguments) == 0
    return capsys.readouterr().out


async def seen(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return what one look gives as data."""
    assert await turncache("top", "--count", "1", "--json", *arguments) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


async def seen_with(
    capsys: pytest.CaptureFixture[str], num_waiting: int, *arguments: str
) -> dict[str, Any]:
    """Look until so many calls wait; return the place where they do."""
    for _ in range(500):
        (place,) = (await seen(capsys, *arguments))["routers"][0]["waits"]
        if place["waiting"] == num_waiting:
            found: dict[str, Any] = place
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(f"never {num_waiting}: {place}")


async def test_top_shows_who_waits_to_be_let_in(capsys: pytest.CaptureFixture[str]) -> None:
    """How many calls, for how long, and how full the room is; as data and as a table."""
    async with crowded() as running:
        router = ("--router", running.router.url)
        assert (await seen_with(capsys, 0, *router))["longest_s"] == 0.0
        await ask(running, "a")
        waiting = [ask(running, name) for name in "bc"]
        place = await seen_with(capsys, 2, *router)
        assert place["longest_s"] > 0
        assert (place["name"], place["sessions"], place["fits"]) == ("admission", 1, 100)
        assert place["tenants"] == [], "there are none without keys"
        assert await turncache("top", "--count", "1", *router) == 0
        (_, row) = (line for line in capsys.readouterr().out.splitlines() if "router" not in line)
        assert row.split()[:3] == [running.router.url, "admission", "2"]
        for each in waiting:
            each.cancel()


async def test_top_shows_tenants_to_an_administrator(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By their names, the one with most calls first; nobody else learns of them."""
    path = tmp_path / "keys.toml"
    red, blue = add_key(path, "red"), add_key(path, "blue")
    admin = add_key(path, "ops", admin=True)
    async with crowded(keys_file=str(path)) as running:
        await ask(running, "first", red)
        waiting = [ask(running, name, key) for name, key in (("a", blue), ("b", red), ("c", red))]
        url = running.router.url
        place = await seen_with(capsys, 3, "--router", url, "--api-key", admin)
        assert [(each["tenant"], each["waiting"]) for each in place["tenants"]] == [
            ("red", 2),
            ("blue", 1),
        ]
        assert place["longest_s"] == max(each["longest_s"] for each in place["tenants"])
        assert await turncache("top", "--router", url, "--api-key", red) == 4
        assert "an administrator's key" in capsys.readouterr().err
        for each in waiting:
            each.cancel()


async def test_top_shows_prompts_that_wait_for_decode(capsys: pytest.CaptureFixture[str]) -> None:
    """For which prefill engine, for how long, and how full the room for them is."""
    async with fake_pair() as ([prefill], [decode]):
        prefill.num_blocks = 25
        async with bench(prefill, decode, handover_share=1.0) as running:
            router = ("--router", running.router.url)
            assert (await seen_with(capsys, 0, *router))["longest_s"] == 0.0
            decode.scripts = [full := Script(until=asyncio.Event())]
            first = ask(running, "a")
            await full.arrived.wait()
            second = ask(running, "b")
            place = await seen_with(capsys, 1, *router)
            assert (place["name"], place["fits"]) == ("handover prefill-0", 100)
            assert place["longest_s"] > 0
            assert 0 < place["tokens"] <= 100
            out = await printed(capsys, "top", "--count", "1", *router)
            assert "handover prefill-0" in out
            assert full.until is not None
            full.until.set()
            assert [(await each).status_code for each in (first, second)] == [200, 200]


async def test_top_says_when_nobody_ever_waits(capsys: pytest.CaptureFixture[str]) -> None:
    """Without admission there is no queue, which is not the same as an empty one."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine) as running:
        router = ("--router", running.router.url)
        assert (await seen(capsys, *router))["routers"] == [
            {"url": running.router.url, "waits": []}
        ]
        assert await turncache("top", "--count", "1", *router) == 0
        assert "everybody is let in" in capsys.readouterr().out
        other = ("--router", engine.url, "--count", "1")
        assert await turncache("top", *other) == 4
        assert "not as a router" in capsys.readouterr().err
        # One that answers is enough: the other one is named beside it.
        assert await turncache("top", *router, *other) == 0
        assert "not as a router" in capsys.readouterr().out


async def test_the_numbers_of_an_engine_are_those_of_its_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of sessions, once they have ended: tokens by where they came from, and what is kept."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine) as running:
        assert engine.control is not None
        outcomes = [outcome_of(await running.chat(session=name)) for name in "aab"]
        untagged = await running.chat()
        assert untagged.status_code == 200
        assert await turncache("stats", engine.control, "--json") == 0
        told = json.loads(capsys.readouterr().out)[engine.control]
        for name in ("prompt", "local", "returned", "computed", "lost"):
            found = told["counters"][f"{name}_tokens"]
            assert found >= sum(getattr(outcome, name) for outcome in outcomes), name
        assert told["counters"]["calls"] == told["counters"]["calls_ok"]
        sessions = json.loads(await printed(capsys, "sessions", engine.control, "--json"))
        kept = sum(row["kept_blocks"] for row in sessions[engine.control]["sessions"])
        assert 0 < told["gauges"]["retained_blocks"] <= kept
        (line,) = (await seen(capsys, engine.control))["engines"]
        assert (line["mode"], line["calls"]) == ("on", 0)


async def findings(
    capsys: pytest.CaptureFixture[str], *arguments: str
) -> dict[str, tuple[str, str]]:
    """Return what the doctor finds: (verdict, detail) by subject."""
    await turncache("doctor", "--json", *arguments)
    found = json.loads(capsys.readouterr().out)
    return {each["subject"]: (each["verdict"], each["detail"]) for each in found}


async def test_doctor_says_how_many_engines_pull(capsys: pytest.CaptureFixture[str]) -> None:
    """Which does not, what follows from it, and what to do."""
    async with fake_pair(decodes=2) as (prefill, decodes), bench(*prefill, *decodes) as running:
        url = running.router.url
        await running.ready()
        found = await findings(capsys, "--router", url)
        assert found[url] == ("ok", "serves calls")
        assert found["decode"] == (
            "ok",
            "2 of 2 answer, 2 of 2 take and give KV by verified pulls",
        )
        assert found["return"][0] == "ok"
        decodes[1].mode = "off"
        sample = 'turncache_router_engine_pulls{engine="decode-1",side="decode"}'
        await running.eventually(
            lambda: running.http.get("/metrics"), lambda answer: f"{sample} 0.0" in answer.text
        )
        found = await findings(capsys, "--router", f"{url}/v1")
        verdict, detail = found["decode"]
        assert verdict == "note"
        assert detail.startswith(
            "2 of 2 answer, 1 of 2 take and give KV by verified pulls, but not"
        )
        assert "decode-1: it is in mode off or observe (turncache mode" in detail
        assert found["prefill"][0] == "ok"
        assert found["return"][0] == "note"
        assert "nothing comes back to prefill" in found["return"][1]


async def test_an_engine_that_has_said_nothing_is_none_that_pulls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The router plans as if it did, and nobody knows."""
    fleet: dict[str, FakeEngine] = {}
    prefill = FakeEngine("prefill-0", "prefill", fleet=fleet)
    decode = FakeEngine("decode-0", "decode", fleet=fleet, control=False)
    async with fake_engines(prefill, decode), bench(prefill, decode) as running:
        await running.ready()
        sides = (await running.http.get("/health")).json()["sides"]
        assert {side: told["pulling"] for side, told in sides.items()} == {
            "prefill": 1,
            "decode": 0,
        }
        assert (await findings(capsys, "--router", running.router.url))["decode"][0] == "note"


async def test_doctor_says_which_engines_are_gone(capsys: pytest.CaptureFixture[str]) -> None:
    """One of two is worth a note, a whole side a failure; so is a router that is not there."""
    fakes = FakeEngine("one"), FakeEngine("two")
    async with fake_engines(*fakes), bench(*fakes, return_enabled=False) as running:
        url = running.router.url
        await running.ready()
        assert (await findings(capsys, "--router", url)).keys() == {url, "single"}
        for number, verdict in ((1, "note"), (0, "failed")):
            fakes[number].healthy = False
            await running.eventually(
                lambda: running.http.get("/health"),
                lambda answer, number=number: answer.json()["sides"]["single"]["live"] == number,
            )
            found = await findings(capsys, "--router", url)
            assert found["single"][0] == verdict
            assert "two" in found["single"][1]
        assert found[url][0] == "failed"
        assert await turncache("doctor", "--router", url) == 1
        capsys.readouterr()
        found = await findings(capsys, "--router", fakes[0].url)
        assert found[fakes[0].url][0] == "failed"
        fakes[0].healthy = True
        assert (await findings(capsys, "--router", fakes[0].url))[fakes[0].url][0] == "ok"


async def test_doctor_says_that_returns_are_off(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the router has been told to send none."""
    async with (
        fake_pair() as (prefill, decode),
        bench(*prefill, *decode, return_enabled=False) as running,
    ):
        await running.ready()
        found = await findings(capsys, "--router", running.router.url)
        assert found["return"][0] == "note"
        assert "return_enabled is false" in found["return"][1]
