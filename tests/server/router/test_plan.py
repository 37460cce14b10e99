"""Plans, placing and legs are values of values."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache.protocol import EngineHints, Plan, Reason
from turncache_server.router.apis.api import CallRequest
from turncache_server.router.apis.chat import CHAT, read_chat
from turncache_server.router.body import Body
from turncache_server.router.errors import ApiError
from turncache_server.router.legs import (
    TRACE_HEADERS,
    forwarded,
    leg_headers,
    prefill_body,
    serving_body,
)
from turncache_server.router.place import rank
from turncache_server.router.plan import (
    EngineView,
    PlanHints,
    Side,
    Snapshot,
    check_model,
    make_plan,
)
from turncache_server.router.sessions import SessionTable, namespaced

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "hello"}


def parse(**members: Any) -> Body:
    """Parse a chat completion body."""
    body = {"model": "m", "messages": [USER], **members}
    return Body.parse(json.dumps(body).encode(), max_depth=20)


def request(**members: Any) -> CallRequest:
    """Read a chat completion body."""
    return read_chat(parse(**members))


def engine(name: str, side: Side, **members: Any) -> EngineView:
    """One engine that serves m and is live."""
    return EngineView(
        name=name, engine_id=f"id-{name}", side=side, **{"models": {"m": 1000}, **members}
    )


def fleet(**dead: bool) -> Snapshot:
    """Two prefill and three decode engines; the named ones are down."""
    sides = {"p0": Side.PREFILL, "p1": Side.PREFILL}
    sides |= {f"d{i}": Side.DECODE for i in range(3)}
    return Snapshot(
        engines=tuple(engine(name, side, live=name not in dead) for name, side in sides.items())
    )


# --- chat ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("max_tokens", "10"),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_completion_tokens", [1]),
        ("n", 0),
        ("n", "1"),
        ("stream", "true"),
        ("stream", 1),
        ("model", 7),
        ("messages", "hi"),
        ("messages", []),
        ("messages", None),
        ("messages", ["hi"]),
        ("tools", {}),
        ("tool_choice", []),
        ("stop", 1),
        ("stream_options", []),
        ("session_id", 5),
        ("min_tokens", -1),
        ("vllm_xargs", "x"),
        ("echo", "no"),
        ("stream_options", {"include_usage": True}),
        ("top_logprobs", 3),
    ],
)
def test_a_member_of_a_wrong_type_is_refused_by_name(member: str, value: Any) -> None:
    """The error names the member, as OpenAI's does."""
    with pytest.raises(ApiError) as caught:
        request(**{member: value})
    assert caught.value.status == 400
    assert caught.value.param == member
    assert member in caught.value.message


def test_min_tokens_above_the_limit_is_refused() -> None:
    """An impossible pair would be found out only by decode, after the prefill."""
    with pytest.raises(ApiError, match="min_tokens: 20 is more"):
        request(max_tokens=100, max_completion_tokens=10, min_tokens=20)
    assert request(max_tokens=1, max_completion_tokens=30, min_tokens=20).max_tokens == 30


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"echo": True}, "echo"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens"),
        ({"n": 1, "prompt_logprobs": None, "echo": False, "logprobs": True}, None),
    ],
)
def test_what_two_engines_cannot_share_is_named(members: dict[str, Any], name: str | None) -> None:
    """The member that forces one engine is found, null and defaults do not count."""
    assert request(**members).one_engine == name


# --- plan ----------------------------------------------------------------------------------


def test_one_engine_is_the_plan_single() -> None:
    """Without sides there is one leg, and the reason is the engine's to tell."""
    plan = make_plan(
        request(n=3), PlanHints(root="s"), Snapshot(engines=(engine("e", Side.SINGLE),))
    )
    assert (plan.label, plan.reason, plan.prefill) == (Plan.SINGLE, Reason.OK, ())
    assert [e.name for e in plan.serve] == ["e"]


