"""Headers and hints of this version and of the next, to the byte, in both directions.

The texts are recorded: a change that breaks one of them breaks clients, routers and engines that
are updated one after the other. (Control messages: ``test_control_versions.py``.)
"""

from __future__ import annotations

import pytest

from turncache.protocol import (
    PROTOCOL_VERSION,
    SPOKEN_VERSIONS,
    CallTags,
    Cause,
    EngineHints,
    Outcome,
    Plan,
    Reason,
    identify,
    tags_from_headers,
)

#: What a client of version 1 sends, and what is understood.
REQUEST_1 = {
    "x-session-id": "ticket-4711",
    "x-parent-session-id": "root",
    "x-session-final": "true",
    "turncache": "v=1, turn=3, call=2, cause=tool, retain=90.0, priority=70",
    "turncache-tools": "*=9.0, search=2.1",
}
READ_1 = CallTags(
    session_id="ticket-4711",
    parent_id="root",
    final=True,
    turn=3,
    call=2,
    cause=Cause.TOOL,
    retain_s=90.0,
    priority=70,
    tools={"*": 9.0, "search": 2.1},
)
#: Likewise what a router of version 1 tells a client and an engine.
OUTCOME_1 = (
    "prompt=4171, local=32, returned=3968, computed=171, lost=5, plan=return, reason=diverged, "
    "at=4000"
)
HINTS_1 = {
    "tc_v": 1,
    "tc_session": "t1:s",
    "tc_parent": "t1:p",
    "tc_tenant": "t1",
    "tc_retain_s": 120.0,
    "tc_expect_s": 9.5,
    "tc_priority": 70,
    "tc_source": "decode-0",
    "tc_call": "prefill",
    "tc_request": "r-1",
    "tc_handover": 1,
    "tc_final": 1,
    "tc_compaction": 1,
    "tc_stock": 1,
}


def read(headers: dict[str, str]) -> CallTags:
    """Read a request's headers as the router does."""
    identity = identify(headers, {})
    assert identity is not None
    return tags_from_headers(headers, identity)


def test_this_version_has_the_recorded_neighbours() -> None:
    """Whoever raises the version adds its texts here, and keeps those of the version before."""
    assert (PROTOCOL_VERSION, list(SPOKEN_VERSIONS)) == (1, [1, 2])


def test_recorded_messages_of_version_1_are_read() -> None:
    """Of a client and a router that have not been updated yet."""
    assert read(REQUEST_1) == READ_1
    outcome = Outcome.from_header(OUTCOME_1)
    assert (outcome.returned, outcome.lost, outcome.at) == (3968, 5, 4000)
    assert (outcome.plan, outcome.reason) == (Plan.RETURN, Reason.DIVERGED)
    hints = EngineHints.from_xargs(HINTS_1, trusted=True)
    assert hints is not None
    assert hints.to_xargs() == HINTS_1


def test_version_1_is_written_to_the_byte() -> None:
    """Whoever is not updated yet reads what it has always read."""
    written = {name.lower(): text for name, text in READ_1.to_headers().items()}
    assert written == REQUEST_1
    assert Outcome.from_header(OUTCOME_1).to_header() == OUTCOME_1


def test_a_client_of_the_next_version_is_served() -> None:
    """It says more, and in words of its own: what is known of it counts."""
    newer = REQUEST_1["turncache"].replace("v=1", "v=2") + ', mood="new";x=1'
    assert read({**REQUEST_1, "turncache": newer}) == READ_1


@pytest.mark.parametrize(
    "said",
    ["cause=whim", "retain=forever", "retain=-1", "priority=high", "priority=500", "turn=?1"],
)
def test_words_of_the_next_version_count_as_unsaid(said: str) -> None:
    """Of our own version they are a mistake, and refused."""
    headers = {"x-session-id": "s", "turncache": f"v=2, call=4, {said}"}
    assert read(headers) == CallTags(session_id="s", call=4)


def test_an_outcome_of_the_next_version_is_read() -> None:
    """By a client that is updated after the router."""
    newer = OUTCOME_1.replace("plan=return", "plan=teleport") + ", host=12"
    outcome = Outcome.from_header(newer)
    assert (outcome.prompt, outcome.plan, outcome.reason) == (4171, None, Reason.DIVERGED)
