"""What engines were observed to do, summed: from traces or from live counters. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from turncache_server.retention.trace import Trace, TraceCall

_OBSERVED: Final = "observed_"
_HOST: Final = "again_tokens_host_"


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """A session that breaks its own cache.

    Attributes:
        session: its hash.
        calls: its calls.
        breaks: calls that changed what the session's last prompt said.
        tokens: of these calls, behind the change, as many as the last prompt had.
        worst_tokens: of the largest break.
        worst_at: where that one broke, in tokens from the start of the prompt.
        worst_prompt: length of that prompt.
    """

    session: str
    calls: int
    breaks: int
    tokens: int
    worst_tokens: int
    worst_at: int
    worst_prompt: int


@dataclass(slots=True, kw_only=True)
class Usage:
    """Counts in tokens, over all calls of one source or of several.

    Attributes:
        source: a file, an address, or how many of them.
        side: of the engine, empty when unknown or mixed.
        mode: in which it ran, empty when unknown or mixed.
        calls: that have ended.
        prompt: of prompts.
        computed: of prompts, computed by the engine.
        seen: that an earlier call had computed.
        local: found in the engine's cache.
        again: seen and computed again, in reality.
        pools: the same in each simulated pool, by name: ``stock``, ``retention``, ``double``.
        host: the same with a host tier, by its size in GB.
        answers: that decode holds as answers and prefill had to compute.
        lost: by the reason of the engine's own records.
        unkept: that retention would have lost, by why.
        prefill_tokens: computed in large steps.
        prefill_s: what these steps took.
        span_s: from the first arrival to the last end, 0 when unknown.
        dropped: events that the ghost did not see.
        breakers: None when the source does not name sessions.
    """

    source: str
    side: str = ""
    mode: str = ""
    calls: int = 0
    prompt: int = 0
    computed: int = 0
    seen: int = 0
    local: int = 0
    again: int = 0
    pools: Counter[str] = field(default_factory=Counter)
    host: dict[float, int] = field(default_factory=dict)
    answers: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    unkept: Counter[str] = field(default_factory=Counter)
    prefill_tokens: int = 0
    prefill_s: float = 0.0
    span_s: float = 0.0
    dropped: int = 0
    breakers: list[Breaker] | None = None

    @property
    def prefill_speed(self) -> float | None:
        """Tokens per second that were measured, None without a measurement."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s > 0 else None

    @property
    def ghost_error(self) -> float | None:
        """How far the ghost of the engine as it ran is off, as a share of all prompts.

        None when the mode changed or is unknown, or nothing was seen.
        """
        pool = {"observe": "stock", "on": "retention"}.get(self.mode)
        if pool is None or not self.prompt:
            return None
        return abs((self.seen - self.pools[pool]) - self.local) / self.prompt


def of_traces(source: str, traces: Iterable[Trace]) -> Usage:
    """Sum the parts of one engine's trace."""
    usage = Usage(source=source, breakers=[])
    sessions: defaultdict[str, list[TraceCall]] = defaultdict(list)
    first, last = float("inf"), 0.0
    for trace in traces:
        head = trace.header
        usage.side, usage.mode = head.side, head.mode
        for call in trace.calls:
            _add_call(usage, call, head.host_gb)
            first, last = min(first, call.t), max(last, call.end)
            if call.session is not None:
                sessions[call.session].append(call)
        if trace.speed is not None and trace.speed.prefill_tokens > usage.prefill_tokens:
            # Totals since the start of the trace: the last one holds all of them.
            usage.prefill_tokens = trace.speed.prefill_tokens
            usage.prefill_s = trace.speed.prefill_s
    usage.span_s = max(0.0, last - first)
    usage.breakers = breakers(sessions)
    return usage


