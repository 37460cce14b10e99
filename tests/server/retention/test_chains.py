"""Common prefixes of remembered chains."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from tests.server.retention.support import hashes
from turncache_server.retention.chains import common_prefix, remember

TEXT = st.text(alphabet="ab", max_size=12)


@given(TEXT, TEXT, TEXT)
def test_bisection_finds_what_comparing_block_by_block_finds(
    shared: str, left: str, right: str
) -> None:
    """Chain hashes cover everything before them, so bisection sees the whole prefix."""
    known, asked = hashes(shared + left), hashes(shared + right)
    expected = 0
    while expected < min(len(known), len(asked)) and known[expected] == asked[expected]:
        expected += 1
    assert common_prefix(remember(known), asked) == expected


def test_a_chain_is_remembered_in_eight_bytes_per_block() -> None:
    """Sessions that never come back cost little."""
    known = remember(hashes("a" * 100))
    assert known.itemsize * len(known) == 800
