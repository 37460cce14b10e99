"""vLLM's configuration of an engine without a model. Sets the variables that vLLM reads once."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from pathlib import Path
from typing import Any

# Set before vLLM is imported, which reads them once.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

#: Tokens of a block; a benchmark asks for larger ones before anything is imported.
BLOCK = int(os.environ.get("TURNCACHE_TEST_BLOCK", "4"))
VOCAB = 4096


@functools.cache
def model_folder() -> str:
    """Write a model configuration without tokenizer, and weights that nothing loads."""
    folder = Path(tempfile.mkdtemp(prefix="turncache-model-"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(b"compared, not loaded")
    return str(folder)


@functools.cache
def structured_output(_: str) -> Any:
    """Make what schedulers want beside it, once for each model's folder."""
    return StructuredOutputManager(make_config(None))


def make_config(
    transfer: KVTransferConfig | None,
    *,
    num_blocks: int = 64,
    batched_tokens: int = 128,
    max_requests: int = 8,
    max_model_len: int = 2048,
    async_scheduling: bool = False,
    data_parallel_index: int = 0,
    **args: Any,
) -> Any:
    """Make vLLM's configuration of one engine."""
    config = EngineArgs(
        model=model_folder(),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_model_len,
        block_size=BLOCK,
        enforce_eager=True,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=max_requests,
        kv_transfer_config=transfer,
        **args,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    # As of a rank of a dense model, which vLLM makes an engine of its own.
    config.parallel_config.data_parallel_index = data_parallel_index
    # The CPU platform forces it off; on GPUs it is on.
    config.scheduler_config.async_scheduling = async_scheduling
    return config


def kv_cache_config(num_blocks: int) -> Any:
    """One full-attention group."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
    )
