"""The part of Kubernetes' API that the router asks: EndpointSlices, listed and watched."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from aiohttp import web
from kubernetes.aio import client

from tests.fakes.engine import FakeEngine

NAMESPACE = "agents"
SELECTOR = "app.kubernetes.io/name=turncache"
_PATH = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices"


def slice_of(name: str, side: str, engines: Sequence[FakeEngine]) -> dict[str, Any]:
    """Make the slice of a service whose pods are engines, all on one port as pods are."""
    ports = {(urlsplit(e.url).port, urlsplit(e.control or "").port) for e in engines}
    ((http, control),) = ports or {(8000, None)}
    named = [("http", http), ("nixl", 5600), *([("control", control)] if control else [])]
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "addressType": "IPv4",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/name": "turncache", "turncache/side": side},
        },
        "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in named],
        "endpoints": [
            {
                "addresses": ["127.0.0.1"],
                "conditions": {"ready": False},
                "targetRef": {"kind": "Pod", "name": engine.name},
            }
            for engine in engines
        ],
    }


class KubernetesApi:
    """A stand-in for the API server.

    Attributes:
        forbidden: answer 403.
        num_lists: lists that were answered.
        num_watches: watches that were begun.
        asked: query and headers of the last request.
    """

    def __init__(self) -> None:
        self.forbidden = False
        self.num_lists = self.num_watches = 0
        self.asked: tuple[Mapping[str, str], Mapping[str, str]] = ({}, {})
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, str, dict[str, Any]]] = []
        self._version = self._oldest = 1
        self._changed = asyncio.Event()
        self._cuts = 0

    def put(self, each: dict[str, Any]) -> None:
        """Add or replace a slice."""
        name = each["metadata"]["name"]
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = each
        self._note(kind, each)

    def delete(self, name: str) -> None:
        """Remove a slice."""
        self._note("DELETED", self._slices.pop(name))

    def forget(self) -> None:
        """Compact: what has changed so far can only be listed. Running watches end as gone."""
        self._oldest = self._version + 1
        self._version += 1
        self.cut()

    def cut(self) -> None:
        """End the running watches, as the API does from time to time."""
        self._cuts += 1
        self._wake()

    def _note(self, kind: str, each: dict[str, Any]) -> None:
        self._version += 1
        each = {**each, "metadata": {**each["metadata"], "resourceVersion": str(self._version)}}
        self._events.append((self._version, kind, each))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        self.asked = (dict(request.query), dict(request.headers))
        if self.forbidden:
            return web.json_response(
                {"kind": "Status", "code": 403, "message": "endpointslices is forbidden"},
                status=403,
            )
        if request.query.get("watch") not in ("true", "True"):
            self.num_lists += 1
            return web.json_response(
                {
                    "kind": "EndpointSliceList",
                    "apiVersion": "discovery.k8s.io/v1",
                    "metadata": {"resourceVersion": str(self._version)},
                    "items": list(self._slices.values()),
                }
            )
        return await self._watch(request)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.num_watches += 1
        cuts, seen = self._cuts, int(request.query["resourceVersion"])
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        while True:
            changed = self._changed
            if seen < self._oldest - 1 or (cuts != self._cuts and seen < self._oldest):
                status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                await self._send(response, "ERROR", status)
                return response
            for version, kind, each in [e for e in self._events if e[0] > seen]:
                await self._send(response, kind, each)
                seen = version
            if cuts != self._cuts:
                return response
            await changed.wait()

    async def _send(self, response: web.StreamResponse, kind: str, each: Any) -> None:
        # Two writes: a line may come in pieces.
        line = json.dumps({"type": kind, "object": each}).encode() + b"\n"
        await response.write(line[:20])
        await asyncio.sleep(0)
        await response.write(line[20:])

    def client(self) -> client.ApiClient:
        """Make a client of the official package, with a token."""
        settings = client.Configuration(host=f"http://127.0.0.1:{self.port}")
        settings.api_key["BearerToken"] = "bearer secret-token"
        return client.ApiClient(settings)

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.add_routes([web.get(_PATH, self._serve)])
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port: int = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
        await self._runner.cleanup()
