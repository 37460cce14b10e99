"""Engines that come and go with their file, while the router serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.engine import FakeEngine, Script, fake_engines
from tests.server.router.support import MESSAGES, Bench, bench
from turncache.errors import ConfigError
from turncache_server.control.messages import ModeReply
from turncache_server.router.__main__ import main
from turncache_server.router.config import EngineConfig, parse_config
from turncache_server.router.engines_file import EnginesFile
from turncache_server.router.events import EngineLeft, EnginesRead, EnginesRefused, Events
from turncache_server.router.plan import Side
from turncache_server.router.pool import Hold, Pool

pytestmark = pytest.mark.anyio

REFUSED = "turncache_router_engine_list_refused"


def table(engine: Mapping[str, str]) -> str:
    """Write one engine as TOML."""
    return "[[engines]]\n" + "".join(f'{name} = "{text}"\n' for name, text in engine.items())


def write(path: Path, engines: Iterable[FakeEngine]) -> None:
    """Replace the file, as an editor or a controller does."""
    new = path.with_suffix(".new")
    new.write_text("\n".join(table(engine.as_config()) for engine in engines))
    new.replace(path)


def single(name: str, port: int = 1, control: int = 0) -> dict[str, str]:
    """Make the table of an engine that nobody asks."""
    engine = {"name": name, "side": "single", "url": f"http://127.0.0.1:{port}"}
    return {**engine, "control": f"tcp://127.0.0.1:{control}"} if control else engine


# --- the file -------------------------------------------------------------------------------


def test_a_change_counts_when_the_file_is_at_rest(tmp_path: Path) -> None:
    """Half of a file that is being written is a shorter list, and never taken."""
    path = tmp_path / "engines.toml"
    path.write_text(table(single("a")))
    file = EnginesFile(path, keyed=False)
    assert file.look() is None
    assert [engine.name for engine in file.look() or ()] == ["a"]
    assert file.look() is None
    with path.open("a") as out:
        for number, name in enumerate("bcd", start=2):
            out.write(table(single(name, number)))
            out.flush()
            assert file.look() is None
    assert [engine.name for engine in file.look() or ()] == ["a", "b", "c", "d"]


def test_a_file_that_comes_back_is_read_again(tmp_path: Path) -> None:
    """Also when it is the very file that was in use before it went away."""
    path, away = tmp_path / "engines.toml", tmp_path / "away"
    path.write_text(table(single("a")))
    file = EnginesFile(path, keyed=False)
    assert (file.look(), len(file.look() or ())) == (None, 1)
    path.rename(away)
    assert file.look() is None
    for _ in range(2):
        with pytest.raises(ConfigError, match="No such file"):
            file.look()
    away.rename(path)
    assert (file.look(), len(file.look() or ())) == (None, 1)


def test_a_link_that_points_elsewhere_is_a_change(tmp_path: Path) -> None:
    """Which is how Kubernetes replaces the files of a ConfigMap."""
    path = tmp_path / "engines.toml"
    for name in ("one", "two"):
        (tmp_path / name).write_text(table(single(name)))
        os.utime(tmp_path / name, ns=(1, 1))
    path.symlink_to("one")
    file = EnginesFile(path, keyed=False)
    assert (file.look(), [e.name for e in file.look() or ()]) == (None, ["one"])
    path.unlink()
    path.symlink_to("two")
    assert (file.look(), [e.name for e in file.look() or ()]) == (None, ["two"])


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", "at least one"),
        ("[[engines", "engines.toml"),
        (table(single("a")) + "port = 1\n", r"engines\[0\].port"),
        ("port = 1\n" + table(single("a")), "port: no such setting"),
        (table(single("a")) + table(single("a", 2)), "'a' occurs twice"),
        (table({**single("a"), "side": "prefill"}), "one prefill and one decode"),
        (table({**single("a"), "control": "tcp://10.0.0.1:5801"}), "fleet_secret_file"),
        (table({**single("a"), "engine_id": "b c"}), "engine_id"),
    ],
)
def test_a_list_that_is_none_is_refused_at_start(tmp_path: Path, text: str, word: str) -> None:
    """File and fault are named."""
    path = tmp_path / "engines.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        parse_config({"engines_file": str(path)})
    assert caught.value.setting == "engines_file"
    assert str(path) in str(caught.value)


def test_engines_are_named_in_one_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lists would have to be merged; but a flag replaces whatever the files say."""
    path, config = tmp_path / "engines.toml", tmp_path / "router.toml"
    path.write_text(table(single("a")))
    with pytest.raises(ConfigError, match="in one of "):
        parse_config({"engines_file": str(path), "engines": [single("b")]})
    config.write_text(f'engines_file = "{path}"\nport = 99999')
    assert main(["--config", str(config), "--engine", "name=b,side=single,url=http://h:1"]) == 2
    assert "port" in capsys.readouterr().err


# --- the pool against a model ---------------------------------------------------------------


