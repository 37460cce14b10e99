"""Where in a LangGraph run a piece of code is, and the session ids that follow from it.

Pure: a run's config in, values out. LangGraph says where code runs by a thread id and a
*namespace*: the path of tasks around it, ``node:task|node:task``, with a counter after a
task that has started several graphs. The last component is the code's own task; what is
before it are the tasks whose subgraphs it runs in. A subgraph has a history of its own, so
it is a child of its thread's session, and so is a branch that ``Send`` started.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from turncache import opaque_id

#: What shares one session: a graph's thread, a node of it, or a task (one run of a node).
Scope = Literal["thread", "node", "task"]

#: Key of ``configurable`` that tells graphs on one thread apart: any text of the user's.
GRAPH_KEY: Final = "turncache_graph"

_PUSH: Final = "__pregel_push"
_SEPARATOR: Final = "|"
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A task of a graph on a thread.

    Attributes:
        thread_id: the thread, as the user names it.
        graph: what tells several graphs on the thread apart, "" for nothing.
        namespace: tasks around the code, its own last; empty outside any graph.
        branch: whether ``Send`` started its own task.
    """

    thread_id: str
    graph: str = ""
    namespace: tuple[str, ...] = ()
    branch: bool = False

    def steps(self, scope: Scope = "thread") -> tuple[str, ...]:
        """Return what leads from the thread's session to this place's, outermost first."""
        *around, own = self.namespace or ("",)
        if own and (self.branch or scope == "task"):
            around.append(own)
        elif own and scope == "node":
            around.append(own.partition(":")[0])
        return tuple(around)

    def is_inside(self, other: Place) -> bool:
        """Whether this place is in a graph that ``other``'s task has started.

        A subgraph with a checkpointer of its own names the tasks around it by their nodes.
        """
        return (
            (self.thread_id, self.graph) == (other.thread_id, other.graph)
            and len(self.namespace) > len(other.namespace)
            and all(
                mine in (theirs, theirs.partition(":")[0])
                for mine, theirs in zip(self.namespace, other.namespace, strict=False)
            )
        )


def place_of(config: Mapping[str, Any] | None) -> Place | None:
    """Return the place that a run's config says, or None without a thread."""
    if config is None:
        return None
    configurable = config.get("configurable") or {}
    thread_id = configurable.get("thread_id")
    if thread_id is None:
        return None
    namespace = tuple(filter(None, (configurable.get("checkpoint_ns") or "").split(_SEPARATOR)))
    path: Sequence[Any] = (config.get("metadata") or {}).get("langgraph_path") or ()
    # A task of the functional API is a part of the function that called it.
    while len(path) > 1 and path[0] == _PUSH and isinstance(path[1], Sequence):
        namespace, path = namespace[:-1], path[1]
    return Place(
        thread_id=str(thread_id),
        graph=str(configurable.get(GRAPH_KEY) or ""),
        namespace=namespace,
        branch=len(path) > 1 and path[0] == _PUSH,
    )


def thread_session_id(thread_id: str, graph: str = "") -> str:
    """Return the session id of a thread: stable, and telling nothing about its name."""
    return opaque_id(f"{graph}\0{thread_id}" if graph else thread_id)


def thread_label(thread_id: str, graph: str = "") -> str:
    """Return the readable name of a thread's session, for this process only."""
    return f"{graph}: {thread_id}" if graph else thread_id


def step_name(step: str) -> str:
    """Return what a step adds to a session id: a digest, as nodes may bear any name."""
    return hashlib.blake2b(step.encode(), digest_size=_DIGEST_BYTES).hexdigest()


def step_label(step: str) -> str:
    """Return a step for readers: the node and the start of its task's id."""
    node, _, task = step.partition(":")
    return f"{node}:{task[:8]}" if task else node
