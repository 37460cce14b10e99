"""The APIs beside chat: plans, legs, streams and errors of each."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import engine_apis
from tests.fakes.engine import Answer, FakeEngine, Script, fake_engines, fake_pair
from tests.server.router.agents import AGENTS, MessagesAgent, ResponsesAgent, turn
from tests.server.router.conftest import Pair, Single
from tests.server.router.support import bench, outcome_of
from turncache.protocol import Boundary, EngineHints
from turncache_server.router.apis import APIS, COMPLETIONS, MESSAGES, RESPONSES
from turncache_server.router.body import Body
from turncache_server.router.ending import Ending
from turncache_server.router.errors import ApiError
from turncache_server.router.events import CallEnded
from turncache_server.router.legs import prefill_body, serving_body
from turncache_server.router.passing import AnswerStream

pytestmark = pytest.mark.anyio

LONG = "Where does Laura live? " * 12
BODIES: dict[str, dict[str, Any]] = {
    "completions": {"model": "fake", "prompt": LONG},
    "messages": {
        "model": "fake",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": LONG}],
    },
    "responses": {"model": "fake", "input": LONG},
}
OTHERS = [api for api in APIS if api.name != "chat"]
HINTS = EngineHints(session="s", call="prefill", request="r")


def parse(body: dict[str, Any]) -> Body:
    """Parse a body."""
    return Body.parse(json.dumps(body).encode(), max_depth=20)


def stream_of(name: str, *, tools: bool = False, params: Any = None) -> list[bytes]:
    """Return a good stream's events in the shape of an API."""
    path = next(api.path for api in APIS if api.name == name)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    if tools and name != "completions":
        body["tools"] = [{"type": "function", "function": {"name": "search"}}]
    return engine_apis.events(path, Answer.to(body, 10, 0), params)


def passed(name: str, chunks: list[bytes]) -> tuple[bytes, AnswerStream, int]:
    """Pass chunks: (what the client gets, the stream, how often it was completed)."""
    api = next(api for api in APIS if api.name == name)
    calls: list[Ending] = []
    stream = AnswerStream(api.collector(1, False), calls.append)
    out = b"".join(stream.feed(chunk) for chunk in chunks)
    return out + stream.close(), stream, len(calls)


# --- plan and legs --------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", OTHERS, ids=lambda api: api.name)
async def test_a_second_call_returns(pair: Pair, api: Any, stream: bool) -> None:
    """Both legs are made on the API's own path, and the second call pulls from decode."""
    body = {**BODIES[api.name], "stream": stream}
    for number in range(2):
        pair.prefill.kv.flush()
        answer = await pair.bench.http.post(api.path, json=body, headers={"X-Session-ID": "s"})
        assert answer.status_code == 200
        outcome = outcome_of(answer)
        assert outcome.plan == ("cold", "return")[number]
        assert (outcome.returned > 0) is (number == 1)
        assert outcome.lost == 0
    prefill, decode = pair.prefill.seen[-1], pair.decode.seen[-1]
    assert (prefill.path, decode.path) == (api.path, api.path)
    assert not prefill.body["stream"]
    assert decode.xargs["tc_source"] == prefill.xargs["tc_source"].replace("decode", "prefill")
    (*_, ended) = pair.bench.of_kind(CallEnded)
    assert (ended.api, ended.boundary) == (api.name, Boundary.USER)


