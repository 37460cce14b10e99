"""Reuse that others got wrong in the engine: texts that look alike and have other tokens or keys.

Each test is the one of its kind in ``tests/faults/kinds.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm.lora.request import LoRARequest

from tests.builders import BLOCK, Engine, World, pair, tokens, world
from turncache.protocol import Reason


@pytest.fixture
def made() -> Iterator[World]:
    """Engines whose reads are complete as soon as they start."""
    with world() as made:
        yield made


def returned(reader: Engine, name: str, prompt: list[int], **more: object) -> int:
    """Return how many tokens a prompt takes back from the other engine, from a cold cache."""
    reader.scheduler.reset_prefix_cache()
    reader.call(name, prompt, session="s", source="decode-0", **more)
    record = reader.record(name)
    assert record.local + record.returned + record.computed == len(prompt)
    return int(record.returned)


def other(token: int) -> int:
    """Return a token that is not ``token``."""
    return 3 if token == 2 else 2


def test_generated_text_retokenises(made: World) -> None:
    """An answer that comes back as other tokens is taken up to where they differ, no further."""
    prefill, decode = pair(made)
    history = decode.call("d", tokens(60), session="s", max_tokens=40)
    asked = [*history, *tokens(20, start=3)]
    faithful = returned(prefill, "faithful", asked)
    assert faithful >= 60 // BLOCK * BLOCK + BLOCK, "generated tokens come back too"
    merged = [*history[:70], other(history[70]), *history[72:], *tokens(20, start=3)]
    assert returned(prefill, "merged", merged) == 70 // BLOCK * BLOCK
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_newline_pairs_become_one_token(made: World) -> None:
    """Two generated tokens that are rendered as one move everything behind them: only what
    stands before is taken, and the rest is counted as computed again.
    """
    prefill, decode = pair(made)
    history = decode.call("d", tokens(50), session="s", max_tokens=50)
    joined = [*history[:57], other(history[57]), *history[59:], *tokens(20, start=3)]
    assert returned(prefill, "joined", joined) == 57 // BLOCK * BLOCK
    record = prefill.record("joined")
    assert record.computed == len(joined) - 57 // BLOCK * BLOCK
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_salt_and_adapter_not_in_the_key(made: World) -> None:
    """One session, equal tokens: another salt, no salt or an adapter takes nothing; the same
    salt takes all of it.
    """
    prefill, decode = pair(made)
    prompt = tokens(60)
    decode.call("d", prompt, session="s", cache_salt="a")
    assert returned(prefill, "same", prompt, cache_salt="a") == len(prompt) - 1
    assert returned(prefill, "other", prompt, cache_salt="b") == 0
    assert returned(prefill, "none", prompt) == 0
    adapter = LoRARequest(lora_name="tuned", lora_int_id=1, lora_path="/tuned")
    assert returned(prefill, "adapter", prompt, cache_salt="a", lora_request=adapter) == 0
    assert prefill.record("adapter").reason is Reason.UNSUPPORTED
    for engine in (prefill, decode):
        engine.assert_no_leak()


def test_salt_named_like_an_adapter(made: World) -> None:
    """What an adapter called x computed is nothing to a call whose salt is x, and the reverse."""
    prefill, decode = pair(made)
    adapter = LoRARequest(lora_name="x", lora_int_id=1, lora_path="/x")
    decode.call("d", tokens(60), session="s", lora_request=adapter)
    assert returned(prefill, "salted", tokens(60), cache_salt="x") == 0
    salted = tokens(60, start=77)
    decode.call("e", salted, session="s", cache_salt="x")
    assert returned(prefill, "adapted", salted, lora_request=adapter) == 0
    assert returned(prefill, "own", salted, cache_salt="x") == len(salted) - 1
    for engine in (prefill, decode):
        engine.assert_no_leak()
