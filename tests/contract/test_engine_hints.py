"""What the router tells an engine: round trips, trust, and a reader that never fails."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turncache.protocol import (
    MAX_RETAIN_S,
    STRIPPED_BODY_MEMBERS,
    EngineHints,
    members_from_outside,
)

IDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256)
SECONDS = st.floats(0, MAX_RETAIN_S)
HINTS = st.builds(
    EngineHints,
    session=IDS,
    parent=st.none() | IDS,
    tenant=st.none() | IDS,
    retain_s=st.none() | SECONDS,
    expect_s=st.none() | SECONDS,
    priority=st.integers(0, 100),
    source=st.none() | IDS,
    handover=st.booleans(),
    call=st.none() | st.sampled_from(["prefill", "decode", "single"]),
    request=st.none() | IDS,
    final=st.booleans(),
    compaction=st.booleans(),
    also=st.lists(IDS, max_size=2).map(tuple),
    repeat_s=st.none() | SECONDS,
    repeat_above=st.integers(0, 1 << 20),
)
NAMES = [
    "v", "session", "parent", "tenant", "retain_s", "expect_s", "priority", "source",
    "handover", "call", "request", "final", "compaction", "also", "repeat_s", "repeat_above",
    "unknown",
]  # fmt: skip
ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**400),
    st.floats(),
    st.text(max_size=300),
    st.lists(st.integers(), max_size=3),
    IDS,
)


@given(HINTS)
def test_hints_survive_a_round_trip(hints: EngineHints) -> None:
    """An engine behind our router reads what the router said."""
    xargs = hints.to_xargs()
    assert EngineHints.from_xargs(xargs, trusted=True) == hints
    assert all(isinstance(value, (str, int, float)) for value in xargs.values()), "flat scalars"


def test_golden_hints() -> None:
    """The members of version 1 do not change under an engine that is already deployed."""
    hints = EngineHints(
        session="t1:s",
        retain_s=120.0,
        source="decode-0",
        handover=True,
        call="prefill",
        request="r-1",
    )
    assert hints.to_xargs() == {
        "tc_v": 1,
        "tc_session": "t1:s",
        "tc_retain_s": 120.0,
        "tc_source": "decode-0",
        "tc_call": "prefill",
        "tc_request": "r-1",
        "tc_handover": 1,
    }
    decode = EngineHints(
        session="t1:s",
        source="prefill-0",
        call="decode",
        request="r-1",
        repeat_s=30.0,
        repeat_above=512,
    )
    assert decode.to_xargs() == {
        "tc_v": 1,
        "tc_session": "t1:s",
        "tc_source": "prefill-0",
        "tc_call": "decode",
        "tc_request": "r-1",
        "tc_repeat_s": 30.0,
        "tc_repeat_above": 512,
    }


@given(HINTS)
def test_strangers_steer_nothing_but_their_own_retention(hints: EngineHints) -> None:
    """Without trust, or two versions away, only the session and its retention are read."""
    only = EngineHints(session=hints.session, retain_s=hints.retain_s)
    assert EngineHints.from_xargs(hints.to_xargs(), trusted=False) == only
    for version in (0, 3, "1", None):
        newer = {**hints.to_xargs(), "tc_v": version}
        assert EngineHints.from_xargs(newer, trusted=True) == only


@given(HINTS)
def test_a_router_of_the_next_version_is_understood(hints: EngineHints) -> None:
    """Engines are updated after it: prompts are still handed over, sessions still returned."""
    newer = {**hints.to_xargs(), "tc_v": 2, "tc_mood": "new"}
    assert EngineHints.from_xargs(newer, trusted=True) == hints


@given(st.dictionaries(st.sampled_from([f"tc_{name}" for name in NAMES]), ANYTHING), st.booleans())
@example({"tc_session": "s", "tc_retain_s": 10**400}, False)
@example({"tc_session": "s", "tc_v": 1, "tc_expect_s": 10**400}, True)
def test_no_arguments_make_an_engine_fail(xargs: dict[str, Any], trusted: bool) -> None:
    """Whatever a client puts there is read in bounds, or ignored; nothing is raised."""
    hints = EngineHints.from_xargs(xargs, trusted=trusted)
    if hints is None:
        return
    assert 0 < len(hints.session) <= 256
    assert hints.retain_s is None or 0 <= hints.retain_s <= MAX_RETAIN_S
    assert hints.expect_s is None or 0 <= hints.expect_s <= MAX_RETAIN_S
    assert type(hints.priority) is int
    assert len(hints.also) <= 2
    assert all(0 < len(engine) <= 256 and " " not in engine for engine in hints.also)
    assert 0 <= hints.priority <= 100


def test_members_that_steer_an_engine_are_named() -> None:
    """Everything of ours, vLLM's carriers of KV and the session id are kept from clients."""
    sent = ["temperature", "tc_source", "session_id", *STRIPPED_BODY_MEMBERS, "top_k"]
    assert list(members_from_outside(sent)) == ["tc_source", "session_id", *STRIPPED_BODY_MEMBERS]


@pytest.mark.parametrize("session", [None, "", "a b", "é", "x" * 257, 7, ["s"]])
def test_without_a_legal_session_there_are_no_hints(session: object) -> None:
    """A missing or illegal session makes the request an ordinary one."""
    assert EngineHints.from_xargs({"tc_v": 1, "tc_session": session}, trusted=True) is None
