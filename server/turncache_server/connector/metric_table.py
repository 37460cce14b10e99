"""Which numbers of ours vLLM's ``/metrics`` shows, and what good values are. Pure.

The docs' table is made from this: ``python -m turncache_server.connector.metric_table``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from turncache.protocol import Mode, Reason
from turncache_server.connector.lacking import ENDS
from turncache_server.control.messages import DROP_CODES, INCOMPATIBLE_CODES
from turncache_server.retention.ghost_pool import Fate


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric.

    Attributes:
        name: as Prometheus has it, without ``_total``.
        text: what it counts.
        good: what a good value is.
        label: its label, empty for none.
        keys: our counter or gauge by value of the label.
    """

    name: str
    text: str
    good: str
    label: str = ""
    keys: Mapping[str, str]


def _by_reason(prefix: str) -> dict[str, str]:
    return {reason.value: f"{prefix}_{reason.value}" for reason in Reason}


COUNTER_METRICS: Final = (
    Metric(
        name="turncache_prompt_tokens",
        text="Prompt tokens of calls with a session, by where their KV came from.",
        good="computed close to what is new in every call",
        label="source",
        keys={word: f"{word}_tokens" for word in ("local", "returned", "computed")},
    ),
    Metric(
        name="turncache_lost_tokens",
        text="Computed prompt tokens that an earlier call of the lineage had computed.",
        good="0; over a tenth of the computed tokens is an alert",
        label="reason",
        keys=_by_reason("lost_tokens"),
    ),
    Metric(
        name="turncache_calls",
        text="Ended calls with a session, by the reason for not reusing more.",
        good="nearly all ok or new_session",
        label="reason",
        keys=_by_reason("calls"),
    ),
    Metric(
        name="turncache_retention_broken_blocks",
        text="Retained blocks that were given up before their session came back.",
        good="0 while the working set fits; pressure: the pool is too small for it",
        label="cause",
        keys={"pressure": "evicted_wanted_blocks", "budget": "clipped_blocks"},
    ),
    Metric(
        name="turncache_pulls",
        text="Pulls from peers: verified, failed after they had begun, or never begun and why.",
        good="verified; any incompatible is an alert",
        label="result",
        keys={"verified": "pulls_verified", "failed": "pulls_failed", **_by_reason("pulls")},
    ),
    Metric(
        name="turncache_finds",
        text="Searches for a session's KV where no hint named an engine, by how they ended.",
        good="failed 0; nothing is normal for a session's first call",
        label="result",
        keys={result: f"finds_{result}" for result in ("found", "nothing", "failed")},
    ),
    Metric(
        name="turncache_repeat_waits",
        text="Hand-overs lost before they were pulled, that waited for prefill to compute them "
        "again, by how that ended.",
        good="0; again: prefill's pool is too small; there: it had only not answered; timeout, "
        "refused, full: decode computed",
        label="result",
        keys={how: f"repeat_waits_{how}" for how in ENDS},
    ),
    Metric(
        name="turncache_pulled_blocks",
        text="Blocks whose content was taken from a peer and confirmed.",
        good="grows with every return",
        keys={"": "pulled_blocks"},
    ),
    Metric(
        name="turncache_pulled_rests",
        text="Pulls that brought a block in part: what was not filled, or all but the last token.",
        good="nearly as many as verified pulls",
        keys={"": "pulled_rests"},
    ),
    Metric(
        name="turncache_transfer_bytes",
        text="Bytes of KV that were taken from peers and confirmed, over all ranks.",
        good="blocks times the size of one",
        keys={"": "pulled_bytes"},
    ),
    Metric(
        name="turncache_abandoned_reads",
        text="Reads given up at their deadline while their transfer could still write.",
        good="0; near the cap of withheld blocks is an alert",
        keys={"": "reads_abandoned"},
    ),
    Metric(
        name="turncache_stock_handovers",
        text="Prompts handed over by vLLM's own logic, because nothing is pulled.",
        good="0 in mode on",
        keys={"": "stock_handovers"},
    ),
    Metric(
        name="turncache_control_dropped",
        text="Messages and connections that the control socket refused, by why.",
        good="stands still; the connectors' README says what to do",
        label="why",
        keys={code: f"control_dropped_{code}" for code in DROP_CODES},
    ),
    Metric(
        name="turncache_peer_hellos_refused",
        text="Hellos of this engine that a peer refused, by why.",
        good="stands still",
        label="why",
        keys={code: f"peer_hellos_refused_{code}" for code in INCOMPATIBLE_CODES},
    ),
    Metric(
        name="turncache_computed_again_tokens",
        text="In mode observe: prompt tokens computed again, really and in the ghost's pools.",
        good="real near 0; one pool far below stock shows a remedy",
        label="pool",
        keys={
            "real": "observed_again_tokens",
            **{name: f"observed_again_tokens_{name}" for name in ("stock", "retention", "double")},
        },
    ),
    Metric(
        name="turncache_unkept_tokens",
        text="In mode observe: what retention would not have had, by why.",
        good="0; over_budget and expired are settings, evicted is the pool's size",
        label="fate",
        keys={fate.value: f"observed_unkept_tokens_{fate.value}" for fate in Fate},
    ),
)
GAUGE_METRICS: Final = (
    Metric(
        name="turncache_blocks",
        text="Blocks of the pool, by class; abandoned ones are among those in use.",
        good="retained below the budget, abandoned 0",
        label="class",
        keys={
            "used": "used_blocks",
            "ordinary": "ordinary_blocks",
            "retained": "retained_blocks",
            "abandoned": "abandoned_blocks",
        },
    ),
    Metric(
        name="turncache_sessions",
        text="Sessions that are remembered.",
        good="bounded",
        keys={"": "sessions"},
    ),
    Metric(
        name="turncache_mode",
        text="1 for the mode that is in force.",
        good="on",
        label="mode",
        keys={mode.value: f"mode_{mode.value}" for mode in Mode},
    ),
    Metric(
        name="turncache_broken",
        text="1 when the extension has switched itself off and the engine runs as stock.",
        good="0",
        keys={"": "broken"},
    ),
    Metric(
        name="turncache_pull_cost_seconds",
        text="Measured costs: to compute or to pull 1,000 tokens, and latency of a pull.",
        good="pull far below compute",
        label="of",
        keys={
            "compute_1000_tokens": "compute_1000_tokens_s",
            "pull_1000_tokens": "pull_1000_tokens_s",
            "pull_latency": "pull_latency_s",
        },
    ),
)
HISTOGRAM_METRICS: Final = (
    Metric(
        name="turncache_peek_seconds",
        text="From a question to a peer, what it holds of a prompt, to the answer.",
        good="milliseconds; above half a second a question is given up",
        keys={"": "peek_s"},
    ),
    Metric(
        name="turncache_transfer_seconds",
        text="From the begin of a read to its confirmation by the source.",
        good="far below what computing the same takes",
        keys={"": "transfer_s"},
    ),
)
#: Upper bounds of their buckets.
BUCKETS_S: Final = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
)


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| metric | counts | a good value |", "|---|---|---|"]
    for metrics, suffix in (
        (COUNTER_METRICS, "_total"),
        (GAUGE_METRICS, ""),
        (HISTOGRAM_METRICS, ""),
    ):
        for metric in metrics:
            label = f"{{{metric.label}}}" if metric.label else ""
            lines.append(f"| `{metric.name}{suffix}{label}` | {metric.text} | {metric.good} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201 - the program's result
