"""A foreign load tool on our stack: ``python -m tests.perf.bench_aiperf``.

``make perf-aiperf``. aiperf, from its pinned packages in an environment of its own, drives our
router in front of a real pair: conversations with live answers in their history, one session
header, waits between turns, and a prefill pool that does not hold them all. Twice: with everything
of ours off, and with retention and return. Its times are written beside what the engines counted
of the same calls: where the KV of prompts came from. Writes ``build/perf/aiperf.json``; exits with
1 when a call failed, a session was not kept apart, or aiperf and router disagree about the number
of calls.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.foreign.environments import prepared
from tests.perf.real_pair import Pair, pair_spec, running
from turncache_server.launch.models import models_folder
from turncache_tools.bench.arms import OFF, StackFacts, choose_arms
from turncache_tools.bench.client import Client
from turncache_tools.bench.counters import difference, read_counters, samples
from turncache_tools.bench.stack import Places, Stack
from turncache_tools.bench.statistics import quantile
from turncache_tools.figure import SCHEMA, Figure
from turncache_tools.shell import progress, write, write_table

ROOT: Final = Path(__file__).resolve().parents[2]
OUT: Final = ROOT / "build" / "perf"
MODEL: Final = "tiny"
ARMS: Final = (OFF, "both")
HEADER: Final = "X-Session-ID"
_CONVERSATIONS, _TURNS, _CONCURRENCY = 3, 6, 3
_INPUT, _OUTPUT, _DELAY_MS = 220, 48, 1000
_CONTEXT: Final = 2560
#: Of the longest conversation that prefill's pool holds, against three that take turns.
_ROOM: Final = 1
#: Prompt tokens on prefill: found in its pool, returned by decode, computed.
_NAMES: Final = ("local", "returned", "computed")
_REASON: Final = "reason "
_SOURCES: Final = ("local_tokens", "external_tokens", "computed_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one run showed. Times in milliseconds, counts in tokens.

    Attributes:
        arm: its name.
        command: of aiperf, as it was run.
        later_ms: time to first token of turns 2 and later, as aiperf measured it.
        last_ms: likewise of last turns.
        calls: answered, by aiperf.
        failed: not answered, by aiperf.
        sessions: ids that aiperf sent.
        router_calls: by the router.
        tokens: of prompts on prefill, by source, by its own counters.
        reasons: that it gave for not reusing more, by how often; empty where we are off.
    """

    arm: str
    command: str
    later_ms: Sequence[float]
    last_ms: Sequence[float]
    calls: int
    failed: int
    sessions: int
    router_calls: int
    tokens: Mapping[str, float]
    reasons: Mapping[str, float]


def command_of(aiperf: Path, url: str, out: Path, seed: int) -> list[str]:
    """Return the command."""
    numbers = {
        "--conversation-num": _CONVERSATIONS,
        "--conversation-turn-mean": _TURNS,
        "--conversation-turn-stddev": 0,
        "--conversation-turn-delay-mean": _DELAY_MS,
        "--synthetic-input-tokens-mean": _INPUT,
        "--output-tokens-mean": _OUTPUT,
        "--concurrency": _CONCURRENCY,
        "--random-seed": seed,
    }
    return [
        *(str(aiperf), "profile", "-m", MODEL, "--url", url, "--endpoint-type", "chat"),
        *("--streaming", "--tokenizer", str(models_folder() / MODEL)),
        *("--session-header", HEADER, "--use-server-token-count", "--no-gpu-telemetry"),
        *("--no-server-metrics", "--extra-inputs", "ignore_eos:true", "--ui", "none"),
        *(str(part) for pair in numbers.items() for part in pair),
        *("--output-artifact-dir", str(out)),
    ]


def _calls(metrics: str) -> float:
    """Return the calls that the router has answered."""
    return sum(
        value
        for name, labels, value in samples(metrics)
        if name == "turncache_router_requests_total" and labels.get("code") == "200"
    )


async def _switched(pair: Pair, name: str) -> None:
    """Bring the stack into an arm's state, as the bench does."""
    url = pair.stack.base_url
    controls = [each.control_address for each in pair.stack.engines]
    places = Places(url=url, controls=tuple(str(each) for each in controls))
    async with Client("-", timeout_s=60.0) as client:
        stack = Stack(client, places)
        facts: StackFacts = await stack.facts(ours=True)
        arms, _ = choose_arms(ARMS, facts, url=url, urls={})
        await stack.switch(next(arm for arm in arms if arm.name == name))
        await stack.empty(pair.prefill, external=False)


async def _counted(pair: Pair) -> dict[str, float]:
    """Return the router's calls, and prefill's prompt tokens by where their KV came from."""
    async with Client("-", timeout_s=60.0) as client:
        _, router = await client.text("GET", f"{pair.stack.base_url}/metrics")
        _, prefill = await client.text("GET", f"{pair.prefill}/metrics")
    reasons = {
        f"{_REASON}{labels['reason']}": value
        for name, labels, value in samples(prefill)
        if name == "turncache_calls_total"
    }
    return {"calls": _calls(router), **read_counters(prefill), **reasons}


