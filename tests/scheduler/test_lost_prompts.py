"""Hand-overs that prefill has lost before decode pulled them: who waits, for what, how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.request import Request, RequestStatus

from tests.builders import BLOCK, Engine, World, pair, tokens, world
from turncache.errors import EngineFault
from turncache.protocol import Reason
from turncache_server.connector.lacking import MAX_WAITING, UNHEARD_S
from turncache_server.connector.pull import PEER_REST_S
from turncache_server.retention.mailbox import SwitchMode

MODES = pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
PROMPT = tokens(10 * BLOCK + 2)
WAIT_S = 30.0


@pytest.fixture
def made() -> Iterator[World]:
    """Engines whose reads are complete as soon as they start."""
    with world() as made:
        yield made


def prefilled(prefill: Engine, name: str = "p", *, lost: bool = False) -> None:
    """Run a prefill leg, and lose what it has computed."""
    prefill.call(name, PROMPT, session="s", retain_s=0.0, handover=True)
    if lost:
        lose(prefill)


def lose(engine: Engine, first: int = 0) -> None:
    """Have an engine forget a prompt from a block on, as under pressure."""
    engine.pool.evict_blocks({block.block_id for block in engine.cached(PROMPT)[first:]})


def decoding(decode: Engine, **hints: Any) -> Request:
    """Add a decode leg."""
    return decode.add(
        "d",
        PROMPT,
        session="s",
        max_tokens=3,
        **{"source": "prefill-0", "repeat_s": WAIT_S, **hints},
    )


def waiting(decode: Engine, **hints: Any) -> Request:
    """Bring a decode leg to the point where it waits for its prompt."""
    request = decoding(decode, **hints)
    decode.run(lambda: decode.lacking.requests() == ["d"])
    return request


def finish(*engines: Engine) -> None:
    """Check that nothing is left anywhere."""
    for engine in engines:
        engine.assert_no_leak()


@MODES
@pytest.mark.parametrize("kept", [0, 4])
def test_a_lost_prompt_is_pulled_once_prefill_has_computed_it_again(
    kept: int, asynchronous: bool, made: World
) -> None:
    """Decode computes the last token and no other; other calls go on meanwhile."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    prefilled(prefill)
    lose(prefill, kept)
    request = waiting(decode)
    other = decode.add("other", tokens(30, start=9), session="o", max_tokens=5)
    decode.run(other.is_finished)
    assert request.status is RequestStatus.WAITING
    assert not made.transfers
    prefilled(prefill, "again")
    decode.lacking.repeated("d", "prefill-0")
    decode.run(request.is_finished)
    record = decode.record("d")
    assert (record.returned, record.computed, record.lost) == (len(PROMPT) - 1, 1, 0)
    assert decode.lacking.ends["again"] == 1
    finish(prefill, decode)


@MODES
def test_when_its_time_is_over_the_call_computes(asynchronous: bool, made: World) -> None:
    """Nobody has repeated anything: as without the offer, and counted as lost."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    prefilled(prefill, lost=True)
    request = waiting(decode)
    made.now_s += WAIT_S - 0.1
    for _ in range(3):
        decode.step()
    assert request.status is RequestStatus.WAITING
    made.now_s += 0.2
    decode.run(request.is_finished)
    record = decode.record("d")
    assert (record.returned, record.computed) == (0, len(PROMPT))
    assert (record.lost, record.reason) == (10 * BLOCK, Reason.EVICTED)
    assert decode.lacking.ends["timeout"] == 1
    finish(prefill, decode)


def test_what_is_left_when_the_time_is_over_is_pulled(made: World) -> None:
    """A part that the source still has counts; only the rest is computed."""
    prefill, decode = pair(made)
    prefilled(prefill)
    lose(prefill, 6)
    request = waiting(decode)
    decode.lacking.repeated("d", "")
    decode.run(request.is_finished)
    assert decode.record("d").returned == 6 * BLOCK
    assert decode.lacking.ends["refused"] == 1
    finish(prefill, decode)


@MODES
def test_a_peek_that_has_failed_is_made_once_more_before_a_prompt_counts_as_lost(
    asynchronous: bool, made: World
) -> None:
    """The prompt is there: it is pulled, and nobody is asked to prefill it again."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    prefilled(prefill)
    request = decoding(decode)
    assert decode.peers is not None
    (question,) = decode.peers.questions
    decode.peers.lose(question, EngineFault("prefill-0", "no answer"))
    named: list[str] = []

    def over() -> bool:
        named.extend(decode.lacking.requests())
        return request.is_finished()

    decode.run(over)
    record = decode.record("d")
    assert (record.returned, record.computed, record.lost) == (len(PROMPT) - 1, 1, 0)
    assert named == []
    assert decode.lacking.ends["there"] == sum(decode.lacking.ends.values()) == 1
    finish(prefill, decode)


