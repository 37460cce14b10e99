"""Engines that pull nothing: the router has prompts handed over as every proxy of vLLM does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.engine import FakeEngine, Script
from tests.server.router.conftest import Pair
from tests.server.router.support import MESSAGES, Bench, outcome_of
from turncache.protocol import Plan, Reason

pytestmark = pytest.mark.anyio

HISTORY: list[dict[str, Any]] = [*MESSAGES, {"role": "assistant", "content": "x"}, MESSAGES[1]]


async def until_stock(running: Bench, *, wanted: bool = True) -> None:
    """Wait until the router has asked its engines for their mode."""
    await running.eventually(
        lambda: running.http.get("/health"),
        lambda answer: (
            any(side["pulling"] < side["engines"] for side in answer.json()["sides"].values())
            is wanted
        ),
    )


@pytest.mark.parametrize("off", ["prefill", "decode"])
async def test_one_engine_that_pulls_nothing_is_enough(pair: Pair, off: str) -> None:
    """Prefill holds the prompt and says where, decode is told, and computes nothing twice."""
    engine: FakeEngine = getattr(pair, off)
    engine.mode = "observe"
    await until_stock(pair.bench)
    answer = await pair.bench.chat(messages=HISTORY, session="s")
    asked, told = pair.prefill.seen[-1].body, pair.decode.seen[-1].body
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert told["kv_transfer_params"]["remote_engine_id"] == "prefill-0"
    for seen in (pair.prefill.seen[-1], pair.decode.seen[-1]):
        assert seen.xargs["tc_stock"] == 1
    assert "tc_handover" not in pair.prefill.seen[-1].xargs
    outcome = outcome_of(answer)
    assert (outcome.plan, outcome.reason) == (Plan.COLD, Reason.DISABLED)
    assert answer.json().get("kv_transfer_params") is None
    reply = next(iter(pair.decode.replies.values()))
    assert reply.computed < reply.prompt


async def test_engines_that_are_switched_on_again_pull_again(pair: Pair) -> None:
    """Without a restart of anything."""
    pair.decode.mode = "off"
    await until_stock(pair.bench)
    await pair.bench.chat(messages=HISTORY, session="s")
    pair.decode.mode = "on"
    await until_stock(pair.bench, wanted=False)
    answer = await pair.bench.chat(messages=HISTORY, session="s")
    assert outcome_of(answer).plan is Plan.RETURN
    assert "kv_transfer_params" not in pair.prefill.seen[-1].body
    assert "kv_transfer_params" not in pair.decode.seen[-1].body
    assert "tc_stock" not in pair.decode.seen[-1].xargs


async def test_a_prefill_engine_that_holds_nothing_leaves_the_prompt_to_decode(
    pair: Pair,
) -> None:
    """A prompt that fills no block: the call works, and costs what it costs."""
    pair.prefill.mode = "off"
    await until_stock(pair.bench)
    nothing = {"choices": [{"index": 0, "finish_reason": "length"}], "kv_transfer_params": None}
    pair.prefill.scripts.append(Script(body=json.dumps(nothing).encode()))
    answer = await pair.bench.chat(session="s")
    assert answer.status_code == 200
    assert "kv_transfer_params" not in pair.decode.seen[-1].body


async def test_a_clients_parameters_never_reach_an_engine(pair: Pair) -> None:
    """Ours take their place in the leg that asks, and only there."""
    pair.prefill.mode = "off"
    await until_stock(pair.bench)
    evil = {"do_remote_prefill": True, "remote_host": "evil", "remote_engine_id": "evil"}
    await pair.bench.chat(session="s", kv_transfer_params=evil)
    for seen in (pair.prefill.seen[-1], pair.decode.seen[-1]):
        assert "evil" not in seen.raw.decode()
    pair.prefill.mode = "on"
    await until_stock(pair.bench, wanted=False)
    await pair.bench.chat(session="s", kv_transfer_params=evil)
    assert "evil" not in pair.prefill.seen[-1].raw.decode() + pair.decode.seen[-1].raw.decode()
