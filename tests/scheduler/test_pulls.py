"""Pulls between two engines: what comes back, what does not, and that nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.builders import (
    BLOCK,
    Conversation,
    Engine,
    World,
    pair,
    reading,
    tokens,
    world,
)
from turncache.protocol import Reason
from turncache_server.retention.mailbox import SwitchMode

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])


@pytest.fixture
def made() -> Iterator[World]:
    """Engines whose reads are complete as soon as they start."""
    with world() as made:
        yield made


@pytest.fixture
def held() -> Iterator[World]:
    """Engines whose reads stay on the wire until the test moves them."""
    with world(hold=True) as made:
        yield made


def finish(*engines: Engine) -> None:
    """Check that nothing is left anywhere."""
    for engine in engines:
        engine.assert_no_leak()


def verify_pending(engine: Engine) -> bool:
    """Whether a read has ended and its verification waits for an answer."""
    return engine.peers is not None and bool(engine.peers.questions)


# --- the way of a conversation -----------------------------------------------------------


@MODES
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_conversation_goes_back_and_forth(
    asynchronous: bool, num_ranks: int, made: World
) -> None:
    """Prefill takes the answer's KV from decode, decode the prompt's from prefill: nothing but
    the new tokens is computed, in every call. An answer's last token is new: it has no KV.
    """
    prefill, decode = pair(made, async_scheduling=asynchronous, num_ranks=num_ranks)
    chat = Conversation("s")
    previous = 0
    for turn in range(5):
        prompt = chat.more(30)
        prefill.call(
            f"p{turn}", prompt, session="s", source="decode-0", retain_s=0.0, handover=True
        )
        record = prefill.record(f"p{turn}")
        assert record.lost == 0
        assert record.computed == len(prompt) - max(previous - 1, 0)
        chat.history = decode.call(
            f"d{turn}", prompt, session="s", source="prefill-0", max_tokens=11
        )
        record = decode.record(f"d{turn}")
        assert record.lost == 0
        assert record.computed == 1
        previous = len(chat.history)
        prefill.flood(2 * prefill.num_blocks)
    finish(prefill, decode)


def test_an_edited_history_returns_the_common_prefix(made: World) -> None:
    """The hash chain covers every token: behind the edit nothing is taken."""
    prefill, decode = pair(made)
    decode.call("d", tokens(60), session="s")
    edited = tokens(60)
    edited[30] = 3
    prefill.call("p", edited, session="s", source="decode-0")
    assert prefill.record("p").returned == 30 // BLOCK * BLOCK
    finish(prefill, decode)


def test_a_forked_session_returns_what_it_shares(made: World) -> None:
    """Two children of one conversation take the same prefix, each once."""
    prefill, decode = pair(made)
    history = decode.call("d", tokens(40), session="root", max_tokens=9)
    for child in ("a", "b"):
        prefill.scheduler.reset_prefix_cache()
        own = [*history, *tokens(20, start=ord(child))]
        prefill.call(child, own, session=child, parent="root", source="decode-0")
        assert prefill.record(child).returned == 48
    finish(prefill, decode)


def test_a_retried_call_returns_as_the_first(made: World) -> None:
    """Nothing is used up at the source: any number of readers get the same."""
    prefill, decode = pair(made)
    decode.call("d", tokens(42), session="s")
    for attempt in range(3):
        prefill.scheduler.reset_prefix_cache()
        prefill.call(f"p{attempt}", tokens(42), session="s", source="decode-0")
        assert prefill.record(f"p{attempt}").returned == 42 - 1
    finish(prefill, decode)


def test_a_guessed_session_gets_nothing(made: World) -> None:
    """The session names nothing: without the tokens there is no hash."""
    prefill, decode = pair(made)
    decode.call("d", tokens(42), session="secret")
    prefill.call("p", tokens(42, start=9), session="secret", source="decode-0")
    assert prefill.record("p").returned == 0
    finish(prefill, decode)


def test_of_several_sources_the_one_that_has_most_is_pulled_from(made: World) -> None:
    """A router that does not know for sure names more than one; strangers among them are left out.

    A prompt that none of them has is as one that the first has not.
    """
    prefill = Engine(made, "prefill-0", peers=["decode-0", "decode-1"])
    for name in ("decode-0", "decode-1"):
        decode = Engine(made, name, peers=["prefill-0"])
    talk = Conversation("s")
    talk.call(decode, 60, max_tokens=8)
    also = ("stranger", "decode-1")
    record = prefill.record(talk.call(prefill, 10, source="decode-0", also=also))
    assert record.returned == 60 + 8 - 1
    assert record.lost == 0
    prefill.call("x", tokens(70, start=9), session="x", source="decode-0", also=also)
    assert prefill.record("x").returned == 0
    prefill.call("y", tokens(70, start=99), session="y", source="a", also=("b",))
    assert prefill.record("y").reason is Reason.SOURCE_UNKNOWN
    finish(prefill, decode)


def test_an_unknown_source_is_a_reason(made: World) -> None:
    """A source is resolved in the allow-list, never an address."""
    prefill, decode = pair(made)
    prefill.call("p", tokens(42), session="s", source="tcp://127.0.0.1:1")
    assert prefill.record("p").reason is Reason.SOURCE_UNKNOWN
    finish(prefill, decode)


@pytest.mark.parametrize("length", [39, 40, 41, 43, 44])
def test_the_last_token_is_always_computed(length: int, made: World) -> None:
    """Its sampling needs a token, whether or not the prompt fills its last block."""
    prefill, decode = pair(made)
    decode.call("d", tokens(length), session="s")
    prefill.call("p", tokens(length), session="s", source="decode-0")
    record = prefill.record("p")
    assert (record.returned, record.computed) == (length - 1, 1)
    finish(prefill, decode)


@pytest.mark.parametrize("length", [39, 40, 41, 43, 44])
def test_a_block_that_an_answer_has_filled_is_not_taken_for_its_prompt(
    length: int, made: World
) -> None:
    """Its hash covers the answer: without these tokens only the blocks before it are named."""
    prefill, decode = pair(made)
    decode.call("d", tokens(length), session="s", max_tokens=BLOCK + 1)
    prefill.call("p", tokens(length), session="s", source="decode-0")
    whole = length // BLOCK * BLOCK
    assert prefill.record("p").returned == min(whole, length - 1)
    finish(prefill, decode)


def test_blocks_of_a_running_request_come_back_as_far_as_written(made: World) -> None:
    """A second call of a session that is still being answered takes what is complete."""
    prefill, decode = pair(made)
    running = decode.add("d", tokens(60), session="s", max_tokens=30)
    decode.run(lambda: running.num_output_tokens > 5)
    prefill.call("p", list(running.all_token_ids), session="s", source="decode-0")
    assert prefill.record("p").returned >= 60 // BLOCK * BLOCK
    decode.run()
    finish(prefill, decode)


# --- failure -----------------------------------------------------------------------------


@MODES
@pytest.mark.parametrize(("local_blocks", "lost_from"), [(0, 1), (0, 4), (0, 7), (3, 4), (3, 7)])
def test_a_confirmed_prefix_is_kept_and_the_rest_computed(
    local_blocks: int, lost_from: int, asynchronous: bool, held: World
) -> None:
    """The usual loss is a tail: what is before it counts, with and without a local hit."""
    prefill, decode = pair(held, async_scheduling=asynchronous)
    request = reading(prefill, decode, local_blocks=local_blocks, max_tokens=6)
    _lose_at_source(decode, lost_from)
    held.transfers[-1].advance()
    prefill.run(request.is_finished)
    record = prefill.record("r")
    assert record.local == local_blocks * BLOCK
    assert record.returned == (lost_from - local_blocks) * BLOCK
    assert record.reason is Reason.EVICTED
    prefill.run()
    finish(prefill, decode)


@MODES
@pytest.mark.parametrize("local_blocks", [0, 3])
def test_an_unconfirmed_read_is_computed_in_full(
    local_blocks: int, asynchronous: bool, held: World
) -> None:
    """Nothing is confirmed: the call computes everything beyond its local hit."""
    prefill, decode = pair(held, async_scheduling=asynchronous)
    request = reading(prefill, decode, local_blocks=local_blocks, max_tokens=6)
    _lose_at_source(decode, local_blocks)
    held.transfers[-1].advance()
    held.hold = False
    prefill.run(request.is_finished)
    record = prefill.record("r")
    assert (record.local, record.returned) == (local_blocks * BLOCK, 0)
    prefill.run()
    finish(prefill, decode)


def _lose_at_source(engine: Engine, index: int) -> None:
    """Have the source forget a block of the prompt's chain, and everything behind it."""
    blocks = engine.cached(tokens(8 * BLOCK + 2))
    engine.pool.evict_blocks({block.block_id for block in blocks[index:]})


