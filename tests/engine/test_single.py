"""Retention on one ordinary vLLM, for real."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.engine.driving import Driver, assert_adds_up, assert_same, continued, conversation, words
from turncache_server.launch.stack import Stack

BLOCK = 32


@pytest.fixture(scope="module")
def drive(single: Stack) -> Iterator[Driver]:
    """A driver of the single engine."""
    driver = Driver(single)
    yield driver
    driver.close()


@pytest.fixture(autouse=True)
def _nothing_retained_for_the_next_test(drive: Driver) -> Iterator[None]:
    yield
    drive.end_sessions()


@pytest.fixture
def ids() -> tuple[str, str]:
    """A fresh session id and cache salt."""
    return f"s-{uuid.uuid4().hex}", uuid.uuid4().hex


def test_a_session_survives_flooding_that_stock_forgets(drive: Driver) -> None:
    """With retention a flooded session computes only what is new; with mode off, nearly all."""
    computed = {}
    for mode in ("off", "on"):
        drive.set_mode(mode)
        drive.end_sessions()
        session, salt = f"{mode}-{uuid.uuid4().hex}", uuid.uuid4().hex
        messages = conversation()
        first = drive.call(messages, session=session, salt=salt)
        drive.flood()
        messages = list(continued(messages, first))
        second = drive.call(messages, session=session, salt=salt)
        outcome = assert_adds_up(second.outcome)
        computed[mode] = outcome.computed
        assert_same(second, drive.recomputed(messages))
        if mode == "on":
            assert outcome.lost == 0
            assert outcome.local > 1000
    assert computed["off"] > 5 * computed["on"]


def test_ten_calls_lose_nothing(drive: Driver, ids: tuple[str, str]) -> None:
    """Over ten flooded tool waits, every call computes its new tokens and one block."""
    session, salt = ids
    messages = conversation(3500)
    previous_prompt = 0
    for number in range(10):
        answer = drive.call(messages, session=session, salt=salt, max_tokens=8)
        outcome = assert_adds_up(answer.outcome)
        if number:
            new = outcome.prompt - previous_prompt
            assert outcome.lost == 0, f"call {number}: {outcome}"
            assert outcome.computed <= new + BLOCK
        previous_prompt = outcome.prompt
        drive.flood()
        messages = list(continued(messages, answer, 150))


def test_an_edited_history_reuses_only_the_common_prefix(
    drive: Driver, ids: tuple[str, str]
) -> None:
    """Replacing the first user message leaves nothing but the system prompt to reuse."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    messages = list(continued(messages, first))
    drive.call(messages, session=session, salt=salt)
    edited = [messages[0], {"role": "user", "content": words(2500)}, *messages[2:]]
    answer = drive.call(edited, session=session, salt=salt)
    outcome = assert_adds_up(answer.outcome)
    assert outcome.local <= BLOCK
    assert outcome.lost == 0
    assert_same(answer, drive.recomputed(edited))


def test_a_regenerated_answer_is_exact(drive: Driver, ids: tuple[str, str]) -> None:
    """Another answer in the history diverges at that answer and not before."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    other = [*continued(messages, first)]
    other[2] = {"role": "assistant", "content": "Something else entirely."}
    answer = drive.call(other, session=session, salt=salt)
    outcome = assert_adds_up(answer.outcome)
    assert outcome.local > 1000
    assert_same(answer, drive.recomputed(other))


def test_a_forked_session_shares_its_prefix_and_stays_exact(
    drive: Driver, ids: tuple[str, str]
) -> None:
    """Two continuations of one history are both exact and both find the prefix."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    for branch in ("a", "b"):
        history = list(continued(messages, first))
        answer = drive.call(history, session=f"{session}/{branch}", salt=salt)
        assert assert_adds_up(answer.outcome).local > 1000
        assert_same(answer, drive.recomputed(history))


def test_a_retried_call_is_the_same_call(drive: Driver, ids: tuple[str, str]) -> None:
    """The same request twice gives the same text and computes at most a block."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    again = drive.call(messages, session=session, salt=salt)
    outcome = assert_adds_up(again.outcome)
    assert outcome.computed <= BLOCK
    assert outcome.lost == 0
    assert_same(again, first)


def test_another_salt_never_shares(drive: Driver, ids: tuple[str, str]) -> None:
    """A session id alone grants nothing: the chain hash covers the cache salt."""
    session, salt = ids
    messages = conversation(3000)
    drive.call(messages, session=session, salt=salt)
    stranger = drive.call(messages, session=session, salt=uuid.uuid4().hex)
    assert assert_adds_up(stranger.outcome).local == 0


def test_streaming_and_not_streaming_agree(drive: Driver, ids: tuple[str, str]) -> None:
    """Both ways give the same text, and an outcome."""
    session, salt = ids
    messages = conversation(3000)
    streamed = drive.call(messages, session=session, salt=salt)
    whole = drive.call(messages, session=session, salt=salt, stream=False)
    assert_same(whole, streamed)
    assert_adds_up(whole.outcome)


def test_hostile_transfer_parameters_do_not_reach_the_engine_thread(drive: Driver) -> None:
    """What kills a stock engine with any connector, a non-object, is harmless here."""
    url = f"{drive.engine('single-0').url}/v1/chat/completions"
    body = {
        "model": drive.stack.model,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "hello"}],
        "vllm_xargs": {"kv_transfer_params": "x"},
    }
    drive.post(url, body)
    status, _ = drive.post(url, {**body, "vllm_xargs": {"tc_session": "s", "tc_retain_s": -1}})
    assert status == 200


@pytest.mark.parametrize(
    ("change", "status"),
    [
        pytest.param({"max_tokens": "many"}, 400, id="max_tokens of the wrong type"),
        pytest.param({"messages": "hello"}, 400, id="messages of the wrong type"),
        pytest.param({"model": "no-such-model"}, 404, id="unknown model"),
        pytest.param({"max_tokens": 10_000_000}, 400, id="longer than the context"),
    ],
)
def test_bad_input_is_refused_in_openai_shape(
    drive: Driver, change: dict[str, object], status: int
) -> None:
    """A malformed call is the caller's error, before any work."""
    body = {
        "model": drive.stack.model,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "hello"}],
    }
    got, answer = drive.post(f"{drive.stack.base_url}/v1/chat/completions", {**body, **change})
    assert got == status
    assert answer["error"]["message"]


def test_nothing_is_left_when_sessions_end(drive: Driver, ids: tuple[str, str]) -> None:
    """After a final call no block is in use, and no call is in flight."""
    session, salt = ids
    drive.call(conversation(), session=session, salt=salt)
    assert drive.settle("single-0", "calls_in_flight", 0) == 0
    gauges = drive.stats("single-0").gauges
    assert gauges["free_blocks"] == gauges["blocks"] - 1, "all but vLLM's null block are free"
    assert gauges["broken"] == 0
    assert gauges["in_order"] == 1
