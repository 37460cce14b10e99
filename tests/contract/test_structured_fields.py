"""The structured-field parser: every text gives a dictionary or a ProtocolError."""

from __future__ import annotations

import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from turncache import protocol
from turncache.errors import ProtocolError
from turncache.protocol import Item, format_dictionary, parse_dictionary

KEYS = st.text("abcxyz0189_-.*", min_size=1, max_size=12).filter(
    lambda key: key[0] in string.ascii_lowercase + "*"
)
INTEGERS = st.integers(-(10**15) + 1, 10**15 - 1)
#: Decimals with at most three fractional digits survive a round trip exactly.
DECIMALS = st.integers(-(10**11), 10**11).map(lambda thousandths: thousandths / 1000)
STRINGS = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)
ITEMS: st.SearchStrategy[Item] = st.one_of(st.booleans(), INTEGERS, DECIMALS, STRINGS)
#: Text that comes close to a dictionary, so that every branch of the parser is reached.
NEARLY = st.text(st.sampled_from(list('ab1*=,;?"\\ \t.-_:/é\u0663\x00(')), max_size=40)


@given(st.dictionaries(KEYS, ITEMS, max_size=6))
def test_dictionaries_survive_a_round_trip(members: dict[str, Item]) -> None:
    """What is serialised is parsed back to equal members of equal type, in order."""
    parsed = parse_dictionary("H", format_dictionary(members))
    assert list(parsed.items()) == list(members.items())
    assert [type(value) for value in parsed.values()] == [type(v) for v in members.values()]


@given(st.one_of(st.text(max_size=60), NEARLY))
@example("a=")
@example('a="')
@example('a="\\')
@example("a=?")
@example("a;")
@example("a=1,")
@example("a=\u0663")
@example("a=" + "9" * 5000)
@example("a=1.2345")
def test_any_text_is_parsed_or_refused(text: str) -> None:
    """No text makes the parser raise anything but ProtocolError, which names the header."""
    refused: ProtocolError | None = None
    members: dict[str, Item] = {}
    try:
        members = parse_dictionary("Some-Header", text)
    except ProtocolError as error:
        refused = error
    assert refused is None or refused.field == "Some-Header"
    assert all(isinstance(value, (bool, int, float, str)) for value in members.values())


@given(st.one_of(st.text(max_size=60), NEARLY))
def test_what_is_parsed_can_be_serialised(text: str) -> None:
    """Whatever the parser accepts is legal enough to be sent on, and means the same."""
    try:
        members = parse_dictionary("H", text)
    except ProtocolError:
        return
    assert parse_dictionary("H", format_dictionary(members)) == members


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("", {}),
        ("   ", {}),
        ("a", {"a": True}),
        ("a=?0, b", {"a": False, "b": True}),
        ("v=1,\tturn=3", {"v": 1, "turn": 3}),
        ("retain=12.5", {"retain": 12.5}),
        ("x=-7", {"x": -7}),
        ('s="a \\"b\\" \\\\"', {"s": 'a "b" \\'}),
        ("cause=tool", {"cause": "tool"}),
        ("*=9", {"*": 9}),
        ("a=1;unit=s;q, b=2", {"a": 1, "b": 2}),
        ("a=1, a=2", {"a": 2}),
    ],
)
def test_legal_dictionaries(text: str, members: dict[str, Item]) -> None:
    """Bare items, parameters (dropped) and repeated keys (the last wins) are understood."""
    assert parse_dictionary("H", text) == members


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("A=1", "no dictionary key at character 0"),
        ("a=(1 2)", "no item at character 2"),
        ("a=:aGk=:", "no item at character 2"),
        ("a=@1659578233", "no item at character 2"),
        ("a=?2", "no item at character 2"),
        ("a=1 b=2", "expected ','"),
        ("a=1,", "trailing ','"),
        ('a="x', "string without end"),
        ('a="\\n"', "bad escape"),
        ('a="é"', "is not allowed in a string"),
        ("a=1;", "no parameter name"),
        ("a=1234567890123456", "expected ','"),
        ("a=\u0661", "no item at character 2"),
    ],
)
def test_illegal_dictionaries_are_refused_at_the_right_place(text: str, what: str) -> None:
    """The message says what is wrong and where."""
    with pytest.raises(ProtocolError, match="H: ") as caught:
        parse_dictionary("H", text)
    assert what in str(caught.value)


@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"Upper": 1}, id="key"),
        pytest.param({"": 1}, id="empty-key"),
        pytest.param({"a": 10**15}, id="long-integer"),
        pytest.param({"a": -(10**5000)}, id="very-long-integer"),
        pytest.param({"a": float("inf")}, id="infinite"),
        pytest.param({"a": float("nan")}, id="nan"),
        pytest.param({"a": 1e12}, id="long-decimal"),
        pytest.param({"a": "é"}, id="not-ascii"),
        pytest.param({"a": "line\nbreak"}, id="header-splitting"),
    ],
)
def test_what_the_standard_cannot_express_is_not_sent(members: dict[str, Item]) -> None:
    """Serialising refuses what a reader would have to refuse, or could be misled by."""
    with pytest.raises(ProtocolError):
        format_dictionary(members)


@given(st.text(st.characters(max_codepoint=0x2FF), max_size=300))
def test_session_ids_are_visible_ascii(text: str) -> None:
    """A session id is accepted exactly when it has 1 to 256 visible ASCII characters."""
    legal = 0 < len(text) <= protocol.MAX_SESSION_ID_CHARS and all(
        "!" <= char <= "~" for char in text
    )
    if legal:
        assert protocol.check_session_id(text) == text
    else:
        with pytest.raises(ProtocolError):
            protocol.check_session_id(text)