@MODES
def test_a_block_that_is_handed_out_while_it_is_read(asynchronous: bool, held: World) -> None:
    """What was copied before is right, what was copied after is not: only the former is used."""
    prefill, decode = pair(held, num_blocks=24, max_model_len=88, async_scheduling=asynchronous)
    request = reading(prefill, decode, blocks=8)
    transfer = held.transfers[-1]
    transfer.advance(len(transfer.pieces) // 2)
    decode.call("big", tokens(86, start=5))
    transfer.advance()
    held.hold = False
    prefill.run(request.is_finished)
    assert prefill.record("r").returned < 8 * BLOCK
    prefill.run()
    finish(prefill, decode)


@MODES
def test_a_reset_at_the_source_between_peek_and_verify(asynchronous: bool, held: World) -> None:
    """After the reset the source refuses the old generation, though the bytes were right."""
    prefill, decode = pair(held, async_scheduling=asynchronous)
    request = reading(prefill, decode)
    held.transfers[-1].advance()
    assert decode.scheduler.reset_prefix_cache()
    held.hold = False
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == 0
    prefill.run()
    finish(prefill, decode)


@pytest.mark.parametrize("when", ["peeking", "reading", "verifying", "failing"])
@MODES
def test_an_abort_frees_everything_and_the_engine_goes_idle(
    asynchronous: bool, when: str, held: World
) -> None:
    """At every stage of a pull a client may leave: no block stays, and no step is taken for it."""
    prefill, decode = pair(held, async_scheduling=asynchronous)
    if when == "peeking":
        decode.call("warm", tokens(34), session="s")
        prefill.add("r", tokens(34), session="s", source="decode-0")
        prefill.step()
    else:
        reading(prefill, decode)
    if when in ("verifying", "failing"):
        held.transfers[-1].advance()
        prefill.run(lambda: verify_pending(prefill), answer=False)
    if when == "failing":
        decode.scheduler.reset_prefix_cache()
        assert prefill.peers is not None
        prefill.peers.deliver(prefill.peers.questions[0])
        prefill.step()
    prefill.abort("r")
    for _ in range(4):
        prefill.step()
    if when == "reading":
        assert prefill.busy, "its blocks may still be written"
        held.transfers[-1].advance()
    prefill.run(answer=when != "verifying")
    assert not prefill.busy
    if prefill.peers is not None:
        for question in list(prefill.peers.questions):
            prefill.peers.deliver(question)
    finish(prefill, decode)


def test_a_preempted_request_pulls_once_more_then_computes(held: World) -> None:
    """Twice preempted, the third time it computes: nothing is parked."""
    held.hold = False
    prefill, decode = pair(held, batched_tokens=16)
    prompt = tokens(82)
    decode.call("warm", prompt, session="s")
    request = prefill.add("r", prompt, session="s", source="decode-0", max_tokens=4)
    for pulls in (1, 2):
        prefill.run(lambda: request.status is RequestStatus.RUNNING)
        assert len(held.transfers) == pulls
        prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert request.status is RequestStatus.PREEMPTED
    prefill.run(request.is_finished)
    assert len(held.transfers) == 2
    record = prefill.record("r")
    assert record.local + record.returned + record.computed == record.prompt
    prefill.run()
    finish(prefill, decode)


@MODES
def test_a_mode_that_is_switched_while_blocks_are_allocated(
    asynchronous: bool, held: World
) -> None:
    """The mailbox is drained inside of the allocation for our own offer: the call computes."""
    prefill, decode = pair(held, async_scheduling=asynchronous)
    decode.call("warm", tokens(34), session="s")
    request = prefill.add("r", tokens(34), session="s", source="decode-0")
    manager = prefill.scheduler.kv_cache_manager
    allocate = manager.allocate_slots
    seen: list[int] = []

    def switched_inside(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("num_external_computed_tokens"):
            seen.append(kwargs["num_external_computed_tokens"])
            prefill.extension.mailbox.post(SwitchMode("off"))
        return allocate(*args, **kwargs)

    manager.allocate_slots = switched_inside
    prefill.run(request.is_finished)
    assert seen == [34 - 1]
    assert held.transfers == []
    assert prefill.record("r").returned == 0
    prefill.run()
    finish(prefill, decode)


@MODES
def test_a_mode_that_is_switched_while_a_read_is_under_way(asynchronous: bool, held: World) -> None:
    """What is being read runs to its end, verified as ever; the next call computes."""
    prefill, decode = pair(held, async_scheduling=asynchronous)
    request = reading(prefill, decode)
    prefill.extension.mailbox.post(SwitchMode("off"))
    prefill.step()
    held.transfers[-1].advance()
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == 34 - 1
    prefill.scheduler.reset_prefix_cache()
    prefill.call("next", tokens(34), session="s", source="decode-0")
    assert len(held.transfers) == 1
    finish(prefill, decode)


def test_a_hook_that_fails_in_the_middle_of_a_pull(held: World) -> None:
    """The extension is off for good; the read that was under way is computed instead."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    held.transfers[-1].advance()
    completed = prefill.pulls.completed
    calls: list[int] = []

    def fails_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise LookupError("made to fail")
        return completed(*args)

    prefill.pulls.completed = fails_once
    prefill.run(request.is_finished)
    assert prefill.extension.broken is not None
    assert "update_connector_output failed" in prefill.extension.broken
    prefill.call("next", tokens(50), session="s", source="decode-0")
    prefill.run()
    assert prefill.pool.get_num_free_blocks() == prefill.num_blocks - 1
    assert len(prefill.pulls) == 0


@pytest.mark.parametrize("order", ["together", "one-by-one"])
def test_two_ranks_abandon_and_are_gone(order: str, held: World) -> None:
    """Each rank has transfers of its own; the blocks are free when the last one is gone."""
    prefill, decode = pair(held, num_ranks=2)
    request = reading(prefill, decode)
    assert len(held.transfers) == 2
    held.now_s += 60
    prefill.run(request.is_finished)
    first, second = held.transfers
    first.stop_writing()
    if order == "together":
        second.stop_writing()
    prefill.call("later", tokens(10, start=99))
    if order == "one-by-one":
        assert not prefill.scheduler.reset_prefix_cache()
        second.stop_writing()
        prefill.call("last", tokens(10, start=98))
    finish(prefill, decode)


def test_two_abandoned_reads_of_one_request(held: World) -> None:
    """Each keeps its own blocks until its own transfer is gone, in whatever order."""
    prefill, decode = pair(held, num_blocks=200)
    request = reading(prefill, decode)
    held.now_s += 60
    prefill.run(lambda: prefill.pulls.get("r") is not None and not held.transfers[0].released)
    for _ in range(4):
        prefill.step()
    held.now_s += 3
    if len(held.transfers) == 1 and not request.is_finished():
        prefill.run(lambda: len(held.transfers) == 2 or request.is_finished())
    held.now_s += 60
    prefill.run(request.is_finished)
    for transfer in reversed(held.transfers):
        blocks = {piece[1] for piece in transfer.pieces}
        transfer.advance()
        prefill.call(f"later-{len(blocks)}-{id(transfer)}", tokens(10, start=99))
    finish(prefill, decode)


def test_pulled_blocks_are_passed_on_after_one_further_step(held: World) -> None:
    """A third engine may read what the second has pulled, once it is marked there."""
    held.hold = False
    prefill, decode = pair(held)
    third = Engine(held, "decode-1", peers=["prefill-0"])
    decode.call("d", tokens(34), session="s")
    prefill.call("p", tokens(34), session="s", source="decode-0")
    third.call("t", tokens(34), session="s", source="prefill-0")
    assert prefill.record("p").returned == third.record("t").returned == 34 - 1
    finish(prefill, decode, third)


# --- siblings ----------------------------------------------------------------------------


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("connector", ["WiredConnector", "ClockedRetention"])
def test_a_siblings_load_works_beside_ours(connector: str, synchronous: bool, held: World) -> None:
    """Its finished ids are not ours: they are neither held nor failed, and its blocks unmarked."""
    peers = [] if connector == "WiredConnector" else None
    engine = Engine(held, connector=connector, peers=peers, sibling=True)
    engine.sibling.armed["r"] = (32, synchronous, True)
    engine.call("r", tokens(42), session="s", max_tokens=5)
    if connector == "ClockedRetention":
        assert engine.check_named() == 0, "it is nobody's source"
    elif synchronous:
        assert not engine.extension.ledger.in_order, "no source beside such a sibling"
    assert engine.extension.broken is None
    finish(engine)


@pytest.mark.parametrize("synchronous", [False, True])
def test_a_siblings_failed_load_marks_nothing(synchronous: bool, held: World) -> None:
    """What was computed on blocks that never came is computed again, and never named before."""
    engine = Engine(held, peers=[], sibling=True)
    engine.sibling.armed["r"] = (32, synchronous, False)
    request = engine.add("r", tokens(42), session="s", max_tokens=5)
    while engine.busy:
        engine.step()
        engine.check_named()
    assert request.is_finished()
    finish(engine)


def test_a_sibling_sees_its_own_parameters() -> None:
    """Beside ``RetentionConnector`` a dict goes through; what kills vLLM does not."""
    with world() as made:
        engine = Engine(made, connector="ClockedRetention", sibling=True)
        engine.call("a", tokens(9), extra_args={"kv_transfer_params": {"mine": 1}})
        engine.call("b", tokens(9), extra_args={"kv_transfer_params": "text"})
        assert engine.sibling.seen_params == [{"mine": 1}, None]
        finish(engine)


def test_a_sibling_that_is_asked_first_wins_the_request(held: World) -> None:
    """We offered, another loads: the request is not ours, and its id passes."""
    prefill, decode = pair(held, sibling=True)
    decode.call("warm", tokens(34), session="s")
    multi = prefill.scheduler.connector
    multi._connectors.reverse()
    prefill.sibling.armed["r"] = (16, False, True)
    request = prefill.add("r", tokens(34), session="s", source="decode-0")
    prefill.run(request.is_finished)
    assert held.transfers == []
    prefill.run()
    finish(prefill, decode)
