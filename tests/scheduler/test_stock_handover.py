"""Where nothing is pulled, a pair hands prompts over as vLLM's own NIXL connector does."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import BLOCK, Engine, World, pair, tokens, world
from turncache.protocol import Mode
from turncache_server.retention.mailbox import SwitchMode

PROMPT = tokens(6 * BLOCK + 2)
#: What a proxy asks a prefill engine for.
HOLD = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture
def made() -> Iterator[World]:
    """Engines on a wire."""
    with world() as made:
        yield made


def switch(engine: Engine, mode: Mode) -> None:
    """Switch an engine as its control socket does."""
    engine.extension.mailbox.post(SwitchMode(mode.value))
    stranger = engine.add(f"switch-{mode}-{engine.steps}", tokens(3, start=9))
    engine.run(stranger.is_finished)
    assert engine.extension.mode is mode


def leg(engine: Engine, request_id: str, params: dict[str, Any], **kwargs: Any) -> Any:
    """Add one leg of a call that our router has handed over as stock."""
    return engine.add(
        request_id,
        PROMPT,
        session="s",
        stock=True,
        extra_args={"kv_transfer_params": dict(params)},
        **kwargs,
    )


def hand_over(prefill: Engine, decode: Engine, call: str = "r") -> Any:
    """Run both legs of a call, and return decode's record."""
    first = leg(prefill, f"{call}-p", HOLD)
    prefill.run(first.is_finished)
    held = prefill.said[f"{call}-p"]
    assert held["remote_block_ids"]
    second = leg(decode, f"{call}-d", held, max_tokens=4)
    decode.run(second.is_finished)
    return decode.record(f"{call}-d")


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_pair_that_is_switched_off_hands_over_as_stock(
    made: World, mode: Mode, asynchronous: bool
) -> None:
    """Decode computes one token of the prompt and not the whole, and prefill lets go."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    for engine in (prefill, decode):
        switch(engine, mode)
    record = hand_over(prefill, decode)
    # Stock brings the last block too, written or not, all but the token that is sampled from.
    assert record.returned == len(PROMPT) - 1
    assert record.computed == 1
    for engine in (prefill, decode):
        engine.run()
        engine.assert_no_leak()


def test_an_extension_that_has_switched_itself_off_leaves_a_pair_working(made: World) -> None:
    """The engine runs as stock: what our log says is true of a pair as well."""
    prefill, decode = pair(made)
    for engine in (prefill, decode):
        engine.extension.break_off("a surprise")
    first = leg(prefill, "p", HOLD)
    prefill.run(first.is_finished)
    second = leg(decode, "d", prefill.said["p"], max_tokens=4)
    before = len(made.transfers)
    decode.run(second.is_finished)
    assert len(made.transfers) > before
    prefill.run()
    decode.run()
    assert prefill.pool.get_num_free_blocks() == prefill.num_blocks - 1
    assert decode.pool.get_num_free_blocks() == decode.num_blocks - 1


def test_what_is_in_the_own_cache_is_not_read_and_prefill_lets_go(made: World) -> None:
    """A retry on the same engine: only a notice goes out."""
    prefill, decode = pair(made)
    for engine in (prefill, decode):
        switch(engine, Mode.OFF)
    whole = tokens(6 * BLOCK)
    decode.call("before", [*whole, 7])
    first = prefill.add(
        "p", whole, session="s", stock=True, extra_args={"kv_transfer_params": dict(HOLD)}
    )
    prefill.run(first.is_finished)
    assert prefill.pool.get_num_free_blocks() < prefill.num_blocks - 1, "held for decode"
    held = prefill.said["p"]
    second = decode.add(
        "d", whole, session="s", stock=True, extra_args={"kv_transfer_params": dict(held)}
    )
    decode.run(second.is_finished)
    for engine in (prefill, decode):
        engine.run()
        engine.assert_no_leak()


def test_a_switch_between_the_legs_costs_nothing(made: World) -> None:
    """What was asked for as stock ends as stock."""
    prefill, decode = pair(made)
    for engine in (prefill, decode):
        switch(engine, Mode.OFF)
    first = leg(prefill, "p", HOLD)
    prefill.run(first.is_finished)
    for engine in (prefill, decode):
        switch(engine, Mode.ON)
    second = leg(decode, "d", prefill.said["p"], max_tokens=4)
    decode.run(second.is_finished)
    assert decode.record("d").computed == 1
    for engine in (prefill, decode):
        engine.run()
        engine.assert_no_leak()


def next_call(prefill: Engine, decode: Engine, call: str, history: list[int]) -> list[int]:
    """Run both legs of a call as our router does while the engines are on."""
    prompt = [*history, *tokens(BLOCK, start=len(history))]
    prefill.call(f"{call}-p", prompt, session="s", source="decode-0", handover=True, retain_s=0.0)
    return decode.call(f"{call}-d", prompt, session="s", source="prefill-0", max_tokens=BLOCK)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("late", [False, True], ids=["switched after", "router notices late"])
def test_a_session_that_was_handed_over_as_stock_is_returned_again(
    made: World, asynchronous: bool, late: bool
) -> None:
    """What nobody has confirmed leaves decode's cache: one call later all is as ever."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    if not late:
        for engine in (prefill, decode):
            switch(engine, Mode.OFF)
    hand_over(prefill, decode)
    if not late:
        for engine in (prefill, decode):
            switch(engine, Mode.ON)
    history = next_call(prefill, decode, "second", PROMPT)
    assert decode.record("second-d").returned > 6 * BLOCK, "pulled, and with that confirmed"
    next_call(prefill, decode, "third", history)
    record = prefill.record("third-p")
    # Of the second call prefill has computed the prompt, and decode the answer.
    answered = len(history) - 1  # without the last token, which has no KV
    assert (record.local + record.returned, record.lost) == (answered, 0)
    assert record.returned >= BLOCK
    for engine in (prefill, decode):
        engine.run()
        engine.assert_no_leak()
        assert engine.extension.broken is None