def _add_call(usage: Usage, call: TraceCall, host_gb: tuple[float, ...]) -> None:
    usage.calls += 1
    usage.prompt += call.prompt
    usage.computed += call.prompt - call.local - call.returned
    usage.seen += call.seen
    # Beyond what was seen, the engine knows more than the ghost: no error of the pools.
    usage.local += min(call.local, call.seen)
    usage.again += call.again
    for name, found in (
        ("stock", call.stock),
        ("retention", call.retention),
        ("double", call.double),
    ):
        usage.pools[name] += max(0, call.seen - found)
    for gigabytes, found in zip(host_gb, call.host, strict=False):
        usage.host[gigabytes] = usage.host.get(gigabytes, 0) + max(0, call.seen - found)
    usage.answers += call.from_answers
    if call.lost:
        usage.lost[call.reason] += call.lost
    if call.fate is not None:
        usage.unkept[call.fate] += max(0, call.seen - call.retention)


def breakers(sessions: Mapping[str, list[TraceCall]], most: int = 10) -> list[Breaker]:
    """Return the sessions that lose most by what they change, the worst first."""
    out = []
    for session, calls in sessions.items():
        broken = [call for call in calls if call.rewritten]
        if not broken:
            continue
        worst = max(broken, key=lambda call: call.rewritten)
        out.append(
            Breaker(
                session=session,
                calls=len(calls),
                breaks=len(broken),
                tokens=sum(call.rewritten for call in broken),
                worst_tokens=worst.rewritten,
                worst_at=worst.diverged_at or 0,
                worst_prompt=worst.prompt,
            )
        )
    return sorted(out, key=lambda each: (-each.tokens, each.session))[:most]


def of_counters(source: str, counters: Mapping[str, float], *, side: str, mode: str) -> Usage:
    """Read the counters of one running engine."""
    seen = {
        name.removeprefix(_OBSERVED): value
        for name, value in counters.items()
        if name.startswith(_OBSERVED)
    }

    def count(name: str) -> int:
        return int(seen.get(name, 0))

    def by(prefix: str) -> Counter[str]:
        return Counter(
            {n.removeprefix(prefix): int(v) for n, v in seen.items() if n.startswith(prefix)}
        )

    return Usage(
        source=source,
        side=side,
        mode=mode,
        calls=count("calls"),
        prompt=count("prompt_tokens"),
        computed=count("computed_tokens"),
        seen=count("seen_tokens"),
        local=count("local_seen_tokens"),
        again=count("again_tokens"),
        pools=Counter({n: count(f"again_tokens_{n}") for n in ("stock", "retention", "double")}),
        host={float(n.removesuffix("gb")): tokens for n, tokens in by(_HOST).items()},
        answers=count("answer_tokens"),
        lost=by("lost_tokens_"),
        unkept=by("unkept_tokens_"),
        prefill_tokens=count("prefill_tokens"),
        prefill_s=seen.get("prefill_seconds", 0.0),
        dropped=count("dropped_events"),
    )


def total(usages: list[Usage]) -> Usage:
    """Sum several engines."""
    if len(usages) == 1:
        return usages[0]
    sum_of = Usage(source=f"{len(usages)} engines")
    known = [usage.breakers for usage in usages if usage.breakers is not None]
    if known:
        every = [breaker for found in known for breaker in found]
        sum_of.breakers = sorted(every, key=lambda each: (-each.tokens, each.session))[:10]
    for usage in usages:
        for name in _SUMMED:
            setattr(sum_of, name, getattr(sum_of, name) + getattr(usage, name))
        for gigabytes, tokens in usage.host.items():
            sum_of.host[gigabytes] = sum_of.host.get(gigabytes, 0) + tokens
        sum_of.span_s = max(sum_of.span_s, usage.span_s)
    for name in ("side", "mode"):
        values = {getattr(usage, name) for usage in usages}
        if len(values) == 1:
            setattr(sum_of, name, values.pop())
    return sum_of


_SUMMED: Final = (
    "calls",
    "prompt",
    "computed",
    "seen",
    "local",
    "again",
    "pools",
    "answers",
    "lost",
    "unkept",
    "prefill_tokens",
    "prefill_s",
    "dropped",
)
