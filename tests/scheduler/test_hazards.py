"""The faults that attacks on earlier designs have shown, each within reach, none happening.

Two of the attack programs have no test here: one compares logits (there is no model at this
level; the engine tier compares texts), one measures the cost of a peek.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import RequestStatus

from tests.builders import (
    BLOCK,
    Engine,
    World,
    pair,
    reading,
    tokens,
    world,
)
from tests.scheduler.mutants import MUTANTS
from turncache_server.connector.steps import StepTracker
from turncache_server.control.messages import Peek, PeekReply, Verify
from turncache_server.retention.ledger import Ledger


@pytest.fixture
def held() -> Iterator[World]:
    """Engines whose reads stay on the wire until the test moves them."""
    with world(hold=True) as made:
        yield made


def single(made: World, **kwargs: Any) -> Engine:
    """Make an engine that may be read from."""
    return Engine(made, peers=[], **kwargs)


def peek(engine: Engine, prompt: list[int]) -> PeekReply:
    """Ask what the engine holds of a prompt."""
    return engine.source.peek(Peek(session="s", hashes=engine.hashes(prompt)))


def confirm(engine: Engine, reply: PeekReply, prompt: list[int]) -> int:
    """Ask whether what was named of a prompt is unchanged."""
    answer = engine.source.verify(
        Verify(
            start_id=reply.start_id,
            generation=reply.generation,
            block_ids=reply.block_ids,
            epochs=reply.epochs,
            hashes=engine.hashes(prompt)[: len(reply.block_ids)],
        )
    )
    return answer.valid


def blocks_of(num_tokens: int) -> int:
    """Return how many blocks hold so many tokens, one that is not full included."""
    return -(-num_tokens // BLOCK)


def between(owner: Any, name: str, act: Callable[[], None], *, before: bool = False) -> None:
    """Have something done right after (or before) a method, once per call."""
    method = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        if before:
            act()
        result = method(*args, **kwargs)
        if not before:
            act()
        return result

    setattr(owner, name, run)


# --- hazards 1 and 9: a hash is not written KV -------------------------------------------


@pytest.mark.parametrize("chunk", [128, 16])
def test_hazard1_a_scheduled_chunk_is_not_named(chunk: int, held: World) -> None:
    """Right after the allocation every full block is listed; nothing of it is written."""
    engine = single(held, batched_tokens=chunk)
    engine.add("r", tokens(64), session="s")
    engine.schedule()
    assert engine.listed(tokens(64)) == min(chunk, 64) // BLOCK, "the fault is within reach"
    assert peek(engine, tokens(64)).block_ids == []
    engine.process()
    assert len(peek(engine, tokens(64)).block_ids) == min(chunk, 64) // BLOCK
    engine.run()
    engine.assert_no_leak()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_hazard9_a_block_filled_by_decode_is_not_named_early(
    asynchronous: bool, held: World
) -> None:
    """The hash of the last slot's token appears up to two steps before it is written."""
    engine = single(held, async_scheduling=asynchronous)
    request = engine.add("r", tokens(2 * BLOCK - 2), session="s", max_tokens=4 * BLOCK)
    ahead = 0

    def look() -> None:
        nonlocal ahead
        text = list(request.all_token_ids)
        ahead += engine.listed(text) > len(peek(engine, text).block_ids)
        engine.check_named()

    between(engine.scheduler.connector, "build_connector_meta", look)
    while engine.busy:
        engine.step()
        look()
    assert ahead > 0, "the fault is within reach"
    engine.assert_no_leak()


# --- hazard 1, B to F, and 3: peeks race with admission ----------------------------------


def test_hazard1b_a_peek_takes_nothing_from_an_allocation(held: World) -> None:
    """Between the count of free blocks and the pop a peek may come: the blocks are still there."""
    engine = single(held, num_blocks=24, max_model_len=88)
    engine.call("kept", tokens(40), session="s")
    manager = engine.scheduler.kv_cache_manager
    asked: list[int] = []
    between(
        manager.coordinator,
        "allocate_new_blocks",
        lambda: asked.append(len(peek(engine, tokens(40)).block_ids)),
        before=True,
    )
    engine.call("big", tokens(86, start=5))
    assert max(asked) == 10
    engine.assert_no_leak()


