"""Saying that nothing follows in a session, when only the end of a run shows it.

A notice to the router, between calls (``POST /v1/sessions``). It only advises and may fail:
then the server keeps the session's KV for as long as it would have without it.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import openai

from turncache import Session
from turncache.hosts import is_known

LOG: Final = logging.getLogger("turncache")

_PATH: Final = "/sessions"
_NOTICE: Final = {"notice": "final"}
_TIMEOUT_S: Final = 2.0


def end(session: Session, model: Any) -> None:
    """Tell the server of ``model`` that nothing follows in ``session``; never raises."""
    client = _listener(getattr(model, "root_client", None))
    if client is not None:
        try:
            client.post(_PATH, cast_to=object, body=_NOTICE, options=_options(session))
        except openai.OpenAIError as error:
            _say(session, error)


async def aend(session: Session, model: Any) -> None:
    """Tell the server of ``model`` that nothing follows in ``session``; never raises."""
    client = _listener(getattr(model, "root_async_client", None))
    if client is not None:
        try:
            await client.post(_PATH, cast_to=object, body=_NOTICE, options=_options(session))
        except openai.OpenAIError as error:
            _say(session, error)


def _listener(client: Any) -> Any:
    """Return a client for the notice, or None when the server would not understand it."""
    if client is None or not is_known(client.base_url.host, client.base_url.port):
        return None
    return client.with_options(timeout=_TIMEOUT_S, max_retries=0)


def _options(session: Session) -> dict[str, Any]:
    return {"headers": session.headers()}


def _say(session: Session, error: openai.OpenAIError) -> None:
    LOG.info(
        "session %s: its end could not be told (%s): the server keeps its KV as it would "
        "without a notice",
        session.id,
        type(error).__name__,
    )
