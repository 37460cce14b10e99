"""One calibration of a running stack: what it is, the calls, what else a profile says."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from turncache.errors import EngineFault, UsageError
from turncache.protocol import CallTags
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import Hello, HelloReply
from turncache_server.cost_profile import CostProfile
from turncache_tools.bench.client import Asked, CallFailed, Client
from turncache_tools.bench.counters import added, difference, read_counters, samples
from turncache_tools.bench.probe import Probed, probe
from turncache_tools.bench.stack import Places, Stack
from turncache_tools.bench.statistics import quantile
from turncache_tools.calibrate.fit import Facts, fit_profile
from turncache_tools.calibrate.measure import LEAST_LENGTHS, Ask, Measured, Measurement
from turncache_tools.control import TIMEOUT_S

#: Lengths that are measured as far as the model's context and patience go.
_LENGTHS: Final = tuple(256 * 2**power for power in range(10))
#: What an answer, a second call and the template add to a length, as a share and in tokens.
_MORE_SHARE, _MORE_TOKENS = 0.125, 700


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One calibration.

    Attributes:
        places: of the stack's parts; engines prefill first.
        reset: base URL of prefill, to empty its cache; None: returns of long answers.
        lengths: of prompts in tokens, None for what the context holds.
        repeats: of every measurement.
        most_s: no longer prompts once a cold one takes as long.
        returns: measure what they cost, on a pair.
        accelerators: of one prefill engine.
        model: its name, None for the first listed.
        key: bearer token.
        timeout_s: of one call.
        say: told of progress.
    """

    places: Places
    reset: str | None
    lengths: tuple[int, ...] | None
    repeats: int
    most_s: float
    returns: bool
    accelerators: int
    model: str | None
    key: str
    timeout_s: float
    say: Callable[[str], None]

    async def profile(self) -> CostProfile:
        """Measure and fit.

        Raises:
            UsageError: lengths that the model's context does not hold.
            EngineFault: a part of the stack does not answer or do what it is asked.
            TurncacheError: the stack does not say or return what is measured.
        """
        async with Client(self.key, timeout_s=self.timeout_s) as client:
            nonce = secrets.token_hex(4)
            url = self.places.url
            probed = await probe(client, [url], model=self.model, nonce=nonce)
            stack = Stack(client, self.places)
            facts = await stack.facts(ours=False)
            pair = bool(facts.pair) and self.returns
            lengths = await self._lengths_for(client, probed)
            reset = self.reset

            async def empty() -> None:
                await stack.empty(str(reset), external=False)

            measurement = Measurement(
                ask=_asking(client, url, probed),
                empty=None if reset is None else empty,
                tokens=probed.tokens,
                nonce=nonce,
                pair=pair,
                repeats=self.repeats,
                most_s=self.most_s,
                say=self.say,
            )
            before = await self._metrics(client)
            measured = await measurement.run(lengths)
            after = await self._metrics(client)
        if measured.skipped:
            said = ", ".join(f"{length:,}" for length in measured.skipped)
            self.say(f"left out, because it would take too long: {said} tokens")
        engines = await asyncio.to_thread(self._engine_ids)
        return fit_profile(
            measured.samples, self._facts(probed, measured, before, after, engines, pair=pair)
        )

    async def _lengths_for(self, client: Client, probed: Probed) -> tuple[int, ...]:
        """Return the lengths to measure: those that the model's context holds."""
        _, found = await client.json("GET", f"{self.places.url}/v1/models")
        longest = _context(found, probed.model)
        wanted = self.lengths or _LENGTHS
        fitting = tuple(
            length
            for length in wanted
            if longest is None or length * (1 + _MORE_SHARE) + _MORE_TOKENS <= longest
        )
        if self.lengths is not None and fitting != wanted:
            raise UsageError(
                f"--lengths: with answers and second calls {wanted[-1]} tokens do not fit into the "
                f"model's context of {longest} tokens"
            )
        if len(fitting) < LEAST_LENGTHS:
            raise UsageError(
                f"the model's context of {longest} tokens is too short to tell costs apart; name "
                "shorter prompts with --lengths"
            )
        return fitting

    async def _metrics(self, client: Client) -> list[str]:
        out = []
        for url in self.places.engines:
            status, text = await client.text("GET", f"{url}/metrics")
            if status != 200:
                raise EngineFault(url, f"answered {status} to /metrics")
            out.append(text)
        return out

    def _engine_ids(self) -> tuple[str, ...]:
        with closing(ControlClient(self.places.keys)) as client:
            return tuple(
                client.ask(address, Hello(), HelloReply, timeout_s=TIMEOUT_S).engine_id
                for address in self.places.controls
            )

    def _facts(
        self,
        probed: Probed,
        measured: Measured,
        before: Sequence[str],
        after: Sequence[str],
        engines: tuple[str, ...],
        *,
        pair: bool,
    ) -> Facts:
        caches = [_cache(text) for text in after]
        pools = [cache.get("tokens") for cache in caches]
        blocks = [cache["block"] for cache in caches if "block" in cache]
        points = {(sample.kind, sample.size) for sample in measured.samples}
        count = f"{len(measured.samples)} calls at {len(points)} points"
        return Facts(
            model=probed.model,
            about=f"measured at {self.places.url}, {count}",
            pair=pair,
            decode_token_s=quantile(measured.between_s, 0.5) if measured.between_s else 0.0,
            engines=engines,
            accelerators=self.accelerators,
            kv_token_bytes=_kv_bytes(measured.moved_tokens, before, after),
            block_tokens=blocks[0] if blocks else 16,
            pool_tokens=pools[0] if pools else None,
            decode_pool_tokens=pools[1] if len(pools) > 1 else None,
        )


def _asking(client: Client, url: str, probed: Probed) -> Ask:
    async def ask(messages: Sequence[Mapping[str, Any]], tags: CallTags, answer: int) -> Asked:
        body = {
            "model": probed.model,
            "messages": list(messages),
            "max_tokens": answer,
            "temperature": 0,
            **probed.body,
        }
        try:
            return await client.ask(url, body, tags.to_headers())
        except CallFailed as error:
            raise EngineFault(url, f"a call failed: {error}") from error

    return ask


def _context(found: Any, model: str) -> int | None:
    rows = found.get("data") if isinstance(found, dict) else None
    for row in rows if isinstance(rows, list) else ():
        if isinstance(row, dict) and row.get("id") == model:
            longest = row.get("max_model_len")
            return longest if isinstance(longest, int) else None
    return None


def _cache(metrics: str) -> dict[str, int]:
    """Return what an engine says of its pool: tokens of a block and of all."""
    for name, labels, _ in samples(metrics):
        if name != "vllm:cache_config_info":
            continue
        size, count = labels.get("block_size", ""), labels.get("num_gpu_blocks", "")
        if size.isdigit() and count.isdigit():
            return {"block": int(size), "tokens": int(size) * int(count)}
    return {}


def _kv_bytes(tokens: int, before: Sequence[str], after: Sequence[str]) -> int:
    """Return bytes per token, by what the engines say they have transferred; 0 when unknown."""
    moved = added(
        difference(read_counters(one), read_counters(other))
        for one, other in zip(before, after, strict=True)
    ).get("transfer_bytes", 0.0)
    return round(moved / tokens) if tokens else 0