def test_hazard1c_a_block_that_was_just_handed_out_is_not_named(held: World) -> None:
    """It still carries its hash for a moment, and belongs to another request already."""
    engine = single(held, num_blocks=24, max_model_len=88)
    engine.call("kept", tokens(40), session="s")
    reply = peek(engine, tokens(40))
    seen: list[tuple[int, int]] = []

    def look() -> None:
        listed = sum(engine.pool.blocks[i].block_hash is not None for i in reply.block_ids)
        seen.append((listed, len(peek(engine, tokens(40)).block_ids)))

    between(engine.pool.free_block_queue, "popleft_n", look)
    engine.call("big", tokens(86, start=5))
    assert any(listed == 10 and named < 10 for listed, named in seen), "within reach"
    assert confirm(engine, reply, tokens(40)) == 1, "the only block that is left"
    engine.assert_no_leak()


def test_hazard1d_a_block_that_lost_its_hash_is_an_ordinary_one(held: World) -> None:
    """Evicted from the cache while peeked at and retained: it can be had, and is not named."""
    engine = single(held, num_blocks=24, max_model_len=88)
    request = engine.add("r", tokens(40), session="s", max_tokens=8)
    engine.run(lambda: request.num_output_tokens > 2)
    reply = peek(engine, tokens(40))
    assert len(reply.block_ids) == 10
    engine.pool.evict_blocks(set(reply.block_ids))
    assert peek(engine, tokens(40)).block_ids == []
    engine.run()
    engine.call("big", tokens(86, start=5))
    engine.assert_no_leak()


def test_hazard3_a_promotion_arrives_while_blocks_are_freed(held: World) -> None:
    """Counts are lowered before the queue is called: a command may meet a block in no list."""
    engine = single(held, num_blocks=24, max_model_len=88)
    queue = engine.pool.free_block_queue
    for name in ("append_n", "prepend_n", "remove", "popleft_n"):
        between(queue, name, lambda: peek(engine, tokens(40)) and None, before=True)
    for number in range(6):
        engine.call(f"r{number}", tokens(40 + 4 * number), session="s", max_tokens=5)
        engine.call(f"big{number}", tokens(80, start=number))
    assert engine.extension.broken is None
    engine.assert_no_leak()


def test_hazard1f_a_reset_succeeds_after_a_peek(held: World) -> None:
    """A peek holds nothing: the idle engine is reset, and confirms nothing any more."""
    engine = single(held)
    engine.call("kept", tokens(40), session="s")
    reply = peek(engine, tokens(40))
    assert engine.scheduler.reset_prefix_cache()
    assert confirm(engine, reply, tokens(40)) == 0
    engine.assert_no_leak()


@pytest.mark.parametrize("num_blocks", [14, 18, 64], ids=["14", "18", "64"])
def test_hazards10_to_14_real_threads(num_blocks: int, held: World) -> None:
    """A control thread asks as fast as it can while the engine thread fills a small pool."""
    engine = single(held, num_blocks=num_blocks, max_model_len=40)
    prompts = [tokens(34, start=number) for number in range(4)]
    for number, prompt in enumerate(prompts):
        engine.call(f"first-{number}", prompt, session=f"s{number}")
    failures: list[BaseException] = []
    asked = [0]
    stop = threading.Event()

    def control() -> None:
        try:
            while not stop.is_set():
                for prompt in prompts:
                    reply = peek(engine, prompt)
                    asked[0] += 1
                    valid = confirm(engine, reply, prompt)
                    assert valid <= len(reply.block_ids)
        except BaseException as error:  # noqa: BLE001 - reported by the test's own thread
            failures.append(error)

    thread = threading.Thread(target=control)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        for number in range(150):
            which = number % len(prompts)
            engine.call(f"r{number}", prompts[which], session=f"s{which}")
            engine.check_free()
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(before)
    assert failures == []
    assert asked[0] > 20
    assert engine.extension.broken is None
    engine.assert_no_leak()


# --- hazards 2, 5, 4: parked requests and unfenced reads ---------------------------------


