"""Faults that others have hit when prefill and decode exchange KV: none may exist here.

The router hands over no blocks, no leases and no addresses: it names an engine, and the
engines verify by content. So most of these kinds end in "nothing of the sort is ever sent".
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
from typing import Any

import pytest

from tests.fakes.engine import BLOCK_TOKENS, Answer, Script, chain_of, event, fake_pair, render
from tests.server.router.conftest import Pair
from tests.server.router.support import CHAT, MESSAGES, TOOLS, bench, outcome_of
from turncache.protocol import Plan, Reason
from turncache_server.router.events import CallEnded, LegFailure

pytestmark = pytest.mark.anyio

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "decode-0",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
    "remote_blocks_expiry_time": 1e9,
    "zzz": 1,
}


def history() -> list[dict[str, Any]]:
    """Return a conversation whose answer had reasoning."""
    reply = {"role": "assistant", "content": "In Rome. " * 8, "reasoning": "Let me think. " * 8}
    return [*MESSAGES, reply, {"role": "user", "content": "And Peter? " * 4}]


@pytest.mark.parametrize("edit", ["none", "reasoning dropped", "word changed", "answer deleted"])
async def test_an_edited_history_is_never_answered_from_old_kv(pair: Pair, edit: str) -> None:
    """The pull is by content: an edited history gets exactly the common prefix."""
    first: list[dict[str, Any]] = history()
    await pair.bench.chat(messages=first, session="s")
    answer = Answer.to({"messages": first}, 0, 0).message
    second = [*first, answer, {"role": "user", "content": "Thanks. " * 4}]
    if edit == "reasoning dropped":
        del second[2]["reasoning"]
    elif edit == "word changed":
        second[1] = {"role": "user", "content": "Where does Peter live? " * 4}
    elif edit == "answer deleted":
        del second[2]
    held, prompt = chain_of(render([*history(), answer])), chain_of(render(second))
    common = sum(a == b for a, b in zip(held, prompt, strict=False))
    assert (common == len(held)) == (edit == "none")
    pair.prefill.kv.flush()
    outcome = outcome_of(await pair.bench.chat(messages=second, session="s"))
    assert (outcome.plan, outcome.local) == (Plan.RETURN, 0)
    assert outcome.returned == common * BLOCK_TOKENS > 0
    for seen in (*pair.prefill.seen, *pair.decode.seen):
        assert b"remote_" not in seen.raw
        assert "kv_transfer_params" not in seen.body


async def test_a_handoff_of_an_engine_goes_nowhere(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """Transfer parameters reach neither the client, nor the next leg, nor the log."""
    caplog.set_level(logging.DEBUG)
    pair.prefill.default = pair.decode.default = Script(kv_transfer_params=PARAMS)
    answers = [await pair.bench.chat(session="s", stream=stream) for stream in (True, False)]
    # The event that carries them comes apart from the first, as it does from an engine.
    script = Script(kv_transfer_params=PARAMS, pause_after=2)
    pair.decode.scripts = [script]
    paused = asyncio.create_task(pair.bench.chat(session="s", stream=True))
    await pair.bench.eventually(lambda: len(pair.decode.seen), lambda count: count == 3)
    await asyncio.sleep(0.03)
    script.resume.set()
    answers.append(await paused)
    refused = {"error": {"message": "no"}, "kv_transfer_params": PARAMS}
    pair.decode.scripts = [Script(status=400, body=json.dumps(refused).encode())]
    answers.append(await pair.bench.chat(session="s"))
    assert [answer.status_code for answer in answers] == [200, 200, 200, 400]
    assert answers[-1].json() == {"error": {"message": "no"}}
    for answer in answers:
        assert b"10.0.0.7" not in answer.content
        assert b"remote_" not in answer.content
        assert b"5600" not in answer.content
    assert "10.0.0.7" not in caplog.text
    for seen in (*pair.prefill.seen, *pair.decode.seen):
        assert b"remote_" not in seen.raw


async def test_a_handoff_of_a_client_goes_nowhere(pair: Pair) -> None:
    """What steers engines is the router's: carriers of clients are stripped from both legs."""
    evil = {"tc_source": "prefill-0", "tc_tenant": "other", "kv_transfer_params": PARAMS}
    await pair.bench.chat(
        session="s",
        kv_transfer_params=PARAMS,
        ec_transfer_params=PARAMS,
        kv_hints={"pin": True},
        session_id="chosen",
        request_id="chosen",
        vllm_xargs={**evil, "session_id": "chosen", "mine": 1},
        extra_body=evil,
        headers={"X-data-parallel-rank": "1", "X-Request-Id": "chosen"},
    )
    for seen in (*pair.prefill.seen, *pair.decode.seen):
        assert b"10.0.0.7" not in seen.raw
        assert b"chosen" not in seen.raw
        assert "other" not in seen.raw.decode()
        assert seen.xargs["mine"] == 1
        assert seen.headers["x-session-id"] == seen.body["session_id"] == "s"
        assert seen.headers["x-request-id"] != "chosen"
        assert "x-data-parallel-rank" not in seen.headers
    assert pair.decode.seen[0].xargs["tc_source"] == "prefill-0"
    assert "tc_source" not in pair.prefill.seen[0].xargs


