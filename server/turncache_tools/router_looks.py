"""What a running router says of itself over HTTP: for ``turncache doctor`` and ``top``."""

from __future__ import annotations

import http.client
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turncache.errors import EngineFault, why_of
from turncache_server.launch.loopback import Answer, get

#: What a router is named by on a command line without a key.
NO_KEY: Final = "-"
#: Members of ``GET /v1/sessions`` that tell of a place where calls wait.
_ADMISSION: Final = "admission"
_HANDOVER: Final = "handover"


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantWait:
    """The calls of one tenant that wait.

    Attributes:
        tenant: its name.
        waiting: how many they are.
        longest_s: for how long the first of them has waited.
    """

    tenant: str
    waiting: int
    longest_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One place in a router where calls wait.

    Attributes:
        name: of the place: ``admission``, before anything is planned; ``handover`` with the name of
            a prefill engine, before their prefill leg.
        waiting: calls.
        longest_s: for how long the first of them has waited, 0 when none does.
        sessions: that are expected back, with those that are served; 0 where prompts wait.
        tokens: of these sessions, or of the prompts that decode has not taken.
        fits: tokens that there may be, None when nobody knows.
        tenants: who waits, the one with most calls first; empty where there are no tenants.
    """

    name: str
    waiting: int
    longest_s: float
    sessions: int
    tokens: int
    fits: int | None
    tenants: Sequence[TenantWait] = ()


def ask_router(url: str, path: str, *, api_key: str, timeout_s: float) -> Answer:
    """Return what a router answers on a path.

    Raises:
        EngineFault: there is no answer.
    """
    headers = {} if api_key == NO_KEY else {"Authorization": f"Bearer {api_key}"}
    try:
        return get(f"{url}{path}", headers, timeout_s=timeout_s)
    except TimeoutError as error:
        raise EngineFault(url, f"does not answer {path} within {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        why = why_of(error) or type(error).__name__
        raise EngineFault(url, f"does not answer {path} ({why}): is it running there?") from error


def waits_of(url: str, *, api_key: str, timeout_s: float) -> list[Wait]:
    """Return where calls wait in a router.

    One that lets everybody in has no place for that, nor for prompts without a bound for them.

    Raises:
        EngineFault: it does not answer, or does not say it to whoever asks.
    """
    answer = ask_router(url, "/v1/sessions", api_key=api_key, timeout_s=timeout_s)
    if answer.status in (401, 403):
        raise EngineFault(
            url,
            "tells who waits to an administrator alone: give an administrator's key with "
            "--api-key, or ask from the router's own machine",
        )
    if answer.status != 200 or "num_sessions" not in (found := answer.data()):
        raise EngineFault(url, f"answers {answer.status}, and not as a router: is it one?")
    places = [_admission(found[_ADMISSION])] if _ADMISSION in found else []
    return [*places, *map(_handover, found.get(_HANDOVER, ()))]


def _handover(told: Mapping[str, Any]) -> Wait:
    return Wait(
        name=f"{_HANDOVER} {told['engine']}",
        waiting=int(told["waiting"]),
        longest_s=float(told["longest_wait_s"]),
        sessions=0,
        tokens=int(told["tokens"]),
        fits=told["limit"],
    )


def _admission(told: Mapping[str, Any]) -> Wait:
    # A router of the version before says how many wait, and no more.
    return Wait(
        name=_ADMISSION,
        waiting=int(told["waiting"]),
        longest_s=float(told.get("longest_wait_s", 0.0)),
        sessions=int(told["sessions"]),
        tokens=int(told["tokens"]),
        fits=told["fits"],
        tenants=tuple(
            TenantWait(
                tenant=each["tenant"], waiting=each["waiting"], longest_s=each["longest_wait_s"]
            )
            for each in told.get("tenants", ())
            if each["tenant"] is not None
        ),
    )


def engines_at_zero(url: str, metric: str, *, api_key: str, timeout_s: float) -> list[str]:
    """Return the engines for which a metric of the router says 0; none where it is not shown."""
    try:
        answer = ask_router(url, "/metrics", api_key=api_key, timeout_s=timeout_s)
    except EngineFault:
        return []
    text = answer.body.decode(errors="replace") if answer.status == 200 else ""
    return sorted(re.findall(rf'^{metric}{{engine="([^"]*)",[^}}]*}} 0\.0$', text, re.MULTILINE))
