"""Automatic sessions: which conversation a request continues, by its content."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.sdk.support import assistant, result, system, user
from turncache.calls import read_call
from turncache.follow import MAX_LINES_PER_POINT, MAX_POINTS_PER_LINE, Follower
from turncache.memo import Memo
from turncache.protocol import Cause


class Line:
    """An owner that knows its parent."""

    def __init__(self, parent: Line | None) -> None:
        self.parent = parent


def follower(**arguments: Any) -> Follower[Line]:
    """Return a follower of plain lines."""
    return Follower(Line, **arguments)


def place(lines: Follower[Line], *messages: Any, model: str = "m", **body: Any) -> Any:
    """Place a chat request."""
    reading = read_call({"model": model, "messages": list(messages), **body}, Memo())
    return lines.place(reading)


CALLS = assistant(None, ("c1", "search"))


def test_a_conversation_is_one_line() -> None:
    """Each request that continues the one before is on the same line."""
    lines = follower()
    history: list[Any] = [system(), user()]
    first = place(lines, *history)
    for step in ([CALLS, result()], [assistant(), user("more")], [assistant(), user("more")]):
        history += step
        assert place(lines, *history).owner is first.owner
    assert first.owner.parent is None


def test_a_repeated_request_is_the_same_call() -> None:
    """A cell that is run again, and a retry, stay on the line with the cause they had."""
    lines = follower()
    first = place(lines, user())
    later = place(lines, user(), assistant(), user("more"))
    assert place(lines, user(), assistant(), user("more")) == later
    assert place(lines, user()) == first


def test_conversations_that_share_a_system_prompt_are_apart() -> None:
    """A system prompt is shared by strangers: it relates nobody."""
    lines = follower()
    one = place(lines, system(), user("a"))
    other = place(lines, system(), user("b"))
    assert one.owner is not other.owner
    assert other.owner.parent is None


def test_another_branch_is_a_child() -> None:
    """A history that leaves a known one is a fork, also when it is sent again."""
    lines = follower()
    main = place(lines, user(), assistant(), user("x"))
    place(lines, user(), assistant(), user("x"), assistant("a"), user("left"))
    branch = place(lines, user(), assistant(), user("x"), assistant("b"), user("right"))
    assert branch.owner.parent is main.owner
    assert branch.cause is Cause.FORK
    again = place(lines, user(), assistant(), user("x"), assistant("b"), user("right"))
    assert again == branch
    further = [assistant("b"), user("right"), assistant(), user("go")]
    grown = place(lines, user(), assistant(), user("x"), *further)
    assert grown.owner is branch.owner
    assert grown.cause is None


def test_another_model_is_a_child() -> None:
    """The same history at another model shares no KV: it is a child that stays one."""
    lines = follower()
    main = place(lines, user(), assistant(), user("x"))
    other = place(lines, user(), assistant(), user("x"), model="small")
    assert other.owner.parent is main.owner
    more = [assistant(), user("y")]
    assert place(lines, user(), assistant(), user("x"), *more, model="small").owner is (other.owner)
    assert place(lines, user(), assistant(), user("x"), *more).owner is main.owner


def test_two_agents_with_one_question_are_apart() -> None:
    """A title generator gets the user's first message too: it is no part of the chat."""
    lines = follower()
    chat = place(lines, system("help"), user("hello"))
    title = place(lines, system("write a title"), user("hello"))
    assert title.owner is not chat.owner
    assert place(lines, system("help"), user("hello"), assistant(), user("x")).owner is (chat.owner)


def test_a_system_prompt_that_changes_does_not_end_a_conversation() -> None:
    """With an answer in common it is the conversation, whatever time the prompt holds."""
    lines = follower()
    first = place(lines, system("10:00"), user(), assistant(), user("x"))
    second = place(lines, system("10:01"), user(), assistant(), user("x"), assistant(), user())
    assert second.owner is first.owner


