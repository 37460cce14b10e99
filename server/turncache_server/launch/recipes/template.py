"""The chat template of the models that we make."""

from __future__ import annotations

import json
from typing import Final

#: ChatML with tools in the Hermes notation (vLLM: ``--tool-call-parser hermes``). It holds no
#: date and rewrites nothing, so the prompt of a call continues the prompt before it.
_TEMPLATE: Final = """\
{%- set has_system = messages[0].role == 'system' -%}
{%- if has_system or tools or DEFAULT_SYSTEM -%}
{{- '<|im_start|>system\\n' -}}
{{- (messages[0].content if has_system else DEFAULT_SYSTEM) or '' -}}
{%- if tools -%}
{{- '\\n\\n# Tools\\n\\n<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' + (tool | tojson) -}}
{%- endfor -%}
{{- '\\n</tools>\\n\\nTo call one, answer with <tool_call>{"name": ..., "arguments": ...}' -}}
{{- '</tool_call>.' -}}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if not (loop.first and has_system) -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": ' + (call.function.name | tojson) -}}
{{- ', "arguments": ' + (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def chat_template(default_system: str = "") -> str:
    """Return the template, with a system message for conversations that have none."""
    return f"{{%- set DEFAULT_SYSTEM = {json.dumps(default_system)} -%}}\n{_TEMPLATE}"
