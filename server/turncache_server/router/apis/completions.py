"""``/v1/completions``: plain text or tokens, without roles. Pure."""

from __future__ import annotations

from typing import Final

from turncache_server.router.apis.api import (
    Api,
    CallRequest,
    check_least,
    check_types,
    first_named,
)
from turncache_server.router.apis.chat import (
    PREFILL_DROP,
    SHARED_TYPES,
    check_lengths,
    one_engine,
)
from turncache_server.router.body import Body
from turncache_server.router.ending import ChatEnding
from turncache_server.router.errors import invalid

_TYPES: Final[dict[str, tuple[type, ...]]] = {
    **SHARED_TYPES,
    "best_of": (int,),
    "logprobs": (int,),
    "prompt": (str, list),
    "suffix": (str,),
}
#: Without ``max_tokens`` vLLM answers with 16 tokens; 0 is legal with ``echo``.
_LEAST: Final = {"n": 1, "max_tokens": 0, "min_tokens": 0}


def read_completion(body: Body) -> CallRequest:
    """Check a body and read what the router needs.

    Raises:
        ApiError: 400, naming the member that has a wrong type or an impossible value.
    """
    check_types(body, _TYPES)
    check_least(body, _LEAST)
    check_lengths(body, body.get("max_tokens"))
    prompt = body.get("prompt")
    if not prompt and body.get("prompt_embeds") is None:
        raise invalid("prompt: expected a text, or tokens.", param="prompt")
    # Several prompts are several requests: vLLM gives all of them the same hints, and a pull
    # fills one. (A list of numbers is one prompt.)
    several = isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt)
    alone = "prompt" if several else one_engine(body)
    if alone is None and body.get("max_tokens") == 0:
        alone = "max_tokens"
    return CallRequest(
        model=body.get("model") or None,
        stream=bool(body.get("stream")),
        num_choices=(body.get("n") or 1) * (len(prompt) if several else 1),
        max_tokens=body.get("max_tokens"),
        one_engine=alone or first_named(body, ("best_of", "prompt_embeds", "suffix")),
    )


_PREFILL_PUT: Final = {"stream": "false", "n": "1", "max_tokens": "1"}

COMPLETIONS: Final = Api(
    name="completions",
    path="/v1/completions",
    read=read_completion,
    collector=lambda num_choices, final: ChatEnding(num_choices=num_choices, final=final),
    prefill_put=lambda _: _PREFILL_PUT,
    prefill_drop=PREFILL_DROP | {"best_of"},
)