@pytest.mark.parametrize(
    ("api", "members", "gone", "kept"),
    [
        (
            COMPLETIONS,
            {"stop": ["a"], "min_tokens": 3, "max_tokens": 9},
            {"stop", "min_tokens"},
            set(),
        ),
        (COMPLETIONS, {"logprobs": 5, "ignore_eos": True}, {"logprobs", "ignore_eos"}, set()),
        (COMPLETIONS, {"response_format": {"type": "text"}}, set(), {"response_format"}),
        (MESSAGES, {"stop_sequences": ["a"]}, {"stop_sequences"}, set()),
        (MESSAGES, {"tools": [{"name": "f"}], "tool_choice": {"type": "any"}}, set(), {"tools"}),
        (RESPONSES, {"top_logprobs": 3, "include": []}, {"top_logprobs", "include"}, set()),
        (RESPONSES, {"text": {"format": {"type": "text"}}, "stop": "a"}, {"stop"}, {"text"}),
        (RESPONSES, {"reasoning": {"effort": "low"}, "store": True}, set(), {"reasoning"}),
    ],
)
def test_what_shapes_an_answer_stays_out_of_the_prefill_leg(
    api: Any, members: dict[str, Any], gone: set[str], kept: set[str]
) -> None:
    """Prefill generates one token that nobody reads; what makes the prompt is the client's."""
    body = parse({**BODIES[api.name], **members, "stream": True})
    leg = json.loads(prefill_body(api, body, HINTS))
    served = json.loads(serving_body(api, body, HINTS))
    limit = "max_output_tokens" if api is RESPONSES else "max_tokens"
    assert leg[limit] == 1
    assert leg["stream"] is False
    assert not gone & leg.keys()
    for name in kept:
        assert leg[name] == members[name]
    for name, value in members.items():
        assert served[name] == value


def test_a_prefill_leg_of_a_response_stores_nothing() -> None:
    """An answer that nobody reads must not take a place among those that are kept."""
    leg = json.loads(prefill_body(RESPONSES, parse(BODIES["responses"]), HINTS))
    assert leg["store"] is False


@pytest.mark.parametrize(
    ("more", "num_answers"),
    [
        ({"input": "hi"}, 0),
        ({"input": [{"role": "user", "content": "hi"}]}, 0),
        (
            {
                "input": [
                    {"role": "user", "content": "hi"},
                    {"type": "reasoning"},
                    *({"type": "function_call", "call_id": each} for each in "ab"),
                    *({"type": "function_call_output", "call_id": each} for each in "ab"),
                    {"role": "assistant", "content": "done"},
                ]
            },
            2,
        ),
        ({"input": "go on", "previous_response_id": "resp_1"}, None),
    ],
)
def test_the_items_of_a_response_are_one_answer(
    more: dict[str, Any], num_answers: int | None
) -> None:
    """However many they are; what an engine keeps is not counted."""
    assert RESPONSES.read(parse({"model": "m", **more})).num_answers == num_answers


def test_a_thinking_budget_says_that_the_leg_is_a_prefill() -> None:
    """VLLM refuses a budget that is not below max_tokens, unless the leg decodes nothing."""
    body = parse(
        {
            **BODIES["messages"],
            "max_tokens": 4096,
            "thinking": {"type": "enabled", "budget_tokens": 2048},
        }
    )
    leg = json.loads(prefill_body(MESSAGES, body, HINTS))
    assert leg["thinking"]["budget_tokens"] == 2048
    assert leg["kv_transfer_params"] == {"do_remote_decode": True}
    assert "kv_transfer_params" not in json.loads(serving_body(MESSAGES, body, HINTS))


@pytest.mark.parametrize(
    ("api", "members", "name"),
    [
        (COMPLETIONS, {"prompt": ["a", "b"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1, 2], [3]]}, "prompt"),
        (COMPLETIONS, {"prompt": [1, 2, 3]}, None),
        (COMPLETIONS, {"echo": True, "max_tokens": 0}, "echo"),
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"n": 2}, "n"),
        (COMPLETIONS, {"suffix": "x"}, "suffix"),
        (RESPONSES, {"truncation": "auto"}, "truncation"),
        (RESPONSES, {"truncation": "disabled"}, None),
        (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
        (
            RESPONSES,
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input",
        ),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages",
        ),
        (
            MESSAGES,
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [
                            {
                                "type": "tool_result",
                                "content": [{"type": "image", "source": {}}],
                            }
                        ],
                    }
                ]
            },
            "messages",
        ),
    ],
)
def test_what_two_engines_cannot_share_is_named(
    api: Any, members: dict[str, Any], name: str | None
) -> None:
    """Several prompts, images, cuts that depend on the answer's length, kept histories."""
    assert api.read(parse({**BODIES[api.name], **members})).one_engine == name


