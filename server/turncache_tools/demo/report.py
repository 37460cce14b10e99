"""The demo's result as one value, and as ``demo.json``. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from turncache_tools.demo.edited import LastAct
from turncache_tools.demo.figures import Figure, earned, exact
from turncache_tools.demo.rows import ARMS, Arm, CallRow, Scene, arm_name, rows_of, ttft_by_call
from turncache_tools.demo.sizes import Sizes
from turncache_tools.figure import SCHEMA

_SCENE_NAMES: Final = {Scene.SINGLE: "One engine", Scene.PAIR: "Pair"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that a demo has measured.

    Attributes:
        host: what the figures depend on.
        commit: of this checkout, with ``+`` when it had changes.
        model: name of the model.
        sizes: per scene, as they ran.
        groups: the arms of each scene; those of one group took turns, groups followed each other.
        seconds: from the start of the demo to the end of its last stack.
        act_seconds: the same by act.
    """

    host: Mapping[str, Any]
    commit: str | None
    model: str
    num_runs: int
    sizes: Mapping[Scene, Sizes]
    groups: Mapping[Scene, Sequence[Sequence[Arm]]]
    seconds: float
    act_seconds: Mapping[str, float]
    rows: tuple[CallRow, ...]
    last_act: LastAct
    figures: tuple[Figure, ...]

    @property
    def scenes(self) -> tuple[Scene, ...]:
        """The scenes that ran."""
        return tuple(scene for scene in Scene if scene in self.sizes)

    @property
    def stock(self) -> bool:
        """Stock engines ran as well."""
        return self.last_act.stock is not None

    @property
    def in_turns(self) -> bool:
        """What is compared took turns, instead of running one after another."""
        return any(len(group) > 1 for groups in self.groups.values() for group in groups)

    def arm_name(self, scene: Scene, arm: Arm) -> str:
        """Return an arm's name for people."""
        return arm_name(scene, arm, stock=self.stock)

    @property
    def ok(self) -> bool:
        """Every claim holds."""
        return all(figure.ok for figure in self.figures)

    def figure(self, name: str) -> Figure:
        """Return a figure by name."""
        return next(figure for figure in self.figures if figure.figure == name)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; the keys are those of every file of figures."""
        return {
            "schema": SCHEMA,
            "host": dict(self.host),
            "commit": self.commit,
            "ok": self.ok,
            "exact": exact(self.rows),
            "figures": [figure.to_dict() for figure in self.figures],
            "model": self.model,
            "num_runs": self.num_runs,
            "sizes": {scene.value: asdict(sizes) for scene, sizes in self.sizes.items()},
            "in_turns": {
                scene.value: [[arm.value for arm in group] for group in groups]
                for scene, groups in self.groups.items()
            },
            "seconds": self.seconds,
            "act_seconds": dict(self.act_seconds),
            "arms": [row.to_dict() for row in self.rows],
            "last_act": self.last_act.to_dict(),
        }


def hardware_line(report: Report) -> str:
    """Name the hardware, and say what its numbers are not."""
    host = report.host
    return (
        f"Measured on {host['num_cores']} cores of {host['cpu']}, {host['memory_gib']:g} GiB, "
        f"vLLM {host['vllm']}, {report.model} in float32. A GPU's numbers differ: it computes "
        "and moves KV at other speeds."
    )


def load_line(report: Report, scene: Scene) -> str:
    """Say what passes through the caches in a short wait and in a long one."""
    sizes = report.sizes[scene]
    waits = [row.others_tokens for row in report.rows if row.scene is scene and row.call > 1]
    least, most = min(waits), max(waits)
    spread = f"{most:,}" if least == most else f"{least:,} to {most:,}"
    return f"others bring {spread} tokens in a wait, a pool holds {sizes.pool_tokens:,}"


def scale_line(report: Report) -> str | None:
    """Say that texts were shortened, None when they were not."""
    scale = next(iter(report.sizes.values())).scale
    if scale == 1.0:
        return None
    return (
        f"This machine is too slow for the full lengths in the time promised: texts have "
        f"{scale:.0%} of them. --full runs the full lengths, --minutes gives more time."
    )


def order_lines(report: Report) -> list[str]:
    """Say how the arms of each scene followed each other."""
    lines = [_order_line(report, scene) for scene in report.scenes]
    return [*lines, *filter(None, (takes_line(report),))]


def _order_line(report: Report, scene: Scene) -> str:
    groups = report.groups[scene]
    first, *then = (" and ".join(report.arm_name(scene, arm) for arm in group) for group in groups)
    name = _SCENE_NAMES[scene]
    if all(len(group) == 1 for group in groups):
        return (
            f"{name}: {', '.join((first, *then))}, one after another on the same engines. What the "
            "machine's speed did meanwhile is in the ratios, which only inform."
        )
    alone = "".join(f" By itself: {each}." for each in then)
    return (
        f"{name}: {first} in turns, call by call, each on engines of its own. What the machine's "
        f"speed did meanwhile is in both.{alone}"
    )


def takes_line(report: Report) -> str | None:
    """Say that the last call was made several times, None when it was not."""
    last = max(report.rows, key=lambda row: row.take)
    if last.take == 1:
        return None
    return (
        f"{_SCENE_NAMES[last.scene]}: the last call in turns was made {last.take} times, each with "
        "another result of its tool; its time is their median."
    )


def earned_lines(report: Report) -> list[str]:
    """Say, scene by scene, which feature saved how much."""
    lines = {Scene.SINGLE: _single_earned, Scene.PAIR: _pair_earned}
    return [lines[scene](report) for scene in report.scenes]


def _single_earned(report: Report) -> str:
    missed = earned(report.rows, Scene.SINGLE).missed
    return (
        f"One engine: without us {_tokens(missed[Arm.OFF])} tokens were computed a second "
        f"time in calls 2 and later; with retention {_tokens(missed[Arm.RETENTION])}."
    )


def _pair_earned(report: Report) -> str:
    missed = earned(report.rows, Scene.PAIR).missed
    off = "stock" if report.stock else "switched off it"
    kept = missed[Arm.OFF] - missed[Arm.RETENTION]
    returned = missed[Arm.RETENTION] - missed[Arm.RETURN]
    held = {
        arm: _held(rows_of(report.rows, Scene.PAIR, arm)) for arm in (Arm.RETENTION, Arm.RETURN)
    }
    return (
        f"Pair: {off} computed {_tokens(missed[Arm.OFF])} tokens a second time. Retention "
        f"saves {_tokens(kept)} of them, and holds {held[Arm.RETENTION]:.0%} of prefill's pool "
        f"to do so; return saves {_tokens(returned)} more (answers, which only decode had), and "
        f"holds {held[Arm.RETURN]:.0%}."
    )


def missed_line(report: Report, scene: Scene) -> str:
    """Say in one line what each arm of a scene computed a second time."""
    missed = earned(report.rows, scene).missed
    parts = [f"{report.arm_name(scene, arm)} {_tokens(tokens)}" for arm, tokens in missed.items()]
    return f"Prompt tokens computed a second time: {', '.join(parts)}."


def _tokens(number: float) -> str:
    return f"{number:,.0f}"


def _held(rows: list[CallRow]) -> float:
    """Return the largest share of prefill's pool that was held before a call."""
    return max((row.held.get("prefill", 0.0) for row in rows if row.call > 1), default=0.0)


def curves(report: Report, scene: Scene) -> dict[str, tuple[float, ...]]:
    """Return the TTFT of every call in seconds, by name of the arm."""
    return {
        report.arm_name(scene, arm): tuple(
            ms / 1e3 for ms in ttft_by_call(rows_of(report.rows, scene, arm))
        )
        for arm in ARMS[scene]
    }
