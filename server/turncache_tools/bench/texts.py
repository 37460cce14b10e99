"""Prompts: in every block as many tokens and other content, so that no arm profits. Pure.

The words of a text follow from its place in the workload, their order from the block. A
tokeniser that splits at spaces makes as many tokens of one order as of another, and a prefix
cache finds nothing in common: the first words differ already.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

_TEXT: Final = """
time year people way day man thing woman life child world school state family student group
country problem hand part place case week company system program question work number night
point home water room mother area money story fact month lot right study book eye job word
business issue side kind head house service friend father power hour game line end member law
car city name team minute idea kid body back parent face level office door health person art
war history party result change morning reason research girl guy moment air teacher force foot
boy age policy music market sense plan paper table field light road river stone window garden
letter answer village summer winter
"""
_WORDS: Final = tuple(_TEXT.split())
#: Words that tell blocks apart: 24! orders.
_HEAD: Final = _WORDS[:24]


@dataclass(frozen=True, slots=True)
class Tokens:
    """How many tokens words make, as measured on the server.

    Attributes:
        per_word: slope.
        per_prompt: of a prompt without words: the chat template.
    """

    per_word: float = 1.0
    per_prompt: float = 0.0

    def words(self, tokens: float) -> int:
        """Return the words of a text of ``tokens`` tokens, at least one."""
        return max(1, round(tokens / self.per_word))


def fit_tokens(short: tuple[int, int], long: tuple[int, int]) -> Tokens:
    """Fit tokens over words through two probes, each (words, prompt tokens)."""
    slope = (long[1] - short[1]) / (long[0] - short[0])
    return Tokens(max(slope, 1e-3), max(0.0, short[1] - slope * short[0]))


def _draw(*parts: object) -> random.Random:
    seed = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).hexdigest()
    return random.Random(seed)  # noqa: S311 - reproducible, not secret


def text(num_words: int, *, place: str, seed: int, block: str) -> str:
    """Return a text.

    Args:
        num_words: its length.
        place: in the workload; decides the words.
        seed: of the workload.
        block: decides their order.
    """
    chosen = _draw("words", seed, place)
    words = list(_HEAD[:num_words])
    words += chosen.choices(_WORDS, k=num_words - len(words))
    head, tail = words[: len(_HEAD)], words[len(_HEAD) :]
    order = _draw("order", seed, place, block)
    order.shuffle(head)
    order.shuffle(tail)
    return " ".join([*head, *tail])


@dataclass(frozen=True, slots=True)
class Piece:
    """One message of a history, and its tokens by estimate."""

    message: dict[str, Any]
    tokens: float


def kept(history: Sequence[Piece], tokens: int | None) -> list[Piece]:
    """Return the leading messages that stay when ``tokens`` tokens of the history do."""
    if tokens is None:
        return list(history)
    out: list[Piece] = []
    length = 0.0
    for piece in history:
        length += piece.tokens
        # Messages are whole: one that ends behind the mark by a little is kept.
        if out and length > tokens * 1.01 + 1:
            break
        out.append(piece)
    return out


def answer_message(said: str, tool_calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the live answer as it goes into the history."""
    message: dict[str, Any] = {"role": "assistant", "content": said}
    if tool_calls:
        message["tool_calls"] = list(tool_calls)
        message["content"] = said or None
    return message


def result_messages(tool_calls: Sequence[dict[str, Any]], result: str) -> list[dict[str, Any]]:
    """Return what a call brings: results of the tools that were called, else a question."""
    if not tool_calls:
        return [{"role": "user", "content": result}]
    first, *rest = tool_calls
    out = [{"role": "tool", "tool_call_id": first["id"], "content": result}]
    out += [{"role": "tool", "tool_call_id": call["id"], "content": "done"} for call in rest]
    return out
