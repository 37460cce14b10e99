"""What makes the verified pull safe in vLLM: one test per rule of the design, with the fault
that the rule prevents within reach.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.builders import BLOCK, Engine, World, pair, reading, tokens, world
from tests.scheduler.mutants import MUTANTS
from turncache.errors import ConfigError, EngineFault
from turncache.protocol import Reason
from turncache_server.connector import _compat, turncache_connector
from turncache_server.connector.peers import PeerState
from turncache_server.connector.service import Service
from turncache_server.control.messages import ModeReply, Peek, SetMode
from turncache_server.cost_profile import CALIBRATED, dump_profile
from turncache_tools.plan.priors import prior


@pytest.fixture
def held() -> Iterator[World]:
    """Engines whose reads stay on the wire until the test moves them."""
    with world(hold=True) as made:
        yield made


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_rule_1_only_written_blocks_are_named(asynchronous: bool) -> None:
    """A hash is attached when a step is scheduled; a peer is told of a block when it is written."""
    with world() as made:
        engine = Engine(made, peers=[], async_scheduling=asynchronous, batched_tokens=12)
        request = engine.add("r", tokens(50), max_tokens=20, session="s")
        ahead = named = 0

        def look() -> None:
            nonlocal ahead, named
            text = list(request.all_token_ids)
            reply = engine.source.peek(Peek(session="s", hashes=engine.hashes(text)))
            named = len(reply.block_ids)
            ahead += engine.listed(text) > named
            engine.check_named()

        while engine.busy:
            if len(engine.flights) < engine.depth and engine.scheduler.has_requests():
                engine.execute(engine.schedule())
                look()
            else:
                engine.process()
                look()
        assert ahead, "the fault was within reach"
        assert named == (50 + 20 - 1) // BLOCK
        engine.assert_no_leak()


def test_rule_2_a_pull_is_used_once_and_never_parks(held: World) -> None:
    """A failed load is looked at again by the scheduler, and computes."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    held.transfers[0].fail()
    prefill.step()
    held.now_s += 3  # the peer has rested before the scheduler looks again
    prefill.run(request.is_finished)
    assert len(held.transfers) == 1
    assert prefill.record("r").reason is Reason.TIMEOUT
    for engine in (prefill, decode):
        engine.assert_no_leak()


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_rule_3_an_engine_that_loads_runs_as_both_or_refuses(role: str) -> None:
    """As anything else vLLM would not fence reads against a step that is still writing."""
    with world() as made, pytest.raises(ConfigError, match="kv_both") as caught:
        Engine(made, transfer={"kv_role": role})
    assert caught.value.setting == "kv_role"