@pytest.mark.parametrize(
    ("history", "served_by", "enabled", "label", "reason"),
    [
        pytest.param([], None, True, Plan.COLD, Reason.NEW_SESSION, id="first call"),
        pytest.param([ANSWER, USER], None, True, Plan.RETURN, Reason.OK, id="history"),
        pytest.param([], "d1", True, Plan.RETURN, Reason.OK, id="known session"),
        pytest.param([ANSWER, USER], "d1", False, Plan.COLD, Reason.DISABLED, id="off"),
        pytest.param([ANSWER], "gone", True, Plan.COLD, Reason.SOURCE_GONE, id="removed"),
    ],
)
def test_a_return_is_tried_when_earlier_calls_may_have_left_kv(
    history: list[Any], served_by: str | None, enabled: bool, label: Plan, reason: Reason
) -> None:
    """Plan and reason follow from the history, the table and the switch."""
    snapshot = Snapshot(engines=fleet().engines, return_enabled=enabled)
    hints = PlanHints(root="s", served_by=served_by)
    plan = make_plan(request(messages=[USER, *history]), hints, snapshot)
    assert (plan.label, plan.reason) == (label, reason)
    assert (plan.source is None) == (label is Plan.COLD)
    assert plan.prefill


def test_the_source_is_the_engine_that_answered_last() -> None:
    """Finding is not placing: the session is pulled from where it was, to where it belongs."""
    placed = make_plan(request(), PlanHints(root="s"), fleet()).serve[0].name
    other = next(name for name in ("d0", "d1", "d2") if name != placed)
    plan = make_plan(request(), PlanHints(root="s", served_by=other), fleet())
    assert plan.source == f"id-{other}"
    assert plan.serve[0].name == placed


def test_an_unknown_session_with_history_is_looked_for_where_it_would_lie() -> None:
    """After a restart of the router: where it is placed, and where it went if that refused."""
    plan = make_plan(request(messages=[USER, ANSWER, USER]), PlanHints(root="s"), fleet())
    first, second, _ = plan.serve
    assert (plan.source, plan.also) == (first.engine_id, (second.engine_id,))
    dead = {first.name: True}
    plan = make_plan(request(messages=[USER, ANSWER, USER]), PlanHints(root="s"), fleet(**dead))
    assert (plan.source, *plan.also) == tuple(engine.engine_id for engine in plan.serve)


def test_a_session_that_another_router_has_served_since_is_looked_for_as_well() -> None:
    """What this one knows comes last, and none is named twice."""
    first, second, third = make_plan(request(), PlanHints(root="s"), fleet()).serve
    for last, also in ((third, (second, third)), (first, (second,))):
        hints = PlanHints(root="s", served_by=last.name, behind=True)
        plan = make_plan(request(messages=[USER, ANSWER, USER]), hints, fleet())
        assert plan.source == first.engine_id
        assert plan.also == tuple(engine.engine_id for engine in also)
    known = PlanHints(root="s", served_by=third.name)
    plan = make_plan(request(messages=[USER, ANSWER, USER]), known, fleet())
    assert (plan.source, plan.also) == (third.engine_id, ())


def test_the_table_knows_when_it_is_behind() -> None:
    """A history has one answer more than the last call that this router has served; not two."""
    sessions = SessionTable(10)
    sessions.advance("s", served_by="d0", root="s", num_answers=3)
    entry = sessions.get("s")
    assert entry is not None
    assert [entry.is_behind(count) for count in (2, 3, 4, 5)] == [False, False, False, True]
    assert not entry.is_behind(None)
    sessions.advance("s", served_by="d0", root="s")
    entry = sessions.get("s")
    assert entry is not None
    assert not entry.is_behind(9)


def test_a_dead_source_is_not_asked() -> None:
    """A session whose engine is down is computed again, with the reason."""
    plan = make_plan(request(), PlanHints(root="s", served_by="d1"), fleet(d1=True))
    assert (plan.label, plan.reason, plan.source) == (Plan.COLD, Reason.SOURCE_GONE, None)
    assert "d1" not in [e.name for e in plan.serve]


def test_what_two_engines_cannot_serve_goes_to_decode_alone() -> None:
    """The plan is cold, says why, and has no prefill leg."""
    plan = make_plan(request(n=2), PlanHints(root="s", served_by="d0"), fleet())
    assert (plan.label, plan.reason) == (Plan.COLD, Reason.UNSUPPORTED)
    assert plan.prefill == ()
    assert {e.side for e in plan.serve} == {Side.DECODE}


