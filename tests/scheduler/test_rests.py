"""What a call leaves in a block that it does not fill: kept, named, pulled, and never wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.builders import BLOCK, Conversation, Engine, World, pair, reading, tokens, world
from turncache_server.control.messages import Peek, PeekReply

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
#: A prompt with two tokens behind its full blocks.
PROMPT = tokens(10 * BLOCK + 2)


@pytest.fixture
def made() -> Iterator[World]:
    """Engines whose reads are complete as soon as they start."""
    with world() as made:
        yield made


def peek(engine: Engine, text: list[int]) -> PeekReply:
    """Ask an engine what it has of a text."""
    reply = engine.ask(Peek(session="s", hashes=engine.hashes(text)))
    assert isinstance(reply, PeekReply)
    return reply


@MODES
@pytest.mark.parametrize("length", range(8 * BLOCK, 9 * BLOCK + 1))
def test_decode_computes_one_token_of_a_prompt(
    length: int, asynchronous: bool, made: World
) -> None:
    """However many tokens are behind the last full block."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    prefill.call("p", tokens(length), session="s", handover=True, retain_s=0.0)
    decode.call("d", tokens(length), session="s", source="prefill-0", max_tokens=9)
    record = decode.record("d")
    assert (record.returned, record.computed, record.lost) == (length - 1, 1, 0)
    for engine in (prefill, decode):
        engine.assert_no_leak()


@MODES
@pytest.mark.parametrize("answer", range(1, 2 * BLOCK))
def test_prefill_computes_what_is_new_and_one_token_of_the_answer(
    answer: int, asynchronous: bool, made: World
) -> None:
    """The answer's last token has no KV on decode either; all before it comes back."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    talk = Conversation("s")
    talk.call(decode, 30, max_tokens=answer)
    record = prefill.record(talk.call(prefill, 11, source="decode-0"))
    assert (record.returned, record.computed) == (30 + answer - 1, 11 + 1)
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_an_answer_that_stops_itself_leaves_what_it_has_computed(made: World) -> None:
    """The step that was scheduled before the stop was seen writes behind it."""
    prefill, decode = pair(made, async_scheduling=True)
    history = decode.call("d", PROMPT, session="s", max_tokens=64, stop_after=4)
    assert len(history) == len(PROMPT) + 4
    prefill.call("p", [*history, *tokens(9, start=5)], session="s", source="decode-0")
    assert prefill.record("p").returned == len(history) - 1


def test_what_is_kept_of_a_session_has_its_rest(made: World) -> None:
    """A flood goes by other blocks; when the session's time is over the rest goes first."""
    prefill, decode = pair(made)
    history = decode.call("d", PROMPT, session="s", max_tokens=4)
    assert decode.extension.gauges()["retained_blocks"] == len(history) // BLOCK + 1
    decode.flood(3 * decode.num_blocks)
    made.now_s += 1
    prefill.call("p", [*history, 5, 6], session="s", source="decode-0")
    assert prefill.record("p").returned == len(history) - 1
    (rest,) = peek(decode, history).rests
    made.now_s += 10_000
    decode.call("other", tokens(6, start=9))
    queue = decode.pool.free_block_queue
    assert decode.extension.gauges()["retained_blocks"] == 0
    order = [block.block_id for block in queue.get_all_free_blocks()]
    kept = {block.block_id for block in decode.cached([*history, 5])}
    assert order.index(rest.block_id) < min(order.index(block_id) for block_id in kept)
    decode.assert_no_leak()


def test_of_a_superseded_call_no_rest_is_kept(made: World) -> None:
    """The next call of the session has filled that block in one of its own."""
    (_, decode) = pair(made)
    talk = Conversation("s")
    for _ in range(4):
        talk.call(decode, 2 * BLOCK, max_tokens=3)
        has_rest = bool((len(talk.history) - 1) % BLOCK)
        expected = (len(talk.history) - 1) // BLOCK + has_rest
        assert decode.extension.gauges()["retained_blocks"] == expected
    decode.assert_no_leak()


def test_without_retention_nothing_is_named_once_it_is_used_again(made: World) -> None:
    """A rest that nobody keeps is the first block that goes; its epoch tells."""
    (_, decode) = pair(made)
    decode.call("d", PROMPT, session="s", retain_s=0.0)
    assert len(peek(decode, PROMPT).rests) == 1
    decode.call("other", tokens(3, start=9))
    assert peek(decode, PROMPT).rests == []
    assert len(peek(decode, PROMPT).block_ids) == 10


