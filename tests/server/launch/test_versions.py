"""The table of vLLM versions."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from turncache_server.versions import OLDEST, TESTED, Support, name_tested_versions, support_of


@pytest.mark.parametrize(
    ("version", "support"),
    [
        ("0.32.0", Support.TESTED),
        ("v0.32.0", Support.TESTED),
        ("0.32.4", Support.TESTED),
        ("0.32.0+cpu", Support.TESTED),
        ("0.32.0.post1", Support.TESTED),
        ("0.32.1.post2+cu129", Support.TESTED),
        ("0.32.0rc2", Support.UNTESTED),
        ("0.32.1.dev7+gabcdef", Support.UNTESTED),
        ("0.33.0", Support.UNTESTED),
        ("1.0.0", Support.UNTESTED),
        ("dev", Support.UNTESTED),
        ("", Support.UNTESTED),
        ("0.31.9", Support.TOO_OLD),
        ("0.9.2", Support.TOO_OLD),
    ],
)
def test_a_version_is_tested_untested_or_too_old(version: str, support: Support) -> None:
    """Final releases of a tested minor version count; older ones never, others are untested."""
    assert support_of(version) is support


@settings(deadline=None)
@given(st.integers(0, 3), st.integers(0, 60), st.integers(0, 9))
def test_no_release_older_than_the_oldest_is_usable(major: int, minor: int, patch: int) -> None:
    """Whatever is older than the oldest is too old, and only that."""
    support = support_of(f"{major}.{minor}.{patch}")
    assert (support is Support.TOO_OLD) == ((major, minor) < OLDEST)
    assert (support is Support.TESTED) == ((major, minor) in TESTED)


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_is_classified(version: str) -> None:
    """A version that cannot be read is no reason to fail."""
    assert support_of(version) in set(Support)


def test_the_tested_versions_are_named_for_messages() -> None:
    """Messages name minor versions."""
    assert name_tested_versions() == "0.32.x"
