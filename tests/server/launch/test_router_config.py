"""The router's configuration as the launcher writes it."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.server.launch.test_profiles import plan
from turncache.errors import ConfigError
from turncache_server.launch.router_config import router_config
from turncache_server.launch.spec import StackSpec
from turncache_server.router.config import parse_config


def written(**changes: Any) -> str:
    """Return what is written for a stack."""
    sides = {name: changes[name] for name in ("prefill", "decode") if name in changes}
    return router_config(StackSpec(model="/m/x", **changes), 8000, plan(**sides))


def test_the_router_reads_what_the_launcher_writes() -> None:
    """Engines, sides, addresses and switches arrive."""
    text = written(
        prefill=1, decode=1, return_enabled=False, router_settings={"ping_s": 2.5, "admin": True}
    )
    config = parse_config(tomllib.loads(text))
    assert [(e.name, e.engine_id, str(e.side), e.url, e.control) for e in config.engines] == [
        ("prefill-0", "prefill-0", "prefill", "http://127.0.0.1:8100", "tcp://127.0.0.1:5800"),
        ("decode-0", "decode-0", "decode", "http://127.0.0.1:8200", "tcp://127.0.0.1:5801"),
    ]
    assert (config.port, config.return_enabled, config.ping_s, config.admin) == (
        8000,
        False,
        2.5,
        True,
    )


@example('\U00010000 \x7f " \\ \n')
@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_any_text_survives_as_a_setting(text: str) -> None:
    """Quotes, backslashes and control characters are written so that TOML reads them back."""
    made = written(router_settings={"engine_key_env": text})
    assert tomllib.loads(made)["engine_key_env"] == text


@pytest.mark.parametrize("name", ["host", "port", "return_enabled", "engines"])
def test_what_the_stack_decides_is_no_router_setting(name: str) -> None:
    """Given twice, the stack and its router would disagree."""
    with pytest.raises(ConfigError, match=f"router_settings.{name}"):
        written(router_settings={name: 1})


@pytest.mark.parametrize("value", [[1], {"a": 1}, None, float("nan")])
def test_a_setting_that_is_no_single_value_is_refused(value: object) -> None:
    """Tables, lists and numbers that are none are no settings of the router."""
    with pytest.raises(ConfigError, match="expected a single value"):
        written(router_settings={"ping_s": value})
