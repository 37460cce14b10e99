"""``--verify``: the answers of all arms to the same prompts, under salts that share no KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turncache.protocol import SESSION_HEADER
from turncache_tools.bench.agents import Setting
from turncache_tools.bench.arms import OFF, OFF_AGAIN, Arm, Hints
from turncache_tools.bench.client import CallFailed, Client
from turncache_tools.bench.stack import Stack
from turncache_tools.bench.texts import answer_message, text


@dataclass(frozen=True, slots=True)
class _Said:
    text: str
    arguments: str


async def compare_answers(
    client: Client, stack: Stack, setting: Setting, arms: Sequence[Arm]
) -> dict[str, Any]:
    """Run the first agent's calls in every arm and compare answers with off's, call by call.

    Every arm's prompts carry off's answers: one that differs is counted, not continued. Off
    itself is asked twice: where answers of off differ from off's, the server is not
    deterministic, and an arm's rate must be read against that one.

    Returns:
        By arm: ``compared`` and ``different``, or ``why`` there is nothing to compare.
    """
    out: dict[str, Any] = {}
    reference: list[_Said] = []
    off, *others = arms
    for name, arm in ((OFF, off), (OFF_AGAIN, off), *((each.name, each) for each in others)):
        await stack.switch(arm)
        try:
            said = await _answers(client, setting, arm, name, reference)
        except CallFailed as error:
            out[name] = {"why": str(error)}
            if name == OFF:
                return out
            continue
        if name == OFF:
            reference = said
            continue
        different = sum(one != other for one, other in zip(reference, said, strict=True))
        out[name] = {"compared": len(said), "different": different}
    return out


async def _answers(
    client: Client, setting: Setting, arm: Arm, name: str, reference: Sequence[_Said]
) -> list[_Said]:
    salt = f"{setting.nonce}-verify"
    headers = {SESSION_HEADER: f"{salt}-{name.replace(' ', '-')}"}
    words = setting.tokens.words

    def made(tokens: int, place: str) -> str:
        return text(words(tokens), place=place, seed=setting.seed, block=salt)

    shared = made(max(1, setting.workload.shared), "shared")
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": shared}]
    out: list[_Said] = []
    for number, call in enumerate(setting.workload.agents[0].calls, 1):
        said = made(call.new, f"verify-{number}")
        messages.append({"role": "user", "content": said})
        asked = await client.ask(
            arm.url,
            {
                "model": setting.model,
                "messages": messages,
                "max_tokens": call.answer,
                "temperature": 0,
                **setting.body,
                "cache_salt": f"{salt}-{name}",
            },
            {} if arm.hints is Hints.NONE else headers,
        )
        calls = asked.streamed.tool_calls
        arguments = "".join(str(each["function"]) for each in calls)
        out.append(_Said(asked.streamed.text, arguments))
        known = reference[number - 1] if reference else out[-1]
        messages.append(answer_message(known.text or known.arguments, ()))
    return out
