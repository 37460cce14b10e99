"""In which order lineages give their blocks up."""

from __future__ import annotations

from collections.abc import Iterable

from turncache_server.retention.policy import Policy
from turncache_server.retention.sessions import Lineage


def least_valuable_first(
    lineages: Iterable[Lineage], policy: Policy, now_s: float
) -> list[Lineage]:
    """Order lineages by value, the next victim first.

    Lineages that a call in flight continues come after all others, hand-overs after both. Within
    these, the policy decides, and the earlier use where it sees no difference. Priorities
    exchange places within a tenant only: nobody gains against another tenant by asking.
    """
    ranked = sorted(
        lineages,
        key=lambda each: (_tier(each), policy.value(each, now_s), each.used),
    )
    by_tenant: dict[tuple[str | None, int], list[int]] = {}
    for place, lineage in enumerate(ranked):
        by_tenant.setdefault((lineage.tenant, _tier(lineage)), []).append(place)
    out = list(ranked)
    for places in by_tenant.values():
        theirs = [ranked[place] for place in places]
        if any(each.priority != theirs[0].priority for each in theirs):
            # Stable: equal priorities keep the order of value.
            theirs.sort(key=lambda each: each.priority)
            for place, lineage in zip(places, theirs, strict=True):
                out[place] = lineage
    return out


def _tier(lineage: Lineage) -> int:
    if lineage.handover:
        return 2
    return 1 if lineage.in_flight else 0
