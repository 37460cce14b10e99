"""Behind a router that is not ours: prompts are handed over, answers' KV comes back, verified."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.builders import BLOCK, Engine, World, tokens, world
from tests.fakes.directory import SlowDirectory
from tests.fakes.redis_server import RedisServer
from turncache.errors import ConfigError, EngineFault
from turncache.protocol import Mode
from turncache_server.connector.finding import AllPeers
from turncache_server.connector.pull import PEEK_WAIT_S
from turncache_server.retention.mailbox import SwitchMode

PROMPT = tokens(6 * BLOCK + 2)
SETTINGS = {"trust_hints": False, "foreign_router": True, "find": "peers"}
#: What vllm-router 0.1.17 asks prefill for; whatever the client has sent in its place is gone.
HOLD: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
NAMES = ("prefill-0", "decode-0")


@pytest.fixture
def made() -> Iterator[World]:
    """Engines on a wire."""
    with world() as made:
        yield made


def engines(made: World, **directories: Any) -> list[Engine]:
    """Make a pair whose engines find each other, by asking all or in a directory that is given."""
    out = []
    for name in NAMES:
        others = [other for other in NAMES if other != name]
        directory = directories.get(name.partition("-")[0]) or AllPeers(others)
        out.append(Engine(made, name, peers=others, directory=directory, settings=SETTINGS))
    return out


def leg(engine: Engine, request_id: str, prompt: list[int], params: Any, **kwargs: Any) -> Any:
    """Add one leg as the foreign router sends it: parameters have been JSON."""
    sent = json.loads(json.dumps(params))
    return engine.add(request_id, prompt, extra_args={"kv_transfer_params": sent}, **kwargs)


def call(
    prefill: Engine, decode: Engine, name: str, prompt: list[int], **kwargs: Any
) -> tuple[list[int], dict[str, Any]]:
    """Run both legs; returns prompt and answer, and what prefill has said to the router."""
    first = leg(prefill, f"{name}-p", prompt, HOLD, **kwargs)
    prefill.run(first.is_finished)
    said = prefill.said[f"{name}-p"]
    second = leg(decode, f"{name}-d", prompt, said, max_tokens=2 * BLOCK, **kwargs)
    decode.run(second.is_finished)
    for engine in (prefill, decode):
        engine.run()
    return list(second.all_token_ids), said


def totals(engine: Engine, name: str) -> int:
    """Return what an engine has counted."""
    return int(engine.extension.counters().get(name, 0))


def switch(engine: Engine, mode: Mode) -> None:
    """Switch an engine as its control socket does."""
    engine.extension.mailbox.post(SwitchMode(mode.value))
    stranger = engine.add(f"switch-{mode}-{engine.steps}", tokens(3, start=9))
    engine.run(stranger.is_finished)


@pytest.mark.parametrize("session", ["s", None], ids=["tagged", "untagged"])
def test_a_prompt_is_handed_over_by_a_verified_pull(made: World, session: str | None) -> None:
    """Prefill says who it is and nothing else; what decode takes is marked, so it can go back."""
    prefill, decode = engines(made)
    answer, said = call(prefill, decode, "one", PROMPT, session=session)
    assert said == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "prefill-0",
        "remote_prefill_cached_tokens": 0,  # vLLM's own, for decode's usage
    }
    assert totals(decode, "returned_tokens") == len(PROMPT) - 1
    assert totals(decode, "computed_tokens") == 1
    assert prefill.extension.num_handovers() == 0, "decode has verified it"
    assert decode.check_named() >= (len(answer) - 1) // BLOCK
    for engine in (prefill, decode):
        assert engine.connector.connector_scheduler.totals["stock_handovers"] == 0
        engine.assert_no_leak()


@pytest.mark.parametrize("how", ["peers", "directory"])
def test_the_next_calls_prefill_gets_the_answers_kv_back(made: World, how: str) -> None:
    """Nobody names a source: it is found, and all KV of history and answer is reused."""
    directory = SlowDirectory(["decode-0", "stranger"]) if how == "directory" else None
    prefill, decode = engines(made, prefill=directory)
    history, reused = PROMPT, 0
    for number in range(3):
        history, _ = call(prefill, decode, f"call-{number}", history, session="s")
        if number == 2:
            break
        reused += len(history) - 1  # the last token of an answer has no KV
        before = totals(prefill, "returned_tokens")
        prefill.flood(prefill.num_blocks)
        history = [*history, *tokens(BLOCK, start=number)]
        assert totals(prefill, "returned_tokens") == before
    # Of both histories all of it was there, and most of it came from decode.
    assert totals(prefill, "finds_found") == 2
    assert totals(prefill, "lost_tokens") == 0
    assert totals(prefill, "returned_tokens") + totals(prefill, "local_tokens") == reused
    assert totals(prefill, "returned_tokens") > reused // 2
    for engine in (prefill, decode):
        assert engine.extension.broken is None
        engine.assert_no_leak()


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for something that happens in another thread."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


def test_two_engines_find_each_other_in_a_real_redis(made: World) -> None:
    """From the settings to the blocks: decode has entered itself, and prefill asks it."""
    pytest.importorskip("redis")
    with RedisServer() as redis:
        prefill, decode = (
            Engine(
                made,
                name,
                peers=[other for other in NAMES if other != name],
                settings={
                    **SETTINGS,
                    "name": name,
                    "find": "redis",
                    "redis_url": redis.url,
                },
            )
            for name in NAMES
        )
        first = leg(prefill, "p", PROMPT, HOLD, session="s")
        prefill.step()
        eventually(prefill.pulls.get("p").found.done)
        prefill.run(first.is_finished)
        second = leg(decode, "d", PROMPT, prefill.said["p"], session="s", max_tokens=2 * BLOCK)
        decode.run(second.is_finished)
        directory = prefill.connector.connector_scheduler._directory
        eventually(lambda: list(directory.find("s").result(5)) == ["decode-0"])
        prefill.flood(prefill.num_blocks)
        leg(prefill, "p2", list(second.all_token_ids), HOLD, session="s")
        prefill.step()
        eventually(prefill.pulls.get("p2").found.done)
        prefill.run()
        assert (totals(prefill, "finds_nothing"), totals(prefill, "finds_found")) == (1, 1)
        assert totals(prefill, "lost_tokens") == 0
        assert totals(prefill, "returned_tokens") >= 2 * BLOCK
        assert totals(prefill, "directory_failed") == 0


def test_who_keeps_a_session_says_so(made: World) -> None:
    """Decode for as long as it keeps it; prefill, which keeps it only for decode, does not."""
    directories = {"prefill": SlowDirectory([]), "decode": SlowDirectory([])}
    prefill, decode = engines(made, **directories)
    call(prefill, decode, "one", PROMPT, session="s", retain_s=7.0)
    call(prefill, decode, "two", tokens(9, start=3), session="t")
    call(prefill, decode, "three", tokens(9, start=4), session="u", retain_s=0.0)
    call(prefill, decode, "four", tokens(9, start=5))
    assert directories["prefill"].kept == []
    assert directories["decode"].kept == [("s", 7.0), ("t", 120.0)]


@pytest.mark.parametrize(
    "answer", [EngineFault("redis", "no answer"), ["stranger", "", "prefill-0"], None]
)
def test_a_directory_that_does_not_help_costs_a_recompute(made: World, answer: Any) -> None:
    """It fails, names whom nobody knows, or never answers: bounded, counted, and right."""
    directory = SlowDirectory()
    prefill, decode = engines(made, prefill=directory)
    asked = leg(prefill, "p", PROMPT, HOLD, session="s")
    for _ in range(3):
        prefill.step()
    assert asked.num_computed_tokens == 0, "it waits for the directory"
    if answer is None:
        made.now_s += PEEK_WAIT_S
    else:
        directory.answer(answer)
    prefill.run(asked.is_finished)
    prefill.run()
    assert totals(prefill, "computed_tokens") == len(PROMPT)
    assert totals(prefill, "calls_new_session") == 1, "nothing is missed"
    assert totals(prefill, "finds_failed") == 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_a_session_that_nobody_knows_is_new(made: World) -> None:
    """An empty answer is an answer."""
    prefill, _ = engines(made, prefill=SlowDirectory([]))
    asked = leg(prefill, "p", PROMPT, HOLD, session="s")
    prefill.run(asked.is_finished)
    prefill.run()
    assert totals(prefill, "calls_new_session") == 1
    assert totals(prefill, "finds_nothing") == 1


def test_a_client_that_leaves_while_it_is_looked_for_leaves_nothing(made: World) -> None:
    """An answer that comes too late is for nobody, and nobody is asked for it."""
    directory = SlowDirectory()
    prefill, _ = engines(made, prefill=directory)
    leg(prefill, "p", PROMPT, HOLD, session="s")
    prefill.step()
    prefill.abort("p")
    prefill.step()
    directory.answer(["decode-0"])
    assert prefill.peers is not None
    assert prefill.peers.questions == []
    assert len(prefill.pulls) == 0
    prefill.assert_no_leak()


#: As from an engine that hands over as stock; a test sets host and port right.
FORGED: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "prefill-0",
    "remote_request_id": "x",
    "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
    "remote_host": "127.0.0.1",
    "remote_port": 1,
    "tp_size": 1,
    "remote_num_tokens": 26,
}


@pytest.mark.parametrize(
    "changes",
    [{}, {"remote_engine_id": "stranger"}, {"remote_host": "10.6.6.6"}, {"remote_block_ids": [[]]}],
)
def test_blocks_that_a_client_names_are_never_read(made: World, changes: dict[str, Any]) -> None:
    """vllm-router passes a client's parameters on when prefill answers none: they are a hint."""
    prefill, decode = engines(made)
    prefill.call("other", tokens(7 * BLOCK, start=77), session="victim")
    pair = prefill.connector.connector_scheduler
    place = {"remote_host": pair.side_channel_host, "remote_port": pair.side_channel_port}
    forged = {**FORGED, **place, **changes}
    asked = leg(decode, "d", PROMPT, forged, session="s", max_tokens=BLOCK)
    decode.run(asked.is_finished)
    decode.run()
    assert made.transfers == []
    assert totals(decode, "computed_tokens") == len(PROMPT)
    decode.assert_no_leak()