@pytest.mark.parametrize(
    ("api", "members", "word"),
    [
        (COMPLETIONS, {"prompt": None}, "prompt"),
        (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
        (COMPLETIONS, {"stream": "true"}, "stream"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        (MESSAGES, {"max_tokens": None}, "max_tokens"),
        (MESSAGES, {"messages": []}, "messages"),
        (MESSAGES, {"messages": ["hi"]}, "messages"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 64}}, "thinking"),
        (MESSAGES, {"stop_sequences": "x"}, "stop_sequences"),
        (RESPONSES, {"input": None}, "input"),
        (RESPONSES, {"input": 7}, "input"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_impossible_is_refused_by_name(
    api: Any, members: dict[str, Any], word: str
) -> None:
    """No engine hears of a request that it would refuse."""
    with pytest.raises(ApiError, match=word) as caught:
        api.read(parse({**BODIES[api.name], **members}))
    assert caught.value.status == 400


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-1, 20)
    | st.sampled_from(["", "x", "\ud800", "assistant", "tool_result", "image", "reasoning", "auto"])
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "tool_calls", "output", "function", "budget_tokens"]
)
ANY_JSON = st.recursive(
    ATOMS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=8,
)
MEMBERS = st.dictionaries(
    st.sampled_from(
        [
            *("messages", "prompt", "input", "system", "thinking", "tools", "tool_choice"),
            *("max_tokens", "max_output_tokens", "min_tokens", "n", "stop", "suffix", "echo"),
            *("metadata", "vllm_xargs", "cache_salt", "truncation", "previous_response_id"),
        ]
    ),
    ANY_JSON,
    max_size=4,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(APIS), MEMBERS)
def test_any_body_is_read_or_refused(api: Any, members: dict[str, Any]) -> None:
    """Whatever JSON a client sends, it gets an answer of ours or a call is made of it."""
    first = BODIES.get(api.name, {"messages": [{"role": "user", "content": "x"}]})
    body = parse({**first, **members})
    try:
        api.read(body)
        legs = prefill_body(api, body, HINTS, salt="z"), serving_body(api, body, HINTS)
    except ApiError as error:
        refused = error.status
    else:
        assert json.loads(legs[0])["cache_salt"] == "z"
        return
    assert refused == 400


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(APIS), st.lists(st.dictionaries(KEYS, ANY_JSON, max_size=4), max_size=4))
def test_any_answer_can_be_judged(api: Any, events: list[dict[str, Any]]) -> None:
    """Whatever an engine sends, judging it raises nothing."""
    collector = api.collector(1, False)
    for event in events:
        collector.add(json.dumps(event).encode())
    assert collector.ending() == collector.ending()


async def test_a_kept_answer_is_continued_where_it_is_kept() -> None:
    """A request that names an answer goes to the decode engine that made it, in one piece."""
    async with fake_pair(decodes=3) as ([prefill], decodes), bench(prefill, *decodes) as running:
        for number in range(6):
            first = await running.http.post(
                "/v1/responses", json={"model": "fake", "input": LONG * (number + 1)}
            )
            made_by = next(engine for engine in decodes if engine.seen)
            for engine in (prefill, *decodes):
                engine.seen.clear()
            body = {"model": "fake", "input": "and?", "previous_response_id": first.json()["id"]}
            answer = await running.http.post("/v1/responses", json=body)
            assert answer.status_code == 200, number
            assert len(made_by.seen) == 1
            assert not prefill.seen
            made_by.seen.clear()


# --- coding agents --------------------------------------------------------------------------


@pytest.mark.parametrize("name", AGENTS)
async def test_a_coding_agent_loses_nothing_over_30_calls(pair: Pair, name: str) -> None:
    """Its session is recognised: every call after the first returns, and nothing is lost."""
    agent = AGENTS[name]("session-1")
    answers = []
    while len(answers) < 30:
        pair.prefill.kv.flush()
        answers += await turn(agent, pair.bench.http, f"Do thing {len(answers)}. " * 5)
    outcomes = [outcome_of(answer) for answer in answers]
    assert sum(outcome.lost for outcome in outcomes) == 0
    assert [outcome.plan for outcome in outcomes] == ["cold", *["return"] * (len(outcomes) - 1)]
    sessions = {seen.xargs["tc_session"] for seen in pair.decode.seen}
    assert sessions == {"session-1"}
    ended = pair.bench.of_kind(CallEnded)
    assert {one.boundary for one in ended} == {Boundary.TOOL, Boundary.USER}