def run(pair: Pair, aiperf: Path, arm: str) -> Found:
    """Run aiperf in one arm."""
    asyncio.run(_switched(pair, arm))
    out = OUT / "aiperf" / arm
    shutil.rmtree(out, ignore_errors=True)
    # Of equal length and other content: what the arm before has left is not found again.
    command = command_of(aiperf, pair.stack.base_url, out, 1 + ARMS.index(arm))
    before = asyncio.run(_counted(pair))
    progress(f"aiperf: {arm}")
    # A local folder is only taken for a tokenizer where the hub may be asked; it is not.
    kept = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "PYTHONPATH")}
    done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(
            f"aiperf ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
        )
    after = asyncio.run(_counted(pair))
    counted = difference(before, after)
    return found_in(
        (out / "profile_export.jsonl").read_text(), arm=arm, command=command, counted=counted
    )


def found_in(
    export: str, *, arm: str, command: Sequence[str], counted: Mapping[str, float]
) -> Found:
    """Read aiperf's records, one call a line."""
    later, last, sessions = [], [], set()
    calls = failed = 0
    for line in export.splitlines():
        record: dict[str, Any] = json.loads(line)
        about, first = record["metadata"], record["metrics"].get("time_to_first_token")
        sessions.add(about["x_correlation_id"])
        if record.get("error") or first is None:
            failed += 1
            continue
        calls += 1
        if about["turn_index"]:
            later.append(float(first["value"]))
        if about["turn_index"] == _TURNS - 1:
            last.append(float(first["value"]))
    return Found(
        arm=arm,
        command=shlex.join(["aiperf", *command[1:]]),
        later_ms=later,
        last_ms=last,
        calls=calls,
        failed=failed,
        sessions=len(sessions),
        router_calls=round(counted["calls"]),
        tokens={name: counted.get(name, 0.0) for name in _SOURCES},
        reasons={
            name.removeprefix(_REASON): count
            for name, count in counted.items()
            if name.startswith(_REASON) and count
        },
    )


def figures_of(found: Sequence[Found]) -> list[Figure]:
    """Return times side by side, and whether the two kinds of counting agree."""
    off, ours = found
    wanted = _CONVERSATIONS * _TURNS
    out = []
    for name, pick in (("turns_2_and_later", "later_ms"), ("last_turn", "last_ms")):
        baseline, value = (quantile(getattr(each, pick), 0.5) for each in (off, ours))
        out.append(
            Figure(
                figure=f"aiperf_ttft_{name}",
                unit="ms",
                value=value,
                baseline=baseline,
                ratio=baseline / value,
            )
        )
    for each in found:
        right = (each.calls, each.failed, each.router_calls) == (wanted, 0, wanted)
        out.append(
            Figure(
                figure=f"aiperf_calls_{each.arm}",
                unit="calls",
                value=float(each.calls),
                baseline=float(each.router_calls),
                ok=right and each.sessions == _CONVERSATIONS,
            )
        )
    return out


def show(found: Sequence[Found], figures: Sequence[Figure]) -> None:
    """Print both."""
    columns = ("arm", "calls", "failed", "TTFT ms, turns 2+", "last turn", *_NAMES, "reasons")
    write_table(
        columns,
        [
            (
                each.arm,
                str(each.calls),
                str(each.failed),
                f"{quantile(each.later_ms, 0.5):,.0f}",
                f"{quantile(each.last_ms, 0.5):,.0f}",
                *(f"{each.tokens[name]:,.0f}" for name in _SOURCES),
                ", ".join(f"{name} {count:.0f}" for name, count in each.reasons.items()) or "-",
            )
            for each in found
        ],
    )
    for figure in figures:
        if not figure.ok:
            write(f"{figure.figure}: {figure.value:g}, the router counted {figure.baseline:g}")


def main(arguments: Sequence[str]) -> int:
    """Run aiperf in both arms; 1 when something does not fit."""
    argparse.ArgumentParser(description="aiperf on our stack").parse_args(arguments)
    OUT.mkdir(parents=True, exist_ok=True)
    python = prepared("aiperf", ROOT / "requirements" / "aiperf.lock")
    spec = pair_spec(model=MODEL, context=_CONTEXT, sessions=_ROOM, decode_sessions=8)
    with running(spec) as pair:
        found = [run(pair, python.with_name("aiperf"), arm) for arm in ARMS]
    figures = figures_of(found)
    show(found, figures)
    write(f"\n{found[-1].command}")
    done = {
        "schema": SCHEMA,
        "figures": [each.to_dict() for each in figures],
        "command": found[-1].command,
        "tokens": {each.arm: dict(each.tokens) for each in found},
        "reasons": {each.arm: dict(each.reasons) for each in found},
    }
    (OUT / "aiperf.json").write_text(json.dumps(done, indent=1) + "\n")
    return 0 if all(each.ok for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
