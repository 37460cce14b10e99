"""The last act: the document in the history is exchanged, then asked about.

Our pair takes only KV whose content is the prompt's. Stock ``bidirectional_kv_xfer`` takes the
previous answer's KV by position and checks nothing, so that it can answer from the document
that is no longer there. Both run live.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol

from turncache_tools.demo.callers import Caller, Question
from turncache_tools.demo.compare import Verdict, compare
from turncache_tools.demo.history import Message

_SYSTEM: Final = "You answer in one short sentence."
_NAME_QUESTION: Final = "What is the name of the customer?"
CITY_QUESTION: Final = "In which city does the customer live?"
_MOST_NOTES: Final = 40
#: Tokens of one note, and of everything else in the conversation, rounded up.
_NOTE_TOKENS: Final = 24
_OTHER_TOKENS: Final = 140
_MAX_TOKENS: Final = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Customer:
    """Whom a document is about."""

    name: str
    city: str

    def document(self, num_notes: int) -> str:
        """Return the document."""
        notes = [
            f"Note {n}: the customer {self.name} lives in {self.city} and ordered item number "
            f"{n * 7}."
            for n in range(num_notes)
        ]
        return "\n".join(("Here is a customer file.", *notes))


#: The file that is deleted, and the one that takes its place.
DELETED: Final = Customer(name="Laura", city="Rome")
PRESENT: Final = Customer(name="Peter", city="London")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stale:
    """What stock ``bidirectional_kv_xfer`` did.

    Attributes:
        answer: to the question about the present document.
        taken: tokens that its prefill took from decode, in both of its calls.
    """

    answer: str
    taken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastAct:
    """What was answered about the exchanged document.

    Attributes:
        question: the question.
        ours: answer of our pair, in the session that had held the deleted document.
        reference: answer of the same pair when nothing can be reused.
        verdict: ours against the reference.
        stock: what stock ``bidirectional_kv_xfer`` said, None when it was not run.
        reused: tokens that our pair reused for that call, of ``prompt``.
        prompt: tokens of that call's prompt.
    """

    question: str
    ours: str
    reference: str
    verdict: Verdict
    stock: Stale | None
    reused: int
    prompt: int

    @property
    def ours_is_from_the_deleted(self) -> bool:
        """Our answer names something that only the deleted document holds."""
        return from_the_deleted(self.ours)

    @property
    def stock_is_from_the_deleted(self) -> bool:
        """Likewise the stock answer, where there is one."""
        return self.stock is not None and from_the_deleted(self.stock.answer)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values."""
        return {
            **asdict(self),
            "deleted": f"{DELETED.name} in {DELETED.city}",
            "present": f"{PRESENT.name} in {PRESENT.city}",
            "ours_is_from_the_deleted": self.ours_is_from_the_deleted,
            "stock_is_from_the_deleted": self.stock_is_from_the_deleted,
        }


def from_the_deleted(answer: str) -> bool:
    """Say whether an answer names the deleted document's customer or city."""
    return DELETED.name in answer or DELETED.city in answer


def notes_that_fit(max_model_len: int) -> int:
    """Return how many notes a document may have."""
    return min(_MOST_NOTES, (max_model_len - _OTHER_TOKENS) // _NOTE_TOKENS)


def first_messages(num_notes: int) -> list[Message]:
    """Return the conversation about the document that will be deleted."""
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{DELETED.document(num_notes)}\n{_NAME_QUESTION}"},
    ]


def edited_messages(num_notes: int) -> list[Message]:
    """Return the same conversation with the other document in it, and a new question."""
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"{PRESENT.document(num_notes)}\n{_NAME_QUESTION}"},
        {"role": "assistant", "content": f"{PRESENT.name}."},
        {"role": "user", "content": CITY_QUESTION},
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ours:
    """Our half of the act."""

    answer: str
    reference: str
    verdict: Verdict
    reused: int
    prompt: int


def ask_ours(caller: Caller, salt: str, num_notes: int) -> Ours:
    """Ask our pair: once in the session of the deleted document, once as a stranger."""

    def ask(messages: list[Message], name: str, *, final: bool) -> Any:
        return caller.ask(
            Question(
                messages=messages,
                salt=f"{salt}-{name}",
                session=f"{salt}-{name}",
                max_tokens=_MAX_TOKENS,
                final=final,
            )
        )

    ask(first_messages(num_notes), "edited", final=False)
    reply = ask(edited_messages(num_notes), "edited", final=True)
    stranger = ask(edited_messages(num_notes), "stranger", final=True)
    return Ours(
        answer=reply.answer.text.strip(),
        reference=stranger.answer.text.strip(),
        verdict=compare(stranger.answer, reply.answer.token_ids).verdict,
        reused=0 if reply.outcome is None else reply.outcome.reused,
        prompt=len(reply.answer.prompt_ids),
    )


class Returning(Protocol):
    """The part of :class:`~turncache_tools.demo.callers.StockPairCaller` used here."""

    def whole(
        self, messages: Sequence[Message], salt: str, *, max_tokens: int, returned: Any = None
    ) -> tuple[Any, Any]:
        """Make one call in two legs; returns the completion and what to return next."""
        ...


def ask_stock(caller: Returning, salt: str, num_notes: int) -> str:
    """Ask a stock pair with returns, whose salt stays the same as a conversation's does."""
    _, returned = caller.whole(first_messages(num_notes), salt, max_tokens=_MAX_TOKENS)
    done, _ = caller.whole(
        edited_messages(num_notes), salt, max_tokens=_MAX_TOKENS, returned=returned
    )
    return str(done.choices[0].message.content or "").strip()
