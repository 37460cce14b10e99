"""What every proxy of a stock prefill/decode pair says to it (vLLM's NIXL connector)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

#: ``kv_transfer_params`` of a prefill leg: hold the prompt's KV for whoever brings the
#: parameters of the answer to decode. vLLM's examples name every member, and so does this.
HAND_OVER: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
)


def bringing_back(said: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same for a prefill leg that also reads the KV of the answer before.

    Args:
        said: ``kv_transfer_params`` of decode's answer (``bidirectional_kv_xfer``). They can be
            used once.
    """
    return {**said, "do_remote_decode": True, "do_remote_prefill": False}
