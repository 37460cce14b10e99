"""``turncache doctor --base-url``: what keeps an OpenAI-compatible server from reusing KV.

Asks the server itself, with a handful of small calls: nothing is assumed of its flags.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Final

import openai

import turncache
from turncache.protocol import CALL_HEADER, Outcome
from turncache_tools.finding import Finding

#: Long enough for several cache blocks of any size that vLLM uses, short enough to be cheap.
_NUM_WORDS: Final = 400
#: Marks by which models write tool calls as text.
_CALL_MARKS: Final = ("<tool_call", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<|tool_call")
_TOOL: Final[Any] = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Returns the current time.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def look_at_server(client: turncache.OpenAI, model: str | None = None) -> list[Finding]:
    """Look at the server that ``client`` calls.

    Args:
        client: its base URL, key and time limits are used; it must be allowed to tell the
            host of sessions.
        model: name of the model, None for the first that the server lists.
    """
    where = str(client.base_url).rstrip("/")
    try:
        name = model or _first_model(client)
        if name is None:
            return [_failed(where, "lists no model: name one with --model")]
        return [
            Finding(subject=where, verdict="ok", detail=f"answers, model {name}"),
            *_look_at_reuse(client, name),
            _look_at_tools(client, name),
            *_look_at_template(client, name),
        ]
    except openai.AuthenticationError:
        return [_failed(where, "refuses the key: name another with --api-key or OPENAI_API_KEY")]
    except openai.APIStatusError as error:
        return [_failed(where, f"answers with status {error.status_code}: {_words(error)}")]
    except openai.APIConnectionError as error:
        why = error.__cause__ or error
        return [
            _failed(
                where, f"does not answer ({str(why) or type(why).__name__}): is it running there?"
            )
        ]


def _first_model(client: turncache.OpenAI) -> str | None:
    return next((model.id for model in client.models.list()), None)


def _look_at_reuse(client: turncache.OpenAI, model: str) -> Iterator[Finding]:
    """Send one prompt twice: whether the second found it in the cache, and who says so."""
    run = uuid.uuid4().hex
    text = f"{run} " + " ".join(f"word{number}" for number in range(_NUM_WORDS))
    messages: list[Any] = [
        {"role": "system", "content": text},
        {"role": "user", "content": "Say ok."},
    ]
    session = turncache.session(f"doctor-{run}")
    own = client.with_session(session)
    ask = own.chat.completions.with_raw_response.create
    raw = [ask(model=model, messages=messages, max_tokens=1) for _ in range(2)][-1]
    outcome = turncache.outcome(raw.parse())
    # Until it is said: the client is about to be closed, and would take a call under way along.
    asyncio.run(session.aend())
    yield _who_says(outcome, speaks=CALL_HEADER in raw.headers)
    record = session.calls[-1]
    if outcome is None and record.local is None:
        yield Finding(
            subject="usage details",
            verdict="note",
            detail="usage has no cached tokens: start vLLM with --enable-prompt-tokens-details",
        )
        yield Finding(
            subject="prefix caching", verdict="note", detail="cannot be seen without usage details"
        )
        return
    yield Finding(subject="usage details", verdict="ok", detail="answers say what was cached")
    reused, prompt = (record.local or 0) + (record.returned or 0), record.prompt or 0
    if reused:
        yield Finding(
            subject="prefix caching",
            verdict="ok",
            detail=f"{reused:,} of {prompt:,} tokens of an equal prompt were reused",
        )
        return
    yield _failed(
        "prefix caching",
        f"nothing of an equal prompt of {prompt:,} tokens was reused: start vLLM with "
        "--enable-prefix-caching, and look whether its pool is full",
    )


def _who_says(outcome: Outcome | None, *, speaks: bool) -> Finding:
    if outcome is None and speaks:
        return Finding(
            subject="turncache",
            verdict="note",
            detail="a router of ours answers, but its engine reports no outcome: its extension "
            "is off or not reached. Ask the engine's control socket: turncache doctor "
            "tcp://HOST:PORT",
        )
    if outcome is None:
        return Finding(
            subject="turncache",
            verdict="note",
            detail="no Turncache-Outcome in the answer: a server without turncache, or a proxy "
            "that drops headers. Sessions are sent; what happens to KV shows in usage only",
        )
    return Finding(
        subject="turncache",
        verdict="ok",
        detail=f"outcomes are reported (plan {outcome.plan or '-'}, reason {outcome.reason})",
    )


def _look_at_tools(client: turncache.OpenAI, model: str) -> Finding:
    """Offer a tool: whether the server takes it, and gives the model's call back as one."""
    messages: list[Any] = [{"role": "user", "content": "What time is it? Call get_time."}]
    subject = "tool parser"
    try:
        answer = client.with_session(turncache.session()).chat.completions.create(
            model=model, messages=messages, tools=[_TOOL], tool_choice="auto", max_tokens=64
        )
    except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
        return _failed(
            subject,
            f"tools are refused ({_words(error)}): start vLLM with --enable-auto-tool-choice "
            "--tool-call-parser NAME; without it no tool wait is seen",
        )
    message = answer.choices[0].message if answer.choices else None
    if message is not None and message.tool_calls:
        return Finding(subject=subject, verdict="ok", detail="a tool call came back as one")
    content = (message.content if message is not None else None) or ""
    if any(mark in content for mark in _CALL_MARKS):
        return _failed(
            subject,
            "a tool call came back as text: --tool-call-parser does not fit the model, and its "
            "tool waits look like answers",
        )
    return Finding(
        subject=subject,
        verdict="note",
        detail="tools are taken, but the model called none: whether the parser fits its calls "
        "is not known",
    )


