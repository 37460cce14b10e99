"""Control messages of the version before, of this one and of the next, byte for byte.

The bytes are recorded: a change that breaks one of them breaks a fleet that is being updated
engine by engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from turncache.errors import EngineRefusal, ProtocolError
from turncache_server.control import messages as m
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.server import ControlServer

#: Questions as version 1 sends them, and what is understood.
VERSION_1: list[tuple[str, m.Request]] = [
    ("83a17601a2696407a4626f647981a474797065a568656c6c6f", m.Hello()),
]


def wire(v: int, body: dict[str, Any], **more: Any) -> bytes:
    """Encode an envelope as any implementation would."""
    return msgspec.msgpack.encode({"v": v, "id": 7, **more, "body": body})


#: One message of each kind as version 1 knows it. Its members may be added to, never changed.
OLD: list[tuple[dict[str, Any], m.Request | m.Reply]] = [
    ({"type": "hello"}, m.Hello()),
    (
        {"type": "peek", "session": "s", "hashes": [b"\x01"]},
        m.Peek(session="s", hashes=[b"\x01"]),
    ),
    (
        {
            "type": "verify",
            "start_id": "a",
            "generation": 2,
            "block_ids": [7],
            "epochs": [9],
            "hashes": [b"\x01"],
        },
        m.Verify(start_id="a", generation=2, block_ids=[7], epochs=[9], hashes=[b"\x01"]),
    ),
    ({"type": "call", "request": "r"}, m.Call(request="r")),
    ({"type": "mode", "mode": "off"}, m.SetMode(mode="off")),
    ({"type": "stats"}, m.Stats()),
    (
        {
            "type": "hello_reply",
            "engine_id": "x",
            "start_id": "a",
            "generation": 1,
            "side": "decode",
            "mode": "on",
            "fingerprint": {"vllm": "0.32.0"},
            "nixl_host": "127.0.0.1",
            "nixl_port": 5600,
            "tp_size": 2,
            "block_size": 16,
            "num_blocks": 100,
            "max_model_len": 2048,
            "vllm_version": "0.32.0",
            "missing": ["x"],
        },
        m.HelloReply(
            engine_id="x",
            start_id="a",
            generation=1,
            side="decode",
            mode="on",
            fingerprint={"vllm": "0.32.0"},
            nixl_host="127.0.0.1",
            nixl_port=5600,
            tp_size=2,
            block_size=16,
            num_blocks=100,
            max_model_len=2048,
            vllm_version="0.32.0",
            missing=["x"],
        ),
    ),
    (
        {
            "type": "peek_reply",
            "start_id": "a",
            "generation": 1,
            "block_ids": [3],
            "epochs": [5],
            "known": 2,
        },
        m.PeekReply(start_id="a", generation=1, block_ids=[3], epochs=[5], known=2),
    ),
    (
        {"type": "verify_reply", "start_id": "a", "generation": 1, "valid": 1},
        m.VerifyReply(start_id="a", generation=1, valid=1),
    ),
    ({"type": "call_reply", "found": True, "prompt": 10}, m.CallReply(found=True, prompt=10)),
    ({"type": "mode_reply", "mode": "on", "why": ""}, m.ModeReply(mode="on")),
    (
        {"type": "stats_reply", "counters": {"calls": 1.0}, "gauges": {}},
        m.StatsReply(counters={"calls": 1.0}, gauges={}),
    ),
    ({"type": "refusal", "code": "version", "why": "w"}, m.Refusal(code="version", why="w")),
]
IDS = [body["type"] for body, _ in OLD]
IS_QUESTION = {"hello", "peek", "verify", "call", "mode", "stats"}


def read(data: bytes) -> m.Request | m.Reply:
    """Read a message as this version does."""
    envelope = m.read_envelope(data)
    kind = msgspec.msgpack.decode(envelope.body)["type"]
    if kind in IS_QUESTION:
        return m.decode_request(envelope.body, version=envelope.v)
    return m.decode_reply(envelope.body)


def test_these_are_the_bytes_of_this_version() -> None:
    """Recorded: the envelope of a question and of an answer, to the byte."""
    asked = m.encode(7, m.Call(request="r"), to="e")
    assert asked.hex() == (
        "84a17602a2696407a2746fa165a4626f647982a474797065a463616c6ca772657175657374a172"
    )
    answered = m.encode(7, m.ModeReply(mode="on", why="", ticket="t"))
    assert msgspec.msgpack.decode(answered)["v"] == 2
    assert m.encode(7, m.Hello(), version=1).hex() == VERSION_1[0][0]


@pytest.mark.parametrize(("data", "message"), VERSION_1, ids=["hello"])
def test_recorded_bytes_of_version_1_are_read(data: str, message: m.Request) -> None:
    """As an engine sent them that has not been updated yet."""
    assert read(bytes.fromhex(data)) == message


#: Messages as they were sent before rests were named, and as they are sent now.
RESTS: list[tuple[str, m.Request | m.Reply, str, m.Request | m.Reply]] = [
    (
        (
            "83a17602a2696407a4626f647986a474797065a6766572696679a873746172745f6964a161aa67656e65"
            "726174696f6e02a9626c6f636b5f6964739107a665706f6368739109a668617368657391c40101"
        ),
        m.Verify(start_id="a", generation=2, block_ids=[7], epochs=[9], hashes=[b"\x01"]),
        (
            "83a17602a2696407a4626f647987a474797065a6766572696679a873746172745f6964a161aa67656e65"
            "726174696f6e02a9626c6f636b5f6964739107a665706f6368739109a668617368657391c40101a47265"
            "737492080b"
        ),
        m.Verify(
            start_id="a", generation=2, block_ids=[7], epochs=[9], hashes=[b"\x01"], rest=(8, 11)
        ),
    ),
    (
        (
            "83a17602a2696407a4626f647986a474797065aa7065656b5f7265706c79a873746172745f6964a161aa"
            "67656e65726174696f6e01a9626c6f636b5f6964739103a665706f6368739105a56b6e6f776e02"
        ),
        m.PeekReply(start_id="a", generation=1, block_ids=[3], epochs=[5], known=2),
        (
            "83a17602a2696407a4626f647987a474797065aa7065656b5f7265706c79a873746172745f6964a161aa"
            "67656e65726174696f6e01a9626c6f636b5f6964739103a665706f6368739105a56b6e6f776e02a57265"
            "7374739184a8626c6f636b5f696404a565706f636806aa6e756d5f746f6b656e730fa36b6579c40102"
        ),
        m.PeekReply(
            start_id="a",
            generation=1,
            block_ids=[3],
            epochs=[5],
            known=2,
            rests=[m.RestBlock(block_id=4, epoch=6, num_tokens=15, key=b"\x02")],
        ),
    ),
    (
        (
            "83a17602a2696407a4626f647984a474797065ac7665726966795f7265706c79a873746172745f6964a1"
            "61aa67656e65726174696f6e01a576616c696401"
        ),
        m.VerifyReply(start_id="a", generation=1, valid=1),
        (
            "83a17602a2696407a4626f647985a474797065ac7665726966795f7265706c79a873746172745f6964a1"
            "61aa67656e65726174696f6e01a576616c696401a472657374c3"
        ),
        m.VerifyReply(start_id="a", generation=1, valid=1, rest=True),
    ),
]


@pytest.mark.parametrize(
    ("before", "without", "now", "with_rest"), RESTS, ids=["verify", "peek_reply", "verify_reply"]
)
def test_recorded_bytes_with_and_without_rests_are_read(
    before: str, without: m.Request | m.Reply, now: str, with_rest: m.Request | m.Reply
) -> None:
    """An engine that names none has none; ours are sent to the byte."""
    assert read(bytes.fromhex(before)) == without
    assert read(bytes.fromhex(now)) == with_rest
    assert m.encode(7, with_rest).hex() == now


@pytest.mark.parametrize(("body", "message"), OLD, ids=IDS)
def test_the_version_before_is_understood(
    body: dict[str, Any], message: m.Request | m.Reply
) -> None:
    """What it does not say has a default."""
    assert read(wire(1, body)) == message


@pytest.mark.parametrize(("body", "message"), OLD, ids=IDS)
def test_the_version_before_understands_us(
    body: dict[str, Any], message: m.Request | m.Reply
) -> None:
    """Every member that it knows is there, unchanged; it ignores the others."""
    sent = msgspec.msgpack.decode(m.encode(7, message, version=1))
    assert (sent["v"], sent["id"]) == (1, 7)
    assert body.items() <= sent["body"].items()


@pytest.mark.parametrize(("body", "message"), OLD, ids=IDS)
def test_the_next_version_is_understood(body: dict[str, Any], message: m.Request | m.Reply) -> None:
    """It may say more, in the message and around it."""
    if isinstance(message, m.SetMode):
        body, message = {**body, "ticket": "t"}, m.SetMode(mode="off", ticket="t")
    later = wire(3, {**body, "later": [1, {"deep": None}]}, to="e", later={"x": 1})
    assert read(later) == message


def test_a_question_that_only_the_next_version_knows_is_named() -> None:
    """It is refused as unsupported, which its asker can act upon; it is not broken."""
    with pytest.raises(ProtocolError, match="unknown message 'prefetch'") as caught:
        m.decode_request(m.read_envelope(wire(3, {"type": "prefetch", "x": 1})).body, version=3)
    assert caught.value.field == "unsupported"


@pytest.mark.parametrize("version", [0, 4])
def test_two_versions_apart_is_refused_by_name(version: int) -> None:
    """Both versions are in the message, with what to do."""
    with pytest.raises(ProtocolError, match=f"control version {version}.*1 to 3.*update") as caught:
        m.read_envelope(wire(version, {"type": "hello"}))
    assert caught.value.field == "version"


def answer(request: m.Request) -> m.Reply:
    """Answer as an engine."""
    if isinstance(request, m.SetMode):
        return m.ModeReply(mode=request.mode or "on", ticket="t")
    return m.CallReply(found=True)


@pytest.fixture
def server() -> Iterator[ControlServer]:
    """An engine of this version."""
    server = ControlServer("tcp://127.0.0.1:0", answer)
    server.start()
    yield server
    server.close()


def exchange(server: ControlServer, data: bytes) -> dict[str, Any]:
    """Send bytes and return the answer's map."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(server.address)
        socket.send(data)
        assert socket.poll(5000), "no answer"
        reply: dict[str, Any] = msgspec.msgpack.decode(socket.recv())
        return reply


