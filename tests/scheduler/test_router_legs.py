"""The router's legs, read by vLLM's own request model."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from turncache.protocol import EngineHints
from turncache_server.router.apis import APIS, COMPLETIONS, MESSAGES, RESPONSES
from turncache_server.router.apis.api import Api
from turncache_server.router.apis.chat import CHAT
from turncache_server.router.body import Body
from turncache_server.router.legs import prefill_body, serving_body

pytestmark = pytest.mark.scheduler

HINTS = EngineHints(
    session="s", retain_s=0.0, source="decode-0", handover=True, call="prefill", request="r"
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "f"}}


def read(leg: bytes) -> Any:
    """Read a leg as vLLM's server does."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # vLLM's, of max_tokens
        return ChatCompletionRequest.model_validate_json(leg)


@pytest.mark.parametrize("choice", ["auto", "none", "required", NAMED])
def test_both_legs_are_accepted_and_have_one_prompt(choice: Any) -> None:
    """What vLLM builds the prompt from is equal; the prefill leg asks for one token."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "hé"}, {"role": "assistant", "content": None}],
        "tools": TOOLS,
        "tool_choice": choice,
        "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "low",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 50,
        "min_tokens": 10,
        "stop": ["x"],
        "stop_token_ids": [1],
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 2,
        "session_id": "raw",
        "kv_transfer_params": {"do_remote_prefill": True},
        "vllm_xargs": {"mine": 1, "tc_source": "evil"},
    }
    parsed = Body.parse(json.dumps(body).encode(), max_depth=20)
    prefill, decode = (
        read(prefill_body(CHAT, parsed, HINTS)),
        read(serving_body(CHAT, parsed, HINTS)),
    )
    assert prefill.messages == decode.messages
    assert prefill.build_chat_params(None, "auto") == decode.build_chat_params(None, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        one = prefill.to_sampling_params(prefill.max_completion_tokens, {})
        whole = decode.to_sampling_params(decode.max_tokens, {})
    assert (one.max_tokens, one.min_tokens, one.stop, one.logprobs) == (1, 0, [], None)
    assert (whole.max_tokens, whole.min_tokens, whole.stop, whole.logprobs) == (50, 10, ["x"], 2)
    assert one.extra_args == whole.extra_args == {"mine": 1, **HINTS.to_xargs()}
    assert prefill.session_id == decode.session_id == "s"


@pytest.mark.parametrize("text", ["", "[", "{", "[{", "<tool_call>", "<", " ", "call"])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_a_tool_call_cut_off_after_one_token_is_no_error(choice: Any, text: str) -> None:
    """The prefill leg keeps tool_choice: vLLM answers a truncated call, it does not fail."""
    from vllm.parser.abstract_parser import DelegatingParser
    from vllm.tool_parsers import ToolParserManager

    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {"<tool_call>": 1, "</tool_call>": 2}

    class Parser(DelegatingParser):
        tool_parser_cls = ToolParserManager.get_tool_parser("hermes")
        reasoning_parser_cls = None

    body = {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "tool_choice": choice}
    request = read(json.dumps({**body, "max_tokens": 1}).encode())
    parser = Parser(Tokenizer(), request.tools)
    parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=[1])


def schema_of(api: Api) -> type[Any]:
    """Return the class with which vLLM reads an API's requests."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    return {
        "chat": ChatCompletionRequest,
        "completions": CompletionRequest,
        "messages": AnthropicMessagesRequest,
        "responses": ResponsesRequest,
    }[api.name]


#: Words in the names of what limits, stops or enlarges an answer.
SHAPING = ("logprob", "max_", "min_tokens", "return_", "stop", "stream")
#: Such members that both legs keep, each for its reason.
KEPT = {
    # One token calls no tool.
    "max_tool_calls",
    # Only vLLM's render endpoints read these two.
    "return_mm_kwargs",
    "return_token_offsets",
    # Refuses the cut of a prompt that one engine serves alone.
    "truncate_prompt_tokens",
}


