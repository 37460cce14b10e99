"""Where code is in a LangGraph run, and the session that follows: values in, values out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import turncache
from turncache.langgraph import graph_session, thread_session
from turncache.protocol import MAX_SESSION_ID_CHARS, check_session_id
from turncache_integrations.langgraph import ambient
from turncache_integrations.langgraph.places import (
    Place,
    place_of,
    step_label,
    step_name,
    thread_session_id,
)

PULL = ("__pregel_pull", "model")
SEND = ("__pregel_push", 0, False)


def config(namespace: str = "", path: object = PULL, **more: object) -> dict[str, object]:
    """Return a task's config as LangGraph has it."""
    return {
        "configurable": {"thread_id": "t", "checkpoint_ns": namespace, **more},
        "metadata": {"langgraph_path": path},
    }


def steps(namespace: str, path: object = PULL, scope: str = "thread") -> tuple[str, ...]:
    """Return the steps from a thread to a task."""
    place = place_of(config(namespace, path))
    assert place is not None
    return place.steps(scope)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("namespace", "path", "scope", "expected"),
    [
        ("", (), "thread", ()),
        ("model:1", PULL, "thread", ()),
        ("model:1", PULL, "node", ("model",)),
        ("model:1", PULL, "task", ("model:1",)),
        ("branch:1", SEND, "thread", ("branch:1",)),
        ("sub:1|model:2", PULL, "thread", ("sub:1",)),
        ("sub:1|1|model:2", PULL, "thread", ("sub:1", "1")),
        ("sub|model:2", PULL, "thread", ("sub",)),
        ("a:1|b:2|model:3", PULL, "thread", ("a:1", "b:2")),
        ("a:1|b:2|model:3", PULL, "node", ("a:1", "b:2", "model")),
        ("flow:1|task:2", ("__pregel_push", PULL, 0, True), "thread", ()),
        (
            "flow:1|task:2|inner:3",
            ("__pregel_push", ("__pregel_push", PULL, 0, True), 0, True),
            "thread",
            (),
        ),
    ],
)
def test_what_leads_to_a_session(
    namespace: str, path: object, scope: str, expected: tuple[str, ...]
) -> None:
    """Subgraphs and branches lead to children; nodes and tasks of one graph do not."""
    assert steps(namespace, path, scope) == expected


def test_without_a_thread_there_is_no_place() -> None:
    """No config, or no thread in it, is no place."""
    assert place_of(None) is None
    assert place_of({}) is None
    assert place_of({"configurable": {"checkpoint_ns": "model:1"}}) is None


def test_what_is_inside_what() -> None:
    """A subgraph's tasks are inside the task that started it, on the same thread only."""
    outer = place_of(config("a:1"))
    assert outer is not None
    for inner in ("a:1|b:2", "a:1|1|b:2", "a|b:2"):
        place = place_of(config(inner))
        assert place is not None
        assert place.is_inside(outer)
        assert not outer.is_inside(place)
    for other in (config("c:1|b:2"), config("a:1|b:2", turncache_graph="x"), config("a:1")):
        place = place_of(other)
        assert place is not None
        assert not place.is_inside(outer)


def test_labels_are_short() -> None:
    """A step is shown as its node and the start of its task's id."""
    assert step_label("tools:0123456789ab-cdef") == "tools:01234567"
    assert step_label("sub") == "sub"


texts = st.text(min_size=1, max_size=600)


@given(thread=texts, graph=st.text(max_size=50), path=st.lists(texts, max_size=20))
def test_ids_are_legal_and_tell_nothing(thread: str, graph: str, path: list[str]) -> None:
    """Whatever threads and nodes are called, ids are legal, and children of the thread's."""
    root = thread_session(thread, graph=graph)
    assert check_session_id(root.id) == thread_session_id(thread, graph)
    found = ambient._below(root, tuple(path))
    assert len(check_session_id(found.id)) <= MAX_SESSION_ID_CHARS
    if path:
        assert found.parent_id == root.id
        assert found in root.children
    assert "@" not in found.id, "an e-mail address as thread id stays here"


@given(thread=texts, path=st.lists(texts, min_size=1, max_size=4), at=st.integers(0, 3))
def test_a_block_on_the_way_changes_nothing(thread: str, path: list[str], at: int) -> None:
    """The session below a session on the way is the one below the thread's."""
    root = thread_session(thread)
    whole = ambient._below(root, tuple(path))
    way = ambient._below(root, tuple(path[:at]))
    assert ambient._below(way, tuple(path[at:])) is whole
    assert whole.parent_id == root.id


@given(st.lists(texts, min_size=2, max_size=2, unique=True))
def test_other_steps_are_other_sessions(both: list[str]) -> None:
    """Two steps, threads or graphs never share an id."""
    one, two = both
    assert step_name(one) != step_name(two)
    assert thread_session_id(one) != thread_session_id(two)
    assert thread_session_id("t", one) != thread_session_id("t", two)


def test_outside_any_graph_the_block_counts() -> None:
    """Without a graph the session is the innermost block's, or none."""
    assert graph_session() is None
    with turncache.session("mine") as mine:
        assert graph_session() is mine
    assert graph_session() is None


def test_places_are_values() -> None:
    """Two tasks with the same thread and namespace are the same place."""
    assert Place(thread_id="t") == Place(thread_id="t")
    assert Place(thread_id="t") != Place(thread_id="u")
