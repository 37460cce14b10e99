"""Bodies are edited by splicing; the client's messages and tools stay byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from turncache.protocol import EngineHints
from turncache_server.router.apis.chat import CHAT
from turncache_server.router.body import Body, drop_members
from turncache_server.router.errors import ApiError
from turncache_server.router.legs import prefill_body, serving_body

PROPERTY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
HINTS = EngineHints(session="s", retain_s=0.0, source="decode-0", call="prefill", request="r")
SPACES = st.sampled_from(["", " ", "\n", "\t ", "\r\n  "])
OUTSIDERS = ("tc_source", "tc_x", "kv_transfer_params", "ec_transfer_params", "kv_hints")

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=5,
)
#: Texts whose value is the same under json.loads and whose bytes a re-serialiser changes.
ODD_TEXTS = (
    "1.50",
    "1E+2",
    "-0.0",
    "1" + "0" * 30,
    '"\\u00e9\\/"',
    '"é\U0001f642"',
    "[ 1 ,2\r\n]",
    '{ "b" :null, "a": [ ] }',
    '[{"role":"user","content":null},{"content":"","role":"assistant"}]',
)


@st.composite
def spellings(draw: st.DrawFn) -> str:
    """One of the many ways to write a JSON value: white space, escapes, number forms."""
    if draw(st.booleans()):
        return draw(st.sampled_from(ODD_TEXTS))
    style = draw(st.integers(0, 3))
    return json.dumps(
        draw(json_values),
        ensure_ascii=bool(style & 1),
        separators=(" ,\n", "\t:  ") if style & 2 else None,
    )


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, dict[str, str]]:
    """A body as clients may write it, and the text of each of its members."""
    names = draw(
        st.lists(
            st.sampled_from(["model", "stop", "naïve", 'q"uote', *OUTSIDERS])
            | st.text(min_size=1, max_size=4),
            unique=True,
            max_size=4,
        )
    )
    names = draw(st.permutations([*{*names, "messages", "tools"}]))
    members = {name: draw(spellings()) for name in names}
    space = draw(SPACES)
    inner = f"{space},{space}".join(
        f"{json.dumps(name)}{space}:{space}{text}" for name, text in members.items()
    )
    return f"{space}{{{space}{inner}{space}}}{space}".encode(), members


@PROPERTY
@given(bodies())
def test_messages_and_tools_keep_every_byte(case: tuple[bytes, dict[str, str]]) -> None:
    """Both legs contain the client's messages and tools exactly as they were written."""
    raw, members = case
    body = Body.parse(raw, max_depth=100)
    for leg in (prefill_body(CHAT, body, HINTS), serving_body(CHAT, body, HINTS)):
        for name in ("messages", "tools"):
            assert members[name].encode() in leg
            assert json.loads(leg)[name] == json.loads(members[name])


@PROPERTY
@given(bodies())
def test_only_our_members_change(case: tuple[bytes, dict[str, str]]) -> None:
    """The serving leg is the client's body, without what it must not say and with ours."""
    raw, _ = case
    sent = json.loads(raw)
    leg = json.loads(serving_body(CHAT, Body.parse(raw, max_depth=100), HINTS))
    assert leg.pop("session_id") == "s"
    assert leg.pop("vllm_xargs") == HINTS.to_xargs()
    kept = {
        name: value
        for name, value in sent.items()
        if not name.startswith("tc_")
        and name not in (*OUTSIDERS, "session_id", "vllm_xargs", "request_id")
    }
    carriers = {name: leg.pop(name, None) for name in ("extra_args", "extra_body")}
    assert leg == {name: value for name, value in kept.items() if name not in carriers}


@PROPERTY
@given(bodies())
def test_splicing_is_idempotent(case: tuple[bytes, dict[str, str]]) -> None:
    """A leg that passes a second router comes out as it went in."""
    raw, _ = case
    for make in (prefill_body, serving_body):
        once = make(CHAT, Body.parse(raw, max_depth=100), HINTS)
        assert make(CHAT, Body.parse(once, max_depth=100), HINTS) == once