def test_when_no_engine_of_a_side_is_live_all_are_tried() -> None:
    """A health check may be late; a refused connection costs nothing."""
    plan = make_plan(request(), PlanHints(root="s"), fleet(p0=True, p1=True))
    assert {e.name for e in plan.prefill} == {"p0", "p1"}


def test_only_engines_that_serve_the_model_are_candidates() -> None:
    """An adapter that one engine has loaded is not asked of another."""
    engines = (
        engine("a", Side.SINGLE),
        engine("b", Side.SINGLE, models={"m": None, "lora": None}),
    )
    plan = make_plan(request(model="lora"), PlanHints(root="s"), Snapshot(engines=engines))
    assert [e.name for e in plan.serve] == ["b"]
    missing = Snapshot(
        engines=(engine("p", Side.PREFILL), engine("d", Side.DECODE, models={"x": 1}))
    )
    with pytest.raises(ApiError) as caught:
        make_plan(request(), PlanHints(root="s"), missing)
    assert (caught.value.status, caught.value.code) == (503, "no_engine")


def test_an_unknown_model_is_refused_by_name() -> None:
    """404 model_not_found, unless no engine has been reached yet."""
    with pytest.raises(ApiError) as caught:
        check_model(request(model="gpt-9"), fleet())
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")
    unreached = Snapshot(engines=(engine("e", Side.SINGLE, models={}),))
    check_model(request(model="gpt-9"), unreached)
    check_model(request(model=None), fleet())


def test_an_answer_longer_than_the_context_is_refused() -> None:
    """Decode would refuse it, but only after the prefill."""
    with pytest.raises(ApiError, match="context of 1000"):
        check_model(request(max_tokens=10_000_000), fleet())
    check_model(request(max_tokens=1000), fleet())


# --- placing --------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.text(), st.sets(st.text(min_size=1), min_size=1, max_size=6), st.text(min_size=1))
def test_adding_an_engine_moves_only_what_it_wins(key: str, names: set[str], new: str) -> None:
    """The order of the others never changes, whoever joins or leaves."""
    before = rank(key, names)
    after = rank(key, names | {new})
    assert [name for name in after if name != new or new in names] == list(before)
    assert rank(key, reversed(before)) == before


def test_sessions_spread_evenly() -> None:
    """Over four engines each gets a quarter of the sessions, within a tenth."""
    names = [f"decode-{i}" for i in range(4)]
    won = Counter(rank(f"session-{i}", names)[0] for i in range(4000))
    assert all(900 < won[name] < 1100 for name in names)


# --- legs -----------------------------------------------------------------------------------

HINTS = EngineHints(session="ns", source="d0", call="prefill", request="r", handover=True)


def test_the_prefill_leg_asks_for_one_token_and_nothing_else() -> None:
    """Members that shape an answer are gone, those that shape the prompt are untouched."""
    body = parse(
        stream=True,
        stream_options={"include_usage": True},
        n=1,
        max_tokens=500,
        min_tokens=100,
        stop=["a"],
        stop_token_ids=[1],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
        return_token_ids=True,
        tools=[{"type": "function", "function": {"name": "f"}}],
        tool_choice="required",
        response_format={"type": "json_object"},
        chat_template_kwargs={"enable_thinking": False},
        temperature=0.5,
        cache_salt="salt",
    )
    leg = json.loads(prefill_body(CHAT, body, HINTS))
    assert {name: leg[name] for name in ("stream", "n", "max_tokens", "max_completion_tokens")} == {
        "stream": False,
        "n": 1,
        "max_tokens": 1,
        "max_completion_tokens": 1,
    }
    gone = "stream_options min_tokens stop stop_token_ids ignore_eos logprobs top_logprobs"
    assert not {*gone.split(), "return_token_ids"} & set(leg)
    kept = "messages tools tool_choice response_format chat_template_kwargs cache_salt temperature"
    for name in kept.split():
        assert leg[name] == body.get(name)
    assert leg["vllm_xargs"]["tc_handover"] == 1


def test_the_serving_leg_is_what_the_client_sent() -> None:
    """Every member of the answer's shape reaches the engine that gives it."""
    members = {"stream": True, "max_tokens": 500, "min_tokens": 100, "stop": ["a"], "n": 2}
    leg = json.loads(serving_body(CHAT, parse(**members), HINTS))
    assert {name: leg[name] for name in members} == members
    assert leg["session_id"] == "ns"


