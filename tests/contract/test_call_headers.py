"""Request and answer headers: round trips, versions, bounds and golden values."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.errors import ProtocolError
from turncache.protocol import (
    ANY_TOOL,
    MAX_TOOLS,
    MAX_TOOLS_BYTES,
    CallTags,
    Cause,
    Identity,
    Outcome,
    Plan,
    Reason,
    SessionSource,
    format_tools,
    identify,
    parse_tools,
    tags_from_headers,
)

IDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=256)
SECONDS = st.integers(0, 10**9).map(lambda milliseconds: milliseconds / 1000)
TOOLS = st.dictionaries(st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True), SECONDS, max_size=9)
TAGS = st.builds(
    CallTags,
    session_id=IDS,
    parent_id=st.none() | IDS,
    final=st.booleans(),
    turn=st.none() | st.integers(1, 10**6),
    call=st.none() | st.integers(1, 10**6),
    cause=st.none() | st.sampled_from(Cause),
    retain_s=st.none() | SECONDS,
    priority=st.integers(0, 100),
    tools=TOOLS,
)


def lower(headers: dict[str, str]) -> dict[str, str]:
    """Return headers as a server sees them: with lower-case names."""
    return {name.lower(): value for name, value in headers.items()}


@given(TAGS)
def test_call_tags_survive_a_round_trip(tags: CallTags) -> None:
    """What a client says about a call is what the server reads, through the session's header."""
    headers = lower(tags.to_headers())
    identity = identify(headers, {})
    assert identity == Identity(
        session_id=tags.session_id,
        source=SessionSource.SESSION_HEADER,
        parent_id=tags.parent_id,
    )
    read = tags_from_headers(headers, identity)
    assert read == tags


def test_golden_request_headers() -> None:
    """The bytes of version 1 do not change under a client that is already deployed."""
    tags = CallTags(
        session_id="ticket-4711",
        parent_id="root",
        final=True,
        turn=3,
        call=2,
        cause=Cause.TOOL,
        retain_s=90.0,
        priority=70,
        tools={"search": 2.1, "*": 9.0, "run_tests": 74.0},
    )
    assert tags.to_headers() == {
        "X-Session-ID": "ticket-4711",
        "X-Parent-Session-ID": "root",
        "X-Session-Final": "true",
        "Turncache": "v=1, turn=3, call=2, cause=tool, retain=90.0, priority=70",
        "Turncache-Tools": "*=9.0, search=2.1, run_tests=74.0",
    }
    assert CallTags(session_id="s").to_headers() == {
        "X-Session-ID": "s",
        "Turncache": "v=1, retain=auto, priority=50",
    }


def test_golden_outcome_header() -> None:
    """The outcome of version 1 is read by clients that are already deployed."""
    outcome = Outcome(
        prompt=4171, local=32, returned=3968, computed=171, plan=Plan.RETURN, reason=Reason.OK
    )
    text = "prompt=4171, local=32, returned=3968, computed=171, lost=0, plan=return, reason=ok"
    assert outcome.to_header() == text
    assert Outcome.from_header(text) == outcome


@pytest.mark.parametrize("version", ["v=3", "v=0", "v=1.0", 'v="1"', "v", "turn=1"])
def test_other_versions_are_refused(version: str) -> None:
    """A call header two versions away, or of none, is refused with both versions named."""
    identity = Identity(session_id="s", source=SessionSource.SESSION_HEADER)
    with pytest.raises(ProtocolError, match="this side speaks 1"):
        tags_from_headers({"turncache": version}, identity)