def test_hazard2_a_failed_load_is_computed(held: World) -> None:
    """Under the stock branch this request waits for ever."""
    prefill, decode = pair(held)
    request = reading(prefill, decode, blocks=20)
    held.transfers[-1].fail()
    prefill.run(request.is_finished)
    assert prefill.record("r").computed == 82
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_hazard5_a_preemption_after_a_load_is_computed(held: World) -> None:
    """In the middle of a chunked prefill after a pull: under the stock branch, for ever."""
    held.hold = False
    prefill, decode = pair(held, batched_tokens=16)
    decode.call("warm", tokens(40), session="s")
    request = prefill.add("r", tokens(100), session="s", source="decode-0")
    prefill.run(lambda: request.status is RequestStatus.RUNNING)
    assert request.num_computed_tokens < 100
    prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    decode.scheduler.reset_prefix_cache()
    prefill.run(request.is_finished)
    prefill.run()
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_hazard4_the_fence_is_up_where_loads_happen(held: World) -> None:
    """An aborted step still writes; a read into its blocks would be overwritten."""
    prefill, decode = pair(held, async_scheduling=True, num_blocks=40)
    decode.call("warm", tokens(34), session="s")
    prefill.add("victim", tokens(100, start=3))
    flight = prefill.schedule()
    prefill.abort("victim")
    assert prefill.scheduler.defer_block_free
    assert prefill.scheduler.deferred_frees
    free = {b.block_id for b in prefill.pool.free_block_queue.get_all_free_blocks()}
    assert not free & set(flight.writes[0][1])
    prefill.run()
    for engine in (prefill, decode):
        engine.assert_no_leak()


# --- hazards 7 and 8 ---------------------------------------------------------------------


def test_hazard7_a_text_for_transfer_parameters_kills_nobody(held: World) -> None:
    """In stock vLLM with any connector it ends the engine thread."""
    for connector in ("WiredConnector", "ClockedRetention"):
        engine = Engine(held, f"e-{connector}", connector=connector, peers=None)
        engine.call("r", tokens(20), extra_args={"kv_transfer_params": "x"})
        engine.assert_no_leak()


def test_hazard8_what_is_kept_never_makes_a_request_preempt_itself(held: World) -> None:
    """A lone request grows over the whole pool, retained and peeked-at blocks included."""
    engine = single(held, num_blocks=13, max_model_len=48)
    engine.call("kept", tokens(20), session="s")
    assert len(peek(engine, tokens(20)).block_ids) == 5
    assert engine.extension.gauges()["retained_blocks"] == 5
    request = engine.add("r", tokens(24, start=9), max_tokens=22)
    while engine.busy:
        peek(engine, tokens(20))
        engine.step()
    assert request.num_preemptions == 0
    assert request.num_output_tokens == 22
    engine.assert_no_leak()


# --- the second attack -------------------------------------------------------------------


SPECULATIVE = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def test_second_draft_rejected_drafts_switch_the_extension_off() -> None:
    """Drafts rewrite blocks: unsupported, in one line, and the engine runs as stock."""
    with world() as made:
        engine = Engine(made, peers=[], speculative_config=SPECULATIVE)
        assert engine.extension.broken is not None
        assert "rejected drafts rewrite blocks" in engine.extension.broken
        assert engine.extension.source is None


