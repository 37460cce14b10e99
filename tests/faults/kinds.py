"""Kinds of fault that clients, agent loops and routers had elsewhere, each with its test here.

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
_TRANSFER: Final = "server/router/test_faults_transfer.py"
_PROXY: Final = "server/router/test_faults_proxy.py"
_PRESSURE: Final = "server/router/test_faults_pressure.py"
_UPSTREAM: Final = "server/router/test_upstream.py"
_APIS: Final = "server/router/test_apis.py"
_DRAINING: Final = "server/router/test_draining.py"

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

#: KV that prefill and decode exchange, as far as a router takes part.
TRANSFER: Final = (
    Kind(
        "an_edited_history_is_never_answered_from_old_kv",
        _TRANSFER,
        (
            "vllm-project/vllm#43094",
            "vllm-project/vllm#44838",
        ),
    ),
    Kind(
        "what_a_stock_engine_holds_is_handed_on_as_it_says", _TRANSFER, ("vllm-project/vllm#47021",)
    ),
    Kind(
        "a_handoff_of_an_engine_goes_nowhere",
        _TRANSFER,
        (
            "vllm-project/vllm#32553",
            "vllm-project/vllm#41383",
            "vllm-project/vllm#47843",
        ),
    ),
    Kind("a_handoff_of_a_client_goes_nowhere", _TRANSFER, ("vllm-project/vllm#47843",)),
    Kind(
        "a_call_that_decode_would_reject_is_not_prefilled", _TRANSFER, ("vllm-project/vllm#41269",)
    ),
    Kind("a_rejection_by_decode_leaves_nothing_behind", _TRANSFER, ("vllm-project/vllm#41269",)),
    Kind(
        "what_one_child_of_a_pull_cannot_serve_goes_to_one_engine",
        _TRANSFER,
        (
            "vllm-project/vllm#43509",
            "vllm-project/vllm#38900",
        ),
    ),
    Kind(
        "several_streamed_answers_are_complete_when_all_are",
        _TRANSFER,
        ("vllm-project/vllm#43509",),
    ),
    Kind("stop_strings_do_not_reach_the_prefill_leg", _TRANSFER, ("smg-project/smg#1622",)),
    Kind(
        "the_shortest_answer_is_decodes_alone",
        _TRANSFER,
        (
            "vllm-project/vllm#16705",
            "vllm-project/vllm#18341",
            "ModelEngine-Group/unified-cache-management#1348",
            "ModelEngine-Group/unified-cache-management#1295",
        ),
    ),
    Kind("several_prompts_are_not_split", _TRANSFER, ("vllm-project/vllm#50559",)),
    Kind(
        "log_probabilities_of_a_prompt_come_from_who_computes_it",
        _TRANSFER,
        (
            "vllm-project/vllm-ascend#13363",
            "vllm-project/vllm#27449",
        ),
    ),
    Kind(
        "a_storm_of_impatient_clients_leaves_no_leg_behind",
        _TRANSFER,
        (
            "vllm-project/vllm#43226",
            "vllm-project/vllm#46240",
            "vllm-project/vllm#48616",
            "vllm-project/vllm#49089",
        ),
    ),
    Kind(
        "a_prefill_that_hangs_does_not_hang_the_client",
        _TRANSFER,
        (
            "vllm-project/vllm#46283",
            "vllm-project/vllm#35943",
        ),
    ),
    Kind(
        "a_restarted_engine_at_the_same_address_gets_nothing_stale",
        _TRANSFER,
        ("vllm-project/vllm#49238",),
    ),
    Kind("a_failed_generation_is_no_success", _TRANSFER, ("smg-project/smg#2382",)),
    Kind("a_prefill_that_gave_up_is_not_handed_to_decode", _TRANSFER, ("smg-project/smg#2382",)),
    Kind(
        "a_fleet_is_restarted_engine_by_engine_and_nothing_is_lost",
        _DRAINING,
        ("vllm-project/vllm#58063",),
    ),
    Kind(
        "the_benefit_engages_for_streams_too",
        _TRANSFER,
        (
            "vllm-project/vllm#36308",
            "vllm-project/vllm#40186",
        ),
    ),
    Kind(
        "an_api_that_is_not_served_says_so",
        _TRANSFER,
        (
            "sgl-project/sglang#35497",
            "vllm-project/vllm#37424",
        ),
    ),
    Kind(
        "a_kept_answer_is_continued_where_it_is_kept",
        _APIS,
        (
            "sgl-project/sglang#35497",
            "vllm-project/vllm#37424",
        ),
    ),
    Kind(
        "equal_request_ids_of_clients_do_not_meet_in_an_engine",
        _TRANSFER,
        ("vllm-project/vllm#10583",),
    ),
    Kind(
        "a_retry_after_a_dropped_connection_is_a_call_of_its_own",
        _TRANSFER,
        ("BerriAI/litellm#37140",),
    ),
)

#: Proxies that speak OpenAI.
PROXY: Final = (
    Kind(
        "disconnects_without_streaming_leave_no_orphans",
        _PROXY,
        (
            "BerriAI/litellm#37140",
            "vllm-project/production-stack#867",
            "vllm-project/production-stack#634",
        ),
    ),
    Kind(
        "aborts_can_be_kept_from_an_engine_that_does_not_survive_them",
        _PROXY,
        ("mostlygeek/llama-swap#980",),
    ),
    Kind("draining_for_nobody_is_bounded", _PROXY, ("mostlygeek/llama-swap#980",)),
    Kind(
        "an_upstream_error_in_a_stream_is_no_empty_success",
        _PROXY,
        (
            "vllm-project/semantic-router#3063",
            "BerriAI/litellm#39748",
        ),
    ),
    Kind("a_clean_end_without_finish_reason_is_a_failure", _PROXY, ("BerriAI/litellm#40260",)),
    Kind(
        "any_split_of_the_network_gives_the_client_the_same_bytes",
        _PROXY,
        (
            "api7/aisix#111",
            "katanemo/plano#980",
            "1jehuang/jcode#613",
            "fastrepl/anarlog#6872",
        ),
    ),
    Kind("line_ends_and_comments_of_any_kind_are_understood", _PROXY, ("praxis-proxy/praxis#739",)),
    Kind(
        "the_chunks_are_those_of_the_engine",
        _PROXY,
        (
            "headroomlabs-ai/headroom#2026",
            "ROCm/ATOM#1711",
            "router-for-me/CLIProxyAPI#796",
        ),
    ),
    Kind(
        "hundreds_of_streams_run_at_once",
        _PROXY,
        (
            "vllm-project/vllm#28782",
            "vllm-project/vllm#26122",
            "BerriAI/litellm#1360",
            "huggingface/lighteval#1190",
        ),
    ),
    Kind(
        "pings_keep_a_long_prefill_alive_and_are_no_events",
        _PROXY,
        (
            "BerriAI/litellm#34819",
            "vllm-project/vllm#47647",
        ),
    ),
    Kind("answers_of_status_500_open_no_circuit", _PROXY, ("vllm-project/router#148",)),
    Kind(
        "a_prefill_that_is_overloaded_is_no_full_prefill_on_decode",
        _PROXY,
        ("llm-d/llm-d-router#1206",),
    ),
    Kind(
        "a_session_does_not_stick_to_a_dead_engine",
        _PROXY,
        (
            "diegosouzapw/OmniRoute#6219",
            "ai-dynamo/dynamo#9920",
        ),
    ),
    Kind(
        "a_call_that_failed_does_not_pin_its_session", _PROXY, ("router-for-me/CLIProxyAPI#3613",)
    ),
    Kind(
        "calls_without_session_spread_over_the_engines",
        _PROXY,
        (
            "radixark/miles#1657",
            "PrimeIntellect-ai/prime-rl#2822",
        ),
    ),
    Kind("equal_beginnings_make_no_common_session", _PROXY, ("ranxianglei/billion-context#91",)),
    Kind(
        "the_outcome_is_prefills_and_usage_is_decodes", _PROXY, ("vllm-project/vllm-ascend#10598",)
    ),
)

#: Retention, pressure and isolation, as far as a router takes part.
PRESSURE: Final = (
    Kind(
        "a_burst_on_decode_evicts_no_prompt_that_it_has_not_read",
        _PRESSURE,
        ("vllm-project/vllm#21570", "vllm-project/vllm#25897"),
    ),
    Kind(
        "retention_binds_no_session_to_an_overloaded_engine",
        _PRESSURE,
        ("sgl-project/sglang#21045",),
    ),
    Kind(
        "an_engine_that_lost_everything_costs_a_recompute",
        _PRESSURE,
        (
            "sgl-project/sglang#27024",
            "sgl-project/sglang#27025",
        ),
    ),
    Kind("a_full_table_forgets_sessions_and_serves_them", _PRESSURE, ("sgl-project/sglang#27024",)),
    Kind(
        "another_tenants_prefix_is_as_slow_as_nobodys",
        _PRESSURE,
        (
            "vllm-project/vllm#39082",
            "vllm-project/vllm#53347",
        ),
    ),
    Kind(
        "a_guessed_session_opens_nothing",
        _PRESSURE,
        (
            "llm-d/llm-d-router#2432",
            "llm-d/llm-d-router#2831",
        ),
    ),
    Kind("engines_are_reached_by_name_and_by_any_address", _UPSTREAM, ("llm-d/llm-d-router#2831",)),
)