def test_unknown_members_are_ignored() -> None:
    """A newer client of the same version may say more than this side understands."""
    identity = Identity(session_id="s", source=SessionSource.SESSION_HEADER)
    read = tags_from_headers({"turncache": 'v=1, turn=2, mood="new";x=1'}, identity)
    assert read == CallTags(session_id="s", turn=2)


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"turncache": "v=1, turn=0"}, "turn=0"),
        ({"turncache": "v=1, turn"}, "turn=True"),
        ({"turncache": "v=1, call=1.5"}, "call=1.5"),
        ({"turncache": "v=1, cause=whim"}, "expected one of user, tool, fork"),
        ({"turncache": "v=1, retain=-1"}, "retain=-1"),
        ({"turncache": "v=1, retain=soon"}, "expected auto or seconds"),
        ({"turncache": "v=1, priority=101"}, "from 0 to 100"),
        ({"turncache": "v=1, priority"}, "priority=True"),
        ({"x-session-final": "maybe"}, "expected true or false"),
        ({"turncache-tools": "a=-1"}, "expected seconds from 0"),
        ({"turncache-tools": "a=fast"}, "expected seconds from 0"),
        ({"turncache-tools": "a=1," * 200 + "b=1"}, "at most 512"),
        ({"turncache-tools": ",".join(f"t{i}=1" for i in range(17))}, "at most 16"),
    ],
)
def test_illegal_members_are_refused(headers: dict[str, str], what: str) -> None:
    """A member of the wrong type or range is refused, with the value and the legal ones."""
    identity = Identity(session_id="s", source=SessionSource.SESSION_HEADER)
    with pytest.raises(ProtocolError) as caught:
        tags_from_headers(headers, identity)
    assert what in str(caught.value)


@given(
    st.dictionaries(
        st.text(max_size=12) | st.from_regex(r"[a-z_]{1,40}", fullmatch=True) | st.just(ANY_TOOL),
        st.floats(),
        max_size=40,
    )
)
def test_any_tool_durations_fit_the_header(durations_s: dict[str, float]) -> None:
    """Whatever was measured, the header stays in its bounds and keeps the catch-all row."""
    text = format_tools(durations_s)
    assert len(text) <= MAX_TOOLS_BYTES
    rows = parse_tools(text)
    assert len(rows) <= MAX_TOOLS
    for name, seconds in rows.items():
        assert abs(seconds - durations_s[name]) <= 0.000501
    if 0 <= durations_s.get(ANY_TOOL, -1.0) <= 10**9:
        assert ANY_TOOL in rows


COUNTS = st.integers(0, 10**6)


@given(
    local=COUNTS,
    returned=COUNTS,
    computed=COUNTS,
    lost=COUNTS,
    plan=st.none() | st.sampled_from(Plan),
    reason=st.sampled_from(Reason),
    at=st.none() | COUNTS,
)
def test_outcomes_survive_a_round_trip(
    local: int, returned: int, computed: int, **rest: Any
) -> None:
    """An outcome is read as it was sent."""
    rest["lost"] = min(rest["lost"], computed)
    outcome = Outcome(
        prompt=local + returned + computed,
        local=local,
        returned=returned,
        computed=computed,
        **rest,
    )
    assert Outcome.from_header(outcome.to_header()) == outcome


@given(st.tuples(*[st.integers(-5, 20)] * 5))
def test_counts_that_do_not_add_up_are_no_outcome(counts: tuple[int, int, int, int, int]) -> None:
    """Prompt is local, returned and computed, and no more is lost than was computed."""
    prompt, local, returned, computed, lost = counts
    legal = min(counts) >= 0 and local + returned + computed == prompt and lost <= computed

    def build() -> Outcome:
        return Outcome(prompt=prompt, local=local, returned=returned, computed=computed, lost=lost)

    if legal:
        assert build().reused == local + returned
    else:
        with pytest.raises(ProtocolError, match="Turncache-Outcome"):
            build()


def test_words_of_a_newer_server_are_still_an_answer() -> None:
    """An unknown plan is left out, an unknown reason reads as an error; the counts hold."""
    read = Outcome.from_header(
        "prompt=3, local=1, returned=1, computed=1, lost=0, plan=teleport, reason=eclipse, new=1"
    )
    assert (read.reused, read.plan, read.reason) == (2, None, Reason.ERROR)


@pytest.mark.parametrize("text", ["", "prompt=1", "prompt=?1, local=1, returned=0, computed=0"])
def test_an_outcome_without_its_counts_is_refused(text: str) -> None:
    """A missing or wrongly typed count is refused."""
    with pytest.raises(ProtocolError, match="expected a whole number"):
        Outcome.from_header(text)


