"""What ``turncache doctor --router`` looks at: which engines live, and which of them pull."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from turncache.errors import EngineFault
from turncache_server.launch.loopback import HEALTH_TIMEOUT_S, Answer
from turncache_tools.finding import Finding, Verdict
from turncache_tools.router_looks import ask_router, engines_at_zero

_LIVE: Final = "turncache_router_engine_live"
_PULLS: Final = "turncache_router_engine_pulls"
#: How a router says that it serves calls, if only some.
_ABLE: Final = ("ok", "degraded")

#: From a metric to the engines for which it is 0.
_Named = Callable[[str], list[str]]


def look_at_router(url: str, *, api_key: str) -> list[Finding]:
    """Look at a router's engines as it sees them, side by side; or at an engine's health."""
    try:
        answer = ask_router(url, "/health", api_key=api_key, timeout_s=HEALTH_TIMEOUT_S)
    except EngineFault as error:
        why = str(error).removeprefix(f"{url}: ")
        return [Finding(subject=url, verdict="failed", detail=why)]
    health = answer.data()
    sides = health.get("sides")
    if not isinstance(sides, dict):
        return [_of_something(url, answer)]

    def named(metric: str) -> list[str]:
        return engines_at_zero(url, metric, api_key=api_key, timeout_s=HEALTH_TIMEOUT_S)

    findings = [_of_router(url, health)]
    findings += [_side(side, counts, named) for side, counts in sides.items()]
    if "decode" in sides:
        findings.append(_returns(health, sides))
    return findings


def _of_something(url: str, answer: Answer) -> Finding:
    if answer.status == 200:
        detail = "answers /health; it is no router of ours, which would count its engines"
        return Finding(subject=url, verdict="ok", detail=detail)
    detail = f"answers {answer.status} to /health instead of 200: is it running there?"
    return Finding(subject=url, verdict="failed", detail=detail)


def _of_router(url: str, health: Mapping[str, Any]) -> Finding:
    word = str(health.get("status"))
    details = {
        "ok": "serves calls",
        "degraded": "serves some calls only: engines of one side are gone, and a policy lets the "
        "others do alone what they can",
        "draining": "is being stopped, and takes no calls",
    }
    verdict: Verdict = "failed" if word not in _ABLE else "ok" if word == "ok" else "note"
    return Finding(
        subject=url,
        verdict=verdict,
        detail=details.get(word, "serves no call: engines of a side are gone, see below"),
    )


def _side(side: str, counts: Mapping[str, int], named: _Named) -> Finding:
    engines, live, pulling = (counts[name] for name in ("engines", "live", "pulling"))
    detail = f"{live} of {engines} answer"
    if live < engines:
        return Finding(
            subject=side,
            verdict="note" if live else "failed",
            detail=f"{detail}{_but(named(_LIVE))}: is it running, and is its url right in the "
            "router's settings? Its log and the router's say why",
        )
    if side == "single":
        return Finding(subject=side, verdict="ok", detail=detail)
    detail += f", {pulling} of {engines} take and give KV by verified pulls"
    if pulling == engines:
        return Finding(subject=side, verdict="ok", detail=detail)
    return Finding(
        subject=side,
        verdict="note",
        detail=f"{detail}{_but(named(_PULLS))}: it is in mode off or observe (turncache mode "
        "ENGINE on), has declined (turncache doctor ENGINE says why), or is another kind of engine",
    )


def _but(names: list[str]) -> str:
    return f", but not {', '.join(names)}" if names else ""


def _returns(health: Mapping[str, Any], sides: Mapping[str, Mapping[str, int]]) -> Finding:
    if not health.get("return_enabled"):
        return Finding(
            subject="return",
            verdict="note",
            detail="off: return_enabled is false in the router's settings, or was switched off "
            "since (POST /admin/return); prefill computes what decode has",
        )
    if all(counts["pulling"] == counts["engines"] for counts in sides.values()):
        return Finding(
            subject="return", verdict="ok", detail="on: prefill pulls from decode what it lacks"
        )
    return Finding(
        subject="return",
        verdict="note",
        detail="on, but not for every call: where an engine that does not pull may serve it, "
        "prompts are handed over as stock vLLM does, and nothing comes back to prefill",
    )
