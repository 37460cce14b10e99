"""Breaker, records, outcomes, events and metrics, each by itself."""

from __future__ import annotations

import pytest
from aiohttp.test_utils import make_mocked_request
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache.errors import EngineFault
from turncache.protocol import Outcome, Plan, Reason
from turncache_server.control.messages import Call, CallReply
from turncache_server.router import handlers
from turncache_server.router.breaker import Breaker
from turncache_server.router.errors import EngineRefused, LegFailed
from turncache_server.router.events import CallRefused, Events, OutcomeKnown
from turncache_server.router.metrics import Metrics
from turncache_server.router.outcomes import ask_outcome, judge
from turncache_server.router.plan import CallPlan
from turncache_server.router.records import CallRecord, CallRecords

counts = st.integers(0, 10_000)
reasons = st.sampled_from([*Reason])


@settings(max_examples=100, deadline=None)
@given(st.tuples(counts, counts, counts, counts), reasons, reasons)
def test_an_outcome_adds_up_or_is_dropped(
    tokens: tuple[int, int, int, int], plan: Reason, engine: Reason
) -> None:
    """Whatever an engine tells, what goes out has local + returned + computed = prompt."""
    local, returned, computed, slack = tokens
    reply = CallReply(
        found=True,
        done=True,
        prompt=local + returned + computed + slack % 2,
        local=local,
        returned=returned,
        computed=computed,
        lost=slack,
        reason=engine.value,
        at=5,
    )
    asked = judge(reply, Plan.RETURN, plan)
    if slack % 2 or slack > computed:
        assert (asked.outcome, asked.why) == (None, "implausible")
        return
    assert asked.outcome is not None
    again = Outcome.from_header(asked.outcome.to_header())
    assert again == asked.outcome
    assert again.reason is (engine if plan is Reason.OK else plan)
    assert (again.at is not None) == (again.reason is Reason.DIVERGED)


def test_an_unknown_call_and_an_unknown_reason() -> None:
    """An engine that forgot the call, and one that is newer than the router."""
    assert judge(CallReply(found=False), Plan.SINGLE, Reason.OK).why == "unknown_call"
    newer = judge(CallReply(found=True, reason="tides"), Plan.SINGLE, Reason.OK)
    assert newer.outcome is not None
    assert newer.outcome.reason is Reason.ERROR


class _Dead:
    async def ask(
        self, address: str, request: Call, kind: type[CallReply], *, timeout_s: float
    ) -> CallReply:
        raise EngineFault(address, "no answer")


@pytest.mark.anyio
async def test_a_control_socket_that_fails_is_a_result() -> None:
    """No error reaches the call: the outcome is missing, with a word why."""
    plan = CallPlan(label=Plan.SINGLE, reason=Reason.OK, prefill=(), serve=())
    asked = await ask_outcome(_Dead(), "tcp://127.0.0.1:1", "r", plan, timeout_s=0.1)
    assert (asked.outcome, asked.done, asked.why) == (None, False, "no_answer")


def test_the_breaker_opens_after_consecutive_failures_only() -> None:
    """An answer in between starts the count again; after a while calls pass on probation."""
    breaker = Breaker(max_failures=3, open_s=5.0)
    for now_s in (0.0, 1.0):
        breaker.failed(now_s)
    breaker.succeeded()
    for now_s in (2.0, 3.0):
        breaker.failed(now_s)
    assert not breaker.is_open(3.0)
    breaker.failed(4.0)
    assert breaker.is_open(8.9)
    assert not breaker.is_open(9.0)
    breaker.failed(10.0)
    assert breaker.is_open(14.9), "one failure on probation is enough"
    breaker.succeeded()
    assert not breaker.is_open(10.0)


def test_records_are_bounded_oldest_first() -> None:
    """The record of a call is found by its id until newer ones push it out."""
    records = CallRecords(2)
    for name in "abc":
        records.begin(CallRecord(request=name, plan=Plan.COLD, reason=Reason.NEW_SESSION))
    assert records.get("a") is None
    record = records.get("c")
    assert record is not None
    assert record.to_dict()["reason"] == "new_session"
    record.outcome = Outcome(prompt=1, local=0, returned=0, computed=1, reason=Reason.EVICTED)
    assert record.to_dict()["reason"] == "evicted", "what happened wins over what was planned"


def test_a_listener_that_fails_does_not_stop_the_others() -> None:
    """Telling is not serving."""
    heard: list[object] = []

    def broken(event: object) -> None:
        raise RuntimeError("listener")

    Events([broken, heard.append]).emit(CallRefused(api="chat", code=400))
    assert heard == [CallRefused(api="chat", code=400)]


def test_metrics_live_in_a_registry_of_their_own() -> None:
    """Two routers in one process count apart."""
    first, second = Metrics(lambda: 7), Metrics(lambda: 0)
    outcome = Outcome(prompt=6, local=1, returned=2, computed=3, lost=3, reason=Reason.EVICTED)
    first(OutcomeKnown(request="r", outcome=outcome))
    text = first.render().decode()
    assert 'turncache_prompt_tokens_total{source="returned"} 2.0' in text
    assert 'turncache_lost_tokens_total{reason="evicted"} 3.0' in text
    assert "turncache_router_sessions 7.0" in text
    assert "returned" not in second.render().decode()


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (LegFailed("e", "refused", "does not accept", consumed=False), 503),
        (LegFailed("e", "timeout", "did not answer", consumed=True), 504),
        (LegFailed("e", "disconnected", "closed", consumed=True), 502),
        (LegFailed("e", "bad_answer", "sent rubbish", consumed=True), 502),
    ],
)
def test_a_failed_leg_becomes_an_error_without_names(failure: LegFailed, status: int) -> None:
    """The client learns what happened and that it may try again, not which engine it was."""
    error = failure.to_api_error(1)
    assert (error.status, error.retry_after_s) == (status, 1)
    assert "e:" not in error.message


def test_an_engines_error_keeps_its_message_in_a_stream() -> None:
    """After the headers the engine's own words still reach the client."""
    refused = EngineRefused("e", 400, {}, b'{"error":{"message":"too long"}}')
    assert refused.to_api_error().message == "too long"
    assert "status 500" in EngineRefused("e", 500, {}, b"<html>").to_api_error().message


class _Transport:
    def __init__(self, peer: object) -> None:
        self._peer = peer

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._peer if name == "peername" else default


@pytest.mark.parametrize(
    ("peer", "loopback"),
    [
        (("127.0.0.1", 5), True),
        (("::1", 5, 0, 0), True),
        (("10.0.0.7", 5), False),
        (("fe80::1", 5, 0, 0), False),
        ("", False),
        (None, False),
    ],
)
def test_admin_endpoints_go_by_the_address_of_the_connection(peer: object, loopback: bool) -> None:
    """Only loopback counts, whatever headers say; and no proxy that asks for somebody else."""
    for headers, allowed in (
        ({}, loopback),
        ({"X-Forwarded-For": "127.0.0.1"}, False),
        ({"Forwarded": "for=10.0.0.7"}, False),
        ({"X-Real-IP": "127.0.0.1"}, False),
        ({"Via": "1.1 nginx"}, False),
    ):
        request = make_mocked_request(
            "POST", "/admin/return", headers=headers, transport=_Transport(peer)
        )
        assert handlers._from_loopback(request) is allowed
