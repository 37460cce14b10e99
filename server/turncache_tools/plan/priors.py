"""Profiles from published numbers, for models that nobody has calibrated here. Pure.

Costs follow from the model's configuration and one speed::

    prefill_token_s = (2 * active parameters + windowed) / speed
    prefill_pair_s  = 2 * layers * heads * (d_qk + d_v) / speed

with ``layers`` those of full attention and ``windowed`` what layers with a sliding window add
per token. Speed, host work and pulls are fitted to published measurements where ``about`` says
so; where it says *assumed*, speed is a share of the accelerator's peak that similar models
reach. Loads from a host tier are assumed at 25 GB/s per accelerator and 10 ms; decode's time
per token is assumed, except where ``about`` names it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from turncache.errors import UsageError
from turncache.spelling import none_of
from turncache_server.cost_profile import (
    ASSUMED_LOAD_BYTES_PER_S,
    ASSUMED_LOAD_LATENCY_S,
    PRIOR,
    CostProfile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """A model's shape and what is known of its speed.

    Attributes:
        active: parameters that take part in computing a token, without embeddings.
        layers: with full attention.
        heads: of queries.
        head: sum of the dimensions that scores and values have per head.
        attended: most tokens that one attends to, 0 for all.
        window: (layers, tokens) of sliding windows.
        kv_bytes: per token, over all ranks.
        speed: operations per second of one prefill engine.
        accelerators: of one prefill engine.
        host_s: per call.
        host_token_s: per token of the prompt.
        pull_s: (latency, per token).
        decode_s: per token of an answer.
    """

    model: str
    active: float
    layers: int
    heads: int
    head: int
    kv_bytes: int
    speed: float
    accelerators: int
    about: str
    attended: int = 0
    window: tuple[int, int] = (0, 0)
    host_s: float = 0.07
    host_token_s: float = 8e-6
    pull_s: tuple[float, float] = (0.0135, 4.5e-6)
    decode_s: float = 0.015


_AWS: Final = "fitted to turns 2 and later of the AWS measurement of 2026-10-12"
_PULL: Final = "pulls as measured there"
_ASSUMED: Final = "speed assumed; host work and pulls as fitted for qwen3-32b"

_GLM_5: Final = _Model(
    model="GLM-5 FP8, 8 H200",
    active=39.9e9,
    layers=78,
    heads=64,
    head=512,
    attended=2048,
    kv_bytes=89_856,
    speed=1.02e15,
    accelerators=8,
    host_s=0.215,
    host_token_s=9.7e-6,
    pull_s=(0.01275, 4.5e-6),
    decode_s=0.020,
    about=f"{_AWS} (6 % of fp8 peak); {_PULL}",
)

_MODELS: Final = {
    "qwen3-32b": _Model(
        model="Qwen3-32B, bf16, 8 H200",
        active=31.2e9,
        layers=64,
        heads=64,
        head=256,
        kv_bytes=262_144,
        speed=4.87e15,
        accelerators=8,
        host_s=0.066,
        host_token_s=8.2e-6,
        pull_s=(0.0135, 4.55e-6),
        decode_s=0.010,
        about=f"{_AWS} (62 % of peak); {_PULL}",
    ),
    "glm-5": _GLM_5,
    "gpt-oss-120b": _Model(
        model="gpt-oss-120b, 1 H200",
        active=4.55e9,
        layers=18,
        heads=64,
        head=128,
        window=(18, 128),
        kv_bytes=36_864,
        speed=0.400e15,
        accelerators=1,
        host_s=0.030,
        host_token_s=0.0,
        pull_s=(0.0255, 4.07e-6),
        about="fitted to the llm-d table of recompute against pull, 2026-08-15; the 36,864 "
        "further bytes per token of windowed layers are left out",
    ),
    "llama-3.1-70b": _Model(
        model="Llama-3.1-70B, bf16, 2 H200",
        active=68.5e9,
        layers=80,
        heads=64,
        head=256,
        kv_bytes=327_680,
        speed=0.89e15,
        accelerators=2,
        decode_s=0.0219,
        about=f"{_ASSUMED}: 45 % of peak; decode's time per token as in vLLM PR 32553",
    ),
    "llama-3.1-8b": _Model(
        model="Llama-3.1-8B, bf16, 1 H200",
        active=6.98e9,
        layers=32,
        heads=32,
        head=256,
        kv_bytes=131_072,
        speed=0.495e15,
        accelerators=1,
        decode_s=0.007,
        about=f"{_ASSUMED}: 50 % of peak",
    ),
    "qwen3-8b": _Model(
        model="Qwen3-8B, bf16, 1 H200",
        active=6.95e9,
        layers=36,
        heads=32,
        head=256,
        kv_bytes=147_456,
        speed=0.495e15,
        accelerators=1,
        decode_s=0.007,
        about=f"{_ASSUMED}: 50 % of peak",
    ),
    "deepseek-v3": replace(
        _GLM_5,
        model="DeepSeek-V3 FP8, 8 H200",
        active=35.7e9,
        layers=61,
        heads=128,
        head=320,
        attended=0,
        kv_bytes=70_272,
        about="speed, host work and pulls assumed to be those fitted for glm-5",
    ),
}
PRIORS: Final = tuple(sorted(_MODELS))


def prior(name: str) -> CostProfile:
    """Return the profile of a model that was published about.

    Raises:
        UsageError: nothing is known of this model.
    """
    known = _MODELS.get(name)
    if known is None:
        raise UsageError(
            f"--prior {none_of(name, PRIORS)}; or measure with turncache calibrate and give "
            "--profile"
        )
    layers, tokens = known.window
    windowed = 2 * layers * known.heads * known.head * tokens
    return CostProfile(
        name=name,
        model=known.model,
        source=PRIOR,
        about=known.about,
        accelerators=known.accelerators,
        host_s=known.host_s,
        host_token_s=known.host_token_s,
        prefill_token_s=(2 * known.active + windowed) / known.speed,
        prefill_pair_s=2 * known.layers * known.heads * known.head / known.speed,
        attended_tokens=known.attended,
        pull_latency_s=known.pull_s[0],
        pull_token_s=known.pull_s[1],
        load_latency_s=ASSUMED_LOAD_LATENCY_S,
        load_token_s=known.kv_bytes / (ASSUMED_LOAD_BYTES_PER_S * known.accelerators),
        decode_token_s=known.decode_s,
        kv_token_bytes=known.kv_bytes,
        block_tokens=16,
    )
