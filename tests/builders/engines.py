"""Engines that share a clock and a wire: vLLM's scheduler, step by step."""

from __future__ import annotations

import itertools
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tests.builders import connectors
from tests.builders.configuration import (
    BLOCK,
    kv_cache_config,
    make_config,
    model_folder,
    structured_output,
)
from tests.builders.connectors import MAKING, Sibling, SiblingLoads
from tests.builders.content import NOTHING, Memory, Text, WrongKV, tokens
from tests.builders.host import HOST_BLOCK_BYTES, host_tier
from tests.builders.peers import DirectPeers
from tests.builders.wire import Transfer, WiredWorker
from turncache.protocol import EngineHints
from turncache_server.connector.finding import Directory
from turncache_server.connector.peers import Peer, PeerState
from turncache_server.connector.retention_connector import RetentionConnector
from turncache_server.connector.source import Source
from turncache_server.connector.turncache_connector import TurncacheConnector
from turncache_server.connector.worker import TurncacheMetadata
from turncache_server.control.messages import HelloReply, Peek, Verify
from turncache_server.launch.transfer import merge
from turncache_server.retention.rests import Rest, rest_key

#: How long answers over real sockets are waited for: a busy machine is slow, not wrong.
_SOCKETS_PATIENCE_S = 20.0


class World:
    """Engines that share a clock and a wire.

    Attributes:
        now_s: the time of schedulers and workers alike.
        transfers: reads that were started and are not done with writing.
        hold: reads stay on the wire until the test moves them; otherwise they are complete
            as soon as they start.
    """

    def __init__(self, *, seed: int = 0, hold: bool = False) -> None:
        self.now_s = 1000.0
        self.engines: dict[str, Engine] = {}
        self.transfers: list[Transfer] = []
        self.hold = hold
        self.random = random.Random(seed)
        self._handles = 0

    def next_handle(self) -> int:
        """Return a fresh transfer handle."""
        self._handles += 1
        return self._handles

    def shuffle(self, pieces: list[Any]) -> None:
        """Put pieces into the order in which they arrive."""
        self.random.shuffle(pieces)

    def transfer_started(self, transfer: Transfer) -> None:
        """Hear of a read."""
        self.transfers.append(transfer)
        if not self.hold:
            transfer.advance()

    def close(self) -> None:
        """Close every engine."""
        for engine in self.engines.values():
            engine.close()


@dataclass(eq=False)
class Flight:
    """A scheduled step.

    Attributes:
        writes: (request, block table, first position, count, whether it samples).
        output: what the workers returned, once executed.
    """

    scheduled: Any
    writes: list[tuple[Request, list[int], int, int, bool]]
    output: ModelRunnerOutput | None = None