def test_a_rewritten_message_does_not_end_a_conversation() -> None:
    """An agent that empties old tool results goes on with its conversation."""
    lines = follower()
    old = [user(), CALLS, result("c1", "long"), assistant(None, ("c2", "search"))]
    first = place(lines, user())
    place(lines, *old[:3])
    place(lines, *old, result("c2", "new"))
    old[2] = result("c1", "[cleared]")
    rewritten = place(lines, *old, result("c2", "new"), assistant(), user("x"))
    assert rewritten.owner is first.owner
    assert rewritten.cause is None


def test_answers_that_the_server_keeps_are_followed_by_id() -> None:
    """previous_response_id names the conversation when the body has no history."""
    lines = follower()
    first = place(lines, user())
    lines.answered(first.key, "r1")
    second = read_call({"model": "m", "input": "more", "previous_response_id": "r1"}, Memo())
    assert lines.place(second).owner is first.owner
    stranger = read_call({"model": "m", "input": "x", "previous_response_id": "r9"}, Memo())
    assert lines.place(stranger).owner is not first.owner
    assert lines.place(stranger).owner is lines.place(stranger).owner


def test_the_least_recent_conversation_goes_first() -> None:
    """Over the limit a conversation is forgotten, with everything that led to it."""
    lines = follower(max_lines=2)
    kept = place(lines, user("a"))
    gone = place(lines, user("b"))
    assert place(lines, user("a")).owner is kept.owner
    place(lines, user("c"))
    assert place(lines, user("a")).owner is kept.owner
    assert place(lines, user("b")).owner is not gone.owner


def test_long_conversations_are_bounded() -> None:
    """A conversation of many calls keeps the latest points only, and still goes on."""
    lines = follower()
    history: list[Any] = [user()]
    first = place(lines, *history)
    for number in range(2 * MAX_POINTS_PER_LINE):
        history += [assistant(), user(f"{number}")]
        assert place(lines, *history).owner is first.owner
    assert len(lines._points) == MAX_POINTS_PER_LINE


def test_one_question_by_many_agents_is_bounded() -> None:
    """A clock in the system prompt makes every first call a new conversation, and no heap."""
    lines = follower()
    for number in range(3 * MAX_LINES_PER_POINT):
        place(lines, system(f"it is {number} o'clock"), user())
    [known] = lines._points.values()
    assert len(known) == MAX_LINES_PER_POINT


class Conversations(RuleBasedStateMachine):
    """Random conversations with random branches, against a plain search for the prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = follower(max_lines=1000)
        self.told: dict[tuple[str, ...], Line] = {}
        self.latest: dict[Line, tuple[str, ...]] = {}
        self.words = itertools.count()

    def _tell(self, texts: tuple[str, ...], owner: Line) -> None:
        self.told[texts] = owner
        self.latest[owner] = texts

    def _send(self, texts: tuple[str, ...]) -> Line:
        messages = [assistant(text) if at % 2 else user(text) for at, text in enumerate(texts)]
        owner: Line = place(self.lines, *messages).owner
        return owner

    @rule()
    def start(self) -> None:
        texts = (f"w{next(self.words)}",)
        owner = self._send(texts)
        assert owner.parent is None
        assert owner not in self.told.values()
        self._tell(texts, owner)

    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        if self.told:
            before = data.draw(st.sampled_from(sorted(self.told)))
            texts = (*before, f"w{next(self.words)}", f"w{next(self.words)}")
            owner = self._send(texts)
            straight = before == self.latest.get(self.told[before])
            assert owner is self.told[before] or (
                not straight and owner.parent is self.told[before]
            )
            self._tell(texts, owner)

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        if self.told:
            texts = data.draw(st.sampled_from(sorted(self.told)))
            assert self._send(texts) is self.told[texts]
            self.latest[self.told[texts]] = texts

    @invariant()
    def points_belong_to_lines(self) -> None:
        """Nothing is remembered for a line that is gone."""
        keys = {key for known in self.lines._points.values() for key, _ in known}
        assert keys <= set(self.lines._lines)


TestConversations = Conversations.TestCase
TestConversations.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
