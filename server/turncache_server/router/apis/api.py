"""What the router has to know of an API, as one value; and what all of them share. Pure.

Only members that the router itself acts on, or overrides in a leg, are checked; the rest is
the engine's to judge. The types are stricter than vLLM's: it reads ``"stream": "true"`` as a
boolean, and a router that reads it otherwise would serve another request than the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec

from turncache_server.router.body import Body
from turncache_server.router.ending import Ending
from turncache_server.router.errors import ApiError, invalid
from turncache_server.router.following import History, Said

_WORDS: Final = {
    bool: "a boolean",
    int: "an integer",
    str: "a string",
    list: "an array",
    dict: "an object",
}
#: Types of content that are text to the model; everything else is images, sound or files.
# Not a set: a client may send any JSON as a type, and not all of it can be hashed.
_TEXT_PARTS: Final = (
    "input_text",
    "output_text",
    "reasoning",
    "reasoning_text",
    "redacted_thinking",
    "refusal",
    "server_tool_use",
    "summary_text",
    "text",
    "thinking",
    "tool_reference",
    "tool_result",
    "tool_use",
)


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request, as far as plan and legs depend on it.

    Attributes:
        model: served name, None for the engine's default.
        stream: whether the answer comes as server-sent events.
        num_choices: answers that were asked for.
        num_answers: of the model in the history, None where an engine keeps that.
        brings_results: the history ends in a tool's result: a tool wait is over.
        max_tokens: longest answer in tokens, None for no limit of the client's.
        one_engine: the member because of which one engine has to serve the call alone,
            None when two can share it.
        continues: id of the answer that the engine keeps and this request continues.
    """

    model: str | None
    stream: bool
    num_choices: int = 1
    num_answers: int | None = 0
    brings_results: bool = False
    max_tokens: int | None = None
    one_engine: str | None = None
    continues: str | None = None

    @property
    def has_answers(self) -> bool:
        """The history has an answer of the model: earlier calls may have left KV."""
        return self.num_answers is None or self.num_answers > 0


class Collector(Protocol):
    """Collects how a call ends, from its events or from its whole body."""

    @property
    def engine_reported_error(self) -> bool:
        """The engine itself has told the client that the call failed."""
        ...

    def add(self, data: bytes) -> bool:
        """Take one event's data, or the whole body of an answer without streaming.

        Returns:
            Whether with it the engine tells the client that the answer is over.
        """
        ...

    def ending(self) -> Ending:
        """Judge what has been seen so far as the whole answer."""
        ...

    def said(self) -> Said:
        """Return what the model has said so far, tool calls as it wrote them."""
        ...


class ErrorForm(Protocol):
    """The shape of errors that an API's clients parse."""

    def body(self, error: ApiError) -> bytes:
        """Encode an error as the body of an answer."""
        ...

    def event(self, error: ApiError) -> bytes:
        """Encode an error as the terminal event of a stream."""
        ...


class _OpenAIErrors:
    """OpenAI's shape: ``{"error": {...}}``, in a stream as one more chunk."""

    def body(self, error: ApiError) -> bytes:
        return error.to_json()

    def event(self, error: ApiError) -> bytes:
        return error.to_event()


OPENAI_ERRORS: Final[ErrorForm] = _OpenAIErrors()


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API.

    Attributes:
        name: in logs and metrics.
        path: the same at the router and the engines.
        read: checks a body and reads what the router needs; raises :class:`ApiError`.
        collector: makes what judges an answer, from the number of choices and whether the
            client said that nothing follows.
        prefill_put: members that the prefill leg sets, as JSON text: an answer of one token
            that nobody reads.
        prefill_drop: members that the prefill leg leaves out: what shapes an answer that is
            thrown away, and would refuse, stop or enlarge it.
        history: reads the messages in the form by which conversations are followed, from the
            scope and the body; None where nothing can be followed.
        next_messages: writes the messages of the next prompt, from the body and an answer that asks
            for tools, as JSON text; None where no prompt is sent ahead.
        takes_session: vLLM's schema has ``session_id``.
        opens_with_token: the first event of a stream comes with the first token; else one comes
            as soon as the request has been read.
        errors: the shape of its errors.
    """

    name: str
    path: str
    read: Callable[[Body], CallRequest]
    collector: Callable[[int, bool], Collector]
    prefill_put: Callable[[Body], Mapping[str, str]]
    prefill_drop: frozenset[str]
    history: Callable[[str, Body], History | None] = lambda _scope, _body: None
    next_messages: Callable[[Body, Said], str] | None = None
    takes_session: bool = True
    opens_with_token: bool = True
    errors: ErrorForm = OPENAI_ERRORS


def check_types(body: Body, types: Mapping[str, tuple[type, ...]]) -> None:
    """Refuse members of a wrong type; null stands for absent.

    Raises:
        ApiError: 400, naming the member.
    """
    for name, member in body.members.items():
        value, kinds = member.value, types.get(name)
        # A boolean is an int in Python, and not in JSON.
        if (
            kinds is None
            or value is None
            or (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)))
        ):
            continue
        words = " or ".join(_WORDS[kind] for kind in kinds)
        raise invalid(f"{name}: expected {words}, got {_json_word(value)}.", param=name)


def check_least(body: Body, least: Mapping[str, int]) -> None:
    """Refuse numbers below their least value.

    Raises:
        ApiError: 400, naming the member.
    """
    for name, bound in least.items():
        value = body.get(name)
        if value is not None and value < bound:
            raise invalid(f"{name}: {value} is below {bound}.", param=name)


def check_objects(body: Body, name: str) -> list[dict[str, Any]]:
    """Return an array of at least one object.

    Raises:
        ApiError: 400, when the member is anything else.
    """
    items = body.get(name)
    if not isinstance(items, list) or not items:
        raise invalid(f"{name}: expected an array of at least one message.", param=name)
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise invalid(f"{name}[{index}]: expected an object.", param=name)
    return items


def has_media(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether any message carries more than text.

    KV of images and sound is declined by pulls: a prefill leg would be computed for nothing.
    """
    return any(
        isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS
        for message in messages
        if isinstance(parts := message.get("content"), list)
        for part in parts
    )


def first_named(body: Body, names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that the body has with a value that is not null or false."""
    return next(
        (name for name in names if (value := body.get(name)) is not None and value is not False),
        None,
    )


def _json_word(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, float):
        return "a number with a fraction"
    return _WORDS[type(value)]