@pytest.mark.parametrize("kind", [MessagesAgent, ResponsesAgent])
async def test_a_sub_agent_is_a_session_of_its_own(
    pair: Pair, kind: type[MessagesAgent | ResponsesAgent]
) -> None:
    """Sub-agents share their session's id: each is a child, placed beside it."""
    main, sub = kind("session-1"), kind("session-1", agent="agent-7")
    for _ in range(2):
        await turn(main, pair.bench.http, "Do this. " * 20)
        await turn(sub, pair.bench.http, "Look into that. " * 20)
    seen = {one.xargs["tc_session"]: one.xargs.get("tc_parent") for one in pair.decode.seen}
    assert seen == {"session-1": None, "session-1/agent-7": "session-1"}


@pytest.mark.parametrize("name", AGENTS)
async def test_titles_cost_the_conversation_nothing(pair: Pair, name: str) -> None:
    """A title between any two turns shares the session's id, and the turns still return."""
    agent = AGENTS[name]("session-1")
    outcomes = []
    for number in range(5):
        pair.prefill.kv.flush()
        answers = await turn(agent, pair.bench.http, f"Do thing {number}. " * 5)
        outcomes += [outcome_of(answer) for answer in answers]
        await turn(AGENTS[name]("session-1"), pair.bench.http, f"A title for {number}. " * 20)
    assert sum(outcome.lost for outcome in outcomes) == 0
    assert [outcome.plan for outcome in outcomes] == ["cold", *["return"] * (len(outcomes) - 1)]
    assert {seen.xargs["tc_session"] for seen in pair.decode.seen} == {"session-1"}


# --- streams --------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([api.name for api in OTHERS]),
    st.lists(st.integers(0, 5000), max_size=10),
    st.sampled_from(["\n", "\r\n", "\r"]),
    st.booleans(),
)
def test_a_good_stream_passes_byte_for_byte(
    name: str, cuts: list[int], end: str, tools: bool
) -> None:
    """Any cut, any line end: the client gets the engine's bytes, and completion is told once."""
    whole = b": hi\n\n" + b"".join(stream_of(name, tools=tools))
    whole = whole.replace(b"\n", end.encode())
    edges = [0, *sorted(cut % len(whole) for cut in cuts), len(whole)]
    out, stream, completed = passed(name, [whole[a:b] for a, b in itertools.pairwise(edges)])
    assert out == whole
    assert completed == 1
    ending = stream.ending
    wanted = tools and name != "completions"
    assert (ending.problem, ending.boundary, ending.tool_names) == (
        None,
        Boundary.TOOL if wanted else Boundary.USER,
        ("search",) if wanted else (),
    )


@pytest.mark.parametrize("name", [api.name for api in APIS if api.name != "chat"])
def test_transfer_parameters_are_cut_out_wherever_they_are(name: str) -> None:
    """Block ids and addresses do not go out, not even inside an event's answer."""
    out, stream, _ = passed(name, stream_of(name, params={"remote_host": "10.0.0.7"}))
    assert b"10.0.0.7" not in out
    assert stream.ending.problem is None
    for line in out.split(b"\n"):
        if line.startswith(b"data: {"):
            json.loads(line[6:])


@pytest.mark.parametrize(
    ("name", "num_last"), [("completions", 2), ("messages", 2), ("responses", 1)]
)
def test_an_incomplete_answer_is_not_ended_as_a_complete_one(name: str, num_last: int) -> None:
    """Without the event that says why it ended, the last event is held back."""
    whole = stream_of(name)
    kept = [*whole[:-num_last], *whole[len(whole) - num_last + 1 :]]
    out, stream, completed = passed(name, kept)
    assert stream.ending.problem is not None
    assert completed == 0
    assert b"[DONE]" not in out
    assert b"message_stop" not in out


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("completions", b'data: {"error"'),
        ("messages", b"event: error\ndata: {"),
        ("responses", b"event: error\ndata: {"),
    ],
)
async def test_a_stream_that_breaks_ends_with_the_apis_own_error(
    single: Single, name: str, start: bytes
) -> None:
    """The terminal event is one that the API's clients parse."""
    single.engine.scripts = [Script(die="middle")]
    api = next(api for api in APIS if api.name == name)
    answer = await single.bench.http.post(api.path, json={**BODIES[name], "stream": True})
    last = answer.content.rstrip(b"\n").rpartition(b"\n\n")[2]
    assert last.startswith(start)
    parsed = json.loads(last.partition(b"data: ")[2])
    assert "try again" in json.dumps(parsed)
    (ended,) = single.bench.of_kind(CallEnded)
    assert ended.problem == "disconnected"


