"""Reads the bytes of KV blocks inside a real engine, and asks a real engine which it holds.

:class:`BlockReader` becomes part of vLLM's worker (``--worker-extension-cls``); vLLM's
development endpoint ``/collective_rpc`` calls it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

HASH = "sha256"


class BlockReader:
    """What the engine tests add to vLLM's worker."""

    model_runner: Any
    cache_config: Any

    def block_digests(self, block_ids: str) -> dict[str, str]:
        """Return a digest of every named block's bytes over all layers.

        Args:
            block_ids: decimal numbers with commas between.
        """
        num_blocks = self.cache_config.num_gpu_blocks
        digests: dict[str, str] = {}
        for block_id in block_ids.split(","):
            digest = hashlib.sha256()
            for layer in self.model_runner.kv_caches:
                (axis,) = (at for at, size in enumerate(layer.shape) if size == num_blocks)
                block = layer.select(axis, int(block_id)).contiguous()
                assert bool(block.any()), f"block {block_id} is all zero"
                digest.update(block.view(torch.uint8).numpy().tobytes())
            digests[block_id] = digest.hexdigest()
        return digests

    def block_values(self, block_ids: str) -> dict[str, list[float]]:
        """Return some numbers of every named block: a few elements of each layer's slots.

        Args:
            block_ids: decimal numbers with commas between.
        """
        num_blocks = self.cache_config.num_gpu_blocks
        values: dict[str, list[float]] = {}
        for block_id in block_ids.split(","):
            found: list[float] = []
            for layer in self.model_runner.kv_caches:
                (axis,) = (at for at, size in enumerate(layer.shape) if size == num_blocks)
                flat = layer.select(axis, int(block_id)).flatten()
                found += [float(value) for value in flat[:: max(1, flat.numel() // 61)]]
            values[block_id] = found
        return values


def chain_hashes(tokens: Sequence[int], salt: str, block_size: int) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, as vLLM's scheduler computes them."""
    function = get_hash_fn_by_name(HASH)
    init_none_hash(function)
    request = Request(
        request_id="hashed",
        prompt_token_ids=list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(block_size, function),
    )
    return [bytes(each) for each in request.block_hashes]
