"""``/v1/chat/completions``. Pure."""

from __future__ import annotations

from typing import Final

from turncache_server.router.apis.api import (
    Api,
    CallRequest,
    check_least,
    check_objects,
    check_types,
    first_named,
    has_media,
)
from turncache_server.router.body import Body
from turncache_server.router.ending import ChatEnding
from turncache_server.router.errors import invalid
from turncache_server.router.histories import chat_history
from turncache_server.router.next_prompts import next_messages

#: Member to legal types, of what chat and plain completions share.
SHARED_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "conversation_id": (str,),
    "echo": (bool,),
    "ignore_eos": (bool,),
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
    "truncate_prompt_tokens": (int,),
    "use_beam_search": (bool,),
    "vllm_xargs": (dict,),
}
_TYPES: Final[dict[str, tuple[type, ...]]] = {
    **SHARED_TYPES,
    "logprobs": (bool,),
    "max_completion_tokens": (int,),
    "tool_choice": (str, dict),
    "tools": (list,),
    "top_logprobs": (int,),
}
#: ``function`` is the older name, which vLLM's templates still know.
_RESULT_ROLES: Final = ("tool", "function")
_LEAST: Final = {"n": 1, "max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 0}

# min_tokens above 1 and stream_options without stream are a 400, a stop string or
# ignore_eos changes why one token ended, log-probabilities and token ids make it large.
#
# tools, tool_choice, response_format and structured_outputs stay although they only
# constrain the answer: a renderer may put tool choice and response format into the prompt
# (KimiK3Renderer does, and exclude_tools_when_tool_choice_none drops the tools), and the
# two legs must have the same prompt to the last token. A forced tool call that is cut off
# after one token is no error in vLLM (DelegatingParser._extract_tool_calls): for
# "required" the ValidationError is suppressed and there are no calls, for a named function
# the text becomes its arguments, and the other parsers answer with the text.
PREFILL_DROP: Final = frozenset(
    {
        "echo",
        "ignore_eos",
        "include_stop_str_in_output",
        "logprob_token_ids",
        "logprobs",
        "min_tokens",
        "prompt_logprobs",
        "return_prompt_text",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "stop",
        "stop_token_ids",
        "stream_interval",
        "stream_options",
        "top_logprobs",
    }
)


def read_chat(body: Body) -> CallRequest:
    """Check a body and read what the router needs.

    Raises:
        ApiError: 400, naming the member that has a wrong type or an impossible value.
    """
    check_types(body, _TYPES)
    check_least(body, _LEAST)
    messages = check_objects(body, "messages")
    # The precedence is vLLM's (ChatCompletionRequest.build_tok_params).
    longest = body.get("max_completion_tokens")
    longest = body.get("max_tokens") if longest is None else longest
    check_lengths(body, longest)
    for name in ("top_logprobs", "logprob_token_ids"):
        if body.get(name) and not body.get("logprobs"):
            raise invalid(f"{name}: only with logprobs=true.", param=name)
    return CallRequest(
        model=body.get("model") or None,
        stream=bool(body.get("stream")),
        num_choices=body.get("n") or 1,
        num_answers=sum(message.get("role") == "assistant" for message in messages),
        brings_results=messages[-1].get("role") in _RESULT_ROLES,
        max_tokens=longest,
        one_engine=one_engine(body) or ("messages" if has_media(messages) else None),
    )


def check_lengths(body: Body, longest: int | None) -> None:
    """Refuse what vLLM refuses of members that the prefill leg leaves out.

    Decode would find it out, but only after prefill has computed the whole prompt.

    Raises:
        ApiError: 400, naming the member.
    """
    shortest = body.get("min_tokens")
    if longest is not None and shortest is not None and shortest > longest:
        raise invalid(
            f"min_tokens: {shortest} is more than the longest answer of {longest} tokens.",
            param="min_tokens",
        )
    if body.get("stream_options") and not body.get("stream"):
        raise invalid("stream_options: only with stream=true.", param="stream_options")


def one_engine(body: Body) -> str | None:
    """Name the member that prefill and decode cannot serve together, if there is one.

    * ``n`` and ``use_beam_search``: several sequences; a pull fills one of them.
    * ``prompt_logprobs``: an engine that pulled the prompt's KV has no logits for it.
    * ``echo``: vLLM sets ``prompt_logprobs`` from it (``to_sampling_params``).
    * ``truncate_prompt_tokens``: what is cut depends on ``max_tokens``, which the prefill
      leg changes (``TokenizeParams.max_truncation_tokens``): two different prompts.
    """
    if (body.get("n") or 1) > 1:
        return "n"
    return first_named(
        body, ("use_beam_search", "echo", "prompt_logprobs", "truncate_prompt_tokens")
    )


def _prefill_put(_: Body) -> dict[str, str]:
    # Both limits, because max_completion_tokens wins in vLLM and older engines know only
    # max_tokens.
    return {"stream": "false", "n": "1", "max_tokens": "1", "max_completion_tokens": "1"}


CHAT: Final = Api(
    name="chat",
    path="/v1/chat/completions",
    read=read_chat,
    collector=lambda num_choices, final: ChatEnding(num_choices=num_choices, final=final),
    prefill_put=_prefill_put,
    prefill_drop=PREFILL_DROP,
    history=chat_history,
    next_messages=next_messages,
)