def test_a_host_buffer_that_nobody_fills_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU NIXL would register host memory that only the stock scheduler has filled."""
    gpu = SimpleNamespace(device_type="cuda")
    monkeypatch.setattr(turncache_connector, "current_platform", gpu)
    with world() as made, pytest.raises(ConfigError, match="expected 'cuda'") as caught:
        Engine(made, transfer={"kv_buffer_device": "cpu"})
    assert caught.value.setting == "kv_buffer_device"


@pytest.mark.parametrize("mutant", [None, "rule-3-no-fence"])
def test_rule_3_reads_never_land_in_blocks_that_a_step_still_writes(
    mutant: str | None, held: World
) -> None:
    """An aborted request's blocks are the first to be reused; its step may still be writing.

    Without the fence the very same events let it.
    """
    # So full that the read has to take blocks of the request that has left.
    kwargs: dict[str, Any] = {"async_scheduling": True, "num_blocks": 36, "batched_tokens": 128}
    prefill, decode = pair(held, **kwargs)
    if mutant is not None:
        MUTANTS[mutant](prefill)
    decode.call("warm", tokens(34), session="s")
    victim = prefill.add("victim", tokens(120, start=3))
    flight = prefill.schedule()
    written = set(flight.writes[0][1])
    prefill.abort("victim")
    assert victim.is_finished()
    request = prefill.add("r", tokens(34), session="s", source="decode-0")
    for question in list(prefill.peers.questions if prefill.peers else ()):
        prefill.peers.deliver(question)  # type: ignore[union-attr]
    prefill.schedule()
    read_into = {
        block_id
        for later in list(prefill.flights)[1:]
        for meta in later.scheduled.kv_connector_metadata.reqs_to_recv.values()
        for block_id in meta.local_block_ids[0]
    }
    assert bool(written & read_into) == (mutant is not None)
    if mutant is not None:
        return
    held.hold = False
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == 34 - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_4_an_abandoned_read_keeps_its_blocks(held: World) -> None:
    """Past its deadline a read is given up, and its blocks go to nobody until it is gone."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    transfer = held.transfers[-1]
    destination = {piece[1] for piece in transfer.pieces}
    held.now_s += 60
    prefill.run(request.is_finished)
    assert prefill.record("r").reason is Reason.TIMEOUT
    for number in range(6):
        prefill.add(f"other-{number}", tokens(100, start=50 + number))
        while prefill.busy:
            for _, table, *_ in prefill.schedule().writes:
                assert not destination & set(table)
            prefill.process()
    assert not prefill.scheduler.reset_prefix_cache()
    transfer.advance()
    prefill.call("later", tokens(10, start=99))
    assert prefill.scheduler.reset_prefix_cache()
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_4_an_idle_engine_finds_out_that_a_read_is_gone(held: World) -> None:
    """Without a further call: vLLM asks whether a step is due whenever its loop wakes."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    held.now_s += 60
    prefill.run(request.is_finished)
    prefill.run()
    held.transfers[-1].advance()
    assert not prefill.scheduler.reset_prefix_cache()
    assert not prefill.busy, "no spinning"
    held.now_s += 0.2
    assert prefill.busy
    prefill.run()
    assert prefill.scheduler.reset_prefix_cache()
    held.now_s += 60
    assert not prefill.busy
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_4_reads_under_way_hold_at_most_half_of_the_pool(held: World) -> None:
    """All of them may have to be abandoned: the next one waits until there is room."""
    prefill, decode = pair(held, num_blocks=40)
    reading(prefill, decode, blocks=12)
    prompt = tokens(12 * BLOCK + 2, start=77)
    decode.call("warm-2", prompt, session="s2")
    second = prefill.add("r2", prompt, session="s2", source="decode-0")
    for _ in range(6):
        prefill.step()
    assert len(held.transfers) == 1
    held.transfers[0].advance()
    prefill.run(lambda: len(held.transfers) > 1)
    held.transfers[1].advance()
    prefill.run(second.is_finished)
    assert prefill.record("r2").returned == len(prompt) - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_4_withheld_blocks_are_capped(held: World) -> None:
    """When dead reads withhold too much of the pool, nothing more is pulled."""
    prefill, decode = pair(held, num_blocks=100)
    reading(prefill, decode, blocks=6)
    held.now_s += 60
    prefill.run()
    held.now_s += 3
    prompt = tokens(40, start=77)
    decode.call("warm", prompt, session="s2")
    prefill.call("r2", prompt, session="s2", source="decode-0")
    assert prefill.record("r2").reason is Reason.OVER_BUDGET
    held.transfers[0].advance()
    prefill.call("r3", tokens(10, start=78))
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_5_an_id_is_held_until_it_is_verified(held: World) -> None:
    """All ranks have read, and still the scheduler may not compute; the hook runs every step."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    held.transfers[-1].advance()
    for _ in range(5):
        prefill.step()
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert prefill.pulls.holding
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == 8 * BLOCK + 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_5_an_offer_is_not_a_load(held: World) -> None:
    """Without room nothing is allocated for an offer; it is made again, and nothing leaks."""
    prefill, decode = pair(held, num_blocks=24, max_model_len=80)
    decode.call("warm", tokens(34), session="s")
    big = prefill.add("big", tokens(70, start=5), max_tokens=8)
    prefill.run(lambda: big.num_computed_tokens >= 70)
    request = prefill.add("r", tokens(34), session="s", source="decode-0")
    for _ in range(3):
        prefill.run(lambda: not prefill.peers.questions)  # type: ignore[union-attr]
        prefill.step()
    assert request.status is RequestStatus.WAITING
    held.hold = False
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == 34 - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_5_any_policy_but_recompute_is_refused() -> None:
    """The default of vLLM would turn a lost cache entry into an error for the client."""
    with world() as made, pytest.raises(ConfigError, match="recompute"):
        Engine(made, transfer={"kv_load_failure_policy": "fail"})


