"""The models that we make, with the libraries of the engine environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from turncache_server.launch import models

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    }
]
CALL = {"id": "1", "type": "function", "function": {"name": "search", "arguments": {"q": "é"}}}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You help."},
    {"role": "user", "content": "Where is Laura?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "Rome"},
    {"role": "assistant", "content": "In Rome."},
    {"role": "user", "content": "And Peter?"},
]


def to_stderr(line: str) -> None:
    """Show progress where pytest keeps it for failures."""
    print(line, file=sys.stderr)


def tokenizer_of(name: str) -> Any:
    """Load the tokenizer of a model in the cache."""
    from transformers import AutoTokenizer

    folder = models.find(name)
    assert folder is not None, f"make models has not made {name}"
    return AutoTokenizer.from_pretrained(folder)


def test_the_tiny_model_is_the_same_wherever_it_is_made(tmp_path: Path) -> None:
    """Weights and tokenizer follow from the recipe: two builds are equal byte for byte."""
    made = models.build("tiny", tmp_path, progress=to_stderr)
    cached = models.build("tiny", progress=to_stderr)
    for name in ("model.safetensors", "tokenizer.json", "config.json", "chat_template.jinja"):
        assert (made / name).read_bytes() == (cached / name).read_bytes(), name
    config = json.loads((made / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"]) == (8, 512)


@pytest.mark.parametrize("name", sorted(models.RECIPES))
@pytest.mark.parametrize("with_tools", [True, False])
def test_a_prompt_continues_the_prompt_before_it(name: str, with_tools: bool) -> None:
    """Every call's prompt begins with the prompt and the answer of the call before."""
    tokenizer = tokenizer_of(name)
    tools = TOOLS if with_tools else None

    def render(messages: list[dict[str, Any]], *, ask: bool) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask
        )
        return text

    for end in range(2, len(CONVERSATION)):
        if CONVERSATION[end]["role"] != "assistant":
            continue
        before = render(CONVERSATION[:end], ask=True)
        after = render(CONVERSATION[: end + 1], ask=False)
        assert after.startswith(before)
        assert render(CONVERSATION, ask=True).startswith(after)


@pytest.mark.parametrize("name", sorted(models.RECIPES))
def test_tools_and_calls_are_in_the_prompt(name: str) -> None:
    """A model sees the tools, what was called, and what came back."""
    text: str = tokenizer_of(name).apply_chat_template(CONVERSATION, tools=TOOLS, tokenize=False)
    assert '"name": "search"' in text.partition("</tools>")[0]
    assert '<tool_call>\n{"name": "search", "arguments": {"q": "é"}}\n</tool_call>' in text
    assert "<|im_start|>tool\nRome<|im_end|>" in text
    assert "None" not in text