def test_what_has_left_the_cache_is_kept_for_nobody(made: World) -> None:
    """In mode observe a session wants it too; switched on, nobody could find what was kept."""
    prefill, decode = pair(made)
    for engine in (prefill, decode):
        switch(engine, Mode.OBSERVE)
    hand_over(prefill, decode)
    own = decode.call("own", tokens(3 * BLOCK + 2, start=400), session="t")
    queue = decode.pool.free_block_queue
    switch(decode, Mode.ON)
    assert decode.hit(PROMPT) == 0
    kept = [b.block_id for b in decode.pool.blocks if queue.is_retained(b.block_id)]
    assert kept == [b.block_id for b in decode.cached(own)]
    assert decode.extension.gauges()["retained_blocks"] == len(kept) == 3
    assert decode.extension.table.stats().wanted_blocks == 3
    # It goes first, as whatever nobody will find.
    free = [b.block_hash for b in queue.get_all_free_blocks()]
    assert all(each is None for each in free[: decode.num_blocks - 1 - len(kept) - 1])
    decode.run()
    decode.assert_no_leak()


def test_an_order_that_a_step_obeys_at_its_end_is_obeyed_whole(made: World) -> None:
    """Nothing unproven is left in the cache until the next step: an idle engine has none."""
    prefill, decode = pair(made)
    for engine in (prefill, decode):
        switch(engine, Mode.OFF)
    hand_over(prefill, decode)
    other = decode.add("other", tokens(3, start=9))
    decode.schedule()
    decode.extension.mailbox.post(SwitchMode("on"))
    decode.process()
    assert other.is_finished()
    assert decode.extension.mode is Mode.ON
    assert decode.hit(PROMPT) == 0
    decode.run()
    decode.assert_no_leak()


def test_what_was_computed_on_a_stock_hand_over_is_given_to_nobody(made: World) -> None:
    """Neither its blocks nor those of a call that has joined it in the cache are ever named."""
    prefill, decode = pair(made)
    first = leg(prefill, "p", HOLD)
    prefill.run(first.is_finished)
    second = leg(decode, "d", prefill.said["p"], max_tokens=3 * BLOCK)
    decode.run(lambda: second.num_output_tokens > BLOCK)
    joined = decode.call("joined", [*PROMPT[: 6 * BLOCK], *tokens(2 * BLOCK, start=5)], session="t")
    assert decode.record("joined").local == 6 * BLOCK
    decode.run(second.is_finished)
    ledger = decode.extension.ledger
    for text in (list(second.all_token_ids), joined):
        assert decode.hit(text) == 0
    assert all(
        ledger.readable_epoch(block.block_id) is None
        for block in decode.pool.blocks
        if block.block_hash is not None
    )
    decode.run()
    decode.assert_no_leak()


