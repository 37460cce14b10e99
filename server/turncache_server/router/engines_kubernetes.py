"""The engines that Kubernetes names: the EndpointSlices of their services, watched.

A service of engines carries the label ``turncache/side`` (``prefill``, ``decode`` or
``single``), which Kubernetes copies to its EndpointSlices, and has a port ``http`` and, with a
control socket, a port ``control``. Each endpoint is an engine, called like its pod. Whether it
is ready does not count: the router finds out itself which engines live, and one that drains is
still a source.

:class:`Slices` owns what has been seen of them. A state that cannot be used, and an API that
cannot be asked, are reported once, and the engines before it stay in use.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import aiohttp

from turncache.errors import ConfigError, ProtocolError
from turncache_server.router.background import running
from turncache_server.router.config import EngineConfig, RouterConfig, check_engines
from turncache_server.router.events import EnginesRefused, Events
from turncache_server.router.pool import Pool

SIDE_LABEL: Final = "turncache/side"
_NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: After so long the API ends a watch, and the list is read again.
_WATCH_S: Final = 240
_LIST_TIMEOUT_S: Final = 30
#: No answer, or one whose shape is another: whoever watches must not end with it.
_UNREADABLE: Final = (
    aiohttp.ClientError,
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
)


class Slices:
    """The EndpointSlices that are known, by name."""

    def __init__(self) -> None:
        self._slices: dict[str, Mapping[str, Any]] = {}

    def replace(self, slices: Iterable[Mapping[str, Any]]) -> None:
        """Take a whole list."""
        self._slices = {each["metadata"]["name"]: each for each in slices}

    def change(self, kind: str, each: Mapping[str, Any]) -> None:
        """Take an event of a watch; bookmarks change nothing."""
        if kind == "DELETED":
            self._slices.pop(each["metadata"]["name"], None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[each["metadata"]["name"]] = each

    def engines(self, *, keyed: bool) -> tuple[EngineConfig, ...]:
        """Return the engines.

        Args:
            keyed: see :func:`turncache_server.router.config.read_engines`.

        Raises:
            ConfigError: they are no fleet: none at all, no engine of a side, two of one name.
        """
        # An endpoint may be in two slices for a moment, while it moves.
        found = {
            engine["name"]: engine
            for name in sorted(self._slices)
            for engine in _engines_of(self._slices[name])
        }
        try:
            return check_engines([found[name] for name in sorted(found)], keyed=keyed)
        except (ConfigError, ProtocolError) as error:
            raise ConfigError("kubernetes_selector", f"its EndpointSlices: {error}") from error


def _engines_of(each: Mapping[str, Any]) -> Iterable[dict[str, str]]:
    """Read the engines of a slice as tables of the settings; what is none is left out."""
    side = each["metadata"].get("labels", {}).get(SIDE_LABEL)
    ports = {port.get("name"): port.get("port") for port in each.get("ports") or ()}
    if side is None or not ports.get("http"):
        return
    for endpoint in each.get("endpoints") or ():
        pod = (endpoint.get("targetRef") or {}).get("name")
        addresses = endpoint.get("addresses")
        if not pod or not addresses:
            continue
        # Kubernetes says that all of them are the same; the first is used by everybody.
        host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        engine = {"name": pod, "side": side, "url": f"http://{host}:{ports['http']}"}
        if ports.get("control"):
            engine["control"] = f"tcp://{host}:{ports['control']}"
        yield engine


class Gone(Exception):
    """Raised when the API knows no changes since the version that was asked for."""


class Watcher:
    """Asks the API for the slices that a selector takes.

    Args:
        client: an ``ApiClient`` of ``kubernetes.aio``, with its address and credentials.
        namespace: where the services are.
        selector: label selector.
    """

    def __init__(self, client: Any, namespace: str, selector: str) -> None:
        from kubernetes.aio.client import DiscoveryV1Api  # noqa: PLC0415 - an extra

        # The plain answers: what an API newer than the client adds must not stop a router.
        self._ask = DiscoveryV1Api(client).list_namespaced_endpoint_slice_without_preload_content
        self._namespace = namespace
        self._selector = selector

    async def list(self) -> tuple[list[Mapping[str, Any]], str]:
        """Return all slices and the version of the list.

        Raises:
            ConfigError: the API refuses; its words are in it.
            aiohttp.ClientError, OSError, ValueError: it does not answer as it should.
        """
        async with asyncio.timeout(_LIST_TIMEOUT_S):
            answer = await self._ask(self._namespace, label_selector=self._selector)
            async with answer:
                data = await _checked(answer)
        return list(data["items"]), data["metadata"]["resourceVersion"]

    async def changes(self, version: str) -> AsyncIterator[tuple[str, Mapping[str, Any]]]:
        """Yield the changes since a version, until the API ends the watch.

        Raises:
            Gone: the version is too old.
        """
        answer = await self._ask(
            self._namespace,
            label_selector=self._selector,
            watch=True,
            resource_version=version,
            timeout_seconds=_WATCH_S,
        )
        async with answer:
            if answer.status != HTTPStatus.OK:
                await _checked(answer)
            while line := await answer.content.readline():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    _refuse(event["object"].get("code", 500), event["object"])
                yield event["type"], event["object"]


async def _checked(answer: Any) -> dict[str, Any]:
    data = json.loads(await answer.read())
    if answer.status != HTTPStatus.OK:
        _refuse(answer.status, data)
    assert isinstance(data, dict)
    return data


def _refuse(status: int, said: Mapping[str, Any]) -> None:
    if status == HTTPStatus.GONE:
        raise Gone
    raise ConfigError(
        "kubernetes_selector",
        f"Kubernetes answers {status}: {str(said.get('message', ''))[:300]}; the router's service "
        "account needs get, list and watch on endpointslices",
    )


@asynccontextmanager
async def kubernetes_followed(
    config: RouterConfig, pool: Pool, events: Events, client: Any | None = None
) -> AsyncIterator[None]:
    """Follow the slices of ``kubernetes_selector``, if one is set, for the length of the block.

    Args:
        config: the settings.
        pool: told of the engines.
        events: told of what changes.
        client: an ``ApiClient``; by default one with the service account of the pod.

    Raises:
        ConfigError: the package is missing, or this is no pod.
    """
    if not config.kubernetes_selector:
        yield
        return
    client = client or _in_cluster()
    watcher = Watcher(client, _namespace(config), config.kubernetes_selector)
    try:
        async with running(_follow(watcher, config, pool, events), "follow Kubernetes"):
            yield
    finally:
        await client.close()


async def _follow(watcher: Watcher, config: RouterConfig, pool: Pool, events: Events) -> None:
    taker = _Taker(config, pool, events)
    while True:
        try:
            slices, version = await watcher.list()
            taker.slices.replace(slices)
            taker.take()
            async for kind, each in watcher.changes(version):
                taker.slices.change(kind, each)
                taker.take()
        except Gone:
            pass  # the list is read again
        except ConfigError as error:
            taker.refuse(str(error))
        except _UNREADABLE as error:
            taker.refuse(f"Kubernetes cannot be asked: {error or type(error).__name__}")
        await asyncio.sleep(config.health_interval_s)


class _Taker:
    """Hands the engines to the pool when they have changed, and says once what is wrong."""

    def __init__(self, config: RouterConfig, pool: Pool, events: Events) -> None:
        self.slices = Slices()
        self._keyed = bool(config.fleet_secret_file)
        self._pool = pool
        self._events = events
        self._taken: tuple[EngineConfig, ...] = ()
        self._told: str | None = None

    def take(self) -> None:
        try:
            engines = self.slices.engines(keyed=self._keyed)
        except ConfigError as error:
            self.refuse(str(error))
            return
        if engines != self._taken or self._told is not None:
            self._taken, self._told = engines, None
            self._events.emit(self._pool.adopt(engines))

    def refuse(self, why: str) -> None:
        if why != self._told:
            self._told = why
            self._events.emit(EnginesRefused(why=why))


def _in_cluster() -> Any:
    try:
        from kubernetes.aio import client, config  # noqa: PLC0415 - an extra, slow to import
    except ImportError as error:
        raise ConfigError(
            "kubernetes_selector",
            "needs the package kubernetes: pip install 'turncache[kubernetes]'",
        ) from error
    settings = client.Configuration()
    load: Any = config.load_incluster_config  # without types
    try:
        load(settings)
    except config.ConfigException as error:
        raise ConfigError(
            "kubernetes_selector",
            f"{error} It is for a router in a pod with a service account "
            "(automountServiceAccountToken: true)",
        ) from error
    return client.ApiClient(settings)


def _namespace(config: RouterConfig) -> str:
    if config.kubernetes_namespace:
        return config.kubernetes_namespace
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(
            "kubernetes_namespace", f"cannot read the pod's own: {error}; name it"
        ) from error