class Engine:
    """One scheduler with its workers.

    Args:
        world: clock and wire.
        name: engine id.
        connector: connector class name in ``connectors``, None for stock vLLM.
        peers: engines that may be pulled from, asked without sockets; None for none, or for
            those in ``settings``, asked over real control sockets.
        directory: where sources are looked for that no hint names.
        settings: the ``turncache`` section.
        transfer: members of the transfer configuration to set otherwise.
        num_ranks: workers that read and compute alike.
        num_blocks: blocks in the pool.
        async_scheduling: two steps in flight.
        sibling: put ours into a ``MultiConnector``, before a :class:`Sibling`.
        host_blocks: put ours into a ``MultiConnector``, behind vLLM's own offloading connector
            with room for so many blocks on the host, as ``turncache flags --merge`` does.
        engine_args: for :func:`make_config`.
    """

    def __init__(
        self,
        world: World,
        name: str = "single-0",
        *,
        connector: str | None = "WiredConnector",
        peers: Sequence[str] | None = None,
        directory: Directory | None = None,
        settings: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        num_ranks: int = 1,
        num_blocks: int = 64,
        async_scheduling: bool = False,
        sibling: bool = False,
        host_blocks: int = 0,
        **engine_args: Any,
    ) -> None:
        self._sibling = sibling
        self._host_blocks = host_blocks
        self.world = world
        self.name = name
        self.num_blocks = num_blocks
        self.depth = 2 if async_scheduling else 1
        self.peers = None if peers is None else DirectPeers(world, peers)
        self.directory = directory
        self.memories = [Memory(num_blocks) for _ in range(num_ranks)]
        self.workers = [WiredWorker(world, m, r) for r, m in enumerate(self.memories)]
        self._host_tiers = [host_tier(memory) for memory in self.memories]
        self.flights: deque[Flight] = deque()
        #: What answers said of held KV, by request.
        self.said: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, Text] = {}
        self.promises: dict[bytes, tuple[int, ...]] = {}
        #: Where the block of a hash ends, and what the rests behind it must hold.
        self.ends: dict[bytes, int] = {}
        self.rest_promises: dict[bytes, tuple[int, ...]] = {}
        self.steps = 0
        self.floods = 0
        #: Loads of siblings that the workers have yet to report.
        self._sibling_loads: list[tuple[Request, list[int], bool]] = []
        self._aggregator = KVOutputAggregator(num_ranks)
        transfer_config = None
        if connector is not None:
            transfer_config = self._transfer_config(connector, settings or {}, transfer or {})
        self.config = make_config(
            transfer_config,
            num_blocks=num_blocks,
            async_scheduling=async_scheduling,
            **engine_args,
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        MAKING[name] = self
        try:
            kind = AsyncScheduler if async_scheduling else Scheduler
            self.scheduler = kind(
                self.config,
                kv_cache_config(num_blocks),
                structured_output(model_folder()),
                block_size=BLOCK,
                log_stats=False,
            )
        finally:
            del MAKING[name]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        world.engines[name] = self
        for other in world.engines.values():
            for worker in other.workers:
                worker.greet(name, num_blocks)
            for worker in self.workers:
                worker.greet(other.name, other.num_blocks)

    def _transfer_config(
        self, connector: str, settings: dict[str, Any], changes: dict[str, Any]
    ) -> KVTransferConfig:
        pair = connector == "WiredConnector"
        base: dict[str, Any] = {
            "kv_connector": connector,
            "kv_connector_module_path": connectors.__name__,
            "kv_role": "kv_both" if pair else "kv_producer",
            "engine_id": self.name,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "turncache": {
                    "trust_hints": True,
                    "retain_budget": 0.9,
                    "tenant_budget": 0.9,
                    **settings,
                },
                "kv_recompute_threshold": 0,
            },
        }
        if self._host_blocks:
            return self._beside_offloading({**base, **changes})
        if not self._sibling:
            return KVTransferConfig(**{**base, **changes})
        del base["engine_id"]
        sibling = {
            "kv_connector": "Sibling",
            "kv_connector_module_path": connectors.__name__,
            "kv_role": "kv_both",
        }
        children = [{**base, **changes}, sibling]
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role=base["kv_role"],
            engine_id=self.name,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )

    def _beside_offloading(self, ours: dict[str, Any]) -> KVTransferConfig:
        offloading = {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "engine_id": self.name,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"cpu_bytes_to_use": self._host_blocks * HOST_BLOCK_BYTES},
        }
        return KVTransferConfig(**merge(offloading, ours))

    def close(self) -> None:
        """Close sockets and threads."""
        if self.scheduler.connector is not None:
            self.scheduler.connector.shutdown()

    # --- parts -------------------------------------------------------------------------------

    @property
    def connector(self) -> Any:
        """Our connector, the child of ours in a ``MultiConnector``."""
        made = self.scheduler.connector
        for child in getattr(made, "sub_connectors", ()):
            if isinstance(child, (TurncacheConnector, RetentionConnector)):
                return child
        return made

    @property
    def sibling(self) -> Sibling:
        """The connector beside ours."""
        (found,) = (c for c in self.scheduler.connector.sub_connectors if isinstance(c, Sibling))
        return found

    @property
    def extension(self) -> Any:
        """The extension."""
        connector = self.connector
        pair = getattr(connector, "connector_scheduler", None)
        return pair.extension if pair is not None else connector._extension

    @property
    def pulls(self) -> Any:
        """The pulls."""
        return self.connector.connector_scheduler._pulls

    @property
    def lacking(self) -> Any:
        """The calls that wait for their prompt to be prefilled again."""
        return self.pulls._lacking

    @property
    def source(self) -> Source:
        """Answers peeks and verifies."""
        source = self.extension.source
        assert source is not None
        return source

    def as_peer(self) -> Peer:
        """Return this engine as another one knows it after a hello."""
        source = self.source
        pair = self.connector.connector_scheduler
        return Peer(
            name=self.name,
            control_address="",
            state=PeerState.COMPATIBLE,
            hello=HelloReply(
                engine_id=self.name,
                start_id=source.start_id,
                generation=source.generation(),
                side="single",
                mode="on",
                fingerprint={},
                nixl_host=pair.side_channel_host,
                nixl_port=pair.side_channel_port,
            ),
        )

    def ask(self, body: Peek | Verify) -> Any:
        """Answer a question as the control thread does."""
        return self.source.peek(body) if isinstance(body, Peek) else self.source.verify(body)

    # --- requests ----------------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 1,
        stop_after: int | None = None,
        session: str | None = None,
        extra_args: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        lora_request: Any = None,
        resumable: bool = False,
        **hints: Any,
    ) -> Request:
        """Add a request.

        Args:
            request_id: its id, and the id of its outcome record.
            prompt: token ids.
            max_tokens: tokens to sample.
            stop_after: end with a stop token that is the answer's token of this number.
            session: its session; ``hints`` are further members of :class:`EngineHints`.
            extra_args: further extra arguments, as a client may send them.
            cache_salt: keeps its KV apart from that of other salts.
            lora_request: the adapter that computes it.
            resumable: its prompt goes on, by :meth:`resume`, when it has been answered.
        """
        extra = dict(extra_args or {})
        if session is not None:
            extra |= EngineHints(session=session, request=request_id, **hints).to_xargs()
        stop = (
            [] if stop_after is None else [Text(prompt).token_after(len(prompt) + stop_after - 1)]
        )
        request = Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                stop_token_ids=stop,
                extra_args=extra or None,
            ),
            pooling_params=None,
            lora_request=lora_request,
            cache_salt=cache_salt,
            block_hasher=self._hasher,
            resumable=resumable,
        )
        self.texts[request_id] = Text(prompt)
        self._promise(request)
        self.scheduler.add_request(request)
        return request

    def resume(self, request: Request, more: Sequence[int], *, max_tokens: int = 1) -> None:
        """Let the prompt of a resumable request that waits for it go on."""
        part = Request(
            request_id=request.request_id,
            prompt_token_ids=list(more),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            block_hasher=self._hasher,
            resumable=True,
        )
        self.scheduler.add_request(part)
        # Of what it has answered the last token is dropped: the text is another one.
        self.texts[request.request_id] = Text(list(request.all_token_ids))
        self._promise(request)

    def abort(self, request_id: str) -> None:
        """Let the client leave."""
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def record(self, request_id: str) -> Any:
        """Return the outcome record of a call."""
        record = self.extension.book.get(request_id)
        assert record is not None, f"no record of {request_id}"
        return record

    def _promise(self, request: Request) -> None:
        """Remember what each hash of a request's chain promises."""
        text = self.texts[request.request_id]
        for index, block_hash in enumerate(request.block_hashes):
            if bytes(block_hash) not in self.promises:
                end = (index + 1) * BLOCK
                self.promises[bytes(block_hash)] = tuple(text.upto(end)[end - BLOCK :])
                self.ends[bytes(block_hash)] = end

    # --- steps -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether the engine core would go on stepping."""
        return bool(self.flights) or self.scheduler.has_requests()

    def schedule(self) -> Flight:
        """Schedule a step and dispatch it."""
        scheduled = self.scheduler.schedule()
        writes = []
        for request_id, count in scheduled.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            table = list(self.scheduler.kv_cache_manager.get_block_ids(request_id)[0])
            start = request.num_computed_tokens - count
            writes.append((request, table, start, count, not request.is_prefill_chunk))
        flight = Flight(scheduled, writes)
        self.flights.append(flight)
        self.steps += 1
        return flight

    def execute(self, flight: Flight) -> None:
        """Run the forward pass of the oldest step that has not run, and the workers' hooks."""
        self._run_host_tiers(flight.scheduled)
        synchronous = flight.scheduled.has_sync_kv_loads
        if synchronous:
            self._load_for_siblings(flight.scheduled)
        sampled: dict[str, list[int]] = {}
        for request, table, start, count, samples in flight.writes:
            self._compute(request, table, start, count)
            text = self.texts[request.request_id]
            sampled[request.request_id] = [text.token_after(start + count)] if samples else []
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={r: i for i, r in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )
        if not sampled:
            output = _copy_of_empty()
        output.kv_connector_output = self._run_workers(flight.scheduled)
        if not synchronous:
            self._load_for_siblings(flight.scheduled)
        flight.output = output

    def _load_for_siblings(self, scheduled: Any) -> None:
        """Bring the KV of a sibling's loads, before the forward pass or after it."""
        for child in getattr(scheduled.kv_connector_metadata, "metadata", ()):
            for request_id, block_ids, arrives in getattr(child, "loads", ()):
                request = self.scheduler.requests[request_id]
                table = self.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
                first = list(table).index(block_ids[0])
                values = self.texts[request_id].upto((first + len(block_ids)) * BLOCK)
                for memory in self.memories if arrives else ():
                    memory.write(table, first * BLOCK, values[first * BLOCK :])
                self._sibling_loads.append((request, block_ids, arrives))

    def _compute(self, request: Request, table: list[int], start: int, count: int) -> None:
        text = self.texts[request.request_id]
        expected = list(text.upto(start + count))
        for rank, memory in enumerate(self.memories):
            found = memory.read(table, start)
            values = expected[start:]
            if found != expected[:start]:
                if not request.is_finished() and request not in self._computing_on_garbage():
                    at = next(i for i in range(start) if found[i] != expected[i])
                    raise WrongKV(
                        f"{self.name} rank {rank} step {self.steps}: {request.request_id} reads "
                        f"other KV at token {at} (block {table[at // BLOCK]}) of {start}"
                    )
                # Nobody reads the answer of a request that has ended, but its blocks stay.
                values = [hash((NOTHING, value)) for value in values]
            memory.write(table, start, values)

    def _computing_on_garbage(self) -> list[Request]:
        """Requests whose sibling load has just failed: vLLM has them computed again."""
        return [request for request, _, arrives in self._sibling_loads if not arrives]

    def _run_workers(self, scheduled: Any) -> KVConnectorOutput | None:
        metadata = scheduled.kv_connector_metadata
        if metadata is None:
            return None
        outputs = []
        for worker in self.workers:
            output = EMPTY_MODEL_RUNNER_OUTPUT.__class__(req_ids=[], req_id_to_index={})
            output.kv_connector_output = self._run_worker(worker, metadata)
            outputs.append(output)
        if len(outputs) == 1:
            found = outputs[0].kv_connector_output
        else:
            merged = self._aggregator.aggregate(outputs)
            assert merged is not None
            found = merged.kv_connector_output
        return None if found is None or found.is_empty() else found

    def _run_worker(self, worker: WiredWorker, metadata: Any) -> KVConnectorOutput:
        children = [metadata]
        if isinstance(metadata, MultiKVConnectorMetadata):
            children = list(metadata.metadata)
        output = KVConnectorOutput(finished_recving=set(), failed_recving=set())
        reports: list[Any] = []
        assert output.finished_recving is not None
        for child in children:
            report: Any = None
            if isinstance(child, TurncacheMetadata):
                worker.start_load_kv(child)
                results = worker.get_transfer_results()
                output.finished_recving |= results.finished_recving
                output.finished_sending = results.finished_sending
                output.failed_recving |= results.failed_recving
                output.invalid_block_ids |= worker.get_block_ids_with_load_errors()
                report = worker.take_report()
            if isinstance(child, SiblingLoads):
                self._report_siblings(output)
            if isinstance(child, OffloadingConnectorMetadata):
                tier = self._host_tiers[self.workers.index(worker)]
                output.finished_recving |= tier.get_finished(set())[1]
                report = tier.build_connector_worker_meta()
            reports.append(report)
        if len(children) == 1:
            output.kv_connector_worker_meta = reports[0]
        elif any(report is not None for report in reports):
            output.kv_connector_worker_meta = MultiKVConnectorWorkerMetadata(tuple(reports))
        return output

    def _run_host_tiers(self, scheduled: Any) -> None:
        """Start copies to and from the host, before the forward pass as vLLM does."""
        for child in getattr(scheduled.kv_connector_metadata, "metadata", ()):
            if isinstance(child, OffloadingConnectorMetadata):
                for tier in self._host_tiers:
                    tier.handle_preemptions(child)
                    tier.start_kv_transfers(child)
                    tier.prepare_store_kv(child)

    def _report_siblings(self, output: KVConnectorOutput) -> None:
        """Report finished asynchronous loads, and the blocks that did not arrive."""
        for request, block_ids, arrives in self._sibling_loads:
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                assert output.finished_recving is not None
                output.finished_recving.add(request.request_id)
            if not arrives:
                output.invalid_block_ids |= set(block_ids)
        self._sibling_loads.clear()

    def process(self) -> Flight:
        """Process the oldest step, which runs now if it has not yet."""
        flight = self.flights.popleft()
        if flight.output is None:
            self.execute(flight)
        assert flight.output is not None
        outputs = self.scheduler.update_from_output(flight.scheduled, flight.output)
        for answer in [o for each in outputs.values() for o in each.outputs]:
            if answer.kv_transfer_params is not None:
                self.said[answer.request_id] = answer.kv_transfer_params
        for request, *_ in flight.writes:
            text = self.texts[request.request_id]
            tokens = list(request.all_token_ids)
            assert tokens == text.tokens[: len(tokens)], "the text is that of recomputation"
            self._promise(request)
        return flight

    def step(self) -> None:
        """Do what the engine core does next."""
        if len(self.flights) < self.depth and self.scheduler.has_requests():
            self.schedule()
            if len(self.flights) < self.depth and self.scheduler.has_requests():
                return
        if self.flights:
            self.process()

    def run(
        self, until: Callable[[], bool] | None = None, *, limit: int = 400, answer: bool = True
    ) -> None:
        """Step until a condition holds, by default until the engine is idle.

        Questions of engines without sockets are answered at once unless ``answer`` is off. Over
        real sockets answers take their time, however many steps that are.
        """
        patient_until_s = time.monotonic() + _SOCKETS_PATIENCE_S
        for number in itertools.count():
            if until() if until is not None else not self.busy:
                return
            if number >= limit and (self.peers is not None or time.monotonic() > patient_until_s):
                break
            if answer and self.peers is not None:
                for question in list(self.peers.questions):
                    self.peers.deliver(question)
            before = self.steps
            self.step()
            if self.peers is None and self.steps > before and not self._last_wrote():
                time.sleep(0.001)  # answers come over real sockets
        waiting = {r: q.status.name for r, q in self.scheduler.requests.items()}
        raise AssertionError(f"{self.name} is stuck after {number} steps: {waiting}")

    def _last_wrote(self) -> bool:
        return bool(self.flights and self.flights[-1].writes)

    def hit(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of a prompt are in the engine's own cache."""
        return len(self.cached(prompt)) * BLOCK

    def cached(self, prompt: Sequence[int]) -> list[Any]:
        """Return the blocks of a prompt that are in the engine's own cache."""
        found = self.scheduler.kv_cache_manager.get_computed_blocks(self._probe(prompt))[0]
        return list(found.blocks[0])

    def hashes(self, prompt: Sequence[int]) -> list[bytes]:
        """Return the chain hashes of a text's full blocks."""
        return [bytes(h) for h in self._probe(prompt).block_hashes]

    def listed(self, prompt: Sequence[int]) -> int:
        """Return how many leading blocks of a text the prefix cache lists, written or not."""
        found = 0
        for block_hash in self._probe(prompt).block_hashes:
            if not self.pool.get_cached_block(block_hash, [0]):
                break
            found += 1
        return found

    def _probe(self, prompt: Sequence[int]) -> Request:
        return Request(
            request_id="probe",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def flood(self, num_blocks: int, *, name: str = "flood") -> None:
        """Serve ordinary calls over ``num_blocks`` blocks in all, a quarter of the pool each."""
        size = self.num_blocks // 4
        for _ in range(-(-num_blocks // size)):
            self.floods += 1
            prompt = tokens(size * BLOCK - 2, start=5000 + self.floods)
            self.call(f"{name}-{self.floods}", prompt)

    def call(self, request_id: str, prompt: Sequence[int], **kwargs: Any) -> list[int]:
        """Serve a whole call; returns prompt and answer."""
        request = self.add(request_id, prompt, **kwargs)
        self.run(request.is_finished)
        self.run()
        return list(request.all_token_ids)

    # --- what must always hold ---------------------------------------------------------------

    def check_named(self) -> int:
        """Check every block that a peer could be given at this moment; returns how many.

        A block that is marked and listed under a hash must hold what the hash promises, on
        every rank, now.
        """
        named = 0
        ledger = self.extension.ledger
        for block in self.pool.blocks:
            key = block.block_hash
            if key is None or ledger.readable_epoch(block.block_id) is None:
                continue
            promised = self.promises.get(bytes(key[:-4]))
            if promised is None:
                continue
            named += 1
            for memory in self.memories:
                found = tuple(memory.slots[block.block_id])
                if found != promised:
                    raise WrongKV(f"{self.name}: block {block.block_id} is named, not written")
        return named + self._check_rests()

    def _check_rests(self) -> int:
        """Check likewise what peers could be given of blocks that are not full."""
        named = 0
        epoch = self.extension.ledger.epoch
        for parent, rests in list(self.extension.rests._by_parent.items()):
            for rest in rests:
                if epoch[rest.block_id] != rest.epoch:
                    continue
                named += 1
                promised = self._promised_rest(parent, self.ends[parent], rest)
                for memory in self.memories:
                    if tuple(memory.slots[rest.block_id][: rest.num_tokens]) != promised:
                        raise WrongKV(f"{self.name}: rest in block {rest.block_id} is not written")
        return named

    def _promised_rest(self, parent: bytes, end: int, rest: Rest) -> tuple[int, ...]:
        """Return what a rest must hold, by a call that has the same text up to its end."""
        if rest.key not in self.rest_promises:
            last, stop = self.promises[parent][-1], end + rest.num_tokens
            for text in self.texts.values():
                known = len(text.chain) >= end and text.chain[end - 1] == last
                if known and rest_key(parent, text.tokens[end:stop]) == rest.key:
                    self.rest_promises[rest.key] = tuple(text.upto(stop)[end:])
                    break
        return self.rest_promises[rest.key]

    def check_free(self) -> None:
        """Check that what the queue counts is what it can hand out."""
        queue = self.pool.free_block_queue
        free = [block.block_id for block in queue.get_all_free_blocks()]
        assert len(free) == len(set(free)) == queue.num_free_blocks
        assert all(self.pool.blocks[block_id].ref_cnt == 0 for block_id in free)
        used = sum(block.ref_cnt > 0 for block in self.pool.blocks if not block.is_null)
        assert used + len(free) == self.num_blocks - 1

    def assert_no_leak(self) -> None:
        """Check that an engine whose requests have ended holds nothing."""
        self.run()
        self.check_free()
        assert not self.scheduler.requests
        assert not self.scheduler.deferred_frees
        assert self.pool.get_num_free_blocks() == self.num_blocks - 1
        assert all(b.ref_cnt == 0 for b in self.pool.blocks if not b.is_null)
        if self.scheduler.connector is None:
            return
        extension = self.extension
        assert not extension._calls
        pair = getattr(self.connector, "connector_scheduler", None)
        if pair is not None:
            assert len(pair._pulls) == 0
            assert not pair._pulls.holding
            assert len(pair._pulls._lacking) == 0
            assert len(pair._pulls._lacking) == 0
            assert not pair._abandoned
            assert not pair._pulls.take_reads()
            assert not pair._pulls.take_failures()
            for worker in self.workers:
                assert not worker._recving_metadata
                assert not worker._recving_transfers
                assert not worker.nixl_wrapper.transfers
                assert not worker._deadlines
                assert not worker._attempts
        assert self.scheduler.reset_prefix_cache()


def _copy_of_empty() -> ModelRunnerOutput:
    return ModelRunnerOutput(req_ids=[], req_id_to_index={})
