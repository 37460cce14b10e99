"""Making calls: through our router with our client, or in two legs as a stock proxy does.

Both kinds of arm are timed alike: from before the first request to the first text at the
client, everything between included. The stock legs are made by the demo itself, without a
proxy between, which spares them one hop.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import openai

import turncache
from turncache import Outcome
from turncache.errors import EngineFault
from turncache.protocol import FINAL_HEADER, REQUEST_ID_HEADER
from turncache_server.stock import HAND_OVER, bringing_back
from turncache_tools.demo.answers import Answer, Collector, IncompleteAnswer
from turncache_tools.demo.history import Message

_TIMEOUT_S: Final = 300.0
#: Longer than any wait of the demo on any machine: what it shows is not about expiry.
_RETAIN_S: Final = 1800.0
_SEED: Final = 0

OnText = Callable[[str], None]
Clock = Callable[[], float]


def ignore(_: str) -> None:
    """Take text and do nothing with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One call of the agent.

    Attributes:
        messages: the whole history.
        salt: ``cache_salt``: calls with different salts share no KV.
        session: id of the session, None for a call without one.
        max_tokens: longest answer.
        final: nothing follows in this session.
    """

    messages: Sequence[Message]
    salt: str
    session: str | None
    max_tokens: int
    final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An answer, and what the server said about its prompt's KV, None when it said nothing."""

    answer: Answer
    outcome: Outcome | None = None


class Caller(Protocol):
    """How the calls of an arm reach its engines."""

    def ask(self, question: Question, on_text: OnText = ignore) -> Reply:
        """Make one streamed call; ``on_text`` gets the text as it comes."""
        ...

    def fill(self, messages: Sequence[Message], salt: str) -> int:
        """Make one call of somebody else: one token, no session; return its prompt's tokens."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class RoutedCaller:
    """Calls through our router: the agent's with our client, the others' with the stock one.

    Args:
        base_url: of the router, without ``/v1``.
        model: name of the model.
        clock: monotonic seconds.
    """

    def __init__(self, base_url: str, model: str, *, clock: Clock = time.perf_counter) -> None:
        self._url = base_url
        self._model = model
        self._clock = clock
        settings: dict[str, Any] = {
            "base_url": f"{base_url}/v1",
            "api_key": "-",
            "timeout": _TIMEOUT_S,
            "max_retries": 0,
        }
        self._client = turncache.OpenAI(**settings)
        self._plain = openai.OpenAI(**settings)

    def ask(self, question: Question, on_text: OnText = ignore) -> Reply:
        """Make one streamed call of the agent's session."""
        client: openai.OpenAI = self._plain
        if question.session is not None:
            session = turncache.session(question.session, retain_s=_RETAIN_S)
            client = self._client.with_session(session)
        headers = {FINAL_HEADER: "true"} if question.final and question.session else {}
        with _failing_as(self._url):
            started_s = self._clock()
            stream = client.chat.completions.create(
                **_streamed(self._model, question), extra_headers=headers
            )
            answer = _collect(stream, started_s, self._clock, on_text)
        return Reply(answer=answer, outcome=turncache.outcome(stream))

    def fill(self, messages: Sequence[Message], salt: str) -> int:
        """Make one call of somebody else."""
        with _failing_as(self._url):
            done = self._plain.chat.completions.create(**_one_token(self._model, messages, salt))
        return _num_prompt_tokens(done)

    def close(self) -> None:
        """Close both clients."""
        self._client.close()
        self._plain.close()


