"""The way from other threads to the engine thread."""

from __future__ import annotations

import threading

from turncache_server.retention.mailbox import (
    MOST_PROMOTIONS,
    HandedOver,
    Mailbox,
    Promote,
    Signalled,
    SwitchMode,
)
from turncache_server.retention.values import Limits, Signal


def promote(number: int) -> Promote:
    """A promotion of one block."""
    return Promote((number,), (0,), 1)


def test_commands_come_out_once_and_in_order() -> None:
    """A second drain finds nothing."""
    mailbox = Mailbox()
    sent = [promote(1), HandedOver(b"h"), SwitchMode("off")]
    assert all(mailbox.post(command) for command in sent)
    assert mailbox.drain() == sent
    assert mailbox.drain() == []


def test_what_is_left_for_later_comes_out_in_order() -> None:
    """Who takes a part takes the oldest."""
    mailbox = Mailbox()
    sent = [HandedOver(bytes([number])) for number in range(5)]
    for command in sent:
        mailbox.post(command)
    assert mailbox.drain(2) + mailbox.drain(0) + mailbox.drain(2) + mailbox.drain(2) == sent


def test_a_full_mailbox_refuses_and_counts() -> None:
    """It is bounded: an engine that does not drain costs no memory."""
    mailbox = Mailbox(capacity=2)
    assert [mailbox.post(SwitchMode("on")) for _ in range(3)] == [True, True, False]
    assert (len(mailbox), mailbox.refused) == (2, 1)
    mailbox.drain()
    assert mailbox.post(SwitchMode("on"))


def test_promotions_leave_room_for_everything_else() -> None:
    """An idle engine that is peeked at still hears a change of mode."""
    mailbox = Mailbox(capacity=4)
    assert [mailbox.post(promote(i)) for i in range(3)] == [True, True, False]
    assert mailbox.post(SwitchMode("off"))


def test_promotions_are_few_and_signals_are_as_many_as_sessions() -> None:
    """Those carry whole prompts; of these each may say that a session has left."""
    mailbox = Mailbox()
    assert sum(mailbox.post(promote(i)) for i in range(1000)) == MOST_PROMOTIONS
    finals = [
        Signalled(f"s{i}", Signal.FINAL, None) for i in range(Limits(num_blocks=1).max_sessions)
    ]
    assert all(mailbox.post(final) for final in finals)


def test_a_change_of_mode_finds_room_when_there_is_none() -> None:
    """Whatever an idle engine was told before."""
    mailbox = Mailbox(capacity=16)
    while mailbox.post(HandedOver(b"h")):
        pass
    assert mailbox.post(SwitchMode("off"))


def test_no_command_is_lost_or_doubled_between_threads() -> None:
    """Several threads post while one drains."""
    mailbox = Mailbox(capacity=100_000)
    start = threading.Barrier(5)

    def post(first: int) -> None:
        start.wait()
        for number in range(first, first + 500):
            mailbox.post(HandedOver(number.to_bytes(4, "big")))

    threads = [threading.Thread(target=post, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    seen: list[bytes] = []
    while any(thread.is_alive() for thread in threads):
        seen += [command.tail_hash for command in mailbox.drain()]  # type: ignore[union-attr]
    for thread in threads:
        thread.join()
    seen += [command.tail_hash for command in mailbox.drain()]  # type: ignore[union-attr]
    assert len(seen) == len(set(seen)) == 2000
    numbers = [int.from_bytes(each, "big") for each in seen]
    for k in range(4):
        own = [number for number in numbers if number // 1000 == k]
        assert own == sorted(own)
