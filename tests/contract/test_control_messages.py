"""Control messages: golden maps, bounds, versions, and readers that refuse instead of failing."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.errors import ProtocolError
from turncache_server.control import messages as m

#: Every message, and the plain map that it is on the wire. A change here is a
#: change of the contract with engines that are already deployed.
GOLDEN: list[tuple[m.Request | m.Reply, dict[str, Any]]] = [
    (m.Hello(), {"type": "hello"}),
    (
        m.Peek(session="s", hashes=[b"\x01", b"\x02"]),
        {"type": "peek", "session": "s", "hashes": [b"\x01", b"\x02"]},
    ),
    (
        m.Verify(
            start_id="a", generation=2, block_ids=[7], epochs=[9], hashes=[b"\x01"], rest=(8, 11)
        ),
        {
            "type": "verify",
            "start_id": "a",
            "generation": 2,
            "block_ids": [7],
            "epochs": [9],
            "hashes": [b"\x01"],
            "rest": [8, 11],
        },
    ),
    (m.Call(request="r"), {"type": "call", "request": "r"}),
    (
        m.Signal(session="s", kind="wait", expect_s=2.5),
        {"type": "signal", "session": "s", "kind": "wait", "expect_s": 2.5},
    ),
    (
        m.SignalReply(accepted=True, clipped_s=3600.0, why=""),
        {"type": "signal_reply", "accepted": True, "clipped_s": 3600.0, "why": ""},
    ),
    (
        m.SetMode(mode="off", ticket="t:1"),
        {"type": "mode", "mode": "off", "ticket": "t:1"},
    ),
    (m.Stats(), {"type": "stats"}),
    (
        m.SetDraining(draining=True, ticket="t:1"),
        {"type": "drain", "draining": True, "ticket": "t:1"},
    ),
    (
        m.Sessions(limit=7, session="0a"),
        {"type": "sessions", "limit": 7, "session": "0a"},
    ),
    (
        m.SessionsReply(
            name="decode-0",
            side="decode",
            rows=[
                m.SessionRow(
                    session="0a", state="waiting", lineages=1, kept_blocks=3, expected_s=2.5
                )
            ],
            num_sessions=2,
            num_handovers=1,
            num_calls=4,
            block_size=16,
            draining=True,
        ),
        {
            "type": "sessions_reply",
            "name": "decode-0",
            "side": "decode",
            "rows": [
                {
                    "session": "0a",
                    "state": "waiting",
                    "lineages": 1,
                    "kept_blocks": 3,
                    "expected_s": 2.5,
                    "kept_s": None,
                }
            ],
            "num_sessions": 2,
            "num_handovers": 1,
            "num_calls": 4,
            "block_size": 16,
            "draining": True,
        },
    ),
    (
        m.HelloReply(
            name="decode-0",
            engine_id="decode-0",
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
        {
            "type": "hello_reply",
            "name": "decode-0",
            "engine_id": "decode-0",
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
    ),
    (
        m.PeekReply(
            start_id="a",
            generation=1,
            block_ids=[3],
            epochs=[5],
            known=2,
            rests=[m.RestBlock(block_id=4, epoch=6, num_tokens=15, key=b"\x02")],
        ),
        {
            "type": "peek_reply",
            "start_id": "a",
            "generation": 1,
            "block_ids": [3],
            "epochs": [5],
            "known": 2,
            "rests": [{"block_id": 4, "epoch": 6, "num_tokens": 15, "key": b"\x02"}],
        },
    ),
    (
        m.VerifyReply(start_id="a", generation=1, valid=1, rest=True),
        {"type": "verify_reply", "start_id": "a", "generation": 1, "valid": 1, "rest": True},
    ),
    (
        m.CallReply(
            found=True,
            done=True,
            prompt=10,
            local=2,
            returned=3,
            computed=5,
            lost=1,
            reason="evicted",
            at=4,
            pull_s=0.5,
        ),
        {
            "type": "call_reply",
            "found": True,
            "done": True,
            "prompt": 10,
            "local": 2,
            "returned": 3,
            "computed": 5,
            "lost": 1,
            "reason": "evicted",
            "at": 4,
            "pull_s": 0.5,
        },
    ),
    (
        m.ModeReply(mode="observe", why="", pulls=False, ticket="t:1", draining=True, start_id="s"),
        {
            "type": "mode_reply",
            "mode": "observe",
            "why": "",
            "pulls": False,
            "ticket": "t:1",
            "draining": True,
            "start_id": "s",
        },
    ),
    (
        m.StatsReply(counters={"calls": 1.0}, gauges={"blocks": 2.0}),
        {"type": "stats_reply", "counters": {"calls": 1.0}, "gauges": {"blocks": 2.0}},
    ),
    (m.Lacking(), {"type": "lacking"}),
    (
        m.Repeated(request="r", source="prefill-0"),
        {"type": "repeated", "request": "r", "source": "prefill-0"},
    ),
    (
        m.LackingReply(requests=["r"]),
        {"type": "lacking_reply", "requests": ["r"]},
    ),
    (
        m.Refusal(code="version", why="w"),
        {"type": "refusal", "code": "version", "why": "w"},
    ),
]
IDS = [type(message).__name__ for message, _ in GOLDEN]
QUESTIONS = get_args(m.Request)


def on_the_wire(v: int, number: int, body: object) -> bytes:
    """Encode an envelope as any other implementation would."""
    return msgspec.msgpack.encode({"v": v, "id": number, "body": body})


def decode(body: bytes, like: object) -> m.Request | m.Reply:
    """Decode a body as the side that receives this kind of message does."""
    return m.decode_request(body) if isinstance(like, QUESTIONS) else m.decode_reply(body)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=IDS)
def test_golden_maps(message: m.Request | m.Reply, golden: dict[str, Any]) -> None:
    """Each message is this map, in both directions."""
    sent = {"v": m.CONTROL_VERSION, "id": 7, "body": golden}
    assert msgspec.msgpack.decode(m.encode(7, message)) == sent
    assert msgspec.msgpack.decode(m.encode(7, message, to="e")) == {**sent, "to": "e"}
    number, body = m.open_envelope(on_the_wire(m.CONTROL_VERSION, 7, golden))
    assert number == 7
    assert decode(body, message) == message


def test_every_message_has_a_golden_map() -> None:
    """A message that is added gets a golden map too."""
    known = {type(message) for message, _ in GOLDEN}
    assert known == set(m.Request.__args__) | set(m.Reply.__args__)


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=IDS)
def test_a_newer_side_may_say_more(message: m.Request | m.Reply, golden: dict[str, Any]) -> None:
    """Unknown members are ignored, so that a member can be added without a new version."""
    newer = {**golden, "added_later": [1, {"deep": None}]}
    _, body = m.open_envelope(on_the_wire(1, 1, newer))
    assert decode(body, message) == message


@pytest.mark.parametrize(("message", "golden"), GOLDEN, ids=IDS)
def test_an_older_side_may_say_less(message: m.Request | m.Reply, golden: dict[str, Any]) -> None:
    """Members with a default may be missing."""
    info = msgspec.structs.fields(type(message))
    older = {k: v for k, v in golden.items() if k == "type"}
    older |= {f.name: golden[f.name] for f in info if f.required}
    _, body = m.open_envelope(on_the_wire(1, 1, older))
    assert isinstance(decode(body, message), type(message))


@pytest.mark.parametrize("version", [0, 4, 99, -1])
def test_other_versions_are_refused_before_the_body_is_read(version: int) -> None:
    """Both versions are named, and the question's number can still be answered."""
    data = on_the_wire(version, 41, {"type": "from the future", "shape": 3})
    with pytest.raises(ProtocolError, match=f"version {version}; this side speaks 2") as caught:
        m.open_envelope(data)
    assert caught.value.field == "version"
    assert m.question_number(data) == 41


