"""Streams to answers: what counts as the first token, and what a stream must carry."""

from __future__ import annotations

from typing import Any

import pytest

from turncache_tools.demo.answers import Collector, IncompleteAnswer


def chunk(text: str | None = None, token: int | None = None, **more: Any) -> dict[str, Any]:
    """Return a chunk as vLLM sends it with token ids and the two best tokens."""
    choice: dict[str, Any] = {"delta": {} if text is None else {"content": text}}
    if token is not None:
        tops = [
            {"token": f"token_id:{token}", "logprob": -0.1},
            {"token": f"token_id:{token + 500}", "logprob": -0.6},
        ]
        choice |= {"token_ids": [token], "logprobs": {"content": [{"top_logprobs": tops}]}}
    finish = more.pop("finish", None)
    return {"choices": [choice | {"finish_reason": finish}], **more}


def collected(*chunks: dict[str, Any]) -> Collector:
    """Return a collector that has taken the chunks, one every 0.1 s."""
    collector = Collector()
    for number, one in enumerate(chunks, 1):
        collector.add(one, number / 10)
    return collector


OPENING = chunk("", prompt_token_ids=[5, 6, 7])
USAGE = {"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


def test_the_first_text_is_the_first_token() -> None:
    """The chunk that opens the message is none: it comes before anything was generated."""
    answer = collected(OPENING, chunk("A", 1), chunk("B", 2, finish="stop"), USAGE).end(0.9)
    assert answer.first_s == pytest.approx(0.2)
    assert answer.total_s == 0.9
    assert answer.between_tokens_s == pytest.approx(0.7)
    assert (answer.text, answer.token_ids, answer.prompt_ids) == ("AB", (1, 2), (5, 6, 7))
    assert answer.gaps == pytest.approx((0.5, 0.5))
    assert answer.runners_up == (501, 502)
    assert answer.cached == 2


def test_a_token_without_text_is_not_first() -> None:
    """Half a character shows nothing yet, and a person sees nothing."""
    answer = collected(OPENING, chunk("", 1), chunk("é", 2, finish="length")).end(0.5)
    assert answer.first_s == pytest.approx(0.3)


def test_usage_without_details_means_nothing_cached() -> None:
    """VLLM leaves the details out when there is nothing to tell."""
    answer = collected(OPENING, chunk("A", 1, finish="stop"), {"usage": {}}).end(0.5)
    assert answer.cached == 0


@pytest.mark.parametrize(
    ("chunks", "problem"),
    [
        pytest.param((OPENING, chunk("A", 1)), "finish_reason", id="cut off"),
        pytest.param((OPENING, chunk("", 1, finish="stop")), "no text", id="no text"),
        pytest.param((OPENING, chunk("A", finish="stop")), "token ids", id="no token ids"),
        pytest.param((chunk("A", 1, finish="stop"),), "token ids", id="no prompt ids"),
    ],
)
def test_an_incomplete_stream_is_no_answer(
    chunks: tuple[dict[str, Any], ...], problem: str
) -> None:
    """A call that cannot be measured ends the demo; it is never a zero in a table."""
    with pytest.raises(IncompleteAnswer, match=problem):
        collected(*chunks).end(0.5)


def test_fewer_log_probabilities_than_tokens_are_refused() -> None:
    """A tie could not be told from a difference then."""
    bare = {"choices": [{"delta": {"content": "B"}, "token_ids": [2], "finish_reason": "stop"}]}
    with pytest.raises(IncompleteAnswer, match="2 tokens but 1"):
        collected(OPENING, chunk("A", 1), bare).end(0.5)


def test_a_single_candidate_is_never_a_tie() -> None:
    """Where only one token was possible the gap is infinite."""
    one = chunk("A", 1, finish="stop")
    del one["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]
    answer = collected(OPENING, one).end(0.5)
    assert answer.gaps == (float("inf"),)
    assert answer.runners_up == (None,)
    assert answer.between_tokens_s is None
