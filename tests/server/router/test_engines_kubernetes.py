"""Engines that Kubernetes names: its EndpointSlices, listed, watched and listed again."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine, fake_engines
from tests.fakes.kubernetes_api import NAMESPACE, SELECTOR, KubernetesApi, slice_of
from tests.server.router.support import Bench, bench
from turncache.errors import ConfigError
from turncache_server.router.config import parse_config
from turncache_server.router.engines_kubernetes import Slices
from turncache_server.router.events import EngineLeft, EnginesRefused

pytestmark = pytest.mark.anyio

SETTINGS = {"kubernetes_selector": SELECTOR, "kubernetes_namespace": NAMESPACE}
REFUSED = "turncache_router_engine_list_refused"


async def live(running: Bench, num_live: int) -> None:
    """Wait until the router has so many live engines, and no others."""

    def known(answer: Any) -> bool:
        counts = [(side["live"], side["engines"]) for side in answer.json()["sides"].values()]
        return counts == [(num_live, num_live)]

    await running.eventually(lambda: running.http.get("/health"), known)


async def test_engines_come_and_go_with_their_pods() -> None:
    """Without a restart, through a watch that ends and one whose version is gone."""
    a, b = FakeEngine("pod-0"), FakeEngine("pod-1")
    async with (
        fake_engines(a, b),
        KubernetesApi() as api,
        bench(kubernetes=api.client(), **SETTINGS) as running,
    ):
        health = await running.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "unavailable")
        assert (await running.chat()).status_code == 503
        api.put(slice_of("engines-x", "single", [a]))
        await live(running, 1)
        query, headers = api.asked
        assert query["labelSelector"] == SELECTOR
        assert headers["Authorization"] == "bearer secret-token"
        assert (await running.chat()).status_code == 200
        api.put(slice_of("engines-y", "single", [b]))
        await live(running, 2)
        # Ended in order, and nothing has changed.
        watches = api.num_watches
        api.cut()
        await running.eventually(lambda: api.num_watches, lambda count: count > watches)
        # Compacted: the change can only be found in the list.
        lists = api.num_lists
        api.forget()
        api.delete("engines-x")
        await running.eventually(lambda: running.of_kind(EngineLeft), bool)
        assert api.num_lists > lists
        await live(running, 1)
        a.seen.clear()
        assert (await running.chat()).status_code == 200
        assert not a.seen
        # Only that there was none yet: neither an end nor a gap of the watch is a fault.
        assert all("at least one" in e.why for e in running.of_kind(EnginesRefused))


async def test_an_api_that_refuses_leaves_the_engines_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Forbidden, away, or a list without a side: told once, seen in a gauge, and over after."""
    engine = FakeEngine("pod-0")
    async with (
        fake_engines(engine),
        KubernetesApi() as api,
        bench(kubernetes=api.client(), **SETTINGS) as running,
    ):
        api.put(slice_of("engines-x", "single", [engine]))
        await live(running, 1)
        await running.eventually(lambda: running.metric(REFUSED), lambda value: value == 0)
        api.forbidden = True
        api.cut()
        await running.eventually(lambda: running.metric(REFUSED), lambda value: value == 1)
        assert (await running.chat()).status_code == 200
        api.forbidden = False
        await running.eventually(lambda: running.metric(REFUSED), lambda value: value == 0)
        api.delete("engines-x")
        await running.eventually(lambda: running.metric(REFUSED), lambda value: value == 1)
        assert (await running.chat()).status_code == 200
        assert not running.of_kind(EngineLeft)
    (line,) = [m for m in caplog.messages if "403" in m]
    assert "endpointslices is forbidden" in line
    assert "get, list and watch" in line


async def test_slices_of_another_shape_do_not_end_the_watch() -> None:
    """They are refused like a list that is no fleet, and the next state counts again."""
    engine = FakeEngine("pod-0")
    async with (
        fake_engines(engine),
        KubernetesApi() as api,
        bench(kubernetes=api.client(), **SETTINGS) as running,
    ):
        good = slice_of("engines-x", "single", [engine])
        api.put({**good, "endpoints": [None]})
        await running.eventually(
            lambda: [e for e in running.of_kind(EnginesRefused) if "cannot be asked" in e.why], bool
        )
        api.put(good)
        await live(running, 1)


def test_slices_are_read_as_engines() -> None:
    """Each endpoint once, ready or not; what is no engine is left out."""
    slices = Slices()
    pods = [{"addresses": [f"fd00::{n}"], "targetRef": {"name": f"p-{n}"}} for n in (1, 2)]
    meta = {"labels": {"turncache/side": "prefill"}}
    http = [{"name": "http", "port": 8100}]
    control = [*http, {"name": "control", "port": 5800}]
    decode = {"labels": {"turncache/side": "decode"}}
    slices.replace(
        [
            {"metadata": {"name": "a", **meta}, "ports": http, "endpoints": pods},
            {"metadata": {"name": "b", **meta}, "ports": http, "endpoints": pods[:1]},
            {"metadata": {"name": "c", **decode}, "ports": control, "endpoints": None},
            {"metadata": {"name": "d"}, "ports": http, "endpoints": pods},
            {"metadata": {"name": "e", **meta}, "ports": None, "endpoints": pods},
            {"metadata": {"name": "f", **meta}, "ports": http, "endpoints": [{"addresses": []}]},
        ]
    )
    with pytest.raises(ConfigError, match="at least one prefill and one decode"):
        slices.engines(keyed=True)
    moved = {"addresses": ["10.0.0.7"], "targetRef": {"name": "d-0"}}
    slices.change(
        "MODIFIED", {"metadata": {"name": "c", **decode}, "ports": control, "endpoints": [moved]}
    )
    slices.change("BOOKMARK", {"metadata": {"resourceVersion": "9"}})
    engines = slices.engines(keyed=True)
    assert [(e.name, e.side.value, e.url, e.control) for e in engines] == [
        ("d-0", "decode", "http://10.0.0.7:8100", "tcp://10.0.0.7:5800"),
        ("p-1", "prefill", "http://[fd00::1]:8100", None),
        ("p-2", "prefill", "http://[fd00::2]:8100", None),
    ]
    with pytest.raises(ConfigError, match="fleet_secret_file"):
        slices.engines(keyed=False)


def test_engines_are_named_by_one_source() -> None:
    """Two lists would have to be merged."""
    engine = {"name": "a", "side": "single", "url": "http://h:1"}
    with pytest.raises(ConfigError, match="in one of"):
        parse_config({"kubernetes_selector": "a=b", "engines": [engine]})
    with pytest.raises(ConfigError, match="in one of"):
        parse_config({"kubernetes_selector": "a=b", "engines_file": "/nowhere"})


@pytest.mark.parametrize("installed", [True, False])
async def test_what_is_missing_is_said_at_start(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service account, or the package."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    if not installed:
        monkeypatch.setitem(sys.modules, "kubernetes.aio", None)
    word = "service account" if installed else r"turncache\[kubernetes\]"
    with pytest.raises(ConfigError, match=word):
        async with bench(**SETTINGS):
            pass
