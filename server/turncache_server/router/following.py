"""Conversations of clients that name no session, followed by what was said in them. Pure.

A request belongs to a conversation when its history begins with one that the router has
served, *including the model's answer*: system prompt and first question alone are what
strangers have in common, and two users who begin alike are two.

Messages are compared by what a template reads of them (role, text, tool calls, results), not
by their JSON: clients send content now as a text, now as parts, and move marks such as
``cache_control`` from message to message. An answer that its client has changed is not
recognised: the call begins a conversation of its own, and costs a recompute.
"""

from __future__ import annotations

import hashlib
import json
import marshal
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_DIGEST_BYTES: Final = 16
# Version 2 writes values only: equal messages give equal bytes, half surrogate pairs included.
_MARSHAL: Final = 2
#: Answers to look back over: a client that drops its latest ones goes back a step or two.
_MAX_ANSWERS_BACK: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the model said.

    Attributes:
        text: its text.
        calls: name and arguments of its tool calls, in order.
    """

    text: str
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Digests of a request's messages.

    Attributes:
        whole: of all of them.
        answers: up to each answer of the model, the latest first.
    """

    whole: bytes
    answers: tuple[bytes, ...] = ()

    def with_answer(self, said: Said) -> bytes:
        """Return the digest of this history and the model's answer to it."""
        calls = [(name, _arguments(arguments)) for name, arguments in said.calls]
        return _chained(self.whole, _of_answer(said.text, calls))


def read_history(scope: str, messages: Sequence[Mapping[str, Any]]) -> History:
    """Digest the messages of a chat completion.

    Args:
        scope: whatever separates conversations beside their content: tenant and model.
        messages: as parsed.
    """
    digest = hashlib.blake2b(scope.encode(), digest_size=_DIGEST_BYTES).digest()
    answers = []
    for message in messages:
        digest = _chained(digest, _of_message(message))
        if message.get("role") == "assistant":
            answers.append(digest)
    return History(whole=digest, answers=tuple(answers[: -_MAX_ANSWERS_BACK - 1 : -1]))


class Conversations:
    """Owns the bounded table from the digest of an answered history to its session.

    Args:
        max_conversations: the least recently used is forgotten first.
    """

    def __init__(self, max_conversations: int) -> None:
        self._max_conversations = max_conversations
        self._sessions: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def session_of(self, history: History) -> str | None:
        """Return the session of the longest history that this one continues."""
        for digest in history.answers:
            session = self._sessions.get(digest)
            if session is not None:
                self._sessions.move_to_end(digest)
                return session
        return None

    def answered(self, history: History, said: Said, session: str) -> None:
        """Remember that a call of ``session`` has ended well."""
        digest = history.with_answer(said)
        self._sessions[digest] = session
        self._sessions.move_to_end(digest)
        while len(self._sessions) > self._max_conversations:
            self._sessions.popitem(last=False)


def _chained(digest: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(digest + content, digest_size=_DIGEST_BYTES).digest()


def _of_message(message: Mapping[str, Any]) -> bytes:
    role, text, media = message.get("role"), *_text(message.get("content"))
    calls = message.get("tool_calls")
    if role == "assistant":
        return _of_answer(text, _calls(calls if isinstance(calls, list) else []), media)
    return marshal.dumps((role, text, media, message.get("tool_call_id")), _MARSHAL)


def _of_answer(text: str, calls: Sequence[tuple[str, str]], media: Sequence[Any] = ()) -> bytes:
    # Clients strip what a model leaves at the ends of its text.
    return marshal.dumps(("assistant", text.strip(), list(media), list(calls)), _MARSHAL)


def _text(content: Any) -> tuple[str, list[Any]]:
    """Return the text of a message, and its parts that are no text."""
    if isinstance(content, str):
        return content, []
    parts = content if isinstance(content, list) else []
    texts = [part for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    rest = [part for part in parts if part not in texts]
    return "".join(str(part.get("text", "")) for part in texts), rest


def _calls(calls: Sequence[Any]) -> list[tuple[str, str]]:
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            found.append((str(function.get("name")), _arguments(function.get("arguments"))))
    return found


def _arguments(arguments: Any) -> str:
    """Return arguments in one form: clients parse them and write them again."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