def test_schemas_are_never_mixed() -> None:
    """The first schema that is present gives the id and the parent; others are not consulted."""
    headers = {
        "x-dynamo-session-id": "dynamo",
        "x-parent-session-id": "of-another-schema",
        "x-session-affinity": "later",
    }
    body = {"session_id": "body"}
    identity = identify(headers, body)
    assert identity == Identity(session_id="dynamo", source=SessionSource.DYNAMO_HEADER)
    assert identify({}, body) == Identity(session_id="body", source=SessionSource.BODY_SESSION)
    assert identify({}, {"session_id": 7, "prompt_cache_key": "key"}) == Identity(
        session_id="key", source=SessionSource.BODY_CACHE_KEY
    )
    assert identify({}, {}) is None


def test_a_header_of_the_operators_own_comes_first() -> None:
    """Whole, like any other schema; where it is missing or not set nothing changes."""
    headers = {"x-session-id": "s", "x-parent-session-id": "p", "x-thread": "t"}
    assert identify(headers, {}, own_header="x-thread") == Identity(
        session_id="t", source=SessionSource.OWN_HEADER
    )
    assert identify(headers, {}, own_header="x-missing") == identify(headers, {})
    with pytest.raises(ProtocolError, match="x-thread"):
        identify({"x-thread": "a b"}, {}, own_header="x-thread")


def test_sub_agents_of_claude_code_are_sessions_of_their_own() -> None:
    """They share a session id; the agent id tells them apart, and the session is the parent."""
    headers = {"x-claude-code-session-id": "main", "x-claude-code-agent-id": "a1"}
    assert identify(headers, {}) == Identity(
        session_id="main/a1", source=SessionSource.CLAUDE_CODE, parent_id="main"
    )


def test_threads_of_codex_are_sessions_of_their_own() -> None:
    """A spawned thread shares the session's id and is its child; the first one is the session."""
    headers = {"session-id": "main", "thread-id": "main", "x-codex-window-id": "main:0"}
    assert identify(headers, {}) == Identity(session_id="main", source=SessionSource.CODEX)
    assert identify({**headers, "thread-id": "t2"}, {}) == Identity(
        session_id="main/t2", source=SessionSource.CODEX, parent_id="main"
    )


def test_the_older_header_of_codex_is_known() -> None:
    """Versions before the hyphen send ``session_id``; where both are sent the newer counts."""
    older = {"session_id": "old", "conversation_id": "old"}
    wanted = Identity(session_id="old", source=SessionSource.CODEX)
    assert identify(older, {"prompt_cache_key": "key"}) == wanted
    assert identify({**older, "session-id": "new"}, {}) == Identity(
        session_id="new", source=SessionSource.CODEX
    )


@pytest.mark.parametrize(
    ("user_id", "found"),
    [
        ("user_ab_account__session_7f0c1de2-8a3b-4c5d-9e6f-0123456789ab", True),
        ('{"device_id":"d","session_id":"7f0c1de2-8a3b-4c5d-9e6f-0123456789ab"}', True),
        ("user-4711", False),
        ("user_ab_account__session_", False),
        (7, False),
        (None, False),
    ],
)
def test_a_user_id_is_a_session_only_where_it_says_so(user_id: object, found: bool) -> None:
    """Claude Code puts its session into metadata.user_id; other user ids name users."""
    identity = identify({}, {"metadata": {"user_id": user_id}})
    wanted = Identity(
        session_id="7f0c1de2-8a3b-4c5d-9e6f-0123456789ab", source=SessionSource.BODY_USER_ID
    )
    assert identity == (wanted if found else None)
    assert identify({}, {"metadata": user_id}) is None


@given(
    st.dictionaries(
        st.sampled_from([s.value for s in SessionSource] + ["x-parent-session-id"]),
        st.text(max_size=300),
        max_size=4,
    ),
    st.dictionaries(
        st.sampled_from([s.value for s in SessionSource]),
        st.one_of(st.none(), st.integers(), st.text(max_size=300), st.lists(st.text())),
        max_size=4,
    ),
)
def test_any_request_has_an_identity_none_or_is_refused(
    headers: dict[str, str], body: dict[str, Any]
) -> None:
    """Nothing that a client sends makes identification raise anything but ProtocolError."""
    try:
        identity = identify(headers, body)
    except ProtocolError:
        return
    assert identity is None or 0 < len(identity.session_id) <= 256
