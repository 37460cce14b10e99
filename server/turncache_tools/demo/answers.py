"""One streamed answer: from the chunks of a stream to tokens, times and counts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer of the model.

    Attributes:
        text: what it says.
        token_ids: generated tokens.
        gaps: log-probability of the best token minus that of the second, per token.
        runners_up: the second-best token per position, None where it is not known.
        prompt_ids: tokens of the prompt.
        cached: prompt tokens that the answering engine says it did not compute.
        first_s: seconds from sending the request to the first text at the client.
        total_s: seconds to the end of the stream.
    """

    text: str
    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    runners_up: tuple[int | None, ...]
    prompt_ids: tuple[int, ...]
    cached: int
    first_s: float
    total_s: float

    @property
    def between_tokens_s(self) -> float | None:
        """Mean seconds between two generated tokens, None for fewer than two."""
        num = len(self.token_ids) - 1
        return (self.total_s - self.first_s) / num if num > 0 else None


class IncompleteAnswer(ValueError):
    """Raised when a stream ended without what the demo measures."""


class Collector:
    """Takes the chunks of one stream, in order.

    The first token is the first chunk with *text*: a chunk that only opens the message is
    none, and an answer without any text has no time to its first token.
    """

    def __init__(self) -> None:
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._tops: list[tuple[float, int | None]] = []
        self._prompt_ids: tuple[int, ...] = ()
        self._cached = 0
        self._first_s: float | None = None
        self._finished = False

    def add(self, chunk: Mapping[str, Any], at_s: float) -> str:
        """Take one chunk and return the text that it adds.

        Args:
            chunk: as JSON.
            at_s: seconds since the request was sent.
        """
        if chunk.get("prompt_token_ids"):
            self._prompt_ids = tuple(chunk["prompt_token_ids"])
        if usage := chunk.get("usage"):
            # vLLM leaves the details out when nothing was cached.
            self._cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        choices: Sequence[Mapping[str, Any]] = chunk.get("choices") or ()
        if not choices:
            return ""
        choice = choices[0]
        text = (choice.get("delta") or {}).get("content") or ""
        if text and self._first_s is None:
            self._first_s = at_s
        self._text.append(text)
        self._token_ids += choice.get("token_ids") or ()
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            self._tops.append(_second(entry.get("top_logprobs") or ()))
        self._finished = self._finished or choice.get("finish_reason") is not None
        return text

    def end(self, at_s: float) -> Answer:
        """Return the answer of a stream that has ended.

        Raises:
            IncompleteAnswer: no text, no end, or no tokens in it.
        """
        if not self._finished:
            raise IncompleteAnswer("the stream ended without a finish_reason")
        if self._first_s is None:
            raise IncompleteAnswer("the answer has no text, so it has no first token")
        if not self._prompt_ids or not self._token_ids:
            raise IncompleteAnswer(
                "the stream carries no token ids: the server must answer return_token_ids"
            )
        if len(self._tops) != len(self._token_ids):
            raise IncompleteAnswer(
                f"{len(self._token_ids)} tokens but {len(self._tops)} log-probabilities"
            )
        return Answer(
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            gaps=tuple(gap for gap, _ in self._tops),
            runners_up=tuple(token for _, token in self._tops),
            prompt_ids=self._prompt_ids,
            cached=self._cached,
            first_s=self._first_s,
            total_s=at_s,
        )


def _second(tops: Sequence[Mapping[str, Any]]) -> tuple[float, int | None]:
    """Return (gap to the second-best token, its id); one candidate only is no tie."""
    ordered = sorted(tops, key=lambda top: -float(top["logprob"]))
    if len(ordered) < 2:
        return float("inf"), None
    gap = float(ordered[0]["logprob"]) - float(ordered[1]["logprob"])
    return gap, _token_id(str(ordered[1]["token"]))


def _token_id(token: str) -> int | None:
    """Read a token as vLLM writes it with ``return_tokens_as_token_ids``: ``token_id:42``."""
    _, found, number = token.partition("token_id:")
    return int(number) if found and number.isdigit() else None