class StockPairCaller:
    """Calls to a stock prefill and decode pair: two legs, as every example proxy makes them.

    Args:
        prefill_url: base URL of the prefill engine, without ``/v1``.
        decode_url: likewise of the decode engine.
        model: name of the model.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        prefill_url: str,
        decode_url: str,
        model: str,
        *,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._model = model
        self._clock = clock
        self._urls = (prefill_url, decode_url)
        self._prefill, self._decode = (
            openai.OpenAI(base_url=f"{url}/v1", api_key="-", timeout=_TIMEOUT_S, max_retries=0)
            for url in self._urls
        )

    def ask(self, question: Question, on_text: OnText = ignore) -> Reply:
        """Make one streamed call; a stock engine knows no sessions."""
        started_s = self._clock()
        request_id, params = self._prefill_leg(question.messages, question.salt, HAND_OVER)
        with _failing_as(self._urls[1]):
            stream = self._decode.chat.completions.create(
                **_streamed(self._model, question, kv_transfer_params=params),
                extra_headers={REQUEST_ID_HEADER: request_id},
            )
            answer = _collect(stream, started_s, self._clock, on_text)
        return Reply(answer=answer)

    def fill(self, messages: Sequence[Message], salt: str) -> int:
        """Make one call of somebody else, in two legs."""
        done, _ = self.whole(messages, salt, max_tokens=1)
        return _num_prompt_tokens(done)

    def whole(
        self,
        messages: Sequence[Message],
        salt: str,
        *,
        max_tokens: int,
        returned: Mapping[str, Any] | None = None,
    ) -> tuple[Any, Mapping[str, Any] | None]:
        """Make one call without streaming: the only kind whose answer says how to return KV.

        Args:
            messages: the history.
            salt: ``cache_salt``.
            max_tokens: longest answer.
            returned: what decode said after the previous call of the conversation: prefill
                reads that KV back (stock ``bidirectional_kv_xfer``).

        Returns:
            The completion, and what decode says for the next call.
        """
        ask = HAND_OVER if returned is None else bringing_back(returned)
        request_id, params = self._prefill_leg(messages, salt, ask)
        with _failing_as(self._urls[1]):
            done = self._decode.chat.completions.create(
                **_one_token(self._model, messages, salt, kv_transfer_params=params)
                | {"max_tokens": max_tokens},
                extra_headers={REQUEST_ID_HEADER: request_id},
            )
        return done, (done.model_extra or {}).get("kv_transfer_params")

    def close(self) -> None:
        """Close both clients."""
        self._prefill.close()
        self._decode.close()

    def _prefill_leg(
        self, messages: Sequence[Message], salt: str, ask: Mapping[str, Any]
    ) -> tuple[str, Any]:
        # NIXL pairs the two requests by this id: it is the same on both legs.
        request_id = f"demo-{uuid.uuid4().hex}"
        with _failing_as(self._urls[0]):
            done = self._prefill.chat.completions.create(
                **_one_token(self._model, messages, salt, kv_transfer_params=dict(ask)),
                extra_headers={REQUEST_ID_HEADER: request_id},
            )
        params = (done.model_extra or {}).get("kv_transfer_params")
        if not params:
            raise EngineFault(
                self._urls[0], "the prefill leg's answer has no kv_transfer_params: is it NIXL's?"
            )
        return request_id, params


def _streamed(model: str, question: Question, **more: Any) -> dict[str, Any]:
    """Return the arguments of a measured call: greedy, with token ids and the two best."""
    return {
        "model": model,
        "messages": list(question.messages),
        "max_tokens": question.max_tokens,
        "temperature": 0,
        "seed": _SEED,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {
            "cache_salt": question.salt,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **more,
        },
    }


def _one_token(model: str, messages: Sequence[Message], salt: str, **more: Any) -> dict[str, Any]:
    return {
        "model": model,
        "messages": list(messages),
        "max_tokens": 1,
        "temperature": 0,
        "seed": _SEED,
        "stream": False,
        "extra_body": {"cache_salt": salt, **more},
    }


def _num_prompt_tokens(done: Any) -> int:
    return 0 if done.usage is None else int(done.usage.prompt_tokens)


def _collect(stream: Any, started_s: float, clock: Clock, on_text: OnText) -> Answer:
    collector = Collector()
    with stream:
        for chunk in stream:
            at_s = clock() - started_s
            text = collector.add(chunk.model_dump(), at_s)
            if text:
                on_text(text)
    return collector.end(clock() - started_s)


@contextmanager
def _failing_as(url: str) -> Iterator[None]:
    """Turn what a client raises into the fault of the engine that it asked."""
    try:
        yield
    except openai.APIStatusError as error:
        raise EngineFault(url, f"answered {error.status_code}: {error.message}") from error
    except (openai.APIError, IncompleteAnswer) as error:
        raise EngineFault(url, f"the call failed: {error}") from error
