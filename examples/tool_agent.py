"""An agent whose tools take time. The only turncache in it: one import, one session."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import openai

import turncache
from turncache import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find lines of the standard library's json package.",
            "parameters": {
                "type": "object",
                "properties": {"pattern": {"type": "string"}},
                "required": ["pattern"],
            },
        },
    }
]


def search(pattern: str, *, seconds: float) -> str:
    """Look the pattern up, as slowly as a real tool."""
    time.sleep(seconds)
    source = Path(json.__file__).read_text()
    found = [line for line in source.splitlines() if re.search(re.escape(pattern), line)]
    return "\n".join(found[:8]) or "nothing found"


def run(client: OpenAI, model: str, question: str, *, max_calls: int, tool_seconds: float) -> str:
    """Work on a question until the model answers, or the calls are used up."""
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(max_calls):
        result = client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=64
        )
        answer = result.choices[0].message
        messages.append(answer)
        if not answer.tool_calls:
            return answer.content or ""
        for call in answer.tool_calls:
            arguments = json.loads(call.function.arguments or "{}")
            text = search(str(arguments.get("pattern", "def")), seconds=tool_seconds)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
    return "(no answer within the calls that were allowed)"


def main() -> None:
    """Ask one question and show what happened to the KV."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--question", default="Which functions does json define?")
    parser.add_argument("--max-calls", type=int, default=6)
    parser.add_argument("--tool-seconds", type=float, default=2.0)
    options = parser.parse_args()
    with (
        OpenAI(
            base_url=options.base_url, api_key=os.environ.get("OPENAI_API_KEY") or "-"
        ) as client,
        turncache.session("example") as session,
    ):
        print(
            run(
                client,
                options.model,
                options.question,
                max_calls=options.max_calls,
                tool_seconds=options.tool_seconds,
            )
        )
        print(session)


if __name__ == "__main__":
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"no answer from {error.request.url}: {error.__cause__ or error}")
    except openai.APIStatusError as error:
        sys.exit(f"{error.request.url} refuses: {' '.join(error.message.split())[:300]}")
    except turncache.TurncacheError as error:
        sys.exit(str(error))