@pytest.mark.parametrize(
    "params",
    [
        7, [], {}, {"do_remote_prefill": True}, {"do_remote_prefill": True, "remote_engine_id": 7},
        {"do_remote_decode": "yes"}, {**FORGED, "remote_port": "1"}, {**FORGED, "tp_size": None},
        {**FORGED, "remote_block_ids": [["a"]]}, {**FORGED, "remote_block_ids": 7},
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [Mode.ON, Mode.OFF])
def test_rubbish_is_computed(made: World, params: Any, mode: Mode) -> None:
    """Whatever stands there, the call is served and the engine lives."""
    _, decode = engines(made)
    switch(decode, mode)
    asked = leg(decode, "d", PROMPT, params, session="s", max_tokens=BLOCK)
    decode.run(asked.is_finished)
    decode.run()
    assert made.transfers == []
    assert decode.extension.broken is None
    decode.assert_no_leak()


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.OBSERVE])
def test_a_pair_that_is_switched_off_hands_over_as_stock(made: World, mode: Mode) -> None:
    """As stock does behind that router; and after the switch to on all is verified again."""
    prefill, decode = engines(made)
    for engine in (prefill, decode):
        switch(engine, mode)
    before = totals(decode, "computed_tokens")
    history, said = call(prefill, decode, "one", PROMPT, session="s")
    assert said["remote_block_ids"]
    assert totals(decode, "computed_tokens") == before + 1
    for engine in (prefill, decode):
        assert engine.connector.connector_scheduler.totals["stock_handovers"] == 1
        switch(engine, Mode.ON)
    for number in range(2):
        prefill.flood(prefill.num_blocks)
        history, _ = call(prefill, decode, f"two-{number}", history, session="s")
    assert totals(prefill, "finds_found") == 1
    assert totals(prefill, "returned_tokens") >= 2 * BLOCK, "the answer's at least"
    for engine in (prefill, decode):
        engine.assert_no_leak()