@pytest.mark.parametrize(("asked", "answered"), [(1, 1), (2, 2), (3, 2)])
def test_an_engine_answers_its_neighbours(asked: int, answered: int, server: ControlServer) -> None:
    """In the older of the two versions."""
    reply = exchange(server, wire(asked, {"type": "call", "request": "r"}))
    assert (reply["v"], reply["id"], reply["body"]["type"]) == (answered, 7, "call_reply")
    assert server.dropped["version"] == 0


def test_an_engine_refuses_and_counts_what_is_further_away(server: ControlServer) -> None:
    """The refusal carries the question's number and the reason."""
    reply = exchange(server, wire(4, {"type": "call", "request": "r"}))
    assert (reply["id"], reply["body"]["code"]) == (7, "version")
    assert server.dropped["version"] == 1


@pytest.mark.parametrize("version", [1, 3])
def test_a_client_reads_answers_of_its_neighbours(version: int) -> None:
    """Old and new engines are switched and read by one command line."""
    with _engine_of(version) as address, contextlib.closing(ControlClient()) as client:
        assert switch_mode(client, address, "off", timeout_s=5).mode == "off"


def test_a_client_says_when_an_engine_is_too_far_away() -> None:
    """Not a silent deadline."""
    with _engine_of(4) as address, contextlib.closing(ControlClient()) as client:
        with pytest.raises(EngineRefusal, match="control version 4") as caught:
            client.ask(address, m.Call(request="r"), m.CallReply, timeout_s=30)
        assert caught.value.code == "version"


@contextlib.contextmanager
def _engine_of(version: int) -> Iterator[str]:
    """Answer questions for a mode in another version, from a thread."""
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if not socket.poll(20):
                continue
            sender, data = socket.recv_multipart()
            asked = msgspec.msgpack.decode(data)
            body = {"type": "mode_reply", "mode": asked["body"].get("mode") or "on"}
            if version > 2:
                body["ticket"] = "t"
            answer = {"v": version, "id": asked["id"], "body": body}
            socket.send_multipart([sender, msgspec.msgpack.encode(answer)])

    thread = threading.Thread(target=run)
    thread.start()
    yield f"tcp://127.0.0.1:{port}"
    stop.set()
    thread.join()
    context.destroy(linger=0)
