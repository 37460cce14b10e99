"""The extension inside one engine: owner of everything that the engine thread changes.

One writer: only the engine thread calls the hooks below, and only they change queue,
ledger, lineages and records. The control thread reads, and posts to the mailbox, which is
drained before the queue's choice and in the per-step hooks and nowhere else.

A hook that fails switches the extension off for good, with one line: an exception that
reached vLLM's scheduler would end the engine.

An engine whose calls name no session should not notice us. So a hook that has nothing to note
of such a call returns at once, and the two hooks of every step have their guard written out: as
a wrapper it would cost as much as what they do.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from turncache.errors import ConfigError
from turncache.protocol import EngineHints, Mode, Reason
from turncache_server.connector.config import EngineFacts, Find, Settings
from turncache_server.connector.foreign import Leg
from turncache_server.connector.orders import Orders
from turncache_server.connector.pull_state import Pull
from turncache_server.connector.ranks import Ranks
from turncache_server.connector.readings import Readings
from turncache_server.connector.recorder import Recorder
from turncache_server.connector.records import CallBook, CallRecord
from turncache_server.connector.selftest import surprises
from turncache_server.connector.served import ServedCall
from turncache_server.connector.source import Source
from turncache_server.connector.steps import StepTracker
from turncache_server.connector.unproven import Unproven
from turncache_server.retention.free_queue import FreeQueue
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.lineages import (
    Admission,
    ChainBlock,
    Effect,
    Limits,
    LineageTable,
)
from turncache_server.retention.mailbox import (
    HandedOver,
    Mailbox,
    Promote,
    Signalled,
    SwitchMode,
)
from turncache_server.retention.policy import Deadline, Policy, policy_named
from turncache_server.retention.rests import Rest, Rests, rest_key
from turncache_server.retention.sessions import KeptSession
from turncache_server.retention.values import Signal as Kind

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


def limits_of(facts: EngineFacts, settings: Settings) -> Limits:
    """Return the bounds that mode ``on`` keeps."""
    return Limits(
        num_blocks=facts.num_blocks,
        retain_budget=settings.retain_budget,
        tenant_budget=settings.tenant_budget,
        lend_after_s=settings.lend_after_s,
        retain_max_s=settings.retain_max_s,
        retain_default_s=settings.retain_default_s,
        handover_s=settings.handover_s,
    )


def guarded(
    hook: Callable[Concatenate[Extension, P], T],
) -> Callable[Concatenate[Extension, P], T | None]:
    """Make a hook of :class:`Extension` harmless: a failure switches the extension off."""

    @functools.wraps(hook)
    def run(self: Extension, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        if self.broken is not None:
            return None
        try:
            return hook(self, *args, **kwargs)
        except Exception as error:
            logger.exception("turncache: hook %s failed", hook.__name__)
            self.break_off(f"{hook.__name__} failed: {type(error).__name__}: {error}")
            return None

    return cast("Callable[Concatenate[Extension, P], T | None]", run)


def _policy_of(settings: Settings) -> tuple[Policy, str | None]:
    """Return the policy of the settings, and why there is none: then one that is not used."""
    try:
        return policy_named(settings.policy), None
    except ConfigError as error:
        return Deadline(), str(error)


def _num_computed(request: Any) -> int:
    """Return how many tokens of a call that has ended have KV: the last sampled one has none."""
    # With asynchronous scheduling the count may include a step that the end cut off.
    return int(min(request.num_computed_tokens, request.num_tokens - 1))


class Extension:
    """Retention, written marks and call records of one engine.

    Args:
        facts: what is known of the engine.
        settings: how to act.
        clock: monotonic seconds.
        recorder: where to write down what the engine sees, None for nowhere.
        readable: peers may read this engine's blocks, so it has to be known of each whether its
            content is complete. What the steps write is looked at for that alone.

    Attributes:
        broken: why the extension is off for good, None while it works.
    """

    def __init__(
        self,
        facts: EngineFacts,
        settings: Settings,
        *,
        answered: frozenset[Any],
        clock: Callable[[], float] = time.monotonic,
        recorder: Recorder | None = None,
        readable: bool = True,
    ) -> None:
        self.facts = facts
        self.settings = settings
        self.broken: str | None = None
        self.mode = settings.mode
        self.requested_mode = settings.mode
        self.ledger = Ledger(facts.num_blocks)
        self._policy, self._policy_problem = _policy_of(settings)
        self.table = LineageTable(limits_of(facts, settings), self._policy)
        self.mailbox = Mailbox()
        self.book = CallBook()
        self.source: Source | None = None
        self._answered = answered
        self._clock = clock
        self._tracker = StepTracker(facts.block_size) if readable else None
        self._orders = Orders(
            self.mailbox,
            {
                Promote: self._promote,
                HandedOver: self._handed_over,
                Signalled: self._signalled,
                SwitchMode: self._switch_mode,
            },
        )
        # The mailbox's own: looked at in every step.
        self._commands = self.mailbox.commands
        self._unproven = Unproven(self.ledger.epoch)
        # Calls whose steps mark nothing.
        self._unmarked: set[str] = set()
        self.rests = Rests(self.ledger.epoch)
        # Calls of which some step marked nothing.
        self._unsure: set[str] = set()
        self._queue: FreeQueue | None = None
        self._pool: Any = None
        self._block_map: Any = None
        self._stock_queue_type: type | None = None
        # Calls of sessions; most hooks have nothing to do for any other.
        self._calls: dict[str, ServedCall] = {}
        # Whether a session has ever been here: before, nothing is kept and time changes nothing.
        self._has_sessions = False
        # Whether anything is to be noted of a step beside what the mailbox holds.
        self._heeds_steps = readable
        self._in_flight: set[str] = set()
        self._failed_loads: set[str] = set()
        self._ranks = Ranks(self.table, clock)
        self._on_mode: list[Callable[[Mode], None]] = []
        self._readings = Readings(facts.num_blocks, self.table, self.book, recorder)
        self._recorder = recorder
        # The recorder while what the engine sees is written down.
        self._recording: Recorder | None = None

    # --- life -----------------------------------------------------------------------------

    @property
    def acting(self) -> bool:
        """Whether the extension may change what the engine does."""
        return self.broken is None and self.mode is Mode.ON

    def when_mode_changes(self, listener: Callable[[Mode], None]) -> None:
        """Have ``listener`` called on the engine thread after each change of mode."""
        self._on_mode.append(listener)

    def count_also(self, counters: Callable[[], Mapping[str, float]]) -> None:
        """Have the totals of another part shown among :meth:`counters`."""
        self._readings.count_also(counters)

    def bind(self, pool: Any) -> None:
        """Take the pool's free queue over, after the self-test."""
        if self._policy_problem is not None:
            self.break_off(self._policy_problem)
            return
        if self.facts.unsupported:
            self.break_off("unsupported: " + "; ".join(self.facts.unsupported))
            return
        found = surprises(pool, self._adopt_scratch)
        if found:
            self.break_off("the self-test found: " + "; ".join(found))
            return
        self._pool = pool
        self._block_map = pool.cached_block_hash_to_block
        self._stock_queue_type = type(pool.free_block_queue)
        try:
            self._queue = FreeQueue.adopt(
                pool.free_block_queue,
                num_blocks=self.facts.num_blocks,
                ledger=self.ledger,
                table=self.table,
                before_choice=self._before_choice,
                pending=self.mailbox.commands,
                blocks=pool.blocks,
            )
        except ValueError as error:
            self.break_off(f"the pool's queue cannot be taken over: {error}")
            return
        self._queue.retaining = self.mode is Mode.ON
        pool.free_block_queue = self._queue
        self._record_or_not()
        self.source = Source(
            pool,
            self.ledger,
            self.mailbox,
            serving=self._may_be_read,
            known_blocks=self.table.known_blocks,
            awaits=self.table.awaits,
            rests=self.rests,
        )
        logger.info(
            "turncache: mode %s, side %s, %d blocks of %d tokens",
            self.mode.value,
            self.settings.side.value,
            self.facts.num_blocks,
            self.facts.block_size,
        )

    def _may_be_read(self) -> bool:
        """Whether peers are answered at present; for the control thread."""
        return (
            self._tracker is not None
            and self.acting
            # Asked for, too: an idle engine obeys only when the next call comes.
            and self.requested_mode is Mode.ON
            and self.ledger.in_order
            and not self.facts.unsupported_pull
        )

    def _adopt_scratch(self, stock: Any) -> FreeQueue:
        ledger = Ledger(16)
        table = LineageTable(Limits(num_blocks=16), self._policy)
        return FreeQueue.adopt(stock, num_blocks=16, ledger=ledger, table=table)

    def break_off(self, why: str) -> None:
        """Switch the extension off for good and give the stock queue back."""
        if self.broken is not None:
            return
        self.broken = why
        self.mode = self.requested_mode = Mode.OFF
        self._recording = None
        self._heeds_steps = False
        self._in_flight.clear()
        self.ledger.in_order = False
        logger.error("turncache: off, the engine runs as stock: %s", why)
        if self._queue is not None and self._stock_queue_type is not None:
            self._pool.free_block_queue = self._queue.release_to(self._stock_queue_type)
            self._queue = None
        for listener in self._on_mode:
            listener(Mode.OFF)

    # --- hooks, in the order in which a call meets them --------------------------------------

    @guarded
    def arrived(self, request: Any, leg: Leg | None = None) -> EngineHints | None:
        """Admit a request; returns its hints when it belongs to a session.

        Args:
            request: vLLM's request.
            leg: of a hand-over that a router which is not ours has asked for.
        """
        self._in_flight.add(request.request_id)
        if self._commands:
            self._orders.obey()
        self._forget_if_due()
        if request.resumable and self._tracker is not None:
            # A step in flight can fill a block for a token that vLLM then drops: what was
            # written there is written over, under a hash that the block gets before.
            self._unmarked.add(request.request_id)
        hints = self.hints_of(request)
        if leg is not None:
            returns = self.settings.find is not Find.HINTS
            hints = leg.hinted(hints, request.request_id, returns=returns)
        if hints is None and self._recording is None:
            return None
        if self._pool.cached_block_hash_to_block is not self._block_map:
            self._cache_was_reset()
        if self._recording is not None:
            self._recording.arrived(request, hints, self._clock())
        if hints is None:
            return None
        if self._commands:
            self._orders.obey_for(hints.session)
        self._has_sessions = self._heeds_steps = True
        admission = None
        if self.mode is not Mode.OFF:
            admission = self.table.admit(
                session=hints.session,
                tenant=hints.tenant,
                hashes=list(request.block_hashes),
                now_s=self._clock(),
            )
        self._calls[request.request_id] = ServedCall(
            hints=hints,
            admission=admission,
            prompt=request.num_prompt_tokens,
            block_size=self.facts.block_size,
        )
        return hints

    def hints_of(self, request: Any) -> EngineHints | None:
        """Read what a request says of its session; also when the extension is off."""
        params = request.sampling_params
        extra = getattr(params, "extra_args", None) or {}
        if not extra and not request.session_id:
            return None
        hints = EngineHints.from_xargs(extra, trusted=self.settings.trust_hints)
        if hints is None and request.session_id:
            # A client that sends the session id where vLLM reads it itself.
            hints = EngineHints.from_xargs(
                {**extra, "tc_session": request.session_id}, trusted=self.settings.trust_hints
            )
        return hints

    @guarded
    def refused_pull(self, request_id: str, reason: Reason, *, named: bool) -> None:
        """Note why a request does not pull.

        Args:
            request_id: vLLM's.
            reason: why.
            named: it names a source; else one would have been looked for.
        """
        call = self._calls.get(request_id)
        if call is not None:
            call.refused, call.named = reason, named

    def looked_at(self, request: Any, local_tokens: int) -> None:
        """Note the local hit; the last look before the first step counts."""
        if self._calls or self._recording is not None:
            self._looked_at(request, local_tokens)

    @guarded
    def _looked_at(self, request: Any, local_tokens: int) -> None:
        if request.num_preemptions:
            return
        if self._recording is not None:
            self._recording.looked_at(request.request_id, local_tokens)
        call = self._calls.get(request.request_id)
        if call is not None:
            call.local = local_tokens

    def admitted(self, request: Any, pull: Pull | None, *, handed_over: int = 0) -> None:
        """Put the record of a request that is about to be computed.

        Args:
            request: vLLM's request.
            pull: its pull, if it has one.
            handed_over: tokens that a stock hand-over brings.
        """
        if self._calls or self._recording is not None:
            self._admitted(request, pull, handed_over)

    @guarded
    def _admitted(self, request: Any, pull: Pull | None, handed_over: int) -> None:
        if request.num_preemptions:
            return
        if self._recording is not None:
            self._recording.started(request.request_id, self._clock())
        call = self._calls.get(request.request_id)
        if call is not None:
            call.take_over(handed_over)
            call.record = call.recorded(pull)
            self.book.put(call.hints.request, call.record)

    @guarded
    def allocated(self, request_id: str, block_ids: Sequence[int], handed_over: int | None) -> None:
        """Note which blocks an admitted call uses that no source has confirmed.

        Args:
            request_id: vLLM's id of the call.
            block_ids: its blocks.
            handed_over: index of the first block that a stock hand-over fills, None when it
                fills none.
        """
        if handed_over is None:
            self._unproven.admitted(request_id, block_ids)
        else:
            self._unproven.brought(request_id, block_ids, handed_over)

    @property
    def has_unproven(self) -> bool:
        """Whether any call may find blocks that no source has confirmed."""
        return bool(self._unproven)

    def step_scheduled(self, scheduler_output: Any) -> None:
        """Hear of a step, and in a readable engine which blocks it writes.

        vLLM's ``build_connector_meta``.
        """
        if not (self._heeds_steps or self._commands) or self.broken is not None:
            return
        try:
            if self._commands:
                self._orders.step()
            if self._unproven.due:
                self._forget_if_due()
            if self._tracker is not None:
                self._note_writes(self._tracker, scheduler_output)
            if self._calls and scheduler_output.scheduled_new_reqs:
                self._note_siblings(scheduler_output.scheduled_new_reqs)
            if self._pool.cached_block_hash_to_block is not self._block_map:
                self._cache_was_reset()
            if self._has_sessions:
                self._time_passes()
            if self._recording is not None:
                self._recording.step_scheduled(
                    scheduler_output.total_num_scheduled_tokens, self._clock()
                )
        except Exception as error:
            logger.exception("turncache: hook step_scheduled failed")
            self.break_off(f"step_scheduled failed: {type(error).__name__}: {error}")

    def _note_writes(self, tracker: StepTracker, scheduler_output: Any) -> None:
        if scheduler_output.has_sync_kv_loads and self.ledger.in_order:
            # Ours never do: a sibling in a MultiConnector writes blocks before the step
            # and rewrites what is cached, so no mark says what a block holds.
            self.ledger.in_order = False
            logger.error(
                "turncache: a sibling connector loads KV synchronously: this engine is no source"
            )
        self.ledger.schedule(tracker.writes(scheduler_output))

    def _note_siblings(self, new_requests: Any) -> None:
        """Count what a sibling connector has loaded as found in this engine: a host tier's."""
        for new in new_requests:
            call = self._calls.get(new.req_id)
            record = None if call is None else call.found_besides(new.num_computed_tokens)
            if call is not None and record is not None:
                self.book.put(call.hints.request, record)

    @guarded
    def loads_failed(self, request_ids: set[str]) -> None:
        """Remember whose loads failed: their step marks nothing."""
        if self._tracker is not None:
            self._failed_loads |= request_ids
            self._unsure |= request_ids & self._in_flight

    @guarded
    def blocks_invalid(self, block_ids: set[int]) -> None:
        """Remember who computed on blocks that a sibling connector failed to load."""
        if self._tracker is not None:
            users = self._tracker.users(block_ids)
            self._failed_loads |= users
            self._unsure |= users & self._in_flight

    @guarded
    def blocks_loaded(self, block_ids: list[int]) -> None:
        """Hear which pulled blocks their source has confirmed."""
        self.ledger.loaded(block_ids)

    def step_processed(self) -> None:
        """Hear that the oldest step has been processed: mark what it has written.

        vLLM's ``take_events`` or ``get_kv_connector_stats``: it calls both once per processed step.
        """
        if not (self._heeds_steps or self._commands) or self.broken is not None:
            return
        try:
            if self._tracker is not None:
                self._mark()
            if self._recording is not None:
                self._recording.step_processed(self._clock())
            if self._commands:
                self._orders.obey()
                self._forget_if_due()
        except Exception as error:
            logger.exception("turncache: hook step_processed failed")
            self.break_off(f"step_processed failed: {type(error).__name__}: {error}")

    def _mark(self) -> None:
        ledger = self.ledger
        was_in_order = ledger.in_order
        # What is computed on unproven blocks is not proven either.
        if self._unproven.calls:
            self._failed_loads.update(self._unproven.calls)
        if self._unmarked:
            self._failed_loads |= self._unmarked
        ledger.processed(failed=self._failed_loads)
        if self._failed_loads:
            self._failed_loads = set()
        if was_in_order and not ledger.in_order:
            logger.error("turncache: steps came back out of order: this engine is no source")

    @guarded
    def finished(self, request: Any, block_ids: list[int]) -> tuple[str, float] | None:
        """Keep an answered call's blocks wanted; called before vLLM frees them.

        Returns:
            The session and for how many seconds it is kept, None when nothing is.
        """
        self._in_flight.discard(request.request_id)
        call = self._calls.pop(request.request_id, None)
        # Only sessions' calls leave rests: any other one must not pay for the look.
        rest_tokens = 0 if call is None else self._rest_tokens(request, block_ids)
        self._unmarked.discard(request.request_id)
        self._unsure.discard(request.request_id)
        unproven = self._unproven.ended(request.request_id, block_ids) and self.acting
        if unproven:
            rest_tokens = 0
            self._forget_unproven()
        if call is None:
            if self._recording is not None:
                self._write_down(self._recording, request, block_ids, None, None, rest=False)
            if self.mode is not Mode.OFF:
                self.table.ordinary(len(block_ids), now_s=self._clock())
            return None
        # One that leaves before it was let in has computed nothing, and so lost nothing.
        record = call.record
        if record is not None:
            self.book.finish(call.hints.request, record)
        if self._recording is not None:
            has_rest = rest_tokens > 0
            self._write_down(self._recording, request, block_ids, call.hints, record, rest=has_rest)
        if call.admission is None or self.mode is Mode.OFF:
            return None
        if request.status not in self._answered:
            self._apply(self.table.cancel(call.admission, now_s=self._clock()))
            return None
        # Nobody finds what has left the prefix cache: its hashes are remembered, no more.
        hints = replace(call.hints, retain_s=0.0, handover=False) if unproven else call.hints
        self._apply(self._keep(hints, call.admission, request, block_ids, rest_tokens))
        return self._kept(hints)

    def _kept(self, hints: EngineHints) -> tuple[str, float] | None:
        retain_s = self.settings.retain_default_s if hints.retain_s is None else hints.retain_s
        if hints.final or retain_s <= 0 or not self.acting:
            return None
        return hints.session, min(retain_s, self.settings.retain_max_s)

    def _write_down(
        self,
        recorder: Recorder,
        request: Any,
        block_ids: list[int],
        hints: EngineHints | None,
        record: CallRecord | None,
        *,
        rest: bool,
    ) -> None:
        recorder.ended(
            request,
            hints,
            record,
            num_blocks=len(block_ids),
            complete=self._num_complete(request, block_ids),
            rest=rest,
            answered=request.status in self._answered,
            now_s=self._clock(),
        )

    def _num_complete(self, request: Any, block_ids: list[int]) -> int:
        return min(
            _num_computed(request) // self.facts.block_size,
            len(request.block_hashes),
            len(block_ids),
        )

    def _keep(
        self,
        hints: EngineHints,
        admission: Admission,
        request: Any,
        block_ids: list[int],
        rest_tokens: int,
    ) -> Effect:
        complete = self._num_complete(request, block_ids)
        epoch = self.ledger.epoch
        chain = [
            ChainBlock(block_id, epoch[block_id], bytes(chain_hash))
            for block_id, chain_hash in zip(
                block_ids[:complete], request.block_hashes[:complete], strict=True
            )
        ]
        rest = None
        if rest_tokens and self.acting:
            rest = self._rest_of(request, block_ids[complete], chain[-1].hash, rest_tokens)
        return self.table.finish(
            admission,
            chain,
            retain_s=hints.retain_s,
            expect_s=hints.expect_s,
            priority=hints.priority,
            final=hints.final,
            compaction=hints.compaction,
            handover=hints.handover,
            now_s=self._clock(),
            rest=rest,
        )

    def _rest_tokens(self, request: Any, block_ids: list[int]) -> int:
        """Return how many tokens behind its complete blocks a call leaves for peers to take."""
        request_id, size = request.request_id, self.facts.block_size
        if self._tracker is None or request_id in self._unmarked or request_id in self._unsure:
            return 0
        if not self.ledger.in_order or self.facts.unsupported_pull:
            return 0  # nobody is given anything
        if request.mm_features or request.prompt_embeds is not None:
            return 0  # inputs of other kinds are no part of a rest's key
        complete = self._num_complete(request, block_ids)
        tokens = _num_computed(request) - complete * size
        return tokens if 0 < complete < len(block_ids) and 0 < tokens < size else 0

    def _rest_of(self, request: Any, block_id: int, parent: bytes, rest_tokens: int) -> ChainBlock:
        """Note what a call leaves in a block behind the one of hash ``parent``."""
        end = _num_computed(request)
        key = rest_key(parent, request.all_token_ids[end - rest_tokens : end])
        rest = Rest(block_id, self.ledger.epoch[block_id], rest_tokens, key)
        self.rests.note(parent, rest)
        return ChainBlock(block_id, rest.epoch, key)

    # --- inside ----------------------------------------------------------------------------

    @guarded
    def _before_choice(self) -> None:
        self._orders.obey()

    def _promote(self, command: Promote) -> None:
        if self._queue is None or self.source is None:
            return
        if command.generation != self.source.generation_seen:
            return
        self._queue.promote(command.block_ids, command.epochs)

    def _handed_over(self, command: HandedOver) -> None:
        if self._recording is not None:
            self._recording.tail_verified(command.tail_hash, self._clock())
        self._apply(self.table.handed_over(command.tail_hash, now_s=self._clock()))

    def _signalled(self, command: Signalled) -> None:
        session, kind, expect_s = command.session, command.kind, command.expect_s
        if self._recording is not None:
            self._recording.signalled(session, kind, expect_s, self._clock())
        self._apply(self.table.signal(session, kind, expect_s=expect_s, now_s=self._clock()))
        # What is worth most may be another lineage now, though no block has changed.
        self._ranks.soon()

    def _switch_mode(self, command: SwitchMode) -> None:
        mode = Mode(command.mode)
        if self.broken is not None or mode is self.mode:
            return
        logger.info("turncache: mode %s -> %s", self.mode.value, mode.value)
        self.mode = mode
        if mode is not Mode.ON:
            self._apply(self.table.clear())
        if self._queue is not None:
            self._queue.retaining = mode is Mode.ON
        # Not here: the scheduler may be about to give such blocks to a call of which we hear later.
        self._unproven.due = mode is Mode.ON
        self._record_or_not()
        for listener in self._on_mode:
            listener(mode)

    def _forget_if_due(self) -> None:
        if self._unproven.due:
            self._unproven.due = False
            self._forget_unproven()

    def _forget_unproven(self) -> None:
        self._apply(self._unproven.leave(self._pool, self.table))

    def _record_or_not(self) -> None:
        """Write down what the engine sees in ``observe``, and with a trace in ``on`` too."""
        wanted = self.mode is Mode.OBSERVE or (
            self.mode is Mode.ON and self.settings.trace_file is not None
        )
        if wanted and self._recording is None and self._recorder is not None:
            # What happened before is not known: the ghost begins with an empty cache.
            self._recorder.forgotten(self._clock())
        self._recording = self._recorder if wanted else None
        self._heeds_steps = (
            self._tracker is not None or self._has_sessions or self._recording is not None
        )

    def _time_passes(self) -> None:
        now_s = self._clock()
        self._apply(self.table.expire(now_s))
        if self._queue is not None and now_s >= self._ranks.due_s:
            self._ranks.order(self._queue, now_s)

    def _cache_was_reset(self) -> None:
        """Want nothing any more: the prefix cache was reset, and what was wanted is gone."""
        self._block_map = self._pool.cached_block_hash_to_block
        self.rests.clear()
        self._apply(self.table.clear())
        if self._recording is not None:
            self._recording.forgotten(self._clock())

    def _apply(self, effect: Effect) -> None:
        if self._queue is not None and effect.changed:
            self._queue.reclassify(effect.changed, effect.dead)
            self._ranks.soon()

    # --- for the control thread: reads only ---------------------------------------------------

    # An engine without a call does not step, so it obeys and lets go only when the next one
    # comes. Whoever waits for an engine to be empty must not wait for that.

    def kept_sessions(self) -> list[KeptSession]:
        """List the sessions that are kept or served, as if every command had been obeyed."""
        ended = {
            command.session
            for command in self.mailbox.commands.copy()
            if isinstance(command, Signalled) and command.kind in (Kind.FINAL, Kind.CANCEL)
        }
        return [each for each in self.table.kept(self._clock()) if each.key not in ended]

    def num_handovers(self) -> int:
        """Count the prompts that no peer has taken over yet, as :meth:`kept_sessions` does."""
        verified = [
            command.tail_hash
            for command in self.mailbox.commands.copy()
            if isinstance(command, HandedOver)
        ]
        return self.table.num_handovers(self._clock(), verified)

    @property
    def num_calls(self) -> int:
        """Calls in flight, of any session or none."""
        return len(self._in_flight)

    @property
    def idle(self) -> bool:
        """Whether no call is in flight."""
        return not self._in_flight

    def gauges(self) -> dict[str, float]:
        """Return the present state in numbers."""
        return self._readings.gauges(
            self._queue,
            self.mode,
            calls_in_flight=self.num_calls,
            in_order=self.ledger.in_order,
            broken=self.broken is not None,
            recording=self._recording is not None,
        )

    def counters(self) -> dict[str, float]:
        """Return the totals since start."""
        return self._readings.counters()