JSON_LIKE = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)


@given(st.one_of(st.binary(max_size=64), JSON_LIKE.map(msgspec.msgpack.encode)))
def test_any_bytes_are_opened_or_refused(data: bytes) -> None:
    """Nothing on the socket makes a reader raise anything but ProtocolError."""
    try:
        _, body = m.open_envelope(data)
    except ProtocolError as error:
        field = error.field
    else:
        field = ""
        for read in (m.decode_request, m.decode_reply):
            _refuses_or_reads(read, body)
    assert field in ("", "malformed", "version", "too_large")
    assert isinstance(m.question_number(data), int)


@given(st.sampled_from([golden for _, golden in GOLDEN]), st.data())
def test_any_member_of_a_wrong_type_is_refused(golden: dict[str, Any], data: st.DataObject) -> None:
    """A message with one member replaced is read or refused, never half read."""
    name = data.draw(st.sampled_from(sorted(golden)))
    spoilt = {**golden, name: data.draw(JSON_LIKE)}
    body = msgspec.msgpack.encode(spoilt)
    for read in (m.decode_request, m.decode_reply):
        _refuses_or_reads(read, body)


def _refuses_or_reads(read: Any, body: bytes) -> None:
    try:
        read(body)
    except ProtocolError as error:
        code = error.field
        assert code in ("malformed", "too_large", "unsupported")


def test_questions_are_bounded() -> None:
    """More hashes than any prompt has, and lists of unequal length, are refused."""
    many = m.Peek(session="s", hashes=[b""] * (m.MAX_HASHES + 1))
    with pytest.raises(ProtocolError, match=f"at most {m.MAX_HASHES}"):
        m.decode_request(msgspec.msgpack.encode(many))
    uneven = m.Verify(start_id="", generation=1, block_ids=[1], epochs=[], hashes=[b"x"])
    with pytest.raises(ProtocolError, match="differ in length"):
        m.decode_request(msgspec.msgpack.encode(uneven))


def test_the_longest_questions_fit_one_message() -> None:
    """A peek and a verify of the most hashes that are allowed stay below the size bound."""
    n = m.MAX_HASHES
    hashes = [bytes(32)] * n
    m.encode(1, m.Peek(session="s" * 256, hashes=hashes))
    big = [2**40] * n
    m.encode(1, m.Verify(start_id="a", generation=1, block_ids=big, epochs=big, hashes=hashes))


def test_oversized_messages_are_refused_on_both_sides() -> None:
    """A message above the bound is neither sent nor read."""
    huge = m.Peek(session="s", hashes=[bytes(m.MAX_MESSAGE_BYTES)])
    with pytest.raises(ProtocolError, match="at most") as caught:
        m.encode(1, huge)
    assert caught.value.field == "too_large"
    data = on_the_wire(1, 5, {"type": "peek", "session": "s", "hashes": [bytes(9_000_000)]})
    with pytest.raises(ProtocolError, match="at most"):
        m.open_envelope(data)
    assert m.question_number(data) == 0
