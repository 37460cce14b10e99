"""The verified pull between prefill and decode, for real."""

from __future__ import annotations

import json
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import openai
import psutil
import pytest

from tests.engine.block_reader import chain_hashes
from tests.engine.driving import (
    Answer,
    Driver,
    assert_adds_up,
    assert_same,
    continued,
    conversation,
    words,
)
from turncache.protocol import Reason
from turncache_server.launch.stack import Stack

BLOCK = 32


@pytest.fixture(scope="module")
def drive(pair: Stack) -> Iterator[Driver]:
    """A driver of the pair."""
    driver = Driver(pair)
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


def test_the_answer_comes_back_to_prefill(drive: Driver, ids: tuple[str, str]) -> None:
    """With prefill flooded in every wait, a call computes its new tokens and one block."""
    session, salt = ids
    messages = conversation(3500)
    previous_prompt, returned, ties = 0, 0, 0
    for number in range(5):
        answer = drive.call(messages, session=session, salt=salt, max_tokens=16)
        outcome = assert_adds_up(answer.outcome)
        if number:
            assert outcome.lost == 0, f"call {number}: {outcome}"
            assert outcome.computed <= outcome.prompt - previous_prompt + BLOCK
            returned += outcome.returned
            ties += assert_same(answer, drive.recomputed(messages, max_tokens=16))
        previous_prompt = outcome.prompt
        drive.flood()
        messages = list(continued(messages, answer, 200))
    assert returned > 1000
    assert ties <= 1


def test_pulled_blocks_hold_the_sources_bytes(drive: Driver, ids: tuple[str, str]) -> None:
    """Both ways, block by block and over all layers: what was pulled is what the source has."""
    session, salt = ids
    messages = conversation(3500)
    first = drive.call(messages, session=session, salt=salt, max_tokens=48)
    drive.flood()
    history = list(continued(messages, first, 1500))
    second = assert_adds_up(drive.call(history, session=session, salt=salt).outcome)
    assert second.returned > 500, "prefill was flooded"
    hashes = chain_hashes(drive.prompt_tokens(history), salt, BLOCK)
    mine = drive.held_blocks("prefill-0", session, hashes)
    theirs = drive.held_blocks("decode-0", session, hashes)
    assert len(mine) == len(theirs) == len(hashes)
    digests = drive.block_digests("prefill-0", mine)
    assert digests == drive.block_digests("decode-0", theirs)
    assert len(set(digests)) == len(digests), "every block is another"
    came_back = (second.local + second.returned) // BLOCK
    assert 0 < came_back < len(hashes), "some went one way, some the other"


def test_an_edited_history_returns_only_the_common_prefix(
    drive: Driver, ids: tuple[str, str]
) -> None:
    """The stock return path answers from the old text here; ours computes anew."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    drive.flood()
    edited = [
        messages[0],
        {"role": "user", "content": words(3000)},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And now?"},
    ]
    answer = drive.call(edited, session=session, salt=salt)
    outcome = assert_adds_up(answer.outcome)
    assert outcome.reused <= BLOCK
    assert_same(answer, drive.recomputed(edited))


def test_a_rewritten_tail_returns_up_to_the_edit(drive: Driver, ids: tuple[str, str]) -> None:
    """A regenerated answer keeps the prompt before it and nothing after."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    drive.flood()
    other = list(continued(messages, first))
    other[2] = {"role": "assistant", "content": "A different answer."}
    answer = drive.call(other, session=session, salt=salt)
    outcome = assert_adds_up(answer.outcome)
    assert outcome.reused > 1000
    assert_same(answer, drive.recomputed(other))


def test_forked_and_retried_calls_are_exact(drive: Driver, ids: tuple[str, str]) -> None:
    """A second reader and a second try get exactly the common prefix."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    drive.flood()
    history = list(continued(messages, first))
    reference = drive.recomputed(history)
    for name in (session, session, f"{session}/fork"):
        answer = drive.call(history, session=name, salt=salt)
        assert_adds_up(answer.outcome)
        assert_same(answer, reference)


def test_parallel_calls_of_one_session_are_exact(drive: Driver, ids: tuple[str, str]) -> None:
    """Calls that overlap in one session do not disturb each other."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    histories = [list(continued(messages, first, 300)) for _ in range(3)]
    answers: dict[int, Answer] = {}

    def run(index: int) -> None:
        answers[index] = drive.call(histories[index], session=session, salt=salt)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, history in enumerate(histories):
        assert_same(answers[index], drive.recomputed(history))


def test_a_client_that_leaves_leaves_nothing_behind(drive: Driver, ids: tuple[str, str]) -> None:
    """Streams dropped at any moment free their blocks on both engines."""
    session, salt = ids
    messages = conversation()
    for timeout_s in (0.05, 0.2, 0.6, 1.5):
        with pytest.raises((openai.APITimeoutError, openai.APIConnectionError)):
            drive.client.with_options(timeout=timeout_s, max_retries=0).with_session(
                session
            ).chat.completions.create(
                model=drive.stack.model,
                messages=messages,  # type: ignore[arg-type]
                max_tokens=400,
                extra_body={"cache_salt": salt, "ignore_eos": True},
            )
    answer = drive.call(messages, session=session, salt=salt)
    assert_same(answer, drive.recomputed(messages))
    assert_no_leak(drive)


