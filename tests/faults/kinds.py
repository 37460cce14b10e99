"""Kinds of fault that clients and agent loops had elsewhere, each with its test here.

A kind's test is the function ``test_<kind>`` in the file named here. Below each kind are
reports of it in public trackers. ``tests/faults/test_index.py`` checks that no kind is
without a test; a kind leaves this list only when the fault cannot happen any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of fault.

    Attributes:
        name: names its test.
        file: where the test is, relative to ``tests``.
        reports: public reports of it.
    """

    name: str
    file: str
    reports: tuple[str, ...]


_REUSE: Final = "faults/test_reuse.py"
_ENGINE: Final = "scheduler/test_reuse_faults.py"
_WRAPPERS: Final = "faults/test_wrappers.py"
_BENCHMARKS: Final = "faults/test_benchmarks.py"
_LANGCHAIN: Final = "foreign/test_langchain.py"
_CALL_PATHS: Final = "contract/test_call_paths.py"

#: Prefix reuse that breaks in agent loops.
REUSE: Final = (
    Kind("reasoning_dropped_when_a_turn_becomes_history", _REUSE, ("QwenLM/Qwen3.8#131",)),
    Kind("reasoning_never_rendered_again", _REUSE, ("verl-project/verl#6854",)),
    Kind("marker_on_the_last_user_message", _REUSE, ("jundot/omlx#2501",)),
    Kind("generated_text_retokenises", _ENGINE, ("kubernetes-sigs/inference-perf#649",)),
    Kind("newline_pairs_become_one_token", _ENGINE, ("PrimeIntellect-ai/prime-rl#1863",)),
    Kind(
        "key_order_changes_in_a_round_trip",
        _REUSE,
        ("stanfordnlp/dspy#10216", "teunlao/swift-ai-sdk#39"),
    ),
    Kind(
        "tools_in_another_order",
        _REUSE,
        ("openai/codex#2611", "maximhq/bifrost#3362", "langchain-ai/deepagents#2497"),
    ),
    Kind(
        "key_order_inside_a_tool_schema",
        _REUSE,
        ("Lakr233/FlowDown#273", "sgl-project/sglang#34553"),
    ),
    Kind(
        "clock_in_the_system_prompt",
        _REUSE,
        (
            "earendil-works/pi#2013",
            "joshuadavidthomas/opencode-agent-memory#24",
            "AltimateAI/altimate-code#949",
        ),
    ),
    Kind(
        "null_empty_and_absent_content",
        _REUSE,
        ("vllm-project/vllm#54368", "vercel/ai#12390"),
    ),
    Kind("begin_token_doubled_between_endpoints", _REUSE, ("vllm-project/vllm#9519",)),
    Kind(
        "reasoning_added_or_removed_by_a_client",
        _REUSE,
        (
            "openai/openai-agents-python#1943",
            "langchain-ai/langchain#34177",
            "huggingface/smolagents#2080",
            "tidyverse/ellmer#972",
        ),
    ),
    Kind(
        "salt_and_adapter_not_in_the_key",
        _ENGINE,
        ("vllm-project/vllm#53495", "LMCache/LMCache#4825", "sgl-project/sglang#37160"),
    ),
    Kind("salt_named_like_an_adapter", _ENGINE, ("vllm-project/vllm#44701",)),
    Kind(
        "no_hit_called_a_win",
        _REUSE,
        (
            "vllm-project/vllm#42317",
            "vllm-project/vllm#42948",
            "vllm-project/vllm#31920",
        ),
    ),
)

