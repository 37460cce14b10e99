"""Values for the demo's tests."""

from __future__ import annotations

from typing import Any

from turncache_tools.demo.answers import Answer
from turncache_tools.demo.compare import Verdict
from turncache_tools.demo.edited import LastAct, Stale
from turncache_tools.demo.figures import all_figures
from turncache_tools.demo.leftovers import Leftovers
from turncache_tools.demo.report import Report
from turncache_tools.demo.rows import ARMS, Arm, CallRow, Scene
from turncache_tools.demo.sizes import FULL, Sizes, Speed

#: A machine on which nothing has to be cut.
FAST = Speed(token_s=0.0005, attention_s=1e-7, decode_s=0.01)
#: How the arms of a whole demo follow each other.
GROUPS = {
    Scene.SINGLE: ((Arm.OFF, Arm.RETENTION),),
    Scene.PAIR: ((Arm.OFF, Arm.RETURN), (Arm.RETENTION,)),
}
SMALL = Sizes(num_calls=4, first_tokens=200, result_tokens=40, answer_tokens=6)


def answer(**changes: Any) -> Answer:
    """Return an answer of three tokens to a prompt of four."""
    values: dict[str, Any] = {
        "text": "one two three",
        "token_ids": (1, 2, 3),
        "gaps": (1.0, 1.0, 1.0),
        "runners_up": (91, 92, 93),
        "prompt_ids": (10, 11, 12, 13),
        "cached": 0,
        "first_s": 0.5,
        "total_s": 0.7,
    }
    return Answer(**values | changes)


def row(scene: Scene, arm: Arm, call: int, **changes: Any) -> CallRow:
    """Return a row: the off arm computes everything, the others what is new and 10 tokens."""
    prompt = 1000 + 180 * call
    new = prompt if call == 1 else 160
    off = arm is Arm.OFF or call == 1
    behind = 20 if (scene, arm) == (Scene.PAIR, Arm.RETENTION) else 0
    computed = prompt if off else new + behind + 10
    values: dict[str, Any] = {
        "scene": scene,
        "arm": arm,
        "run": 1,
        "call": call,
        "take": 1,
        "brings": f"tool {call}",
        "ttft_ms": computed * 1.0,
        "total_ms": computed + 100.0,
        "between_tokens_ms": 20.0,
        "prompt": prompt,
        "local": 0 if scene is Scene.PAIR and arm is Arm.RETURN else prompt - computed,
        "returned": prompt - computed if scene is Scene.PAIR and arm is Arm.RETURN else 0,
        "computed": computed,
        "new": new,
        "seen_by_prefill": 0 if call == 1 else prompt - new - 20,
        "lost": None if arm is Arm.OFF else 0,
        "reason": None if arm is Arm.OFF else "ok",
        "witness": computed,
        "answer": "A <b>sentence</b>.",
        "verdict": Verdict.REFERENCE if arm is Arm.OFF else Verdict.EQUAL,
        "gap": None,
        "others_tokens": 0 if call == 1 else 3840,
        "others_s": 0.0 if call == 1 else 4.0,
        "held": {} if arm is Arm.OFF else {"prefill": 0.8 if arm is Arm.RETENTION else 0.0},
    }
    return CallRow(**values | changes)


def all_rows(num_calls: int = 12) -> list[CallRow]:
    """Return a demo's rows in which every claim holds."""
    return [
        row(scene, arm, call)
        for scene in Scene
        for arm in ARMS[scene]
        for call in range(1, num_calls + 1)
    ]


def last_act(**changes: Any) -> LastAct:
    """Return a last act in which ours is right and stock is not."""
    values: dict[str, Any] = {
        "question": "In which city does the customer live?",
        "ours": "The customer lives in London.",
        "reference": "The customer lives in London.",
        "verdict": Verdict.EQUAL,
        "stock": Stale(answer="The customer Laura lives in Rome.", taken=832),
        "reused": 32,
        "prompt": 900,
    }
    return LastAct(**values | changes)


def report(rows: list[CallRow] | None = None, **changes: Any) -> Report:
    """Return a report of such a demo."""
    rows = all_rows() if rows is None else rows
    values: dict[str, Any] = {
        "host": {"cpu": "Some CPU", "num_cores": 2, "memory_gib": 23.0, "vllm": "0.32.0"},
        "commit": "abc",
        "model": "smollm2",
        "num_runs": 1,
        "sizes": dict.fromkeys(Scene, FULL),
        "groups": GROUPS,
        "seconds": 500.0,
        "act_seconds": {"one engine": 120.0},
        "rows": tuple(rows),
        "last_act": last_act(),
        "figures": tuple(all_figures(rows, last_act(), Leftovers(), seconds=500.0)),
    }
    return Report(**values | changes)
