"""vLLM's counters of prompt tokens by source."""

from __future__ import annotations

from turncache_tools.demo.counters import PromptTokens, read_prompt_tokens

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="local_compute"} 1200.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="smollm2",source="local_cache_hit"} 96.0
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer",model_name="a"} 64.0
vllm:prompt_tokens_by_source_created{engine="0",source="local_compute"} 1.7e+09
vllm:prompt_tokens_total{engine="0",model_name="smollm2"} 1360.0
"""


def test_sources_are_read_whatever_the_order_of_labels() -> None:
    """Other metrics, and the time of creation, are not."""
    tokens = read_prompt_tokens(METRICS)
    assert tokens == PromptTokens(computed=1200, local=96, external=64)
    assert tokens.total == 1360


def test_engines_behind_one_url_add_up() -> None:
    """Data-parallel ranks count apart."""
    line = 'vllm:prompt_tokens_by_source_total{{engine="{}",source="local_compute"}} 5.0'
    assert read_prompt_tokens(line.format(0) + "\n" + line.format(1)).computed == 10


def test_a_source_that_is_not_there_is_nothing() -> None:
    """An engine that has served nothing shows no counters."""
    assert read_prompt_tokens("") == PromptTokens()


def test_readings_subtract() -> None:
    """What a call cost is the difference of two readings."""
    before = PromptTokens(computed=1, local=2, external=3)
    after = PromptTokens(computed=11, local=22, external=33)
    assert after - before == PromptTokens(computed=10, local=20, external=30)