def test_second_draft_epochs_rise_under_rejected_drafts() -> None:
    """Marks by slots alone would be up over a rejected draft: our ledger's are not."""
    with world() as made:
        engine = Engine(made, connector=None, speculative_config=SPECULATIVE)
        scheduler: Scheduler = engine.scheduler
        ledger, tracker = Ledger(engine.num_blocks), StepTracker(BLOCK)
        request = engine.add("r", tokens(4 * BLOCK - 3), max_tokens=30)
        slots: dict[int, int | None] = {}
        plain_marks: set[int] = set()
        within_reach = 0
        while scheduler.has_requests():
            scheduled = scheduler.schedule()
            named_before = [ledger.readable_epoch(i) for i in range(engine.num_blocks)]
            ledger.schedule(tracker.writes(scheduled))
            count = scheduled.num_scheduled_tokens.get("r")
            if count is None:
                scheduler.update_from_output(scheduled, _sampled([]))
                ledger.processed()
                continue
            start = request.num_computed_tokens - count
            known = list(request.all_token_ids)
            table = scheduler.kv_cache_manager.get_block_ids("r")[0]
            for index in range(engine.listed(known)):
                span = range(index * BLOCK, (index + 1) * BLOCK)
                if any(slots.get(at) != known[at] for at in span):
                    within_reach += index in plain_marks
                    # A peek may have come between the hash and the note: its epoch is over.
                    assert ledger.readable_epoch(table[index]) is None
                    assert named_before[table[index]] != ledger.epoch[table[index]]
            for at in range(start, start + count):
                slots[at] = known[at] if at < len(known) else None  # drafts: all wrong
                if at % BLOCK == BLOCK - 1:
                    plain_marks.add(at // BLOCK)
            text = engine.texts["r"]
            scheduler.update_from_output(scheduled, _sampled([text.token_after(len(known))]))
            ledger.processed()
            scheduler.update_draft_token_ids(DraftTokenIds(["r"], [[7, 7, 7]]))
        assert within_reach, "marks without epochs would have named a stale block"


def _sampled(found: list[int]) -> Any:
    from vllm.v1.outputs import ModelRunnerOutput

    ids = ["r"] if found else []
    return ModelRunnerOutput(
        req_ids=ids, req_id_to_index=dict.fromkeys(ids, 0), sampled_token_ids=[found] if ids else []
    )


@pytest.mark.parametrize("local_blocks", [0, 2])
def test_second_hold_an_id_is_held_and_handed_back(local_blocks: int, held: World) -> None:
    """Taken out of the finished set, verified, put back in a later step."""
    prefill, decode = pair(held)
    request = reading(prefill, decode, local_blocks=local_blocks)
    held.transfers[-1].advance()
    prefill.run(lambda: bool(prefill.peers and prefill.peers.questions), answer=False)
    for _ in range(4):
        prefill.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == (8 - local_blocks) * BLOCK + 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_second_hold_an_abort_while_held_leaks_nothing(held: World) -> None:
    """Dropping the entry would leave its blocks used for ever and the engine spinning."""
    prefill, decode = pair(held)
    reading(prefill, decode)
    held.transfers[-1].advance()
    prefill.run(lambda: bool(prefill.peers and prefill.peers.questions), answer=False)
    prefill.abort("r")
    prefill.run(answer=False, limit=5)
    assert not prefill.busy
    assert prefill.scheduler.reset_prefix_cache()
    for engine in (prefill, decode):
        engine.assert_no_leak()


@pytest.mark.parametrize("mutant", [None, "flag-before-epoch"])
def test_second_torn_a_peek_that_is_overtaken_confirms_nothing(
    mutant: str | None, held: World
) -> None:
    """The block is handed out and hashed anew, for the same tokens, in the middle of the peek.

    With the order of reads turned round, the very same events confirm what nobody has written.
    """
    engine = single(held, num_blocks=12, max_model_len=44)
    if mutant is not None:
        MUTANTS[mutant](engine)
    engine.call("first", tokens(34), session="s", retain_s=0.0)
    ledger = engine.extension.ledger
    reads: list[int] = []

    class Overtaken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            found = super().__getitem__(index)
            if threading.current_thread() is asker and not reads:
                reads.append(index)
                overtake()
            return found

    def overtake() -> None:
        # Until the very block that is being looked at is the next to go, to the same prompt.
        for number in range(200):
            engine.call(f"other-{number}", tokens(number % 40 + 1, start=5000 + number))
            first = engine.pool.free_block_queue.get_all_free_blocks()[0]
            if first.block_id == reads[0] and not engine.hit(tokens(34)):
                break
        engine.add("again", tokens(34), session="s")
        engine.schedule()

    asker = threading.Thread()
    ledger.written = Overtaken(ledger.written)
    asker = threading.current_thread()
    reply = peek(engine, tokens(34))
    asker = threading.Thread()
    assert reads, "the peek was overtaken"
    content = [engine.memories[0].slots[i] for i in reply.block_ids]
    valid = confirm(engine, reply, tokens(34))
    promised = [list(engine.promises[h]) for h in list(engine.promises)[: len(content)]]
    assert all(found in promised for found in content[:valid]) == (mutant is None)
    engine.run()
    engine.assert_no_leak()


def test_second_mailbox_a_command_for_a_block_in_no_list(held: World) -> None:
    """A promotion for blocks of a running request is drained while that request is freed."""
    engine = single(held)
    request = engine.add("r", tokens(40), session="s", max_tokens=8)
    engine.run(lambda: request.num_output_tokens > 2)
    for _ in range(20):
        assert len(peek(engine, tokens(40)).block_ids) == 10
    engine.run()
    assert engine.extension.broken is None
    assert engine.extension.gauges()["retained_blocks"] == blocks_of(40 + 8 - 1)
    engine.assert_no_leak()
