"""What each remedy would save, as rows for people and as figures for programs. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from turncache_tools.figure import SCHEMA, Figure
from turncache_tools.observed.usage import Breaker, Usage

#: Beyond this share of all prompt tokens the ghost is not believed.
MOST_GHOST_ERROR: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """One way to compute less.

    Attributes:
        figure: its name in figures.
        name: for people.
        again: tokens that are computed again with it.
        saved: against an engine without turncache.
        seconds: accelerator seconds saved, None when the speed of prefill is unknown.
    """

    figure: str
    name: str
    again: int
    saved: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One page.

    Attributes:
        usages: by engine.
        total: of all of them.
        speed: tokens of prefill per second that are reckoned with, None when unknown.
        speed_is_given: it was an option, not measured.
        remedies: the most useful first.
        returned: what returning answers from decode would save, None without a decode engine.
    """

    usages: tuple[Usage, ...]
    total: Usage
    speed: float | None
    speed_is_given: bool
    remedies: tuple[Remedy, ...]
    returned: Remedy | None

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Everything as figures."""
        return tuple(_figures(self))

    @property
    def ok(self) -> bool:
        """The ghost's own check holds."""
        return all(figure.ok for figure in self.figures)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; the keys are those of every file of figures."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "figures": [figure.to_dict() for figure in self.figures],
            "engines": [
                {"source": each.source, "side": each.side, "mode": each.mode, "calls": each.calls}
                for each in self.usages
            ],
            "lost_tokens": dict(self.total.lost),
            "unkept_tokens": dict(self.total.unkept),
            "breakers": None
            if self.total.breakers is None
            else [_breaker(each) for each in self.total.breakers],
        }


def _breaker(each: Breaker) -> dict[str, Any]:
    return {name: getattr(each, name) for name in Breaker.__slots__}


def report_on(usages: list[Usage], total: Usage, *, speed: float | None) -> Report:
    """Reckon what each remedy would save.

    Args:
        usages: by engine.
        total: their sum.
        speed: tokens of prefill per second, None to take what was measured.
    """
    used = total.prefill_speed if speed is None else speed
    stock = total.pools["stock"]

    def remedy(figure: str, name: str, again: int) -> Remedy:
        saved = max(0, stock - again)
        return Remedy(
            figure=figure,
            name=name,
            again=again,
            saved=saved,
            seconds=None if used is None else saved / used,
        )

    rows = [
        remedy("retention", "retention (mode on)", total.pools["retention"]),
        remedy("double_pool", "twice the pool", total.pools["double"]),
        *(
            remedy(f"host_{size:g}gb", f"a host tier of {size:g} GB", again)
            for size, again in sorted(total.host.items())
        ),
    ]
    decode = [usage for usage in usages if usage.side == "decode"]
    answers = sum(usage.answers for usage in decode)
    returned = Remedy(
        figure="return",
        name="return of answers (decode to prefill)",
        again=0,
        saved=answers,
        seconds=None if used is None else answers / used,
    )
    return Report(
        usages=tuple(usages),
        total=total,
        speed=used,
        speed_is_given=speed is not None,
        remedies=tuple(sorted(rows, key=lambda each: each.again)),
        returned=returned if decode else None,
    )


def share(part: float, whole: float) -> float:
    """Return a share, 0 of nothing."""
    return part / whole if whole else 0.0


def _figures(report: Report) -> list[Figure]:
    total, stock = report.total, report.total.pools["stock"]
    out = [
        Figure(figure="calls", unit="calls", value=total.calls),
        Figure(figure="prompt_tokens", unit="tokens", value=total.prompt),
        Figure(figure="computed_tokens", unit="tokens", value=total.computed),
        Figure(figure="computed_again", unit="tokens", value=total.again, baseline=stock),
        Figure(
            figure="computed_again_share", unit="share", value=share(total.again, total.computed)
        ),
    ]
    for remedy in report.remedies:
        out.append(
            Figure(
                figure=f"computed_again_{remedy.figure}",
                unit="tokens",
                value=remedy.again,
                baseline=stock,
                ratio=stock / remedy.again if remedy.again else None,
            )
        )
        out += _saved(remedy)
    if report.returned is not None:
        out.append(Figure(figure="saved_return", unit="tokens", value=report.returned.saved))
        out += _saved(report.returned)
    if report.speed is not None:
        out.append(Figure(figure="prefill_speed", unit="tokens/s", value=report.speed))
    out += [_check(usage) for usage in report.usages if usage.ghost_error is not None]
    return out


def _saved(remedy: Remedy) -> list[Figure]:
    if remedy.seconds is None:
        return []
    return [
        Figure(figure=f"saved_{remedy.figure}_seconds", unit="accelerator s", value=remedy.seconds)
    ]


def _check(usage: Usage) -> Figure:
    error = usage.ghost_error or 0.0
    return Figure(
        figure=f"ghost_error {usage.source}",
        unit="share of prompt tokens",
        value=error,
        limit=MOST_GHOST_ERROR,
        ok=error <= MOST_GHOST_ERROR,
    )