def test_a_frozen_peer_costs_a_recompute(drive: Driver, ids: tuple[str, str]) -> None:
    """With decode's engine stopped, prefill recomputes and the call waits for decode only."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    drive.flood()
    history = list(continued(messages, first))
    top = psutil.Process(drive.engine("decode-0").pid)
    pids = [process.pid for process in (top, *top.children(recursive=True))]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    thaw = threading.Timer(8.0, lambda: [os.kill(pid, signal.SIGCONT) for pid in pids])
    thaw.start()
    try:
        answer = drive.call(history, session=session, salt=salt)
    finally:
        thaw.join()
    outcome = assert_adds_up(answer.outcome)
    assert outcome.returned == 0
    assert_same(answer, drive.recomputed(history))
    again = drive.call(list(continued(history, answer)), session=session, salt=salt)
    assert_adds_up(again.outcome)
    assert_no_leak(drive)


def test_an_engine_that_dies_is_replaced(drive: Driver, ids: tuple[str, str]) -> None:
    """A restarted decode engine costs one error or recompute, and the next call works."""
    session, salt = ids
    messages = conversation()
    first = drive.call(messages, session=session, salt=salt)
    history = list(continued(messages, first))
    drive.stack.restart("decode-0")
    try:
        drive.call(history, session=session, salt=salt)
    except openai.APIError as error:
        assert error.message  # noqa: PT017 - an error is allowed, its shape is checked
    answer = drive.call(history, session=session, salt=salt)
    assert_same(answer, drive.recomputed(history))
    follow = list(continued(history, answer))
    drive.flood()
    last = drive.call(follow, session=session, salt=salt)
    outcome = assert_adds_up(last.outcome)
    assert outcome.reason in (Reason.OK, Reason.BELOW_THRESHOLD), "the new engine is a source again"
    assert outcome.reused > 1000
    assert_same(last, drive.recomputed(follow))


def _next_completion(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    return {**body, "prompt": body["prompt"] + answer["choices"][0]["text"] + words(200)}


def _next_message(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    said = {"role": "assistant", "content": answer["content"]}
    asked = {"role": "user", "content": words(200)}
    return {**body, "messages": [*body["messages"], said, asked]}


def _next_response(body: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    asked = {"role": "user", "content": words(200)}
    return {**body, "input": [*body["input"], *answer["output"], asked]}


def _said(answer: dict[str, Any]) -> str:
    """Return what the model said, in any API."""
    if "choices" in answer:
        return str(answer["choices"][0]["text"])
    return json.dumps([part.get("text") for part in _parts(answer)])


def _parts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    if "content" in answer:
        return list(answer["content"])
    return [part for item in answer["output"] for part in item["content"]]


@pytest.mark.parametrize(
    ("path", "body", "follow"),
    [
        ("completions", {"prompt": None, "max_tokens": 16}, _next_completion),
        ("messages", {"messages": None, "max_tokens": 16}, _next_message),
        # An empty answer of this model, sent back, is an error inside vLLM.
        (
            "responses",
            {"input": None, "max_output_tokens": 16, "store": False, "ignore_eos": True},
            _next_response,
        ),
    ],
)
def test_the_answer_comes_back_in_every_api(
    drive: Driver, ids: tuple[str, str], path: str, body: dict[str, Any], follow: Callable[..., Any]
) -> None:
    """Plain completions, messages and responses return, and say what recomputation says."""
    session, salt = ids
    first = words(3500) if path == "completions" else [{"role": "user", "content": words(3500)}]
    body = {name: first if value is None else value for name, value in body.items()}
    body |= {"model": drive.stack.model, "temperature": 0, "cache_salt": salt}
    answer, outcome = drive.post_call(f"/v1/{path}", body, session=session)
    drive.flood()
    body = follow(body, answer)
    second, again = drive.post_call(f"/v1/{path}", body, session=session)
    assert again.lost == 0
    assert again.returned > outcome.prompt - 2 * BLOCK
    stranger = {**body, "cache_salt": uuid.uuid4().hex}
    recomputed, cold = drive.post_call(f"/v1/{path}", stranger, session=uuid.uuid4().hex)
    assert cold.reused == 0
    assert _said(second) == _said(recomputed)


def test_a_pair_that_is_switched_off_hands_over_as_stock(
    drive: Driver, ids: tuple[str, str]
) -> None:
    """Decode takes the prompt from prefill by the stock logic, and all is back afterwards."""
    session, salt = ids
    messages = conversation(3500)
    drive.set_mode("off")
    try:
        drive.wait_for_pulls(wanted=False)
        before = drive.stats("decode-0").counters
        answer = drive.call(messages, session=session, salt=salt)
        outcome = assert_adds_up(answer.outcome)
        assert outcome.reason is Reason.DISABLED
        after = drive.stats("decode-0").counters
        assert after["stock_handovers"] - before.get("stock_handovers", 0) == 1
        assert after["computed_tokens"] - before["computed_tokens"] <= 1
        assert_same(answer, drive.recomputed(messages))
    finally:
        drive.set_mode("on")
        drive.wait_for_pulls(wanted=True)
    history = list(continued(messages, answer))
    again = drive.call(history, session=session, salt=salt)
    assert_same(again, drive.recomputed(history))
    drive.end_sessions()
    assert_no_leak(drive)


def assert_no_leak(drive: Driver) -> None:
    """Check that every block of both engines is free and nothing is in flight."""
    for name in ("prefill-0", "decode-0"):
        assert drive.settle(name, "calls_in_flight", 0) == 0
        gauges, counters = drive.stats(name).gauges, drive.stats(name).counters
        assert drive.settle(name, "free_blocks", gauges["blocks"] - 1) == gauges["blocks"] - 1
        assert counters["pulls_in_flight"] == 0
        assert counters["abandoned_blocks"] == 0
        assert gauges["broken"] == 0
