"""What is known of one session in this process: its calls and what the next is compared with.

A ledger owns its session's state. The client changes it while it holds
:data:`turncache._lock.LOCK`; a reader needs no lock. Everything in it is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

from turncache.advice import Finding, Match, Shape, match, shape_of
from turncache.answers import ToolCall
from turncache.calls import Reading
from turncache.records import Call
from turncache.speaker import Speaker

MAX_CALLS: Final = 512
MAX_CALLS_AUTOMATIC: Final = 32
MAX_LINEAGES: Final = 8
MAX_WAITING: Final = 64
MAX_ANSWERS: Final = 256


class Waiting(NamedTuple):
    """A tool call whose result has not come yet.

    Attributes:
        name: name of the tool.
        arguments: hash of the arguments as the model wrote them, None when unknown.
        answered_s: reading of the clock when the model had asked for it.
    """

    name: str
    arguments: int | None
    answered_s: float


class Ledger:
    """Calls, lineages, waiting tool calls and answers of one session.

    Attributes:
        calls: the latest calls, running ones included, oldest first.
        num_calls: calls that have begun, those that are no longer kept included.
        findings: what broke reuse, each kind once.
        speaker: client of the latest call whose server was told of the session, or None.
    """

    __slots__ = (
        "_answers",
        "_lineages",
        "_max_calls",
        "_waiting",
        "calls",
        "findings",
        "num_calls",
        "speaker",
    )

    def __init__(self, *, automatic: bool) -> None:
        """Start empty; an automatic session keeps fewer calls, as there are many of them."""
        self.calls: list[Call] = []
        self.findings: tuple[Finding, ...] = ()
        self.num_calls = 0
        self.speaker: Speaker | None = None
        self._max_calls = MAX_CALLS_AUTOMATIC if automatic else MAX_CALLS
        self._lineages: list[Shape] = []
        # Made when first needed: most automatic sessions never need them.
        self._waiting: dict[str, Waiting] | None = None
        self._answers: OrderedDict[str, tuple[int, int]] | None = None

    @property
    def waits(self) -> bool:
        """Whether the results of tool calls are awaited."""
        return bool(self._waiting)

    def begin(self, call: Call) -> None:
        """Take a call that is about to be made."""
        self.num_calls += 1
        calls = self.calls
        calls.append(call)
        if len(calls) > self._max_calls:
            del calls[0]

    def shape_before(self, reading: Reading) -> Shape | None:
        """Return the shape of the call that ``reading`` follows, and keep the reading's.

        None when it follows no known call, or only adds to the latest.

        A session may hold several lineages (a main chat, sub-agents, title generation):
        the latest that the content matches is meant.
        """
        lineages = self._lineages
        new_system, new_history, new_tools = shape = shape_of(reading)
        if lineages:
            system, history, tools = lineages[-1]
            # What nearly every call does: nothing broke, and there is nothing to compare.
            if new_history.startswith(history) and new_system == system and new_tools == tools:
                lineages[-1] = shape
                return None
        before: Shape | None = None
        for at in range(len(lineages) - 1, -1, -1):
            if match(lineages[at], reading) is Match.SAME_LINE:
                before = lineages.pop(at)
                break
        lineages.append(shape)
        if len(lineages) > MAX_LINEAGES:
            del lineages[0]
        return before

    def note(self, finding: Finding) -> None:
        """Keep a finding unless one of its kind is kept."""
        if all(finding.kind is not known.kind for known in self.findings):
            self.findings = (*self.findings, finding)

    def wait_for(self, tools: Sequence[ToolCall], answered_s: float) -> None:
        """Start a tool wait: the caller runs ``tools`` now."""
        if self._waiting is None:
            self._waiting = {}
        for tool in tools:
            text = tool.arguments
            self._waiting[tool.id] = Waiting(
                tool.name, None if text is None else hash(text), answered_s
            )
        while len(self._waiting) > MAX_WAITING:
            self._waiting.pop(next(iter(self._waiting)))

    def take_results(self, ids: Sequence[str]) -> dict[str, Waiting]:
        """End the waits for the tool calls among ``ids``, and return them by id.

        A request that is sent again brings the same results: those waits are over.
        """
        waiting = self._waiting
        if not waiting:
            return {}
        return {name: got for name in ids if (got := waiting.pop(name, None)) is not None}

    def place_of(self, answer_id: str) -> tuple[int, int] | None:
        """Return turn and call of the answer with this id, if it is known."""
        return None if self._answers is None else self._answers.get(answer_id)

    def answered(self, answer_id: str, turn: int, call: int) -> None:
        """Remember turn and call of an answer that the server keeps."""
        if self._answers is None:
            self._answers = OrderedDict()
        self._answers[answer_id] = (turn, call)
        if len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