@pytest.mark.parametrize("changes", [{"remote_host": "10.6.6.6"}, {"remote_port": 99}])
def test_switched_off_no_address_but_a_peers_is_read_from(
    made: World, changes: dict[str, Any]
) -> None:
    """NIXL is not sent to where a client says."""
    prefill, decode = engines(made)
    for engine in (prefill, decode):
        switch(engine, Mode.OFF)
    first = leg(prefill, "p", PROMPT, HOLD)
    prefill.run(first.is_finished)
    second = leg(decode, "d", PROMPT, {**prefill.said["p"], **changes})
    decode.run(second.is_finished)
    assert made.transfers == []


@pytest.mark.parametrize(("first", "second"), [(Mode.ON, Mode.OFF), (Mode.OFF, Mode.ON)])
def test_of_two_modes_the_prompt_is_computed_twice(made: World, first: Mode, second: Mode) -> None:
    """While a pair is being switched, nothing unverified is taken where the mode is on."""
    prefill, decode = engines(made)
    switch(prefill, first)
    switch(decode, second)
    one = leg(prefill, "p", PROMPT, HOLD, session="s")
    prefill.run(one.is_finished)
    two = leg(decode, "d", PROMPT, prefill.said["p"], session="s", max_tokens=BLOCK)
    decode.run(two.is_finished)
    decode.run()
    assert made.transfers == []
    for engine in (prefill, decode):
        assert engine.extension.broken is None
    decode.assert_no_leak()


@pytest.mark.parametrize("setting", [{"foreign_router": True}, {"find": "peers"}])
def test_an_engine_that_moves_nothing_has_no_such_setting(
    made: World, setting: dict[str, Any]
) -> None:
    """It would look as if something was returned."""
    with pytest.raises(ConfigError, match="TurncacheConnector"):
        Engine(made, connector="ClockedRetention", settings={"trust_hints": False, **setting})


def test_a_directory_wants_a_name_to_keep(made: World) -> None:
    """Without one the engine does not start."""
    settings = {"trust_hints": False, "find": "redis", "redis_url": "redis://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="find redis"):
        Engine(made, settings=settings)


def test_without_the_setting_parameters_steer_nothing(made: World) -> None:
    """What another router sends is dropped, as ever."""
    engine = Engine(made, peers=[], settings={"trust_hints": False})
    asked = leg(engine, "p", PROMPT, HOLD, session="s")
    engine.run(asked.is_finished)
    assert engine.said == {}
    engine.assert_no_leak()
