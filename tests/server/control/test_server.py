"""The control socket answers whatever comes, and outlives all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq

from turncache.errors import ConfigError, EngineFault
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import (
    MAX_MESSAGE_BYTES,
    Call,
    CallReply,
    Hello,
    HelloReply,
    ModeReply,
    Refusal,
    Reply,
    Request,
    SetMode,
    Stats,
    decode_reply,
    encode,
    open_envelope,
)
from turncache_server.control.server import ControlServer

Serve = Callable[[Callable[[Request], Reply]], ControlServer]


def echo(request: Request) -> Reply:
    """Answer a call question with its id as the reason."""
    match request:
        case Call():
            return CallReply(found=True, reason=request.request)
        case SetMode():
            return ModeReply(mode=request.mode)
        case _:
            raise LookupError(f"no answer for {type(request).__name__}")


class Raw:
    """A DEALER socket that sends frames as they are."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def receive(self) -> tuple[int, Reply]:
        assert self._socket.poll(5000), "no answer"
        number, body = open_envelope(self._socket.recv())
        return number, decode_reply(body)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def server(serve: Serve) -> ControlServer:
    """A server that echoes."""
    return serve(echo)


@pytest.fixture
def raw(server: ControlServer) -> Iterator[Raw]:
    """A socket to the server for frames of the test's choice."""
    socket = Raw(server.address)
    yield socket
    socket.close()


def still_answers(server: ControlServer, client: ControlClient) -> bool:
    """Whether an ordinary question is answered."""
    reply = client.ask(server.address, Call(request="alive"), CallReply, timeout_s=5)
    return reply.reason == "alive"


@pytest.mark.parametrize(
    ("data", "refused"),
    [
        pytest.param(b"", (0, "malformed"), id="empty"),
        pytest.param(b"\xff\xff\xff", (0, "malformed"), id="no-msgpack"),
        pytest.param(msgspec.msgpack.encode([1, 2]), (0, "malformed"), id="no-envelope"),
        pytest.param(
            msgspec.msgpack.encode({"v": 1, "id": 3, "body": {"type": "explode"}}),
            (3, "unsupported"),
            id="unknown-operation",
        ),
        pytest.param(
            msgspec.msgpack.encode({"v": 1, "id": 4, "body": {"type": "call", "request": 7}}),
            (4, "malformed"),
            id="wrong-member",
        ),
        pytest.param(
            msgspec.msgpack.encode({"v": 4, "id": 5, "body": {"type": "hello"}}),
            (5, "version"),
            id="other-version",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_number(
    data: bytes, refused: tuple[int, str], server: ControlServer, raw: Raw, client: ControlClient
) -> None:
    """The sender learns what was wrong, paired with its question; the server goes on."""
    raw.send(data)
    number, reply = raw.receive()
    assert isinstance(reply, Refusal)
    assert (number, reply.code) == refused
    assert server.dropped[reply.code] == 1
    assert still_answers(server, client)


def test_a_message_of_several_frames_is_dropped(
    server: ControlServer, raw: Raw, client: ControlClient
) -> None:
    """A message has one frame; anything else is counted and not answered."""
    raw.send(b"one", b"two")
    raw.send(encode(9, Call(request="after")))
    assert raw.receive() == (9, CallReply(found=True, reason="after"))
    assert server.dropped["malformed"] == 1
    assert still_answers(server, client)


def test_a_message_above_the_bound_is_refused_unread(
    server: ControlServer, raw: Raw, client: ControlClient
) -> None:
    """Its sender learns it and keeps its connection."""
    raw.send(bytes(MAX_MESSAGE_BYTES + 1))
    number, reply = raw.receive()
    assert isinstance(reply, Refusal)
    assert (number, reply.code) == (0, "too_large")
    assert server.dropped["too_large"] == 1
    assert still_answers(server, client)


def test_a_message_far_above_the_bound_costs_its_sender_the_connection_only(
    server: ControlServer, raw: Raw, client: ControlClient
) -> None:
    """ZMQ does not take it in at all; everybody else is served, its sender later too."""
    raw.send(bytes(2 * MAX_MESSAGE_BYTES))
    assert still_answers(server, client)
    again = Raw(server.address)
    again.send(encode(1, Call(request="again")))
    assert again.receive() == (1, CallReply(found=True, reason="again"))
    again.close()


def test_a_handler_that_raises_is_answered_with_a_refusal(
    server: ControlServer, client: ControlClient
) -> None:
    """One bad question must not end the thread that every peer depends on."""
    with pytest.raises(EngineFault, match=r"refused \(error\): LookupError: no answer for Stats"):
        client.ask(server.address, Stats(), ModeReply, timeout_s=5)
    assert server.dropped["error"] == 1
    assert still_answers(server, client)


def test_an_answer_that_is_too_large_is_refused(serve: Serve, client: ControlClient) -> None:
    """The asker gets a reason instead of a dropped connection."""
    server = serve(lambda _: CallReply(found=True, reason="x" * MAX_MESSAGE_BYTES))
    with pytest.raises(EngineFault, match="too_large"):
        client.ask(server.address, Call(request="r"), CallReply, timeout_s=5)


def test_a_port_that_is_taken_is_a_configuration_error(server: ControlServer) -> None:
    """The message names the address and the way out."""
    with pytest.raises(ConfigError, match=r"cannot listen on tcp://127.*choose a free port"):
        ControlServer(server.address, echo)


def test_closing_frees_the_port(serve: Serve, client: ControlClient) -> None:
    """An engine that restarts can bind the same address again."""
    first = serve(echo)
    assert still_answers(first, client)
    first.close()
    second = ControlServer(first.address, echo)
    second.start()
    assert still_answers(second, client)
    second.close()


def test_a_server_that_was_never_started_can_be_closed() -> None:
    """A connector whose engine fails to start leaves nothing behind."""
    server = ControlServer("tcp://127.0.0.1:0", echo)
    server.close()
    ControlServer(server.address, echo).close()


def test_hello_is_an_ordinary_question(serve: Serve, client: ControlClient) -> None:
    """The reply's members cross the socket unchanged."""
    reply = HelloReply(
        engine_id="e", start_id="s", generation=3, side="decode", mode="on", fingerprint={"a": "b"}
    )
    server = serve(lambda _: reply)
    assert client.ask(server.address, Hello(), HelloReply, timeout_s=5) == reply