async def test_a_call_that_decode_would_reject_is_not_prefilled(pair: Pair) -> None:
    """What the router can see to be impossible costs no prefill."""
    for members in ({"max_tokens": 10_000_000}, {"max_tokens": 5, "min_tokens": 9}):
        assert (await pair.bench.chat(**members)).status_code == 400
    assert pair.prefill.seen == []


async def test_a_rejection_by_decode_leaves_nothing_behind(pair: Pair) -> None:
    """The client gets decode's own error; no lease, no session, and the next call works."""
    pair.decode.scripts = [Script(status=400, body=b'{"error":{"message":"bad"}}')]
    answer = await pair.bench.chat(session="s", stream=True)
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "bad")
    outcome = outcome_of(await pair.bench.chat(session="s"))
    assert outcome.plan is Plan.COLD
    assert outcome.local > 0, "the prompt is in prefill's ordinary cache"


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"n": 4, "temperature": 1}, id="several answers"),
        pytest.param({"prompt_logprobs": 1}, id="log-probabilities of the prompt"),
        pytest.param({"echo": True}, id="echo"),
        pytest.param({"use_beam_search": True}, id="beam search"),
    ],
)
async def test_what_one_child_of_a_pull_cannot_serve_goes_to_one_engine(
    pair: Pair, members: dict[str, Any]
) -> None:
    """Decode serves it alone, says why, and the session goes on afterwards."""
    for turn in range(2):
        answer = await pair.bench.chat(session="s", **members)
        assert answer.status_code == 200
        outcome = outcome_of(answer)
        assert (outcome.plan, outcome.reason) == (Plan.COLD, Reason.UNSUPPORTED)
        assert len(answer.json()["choices"]) == members.get("n", 1)
        assert len(pair.decode.seen) == turn + 1
    assert pair.prefill.seen == []
    assert {seen.xargs["tc_call"] for seen in pair.decode.seen} == {"single"}
    assert all("tc_source" not in seen.xargs for seen in pair.decode.seen)
    assert outcome_of(await pair.bench.chat(session="s")).plan is Plan.RETURN


async def test_several_streamed_answers_are_complete_when_all_are(pair: Pair) -> None:
    """With n=2 the stream's end is the end of both choices."""
    answer = await pair.bench.chat(session="s", n=2, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert pair.bench.of_kind(CallEnded)[0].problem is None
    one = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    pair.decode.scripts = [Script(events=[event(one), b"data: [DONE]\n\n"])]
    answer = await pair.bench.chat(session="s", n=2, stream=True)
    assert "[DONE]" not in answer.text
    assert '"code": "engine_incomplete"' in answer.text


async def test_stop_strings_do_not_reach_the_prefill_leg(pair: Pair) -> None:
    """One token that happens to be a stop string must not end the prefill otherwise."""
    members: dict[str, Any] = {
        "stop": ["a", "e", "i", " "],
        "stop_token_ids": [1],
        "min_tokens": 100,
        "max_tokens": 500,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 5,
    }
    answer = await pair.bench.chat(stream=True, stream_options={"include_usage": True}, **members)
    assert answer.status_code == 200
    (prefill,), (decode,) = pair.prefill.seen, pair.decode.seen
    assert {name: decode.body[name] for name in members} == members
    assert prefill.body["max_tokens"] == prefill.body["max_completion_tokens"] == 1
    assert not ({*members, "stream_options"} - {"max_tokens"}) & set(prefill.body)


async def test_the_shortest_answer_is_decodes_alone(pair: Pair) -> None:
    """An answer of one token cannot have a hundred: prefill would refuse the call."""
    limits = {"max_tokens": 500, "min_tokens": 100}
    answer = await pair.bench.chat(stream=True, **limits)
    assert answer.status_code == 200
    (prefill,), (decode,) = pair.prefill.seen, pair.decode.seen
    assert {name: decode.body[name] for name in limits} == limits
    assert prefill.body["max_tokens"] == 1
    assert "min_tokens" not in prefill.body


@pytest.mark.parametrize(
    "prompt",
    [["a b c", "d e f"], [[1, 2, 3], [4, 5, 6]]],
    ids=["texts", "tokens"],
)
async def test_several_prompts_are_not_split(pair: Pair, prompt: list[Any]) -> None:
    """They are several requests with the same hints: one engine serves them, with no pull."""
    body = {"model": "fake", "prompt": prompt, "max_tokens": 8}
    headers = {"X-Session-ID": "s"}
    for _ in range(2):
        answer = await pair.bench.http.post("/v1/completions", json=body, headers=headers)
        assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1]
        outcome = outcome_of(answer)
        assert (outcome.plan, outcome.reason) == (Plan.COLD, Reason.UNSUPPORTED)
    assert pair.prefill.seen == []
    for seen in pair.decode.seen:
        assert seen.body["prompt"] == prompt
        assert "tc_source" not in seen.xargs


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("/v1/completions", {"prompt": "Once", "echo": True, "logprobs": 1, "max_tokens": 4}),
        (CHAT, {"messages": MESSAGES, "prompt_logprobs": 1}),
    ],
    ids=["completions", "chat"],
)
async def test_log_probabilities_of_a_prompt_come_from_who_computes_it(
    pair: Pair, path: str, members: dict[str, Any]
) -> None:
    """An engine that pulled a prompt has none: in every turn one engine does all of it."""
    headers = {"X-Session-ID": "s"}
    for _ in range(2):
        body = {"model": "fake", **members}
        answer = await pair.bench.http.post(path, json=body, headers=headers)
        assert outcome_of(answer).reason is Reason.UNSUPPORTED
    assert pair.prefill.seen == []
    assert len(pair.decode.seen) == 2
    for seen in pair.decode.seen:
        assert {name: seen.body[name] for name in members} == members