#: Wrappers around the OpenAI client.
WRAPPERS: Final = (
    Kind(
        "copies_lose_settings",
        _WRAPPERS,
        ("openai/openai-python#779", "openai/openai-python#3593"),
    ),
    Kind(
        "async_streaming_response_not_recorded",
        _WRAPPERS,
        ("langfuse/langfuse-python#1740", "wandb/weave#6721"),
    ),
    Kind(
        "bookkeeping_replaces_the_answer",
        _WRAPPERS,
        ("getsentry/sentry-python#7223", "getsentry/sentry-python#7222"),
    ),
    Kind("subclass_not_taken_for_a_client", _WRAPPERS, ("BerriAI/litellm#10901",)),
    Kind("async_client_silently_bypassed", _LANGCHAIN, ("langchain-ai/langchain#38116",)),
    Kind(
        "client_copied_or_pickled",
        _WRAPPERS,
        ("openai/openai-python#837", "NVIDIA/garak#659"),
    ),
    Kind("current_session_in_a_module_global", _WRAPPERS, ("AgentBudget/agentbudget#20",)),
    Kind(
        "generator_closed_in_another_context",
        _WRAPPERS,
        (
            "openlit/openlit#1369",
            "Arize-ai/phoenix#11362",
            "pydantic/pydantic-ai#6569",
        ),
    ),
    Kind(
        "worker_threads_without_context",
        _WRAPPERS,
        ("openai/openai-guardrails-python#60", "crewAIInc/crewAI#4822"),
    ),
    Kind(
        "http_library_of_the_wrong_family",
        _WRAPPERS,
        (
            "openai/openai-python#3594",
            "openai/openai-python#3375",
            "cognizant-ai-lab/neuro-san#1379",
            "frankie567/httpx-oauth#388",
        ),
    ),
    Kind(
        "call_paths_beside_create",
        _CALL_PATHS,
        ("langchain-ai/langsmith-sdk#1373", "langchain-ai/langsmith-sdk#1567"),
    ),
    Kind("retry_counted_as_another_call", _WRAPPERS, ("BerriAI/litellm#37140",)),
)

#: Benchmarks that flatter what they measure.
BENCHMARKS: Final = (
    Kind(
        "first_token_is_not_content",
        _BENCHMARKS,
        (
            "vllm-project/guidellm#737",
            "kubernetes-sigs/inference-perf#559",
            "vllm-project/aibrix#1573",
        ),
    ),
    Kind("answer_without_any_token", _BENCHMARKS, ("vllm-project/production-stack#873",)),
    Kind("nothing_measured_counted_as_zero", _BENCHMARKS, ("sgl-project/sglang#36047",)),
    Kind("mixed_delta_counted_twice", _BENCHMARKS, ("vllm-project/vllm#43739",)),
    Kind("warm_up_in_measured_sessions", _BENCHMARKS, ("LMCache/LMBenchmark#35",)),
    Kind(
        "second_arm_on_a_warm_cache",
        _BENCHMARKS,
        ("vllm-project/vllm#54227", "vllm-project/vllm#52884"),
    ),
    Kind(
        "cache_reset_refused",
        _BENCHMARKS,
        (
            "vllm-project/vllm#57727",
            "llm-d/llm-d-benchmark#1918",
            "vllm-project/vllm#41180",
        ),
    ),
    Kind(
        "start_up_in_the_first_calls",
        _BENCHMARKS,
        (
            "modelscope/evalscope#1648",
            "sgl-project/sglang#39398",
            "ai-dynamo/aisimulate#287",
        ),
    ),
    Kind(
        "strict_server_refuses_session_members",
        _BENCHMARKS,
        ("vllm-project/vllm#43756", "vllm-project/vllm#44663"),
    ),
    Kind("gain_without_equal_load", _BENCHMARKS, ("llm-d/llm-d-router#2831",)),
    Kind("answers_are_computed_again", _BENCHMARKS, ("sgl-project/sglang#16521",)),
    Kind("feature_never_engages", _BENCHMARKS, ("vllm-project/vllm#44663",)),
    Kind("off_is_not_like_off", _BENCHMARKS, ("vllm-project/vllm#54227",)),
    Kind("failed_calls_left_out", _BENCHMARKS, ("llm-d/llm-d-router#2831",)),
)