@MODES
def test_behind_a_silent_source_a_prompt_counts_as_lost_after_half_a_second(
    asynchronous: bool, made: World
) -> None:
    """No sooner, and no later; other calls go on meanwhile."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    prefilled(prefill, lost=True)
    request = decoding(decode)
    peers = decode.peers
    assert peers is not None

    def named() -> bool:
        for question in list(peers.questions):
            peers.lose(question, EngineFault("prefill-0", "no answer"))
        return bool(decode.lacking.requests())

    decode.run(lambda: named() or len(decode.lacking) == 1, answer=False)
    began_s = made.now_s
    other = decode.add("other", tokens(30, start=9), session="o", max_tokens=5)
    decode.run(lambda: named() or other.is_finished(), answer=False)
    while not named():
        made.now_s += 0.05
        decode.step()
    assert made.now_s - began_s == pytest.approx(UNHEARD_S, abs=0.11)
    prefilled(prefill, "again")
    decode.lacking.repeated("d", "prefill-0")
    made.now_s += PEER_REST_S
    decode.run(request.is_finished)
    assert decode.record("d").returned == len(PROMPT) - 1
    finish(prefill, decode)


def test_a_router_that_cannot_help_ends_the_wait_at_once(made: World) -> None:
    """No time has to pass."""
    prefill, decode = pair(made)
    prefilled(prefill, lost=True)
    request = waiting(decode)
    decode.lacking.repeated("d", "")
    decode.run(request.is_finished)
    assert decode.record("d").returned == 0
    finish(prefill, decode)


def test_another_engine_may_have_computed_it(made: World) -> None:
    """The source is the one that the router names then."""
    prefill = Engine(made, "prefill-0", peers=["decode-0"])
    other = Engine(made, "prefill-1", peers=["decode-0"])
    decode = Engine(made, "decode-0", peers=["prefill-0", "prefill-1"])
    prefilled(prefill, lost=True)
    request = waiting(decode)
    prefilled(other)
    decode.lacking.repeated("d", "prefill-1")
    decode.run(request.is_finished)
    assert decode.record("d").returned == len(PROMPT) - 1
    finish(prefill, other, decode)


def test_a_prompt_that_is_lost_once_more_is_named_once_more(made: World) -> None:
    """It is the router's decision how often."""
    prefill, decode = pair(made)
    prefilled(prefill, lost=True)
    request = waiting(decode)
    for attempt in ("lost-again", "at-last"):
        prefilled(prefill, attempt, lost=attempt == "lost-again")
        decode.lacking.repeated("d", "prefill-0")
        assert decode.lacking.requests() == []
        decode.run(lambda: request.is_finished() or bool(decode.lacking.requests()))
    assert decode.record("d").returned == len(PROMPT) - 1
    finish(prefill, decode)


@pytest.mark.parametrize("named", ["decode-0", "stranger"])
def test_whoever_is_no_peer_is_not_asked(named: str, made: World) -> None:
    """The call is named again: the router may have another one."""
    prefill, decode = pair(made)
    prefilled(prefill, lost=True)
    request = waiting(decode)
    decode.lacking.repeated("d", named)
    decode.step()
    assert decode.lacking.requests() == ["d"]
    assert request.status is RequestStatus.WAITING
    decode.abort("d")
    finish(prefill, decode)


def test_a_source_that_was_reset_is_greeted_anew(made: World) -> None:
    """Its cache is of another generation than at the last hello: the repeat finds it again."""
    prefill, decode = pair(made)
    prefilled(prefill)
    assert decode.peers is not None
    assert decode.peers.get("prefill-0") is not None
    assert prefill.scheduler.reset_prefix_cache()
    request = waiting(decode)
    prefilled(prefill, "again")
    decode.lacking.repeated("d", "prefill-0")
    decode.run(request.is_finished)
    assert decode.record("d").returned == len(PROMPT) - 1
    finish(prefill, decode)


