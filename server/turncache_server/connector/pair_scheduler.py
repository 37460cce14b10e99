"""The scheduler side of ``TurncacheConnector``: hooks to extension and pulls.

A pull's parameters live in :class:`~turncache_server.connector.pull.PullBook` and never in
``kv_transfer_params``, whose stock branches for returns park a request for ever when it is
looked at twice.

Where nothing is pulled (mode *off* or *observe*, an unsupported set-up, an extension that
has switched itself off) a pair still has to hand prompts over: our router then asks for it
as every proxy of vLLM does, and such a request goes through the stock scheduler logic, of
which this is a subclass, from its arrival to its end.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)

from turncache.errors import ConfigError
from turncache.protocol import EngineHints, Mode, Reason
from turncache_server.connector import _compat, foreign
from turncache_server.connector.config import (
    DEFAULT_RECOMPUTE_THRESHOLD,
    SECTION,
    Find,
    Settings,
    Side,
    engine_facts,
    of_rank,
)
from turncache_server.connector.costs import PullCosts, prefill_work
from turncache_server.connector.extension import Extension
from turncache_server.connector.finding import AllPeers, Directory, Finder
from turncache_server.connector.fingerprint import engine_fingerprint
from turncache_server.connector.lacking import LackingCalls, patience_of
from turncache_server.connector.metrics import Reporter, TurncacheStats
from turncache_server.connector.observing import Observer
from turncache_server.connector.peers import Peer, PeerBook, PeerState
from turncache_server.connector.pull import PullBook
from turncache_server.connector.pull_state import NOBODY, Pull, Read
from turncache_server.connector.redis_directory import TIMEOUT_S, RedisDirectory
from turncache_server.connector.service import Service, fleet_keys, open_control
from turncache_server.connector.versions import settings_for
from turncache_server.connector.worker import (
    PULL_PREFIX,
    PeerEndpoint,
    ReadKey,
    TurncacheMetadata,
    WorkerReport,
)
from turncache_server.control.keys import FleetKeys
from turncache_server.cost_profile import load_profile
from turncache_server.redis_link import open_redis
from turncache_server.variables import secret_of

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S: Final = 0.5
#: Share of the pool that abandoned reads may withhold before nothing more is pulled.
ABANDONED_SHARE: Final = 0.05
#: Share that several reads may hold together: all of them may have to be abandoned. One
#: alone may be as large as its prompt.
READING_SHARE: Final = 0.5
#: An engine that has nothing to do looks this often whether abandoned transfers are gone.
IDLE_POLL_S: Final = 0.1
#: Times of pulls to hold until they are reported, should nobody take them.
_MOST_TIMES: Final = 1024
#: Steps in flight that are timed; vLLM has two.
_MOST_STEPS: Final = 16


_NO_TOKENS: Final[tuple[int | None, bool]] = (0, False)
_NO_DELAY: Final[tuple[bool, dict[str, Any] | None]] = (False, None)

P = ParamSpec("P")
T = TypeVar("T")


def _harmless(
    otherwise: T,
) -> Callable[
    [Callable[Concatenate[PairScheduler, P], T]], Callable[Concatenate[PairScheduler, P], T]
]:
    """Make a hook answer ``otherwise`` when it fails, and switch the extension off."""

    def wrap(
        hook: Callable[Concatenate[PairScheduler, P], T],
    ) -> Callable[Concatenate[PairScheduler, P], T]:
        @functools.wraps(hook)
        def run(self: PairScheduler, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return hook(self, *args, **kwargs)
            except Exception as error:
                logger.exception("turncache: hook %s failed", hook.__name__)
                self.extension.break_off(f"{hook.__name__} failed: {error!r}")
                return otherwise

        return run

    return wrap


@dataclass(slots=True)
class _Abandoned:
    """Destination blocks that a late write could still hit, and the ranks it is open on."""

    blocks: list[Any]
    open_ranks: int
    peer: str


@dataclass(frozen=True, slots=True)
class _Step:
    """A step in flight, as far as its cost is concerned."""

    scheduled_at_s: float
    prefill_tokens: int
    token_pairs: float


class PairScheduler(NixlPullConnectorScheduler):
    """One engine's hooks; runs on the engine thread."""

    def __init__(
        self,
        vllm_config: Any,
        engine_id: str,
        kv_cache_config: Any,
        settings: Settings,
        *,
        peers: PeerBook | None = None,
        directory: Directory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        facts = engine_facts(vllm_config, kv_cache_config, _compat.VLLM_VERSION, side=settings.side)
        settings = settings_for(settings, facts.vllm_version)
        settings = of_rank(settings, vllm_config.parallel_config.data_parallel_index)
        self._observer = Observer(facts, settings)
        self.extension = Extension(
            facts,
            settings,
            answered=_compat.ANSWERED,
            clock=clock,
            recorder=self._observer.recorder,
        )
        self._clock = clock
        self._fingerprint = engine_fingerprint(
            vllm_config,
            vllm_version=facts.vllm_version,
            connector_version=_compat.CONNECTOR_VERSION,
            model_folder=_compat.model_folder(vllm_config),
            hash_block=_compat.fixed_block_hash(facts.hash_algo),
            weights_id=settings.weights_id,
        )
        self._settings = settings
        self._facts = facts
        keys = fleet_keys(settings)
        self._directory = directory or self._make_directory(keys)
        self._transfer_s: deque[float] = deque(maxlen=_MOST_TIMES)
        self._take_peek_s: Callable[[], list[float]] = list
        if peers is None:
            peers = PeerBook(
                settings.peers,
                self._fingerprint,
                engine_id=facts.engine_id,
                ask_timeout_s=ASK_TIMEOUT_S,
                keys=keys,
            )
            self.extension.count_also(peers.counters)
            self._take_peek_s = peers.take_peek_s
        self._peers = peers
        # Who names a threshold has decided; and a prompt is never computed on decode by choice.
        free = settings.recompute_threshold is None and settings.side is not Side.DECODE
        self._costs = PullCosts(may_compute=free)
        if settings.cost_profile is not None:
            self._costs.seed(load_profile(Path(settings.cost_profile)))
        threshold = settings.recompute_threshold
        lacking = LackingCalls()
        self._pulls = PullBook(
            self._peers,
            block_size=facts.block_size,
            threshold_tokens=DEFAULT_RECOMPUTE_THRESHOLD if threshold is None else threshold,
            timeout_s=settings.pull_timeout_s,
            costs=self._costs,
            finder=None if self._directory is None else Finder(self._directory, peers),
            lacking=lacking,
        )
        self.extension.count_also(self._find_counts)
        self.extension.count_also(lacking.counters)
        # Prefill legs of a router that is not ours: their answers name this engine.
        self._to_name: set[str] = set()
        self._steps: deque[_Step] = deque(maxlen=_MOST_STEPS)
        self._processed_at_s = 0.0
        self._abandoned: dict[ReadKey, _Abandoned] = {}
        # Calls that are handed over as stock, each with its local hit at the last look.
        self._stock: dict[str, int] = {}
        self._greeted: set[str] = set()
        self._stepped_at_s = 0.0
        self._pool: Any = None
        self.totals: Counter[str] = Counter()
        self._reporter = Reporter(
            lambda: {**self.extension.counters(), **self.totals},
            self._gauges,
            clock,
            self._take_samples,
        )
        self.extension.when_mode_changes(self._mode_changed)
        service = Service(
            self.extension,
            fingerprint=self._fingerprint,
            endpoint=(self.side_channel_host, self.side_channel_port),
            more_stats=self.stats,
            lacking=lacking,
        )
        self._control = open_control(self.extension, service, keys)

    def _make_directory(self, keys: FleetKeys | None) -> Directory | None:
        settings = self._settings
        if settings.find is Find.PEERS:
            return AllPeers(settings.peers)
        if settings.find is Find.HINTS:
            return None
        if not settings.name:
            raise ConfigError(
                f"{SECTION}.name", "missing, with find redis: it is what the directory keeps"
            )
        variable = settings.redis_password_env
        redis = open_redis(
            settings.redis_url,
            password=secret_of(f"{SECTION}.redis_password_env", variable, "Redis' password"),
            timeout_s=TIMEOUT_S,
            asynchronous=False,
            setting=f"{SECTION}.find",
            install="in the engine's environment, pip install 'turncache[engine,redis]'",
        )
        directory = RedisDirectory(
            redis,
            name=settings.name,
            prefix=settings.redis_prefix,
            key=b"" if keys is None else keys.names,
        )
        self.extension.count_also(directory.counters)
        return directory

    def bind(self, pool: Any) -> None:
        """Take the pool over, start answering and start asking."""
        self._pool = pool
        self.extension.bind(pool)
        if self._control is not None:
            self._control.start()
        self._peers.start()

    def shutdown(self) -> None:
        """Close sockets and threads."""
        if self._directory is not None:
            # Before the peers, whom its answers have asked.
            self._directory.close()
        self._peers.close()
        if self._control is not None:
            self._control.close()
        self._observer.close()
        super().shutdown()

    def stats(self) -> dict[str, float]:
        """Return totals of the pulls and of what abandoned reads withhold."""
        # Copied at once: the engine thread may be counting.
        totals = list(self.totals.items())
        return {
            **{name: float(value) for name, value in totals},
            **self._costs.stats(),
            "abandoned_blocks": float(self._num_withheld),
            "pulls_in_flight": float(len(self._pulls)),
        }

    def _find_counts(self) -> dict[str, float]:
        counts = list(self._pulls.finds.items())
        return {f"finds_{how}": float(count) for how, count in counts}

    def report(self) -> TurncacheStats | None:
        """Return what vLLM is to carry to its ``/metrics``; None while it is not yet time."""
        return self._reporter.report()

    def _take_samples(self) -> dict[str, list[float]]:
        transfer_s = list(self._transfer_s)
        self._transfer_s.clear()
        return {"peek_s": self._take_peek_s(), "transfer_s": transfer_s}

    def _gauges(self) -> dict[str, float]:
        return {**self.extension.gauges(), **self.stats()}

    def _mode_changed(self, mode: Mode) -> None:
        if mode is not Mode.ON:
            self._pulls.give_up()

    # --- arrival and admission -----------------------------------------------------------------

    @_harmless(None)
    def on_new_request(self, request: Any) -> None:
        """Admit a request, and peek at the engine that its hints name."""
        # Whatever a client sends here could steer NIXL: it is dropped before vLLM reads it.
        params, request.kv_transfer_params = request.kv_transfer_params, None
        leg = foreign.leg_of(params) if self._settings.foreign_router else None
        hints = self.extension.arrived(request, leg)
        if hints is None and self.extension.broken is not None:
            # Off for good it reads nothing any more; a prompt is handed over all the same.
            hints = self.extension.hints_of(request)
        if leg is not None:
            params = self._stock_params(leg)
        elif hints is None or not hints.stock:
            params = None
        if isinstance(params, dict):
            self._stock[request.request_id] = 0
            self.totals["stock_handovers"] += 1
            request.kv_transfer_params = params
            super().on_new_request(request)
            return
        if hints is None:
            return
        if leg is not None and leg.is_prefill:
            self._to_name.add(request.request_id)
        reason = self._start_pull(request, hints, leg)
        if reason is not None:
            self.totals[f"pulls_{reason.value}"] += 1
            self.extension.refused_pull(
                request.request_id, reason, named=hints.source is not None or leg is not None
            )

    def _stock_params(self, leg: foreign.Leg) -> dict[str, Any] | None:
        """Return what vLLM's own logic is to be given for a leg, None where we pull.

        While we do, no block is taken by its number: not every router replaces what a client
        has sent by what prefill has answered, and a number says nothing of content. And what
        names an address leads to a peer's or nowhere.
        """
        if leg.stock is None or (self.extension.acting and not self._facts.unsupported_pull):
            return None
        if not leg.is_prefill:
            peer = self._peer_with(leg.engine_id)
            hello = None if peer is None else peer.hello
            place = leg.stock["remote_host"], leg.stock["remote_port"]
            if hello is None or place != (hello.nixl_host, hello.nixl_port):
                return None
        return dict(leg.stock)

    def _start_pull(
        self, request: Any, hints: EngineHints, leg: foreign.Leg | None
    ) -> Reason | None:
        source = hints.source
        if leg is not None and not leg.is_prefill:
            peer = self._peer_with(leg.engine_id)
            if peer is None:
                # It may have been started anew since its last hello.
                self._peers.hurry()
                return Reason.SOURCE_UNKNOWN
            source = peer.name
        if source is None and (self._directory is None or not self.extension.acting):
            return None
        if not self.extension.acting:
            return Reason.DISABLED
        if (
            self._facts.unsupported_pull
            or request.lora_request is not None
            or request.mm_features
            or request.prompt_embeds is not None
            or request.resumable
            or request.skip_reading_prefix_cache
            or request.pooling_params is not None
        ):
            return Reason.UNSUPPORTED
        if self._over_cap():
            return Reason.OVER_BUDGET
        full = request.num_prompt_tokens // self._facts.block_size
        hashes = [bytes(chain_hash) for chain_hash in request.block_hashes[:full]]
        tokens = request.prompt_token_ids
        now_s = self._clock()
        if source is None:
            return self._pulls.search(
                request.request_id, hints.session, hashes, now_s, tokens=tokens
            )
        return self._pulls.start(
            request.request_id,
            hints.session,
            source,
            hashes,
            now_s,
            tokens=tokens,
            also=hints.also if leg is None else (),
            patience=patience_of(hints, request.num_prompt_tokens),
        )

    def _peer_with(self, engine_id: str) -> Peer | None:
        """Return the peer whose NIXL id this is, None for a stranger's."""
        for peer in self._peers.all():
            if peer.hello is not None and peer.hello.engine_id == engine_id:
                return peer
        return None

    def _over_cap(self) -> bool:
        return self._num_withheld > ABANDONED_SHARE * self._facts.num_blocks

    @property
    def _num_withheld(self) -> int:
        return sum(len(read.blocks) for read in list(self._abandoned.values()))

    @_harmless(_NO_TOKENS)
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer what the peek has found beyond the local hit."""
        self.extension.looked_at(request, num_computed_tokens)
        if request.request_id in self._stock:
            self._stock[request.request_id] = num_computed_tokens
            tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
            return tokens, is_async
        if not self.extension.acting:
            return 0, False
        tokens = self._pulls.look(request.request_id, num_computed_tokens, self._clock())
        if tokens and self._too_many_at_once(-(-tokens // self._facts.block_size)):
            return None, False
        return tokens, bool(tokens)

    def _too_many_at_once(self, num_blocks: int) -> bool:
        others = self._num_withheld + self._pulls.num_reading_blocks
        return bool(others) and others + num_blocks > READING_SHARE * self._facts.num_blocks

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the request over when blocks were allocated for our offer."""
        if request.request_id in self._stock:
            super().update_state_after_alloc(request, blocks, num_external_tokens)
            self.extension.admitted(request, None, handed_over=num_external_tokens)
            first = self._stock[request.request_id] // self._facts.block_size
            self._note_unproven(request, blocks, first if num_external_tokens else None)
        elif num_external_tokens > 0:
            # Its local hit: it comes here again only after the read, when the call that has
            # brought such blocks may have ended.
            self._note_unproven(request, blocks, None)
            self._pulls.allocated(
                request,
                blocks.blocks[0],
                num_external_tokens,
                self._pool.cached_block_hash_to_block,
                self._clock(),
            )
        else:
            self.extension.admitted(request, self._pulls.get(request.request_id))
            self._note_unproven(request, blocks, None)

    def _note_unproven(self, request: Any, blocks: Any, handed_over: int | None) -> None:
        if handed_over is None and not self.extension.has_unproven:
            return
        block_ids = [block.block_id for block in blocks.blocks[0]]
        self.extension.allocated(request.request_id, block_ids, handed_over)

    def _count_unbegun(self, pull: Pull | None) -> None:
        """Count a pull that was looked into and never begun, by why."""
        if pull is None or pull.began or pull.reason is None:
            return
        # A search that has led nowhere is counted as such, but for what somebody has to mend.
        if pull.peer is not NOBODY or pull.reason is Reason.INCOMPATIBLE:
            self.totals[f"pulls_{pull.reason.value}"] += 1

    # --- every step ------------------------------------------------------------------------------

    def build_connector_meta(self, scheduler_output: Any) -> TurncacheMetadata:
        """Note the step's writes and give the workers their orders."""
        self.extension.step_scheduled(scheduler_output)
        self._stepped_at_s = self._clock()
        self._time_begins(scheduler_output)
        meta = TurncacheMetadata()
        for name, value in vars(super().build_connector_meta(scheduler_output)).items():
            setattr(meta, name, value)
        for read in self._pulls.take_reads():
            self._order(meta, read)
        meta.failures = self._pulls.take_failures()
        meta.handshakes = self._handshakes()
        meta.report = self._pulls.holding or bool(self._abandoned)
        return meta

    def _order(self, meta: TurncacheMetadata, read: Read) -> None:
        meta.deadlines_s[read.request_id] = read.deadline_s
        meta.attempts[read.request_id] = read.attempt
        meta.add_new_req_to_recv(
            request_id=read.request_id,
            local_block_ids=(read.local_blocks,),
            kv_transfer_params={
                "remote_block_ids": (read.remote_blocks,),
                "remote_engine_id": read.engine_id,
                "remote_request_id": f"{PULL_PREFIX}{read.request_id}-{read.attempt}",
                "remote_host": read.host,
                "remote_port": read.port,
                "tp_size": read.tp_size,
                "remote_num_tokens": read.num_tokens,
            },
            local_num_computed_blocks=(read.num_local_hit_blocks,),
            awaiting_kvs=True,
        )

    def _handshakes(self) -> tuple[PeerEndpoint, ...]:
        out = []
        for peer in self._peers.all():
            hello = peer.hello
            if peer.state is not PeerState.COMPATIBLE or hello is None or not hello.nixl_port:
                continue
            if hello.engine_id not in self._greeted:
                self._greeted.add(hello.engine_id)
                out.append(
                    PeerEndpoint(
                        engine_id=hello.engine_id,
                        host=hello.nixl_host,
                        port=hello.nixl_port,
                        tp_size=hello.tp_size,
                    )
                )
        return tuple(out)

    def update_connector_output(self, connector_output: Any) -> None:
        """Hold finished reads for their verification, and hand verified ones back."""
        super().update_connector_output(connector_output)
        finished = set(connector_output.finished_recving or ())
        failed = set(connector_output.failed_recving or ())
        if failed:
            self.extension.loads_failed(failed)
        if connector_output.invalid_block_ids:
            self.extension.blocks_invalid(set(connector_output.invalid_block_ids))
        # Loads of stock hand-overs and of siblings fail in the same set, and pulls that could not
        # begin any more: those are counted by why.
        pulls = [self._pulls.get(request_id) for request_id in failed]
        num_failed = sum(pull is not None and pull.began for pull in pulls)
        report = connector_output.kv_connector_worker_meta
        try:
            if isinstance(report, WorkerReport):
                self._take_report(report)
            back = self._pulls.completed(
                finished, failed, self._pool.cached_block_hash_to_block, self._clock()
            )
        except Exception as error:
            logger.exception("turncache: hook update_connector_output failed")
            self.extension.break_off(f"update_connector_output failed: {error!r}")
            self._pulls.fail_unverified(finished, failed)
            connector_output.finished_recving = (finished & failed) or None
            return
        self.extension.blocks_loaded(back.loaded_blocks)
        self.totals["pulled_blocks"] += back.num_blocks
        self.totals["pulled_bytes"] += back.num_blocks * self._facts.block_bytes
        self.totals["pulled_rests"] += back.num_rests
        self.totals["pulls_verified"] += back.num_verified
        self._transfer_s.extend(back.transfer_s)
        self.totals["pulls_failed"] += num_failed
        connector_output.finished_recving = ((finished - back.hold) | back.add) or None

    def _take_report(self, report: WorkerReport) -> None:
        """Keep the destination of an abandoned read touched until its transfer is gone."""
        for read, ranks in report.abandoned.items():
            pull = self._pulls.get(read[0])
            if (known := self._abandoned.get(read)) is not None:
                known.open_ranks += ranks
            elif pull is not None and pull.blocks:
                self._abandon(read, ranks, pull)
        for read, ranks in report.released.items():
            held = self._abandoned.get(read)
            if held is None:
                continue
            held.open_ranks -= ranks
            if held.open_ranks <= 0:
                del self._abandoned[read]
                self._pool.free_blocks(held.blocks)

    def _abandon(self, read: ReadKey, ranks: int, pull: Pull) -> None:
        blocks = list(pull.blocks)
        self._pool.touch(blocks)
        self._abandoned[read] = _Abandoned(blocks, ranks, pull.peer.name)
        self.totals["reads_abandoned"] += 1
        logger.error(
            "turncache: a read from peer %s was abandoned; %d blocks are withheld until "
            "its transfer is gone, and a cache reset or sleep is refused meanwhile",
            pull.peer.name,
            len(blocks),
        )

    def has_pending_push_work(self) -> bool:
        """Say that an idle engine should step: only a step polls abandoned transfers.

        vLLM asks whenever its loop wakes, so a sleep or reset that was refused because of
        them succeeds when it is tried again.
        """
        return bool(self._abandoned) and self._clock() - self._stepped_at_s > IDLE_POLL_S

    def step_processed(self) -> None:
        """Mark what the oldest step has written (``take_events``), and take its time."""
        self.extension.step_processed()
        self._time_ends()

    @_harmless(None)
    def _time_begins(self, scheduler_output: Any) -> None:
        self._steps.append(_Step(self._stepped_at_s, *prefill_work(scheduler_output)))

    @_harmless(None)
    def _time_ends(self) -> None:
        if not self._steps:
            return
        step, now_s = self._steps.popleft(), self._clock()
        if step.prefill_tokens:
            # With two steps in flight the second one begins when the first has ended.
            began_s = max(step.scheduled_at_s, self._processed_at_s)
            self._costs.computed(step.prefill_tokens, step.token_pairs, now_s - began_s)
        self._processed_at_s = now_s

    @_harmless(_NO_DELAY)
    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        """Keep the call's blocks wanted; only a stock hand-over delays their freeing."""
        pull = self._pulls.ended(request.request_id)
        self._count_unbegun(pull)
        kept = self.extension.finished(request, list(block_ids[0]))
        self._reporter.hurry(last=self.extension.idle)
        if kept is not None and self._directory is not None:
            self._directory.keeps(*kept)
        if request.request_id in self._to_name:
            self._to_name.discard(request.request_id)
            if request.status in _compat.ANSWERED:
                return False, foreign.answer(self._facts.engine_id)
        if request.request_id not in self._stock:
            return False, None
        del self._stock[request.request_id]
        delayed, params = super().request_finished(request, block_ids)
        return delayed, params
