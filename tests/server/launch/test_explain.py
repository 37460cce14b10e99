"""From the end of a log to what was wrong. Most lines are what vLLM 0.32 printed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache_server.launch.explain import explain


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (
            "api_server.py: error: unrecognized arguments: --foo 1",
            "vLLM knows no such flag: --foo 1",
        ),
        (
            "api_server.py: error: argument --dtype: invalid choice: 'float31'",
            "vLLM refuses its command line: argument --dtype: invalid choice: 'float31'",
        ),
        (
            "OSError: [Errno 98] Address already in use",
            "a port that it needs is in use",
        ),
        (
            (
                "/opt/venv/bin/python: Error while finding module specification for "
                "'vllm.entrypoints.openai.api_server' (ModuleNotFoundError: No module named 'vllm')"
            ),
            "vLLM is not installed in the engine environment",
        ),
        (
            "ModuleNotFoundError: No module named 'turncache_server'",
            "turncache is not installed in the engine environment",
        ),
        ("RuntimeError: NIXL is not available", "NIXL is not installed in the engine environment"),
        ("ModuleNotFoundError: No module named 'aiohttp'", "the module aiohttp is missing"),
        (
            "OSError: no/such is not a local folder and is not a valid model identifier",
            "the model cannot be loaded",
        ),
        (
            (
                "ValueError: To serve at least one request with the models's max seq len (32768), "
                "(4.0 GiB KV cache is needed, which is larger than the available KV cache memory"
            ),
            "one sequence of the model's full length does not fit into the KV space",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB",
            "there is too little memory",
        ),
    ],
)
def test_a_known_sign_is_explained_with_a_way_out(line: str, what: str) -> None:
    """The cause is named in one sentence, whatever was printed around it."""
    explanation = explain(["INFO starting", line, "INFO shutting down"], 1)
    assert explanation.what == what
    assert explanation.way_out
    assert explanation.is_usage == ("api_server.py" in line)


def test_the_cause_wins_over_what_follows_from_it() -> None:
    """A refused flag is the cause, even when less specific signs surround it."""
    lines = [
        "api_server.py: error: unrecognized arguments: --foo",
        "MemoryError",
    ]
    assert explain(lines, 2).what == "vLLM knows no such flag: --foo"


def test_a_missing_part_of_vllm_is_not_a_missing_vllm() -> None:
    """What vLLM itself only warns of is no cause; what our connector lacks is."""
    benign = "WARNING Failed to import from vllm._C: No module named 'vllm._C'"
    memory = "torch.OutOfMemoryError: CUDA out of memory"
    assert explain([benign, memory], 1).what == "there is too little memory"
    moved = "ModuleNotFoundError: No module named 'vllm.distributed.nixl_new'"
    assert "vllm.distributed.nixl_new" in explain([moved], 1).what
    renamed = "ImportError: cannot import name 'KVCacheBlocks' from 'vllm.v1.core' (/x.py)"
    assert "vllm.v1.core" in explain([renamed], 1).what
    assert "not installed" in explain(["No module named 'vllm'"], 1).what


def test_a_kill_without_a_word_points_at_the_kernel() -> None:
    """Signal 9 leaves no log line."""
    assert "signal 9" in explain(["INFO working"], 137).what


@settings(deadline=None)
@given(st.lists(st.text(max_size=80), max_size=20), st.none() | st.integers(0, 255))
def test_any_log_is_explained_or_left_alone(lines: list[str], code: int | None) -> None:
    """There is always a way out to print."""
    assert explain(lines, code).way_out