class Nobody:
    """Stands for engines that answer every question, and notes who is known of them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.urls: set[str] = set()

    def meet(self, url: str) -> None:
        self.urls.add(url)

    def leave(self, url: str) -> None:
        self.urls.remove(url)

    async def get(
        self, engine: EngineConfig, path: str, *_: Any, timeout_s: float
    ) -> tuple[int, bytes]:
        await asyncio.sleep(0)
        return 200, b'{"data": [{"id": "fake"}]}'

    async def ask(self, address: str, *_: Any, timeout_s: float) -> ModeReply:
        assert address in self.names
        return ModeReply(mode="on", pulls=True, ticket="t")

    def expect(self, address: str, engine_id: str) -> None:
        self.names[address] = engine_id

    def forget(self, address: str) -> None:
        del self.names[address]


def engine(name: str, control: int) -> EngineConfig:
    """Make an engine's settings."""
    (made,) = parse_config({"engines": [single(name, control, control)]}).engines
    return made


#: Names that come back with other addresses, and addresses that come back with other names.
lists = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 6), min_size=1, max_size=4).filter(
    lambda chosen: len(set(chosen.values())) == len(chosen)
)
steps = st.lists(
    st.one_of(
        lists.map(lambda chosen: [engine(name, at) for name, at in chosen.items()]),
        st.tuples(st.sampled_from(["begin", "end", "run"]), st.integers(0, 11)),
    ),
    max_size=14,
)


@settings(deadline=None, max_examples=60)
@given(steps=steps)
def test_the_pool_knows_the_list_and_what_is_still_called(steps: list[Any]) -> None:
    """After any changes: snapshots hold the list, and all else lives as long as its calls."""
    asyncio.run(against_a_model(steps))


async def against_a_model(steps: list[Any]) -> None:
    """Take the steps on a pool and on a model of it."""
    engines = Nobody()
    start = [engine("a", 1), engine("b", 2)]
    config = parse_config({"engines": [single("a", 1, 1), single("b", 2, 2)]})
    told: list[Any] = []
    pool = Pool(config, engines, engines, events=Events([told.append]), clock=lambda: 0.0)
    await pool.start()
    listed, healthy = {e.name: e for e in start}, set(start)
    calls: list[tuple[EngineConfig, Hold]] = []
    for step in steps:
        match step:
            case "begin", number:
                name = sorted(listed)[number % len(listed)]
                calls.append((listed[name], pool.hold([name])))
            case "end", number if calls:
                _, hold = calls.pop(number % len(calls))
                hold.release()
                hold.release()
            case "run", _:
                for _ in range(12):
                    await asyncio.sleep(0)
                healthy |= set(listed.values())
            case list():
                changed = pool.adopt(step)
                new = {e.name: e for e in step}
                gone = {e.name for e in listed.values() if new.get(e.name) != e}
                assert set(changed.left) == gone
                assert set(changed.joined) == {e.name for e in step if listed.get(e.name) != e}
                healthy -= {listed[name] for name in gone}
                listed = new
        views = {view.name: view for view in pool.snapshot(return_enabled=True).engines}
        assert views.keys() == listed.keys()
        for name, view in views.items():
            assert (view.live, bool(view.models)) == (listed[name] in healthy,) * 2
            assert pool.config_of(name) == listed[name]
        known = {*listed.values(), *(held for held, _ in calls)}
        assert engines.names.keys() == {e.control for e in known}
        assert engines.urls == {e.url for e in known}
        for name in "abcd":
            if all(e.name != name for e in known):
                assert pool.control_of(name) is None
                pool.answered(name)
                pool.failed(name, "refused")
            else:
                assert pool.config_of(name) in known
    for _, hold in calls:
        hold.release()
    assert engines.names.keys() == {e.control for e in listed.values()}
    await pool.close()
    checks = [t for t in asyncio.all_tasks() if t.get_name().startswith("health")]
    assert checks == []


# --- through the front door -----------------------------------------------------------------


async def live_engines(running: Bench, num_live: int, num_engines: int) -> None:
    """Wait until the router knows so many single engines."""

    def known(answer: Any) -> bool:
        (side,) = answer.json()["sides"].values()
        return (side["live"], side["engines"]) == (num_live, num_engines)

    await running.eventually(lambda: running.http.get("/health"), known)


def served(engines: Iterable[FakeEngine], session: str) -> set[str]:
    """Name the engines that a session's calls went to."""
    return {
        engine.name
        for engine in engines
        if any(seen.xargs.get("tc_session") == session for seen in engine.seen)
    }