async def test_what_a_stock_engine_holds_is_handed_on_as_it_says(pair: Pair) -> None:
    """A deadline that is lost on the way lets the next engine read what is another's by then."""
    pair.prefill.mode = "off"
    await pair.bench.eventually(
        lambda: pair.bench.http.get("/health"),
        lambda answer: answer.json()["sides"]["prefill"]["pulling"] == 0,
    )
    # As text, because numbers may be written in many ways.
    held = json.dumps(PARAMS).replace("1000000000.0", "1.0e9")
    whole = f'"choices":[{{"index":0,"finish_reason":"length"}}],"kv_transfer_params":{held}'
    pair.prefill.scripts = [Script(body=f"{{{whole}}}".encode())]
    await pair.bench.chat(session="s")
    assert f'"kv_transfer_params":{held}'.encode() in pair.decode.seen[-1].raw


async def test_forced_tool_calls_have_the_same_prompt_on_both_engines(pair: Pair) -> None:
    """Tools, tool choice and response format reach both legs, byte for byte."""
    choice = {"type": "function", "function": {"name": "search"}}
    answer = await pair.bench.chat(
        tools=TOOLS, tool_choice=choice, response_format={"type": "json_object"}, session="s"
    )
    assert answer.json()["choices"][0]["message"]["tool_calls"]
    (prefill,), (decode,) = pair.prefill.seen, pair.decode.seen
    for name in ("messages", "tools", "tool_choice", "response_format"):
        assert prefill.body[name] == decode.body[name]


async def test_a_storm_of_impatient_clients_leaves_no_leg_behind(pair: Pair) -> None:
    """Clients that leave at any moment: every leg ends, and every session goes on."""
    rng = random.Random(7)
    # Half of them get through prefill.
    pair.prefill.scripts = [Script() for _ in range(20)]
    pair.prefill.default = pair.decode.default = Script(until=asyncio.Event())
    calls = [
        asyncio.create_task(pair.bench.chat(session=f"s{i}", stream=i % 2 == 0)) for i in range(40)
    ]
    await pair.bench.eventually(lambda: pair.decode.num_active, bool)
    for call in rng.sample(calls, len(calls)):
        await asyncio.sleep(0.001)
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    # Nothing has been answered: what ends has been broken off.
    await pair.bench.eventually(
        lambda: pair.prefill.num_active + pair.decode.num_active, lambda n: n == 0
    )
    pair.prefill.default = pair.decode.default = Script()
    answers = await asyncio.gather(*(pair.bench.chat(session=f"s{i}") for i in range(40)))
    assert {answer.status_code for answer in answers} == {200}
    assert await pair.bench.metric("turncache_router_active_calls") == 0