def test_engines_see_no_header_that_could_steer_them() -> None:
    """Only an allow-list of the client's headers passes, and our own replace it."""
    client = {
        "authorization": "Bearer client",
        "traceparent": "00-1-2-01",
        "x-session-id": "raw",
        "x-request-id": "chosen",
        "x-data-parallel-rank": "3",
        "x-vllm-priority": "0",
        "turncache": "v=1",
        "host": "router",
        "cookie": "secret",
    }
    sent = leg_headers(client, session="ns", request_id="r-p1", engine_key=None)
    assert sent == {
        "authorization": "Bearer client",
        "content-type": "application/json",
        "X-Session-ID": "ns",
        "X-Request-Id": "r-p1",
    }
    keyed = leg_headers(client, session="ns", request_id="r", engine_key="ours")
    assert keyed["authorization"] == "Bearer ours"
    assert forwarded(client, TRACE_HEADERS) == {"traceparent": "00-1-2-01"}
    odd = {"traceparent": "\udcff", "tracestate": "é", "authorization": "Bearer é"}
    assert forwarded(odd, TRACE_HEADERS) == {}
    sent = leg_headers(odd, session="ns", request_id="r", engine_key=None)
    assert set(sent) == {"content-type", "X-Session-ID", "X-Request-Id"}


# --- sessions -------------------------------------------------------------------------------


def test_the_table_is_bounded_and_forgets_the_least_recently_used() -> None:
    """Reading a session keeps it, as does a call that ended well."""
    table = SessionTable(2)
    for name in ("a", "b"):
        table.advance(name, served_by="d", root=name)
    assert table.get("a") is not None
    table.advance("c", served_by="d", root="c")
    assert table.get("b") is None
    assert len(table) == 2
    table.forget("a")
    assert table.get("a") is None


def test_children_lie_beside_their_root() -> None:
    """A grandchild is placed by the first session of the tree, and keeps that place."""
    table = SessionTable(10)
    table.advance("root", served_by="d", root=table.root_of("root", None))
    table.advance("child", served_by="d", root=table.root_of("child", "root"))
    assert table.root_of("grandchild", "child") == "root"
    assert table.root_of("child", None) == "root"
    assert table.root_of("orphan", "unknown") == "unknown"


def test_namespaced_ids_of_two_tenants_differ() -> None:
    """Without tenants an id is used as it is; with them equal ids are two sessions."""
    assert namespaced("s") == "s"
    ids = {namespaced("s", tenant="a"), namespaced("s", tenant="b"), namespaced("bs", tenant="")}
    assert len(ids) == 3
    assert all(len(name) <= 64 and name.isascii() for name in ids)


@given(st.text(min_size=1, max_size=8), st.sampled_from(["d0", "d1", "d2"]))
def test_a_draining_engine_is_a_source_and_nothing_else(root: str, draining: str) -> None:
    """Where it would have been chosen it is pulled from, remembered or not; no other moves."""
    stays = fleet()
    drains = Snapshot(
        engines=tuple(
            dataclasses.replace(each, draining=each.name == draining) for each in stays.engines
        )
    )
    asked = request(messages=[USER, ANSWER, USER])
    before = make_plan(asked, PlanHints(root=root), stays)
    after = make_plan(asked, PlanHints(root=root), drains)
    assert draining not in [each.name for each in after.serve]
    assert after.source == before.source == f"id-{before.serve[0].name}"
    if before.serve[0].name != draining:
        assert after.serve[0].name == before.serve[0].name
    kept = make_plan(asked, PlanHints(root=root, served_by=draining), drains)
    assert kept.source == f"id-{draining}"


def test_draining_engines_serve_when_no_other_lives() -> None:
    """And one that is dead is no source."""
    engines = tuple(
        dataclasses.replace(each, draining=each.name in ("d0", "p0")) for each in fleet().engines
    )
    last = Snapshot(
        engines=tuple(dataclasses.replace(each, live=each.name in ("d0", "p1")) for each in engines)
    )
    plan = make_plan(request(), PlanHints(root="r"), last)
    assert ([e.name for e in plan.prefill], [e.name for e in plan.serve]) == (["p1"], ["d0"])
