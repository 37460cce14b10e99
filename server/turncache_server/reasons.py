"""What every reason means, and what to do about it. The docs' table is made from this.

``python -m turncache_server.reasons`` prints the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from turncache.protocol import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """One reason.

    Attributes:
        means: what has happened.
        do: what to do when it comes often.
    """

    means: str
    do: str


EXPLANATIONS: Final[Mapping[Reason, Explanation]] = MappingProxyType(
    {
        Reason.OK: Explanation(means="everything that could be reused was", do="nothing"),
        Reason.NEW_SESSION: Explanation(
            means="no earlier call of this session is remembered",
            do="if it should be known: does the client send the same session id, and has no "
            "`final` been sent?",
        ),
        Reason.BELOW_THRESHOLD: Explanation(
            means="less was missing than is worth a pull (`kv_recompute_threshold`, 64 tokens)",
            do="nothing",
        ),
        Reason.DEARER: Explanation(
            means="pulling was measured to take longer than computing",
            do="look at `turncache_pull_cost_seconds`: a slow link, or UCX over TCP",
        ),
        Reason.EVICTED: Explanation(
            means="an earlier call had computed it, and it is gone: the pool was needed, the "
            "retention was over, or the source changed during the read",
            do="a longer retention, a larger `retain_budget`, a larger pool or a host tier; "
            "`turncache_retention_broken_blocks_total` says which",
        ),
        Reason.OVER_BUDGET: Explanation(
            means="abandoned reads withhold so many blocks that nothing more is pulled",
            do="look for `was abandoned` in the log: which peer hangs?",
        ),
        Reason.DIVERGED: Explanation(
            means="the history differs from what was computed, from token `at` on",
            do="edited or compacted on purpose: nothing. Else `turncache doctor` names the "
            "message: timestamps, reordered tools, reasoning that the template strips",
        ),
        Reason.SOURCE_UNKNOWN: Explanation(
            means="the engine that was named is not among this engine's `peers`, or the directory "
            "of sessions did not answer",
            do="let all be written by `turncache flags`, or name it in `peers`; is Redis there?",
        ),
        Reason.SOURCE_GONE: Explanation(
            means="the engine that has the KV does not answer, was restarted or has just failed "
            "others",
            do="if it lives: control socket, firewall, a stuck engine loop",
        ),
        Reason.TIMEOUT: Explanation(
            means="the read did not come within its deadline",
            do="a stalled peer or link; `pull_timeout_s` gives it more time",
        ),
        Reason.INCOMPATIBLE: Explanation(
            means="the peer differs in model, weights, version or settings",
            do="its log line names both values: start both alike",
        ),
        Reason.UNSUPPORTED: Explanation(
            means="this kind of request or set-up was never proven",
            do="see the table of set-ups in the connectors' README",
        ),
        Reason.DISABLED: Explanation(
            means="switched off, on purpose or by the extension itself",
            do="`turncache mode`, `turncache doctor`: which engine, and why",
        ),
        Reason.ERROR: Explanation(
            means="the engine said something that this router does not know",
            do="versions of router and engine that are more than one apart",
        ),
    }
)


def table() -> str:
    """Return the table in Markdown."""
    lines = ["| reason | means | when it comes often |", "|---|---|---|"]
    lines += [
        f"| `{reason}` | {explanation.means} | {explanation.do} |"
        for reason, explanation in EXPLANATIONS.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())  # noqa: T201 - the program's result
