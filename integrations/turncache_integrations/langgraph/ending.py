"""Saying that nothing follows, when only the end of a run shows that it was the end.

The wire contract says so with a call. A run's last call is made before anybody knows that
it is the last, so one more is made, of one token. It is a notice: it may fail, and then the
server keeps the session's KV for as long as it would have without it.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import openai

from turncache import Session
from turncache.hosts import is_known
from turncache.protocol import FINAL_HEADER

LOG: Final = logging.getLogger("turncache")

_TIMEOUT_S: Final = 2.0
_LAST_WORD: Final = [{"role": "user", "content": "."}]


def end(session: Session, model: Any) -> None:
    """Tell the server of ``model`` that nothing follows in ``session``; never raises."""
    client = _listener(getattr(model, "root_client", None), session)
    if client is not None:
        try:
            client.chat.completions.create(**_call(model))
        except openai.OpenAIError as error:
            _say(session, error)


async def aend(session: Session, model: Any) -> None:
    """Tell the server of ``model`` that nothing follows in ``session``; never raises."""
    client = _listener(getattr(model, "root_async_client", None), session)
    if client is not None:
        try:
            await client.chat.completions.create(**_call(model))
        except openai.OpenAIError as error:
            _say(session, error)


def _listener(client: Any, session: Session) -> Any:
    """Return a client for the notice, or None when the server would not understand it."""
    if client is None or not is_known(client.base_url.host, client.base_url.port):
        return None
    return client.with_options(timeout=_TIMEOUT_S, max_retries=0).with_session(session)


def _call(model: Any) -> dict[str, Any]:
    return {
        "model": model.model_name,
        "messages": _LAST_WORD,
        "max_tokens": 1,
        "extra_headers": {FINAL_HEADER: "true"},
    }


def _say(session: Session, error: openai.OpenAIError) -> None:
    LOG.info(
        "session %s: its end could not be told (%s): the server keeps its KV as it would "
        "without a notice",
        session.id,
        type(error).__name__,
    )