@pytest.mark.parametrize("still_writing", [False, True])
def test_rule_5_a_transport_error_is_treated_like_a_deadline(
    still_writing: bool, held: World
) -> None:
    """An error does not prove that nobody writes any more: only a released handle does."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    transfer = held.transfers[-1]
    transfer.fail(still_writing=still_writing)
    for _ in range(5):
        prefill.step()
    waiting = request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert waiting == still_writing
    held.now_s += 60
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == 0
    transfer.stop_writing()
    prefill.call("later", tokens(10, start=99))
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_6_another_generation_is_refused_until_a_new_hello(held: World) -> None:
    """After a reset at the source nothing is taken before its digests were compared anew."""
    held.hold = False
    prefill, decode = pair(held)
    assert prefill.peers is not None
    prefill.peers.greets = False
    known = prefill.peers.get("decode-0")
    decode.scheduler.reset_prefix_cache()
    decode.call("warm", tokens(34), session="s")
    prefill.call("r1", tokens(34), session="s", source="decode-0")
    assert prefill.record("r1").reason is Reason.SOURCE_GONE
    fresh = prefill.peers.get("decode-0")
    assert known is not None
    assert fresh is not None
    assert known.hello is not None
    assert fresh.hello is not None
    assert fresh.hello.generation == known.hello.generation + 1
    prefill.scheduler.reset_prefix_cache()
    prefill.call("r2", tokens(34), session="s", source="decode-0")
    assert prefill.record("r2").returned == 34 - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_6_the_peek_that_finds_another_generation_has_the_source_greeted(held: World) -> None:
    """So a reset costs the next pull a question, not a prefill; nothing is taken without it."""
    held.hold = False
    prefill, decode = pair(held)
    assert prefill.peers is not None
    known = prefill.peers.get("decode-0")
    decode.scheduler.reset_prefix_cache()
    decode.call("warm", tokens(34), session="s")
    prefill.call("r", tokens(34), session="s", source="decode-0")
    assert prefill.record("r").returned == 34 - 1
    fresh = prefill.peers.get("decode-0")
    assert known is not None
    assert known.hello is not None
    assert fresh is not None
    assert fresh.hello is not None
    assert fresh.hello.generation == known.hello.generation + 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_6_an_incompatible_peer_is_never_asked(held: World) -> None:
    """Any difference of the fingerprints, and the call computes with that reason."""
    prefill, decode = pair(held)
    assert prefill.peers is not None
    known = prefill.peers.get("decode-0")
    assert known is not None
    prefill.peers._known["decode-0"] = type(known)(
        name=known.name, control_address="", state=PeerState.INCOMPATIBLE, hello=known.hello
    )
    decode.call("warm", tokens(34), session="s")
    prefill.call("r", tokens(34), session="s", source="decode-0")
    assert prefill.record("r").reason is Reason.INCOMPATIBLE
    assert prefill.peers.questions == []


def test_rule_6_weights_are_read_where_vllm_has_put_them(tmp_path: Path) -> None:
    """In ``--download-dir`` too: else nothing would be known of them, and nothing pulled."""
    commit = "c0ffee" + 34 * "0"
    model = tmp_path / "models--org--tiny"
    snapshot = model / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "model.safetensors").write_bytes(b"w")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model="org/tiny", revision=None),
        load_config=SimpleNamespace(download_dir=str(tmp_path)),
    )
    assert _compat.model_folder(config) == snapshot
    config.load_config.download_dir = str(tmp_path / "elsewhere")
    assert _compat.model_folder(config) is None


def test_rule_6_handshakes_are_done_before_the_first_call(held: World) -> None:
    """The workers shake hands with every compatible peer once, without a call waiting for it."""
    held.hold = False
    prefill, decode = pair(held)
    prefill.call("any", tokens(10))
    prefill.call("other", tokens(12, start=3))
    assert [worker.greeted for worker in prefill.workers] == [["decode-0"]]
    assert decode.name == "decode-0"


CLIENT_PARAMS: list[Any] = [
    "x",
    7,
    ["a"],
    {"do_remote_decode": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "evil"},
    {
        "do_remote_prefill": True,
        "remote_block_ids": [[1]],
        "remote_engine_id": "evil",
        "remote_request_id": "r",
        "remote_host": "10.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    },
]


@pytest.mark.parametrize("connector", ["WiredConnector", "ClockedRetention"])
@pytest.mark.parametrize("params", CLIENT_PARAMS, ids=lambda p: type(p).__name__)
def test_rule_7_what_a_client_sends_steers_nothing(connector: str, params: Any) -> None:
    """Neither the engine nor the transfer notices parameters that come from outside."""
    with world() as made:
        peers = [] if connector == "WiredConnector" else None
        engine = Engine(made, connector=connector, peers=peers)
        engine.call("r", tokens(30), extra_args={"kv_transfer_params": params})
        assert made.transfers == []
        engine.assert_no_leak()


@pytest.mark.parametrize(
    ("connector", "deferred"), [("WiredConnector", True), ("ClockedRetention", False)]
)
def test_rule_7_a_loaded_connector_changes_nothing_else(connector: str, deferred: bool) -> None:
    """No delivery is demanded, frees are deferred only where loads can happen, answers are bare."""
    with world() as made:
        peers = [] if connector == "WiredConnector" else None
        engine = Engine(made, connector=connector, peers=peers, async_scheduling=True)
        assert engine.scheduler.requires_kv_delivery is False
        assert engine.scheduler.defer_block_free is deferred
        engine.add("r", tokens(30), session="s")
        outputs = []
        update = engine.scheduler.update_from_output

        def collect(*args: Any) -> Any:
            outputs.append(update(*args))
            return outputs[-1]

        engine.scheduler.update_from_output = collect
        engine.run()
        answers = [o for each in outputs for client in each.values() for o in client.outputs]
        assert answers
        assert all(answer.kv_transfer_params is None for answer in answers)


def measured(engine: Engine, *, pull_token_s: float) -> None:
    """Let an engine have measured: a millisecond to compute a token, and so long to pull one."""
    costs = engine.connector.connector_scheduler._costs
    for tokens_ in (100, 200, 300, 400, 500):
        costs.computed(tokens_, tokens_ * tokens_ / 2, 1e-3 * tokens_)
        costs.pulled("a", tokens_, pull_token_s * tokens_)


def test_rule_8_what_computing_is_quicker_for_is_not_pulled(held: World) -> None:
    """Nothing is read, the reason says so, and a threshold that somebody named decides alone."""
    prompt = tokens(40 * BLOCK + 2)
    for threshold, dearer in ((None, True), (0, False)):
        names = (f"prefill-{threshold}", f"decode-{threshold}")
        extra = {"turncache": {"trust_hints": True}}
        more = {} if threshold is None else {"kv_recompute_threshold": threshold}
        prefill = Engine(
            held,
            names[0],
            peers=[names[1]],
            transfer={"kv_connector_extra_config": {**extra, **more}},
        )
        decode = Engine(held, names[1], peers=[names[0]])
        held.hold = False
        decode.call("warm", prompt, session="s")
        measured(prefill, pull_token_s=1.0)
        before = len(held.transfers)
        prefill.call("r", prompt, session="s", source=names[1])
        record = prefill.record("r")
        assert (record.reason is Reason.DEARER) is dearer
        assert (len(held.transfers) == before) is dearer
        assert record.returned == (0 if dearer else len(prompt) - 1)
        for engine in (prefill, decode):
            engine.assert_no_leak()


def test_rule_8_the_deadline_follows_what_was_measured(held: World) -> None:
    """A read that has not come after a tenth of computing is given up, and computed."""
    prefill = Engine(
        held,
        "prefill-0",
        peers=["decode-0"],
        transfer={"kv_connector_extra_config": {"turncache": {"trust_hints": True}}},
    )
    decode = Engine(held, "decode-0", peers=["prefill-0"])
    measured(prefill, pull_token_s=1e-6)
    request = reading(prefill, decode, blocks=18)
    held.now_s += 0.2
    prefill.step()
    prefill.step()
    assert not request.is_finished()
    assert prefill.workers[0]._recving_metadata, "a quarter of a second is the least"
    held.now_s += 0.1
    prefill.run(request.is_finished)
    assert prefill.record("r").reason is Reason.TIMEOUT
    held.transfers[-1].advance()
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_8_an_old_peek_is_asked_again(held: World) -> None:
    """A request that waited in the queue looks at what the source holds now."""
    prefill, decode = pair(held)
    held.hold = False
    prompt = tokens(8 * BLOCK + 2)
    decode.call("warm", prompt, session="s")
    assert prefill.peers is not None
    request = prefill.add("r", prompt, session="s", source="decode-0")
    for question in list(prefill.peers.questions):
        prefill.peers.deliver(question)
    held.now_s += 1.1
    prefill.step()
    assert len(prefill.peers.questions) == 1, "asked again at the first look"
    prefill.run(request.is_finished)
    assert prefill.record("r").returned == len(prompt) - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_a_source_that_does_not_answer_costs_one_deadline(held: World) -> None:
    """The verify is lost: the call computes, and nothing stays behind."""
    prefill, decode = pair(held)
    request = reading(prefill, decode)
    held.transfers[-1].advance()
    assert prefill.peers is not None
    prefill.run(lambda: bool(prefill.peers and prefill.peers.questions), answer=False)
    prefill.peers.lose(prefill.peers.questions[0], EngineFault("decode-0", "no answer"))
    prefill.run(request.is_finished, answer=False)
    record = prefill.record("r")
    assert (record.returned, record.reason) == (0, Reason.SOURCE_GONE)
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_rule_8_costs_of_a_profile_decide_from_the_first_call_on(
    held: World, tmp_path: Path
) -> None:
    """An engine that has measured nothing yet pulls; with a profile it knows that it is dearer."""
    profile = replace(prior("qwen3-8b"), source=CALIBRATED, pull_token_s=1.0)
    (tmp_path / "profile.toml").write_text(dump_profile(profile))
    prompt = tokens(40 * BLOCK + 2)
    for named in ({}, {"cost_profile": str(tmp_path / "profile.toml")}):
        names = (f"prefill-{len(named)}", f"decode-{len(named)}")
        extra = {"turncache": {"trust_hints": True, **named}}
        transfer = {"kv_connector_extra_config": extra}
        prefill = Engine(held, names[0], peers=[names[1]], transfer=transfer)
        decode = Engine(held, names[1], peers=[names[0]])
        held.hold = False
        decode.call("warm", prompt, session="s")
        prefill.call("r", prompt, session="s", source=names[1])
        assert (prefill.record("r").reason is Reason.DEARER) is bool(named)
        for engine in (prefill, decode):
            engine.assert_no_leak()


#: What a request has of a kind that was never proven, and the reader's scheduler does not.
KINDS: dict[str, Any] = {
    "lora_request": object(),
    "mm_features": [object()],
    "prompt_embeds": object(),
    "resumable": True,
    "pooling_params": object(),
    "skip_reading_prefix_cache": True,
}


@pytest.mark.parametrize("kind", KINDS)
def test_rule_9_requests_of_kinds_that_were_never_proven_are_computed(kind: str) -> None:
    """Nobody is asked for them, and the record says why; what they compute is kept as any."""
    with world() as made:
        prefill, decode = pair(made)
        decode.call("d", tokens(60), session="s")
        connector = prefill.scheduler.connector
        arrived = connector.on_new_request

        def of_that_kind(request: Any) -> None:
            before = getattr(request, kind)
            setattr(request, kind, KINDS[kind])
            arrived(request)
            setattr(request, kind, before)

        connector.on_new_request = of_that_kind
        prefill.call("p", tokens(60), session="s", source="decode-0")
        record = prefill.record("p")
        assert (record.reason, record.returned) == (Reason.UNSUPPORTED, 0)
        assert made.transfers == []
        connector.on_new_request = arrived
        assert len(prefill.pulls) == 0
        assert prefill.extension.gauges()["retained_blocks"] == 60 // BLOCK
        prefill.assert_no_leak()


def test_rule_9_nobody_is_given_what_a_resumable_request_may_write_over() -> None:
    """A step in flight fills a block for a token that vLLM drops when the prompt goes on."""
    with world() as made:
        decode = Engine(made, "decode-0", peers=[], async_scheduling=True)
        # The first answered token has its place in the block, the second fills it and stops.
        first = decode.add(
            "r", tokens(3 * BLOCK - 2), max_tokens=9, stop_after=2, resumable=True, session="s"
        )
        decode.run(lambda: not decode.flights and first.num_output_tokens == 2)
        assert not first.is_finished()
        manager = decode.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def looked_at(*args: Any, **kwargs: Any) -> Any:
            blocks = allocate(*args, **kwargs)
            decode.check_named()
            return blocks

        manager.allocate_slots = looked_at
        decode.resume(first, tokens(3 * BLOCK, start=77), max_tokens=2)
        decode.run(lambda: not decode.flights and first.num_output_tokens == 2)
        assert decode.extension.broken is None
        assert decode.hit(list(first.all_token_ids)) >= 5 * BLOCK, "its own engine finds it"
        assert decode.check_named() == 0
        decode.abort("r")
        decode.call("next", tokens(2 * BLOCK + 1, start=5))
        assert decode.check_named() == 2
        decode.assert_no_leak()


@pytest.mark.parametrize("length", range(6 * BLOCK, 7 * BLOCK + 1))
def test_rule_10_decode_computes_the_last_token_of_a_prompt(length: int) -> None:
    """And no other, wherever in its block the prompt ends."""
    with world() as made:
        prefill, decode = pair(made)
        prefill.call("p", tokens(length), session="s", handover=True, retain_s=0.0)
        decode.call("d", tokens(length), session="s", source="prefill-0", max_tokens=3)
        assert decode.record("d").computed == 1


def test_rule_10_prompts_are_handed_over_as_stock_where_decode_holds_prefills_back() -> None:
    """The last block of a pulled prompt would wait for the interval; the router is told."""
    with world() as made:
        settings = {"side": "decode"}
        decode = Engine(
            made, "decode-0", peers=["prefill-0"], settings=settings, prefill_schedule_interval=4
        )
        assert decode.extension.broken is None
        assert any("interval of 4" in why for why in decode.extension.facts.unsupported_pull)
        reply = Service(decode.extension, fingerprint={})(SetMode())
        assert isinstance(reply, ModeReply)
        assert (reply.mode, reply.pulls) == ("on", False)
