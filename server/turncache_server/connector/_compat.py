"""Every name inside vLLM that is not part of its documented connector interface.

Checked at start by :mod:`turncache_server.connector.selftest`; a vLLM in which one of
them has moved makes the extension turn itself off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NIXL_CONNECTOR_VERSION
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, resolve_none_hash_seed
from vllm.v1.request import RequestStatus

VLLM_VERSION = str(vllm.__version__)
CONNECTOR_VERSION = str(NIXL_CONNECTOR_VERSION)

#: A call that ended with an answer; its blocks are worth keeping.
ANSWERED = frozenset(
    status
    for status in RequestStatus
    if status.name in ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
)


def make_known(name: str) -> None:
    """Let vLLM find a connector of ours by its name alone.

    ``MultiConnector`` does so when a child's statistics reach the API server's process.
    """
    with contextlib.suppress(ValueError):  # it is known already
        KVConnectorFactory.register_connector(name, __package__, name)


def fixed_block_hash(algo: str) -> Callable[[Sequence[int]], bytes]:
    """Return a function that hashes a first block as the prefix cache does.

    The root is derived here because vLLM sets its own only after the connector was made.
    """
    function = get_hash_fn_by_name(algo)
    root = function(resolve_none_hash_seed(function))
    return lambda tokens: bytes(hash_block_tokens(function, root, list(tokens)))


def model_folder(vllm_config: Any) -> Path | None:
    """Return the local folder of the weights, None when vLLM loads them from elsewhere."""
    model_config = vllm_config.model_config
    folder = Path(str(model_config.model))
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - only for hub names

        return Path(
            snapshot_download(
                str(model_config.model),
                revision=model_config.revision,
                cache_dir=vllm_config.load_config.download_dir,
                local_files_only=True,
            )
        )
    except (ImportError, OSError, ValueError):
        return None
