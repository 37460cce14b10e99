"""The other sessions: what passes through the caches while the agent's tool runs.

A wait gets the same texts in every arm, under salts that no other request has: nothing
of it can be reused, and all arms carry the same load.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from turncache_tools.demo.callers import Caller
from turncache_tools.demo.history import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Flooded:
    """What the others did in one wait.

    Attributes:
        num_tokens: tokens of their prompts.
        seconds: for all of them.
    """

    num_tokens: int
    seconds: float


class Flood:
    """The others' traffic.

    Args:
        texts: prompts; each is used as often as needed.
        waits: requests in each wait.
        num_in_flight: requests at a time.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        texts: Sequence[str],
        *,
        waits: Sequence[int],
        num_in_flight: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._texts = tuple(texts)
        self._waits = tuple(waits)
        self._num_in_flight = num_in_flight
        self._clock = clock

    def pour(self, caller: Caller, *, wait: int, salt: str) -> Flooded:
        """Fill the caches once.

        Args:
            caller: how requests reach the arm's engines.
            wait: number of the wait, from 1; decides the texts.
            salt: of the arm.
        """
        started_s = self._clock()
        first, num_requests = sum(self._waits[: wait - 1]), self._waits[wait - 1]

        def one(number: int) -> int:
            text = self._texts[(first + number) % len(self._texts)]
            messages: list[Message] = [{"role": "user", "content": text}]
            return caller.fill(messages, f"{salt}-others-{wait}-{number}")

        pool = ThreadPoolExecutor(self._num_in_flight, thread_name_prefix="others")
        try:
            num_tokens = sum(pool.map(one, range(num_requests)))
        finally:
            # After an interrupt nobody waits for what has not begun.
            pool.shutdown(wait=False, cancel_futures=True)
        return Flooded(num_tokens=num_tokens, seconds=self._clock() - started_s)
