"""What must be equal on two engines before KV may cross between them.

The chain hash covers tokens, adapters, multimodal content and the cache salt. It does not
cover weights, model configuration or formats: those are compared here, once per hello.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

#: Weights of which nothing is known: two engines that say so need not have the same.
UNCOMPARABLE: Final = ("unknown", "absent")
_SAMPLE_BYTES: Final = 4096
_FEWEST_SAMPLES: Final = 64
_STRIDE_BYTES: Final = 8 * 1024 * 1024
_WEIGHT_SUFFIXES: Final = (".safetensors", ".bin", ".pt", ".gguf")
#: Members of a model configuration that say where it came from, not what it computes.
_NOT_CONTENT: Final = ("_name_or_path", "transformers_version", "name_or_path")


def digest(parts: Iterable[bytes]) -> str:
    """Return a short digest of length-prefixed parts."""
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.hexdigest()[:16]


def config_digest(config: dict[str, Any], *, max_model_len: int) -> str:
    """Return a digest of a resolved model configuration.

    Args:
        config: of the model.
        max_model_len: longest sequence of the engine in tokens; counts where positions are
            computed in one of two ways according to it.
    """
    content = {key: value for key, value in config.items() if key not in _NOT_CONTENT}
    if _has_long_rope(content):
        content["turncache_max_model_len"] = max_model_len
    return digest([json.dumps(content, sort_keys=True, default=str).encode()])


def _has_long_rope(config: object) -> bool:
    """Whether a configuration, or one within it, names the rotary embedding LongRoPE.

    Of its two tables of factors vLLM takes the long one as soon as an engine's longest sequence
    exceeds what the model was trained for first.
    """
    if isinstance(config, dict):
        kinds = (config.get("rope_type"), config.get("type"))
        return "longrope" in kinds or any(map(_has_long_rope, config.values()))
    return isinstance(config, (list, tuple)) and any(map(_has_long_rope, config))


def weights_digest(folder: Path) -> str:
    """Return a digest of a model folder's weight files: names, sizes and samples of each.

    Samples of 4 KiB, at least 64 of each file and one in every 8 MiB, so that two
    checkpoints of one shape differ when any 8 MiB in a row do: a fine-tune of a single
    layer is seen. Reading hundreds of gigabytes at start would not be paid by anybody.
    ``absent`` when the folder holds no weight files.
    """
    files = sorted(p for p in folder.iterdir() if p.suffix in _WEIGHT_SUFFIXES)
    if not files:
        return "absent"
    return digest(part for path in files for part in _file_parts(path))


def _file_parts(path: Path) -> Iterable[bytes]:
    size = path.stat().st_size
    yield path.name.encode()
    yield str(size).encode()
    last = max(0, size - _SAMPLE_BYTES)
    steps = max(_FEWEST_SAMPLES - 1, -(-last // (_STRIDE_BYTES - _SAMPLE_BYTES)))
    with path.open("rb") as file:
        for index in range(steps + 1):
            file.seek(last * index // steps)
            yield file.read(_SAMPLE_BYTES)


def engine_fingerprint(
    vllm_config: Any,
    *,
    vllm_version: str,
    connector_version: str,
    model_folder: Path | None,
    hash_block: Callable[[Sequence[int]], bytes],
    weights_id: str = "",
) -> dict[str, str]:
    """Return this engine's fingerprint.

    Args:
        vllm_config: vLLM's configuration.
        vllm_version: version of vLLM.
        connector_version: version of the NIXL connector.
        model_folder: local folder of the weights, None when it is not known.
        hash_block: chain hash of a first block with these tokens.
        weights_id: what the operator calls the weights; counts where they cannot be read.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    parallel = vllm_config.parallel_config
    tokens = list(range(1, int(cache.block_size) + 1))
    weights = "unknown" if model_folder is None else weights_digest(model_folder)
    if weights in UNCOMPARABLE and weights_id:
        weights = f"said to be {weights_id}"
    return {
        "vllm": vllm_version,
        "nixl_connector": connector_version,
        "model_config": config_digest(
            model.hf_config.to_dict(), max_model_len=int(model.max_model_len)
        ),
        "weights": weights,
        "revision": str(model.revision),
        "quantization": str(model.quantization),
        "dtype": str(model.dtype),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": str(cache.block_size),
        "hash_of_a_fixed_block": hash_block(tokens).hex()[:16],
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
    }
