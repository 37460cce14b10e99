"""The agent's tools and texts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache.errors import EnvironmentFault
from turncache_tools.demo.history import Material, messages_of, tool_message
from turncache_tools.demo.script import STEPS, Tools, cut, first_text
from turncache_tools.demo.sizes import FULL


def num_words(text: str) -> int:
    """Count words, as a tokenizer would count tokens."""
    return len(text.split())


def test_every_step_returns_real_text() -> None:
    """Enough of it to be cut to size, the same every time."""
    tools = Tools()
    for step in STEPS:
        result = tools.run(step)
        assert len(result) > 400, step.shown
        assert result == tools.run(step)
    assert len(first_text(tools)) > 4 * FULL.first_tokens


def test_there_is_a_step_for_every_wait() -> None:
    """The first call has no tool result."""
    assert len(STEPS) == FULL.num_calls - 1


def test_a_python_without_sources_is_refused(tmp_path: Path) -> None:
    """The message names the folder and the way out."""
    with pytest.raises(EnvironmentFault, match=r"sched\.py.*use a Python that ships it"):
        Tools(tmp_path)


def test_tools_read_a_folder(tmp_path: Path) -> None:
    """Listing, reading from a line on, and searching with line numbers."""
    for name in ("sched.py", "queue.py"):
        (tmp_path / name).write_text("first\nsecond word\nthird\n")
    tools = Tools(tmp_path)
    assert tools.list_folder(".") == "./queue.py  24 bytes\n./sched.py  24 bytes"
    assert tools.read_file("queue.py", line=2) == "second word\nthird"
    assert tools.search("word", "queue.py") == "queue.py:2: second word"


@given(text=st.text("ab \n", max_size=300), num=st.integers(0, 60))
def test_a_cut_has_never_too_many_tokens(text: str, num: int) -> None:
    """It is the text's own start."""
    short = cut(text, num, num_words)
    assert num_words(short) <= num
    assert text.startswith(short)


def test_a_text_that_fits_stays_whole() -> None:
    """Also when it does not end with a space."""
    assert cut("one two three", 10, num_words) == "one two three"


def test_histories_continue_each_other() -> None:
    """The messages of a call begin with those of the call before: KV can be reused."""
    results = tuple(tool_message(step, f"result of {step.shown}") for step in STEPS)
    material = Material(first="the files", steps=STEPS, results=results)
    answers = [f"answer {number}" for number in range(len(STEPS))]
    before = messages_of(material, [])
    for num in range(1, len(STEPS) + 1):
        messages = messages_of(material, answers[:num])
        assert messages[: len(before)] == before
        assert [message["role"] for message in messages[-2:]] == ["assistant", "tool"]
        assert messages[-2]["content"] == answers[num - 1]
        assert STEPS[num - 1].question in messages[-1]["content"]
        before = messages


def test_the_first_call_brings_the_task() -> None:
    """Later calls bring what the tool was asked."""
    material = Material(first="", steps=STEPS, results=("",) * len(STEPS))
    assert material.brings(1) == "the task and the first files"
    assert material.brings(2) == "read_file heapq.py"
