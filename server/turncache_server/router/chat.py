"""What the router reads of a chat completion request. Pure.

Only members that the router itself acts on, or overrides in a leg, are checked here; the
rest is the engine's to judge. The types are stricter than vLLM's: it reads ``"stream":
"true"`` as a boolean, and a router that reads it otherwise would serve another request
than the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from turncache_server.router.body import Body
from turncache_server.router.errors import invalid

_WORDS: Final = {
    bool: "a boolean",
    int: "an integer",
    str: "a string",
    list: "an array",
    dict: "an object",
}
#: Member to legal types; null stands for absent everywhere but in ``messages``.
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "conversation_id": (str,),
    "echo": (bool,),
    "ignore_eos": (bool,),
    "logprobs": (bool,),
    "max_completion_tokens": (int,),
    "max_tokens": (int,),
    "min_tokens": (int,),
    "model": (str,),
    "n": (int,),
    "prompt_cache_key": (str,),
    "prompt_logprobs": (int,),
    "session_id": (str,),
    "stop": (str, list),
    "stop_token_ids": (list,),
    "stream": (bool,),
    "stream_options": (dict,),
    "tool_choice": (str, dict),
    "tools": (list,),
    "top_logprobs": (int,),
    "truncate_prompt_tokens": (int,),
    "use_beam_search": (bool,),
    "vllm_xargs": (dict,),
}
#: ``function`` is the older name, which vLLM's templates still know.
_RESULT_ROLES: Final = ("tool", "function")
_LEAST: Final = {"n": 1, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat completion request, as far as plan and legs depend on it.

    Attributes:
        model: served name, None for the engine's default.
        stream: whether the answer comes as server-sent events.
        num_choices: answers that were asked for.
        has_answers: the history has an assistant message: earlier calls may have left KV.
        brings_results: the history ends in a tool's result: a tool wait is over.
        max_tokens: longest answer in tokens, None for no limit of the client's.
        one_engine: the member because of which one engine has to serve the call alone,
            None when two can share it.
    """

    model: str | None
    stream: bool
    num_choices: int
    has_answers: bool
    brings_results: bool
    max_tokens: int | None
    one_engine: str | None


def read_chat(body: Body) -> ChatRequest:
    """Check a body and read what the router needs.

    Raises:
        ApiError: 400, naming the member that has a wrong type or an impossible value.
    """
    for name, kinds in _TYPES.items():
        _check_type(name, body.get(name), kinds)
    for name, least in _LEAST.items():
        value = body.get(name)
        if value is not None and value < least:
            raise invalid(f"{name}: {value} is below {least}.", param=name)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise invalid("messages: expected an array of at least one message.", param="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise invalid(f"messages[{index}]: expected an object.", param="messages")
    # The precedence is vLLM's (ChatCompletionRequest.build_tok_params).
    longest = body.get("max_completion_tokens")
    longest = body.get("max_tokens") if longest is None else longest
    shortest = body.get("min_tokens")
    if longest is not None and shortest is not None and shortest > longest:
        raise invalid(
            f"min_tokens: {shortest} is more than the longest answer of {longest} tokens.",
            param="min_tokens",
        )
    _check_dropped(body)
    return ChatRequest(
        model=body.get("model") or None,
        stream=bool(body.get("stream")),
        num_choices=body.get("n") or 1,
        has_answers=any(message.get("role") == "assistant" for message in messages),
        brings_results=messages[-1].get("role") in _RESULT_ROLES,
        max_tokens=longest,
        one_engine=_one_engine(body),
    )


def _check_dropped(body: Body) -> None:
    """Refuse what vLLM refuses of members that the prefill leg leaves out.

    Decode would find it out, but only after prefill has computed the whole prompt.
    """
    if body.get("stream_options") and not body.get("stream"):
        raise invalid("stream_options: only with stream=true.", param="stream_options")
    for name in ("top_logprobs", "logprob_token_ids"):
        if body.get(name) and not body.get("logprobs"):
            raise invalid(f"{name}: only with logprobs=true.", param=name)


def _check_type(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    if value is None:
        return
    # A boolean is an int in Python, and not in JSON.
    if isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool)):
        return
    words = " or ".join(_WORDS[kind] for kind in kinds)
    raise invalid(f"{name}: expected {words}, got {_json_word(value)}.", param=name)


def _json_word(value: Any) -> str:
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, float):
        return "a number with a fraction"
    return _WORDS[type(value)]


def _one_engine(body: Body) -> str | None:
    """Name the member that prefill and decode cannot serve together, if there is one.

    * ``n`` and ``use_beam_search``: several sequences; a pull fills one of them.
    * ``prompt_logprobs``: an engine that pulled the prompt's KV has no logits for it.
    * ``echo``: vLLM sets ``prompt_logprobs`` from it (``to_sampling_params``).
    * ``truncate_prompt_tokens``: what is cut depends on ``max_tokens``, which the prefill
      leg changes (``TokenizeParams.max_truncation_tokens``): two different prompts.
    """
    if (body.get("n") or 1) > 1:
        return "n"
    for name in ("use_beam_search", "echo"):
        if body.get(name):
            return name
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if body.get(name) is not None:
            return name
    return None
