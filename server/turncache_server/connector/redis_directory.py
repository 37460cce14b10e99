"""A directory of sessions in Redis: which engines have kept a session's KV last.

What leaves is a hash of the session and the engine's name, forgotten when the KV is. With a
fleet secret the hash is keyed, so that whoever reads Redis cannot try session ids. What comes
back are names, looked up in the own allow-list: no address is taken from there.

Every question runs in threads of its own and ends within its time, but for the name of Redis'
host, which the system looks up in a time of its own. After one has failed
nothing is asked for a while: a Redis that is gone costs one call that time, not every call.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

from turncache.errors import EngineFault

logger = logging.getLogger(__name__)

#: Part of every key: a format that another version would misread gets another number.
FORMAT: Final = 1
#: Engines that are remembered for a session, the last one first.
MAX_HOLDERS: Final = 3
#: For one question to Redis.
TIMEOUT_S: Final = 0.25
#: After a failure nothing is asked for this long.
REST_S: Final = 2.0
#: Questions that wait; more are refused, because they would wait for longer than calls do.
MAX_WAITING: Final = 256
_MAX_NAME: Final = 256


class RedisDirectory:
    """The sessions that a fleet's engines keep.

    Args:
        redis: a blocking client whose answers are text.
        name: by which peers name this engine.
        prefix: of all keys.
        key: of the hash of sessions, empty for a hash without one.
        clock: monotonic seconds; called from its threads.
    """

    def __init__(
        self,
        redis: Any,
        *,
        name: str,
        prefix: str,
        key: bytes = b"",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._name = name
        self._prefix = prefix
        self._key = key
        self._clock = clock
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="turncache-find")
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._rest_until_s = float("-inf")
        self._works = True
        self._counts: Counter[str] = Counter({"directory_failed": 0, "directory_asked": 0})

    def counters(self) -> Mapping[str, float]:
        """Return how often Redis was asked and has failed; safe to call from any thread."""
        return {name: float(count) for name, count in list(self._counts.items())}

    def find(self, session: str) -> Future[Sequence[str]]:
        """Name the engines that have kept a session last, this one left out."""
        return self._submit(lambda: self._look_up(session))

    def keeps(self, session: str, retain_s: float) -> None:
        """Enter this engine for a session, for so long."""
        if retain_s > 0:
            self._submit(lambda: self._enter(session, max(1, math.ceil(retain_s))))

    def close(self) -> None:
        """End: whatever waits is dropped, what is under way has its time."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._redis.close()

    def _look_up(self, session: str) -> Sequence[str]:
        listed = self._redis.lrange(self._place(session), 0, MAX_HOLDERS - 1)
        # Whatever stands there: a name is looked up in the allow-list, anything else is nothing.
        names = [each for each in list(listed)[:MAX_HOLDERS] if isinstance(each, str)]
        return [each for each in names if each != self._name and len(each) <= _MAX_NAME]

    def _enter(self, session: str, retain_s: int) -> Sequence[str]:
        place = self._place(session)
        # Another engine may keep it for longer, or this one may for another call.
        retain_s = max(retain_s, int(self._redis.ttl(place)))
        with self._redis.pipeline(transaction=True) as pipe:
            pipe.lrem(place, 0, self._name)
            pipe.lpush(place, self._name)
            pipe.ltrim(place, 0, MAX_HOLDERS - 1)
            pipe.expire(place, retain_s)
            pipe.execute()
        return ()

    def _place(self, session: str) -> str:
        digest = hashlib.blake2b(session.encode(), digest_size=16, key=self._key).hexdigest()
        return f"{self._prefix}:{FORMAT}:holders:{digest}"

    def _submit(self, question: Callable[[], Sequence[str]]) -> Future[Sequence[str]]:
        with self._lock:
            full = self._num_waiting >= MAX_WAITING
            self._num_waiting += not full
        if full:
            return self._refused("too many questions wait")
        try:
            future = self._threads.submit(self._ask, question)
        except RuntimeError:
            self._ended(None)
            return self._refused("it was closed")
        future.add_done_callback(self._ended)
        return future

    def _refused(self, why: str) -> Future[Sequence[str]]:
        self._count("directory_failed")
        refused: Future[Sequence[str]] = Future()
        refused.set_exception(EngineFault("redis", why))
        return refused

    def _count(self, what: str) -> None:
        with self._lock:
            self._counts[what] += 1

    def _ended(self, _: Future[Sequence[str]] | None) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _ask(self, question: Callable[[], Sequence[str]]) -> Sequence[str]:
        from redis.exceptions import RedisError  # noqa: PLC0415 - an extra

        if self._clock() < self._rest_until_s:
            self._count("directory_failed")
            raise EngineFault("redis", "it has just failed")
        self._count("directory_asked")
        try:
            answer = question()
        except (RedisError, OSError, ValueError, TypeError) as error:
            self._count("directory_failed")
            self._rest_until_s = self._clock() + REST_S
            if self._works:
                self._works = False
                logger.warning("turncache: the directory in Redis does not answer: %s", error)
            raise EngineFault("redis", str(error) or type(error).__name__) from error
        if not self._works:
            self._works = True
            logger.info("turncache: the directory in Redis answers again")
        return answer
