"""A real pair of ours for what is measured with it: started, and as options of our verbs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from turncache_server.launch.stack import Stack, StackSpec, start
from turncache_tools.shell import progress

BLOCK_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Pair:
    """A running pair.

    Attributes:
        stack: what runs.
        prefill: base URL of the prefill engine.
        places: options that name router, engines and control sockets, prefill first.
    """

    stack: Stack
    prefill: str
    places: tuple[str, ...]


def pair_spec(
    *,
    model: str,
    context: int,
    sessions: int,
    decode_sessions: int | None = None,
    ports: int | None = None,
) -> StackSpec:
    """Return a pair in float32, so that texts can be compared, with pools of so many sessions.

    Args:
        model: its name.
        context: tokens of the longest prompt and answer.
        sessions: of that length that prefill's pool holds.
        decode_sessions: likewise decode's, None for as many.
        ports: first of the ports that are taken, so that a stack that is started again is the
            same to a run that goes on; None for free ones.
    """
    blocks = -(-context // BLOCK_TOKENS) + 2
    fixed = {}
    if ports is not None:
        names = ("router_port", "engine_port", "decode_port", "nixl_port", "control_port")
        fixed = {name: ports + 10 * place for place, name in enumerate(names)}
    return StackSpec(
        model=model,
        prefill=1,
        decode=1,
        dtype="float32",
        max_model_len=-(-context // BLOCK_TOKENS) * BLOCK_TOKENS,
        num_blocks={
            "prefill": sessions * blocks,
            "decode": (decode_sessions or sessions) * blocks,
        },
        router_settings={"admin": True},
        **{"router_port": 0, **fixed},
    )


@contextmanager
def running(spec: StackSpec) -> Iterator[Pair]:
    """Start a pair and stop it at the end."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # the reset of a prefix cache is one of its paths
    with start(spec, progress=progress) as stack:
        places = ["--url", stack.base_url]
        for engine in stack.engines:
            assert engine.control_address is not None
            places += ["--control", engine.control_address, "--engine", engine.url]
        prefill = next(each.url for each in stack.engines if each.side == "prefill")
        yield Pair(stack, prefill, tuple(places))
