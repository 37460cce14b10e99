"""Outcome records: bounded, counted once, and they add up."""

from __future__ import annotations

from turncache.protocol import Reason
from turncache_server.connector.records import CallBook, CallRecord


def test_what_is_neither_local_nor_returned_was_computed() -> None:
    """The counts of a record add up to its prompt."""
    record = CallRecord(prompt=100, local=32, returned=48)
    assert record.local + record.returned + record.computed == record.prompt


def test_only_ended_calls_count_in_the_totals() -> None:
    """A record that is put at admission and again at the end counts once."""
    book = CallBook()
    record = CallRecord(prompt=10, local=4, returned=2, lost=1, reason=Reason.EVICTED)
    book.put("r", record)
    assert not book.totals
    assert book.get("r") == record
    book.finish("r", record)
    assert book.get("r") == CallRecord(
        prompt=10, local=4, returned=2, lost=1, reason=Reason.EVICTED, done=True
    )
    assert book.totals == {
        "calls": 1,
        "prompt_tokens": 10,
        "local_tokens": 4,
        "returned_tokens": 2,
        "computed_tokens": 4,
        "lost_tokens": 1,
        "lost_tokens_evicted": 1,
        "calls_evicted": 1,
    }


def test_calls_without_an_id_count_too() -> None:
    """A client without our router has no id to ask by, but its tokens are in the totals."""
    book = CallBook()
    book.finish(None, CallRecord(prompt=5))
    assert book.totals["calls"] == 1


def test_the_oldest_records_are_forgotten() -> None:
    """Memory is bounded, whatever the clients do."""
    book = CallBook(max_records=3)
    for i in range(5):
        book.put(f"r{i}", CallRecord(prompt=i))
    assert [book.get(f"r{i}") is not None for i in range(5)] == [False, False, True, True, True]