def test_a_source_that_pulls_nothing_any_more_is_lost_too(made: World) -> None:
    """What it computes again it does not show either; the router's no ends it."""
    prefill, decode = pair(made)
    prefilled(prefill)
    prefill.extension.mailbox.post(SwitchMode("observe"))
    prefill.call("notices", tokens(9, start=3))
    request = waiting(decode)
    prefilled(prefill, "again")
    decode.lacking.repeated("d", "prefill-0")
    decode.run(lambda: decode.lacking.requests() == ["d"])
    decode.lacking.repeated("d", "")
    decode.run(request.is_finished)
    assert decode.record("d").returned == 0
    finish(prefill, decode)


@pytest.mark.parametrize("how", ["abort", "mode", "reset"])
@MODES
def test_nothing_is_left_of_a_wait_that_is_cut_off(
    asynchronous: bool, how: str, made: World
) -> None:
    """A client that leaves, a mode that is switched off; a reset is not in its way at all."""
    prefill, decode = pair(made, async_scheduling=asynchronous)
    prefilled(prefill, lost=True)
    request = waiting(decode)
    if how == "abort":
        decode.abort("d")
    elif how == "mode":
        decode.extension.mailbox.post(SwitchMode("off"))
        decode.run(lambda: not decode.extension.acting)
        assert len(decode.lacking) == 0
        decode.run(request.is_finished)
        assert request.num_computed_tokens >= len(PROMPT)
    else:
        assert decode.scheduler.reset_prefix_cache(), "a call that waits holds no block"
        assert request.status is RequestStatus.WAITING
        decode.abort("d")
    assert len(decode.lacking) == 0
    assert decode.lacking.ends["left"] == 1
    finish(prefill, decode)


@pytest.mark.parametrize(
    ("lost_from", "hints", "computed"),
    [
        (0, {"repeat_s": None}, len(PROMPT)),
        (0, {"repeat_above": len(PROMPT)}, len(PROMPT)),
        (8, {"repeat_above": 2 * BLOCK + 2}, 2 * BLOCK + 2),
        (10, {}, 1),
    ],
    ids=["no-offer", "few-in-all", "few-lost", "none-lost"],
)
def test_what_is_not_worth_a_repeat_is_computed_at_once(
    lost_from: int, hints: dict[str, Any], computed: int, made: World
) -> None:
    """Without an offer everything; else as many tokens as decode may compute."""
    prefill, decode = pair(made)
    prefilled(prefill)
    lose(prefill, lost_from)
    request = decoding(decode, **hints)
    decode.run(request.is_finished)
    assert decode.record("d").computed == computed
    assert not any(decode.lacking.ends.values())
    finish(prefill, decode)


def test_another_prompt_is_not_a_lost_one(made: World) -> None:
    """Where the source has all that it ever had, as behind a template with a date, nobody waits."""
    prefill, decode = pair(made)
    other = [*PROMPT[: 4 * BLOCK], *tokens(26, start=5)]
    prefill.call("p", other, session="s", retain_s=0.0, handover=True)
    request = decoding(decode)
    decode.run(request.is_finished)
    assert decode.record("d").returned == 4 * BLOCK
    assert not any(decode.lacking.ends.values())
    finish(prefill, decode)


def test_so_many_may_wait_and_no_more(made: World) -> None:
    """Who comes later computes; those that wait do so undisturbed."""
    prefill, decode = pair(made, max_requests=4)
    prefilled(prefill, lost=True)
    for number in range(MAX_WAITING):
        decode.add(
            f"w{number}", PROMPT, session="s", source="prefill-0", repeat_s=WAIT_S, max_tokens=1
        )
    decode.run(lambda: len(decode.lacking.requests()) == MAX_WAITING)
    request = decoding(decode)
    decode.run(request.is_finished)
    assert len(decode.lacking) == MAX_WAITING
    assert decode.lacking.ends["full"] == 1
    for number in range(MAX_WAITING):
        decode.abort(f"w{number}")
    finish(prefill, decode)


def test_a_call_that_comes_back_preempted_waits_for_nobody(made: World) -> None:
    """It may pull once more; what is lost then, it computes."""
    prefill, decode = pair(made, batched_tokens=16)
    prefilled(prefill, lost=True)
    request = waiting(decode)
    prefilled(prefill, "again")
    decode.lacking.repeated("d", "prefill-0")
    decode.run(lambda: request.status is RequestStatus.RUNNING)
    decode.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert request.status is RequestStatus.PREEMPTED
    lose(prefill)
    decode.run(request.is_finished)
    assert decode.lacking.ends["again"] == sum(decode.lacking.ends.values()) == 1
    finish(prefill, decode)