@PROPERTY
@given(bodies(), st.data())
def test_a_name_that_occurs_twice_is_refused(
    case: tuple[bytes, dict[str, str]], data: st.DataObject
) -> None:
    """Whatever member is repeated, in whatever spelling, the body is refused."""
    raw, members = case
    name = data.draw(st.sampled_from(sorted(members)))
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in name)
    again = raw.decode().strip().removeprefix("{")
    with pytest.raises(ApiError, match="twice"):
        Body.parse(f'{{"{escaped}":1,{again}'.encode(), max_depth=100)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b'"text"',
        b"{",
        b'{"a"}',
        b'{"a":1,}',
        b'{"a":1}x',
        b'{"a":NaN}',
        b'{"a":-Infinity}',
        b'{"a":' + b"9" * 5000 + b"}",
        b'{"a":"\xff"}',
        b'\xef\xbb\xbf{"a":1}',
        '{"a":1}'.encode("utf-16"),
        b'{"a":{"b":1,"b":2}}',
        b'{"a":[{"b":1,"\\u0062":2}]}',
        b'{"a":' + b"[" * 101 + b"]" * 101 + b"}",
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b"{'a':1}",
        b'{"a":"line\nbreak"}',
    ],
)
def test_what_an_engine_might_read_differently_is_refused(raw: bytes) -> None:
    """A body that is no unambiguous JSON object is a 400 that says why."""
    with pytest.raises(ApiError) as caught:
        Body.parse(raw, max_depth=100)
    assert caught.value.status == 400
    assert len(caught.value.message) > 20


def test_depth_is_counted_with_the_outermost_object() -> None:
    """Nesting up to the limit passes, one level more does not."""
    raw = b'{"a":' + b"[" * 9 + b"]" * 9 + b"}"
    Body.parse(raw, max_depth=10)
    with pytest.raises(ApiError, match="deeper than 9"):
        Body.parse(raw, max_depth=9)


def test_the_clients_own_extra_arguments_stay() -> None:
    """Scalars in vllm_xargs that are not ours reach the engine, ours replace what they name."""
    raw = b'{"messages":[],"vllm_xargs":{"mine": 1.50, "tc_source":"evil","session_id":"x"}}'
    leg = serving_body(CHAT, Body.parse(raw, max_depth=10), HINTS)
    xargs = json.loads(leg)["vllm_xargs"]
    assert xargs == {"mine": 1.5, **HINTS.to_xargs()}
    assert b'"mine": 1.50' in leg


@pytest.mark.parametrize("name", [*OUTSIDERS, "session_id", "tc_retain_s"])
@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda inner: inner, id="top"),
        pytest.param(lambda inner: {"extra_args": inner}, id="extra_args"),
        pytest.param(lambda inner: {"extra_body": inner}, id="extra_body"),
        pytest.param(lambda inner: {"vllm_xargs": inner}, id="vllm_xargs"),
        pytest.param(lambda inner: {"extra_body": {"vllm_xargs": inner}}, id="nested"),
        pytest.param(
            lambda inner: {"vllm_xargs": {"extra_args": {"extra_body": inner}}}, id="deep"
        ),
    ],
)
def test_what_steers_engines_never_comes_from_outside(name: str, wrap: Any) -> None:
    """A member that steers an engine is removed wherever an engine or a plug-in might look."""
    raw = json.dumps({"messages": [], **wrap({name: "evil", "kept": 1})}).encode()
    for make in (prefill_body, serving_body):
        leg = make(CHAT, Body.parse(raw, max_depth=10), HINTS)
        assert b"evil" not in leg
        assert b'"kept": 1' in leg


@PROPERTY
@given(bodies())
def test_dropping_members_touches_nothing_else(case: tuple[bytes, dict[str, str]]) -> None:
    """An answer without the members is passed as it is, one with them loses only them.

    One that is null says nothing and may stay.
    """
    raw, members = case
    names = ("kv_transfer_params", "ec_transfer_params")
    kept = drop_members(raw, names)
    if all(json.loads(members.get(name, "null")) is None for name in names):
        assert kept is raw
    else:
        left = {k: v for k, v in json.loads(raw).items() if k not in names or v is None}
        assert json.loads(kept) == left
        assert members["messages"].encode() in kept


@pytest.mark.parametrize("raw", [b"", b"no json", b"[1]", b"\xff", b'{"a":1'])
def test_dropping_members_leaves_what_it_cannot_read(raw: bytes) -> None:
    """An answer that is no JSON object is passed as it is."""
    assert drop_members(raw, ("a",)) is raw
