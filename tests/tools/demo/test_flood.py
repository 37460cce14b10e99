"""The other sessions: the same texts in every arm, never a salt twice."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from turncache.errors import EngineFault
from turncache_tools.demo.callers import OnText, Question, Reply, ignore
from turncache_tools.demo.flood import Flood, Flooded
from turncache_tools.demo.history import Message

TEXTS = ("one", "two two", "three three three")


class Recorder:
    """Takes requests; counts words as tokens."""

    def __init__(self, *, dies: bool = False) -> None:
        self.seen: list[tuple[str, str]] = []
        self.most_at_once = 0
        self._dies = dies
        self._now = 0
        self._lock = threading.Lock()
        self._together = threading.Barrier(2, timeout=0.05)

    def fill(self, messages: Sequence[Message], salt: str) -> int:
        if self._dies:
            raise EngineFault("single-0", "is gone")
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self.seen.append((salt, messages[0]["content"]))
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            self._together.reset()
        with self._lock:
            self._now -= 1
        return len(messages[0]["content"].split())

    def ask(self, question: Question, on_text: OnText = ignore) -> Reply:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing to close."""


def pour(recorder: Recorder, *, wait: int = 1, salt: str = "a", num: int = 4) -> Flooded:
    """Fill once."""
    flood = Flood(TEXTS, waits=(num,) * wait, num_in_flight=2)
    return flood.pour(recorder, wait=wait, salt=salt)


def test_arms_get_the_same_texts_under_other_salts() -> None:
    """Equal load, and nothing of one arm can be reused in another."""
    first, second = Recorder(), Recorder()
    assert pour(first, salt="a").num_tokens == pour(second, salt="b").num_tokens == 7
    assert sorted(text for _, text in first.seen) == sorted(text for _, text in second.seen)
    assert not {salt for salt, _ in first.seen} & {salt for salt, _ in second.seen}


def test_no_salt_is_used_twice_in_an_arm() -> None:
    """Texts come round again; their KV must not."""
    recorder = Recorder()
    for wait in (1, 2, 3):
        pour(recorder, wait=wait)
    salts = [salt for salt, _ in recorder.seen]
    assert len(salts) == len(set(salts)) == 12


def test_waits_continue_through_the_texts() -> None:
    """The next wait begins where the last one ended."""
    recorder = Recorder()
    pour(recorder, wait=1, num=2)
    pour(recorder, wait=2, num=2)
    assert {text for _, text in recorder.seen[:2]} == set(TEXTS[:2])
    assert {text for _, text in recorder.seen[2:]} == {TEXTS[2], TEXTS[0]}


def test_two_are_in_flight() -> None:
    """Enough to keep both engines of a pair busy."""
    recorder = Recorder()
    pour(recorder)
    assert recorder.most_at_once == 2


def test_a_dead_engine_is_not_hidden() -> None:
    """A flood that fails would make the off arm look good."""
    with pytest.raises(EngineFault, match="is gone"):
        pour(Recorder(dies=True))
