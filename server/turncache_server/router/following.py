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
from collections.abc import Iterable
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
        media: parts that are no text.
        reasoning: it comes with reasoning, which tells no conversation from another.
        call_ids: ids of the tool calls, which tell no conversation from another either; empty
            where nobody needs them.
    """

    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    media: tuple[Any, ...] = ()
    reasoning: bool = False
    call_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Size of it without reasoning."""
        return len(_encoded(self))


#: An answer of the model, or whatever somebody else has said, as plain values.
Message = Said | tuple[Any, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Digests of a request's messages.

    Attributes:
        whole: of all of them.
        answers: up to each answer of the model, the latest first.
        new_bytes: size of what came after the latest answer; of everything without one.
        has_reasoning: an answer comes with its reasoning, which a template may strip later.
    """

    whole: bytes
    answers: tuple[bytes, ...] = ()
    new_bytes: int = 0
    has_reasoning: bool = False

    def with_answer(self, said: Said) -> bytes:
        """Return the digest of this history and the model's answer to it."""
        return _chained(self.whole, _encoded(said))


def chain(scope: str, messages: Iterable[Message]) -> History:
    """Digest messages in their order.

    Args:
        scope: whatever separates conversations beside their content: tenant and model.
        messages: in the one form that all APIs have.
    """
    digest = hashlib.blake2b(scope.encode(), digest_size=_DIGEST_BYTES).digest()
    answers = []
    new_bytes = 0
    has_reasoning = False
    for message in messages:
        content = _encoded(message)
        digest = _chained(digest, content)
        new_bytes += len(content)
        if isinstance(message, Said):
            answers.append(digest)
            new_bytes = 0
            has_reasoning = has_reasoning or message.reasoning
    latest = tuple(answers[: -_MAX_ANSWERS_BACK - 1 : -1])
    return History(whole=digest, answers=latest, new_bytes=new_bytes, has_reasoning=has_reasoning)


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

    def answered(self, digest: bytes, session: str) -> None:
        """Remember that a call of ``session`` has ended well, by its history with the answer."""
        self._sessions[digest] = session
        self._sessions.move_to_end(digest)
        while len(self._sessions) > self._max_conversations:
            self._sessions.popitem(last=False)


def _chained(digest: bytes, content: bytes) -> bytes:
    return hashlib.blake2b(digest + content, digest_size=_DIGEST_BYTES).digest()


def _encoded(message: Message) -> bytes:
    if not isinstance(message, Said):
        return marshal.dumps(message, _MARSHAL)
    # Clients strip what a model leaves at the ends of its text.
    calls = [(name, _arguments(arguments)) for name, arguments in message.calls]
    said = ("assistant", message.text.strip(), message.media, calls)
    return marshal.dumps(said, _MARSHAL)


def _arguments(arguments: Any) -> str:
    """Return arguments in one form: clients parse them and write them again."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