def test_what_joins_while_it_pulls_is_given_to_nobody_either() -> None:
    """Its local blocks are as unproven when the call that brought them ends before its read."""
    with world(hold=True) as made:
        prefill, decode = pair(made)
        first = leg(prefill, "p", HOLD)
        prefill.run(first.is_finished)
        brought = leg(decode, "d", prefill.said["p"], max_tokens=2 * BLOCK)
        while not made.transfers:
            decode.step()
        made.transfers[-1].advance()
        decode.run(lambda: brought.num_output_tokens > 2)
        longer = [*PROMPT[: 6 * BLOCK], *tokens(4 * BLOCK + 2, start=5)]
        prefill.call("long", longer, session="t")
        joined = decode.add("joined", longer, session="t", source="prefill-0", max_tokens=BLOCK)
        decode.run(lambda: len(made.transfers) == 2)
        decode.run(brought.is_finished)
        made.transfers[-1].advance()
        decode.run(joined.is_finished)
        marked = decode.extension.ledger.readable_epoch
        named = [b for b in decode.pool.blocks if b.block_hash and marked(b.block_id) is not None]
        assert named == []
        decode.run()
        decode.assert_no_leak()


def test_a_switch_while_a_joining_call_gets_its_blocks_hides_nothing(made: World) -> None:
    """The mailbox is drained inside of the allocation: what it finds is as unproven as before."""
    prefill, decode = pair(made)
    for engine in (prefill, decode):
        switch(engine, Mode.OFF)
    hand_over(prefill, decode)
    joined = decode.add("joined", [*PROMPT[: 6 * BLOCK], *tokens(2 * BLOCK, start=5)], session="t")
    manager = decode.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def switched_inside(request: Any, *args: Any, **kwargs: Any) -> Any:
        if request is joined and decode.extension.mode is Mode.OFF:
            decode.extension.mailbox.post(SwitchMode("on"))
        return allocate(request, *args, **kwargs)

    manager.allocate_slots = switched_inside
    decode.run(joined.is_finished)
    assert decode.extension.mode is Mode.ON
    ledger = decode.extension.ledger
    own = [b for b in decode.pool.blocks if ledger.readable_epoch(b.block_id) is not None]
    assert [block for block in own if block.block_hash is not None] == []
    decode.run()
    decode.assert_no_leak()


def test_a_client_that_leaves_during_the_read_leaks_nothing() -> None:
    """The blocks stay until the transfer is gone, on both sides."""
    with world(hold=True) as made:
        prefill, decode = pair(made)
        for engine in (prefill, decode):
            switch(engine, Mode.OFF)
        first = leg(prefill, "p", HOLD)
        prefill.run(first.is_finished)
        leg(decode, "d", prefill.said["p"], max_tokens=4)
        decode.run(lambda: bool(made.transfers))
        decode.abort("d")
        decode.step()
        made.transfers[-1].advance()
        for engine in (decode, prefill):
            engine.run()
            engine.assert_no_leak()


def test_a_stock_hand_over_that_fails_is_no_failed_pull() -> None:
    """VLLM reports both in one set; the prompt is computed."""
    with world(hold=True) as made:
        prefill, decode = pair(made)
        for engine in (prefill, decode):
            switch(engine, Mode.OFF)
        first = leg(prefill, "p", HOLD)
        prefill.run(first.is_finished)
        second = leg(decode, "d", prefill.said["p"], max_tokens=4)
        while not made.transfers:
            decode.step()
        made.transfers[-1].fail()
        decode.run(second.is_finished)
        assert decode.connector.connector_scheduler.stats()["pulls_failed"] == 0


def test_the_notice_of_a_pull_is_no_late_reader(
    made: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was held for it, so vLLM must not report that it came too late."""
    caplog.set_level(logging.ERROR, logger="vllm")
    prefill, decode = pair(made)
    prefill.call("p", PROMPT, session="s", handover=True)
    decode.call("d", PROMPT, session="s", source="prefill-0", max_tokens=4)
    assert decode.record("d").returned == len(PROMPT) - 1
    prefill.call("next", tokens(5, start=77))
    assert [r for r in caplog.records if "unrecognized request" in r.getMessage()] == []


@pytest.mark.parametrize(
    ("trusted", "stock"), [(False, True), (True, False)], ids=["no router in front", "not asked"]
)
def test_only_our_router_can_ask_for_it(made: World, trusted: bool, stock: bool) -> None:
    """Parameters that a client sends steer nothing, whatever it says of them."""
    engine = Engine(made, peers=[], settings={"trust_hints": trusted})
    engine.add(
        "r",
        PROMPT,
        session="s",
        stock=stock,
        extra_args={"kv_transfer_params": dict(HOLD)},
    )
    engine.run()
    assert engine.said == {}
    engine.assert_no_leak()