async def test_engines_come_and_go_while_the_router_serves(tmp_path: Path) -> None:
    """A new engine gets its share of sessions, a removed one none, and nobody else's moves."""
    a, b = FakeEngine("a"), FakeEngine("b")
    path = tmp_path / "engines.toml"
    names = [f"session-{number}" for number in range(12)]
    async with fake_engines(a, b):
        write(path, [a])
        async with bench(engines_file=str(path)) as running:
            await live_engines(running, 1, 1)
            b.healthy = False
            write(path, [a, b])
            await live_engines(running, 1, 2)
            for name in names:
                await running.chat(session=name)
            assert not b.seen
            b.healthy = True
            await live_engines(running, 2, 2)
            a.seen.clear()
            for name in names:
                await running.chat(session=name)
            homes = {name: served([a, b], name) for name in names}
            assert set.union(*homes.values()) == {"a", "b"}
            # The same list in another order: nothing has changed, nobody moves.
            lists = 'turncache_router_engine_lists_total{result="read"}'
            before = await running.metric(lists)
            write(path, [b, a])
            await running.eventually(
                lambda: running.metric(lists), lambda count: count == before + 1
            )
            for name in names:
                await running.chat(session=name)
            assert {name: served([a, b], name) for name in names} == homes
            write(path, [b])
            await live_engines(running, 1, 1)
            a.seen.clear()
            for name in names:
                assert (await running.chat(session=name)).status_code == 200
            assert not a.seen
            changes = [(e.joined, e.left) for e in running.of_kind(EnginesRead)]
            assert [each for each in changes if each != ((), ())] == [(("b",), ()), ((), ("a",))]
            labels = (await running.http.get("/metrics")).text
            assert 'engine_live{engine="b"' in labels
            assert 'engine="a"' not in labels


async def test_a_stream_outlives_the_engines_place_in_the_list(tmp_path: Path) -> None:
    """It ends in order, with its outcome on record; only then is the engine forgotten."""
    a, b = FakeEngine("a"), FakeEngine("b")
    path = tmp_path / "engines.toml"
    async with fake_engines(a, b):
        write(path, [a])
        async with bench(engines_file=str(path)) as running:
            await running.ready()
            a.scripts.append(paused := Script(pause_after=2))
            body = {"model": "fake", "messages": MESSAGES, "stream": True}
            async with running.http.stream(
                "POST", "/v1/chat/completions", json=body, headers={"X-Session-ID": "s"}
            ) as answer:
                write(path, [b])
                await running.eventually(
                    lambda: running.of_kind(EngineLeft),
                    lambda left: [event.engine for event in left] == ["a"],
                )
                await live_engines(running, 1, 1)
                assert (await running.chat(session="s")).status_code == 200
                assert len(a.seen) == 1
                assert not paused.resume.is_set()
                paused.resume.set()
                text = (await answer.aread()).decode()
            assert text.endswith("data: [DONE]\n\n")
            record = await running.record(answer)
            assert record["state"] == "done"
            assert record["outcome"]["prompt"] > 0
            pool = running.router._services.pool
            await running.eventually(lambda: pool.control_of("a"), lambda known: known is None)
            upstream = running.router._services.upstream
            assert upstream._addresses.keys() == {b.url}
            # Its session goes on where it can.
            assert (await running.chat(session="s")).status_code == 200
            assert (len(a.seen), len(b.seen)) == (1, 2)


async def test_a_broken_file_leaves_the_engines_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted once, seen in a gauge, and over when the file is mended."""
    a, b = FakeEngine("a"), FakeEngine("b")
    path = tmp_path / "engines.toml"
    async with fake_engines(a, b):
        write(path, [a])
        async with bench(engines_file=str(path)) as running:
            await running.ready()
            assert await running.metric(REFUSED) == 0
            for text in ("[[engines", table({**b.as_config(), "side": "both"})):
                path.write_text(text)
                refused = len(running.of_kind(EnginesRefused))
                await running.eventually(
                    lambda: running.of_kind(EnginesRefused),
                    lambda events, seen=refused: len(events) > seen,
                )
                assert await running.metric(REFUSED) == 1
                assert (await running.chat()).status_code == 200
            assert len(a.seen) == 2
            write(path, [a, b])
            await live_engines(running, 2, 2)
            assert await running.metric(REFUSED) == 0
            lists = 'turncache_router_engine_lists_total{result="refused"}'
            assert await running.metric(lists) == 2
    lines = [each for each in caplog.messages if each.startswith("the engines in use stay")]
    assert len(lines) == 2
    assert all(str(path) in line for line in lines)
    assert "'both': expected one of single, prefill, decode" in lines[1]


async def test_a_fleet_of_pairs_follows_its_file(tmp_path: Path) -> None:
    """A list without a side is refused; another decode engine takes over with a return."""
    fleet: dict[str, FakeEngine] = {}
    prefill = FakeEngine("p", "prefill", fleet=fleet)
    first, second = (FakeEngine(name, "decode", fleet=fleet) for name in ("d0", "d1"))
    path = tmp_path / "engines.toml"
    async with fake_engines(prefill, first, second):
        write(path, [prefill, first])
        async with bench(engines_file=str(path)) as running:
            await running.ready()
            write(path, [prefill])
            await running.eventually(lambda: running.metric(REFUSED), lambda refused: refused == 1)
            assert (await running.chat(session="s")).status_code == 200
            write(path, [second, prefill])
            await running.eventually(lambda: running.of_kind(EngineLeft), bool)
            answer = await running.eventually(
                lambda: running.chat(session="s"), lambda answer: answer.status_code == 200
            )
            assert (await running.record(answer))["reason"] == "source_gone"
            snapshot = running.router._services.pool.snapshot(return_enabled=True)
            assert [view.name for view in snapshot.of_side(Side.DECODE)] == ["d1"]
            assert (len(first.seen), len(second.seen) > 0) == (1, True)
