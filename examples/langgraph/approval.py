"""Reviewers side by side, each a subgraph, then a person's approval, then the answer.

Every reviewer is a session of its own, below the thread's, so that none of them disturbs
what is kept of the others.
"""

from __future__ import annotations

import argparse
import operator
import time
from collections.abc import Sequence
from typing import Annotated, Any, TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from options import parse, run, show

from turncache.langgraph import ChatOpenAI

ASPECTS = ("correctness", "readability", "performance")


class Notes(TypedDict):
    """What a reviewer hands over."""

    notes: Annotated[list[str], operator.add]


class Review(Notes):
    """State of one reviewer."""

    text: str
    aspect: str


class State(Notes):
    """State of the graph."""

    text: str
    answer: str


def main(arguments: Sequence[str] | None = None) -> None:
    """Review one text, approve the notes, and show what happened to the KV."""
    options = parse(__doc__, "def double(x): return x + x if x else 0", arguments)
    graph = build(options)
    config: Any = {"configurable": {"thread_id": options.thread}}
    state = graph.invoke({"text": options.question, "notes": []}, config)
    print(f"waiting for a person: {state['__interrupt__'][0].value}")
    # Hours may pass here, and another process may go on.
    state = graph.invoke(Command(resume="approved"), config)
    print(f"answer: {state['answer']}\n")
    show(options.thread)


def build(options: argparse.Namespace) -> Any:
    """Return the graph: a branch per aspect, an approval, an answer."""
    model = ChatOpenAI(
        model=options.model,
        base_url=options.base_url,
        api_key=options.api_key,
        max_completion_tokens=128,
    )

    def look(state: Review) -> Any:
        messages: list[Any] = [
            SystemMessage("You review code."),
            HumanMessage(f"{state['text']}\n\nLook at its {state['aspect']}."),
        ]
        messages.append(model.invoke(messages))
        time.sleep(options.tool_seconds)
        messages.append(HumanMessage("In one sentence."))
        return {"notes": [f"{state['aspect']}: {model.invoke(messages).text}"]}

    def approve(state: State) -> Any:
        interrupt(f"{len(state['notes'])} notes")
        return {}

    def answer(state: State) -> Any:
        notes = "\n".join(sorted(state["notes"]))
        messages = [
            SystemMessage("You review code."),
            HumanMessage(f"{state['text']}\n\nSum up these notes:\n{notes}"),
        ]
        return {"answer": model.invoke(messages).text}

    def reviewers(state: State) -> list[Send]:
        return [
            Send("review", {"text": state["text"], "aspect": aspect, "notes": []})
            for aspect in ASPECTS
        ]

    review = (
        StateGraph(Review, output_schema=Notes)
        .add_node("look", look)
        .add_edge(START, "look")
        .compile()
    )
    return (
        StateGraph(State)
        .add_node("review", review)
        .add_node("approve", approve)
        .add_node("answer", answer)
        .add_conditional_edges(START, reviewers, ["review"])
        .add_edge("review", "approve")
        .add_edge("approve", "answer")
        .compile(checkpointer=InMemorySaver())
    )


if __name__ == "__main__":
    run(main)
