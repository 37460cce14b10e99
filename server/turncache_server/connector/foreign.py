"""Calls behind a router that is not ours: which leg of a hand-over a call is. Pure.

Such a router asks prefill for a hand-over and gives decode what prefill has answered, both in
``kv_transfer_params``, as vLLM's NIXL connector wants it. Of that we take which leg it is and
the name of the engine that prefill says it is: a hint for a verified pull, no more, resolved
in the own allow-list. Nothing is held for it, and no address or block comes from outside.

Only where nothing is pulled (mode *off* or *observe*, an unsupported set-up) is a prompt handed
over by vLLM's own logic, and then decode takes the blocks that prefill names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from turncache.protocol import EngineHints
from turncache_server.stock import HAND_OVER

#: What decode needs of a stock hand-over, and what it may be told beside that.
_NEEDED: Final = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
}
_SIZES: Final = ("tp_size", "dcp_size", "pp_size", "remote_num_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One leg of a hand-over.

    Attributes:
        engine_id: NIXL id of the engine that has the prompt, empty on prefill.
        stock: what vLLM's own logic is to be given, if the hand-over is left to it: None for
            decode's leg when prefill has held nothing.
    """

    engine_id: str = ""
    stock: Mapping[str, Any] | None = None

    @property
    def is_prefill(self) -> bool:
        """Whether the prompt is computed here and taken by another engine."""
        return not self.engine_id

    def hinted(self, hints: EngineHints | None, request_id: str, *, returns: bool) -> EngineHints:
        """Return the hints of a call with this leg.

        Args:
            hints: what the call itself says, None for nothing.
            request_id: names the session of a call that has none.
            returns: decode's KV is brought back, so that prefill need not keep the session.
        """
        if hints is None:
            hints = EngineHints(session=f"call:{request_id}", retain_s=0.0)
        if not self.is_prefill:
            return hints
        return replace(hints, handover=True, retain_s=0.0 if returns else hints.retain_s)


def leg_of(params: object) -> Leg | None:
    """Read which leg a call is, None for a call that is not handed over."""
    if not isinstance(params, dict):
        return None
    if params.get("do_remote_decode") is True:
        return Leg(stock=HAND_OVER)
    engine_id = params.get("remote_engine_id")
    if params.get("do_remote_prefill") is not True or not isinstance(engine_id, str):
        return None
    return Leg(engine_id=engine_id, stock=_held(params)) if engine_id else None


def answer(engine_id: str) -> dict[str, Any]:
    """Return what prefill answers: which engine has the prompt."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": engine_id,
    }


def _held(params: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the members of a stock hand-over, None unless each is what vLLM expects."""
    groups = params.get("remote_block_ids")
    if not _are_blocks(groups) or any(type(params.get(n)) is not t for n, t in _NEEDED.items()):
        return None
    if any(type(params.get(name, 1)) is not int for name in _SIZES):
        return None
    sizes = {name: params[name] for name in _SIZES if name in params}
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": groups,
        **{name: params[name] for name in _NEEDED},
        **sizes,
    }


def _are_blocks(groups: object) -> bool:
    """Whether this is a list of block ids for each KV cache group, and any are in it."""
    if not isinstance(groups, (list, tuple)) or not any(groups):
        return False
    if not all(isinstance(group, (list, tuple)) for group in groups):
        return False
    return all(type(each) is int and each >= 0 for group in groups for each in group)
