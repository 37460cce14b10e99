"""The router's legs, read by vLLM's own request model."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from turncache.protocol import EngineHints
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