@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
def test_every_member_that_shapes_an_answer_is_dealt_with(api: Api) -> None:
    """A newer vLLM's member that limits, stops or enlarges answers is not overlooked."""
    body = Body.parse(b"{}", max_depth=2)
    dealt_with = api.prefill_drop | api.prefill_put(body).keys() | KEPT
    names = set(schema_of(api).model_fields)
    assert {n for n in names if any(word in n for word in SHAPING)} - dealt_with == set()
    assert {"cache_salt", "kv_transfer_params", "vllm_xargs"} <= names
    assert ("session_id" in names) is api.takes_session


@pytest.mark.parametrize(
    ("api", "body"),
    [
        (
            COMPLETIONS,
            {
                "prompt": "Where?",
                "logprobs": 3,
                "max_tokens": 50,
                "min_tokens": 10,
                "stop": ["x"],
                "stop_token_ids": [1],
                "ignore_eos": True,
                "structured_outputs": {"regex": "a+"},
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        (
            RESPONSES,
            {
                "input": [{"role": "user", "content": "Where?"}],
                "include": ["message.output_text.logprobs"],
                "top_logprobs": 3,
                "max_output_tokens": 50,
                "stop": ["x"],
                "stop_token_ids": [1],
                "ignore_eos": True,
                "text": {"format": {"type": "json_object"}},
                "tools": [{"type": "function", "name": "f", "parameters": {}, "strict": False}],
                "tool_choice": "required",
                "reasoning": {"effort": "low"},
                "stream": True,
            },
        ),
    ],
    ids=["completions", "responses"],
)
def test_the_prefill_leg_of_other_apis_asks_for_one_token(api: Api, body: dict[str, Any]) -> None:
    """As vLLM reads it: no stop, no log-probabilities; decode gets what the client sent."""
    parsed = Body.parse(json.dumps({"model": "m", **body}).encode(), max_depth=20)
    read_as = schema_of(api).model_validate_json
    prefill = read_as(prefill_body(api, parsed, HINTS))
    decode = read_as(serving_body(api, parsed, HINTS))
    one, whole = prefill.to_sampling_params(1, {}), decode.to_sampling_params(50, {})
    assert (one.max_tokens, one.min_tokens, one.stop, one.logprobs) == (1, 0, [], None)
    assert not one.ignore_eos
    assert (whole.max_tokens, whole.min_tokens) == (50, body.get("min_tokens", 0))
    assert (whole.stop, whole.logprobs, whole.ignore_eos) == (["x"], 3, True)
    assert one.structured_outputs == whole.structured_outputs
    assert one.extra_args == whole.extra_args == HINTS.to_xargs()
    assert prefill.session_id == decode.session_id == "s"
    if api is RESPONSES:
        assert prefill.build_chat_params(None, "auto") == decode.build_chat_params(None, "auto")
        assert (prefill.tools, prefill.store) == (decode.tools, False)


def test_the_prefill_leg_of_a_message_has_the_same_prompt() -> None:
    """Thinking, tools and choice stay in both legs; vLLM accepts a budget above one token."""
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages

    body = {
        "model": "m",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}],
        "stop_sequences": ["x"],
        "system": [{"type": "text", "text": "Be brief."}],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "stream": True,
    }
    parsed = Body.parse(json.dumps(body).encode(), max_depth=20)
    read_as = schema_of(MESSAGES).model_validate_json
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        prefill, decode = (
            AnthropicServingMessages.to_chat_completion_request(read_as(leg))
            for leg in (
                prefill_body(MESSAGES, parsed, HINTS),
                serving_body(MESSAGES, parsed, HINTS),
            )
        )
    assert prefill.messages == decode.messages
    assert prefill.build_chat_params(None, "auto") == decode.build_chat_params(None, "auto")
    assert (prefill.max_completion_tokens, decode.max_completion_tokens) == (1, 4096)
    assert (prefill.stop, decode.stop) == (None, ["x"])
    assert prefill.vllm_xargs == decode.vllm_xargs == HINTS.to_xargs()
