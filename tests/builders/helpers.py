"""What the tests say in one line: worlds, pairs, reads under way, conversations."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request

from tests.builders.configuration import BLOCK, VOCAB
from tests.builders.content import tokens
from tests.builders.engines import Engine, World


@contextlib.contextmanager
def world(**kwargs: Any) -> Iterator[World]:
    """Make a world, and close its engines."""
    made = World(**kwargs)
    try:
        yield made
    finally:
        made.close()


def pair(made: World, **kwargs: Any) -> tuple[Engine, Engine]:
    """Make a prefill and a decode engine that may pull from each other."""
    prefill = Engine(made, "prefill-0", peers=["decode-0"], **kwargs)
    decode = Engine(made, "decode-0", peers=["prefill-0"], **kwargs)
    return prefill, decode


def reading(
    reader: Engine,
    source: Engine,
    *,
    blocks: int = 8,
    local_blocks: int = 0,
    request_id: str = "r",
    max_tokens: int = 1,
) -> Request:
    """Bring a request to the point where its read has started: the wire must hold it.

    Args:
        reader: pulls.
        source: has served the same prompt.
        blocks: full blocks of the prompt; two more tokens follow.
        local_blocks: leading blocks that the reader has itself.
        request_id: of the request.
        max_tokens: to sample.
    """
    prompt = tokens(blocks * BLOCK + 2)
    source.call(f"warm-{request_id}", prompt, session="s")
    if local_blocks:
        reader.call(f"local-{request_id}", [*prompt[: local_blocks * BLOCK], 7])
    request = reader.add(request_id, prompt, session="s", source=source.name, max_tokens=max_tokens)
    started = len(reader.world.transfers)
    reader.run(lambda: len(reader.world.transfers) > started)
    return request


@dataclass
class Conversation:
    """A session whose history grows by answers and tool results."""

    session: str
    history: list[int] = field(default_factory=list)
    calls: int = 0

    def more(self, count: int) -> list[int]:
        """Append new tokens, and return the prompt."""
        start = 100 + 31 * len(self.history) + zlib.crc32(self.session.encode()) % 1000
        self.history += [2 + (start + i) % (VOCAB - 2) for i in range(count)]
        self.calls += 1
        return list(self.history)

    def call(self, engine: Engine, new_tokens: int, **kwargs: Any) -> str:
        """Serve a call on an engine and keep its answer; returns the call's id."""
        prompt = self.more(new_tokens)
        request_id = f"{self.session}-{self.calls}-{engine.name}"
        self.history = engine.call(request_id, prompt, session=self.session, **kwargs)
        return request_id
