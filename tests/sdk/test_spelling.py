"""What is told whoever writes a name that there is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.spelling import did_you_mean, no_such, none_of

NAMES = ("admission", "admission_wait_s", "return_enabled", "host", "port")


@pytest.mark.parametrize(
    ("given_", "meant"),
    [
        ("retrun_enabled", "return_enabled"),
        ("return-enabled", "return_enabled"),
        ("PORT", "port"),
        ("prot", "port"),
        ("admision", "admission"),
        ("admission_wait", "admission_wait_s"),
    ],
)
def test_a_slip_is_told_what_is_meant(given_: str, meant: str) -> None:
    """Letters that changed places or lack, another case, dashes."""
    assert did_you_mean(given_, NAMES) == f" (did you mean {meant}?)"


@pytest.mark.parametrize("given_", ["colour", "", 7, None, True, ["port"]])
def test_what_is_like_nothing_is_guessed_nothing(given_: object) -> None:
    """A wrong guess is worse than none."""
    assert did_you_mean(given_, NAMES) == ""


@given(st.sampled_from(NAMES), st.data())
def test_a_name_without_one_letter_is_found(name: str, data: st.DataObject) -> None:
    """Whichever letter it is."""
    at = data.draw(st.integers(0, len(name) - 1))
    assert did_you_mean(name[:at] + name[at + 1 :], NAMES) != ""


def test_the_sentences_name_everything_there_is() -> None:
    """The guess comes first: the list may be long."""
    assert none_of("onn", ["on", "observe", "off"]) == (
        "'onn' (did you mean on?): expected one of on, observe, off"
    )
    assert none_of(3, ["on", "off"]) == "3: expected one of on, off"
    assert no_such("setting", "hots", ["port", "host"]) == (
        "no such setting (did you mean host?); expected one of host, port"
    )
