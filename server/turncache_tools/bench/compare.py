"""``--verify``: the answers of all arms to the same prompts, under salts that share no KV.

After the first agent's calls comes one more, in whose history the first user's message has been
exchanged for another of the same length, as an agent does that edits or compacts: whoever takes
the KV of earlier calls by position, and not by content, answers from the message that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from turncache.protocol import SESSION_HEADER
from turncache_tools.bench.agents import Setting
from turncache_tools.bench.arms import OFF, OFF_AGAIN, Arm, Hints
from turncache_tools.bench.client import CallFailed, Client
from turncache_tools.bench.conversation import Conversation
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
        By arm: ``compared`` and ``different``, and whether the answer after an edit of the
        history differs (``edited_differs``); or ``why`` there is nothing to compare.
    """
    out: dict[str, Any] = {}
    reference: list[_Said] = []
    off, *others = arms
    for name, arm in ((OFF, off), (OFF_AGAIN, off), *((each.name, each) for each in others)):
        await stack.switch(arm)
        try:
            said = await _Questions(client, stack, setting, arm, name, reference).answers()
        except CallFailed as error:
            out[name] = {"why": str(error)}
            if name == OFF:
                return out
            continue
        if name == OFF:
            reference = said
            continue
        differ = [one != other for one, other in zip(reference, said, strict=True)]
        out[name] = {
            "compared": len(said) - 1,
            "different": sum(differ[:-1]),
            "edited_differs": differ[-1],
        }
    return out


@dataclass(slots=True)
class _Questions:
    """The calls of one arm.

    Attributes:
        name: the arm's, or off's second turn's.
        reference: off's answers, empty for off's own first turn.
    """

    client: Client
    stack: Stack
    setting: Setting
    arm: Arm
    name: str
    reference: Sequence[_Said]

    async def answers(self) -> list[_Said]:
        """Make all calls; the last answer is the one after the edit."""
        conversation = Conversation(self.client, self.arm)
        agent = self.setting.workload.agents[0]
        shared = self._text(max(1, self.setting.workload.shared), "shared")
        messages: list[Mapping[str, Any]] = [{"role": "system", "content": shared}]
        out: list[_Said] = []
        for number, call in enumerate(agent.calls, 1):
            messages.append({"role": "user", "content": self._text(call.new, f"verify-{number}")})
            if number > 1:
                await self._miss()
            out.append(await self._said(conversation, messages, call.answer))
            known = self.reference[number - 1] if self.reference else out[-1]
            messages.append(answer_message(known.text or known.arguments, ()))
        last = agent.calls[-1]
        edited = {"role": "user", "content": self._text(agent.calls[0].new, "verify-edited")}
        messages = [messages[0], edited, *messages[2:]]
        messages.append({"role": "user", "content": self._text(last.new, "verify-after")})
        await self._miss()
        out.append(await self._said(conversation, messages, last.answer))
        return out

    async def _miss(self) -> None:
        """Empty the cache as in a block: what is compared is what returns, not what stayed."""
        misses = self.setting.misses
        if misses is not None:
            for url in misses.reset:
                await self.stack.empty(url, external=misses.external)

    def _text(self, tokens: int, place: str) -> str:
        words = self.setting.tokens.words(tokens)
        salt = f"{self.setting.nonce}-verify"
        return text(words, place=place, seed=self.setting.seed, block=salt)

    async def _said(
        self, conversation: Conversation, messages: Sequence[Mapping[str, Any]], answer: int
    ) -> _Said:
        salt = f"{self.setting.nonce}-verify"
        session = f"{salt}-{self.name.replace(' ', '-')}"
        asked = await conversation.ask(
            {
                "model": self.setting.model,
                "messages": list(messages),
                "max_tokens": answer,
                "temperature": 0,
                **self.setting.body,
                "cache_salt": f"{salt}-{self.name}",
            },
            {} if self.arm.hints is Hints.NONE else {SESSION_HEADER: session},
        )
        arguments = "".join(str(each["function"]) for each in asked.streamed.tool_calls)
        return _Said(asked.streamed.text, arguments)