async def test_a_prefill_that_hangs_does_not_hang_the_client() -> None:
    """Every leg has a deadline; after it the client has an error, the engine a cancel."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, first_byte_timeout_s=0.05) as running,
    ):
        prefill.scripts = [Script(until=asyncio.Event())]
        assert (await running.chat(session="s")).status_code == 504
        await running.eventually(lambda: prefill.num_active, lambda n: n == 0)
        assert decode.seen == []
        assert (await running.chat(session="s")).status_code == 200


async def test_a_restarted_engine_at_the_same_address_gets_nothing_stale(pair: Pair) -> None:
    """After a restart the session goes on; what the old process held is computed again."""
    await pair.bench.chat(session="s")
    await pair.decode.stop()
    pair.decode.kv.flush()
    await pair.decode.start()
    await pair.bench.ready()
    answer = await pair.bench.chat(session="s")
    assert answer.status_code == 200
    outcome = outcome_of(answer)
    assert (outcome.plan, outcome.returned) == (Plan.RETURN, 0)
    assert b"start_id" not in pair.prefill.seen[-1].raw


@pytest.mark.parametrize("stream", [True, False])
async def test_a_failed_generation_is_no_success(pair: Pair, stream: bool) -> None:
    """A 200 with finish_reason error and no content is an API error, and moves no session."""
    chunk = b'{"choices":[{"index":0,"delta":{},"message":{},"finish_reason":"error"}]}'
    script = Script(events=[b"data: " + chunk + b"\n\n", b"data: [DONE]\n\n"], body=chunk)
    pair.decode.scripts = [script]
    answer = await pair.bench.chat(session="s", stream=stream)
    if stream:
        assert b'"code": "engine_incomplete"' in answer.content
        assert b"[DONE]" not in answer.content
    else:
        assert answer.status_code == 502
    assert outcome_of(await pair.bench.chat(session="s")).plan is Plan.COLD


async def test_a_prefill_that_gave_up_is_not_handed_to_decode(pair: Pair) -> None:
    """Decode would compute the whole prompt: the leg failed, and the client may try again."""
    pair.prefill.scripts = [
        Script(body=b'{"choices":[{"index":0,"message":{},"finish_reason":"error"}]}')
    ]
    answer = await pair.bench.chat(session="s")
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "engine_bad_answer")
    assert pair.decode.seen == []
    assert pair.bench.of_kind(LegFailure)[0].side == "prefill"


@pytest.mark.parametrize("stream", [True, False])
async def test_the_benefit_engages_for_streams_too(pair: Pair, stream: bool) -> None:
    """Nothing depends on transfer parameters in an answer, which streams do not carry."""
    await pair.bench.chat(session="s", stream=stream)
    pair.prefill.kv.flush()
    answer = await pair.bench.chat(session="s", stream=stream)
    outcome = outcome_of(answer)
    assert (outcome.plan, outcome.local) == (Plan.RETURN, 0)
    assert outcome.returned > outcome.computed
    assert (await pair.bench.record(answer))["plan"] == "return"


async def test_an_api_that_is_not_served_says_so(pair: Pair) -> None:
    """A path without prefill and decode support is a clear 404 and no half-working relay."""
    for path in ("/v1/audio/transcriptions", "/v1/responses/resp_1", "/v1/rerank"):
        answer = await pair.bench.http.post(path, json={"model": "fake", "input": "hi"})
        assert answer.status_code == 404
        assert path in answer.json()["error"]["message"]


async def test_equal_request_ids_of_clients_do_not_meet_in_an_engine(pair: Pair) -> None:
    """Two calls at once, with one id and one session: every leg has an id of its own."""
    headers = {"X-Request-Id": "same", "x-stainless-retry-count": "1"}
    answers = await asyncio.gather(
        *(pair.bench.chat(session="s", headers=headers) for _ in range(4))
    )
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4
    seen = [*pair.prefill.seen, *pair.decode.seen]
    assert len({one.headers["x-request-id"] for one in seen}) == len(seen) == 8
    assert len({one.xargs["tc_request"] for one in seen}) == 4


async def test_a_retry_after_a_dropped_connection_is_a_call_of_its_own(pair: Pair) -> None:
    """The client's second attempt carries nothing of the first, and succeeds."""
    await pair.bench.chat(session="s")
    pair.prefill.scripts = [Script(die="before")]
    client = pair.bench.openai.with_options(max_retries=1)
    answer = await client.chat.completions.create(
        model="fake",
        messages=MESSAGES,  # type: ignore[arg-type]
        extra_headers={"X-Session-ID": "s"},
    )
    assert answer.choices[0].finish_reason == "stop"
    first, second = pair.prefill.seen[1:]
    assert first.xargs["tc_request"] != second.xargs["tc_request"]
    assert first.xargs["tc_source"] == second.xargs["tc_source"] == "decode-0"


async def test_the_router_keeps_no_connection_for_a_call_that_is_over(pair: Pair) -> None:
    """After many calls nothing is active on any engine."""
    body = {"model": "fake", "messages": MESSAGES, "stream": True}
    for _ in range(5):
        async with pair.bench.http.stream("POST", CHAT, json=body) as answer:
            await answer.aread()
    assert pair.prefill.num_active == pair.decode.num_active == 0
    assert pair.prefill.max_active == pair.decode.max_active == 1
