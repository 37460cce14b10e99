"""What a server is: its model, how many tokens words make there, which members it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from turncache.errors import EngineFault, UsageError
from turncache_tools.bench.client import Asked, CallFailed, Client
from turncache_tools.bench.texts import Tokens, fit_tokens, text

_PROBE_WORDS: Final = (32, 160)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What was found out.

    Attributes:
        model: its name.
        tokens: how many of them words make.
        ours: answers carry our header.
        body: members that force the length of answers, empty for a strict server.
    """

    model: str
    tokens: Tokens
    ours: bool
    body: Mapping[str, Any]


async def probe(client: Client, urls: Sequence[str], *, model: str | None, nonce: str) -> Probed:
    """Find out what the servers at ``urls`` are; the first is asked about model and tokens.

    Args:
        client: for calls.
        urls: base URLs.
        model: its name, None for the first that is listed.
        nonce: of this start of the program.

    Raises:
        EngineFault: a server does not answer a call, or reports no usage.
        UsageError: no model is listed.
    """
    first = urls[0]
    model = model or await _first_model(client, first)
    counts: list[tuple[int, int]] = []
    ours = False
    for words in _PROBE_WORDS:
        asked = await _ask(client, first, model, words=words, block=f"{nonce}-probe")
        if asked.streamed.prompt is None:
            raise EngineFault(first, "reports no usage in a stream (stream_options)")
        counts.append((words, asked.streamed.prompt))
        ours = ours or asked.ours
    body: dict[str, Any] = {"ignore_eos": True}
    for url in urls:
        try:
            await _ask(
                client,
                url,
                model,
                words=_PROBE_WORDS[0],
                block=f"{nonce}-eos",
                more=body,
                strict=True,
            )
        except CallFailed:
            # A strict server: it is asked for nothing that is not in the standard.
            body = {}
            break
    return Probed(model=model, tokens=fit_tokens(*counts), ours=ours, body=body)


async def _ask(
    client: Client,
    url: str,
    model: str,
    *,
    words: int,
    block: str,
    more: Mapping[str, Any] | None = None,
    strict: bool = False,
) -> Asked:
    said = text(words, place=f"probe-{words}", seed=0, block=block)
    messages = [{"role": "user", "content": said}]
    body = {"model": model, "messages": messages, "max_tokens": 2, "temperature": 0}
    try:
        return await client.ask(url, {**body, **(more or {})})
    except CallFailed as error:
        if strict:
            raise
        raise EngineFault(url, f"does not answer a call: {error}") from error


async def _first_model(client: Client, url: str) -> str:
    status, found = await client.json("GET", f"{url}/v1/models")
    try:
        return str(found["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise UsageError(
            f"{url}: lists no model (status {status}): name one with --model"
        ) from error
