"""Who is told about sessions: private addresses, hosts that answered, hosts that are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.hosts import (
    MAX_ANSWERED,
    PROVIDERS,
    Audience,
    audience,
    check_pattern,
    has_answered,
)

TOLD, UNKNOWN, NEVER = Audience.TOLD, Audience.UNKNOWN, Audience.NEVER


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", TOLD),
        ("::1", TOLD),
        ("[::1]", TOLD),
        ("localhost", TOLD),
        ("LOCALHOST.", TOLD),
        ("10.1.2.3", TOLD),
        ("172.16.0.9", TOLD),
        ("172.32.0.9", UNKNOWN),
        ("192.168.1.1", TOLD),
        ("169.254.1.1", TOLD),
        ("100.64.0.1", TOLD),
        ("100.128.0.1", UNKNOWN),
        ("fd00::7", TOLD),
        ("fe80::1", TOLD),
        ("8.8.8.8", UNKNOWN),
        ("2001:4860:4860::8888", UNKNOWN),
        ("vllm", TOLD),
        ("vllm.default.svc.cluster.local", TOLD),
        ("llm.corp.internal", TOLD),
        ("llm.example.com", UNKNOWN),
        ("", NEVER),
        ("api.openai.com", NEVER),
        ("API.OpenAI.com.", NEVER),
        ("eu.api.openai.com", NEVER),
        ("my-resource.openai.azure.com", NEVER),
        ("my.services.ai.azure.com", NEVER),
        ("api.anthropic.com", NEVER),
        ("generativelanguage.googleapis.com", NEVER),
        ("bedrock-runtime.us-east-1.amazonaws.com", NEVER),
        ("openrouter.ai", NEVER),
        ("notopenai.com", UNKNOWN),
        ("api.openai.com.example.org", UNKNOWN),
    ],
)
def test_audience_by_address_and_name(host: str, expected: Audience) -> None:
    """Private is told, a provider never, and anything else waits for its answer."""
    assert audience(host, 443) is expected


def test_a_host_that_answered_is_told() -> None:
    """A server that answers with our header is told from then on, by name and port."""
    has_answered("llm.example.com", 443)
    assert audience("LLM.example.com", 443) is TOLD
    assert audience("llm.example.com", 8443) is UNKNOWN


def test_a_provider_that_answered_is_not_told() -> None:
    """What a provider answers changes nothing."""
    has_answered("api.openai.com", 443)
    assert audience("api.openai.com", 443) is NEVER


@pytest.mark.parametrize(
    ("pattern", "host", "port", "told"),
    [
        ("llm.example.com", "llm.example.com", 443, True),
        ("llm.example.com", "x.llm.example.com", 443, False),
        ("*.example.com", "llm.example.com", 443, True),
        ("*.example.com", "example.com", 443, False),
        ("llm.example.com:8443", "llm.example.com", 8443, True),
        ("llm.example.com:8443", "llm.example.com", None, False),
        ("llm.example.com:443", "llm.example.com", None, True),
        ("[2001:db8::1]:8000", "2001:db8::1", 8000, True),
        ("[2001:db8::1]", "2001:db8::1", 8000, True),
        ("*.openai.azure.com", "mine.openai.azure.com", 443, True),
        ("*", "api.openai.com", 443, True),
    ],
)
def test_named_hosts(pattern: str, host: str, port: int | None, told: bool) -> None:
    """A host that the user named is told, a provider included."""
    check_pattern(pattern)
    before = audience(host, port)
    assert audience(host, port, [pattern]) is (TOLD if told else before)


@pytest.mark.parametrize("pattern", ["http://x", "a/b", "a b", "", "a:b", "x:1:2"])
def test_what_is_no_host_is_refused(pattern: str) -> None:
    """A pattern with a scheme or path would never match, so it is an error."""
    with pytest.raises(ValueError, match="expected a host name"):
        check_pattern(pattern)


def test_answers_are_bounded() -> None:
    """A process that talks to many hosts remembers the latest."""
    for number in range(2 * MAX_ANSWERED):
        has_answered(f"h{number}.example.com", 443)
    assert audience("h0.example.com", 443) is UNKNOWN
    assert audience(f"h{2 * MAX_ANSWERED - 1}.example.com", 443) is TOLD


@given(label=st.from_regex(r"[a-z0-9]{1,9}", fullmatch=True), domain=st.sampled_from(PROVIDERS))
def test_every_name_under_a_provider_is_the_providers(label: str, domain: str) -> None:
    """No sub-domain of a provider is told anything."""
    assert audience(f"{label}.{domain}", 443) is NEVER
    assert audience(domain, 443) is NEVER