def test_a_rest_that_was_handed_out_during_the_read_is_computed() -> None:
    """The full blocks are used; the record adds up, and nothing counts as lost."""
    with world(hold=True) as made:
        prefill, decode = pair(made)
        request = reading(prefill, decode)
        (rest,) = peek(decode, tokens(8 * BLOCK + 2)).rests
        # As if it had been handed out and taken back while the transfer ran.
        ledger = decode.extension.ledger
        ledger.last_epoch += 1
        ledger.epoch[rest.block_id] = ledger.last_epoch
        made.transfers[-1].advance()
        prefill.run(request.is_finished)
        record = prefill.record("r")
        assert (record.returned, record.computed, record.lost) == (8 * BLOCK, 2, 0)
        prefill.run()
        prefill.assert_no_leak()


def test_other_tokens_behind_the_same_blocks_are_computed(made: World) -> None:
    """The source names what it has; the reader knows its own prompt."""
    prefill, decode = pair(made)
    decode.call("d", PROMPT, session="s", max_tokens=2)
    other = [*PROMPT[:-2], PROMPT[-2], (PROMPT[-1] + 1) % 90 + 2, 7, 8]
    prefill.call("p", other, session="s", source="decode-0")
    assert prefill.record("p").returned == 10 * BLOCK


@pytest.mark.parametrize("salts", [("a", "b"), ("a", None)])
def test_another_salt_finds_no_rest(salts: tuple[str | None, str | None], made: World) -> None:
    """The hash before it is another one."""
    prefill, decode = pair(made)
    decode.call("d", PROMPT, session="s", cache_salt=salts[0])
    prefill.call("p", [*PROMPT, 5], session="s", source="decode-0", cache_salt=salts[1])
    assert prefill.record("p").returned == 0


def test_a_reset_ends_all_rests(made: World) -> None:
    """As all other blocks."""
    (_, decode) = pair(made)
    decode.call("d", PROMPT, session="s")
    assert decode.scheduler.reset_prefix_cache()
    assert peek(decode, PROMPT).rests == []
    decode.call("d2", PROMPT[: 10 * BLOCK + 1], session="s")
    assert peek(decode, PROMPT).rests[0].num_tokens == 1


class _Picture:
    """Stands for an image in a request."""


@pytest.mark.parametrize("kind", ["resumable", "mm_features", "prompt_embeds"])
def test_rule_9_calls_of_unproven_kinds_leave_no_rest(kind: str, made: World) -> None:
    """A key of token ids says nothing of other inputs; a resumable call writes on."""
    (_, decode) = pair(made)
    hooks = decode.connector.connector_scheduler
    finished = hooks.request_finished

    def of_that_kind(request: Any, *args: Any) -> Any:
        setattr(request, kind, [_Picture()])
        return finished(request, *args)

    if kind == "resumable":
        decode.add("d", PROMPT, session="s", resumable=True)
        decode.run(lambda: not decode.flights)
        decode.abort("d")
    else:
        hooks.request_finished = of_that_kind
        decode.call("d", PROMPT, session="s")
    assert len(decode.extension.rests) == 0


def test_an_engine_that_is_no_source_keeps_no_rests(made: World) -> None:
    """Nobody could pull them."""
    single = Engine(made, "single-0", connector="ClockedRetention")
    single.call("c", PROMPT, session="s")
    assert single.extension.gauges()["retained_blocks"] == 10
    assert len(single.extension.rests) == 0


def test_an_equal_rest_that_nobody_keeps_hides_none(made: World) -> None:
    """A second call with the same prompt ends later, and its block goes first."""
    prefill, decode = pair(made)
    prefill.call("a", PROMPT, session="s", handover=True)
    prefill.call("b", PROMPT, session="t", retain_s=0.0)
    prefill.call("c", tokens(3, start=9))
    decode.call("d", PROMPT, session="s", source="prefill-0")
    assert decode.record("d").returned == len(PROMPT) - 1


def test_an_engine_whose_blocks_are_given_to_nobody_keeps_no_rests(made: World) -> None:
    """As after a sibling's synchronous load."""
    (_, decode) = pair(made)
    decode.extension.ledger.in_order = False
    decode.call("d", PROMPT, session="s")
    assert decode.extension.gauges()["retained_blocks"] == 10
    assert len(decode.extension.rests) == 0
