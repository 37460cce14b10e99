"""``turncache calibrate``: options in, a profile out."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from turncache.errors import EngineFault, TurncacheError, UsageError
from turncache.protocol import CallTags
from turncache_server.control.client import ControlClient
from turncache_server.control.messages import Hello, HelloReply
from turncache_server.cost_profile import CostProfile, dump_profile
from turncache_tools.bench.client import Asked, CallFailed, Client
from turncache_tools.bench.counters import added, difference, read_counters, samples
from turncache_tools.bench.probe import Probed, probe
from turncache_tools.bench.stack import Places, Stack
from turncache_tools.bench.statistics import quantile
from turncache_tools.bench.urls import base_url
from turncache_tools.calibrate.fit import Facts, fit_profile, median_error
from turncache_tools.calibrate.measure import Measured, Measurement
from turncache_tools.control import TIMEOUT_S, SecretFile, control_addresses, fleet_keys
from turncache_tools.figure import SCHEMA, Figure
from turncache_tools.shell import OK, progress, write, write_json, write_table

#: Lengths that are measured as far as the model's context and patience go.
_LENGTHS: Final = tuple(256 * 2**power for power in range(10))
_LEAST_LENGTH: Final = 128
_LEAST_POINTS: Final = 3
#: What an answer, a second call and the template add to a length, as a share and in tokens.
_MORE_SHARE, _MORE_TOKENS = 0.125, 700
#: Beyond these a profile is not to be relied on.
MOST_ERROR: Final = 0.15
MOST_SPREAD: Final = 0.5


class TooNoisy(TurncacheError):
    """Raised when what was measured does not fit together: no profile is written."""


def calibrate(
    *,
    url: Annotated[
        str, typer.Option(help="Base URL of the stack; nothing else may use it meanwhile.")
    ] = "http://127.0.0.1:8000",
    out: Annotated[Path, typer.Option(help="Write the profile here.")] = Path(
        "turncache-profile.toml"
    ),
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Base URL of an engine, for sizes of pool and KV; prefill first, then decode."
        ),
    ] = None,
    control: Annotated[
        list[str] | None, typer.Option(help="Control socket of an engine, for its id.")
    ] = None,
    reset: Annotated[
        str | None,
        typer.Option(
            help="Base URL of prefill, to empty its cache (VLLM_SERVER_DEV_MODE=1): returns of "
            "whole prompts are measured, else those of long answers."
        ),
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Tokens of prompts, by commas; else 256, 512, ...")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Of every measurement; medians count.")] = 3,
    most_seconds: Annotated[
        float, typer.Option(help="No longer prompts once a cold one takes as long.")
    ] = 10.0,
    returns: Annotated[
        bool,
        typer.Option(
            "--with-returns/--without-returns", help="On a pair, also measure what returns cost."
        ),
    ] = True,
    accelerators: Annotated[int, typer.Option(help="Of one prefill engine, to reckon with.")] = 1,
    model: Annotated[str | None, typer.Option(help="Model; else the first listed.")] = None,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", help="Key.", show_default=False)
    ] = "-",
    timeout: Annotated[float, typer.Option(help="Seconds for one call.")] = 600.0,
    fleet_secret_file: SecretFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Figures as JSON.")] = False,
) -> None:
    """Measure what prefill, host work and transfers cost; exit 1 when it is too noisy to tell."""
    if not out.parent.is_dir():
        raise UsageError(f"--out {out}: there is no folder {out.parent}")
    for option, count in (("--repeats", repeats), ("--accelerators", accelerators)):
        if count < 1:
            raise UsageError(f"{option} {count}: expected a number from 1")
    keys = fleet_keys(fleet_secret_file)
    controls = control_addresses(control, keyed=keys is not None) if control else ()
    run = _Run(
        places=Places(
            url=base_url(url, "--url"),
            controls=tuple(controls),
            engines=tuple(base_url(each, "--engine") for each in engine or ()),
            keys=keys,
        ),
        reset=None if reset is None else base_url(reset, "--reset"),
        lengths=_lengths(lengths),
        repeats=repeats,
        most_s=most_seconds,
        returns=returns,
        accelerators=accelerators,
        model=model,
        key=api_key,
        timeout_s=timeout,
    )
    profile = asyncio.run(run.profile())
    _check(profile, shown=as_json)
    try:
        out.write_text(dump_profile(profile), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--out {out}: cannot be written: {error}") from error
    if as_json:
        write_json({"schema": SCHEMA, "figures": [each.to_dict() for each in _figures(profile)]})
    else:
        _show(profile)
    progress(f"written to {out}: turncache plan --profile {out}")


def main(arguments: Sequence[str]) -> int:
    """Run the verb; usage errors and faults are raised."""
    verb = typer.Typer(add_completion=False)
    verb.command()(calibrate)
    code = typer.main.get_command(verb).main(
        list(arguments), prog_name="turncache calibrate", standalone_mode=False
    )
    return code if isinstance(code, int) else OK


def _lengths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*\d{1,8}\s*", part) or int(part) < _LEAST_LENGTH:
            raise UsageError(
                f"--lengths {text}: {part.strip()!r} is no length: expected tokens from "
                f"{_LEAST_LENGTH}, by commas"
            )
        found.append(int(part))
    if len(set(found)) < _LEAST_POINTS:
        raise UsageError(
            f"--lengths {text}: expected at least {_LEAST_POINTS}, or costs cannot be told apart"
        )
    return tuple(sorted(set(found)))


class _Run:
    """One calibration; see the options."""

    def __init__(
        self,
        *,
        places: Places,
        reset: str | None,
        lengths: tuple[int, ...] | None,
        repeats: int,
        most_s: float,
        returns: bool,
        accelerators: int,
        model: str | None,
        key: str,
        timeout_s: float,
    ) -> None:
        self._places, self._reset, self._lengths = places, reset, lengths
        self._repeats, self._most_s, self._returns = repeats, most_s, returns
        self._accelerators, self._model = accelerators, model
        self._key, self._timeout_s = key, timeout_s

    async def profile(self) -> CostProfile:
        """Measure and fit."""
        async with Client(self._key, timeout_s=self._timeout_s) as client:
            nonce = secrets.token_hex(4)
            url = self._places.url
            probed = await probe(client, [url], model=self._model, nonce=nonce)
            stack = Stack(client, self._places)
            facts = await stack.facts(ours=False)
            pair = bool(facts.pair) and self._returns
            lengths = await self._lengths_for(client, probed)
            reset = self._reset

            async def empty() -> None:
                await stack.empty(str(reset), external=False)

            measurement = Measurement(
                ask=_asking(client, url, probed),
                empty=None if reset is None else empty,
                tokens=probed.tokens,
                nonce=nonce,
                pair=pair,
                repeats=self._repeats,
                most_s=self._most_s,
                say=progress,
            )
            before = await self._metrics(client)
            measured = await measurement.run(lengths)
            after = await self._metrics(client)
        if measured.skipped:
            said = ", ".join(f"{length:,}" for length in measured.skipped)
            progress(f"left out, because it would take too long: {said} tokens")
        engines = await asyncio.to_thread(self._engine_ids)
        return fit_profile(
            measured.samples, self._facts(probed, measured, before, after, engines, pair=pair)
        )

    async def _lengths_for(self, client: Client, probed: Probed) -> tuple[int, ...]:
        """Return the lengths to measure: those that the model's context holds."""
        _, found = await client.json("GET", f"{self._places.url}/v1/models")
        longest = _context(found, probed.model)
        wanted = self._lengths or _LENGTHS
        fitting = tuple(
            length
            for length in wanted
            if longest is None or length * (1 + _MORE_SHARE) + _MORE_TOKENS <= longest
        )
        if self._lengths is not None and fitting != wanted:
            raise UsageError(
                f"--lengths: with answers and second calls {wanted[-1]} tokens do not fit into the "
                f"model's context of {longest} tokens"
            )
        if len(fitting) < _LEAST_POINTS:
            raise UsageError(
                f"the model's context of {longest} tokens is too short to tell costs apart; name "
                "shorter prompts with --lengths"
            )
        return fitting

    async def _metrics(self, client: Client) -> list[str]:
        out = []
        for url in self._places.engines:
            status, text = await client.text("GET", f"{url}/metrics")
            if status != 200:
                raise EngineFault(url, f"answered {status} to /metrics")
            out.append(text)
        return out

    def _engine_ids(self) -> tuple[str, ...]:
        with closing(ControlClient(self._places.keys)) as client:
            return tuple(
                client.ask(address, Hello(), HelloReply, timeout_s=TIMEOUT_S).engine_id
                for address in self._places.controls
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
        count = f"{self._repeats} repetitions of {len(measured.samples) // self._repeats} points"
        return Facts(
            model=probed.model,
            about=f"measured at {self._places.url}, {count}",
            pair=pair,
            decode_token_s=quantile(measured.between_s, 0.5) if measured.between_s else 0.0,
            engines=engines,
            accelerators=self._accelerators,
            kv_token_bytes=_kv_bytes(measured.moved_tokens, before, after),
            block_tokens=blocks[0] if blocks else 16,
            pool_tokens=pools[0] if pools else None,
            decode_pool_tokens=pools[1] if len(pools) > 1 else None,
        )


def _asking(client: Client, url: str, probed: Probed) -> Any:
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


def _check(profile: CostProfile, *, shown: bool) -> None:
    """Refuse a profile that does not fit what was measured.

    Raises:
        TooNoisy: residuals or repetitions lie too far apart.
    """
    error = median_error(profile)
    spread = quantile([point.spread for point in profile.points], 0.5)
    if error <= MOST_ERROR and spread <= MOST_SPREAD:
        return
    if not shown:
        write_table(*_points(profile))
    off, apart = f"{100 * error:.0f} %", f"{100 * spread:.0f} %"
    raise TooNoisy(
        f"too noisy for a profile, none is written: the fit is off by {off} in the median (at most "
        f"{100 * MOST_ERROR:.0f} %), repetitions lie {apart} apart (at most "
        f"{100 * MOST_SPREAD:.0f} %): is something else running on this machine or stack? More "
        "--repeats help against single outliers"
    )


_Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def _points(profile: CostProfile) -> _Table:
    columns = (
        "point",
        "prompt",
        "returned",
        "computed",
        "measured ms",
        "fitted ms",
        "error",
        "repetitions apart",
    )
    rows = [
        [
            point.kind,
            f"{point.prompt_tokens:,}",
            f"{point.returned_tokens:,}",
            f"{point.computed_tokens:,}",
            f"{point.measured_ms:,.1f}",
            f"{point.fitted_ms:,.1f}",
            f"{100 * point.error:+.1f} %",
            f"{100 * point.spread:.0f} %",
        ]
        for point in profile.points
    ]
    return columns, rows


def _figures(profile: CostProfile) -> list[Figure]:
    found: list[tuple[str, str, float | None]] = [
        ("host", "ms per call", 1e3 * profile.host_s),
        ("host_per_token", "us per token of the prompt", 1e6 * profile.host_token_s),
        ("prefill_per_token", "us per computed token", 1e6 * profile.prefill_token_s),
        ("prefill_per_pair", "ns per token and token before it", 1e9 * profile.prefill_pair_s),
        ("decode_per_token", "ms per token", 1e3 * profile.decode_token_s),
    ]
    if profile.pull_latency_s is not None and profile.pull_token_s is not None:
        found += [
            ("pull_latency", "ms per pull", 1e3 * profile.pull_latency_s),
            ("pull_per_token", "us per pulled token", 1e6 * profile.pull_token_s),
        ]
        threshold = profile.break_even_tokens(0)
        if threshold is not None:
            found.append(("pull_pays_from", "tokens", float(threshold)))
    out = [
        Figure(figure=name, unit=unit, value=value)
        for name, unit, value in found
        if value is not None
    ]
    error = median_error(profile)
    worst = max(abs(point.error) for point in profile.points)
    out.append(
        Figure(
            figure="fit_error_median",
            unit="share",
            value=error,
            limit=MOST_ERROR,
            ok=error <= MOST_ERROR,
        )
    )
    out.append(Figure(figure="fit_error_worst", unit="share", value=worst))
    return out


def _show(profile: CostProfile) -> None:
    rows = [
        [each.figure.replace("_", " "), f"{each.value:,.3f}", each.unit]
        for each in _figures(profile)
    ]
    write_table(("cost", "value", "unit"), rows)
    write("\nMeasured and fitted, medians of time to first token")
    write_table(*_points(profile))
    if not profile.pulls:
        write("\nNo cost of returns: one engine, or not asked for. plan then takes one engine.")
