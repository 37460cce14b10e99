"""The environment: parsed once, and refused with the variable's name."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from turncache.errors import ConfigError
from turncache.settings import LOG, Profile, Settings, from_environment, set_up_logging


def test_an_empty_environment_is_the_default() -> None:
    """Unset and empty variables mean the same."""
    assert from_environment({}) == Settings()
    empty = dict.fromkeys(
        ("TURNCACHE_SESSION_ID", "TURNCACHE_PROFILE", "TURNCACHE_HOSTS", "TURNCACHE_DISABLED"),
        "",
    )
    assert from_environment(empty) == Settings()


def test_every_variable_is_read() -> None:
    """Names, lists and flags are understood in any case and with spaces."""
    environ = {
        "TURNCACHE_SESSION_ID": "rollout-7",
        "TURNCACHE_PROFILE": " VLLM ",
        "TURNCACHE_HOSTS": "LLM.example.com, ,10.0.0.7:8000",
        "TURNCACHE_DISABLED": "Yes",
    }
    assert from_environment(environ) == Settings(
        session_id="rollout-7",
        profile=Profile.VLLM,
        hosts=("llm.example.com", "10.0.0.7:8000"),
        disabled=True,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TURNCACHE_SESSION_ID", "two words"),
        ("TURNCACHE_PROFILE", "fast"),
        ("TURNCACHE_HOSTS", "https://llm.example.com"),
        ("TURNCACHE_DISABLED", "maybe"),
    ],
)
def test_a_wrong_value_names_its_variable(name: str, value: str) -> None:
    """The error says which variable, which value and what was expected."""
    with pytest.raises(ConfigError) as caught:
        from_environment({name: value})
    assert caught.value.setting == name
    assert value[:5] in str(caught.value)


def test_log_levels(caplog: pytest.LogCaptureFixture) -> None:
    """TURNCACHE_LOG sets the level of our logger and of no other."""
    level, root = LOG.level, logging.getLogger().level
    handlers = list(LOG.handlers)
    try:
        set_up_logging({"TURNCACHE_LOG": "debug"})
        assert (LOG.level, logging.getLogger().level) == (logging.DEBUG, root)
        with pytest.raises(ConfigError, match="debug, info, warning"):
            set_up_logging({"TURNCACHE_LOG": "loud"})
    finally:
        LOG.setLevel(level)
        LOG.handlers = handlers


def test_the_log_shows_calls_and_no_content() -> None:
    """With TURNCACHE_LOG=debug each call is a line on stderr, without text or key."""
    code = (
        "import turncache\n"
        "from turncache.testing import FakeServer\n"
        "with FakeServer() as server:\n"
        "    client = turncache.OpenAI(base_url=server.url, api_key='sk-secret')\n"
        "    messages = [{'role': 'user', 'content': 'secret text'}]\n"
        "    client.with_session('ticket').chat.completions.create(model='m', messages=messages)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"TURNCACHE_LOG": "debug", "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert "session ticket: v=1, turn=1, call=1, cause=user" in done.stderr
    assert "secret" not in done.stderr
