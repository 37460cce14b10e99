"""The calls of one conversation in one arm: to one URL, or to a stock pair in two legs.

A stock pair has no router of ours: its legs are made here, as every proxy makes them, without a
proxy between, which spares them one hop. With vLLM's ``bidirectional_kv_xfer`` decode says with
its answer how prefill may read that answer's KV in the next call of the conversation. vLLM 0.32
says so only where an answer is not streamed, so such a call is made whole; its first token comes
where a stream would have brought it: the prefill leg's time and decode's own time to first token.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from turncache.protocol import REQUEST_ID_HEADER
from turncache_server.stock import HAND_OVER, bringing_back
from turncache_tools.bench.arms import Arm, StockPair
from turncache_tools.bench.client import Asked, CallFailed, Client
from turncache_tools.bench.counters import samples
from turncache_tools.bench.stream import Streamed

_PARAMETERS: Final = "kv_transfer_params"
_FIRST_TOKEN: Final = "vllm:time_to_first_token_seconds"  # noqa: S105 - no password


@dataclass(slots=True)
class Conversation:
    """One conversation; its calls are made one after the other.

    Attributes:
        client: makes them.
        arm: how.
        returned: what a stock decode engine said for the next call, None without it.
    """

    client: Client
    arm: Arm
    returned: Mapping[str, Any] | None = None

    async def ask(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Asked:
        """Make the next call.

        Args:
            body: without ``stream``.
            headers: of the session.

        Raises:
            CallFailed: there is no answer.
        """
        pair = self.arm.pair
        if pair is None:
            return await self.client.ask(self.arm.url, body, headers)
        # NIXL pairs the two requests by this id: it is the same on both legs.
        named = {**headers, REQUEST_ID_HEADER: f"bench-{uuid.uuid4().hex}"}
        if pair.returning:
            return await self._whole(pair, body, named)
        started_s = self.client.now_s()
        parameters, cached = await self._prefill_leg(pair, body, named, HAND_OVER)
        asked = await self.client.ask(
            pair.decode, {**body, _PARAMETERS: parameters}, named, since_s=started_s
        )
        return replace(asked, streamed=replace(asked.streamed, cached=cached))

    async def _prefill_leg(
        self,
        pair: StockPair,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        asked: Mapping[str, Any],
    ) -> tuple[Mapping[str, Any], int | None]:
        """Return what decode is to be told, and the tokens that prefill did not compute."""
        one = {**body, "max_tokens": 1, _PARAMETERS: dict(asked)}
        done = await self.client.whole(pair.prefill, one, headers)
        parameters = done.get(_PARAMETERS)
        if not isinstance(parameters, dict):
            raise CallFailed(f"the prefill leg's answer has no {_PARAMETERS}: is it NIXL's?")
        details = (done.get("usage") or {}).get("prompt_tokens_details") or {}
        return parameters, details.get("cached_tokens")

    async def _whole(
        self, pair: StockPair, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> Asked:
        before = await self._first_tokens(pair.decode)
        started_s = self.client.now_s()
        # Whatever becomes of this call, what it brings back is spent.
        said, self.returned = self.returned, None
        asked = HAND_OVER if said is None else bringing_back(said)
        parameters, cached = await self._prefill_leg(pair, body, headers, asked)
        leg_s = self.client.now_s() - started_s
        done = await self.client.whole(pair.decode, {**body, _PARAMETERS: parameters}, headers)
        total_s = self.client.now_s() - started_s
        self.returned = done.get(_PARAMETERS)
        after = await self._first_tokens(pair.decode)
        # Somebody else's call in between would be reckoned in.
        alone = after[0] - before[0] == 1
        first_s = leg_s + after[1] - before[1] if alone else total_s
        message = done["choices"][0].get("message") or {}
        usage = done.get("usage") or {}
        streamed = Streamed(
            first_s=first_s,
            content_s=total_s,
            total_s=total_s,
            between_s=None,
            longest_gap_s=None,
            text=message.get("content") or "",
            tool_calls=tuple(message.get("tool_calls") or ()),
            prompt=usage.get("prompt_tokens"),
            answer=usage.get("completion_tokens"),
            cached=cached,
        )
        return Asked(streamed=streamed, outcome=None, ours=False)

    async def _first_tokens(self, url: str) -> tuple[float, float]:
        """Return (how many first tokens an engine has given, seconds that they took)."""
        _, text = await self.client.text("GET", f"{url}/metrics")
        found = {"count": 0.0, "sum": 0.0}
        for name, _, value in samples(text):
            place = name.removeprefix(f"{_FIRST_TOKEN}_")
            if place in found:
                found[place] += value
        return found["count"], found["sum"]
