"""Two calls before the first user's: handshakes are done and kernels have run once."""

from __future__ import annotations

import http.client
import secrets
from collections.abc import Mapping
from typing import Any, Final

from turncache.errors import EngineFault
from turncache.protocol import FINAL_HEADER, SESSION_HEADER
from turncache_server.launch.loopback import Answer, post_json
from turncache_server.stock import HAND_OVER

#: About 150 to 300 tokens in any vocabulary: more than the threshold below which nothing is
#: transferred, less than any usable context.
_TEXT: Final = " ".join(f"Line {n}: the quick brown fox." for n in range(16))
_MAX_TOKENS: Final = 8
_TIMEOUT_S: Final = 120.0


def warm_up(base_url: str, model: str) -> str | None:
    """Make two calls of one session; return why that was not possible, None for success.

    The second continues the first, so that on a pair KV has travelled both ways.

    Raises:
        EngineFault: a server error, or no answer.
    """
    session = f"turncache-warm-up-{secrets.token_hex(4)}"
    messages = [{"role": "user", "content": _TEXT}]
    for headers in ({}, {FINAL_HEADER: "true"}):
        answer = _post(
            f"{base_url}/v1/chat/completions",
            {"model": model, "messages": messages, "max_tokens": _MAX_TOKENS, "temperature": 0},
            {SESSION_HEADER: session, **headers},
        )
        if answer.status != 200:
            return f"HTTP {answer.status}: {answer.excerpt}"
        messages.append({"role": "assistant", "content": _content(answer)})
        messages.append({"role": "user", "content": _TEXT})
    return None


def warm_up_stock_pair(prefill_url: str, decode_url: str, model: str) -> str | None:
    """Send one call through both engines as a stock proxy does; return as :func:`warm_up`.

    Raises:
        EngineFault: a server error, or no answer.
    """
    body = {"model": model, "prompt": _TEXT, "temperature": 0}
    path = "/v1/completions"
    first = _post(
        prefill_url + path, {**body, "max_tokens": 1, "kv_transfer_params": dict(HAND_OVER)}, {}
    )
    if first.status != 200:
        return f"prefill: HTTP {first.status}: {first.excerpt}"
    params = first.data().get("kv_transfer_params")
    second = _post(
        decode_url + path,
        {**body, "max_tokens": _MAX_TOKENS, "kv_transfer_params": params},
        {},
    )
    return None if second.status == 200 else f"decode: HTTP {second.status}: {second.excerpt}"


def _post(url: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
    try:
        answer = post_json(url, body, headers, timeout_s=_TIMEOUT_S)
    except (OSError, http.client.HTTPException) as error:
        raise EngineFault(url, f"the warm-up call failed: {error!r}") from error
    if answer.status >= 500:
        raise EngineFault(
            url, f"the warm-up call was answered with {answer.status}: {answer.excerpt}"
        )
    return answer


def _content(answer: Answer) -> str:
    choices = answer.data().get("choices") or [{}]
    return str(choices[0].get("message", {}).get("content") or "")