def _look_at_template(client: turncache.OpenAI, model: str) -> Iterator[Finding]:
    """Render a tool loop, and the next turn after it: how much of the tokens stays the same."""
    subject = "chat template"
    loop = _loop(reasoning="I need the time, so I call the tool.")
    bare = _loop(reasoning=None)
    later = [
        *loop,
        {"role": "assistant", "content": "It is noon."},
        {"role": "user", "content": "Thank you. And tomorrow?"},
    ]
    try:
        with_reasoning, without, next_turn = (
            _tokens(client, model, messages) for messages in (loop, bare, later)
        )
    except (openai.APIStatusError, LookupError, TypeError) as error:
        yield Finding(
            subject=subject,
            verdict="note",
            detail=f"cannot be looked at: no /tokenize for messages ({type(error).__name__}). "
            "Behind a router, name the URL of an engine",
        )
        return
    kept = _num_common(with_reasoning, next_turn)
    if kept < len(with_reasoning):
        yield Finding(
            subject=subject,
            verdict="note",
            detail=f"an old turn is rendered otherwise than a running one (from token {kept} of "
            f"{len(with_reasoning)}): it strips reasoning or marks the last message, so that "
            "each user message makes the turn before it new. Look for an option such as "
            "preserve_thinking in chat_template_kwargs",
        )
    elif with_reasoning == without:
        yield Finding(
            subject=subject,
            verdict="note",
            detail="reasoning is never rendered: what the model thought cannot be reused. "
            "Without reasoning this costs nothing",
        )
    else:
        yield Finding(
            subject=subject, verdict="ok", detail="the next turn continues the tokens of the last"
        )


def _loop(reasoning: str | None) -> list[dict[str, Any]]:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    answer: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
    if reasoning is not None:
        # Two names are in use for the same member.
        answer |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return [
        {"role": "user", "content": "What time is it?"},
        answer,
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]


def _tokens(client: turncache.OpenAI, model: str, messages: Sequence[Any]) -> list[int]:
    """Return the tokens that the server makes of ``messages``, without a generation prompt."""
    url = client.base_url.copy_with(path="/tokenize", query=None)
    body = {"model": model, "messages": messages, "add_generation_prompt": False, "tools": [_TOOL]}
    answer: Any = client.post(str(url), body=body, cast_to=object)
    tokens = answer["tokens"]
    if not isinstance(tokens, list):
        raise TypeError("tokens are no list")
    return tokens


def _num_common(old: Sequence[int], new: Sequence[int]) -> int:
    pairs = enumerate(zip(old, new, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(old), len(new)))


def _failed(subject: str, detail: str) -> Finding:
    return Finding(subject=subject, verdict="failed", detail=detail)


def _words(error: openai.APIStatusError) -> str:
    text = " ".join(str(error.message).split())
    return text if len(text) <= 160 else text[:157] + "..."
