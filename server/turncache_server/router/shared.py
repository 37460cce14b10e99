"""Tool waits, shared with the other routers of a fleet over Redis.

A router appends the waits that it has measured to a stream of their tenant, and learns from
what the others have appended, so that a replica that has just started, or that a tenant's
calls reach seldom, expects what they expect. All of that happens between calls: no call ever
waits for Redis, and while it is away each router expects what it has measured itself.

:class:`SharedWaits` owns what is still to be appended, and how far each stream has been read.
What leaves: the hash by which engines know a tenant, names of tools, seconds, and a number that
tells this process from the others. No session, no prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

from turncache.protocol import MAX_RETAIN_S, tool_key
from turncache_server.redis_link import open_redis
from turncache_server.router.background import tell_failure
from turncache_server.router.config import RouterConfig
from turncache_server.router.events import CallStarted, Event, Events, WaitEnded, WaitsExchanged
from turncache_server.router.forecast import MAX_TENANTS
from turncache_server.variables import secret_of

#: Part of every key: a format that an older router would misread gets another number.
FORMAT: Final = 1
#: Of a stream, about: four times as many as any median counts.
MAX_WAITS: Final = 512
#: A tenant without any wait for so long is forgotten by Redis.
KEEP_S: Final = 7 * 24 * 3600
#: Waits that are kept while there is nobody to take them.
MAX_UNSENT: Final = 1024
#: Of one exchange, because reading them holds up the loop: 1,024 waits take some 5 ms.
_MAX_TENANTS_AT_ONCE: Final = 16
_MAX_WAITS_AT_ONCE: Final = 64
_MAX_TOOLS: Final = 16
_MAX_NAME: Final = 64
#: A burst of new tenants must not become a burst of exchanges.
_PAUSE_S: Final = 0.05

Learn = Callable[[str | None, Sequence[str], float], None]


@dataclass(slots=True)
class _Stream:
    """What has been read of a tenant's stream.

    Attributes:
        last_id: of the last entry that was read, None before the first.
        turn: when it was read, in exchanges.
    """

    last_id: str | None = None
    turn: int = 0


class SharedWaits:
    """The part of the tool waits that replicas share: a listener, and an exchange.

    Args:
        redis: a client (``redis.asyncio``) whose answers are text.
        learn: takes a wait of another router: tenant, tools, seconds.
        prefix: of all keys.
        timeout_s: for one exchange.
    """

    def __init__(self, redis: Any, learn: Learn, *, prefix: str, timeout_s: float) -> None:
        self._redis = redis
        self._learn = learn
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._me = uuid.uuid4().hex[:12]
        self._unsent: deque[tuple[str | None, dict[str, str]]] = deque()
        self._streams: OrderedDict[str | None, _Stream] = OrderedDict()
        self._turn = 0
        self._num_dropped = 0
        self._worked: bool | None = None
        self._wanted = asyncio.Event()
        self._closing = False

    def __call__(self, event: Event) -> None:
        """Note a wait of this router's, and the tenants that it serves."""
        match event:
            case CallStarted():
                self._follow(event.tenant)
            case WaitEnded():
                self._note(event.tenant, event.tool_names, event.seconds)

    async def run(self, events: Events, interval_s: float) -> None:
        """Exchange until :meth:`stop`; a tenant's first call does not wait for the interval."""
        while not self._closing:
            events.emit(await self.exchange())
            await asyncio.sleep(min(_PAUSE_S, interval_s))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wanted.wait()
            self._wanted.clear()

    async def exchange(self) -> WaitsExchanged:
        """Append what is new, and learn what is new; failing is a result too."""
        from redis.exceptions import RedisError  # noqa: PLC0415 - an extra

        num_sent = num_taken = 0
        problem = None
        refusals: list[Exception] = []
        try:
            async with asyncio.timeout(self._timeout_s):
                # First what changes nothing: while Redis is away nothing is appended, and lost.
                num_taken = await self._read(refusals)
                num_sent = await self._append(refusals)
        except TimeoutError:
            problem = f"no answer within {self._timeout_s:g} s"
        except (RedisError, OSError, ValueError) as error:
            problem = str(error) or type(error).__name__
        if refusals:
            problem = problem or str(refusals[0])
        changed = self._worked is not (problem is None)
        self._worked = problem is None
        num_dropped, self._num_dropped = self._num_dropped, 0
        return WaitsExchanged(
            num_sent=num_sent,
            num_taken=num_taken,
            num_dropped=num_dropped,
            problem=problem,
            changed=changed,
        )

    def stop(self) -> None:
        """End :meth:`run`, after the exchange that it is in."""
        self._closing = True
        self._wanted.set()

    async def close(self) -> None:
        """Append what is left, if Redis takes it at once, and close the connections."""
        await self.exchange()
        await self._redis.aclose()

    def _follow(self, tenant: str | None) -> None:
        if tenant in self._streams:
            self._streams.move_to_end(tenant)
            return
        self._streams[tenant] = _Stream()
        self._wanted.set()
        if len(self._streams) > MAX_TENANTS:
            self._streams.popitem(last=False)

    def _note(self, tenant: str | None, tool_names: Iterable[str], seconds: float) -> None:
        keys = sorted({key for name in tool_names if len(key := tool_key(name)) <= _MAX_NAME})
        if not keys or len(keys) > _MAX_TOOLS:
            return
        # Three significant digits, and an hour at most, as in the client's table.
        seconds = min(seconds, MAX_RETAIN_S)
        fields = {"by": self._me, "tools": ",".join(keys), "s": f"{seconds:.3g}"}
        self._unsent.append((tenant, fields))
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._unsent) > MAX_UNSENT:
            self._unsent.popleft()
            self._num_dropped += 1

    async def _append(self, refusals: list[Exception]) -> int:
        """Append what is new; return how much of it Redis took, and add what it refused with."""
        batch = list(self._unsent)
        if not batch:
            return 0
        self._unsent.clear()
        try:
            async with self._redis.pipeline(transaction=False) as pipe:
                for tenant, fields in batch:
                    pipe.xadd(self._key(tenant), fields, maxlen=MAX_WAITS, approximate=True)
                for tenant in {tenant for tenant, _ in batch}:
                    pipe.expire(self._key(tenant), KEEP_S)
                answers = await pipe.execute(raise_on_error=False)
        except BaseException:
            # What was asked for and not answered may have been done, or be done yet: asked for
            # again it would lie there twice, and count twice with every replica.
            self._num_dropped += len(batch)
            raise
        refused = []
        for each, answer in zip(batch, answers, strict=False):
            if isinstance(answer, Exception):
                refused.append(each)
                refusals.append(answer)
        self._unsent.extendleft(reversed(refused))
        self._drop_oldest()
        return len(batch) - len(refused)

    async def _read(self, refusals: list[Exception]) -> int:
        """Read the streams that were not read for longest; add what Redis refused with."""
        chosen = sorted(self._streams, key=lambda tenant: self._streams[tenant].turn)
        chosen = chosen[:_MAX_TENANTS_AT_ONCE]
        if not chosen:
            await self._redis.ping()
            return 0
        self._turn += 1
        async with self._redis.pipeline(transaction=False) as pipe:
            for tenant in chosen:
                last_id = self._streams[tenant].last_id
                if last_id is None:
                    pipe.xrevrange(self._key(tenant), count=_MAX_WAITS_AT_ONCE)
                else:
                    pipe.xrange(self._key(tenant), min=f"({last_id}", count=_MAX_WAITS_AT_ONCE)
            answers = await pipe.execute(raise_on_error=False)
        num_taken = 0
        for tenant, answer in zip(chosen, answers, strict=True):
            refused = isinstance(answer, Exception)
            if refused:
                refusals.append(answer)
            num_taken += self._take(tenant, [] if refused else answer)
        return num_taken

    def _take(self, tenant: str | None, entries: list[tuple[str, Mapping[str, str]]]) -> int:
        """Learn from entries of a tenant's stream; return how many were of others."""
        stream = self._streams.get(tenant)
        if stream is None:  # forgotten while Redis was asked
            return 0
        if stream.last_id is None:
            entries.reverse()  # the newest were asked for, newest first
        stream.turn = self._turn
        num_taken = 0
        for entry_id, fields in entries:
            stream.last_id = entry_id
            if fields.get("by") == self._me:
                continue
            wait = read_wait(fields)
            if wait is None:
                self._num_dropped += 1
                continue
            self._learn(tenant, *wait)
            num_taken += 1
        return num_taken

    def _key(self, tenant: str | None) -> str:
        return f"{self._prefix}:{FORMAT}:waits:{tenant or 'all'}"