@pytest.mark.parametrize("api", OTHERS, ids=lambda api: api.name)
@pytest.mark.parametrize("broken", ["error", "cut"])
async def test_a_whole_answer_that_is_none_is_an_error(
    single: Single, api: Any, broken: str
) -> None:
    """An answer without a reason for its end is no success."""
    body = {"error": {"message": "boom"}} if broken == "error" else {"object": "response"}
    single.engine.scripts = [Script(body=json.dumps(body).encode())]
    answer = await single.bench.http.post(api.path, json=BODIES[api.name])
    assert answer.status_code == 502


async def test_errors_have_the_shape_of_the_api(single: Single) -> None:
    """Anthropic's clients parse another error than OpenAI's, also before a call is read."""
    http = single.bench.http
    wrong = await http.post("/v1/messages", json={"model": "fake"})
    assert wrong.status_code == 400
    assert wrong.json()["type"] == "error"
    assert wrong.json()["error"]["type"] == "invalid_request_error"
    kind = await http.post("/v1/messages", content=b"x", headers={"content-type": "text/plain"})
    assert kind.json()["type"] == "error"
    missing = await http.post("/v1/messages", json={**BODIES["messages"], "model": "none"})
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    short = await http.post("/chat/completions", json=BODIES["messages"])
    assert short.status_code == 404
    assert "base URL" in short.json()["error"]["message"]
    openai = await http.post("/v1/responses", json={"model": "fake"})
    assert openai.json()["error"]["param"] == "input"


# --- what is passed on ----------------------------------------------------------------------


async def test_tokens_are_counted_by_an_engine_that_serves(pair: Pair) -> None:
    """What generates nothing needs no plan; what steers engines is taken out all the same."""
    body = {"model": "fake", "prompt": "x", "kv_transfer_params": {"remote_host": "evil"}}
    answer = await pair.bench.http.post("/tokenize", json=body)
    assert answer.json() == {"tokens": [1, 2, 3], "count": 3}
    assert pair.decode.passed_on == [{"model": "fake", "prompt": "x"}]
    assert not pair.prefill.passed_on


async def test_what_is_passed_on_is_spread_over_the_engines_that_serve_its_model() -> None:
    """Neither all of it on the first, nor any on one that lacks an adapter."""
    a, b = FakeEngine("a"), FakeEngine("b", models=["fake", "adapter"])
    async with fake_engines(a, b), bench(a, b) as running:
        await running.ready()
        for _ in range(24):
            await running.http.post("/tokenize", json={"model": "fake", "prompt": "x"})
        assert a.passed_on
        assert b.passed_on
        for engine in (a, b):
            engine.passed_on.clear()
        for _ in range(4):
            await running.http.post("/tokenize", json={"model": "adapter", "prompt": "x"})
        assert (len(a.passed_on), len(b.passed_on)) == (0, 4)


async def test_paths_of_the_operators_own_are_passed_on(pair: Pair) -> None:
    """Only those that are named; what the router plans stays planned, whatever is named."""
    body = {"model": "fake", "prompt": "x", "max_tokens": 2}
    assert (await pair.bench.http.post("/detokenize/more", json=body)).status_code == 404
    paths = "/tokenize /v1/completions"
    async with bench(pair.prefill, pair.decode, more_paths=f"{paths} /detokenize/more") as running:
        assert (await running.http.post("/tokenize", json=body)).status_code == 200
        answer = await running.http.post("/detokenize/more", json=body)
        # The fake does not have it: its own 404 came through.
        assert (answer.status_code, "No such path" in answer.text) == (404, False)
        planned = await running.http.post("/v1/completions", json=body)
        assert "turncache-outcome" in planned.headers


async def test_without_an_engine_nothing_is_passed_on() -> None:
    """A dead engine is a 503 that may be tried again."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine) as running:
        await engine.stop()
        answer = await running.http.post("/tokenize", json={"model": "fake", "prompt": "x"})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