def read_wait(fields: Mapping[str, str]) -> tuple[list[str], float] | None:
    """Read an entry of a stream: (tools, seconds); None for what no router writes."""
    names = fields.get("tools", "").split(",", _MAX_TOOLS)
    if len(names) > _MAX_TOOLS:
        return None
    if any(not 0 < len(name) <= _MAX_NAME or tool_key(name) != name for name in names):
        return None
    try:
        seconds = float(fields.get("s", ""))
    except ValueError:
        return None
    # Not a number is in no range.
    return (names, seconds) if 0 <= seconds <= MAX_RETAIN_S else None


def shared_waits(config: RouterConfig, learn: Learn) -> SharedWaits | None:
    """Make what the settings ask for, None when they name no Redis. Nothing is asked yet.

    Raises:
        ConfigError: the package is missing, or the URL or the password cannot be used.
    """
    if not config.redis_url:
        return None
    redis = open_redis(
        config.redis_url,
        password=secret_of("redis_password_env", config.redis_password_env, "Redis' password"),
        timeout_s=config.redis_timeout_s,
        asynchronous=True,
    )
    return SharedWaits(redis, learn, prefix=config.redis_prefix, timeout_s=config.redis_timeout_s)


@asynccontextmanager
async def waits_shared(
    shared: SharedWaits | None, events: Events, interval_s: float
) -> AsyncIterator[None]:
    """Exchange, if there is anything to, for the length of the block."""
    if shared is None:
        yield
        return
    task = asyncio.create_task(shared.run(events, interval_s), name="share tool waits")
    task.add_done_callback(tell_failure)
    try:
        yield
    finally:
        # Not cancelled: Redis' client may take the cancellation for one of its own.
        shared.stop()
        await asyncio.gather(task, return_exceptions=True)
        await shared.close()
