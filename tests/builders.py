"""Engines without a model: vLLM's real scheduler and our real connector on a model of memory.

Real are vLLM's ``Scheduler``, ``AsyncScheduler`` and ``KVCacheManager``, both sides of our
connector, and vLLM's NIXL worker under ours. Not real are the forward pass and the wire:

* Memory holds, for each slot, the chain value of the tokens whose KV lies there. A step reads
  every earlier slot of its requests through their block tables and writes its own, so a slot
  with other KV is noticed at its first use (:class:`WrongKV`), and wrong KV makes wrong KV.
* The wire copies half blocks in any order, at any time, and stops, fails or lingers as the
  test says.

Steps are scheduled, executed and processed one by one, two in flight with ``AsyncScheduler``.
Every vLLM name that the tests need beside the connector's own is in this file.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import queue
import random
import tempfile
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

# Set before vLLM is imported, which reads them once.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorMetadata,
    MultiKVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
    OffloadingConnectorWorker,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from turncache.protocol import EngineHints
from turncache_server.connector.finding import Directory
from turncache_server.connector.pair_scheduler import PairScheduler
from turncache_server.connector.peers import Peer, PeerState
from turncache_server.connector.retention_connector import RetentionConnector
from turncache_server.connector.source import Source
from turncache_server.connector.turncache_connector import TurncacheConnector
from turncache_server.connector.worker import PULL_PREFIX, TurncacheMetadata, TurncacheWorker
from turncache_server.control.messages import HelloReply, Peek, PeekReply, Verify, VerifyReply
from turncache_server.launch.transfer import merge

#: How long answers over real sockets are waited for: a busy machine is slow, not wrong.
_SOCKETS_PATIENCE_S = 20.0
BLOCK = 4
VOCAB = 4096
#: What a step may read and write; the value of a slot that nobody has written.
NOTHING = -1


class WrongKV(AssertionError):
    """Raised when a request is computed with KV of other content than its tokens promise."""


# --- configuration -----------------------------------------------------------------------


@functools.cache
def model_folder() -> str:
    """Write a model configuration without tokenizer, and weights that nothing loads."""
    folder = Path(tempfile.mkdtemp(prefix="turncache-model-"))
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "max_position_embeddings": 8192,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.bin").write_bytes(b"compared, not loaded")
    return str(folder)


@functools.cache
def _structured_output(_: str) -> Any:
    return StructuredOutputManager(make_config(None))


def make_config(
    transfer: KVTransferConfig | None,
    *,
    num_blocks: int = 64,
    batched_tokens: int = 128,
    max_requests: int = 8,
    max_model_len: int = 2048,
    async_scheduling: bool = False,
    data_parallel_index: int = 0,
    **args: Any,
) -> Any:
    """Make vLLM's configuration of one engine."""
    config = EngineArgs(
        model=model_folder(),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=max_model_len,
        block_size=BLOCK,
        enforce_eager=True,
        max_num_batched_tokens=batched_tokens,
        max_num_seqs=max_requests,
        kv_transfer_config=transfer,
        **args,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = num_blocks
    # As of a rank of a dense model, which vLLM makes an engine of its own.
    config.parallel_config.data_parallel_index = data_parallel_index
    # The CPU platform forces it off; on GPUs it is on.
    config.scheduler_config.async_scheduling = async_scheduling
    return config


def kv_cache_config(num_blocks: int) -> Any:
    """One full-attention group."""
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer.0"], spec)],
    )


# --- content -----------------------------------------------------------------------------


class Text:
    """What a prompt leads to: its tokens and, at each position, the chain value of its KV.

    The model is a function: the token after a chain value is always the same. So the text
    of a call is known from its prompt alone, and equals what recomputation gives.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.chain: list[int] = []
        self._value = 0

    def upto(self, count: int) -> Sequence[int]:
        """Return the chain values of the first ``count`` positions, writing on as needed."""
        while len(self.chain) < count:
            position = len(self.chain)
            if position == len(self.tokens):
                self.tokens.append(2 + self._value % (VOCAB - 2))
            self._value = hash((self._value, self.tokens[position])) & 0x7FFFFFFFFFFF
            self.chain.append(self._value)
        return self.chain[:count]

    def token_after(self, count: int) -> int:
        """Return the token that follows the first ``count``."""
        self.upto(count + 1)
        return self.tokens[count]


class Memory:
    """The KV cache of one rank: a chain value per slot."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = [[NOTHING] * BLOCK for _ in range(num_blocks)]

    def read(self, table: Sequence[int], count: int) -> list[int]:
        """Read the first ``count`` positions of a block table."""
        out: list[int] = []
        for block_id in table[: -(-count // BLOCK)]:
            out += self.slots[block_id]
        return out[:count]

    def write(self, table: Sequence[int], start: int, values: Sequence[int]) -> None:
        """Write positions from ``start`` on."""
        for position, value in enumerate(values, start):
            self.slots[table[position // BLOCK]][position % BLOCK] = value


# --- the wire ----------------------------------------------------------------------------


@dataclass(eq=False)
class Transfer:
    """One read on the wire.

    Attributes:
        pieces: (source block, destination block, half) that were not copied yet.
        told: tells the source, once, that it has been read.
        stock: it is of a stock hand-over.
        state: what NIXL says of it: ``PROC``, ``DONE`` or ``ERR``.
        releasable: whether the backend gives the handle up in its present state.
        released: the handle was given back.
    """

    source: Memory
    destination: Memory
    pieces: list[tuple[int, int, int]]
    told: Callable[[], None] = lambda: None
    stock: bool = False
    state: str = "PROC"
    releasable: bool = True
    released: bool = False

    def advance(self, count: int | None = None) -> None:
        """Copy some half blocks, all of them by default; the last one completes the read."""
        half = BLOCK // 2
        count = len(self.pieces) if count is None else count
        for source, destination, which in self.pieces[:count]:
            at = slice(which * half, (which + 1) * half)
            self.destination.slots[destination][at] = self.source.slots[source][at]
        del self.pieces[:count]
        if not self.pieces and self.state == "PROC":
            self.state = "DONE"
            self.told()

    def fail(self, *, still_writing: bool = False) -> None:
        """End in an error, with or without the backend still writing."""
        self.state = "ERR"
        self.releasable = not still_writing

    def stop_writing(self) -> None:
        """Let the backend be done with it, whatever has arrived."""
        self.pieces.clear()
        self.releasable = True
        if self.state == "PROC":
            self.state = "DONE"


class Wire:
    """Stands for the NIXL agent of one rank, as vLLM's worker calls it."""

    def __init__(self, world: World, memory: Memory, rank: int) -> None:
        self._world = world
        self._memory = memory
        self._rank = rank
        self.transfers: dict[int, Transfer] = {}
        self.notices: list[bytes] = []

    def make_prepped_xfer(
        self,
        operation: str,
        local_handle: Any,
        local_ids: Any,
        remote_handle: str,
        remote_ids: Any,
        *,
        notif_msg: bytes,
    ) -> int:
        assert operation == "READ"
        source = self._world.engines[remote_handle].memories[self._rank]
        pieces = [
            (int(there), int(here), half)
            for here, there in zip(local_ids, remote_ids, strict=True)
            for half in (0, 1)
        ]
        self._world.shuffle(pieces)
        handle = self._world.next_handle()
        tell = functools.partial(self.send_notif, f"agent-{remote_handle}", notif_msg)
        self.transfers[handle] = Transfer(
            source, self._memory, pieces, tell, stock=not notif_msg.startswith(PULL_PREFIX.encode())
        )
        return handle

    def transfer(self, handle: int) -> None:
        self._world.transfer_started(self.transfers[handle])

    def check_xfer_state(self, handle: int) -> str:
        return self.transfers[handle].state

    def get_xfer_telemetry(self, handle: int) -> None:
        assert self.transfers[handle].state == "DONE"

    def release_xfer_handle(self, handle: int) -> None:
        transfer = self.transfers[handle]
        if transfer.state == "PROC" or not transfer.releasable:
            raise RuntimeError("the backend still writes")
        transfer.released = True
        del self.transfers[handle]

    def check_remote_metadata(self, agent: str) -> bool:
        return True

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        notices, self.notices = self.notices, []
        return {"peer": notices} if notices else {}

    def send_notif(self, agent: str, notif_msg: bytes) -> None:
        source = self._world.engines[agent.removeprefix("agent-")].workers[self._rank]
        source.nixl_wrapper.notices.append(notif_msg)


class _NoStats:
    """Takes what NIXL would count."""

    def __getattr__(self, name: str) -> Any:
        return (lambda: True) if name == "is_empty" else (lambda *_: None)


class WiredWorker(TurncacheWorker):
    """Our worker and vLLM's NIXL worker below it, on a wire of ours instead of an agent.

    Made without vLLM's constructor, which wants a device; the attributes are those that its
    pull path reads after a handshake with peers of equal shape.
    """

    def __init__(self, world: World, memory: Memory, rank: int) -> None:
        self.nixl_wrapper = Wire(world, memory, rank)
        self.xfer_stats = _NoStats()
        self.engine_id = "self"
        self.block_size = BLOCK
        self.kv_cache_config = SimpleNamespace(transfer_groups=[object()])
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda _: SimpleNamespace(
                remote_tp_size=1,
                remote_dcp_size=1,
                remote_block_size=BLOCK,
                remote_physical_blocks_per_logical=1,
            ),
            tp_ratio=lambda _: 1,
            block_size_ratio=lambda _: 1,
            unregister_remote_engine=lambda _: None,
        )
        self.tp_rank = rank
        for name in ("pcp_rank", "_lease_extension", "_engine_ttl"):
            setattr(self, name, 0)
        for name in ("dcp_size", "_physical_blocks_per_logical_kv_block", "num_regions"):
            setattr(self, name, 1)
        for name in (
            "pcp_dcp_sharded", "use_mla", "_has_mamba", "_mixed_mem_types", "use_host_buffer",
            "_bidirectional_kv_xfer_enabled", "_uses_region_group_mapping", "_skip_dram_xfer",
            "enable_permute_local_kv", "enable_heterogeneous_attn_post_process",
            "_is_hma_required", "_hb_handshake_notif_only",
        ):  # fmt: skip
            setattr(self, name, False)
        for name in (
            "_recving_metadata", "_recving_transfers", "_pending_recv_notifs", "_reqs_to_send",
            "_remote_agents", "_engine_last_active", "_engine_by_address", "tp_mappings",
            "dst_xfer_side_handles", "dst_num_blocks", "dst_region_num_blocks",
            "dst_region_group_ids", "dst_uses_region_group_mapping", "dst_region_mem_types",
            "kv_caches_base_addr", "_engine_clock_offset", "_invalid_engine_backoff",
            "_handshake_futures",
        ):  # fmt: skip
            setattr(self, name, {})
        for name in (
            "_recv_failures", "_replicated_pcp_done_sending", "_invalid_remote_engines",
            "_failed_remote_engines", "_reqs_to_process",
        ):  # fmt: skip
            setattr(self, name, set())
        for name in ("_ready_requests", "_failed_recv_reqs", "_invalid_block_ids"):
            setattr(self, name, queue.Queue())
        self.consumer_notification_counts_by_req: Counter[str] = Counter()
        self.expected_consumer_notifications_by_req: dict[str, int] = {}
        self._transfer_layer_group_ids: list[int] = []
        self.region_group_ids = [0]
        self.block_len_per_layer = [1]
        self._handshake_lock = threading.RLock()
        self.src_xfer_handles_by_block_size = {BLOCK: "local"}
        self.dst_num_blocks["self"] = len(memory.slots)
        self.greeted: list[str] = []
        self._init_ours(lambda: world.now_s)

    def _log_failure(self, *args: Any, **kwargs: Any) -> None:
        """Keep quiet: failures are made on purpose."""

    def greet(self, engine_id: str, num_blocks: int) -> None:
        """Be as after a handshake."""
        self._remote_agents[engine_id] = {(0, 0): f"agent-{engine_id}"}
        self._engine_by_address[engine_id, 1] = engine_id
        self.tp_mappings[engine_id] = SimpleNamespace(
            all_source_ranks=[0], source_ranks_per_group=[[0]], local_consumers=1
        )
        self.dst_xfer_side_handles[engine_id] = {0: engine_id}
        self.dst_num_blocks[engine_id] = num_blocks
        self.dst_region_group_ids[engine_id] = [0]
        self.dst_uses_region_group_mapping[engine_id] = False

    def _ensure_handshake(self, engine_id: str, *args: Any, **kwargs: Any) -> None:
        self.greeted.append(engine_id)

    def shutdown(self) -> None:
        """Nothing to give back."""


# --- connectors --------------------------------------------------------------------------

#: Engines under construction, by engine id: vLLM makes connectors by class name alone.
_MAKING: dict[str, Engine] = {}


class WiredConnector(TurncacheConnector):
    """``TurncacheConnector`` with the test's clock and, where it has some, peers."""

    def _make_scheduler(self, vllm_config: Any, kv_cache_config: Any, settings: Any) -> Any:
        engine = _MAKING[self.engine_id]
        return PairScheduler(
            vllm_config,
            self.engine_id,
            kv_cache_config,
            settings,
            peers=engine.peers,  # type: ignore[arg-type]  # stands for PeerBook
            directory=engine.directory,
            clock=lambda: engine.world.now_s,
        )


class ClockedRetention(RetentionConnector):
    """``RetentionConnector`` with the test's clock."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        engine = _MAKING[str(vllm_config.kv_transfer_config.engine_id)]
        assert self._extension is not None
        assert self._reporter is not None
        self._extension._clock = self._reporter._clock = lambda: engine.world.now_s


@dataclass
class SiblingLoads(KVConnectorMetadata):
    """One step's loads of a :class:`Sibling`: (request, block ids, whether they arrive)."""

    loads: list[tuple[str, list[int], bool]] = field(default_factory=list)


class Sibling(KVConnectorBase_V1, SupportsHMA):
    """Another connector beside ours in a ``MultiConnector``; its loads are armed by the test.

    Attributes:
        armed: request id to (tokens in all, loads synchronously, whether they arrive).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.armed: dict[str, tuple[int, bool, bool]] = {}
        self._loads: list[tuple[str, list[int], bool]] = []
        self.seen_params: list[Any] = []

    def on_new_request(self, request: Any) -> None:
        """Keep what reaches it."""
        self.seen_params.append(request.kv_transfer_params)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Offer what is armed, once."""
        count, synchronous, _ = self.armed.get(request.request_id, (0, True, True))
        return max(0, count - num_computed_tokens), not synchronous

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load into the blocks that follow the local hit."""
        if num_external_tokens:
            count, _, arrives = self.armed.pop(request.request_id)
            first = (count - num_external_tokens) // BLOCK
            ids = [block.block_id for block in blocks.blocks[0][first : count // BLOCK]]
            self._loads.append((request.request_id, ids, arrives))

    def build_connector_meta(self, scheduler_output: Any) -> SiblingLoads:
        """Give the workers this step's loads."""
        loads, self._loads = self._loads, []
        return SiblingLoads(loads)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Nothing is kept."""
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """The engine's model of memory does it."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Likewise."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **k: Any) -> None:
        """Saves nothing."""

    def wait_for_save(self) -> None:
        """Saves nothing."""


#: What vLLM's offloading connector gives a block on the host, by its own alignment.
_HOST_BLOCK_BYTES: Final = 4096


class HostCopies:
    """Stands for the copies between a rank's memory and the host that vLLM starts on a GPU.

    A copy happens as late as it may: when it is waited for, or a step after it was ordered.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._host: dict[int, list[int]] = {}
        self._ordered: dict[int, Callable[[], None]] = {}
        self._new: set[int] = set()
        self._done: list[int] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Order a copy to the host."""

        def copy() -> None:
            for block_id, place in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                self._host[int(place)] = list(self._memory.slots[int(block_id)])

        return self._order(job_id, copy)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Order a copy from the host."""

        def copy() -> None:
            for place, block_id in zip(src_spec.block_ids, dst_spec.block_ids, strict=True):
                self._memory.slots[int(block_id)][:] = self._host[int(place)]

        return self._order(job_id, copy)

    def _order(self, job_id: int, copy: Callable[[], None]) -> bool:
        self._ordered[job_id] = copy
        self._new.add(job_id)
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Copy now."""
        for job_id in sorted(job_ids & set(self._ordered)):
            self._ordered.pop(job_id)()
            self._done.append(job_id)

    def get_finished(self) -> list[TransferResult]:
        """Copy what was ordered a step ago, and report."""
        new, self._new = self._new, set()
        self.wait(set(self._ordered) - new)
        done, self._done = self._done, []
        return [TransferResult(job_id=job_id, success=True) for job_id in done]


def _host_tier(memory: Memory) -> OffloadingConnectorWorker:
    """Make vLLM's own worker side of offloading, over copies of ours."""
    spec = SimpleNamespace(
        replicated_layout=False,
        config=SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=0)),
    )
    worker = OffloadingConnectorWorker(spec, None, None)  # type: ignore[arg-type]
    worker.worker = HostCopies(memory)  # type: ignore[assignment]
    return worker


# --- peers without sockets ---------------------------------------------------------------


@dataclass(eq=False)
class Question:
    """One question under way: asked, answered at the source, delivered."""

    peer: str
    body: Peek | Verify
    future: Future[Any]
    reply: PeekReply | VerifyReply | None = None


class DirectPeers:
    """Stands for ``PeerBook``: questions wait until the test has them answered and delivered.

    So a peek can be answered at any moment of the source's life, and be delivered later.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = names
        self._known: dict[str, Peer] = {}
        self.questions: list[Question] = []

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to close."""

    def hurry(self) -> None:
        """Forget what was said at the last hello."""
        self._known.clear()

    def get(self, name: str) -> Peer | None:
        """Return a peer as its last hello left it."""
        if name not in self._names:
            return None
        if name not in self._known:
            engine = self._world.engines.get(name)
            if engine is None:
                return Peer(name=name, control_address="")
            self._known[name] = engine.as_peer()
        return self._known[name]

    def all(self) -> list[Peer]:
        """Return every peer."""
        return [peer for name in self._names if (peer := self.get(name)) is not None]

    def peek(self, peer: Peer, session: str, hashes: list[bytes]) -> Future[PeekReply]:
        """Keep the question."""
        return self._ask(peer.name, Peek(session=session, hashes=hashes))

    def verify(self, peer: Peer, question: Verify) -> Future[VerifyReply]:
        """Keep the question."""
        return self._ask(peer.name, question)

    def _ask(self, name: str, body: Peek | Verify) -> Future[Any]:
        question = Question(name, body, Future())
        self.questions.append(question)
        return question.future

    def answer(self, question: Question) -> None:
        """Have the source answer, as its control thread would at this moment."""
        if question.reply is None and not question.future.cancelled():
            question.reply = self._world.engines[question.peer].ask(question.body)

    def deliver(self, question: Question) -> None:
        """Bring the answer to the asker; answers first when nobody has."""
        self.answer(question)
        self.questions.remove(question)
        if not question.future.cancelled():
            question.future.set_result(question.reply)

    def lose(self, question: Question, error: Exception) -> None:
        """Let the question end in an error."""
        self.questions.remove(question)
        if not question.future.cancelled():
            question.future.set_exception(error)


# --- engines -----------------------------------------------------------------------------


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
        connector: connector class name in this module, None for stock vLLM.
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
        self._host_tiers = [_host_tier(memory) for memory in self.memories]
        self.flights: deque[Flight] = deque()
        #: What answers said of held KV, by request.
        self.said: dict[str, dict[str, Any]] = {}
        self.texts: dict[str, Text] = {}
        self.promises: dict[bytes, tuple[int, ...]] = {}
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
        _MAKING[name] = self
        try:
            kind = AsyncScheduler if async_scheduling else Scheduler
            self.scheduler = kind(
                self.config,
                kv_cache_config(num_blocks),
                _structured_output(model_folder()),
                block_size=BLOCK,
                log_stats=False,
            )
        finally:
            del _MAKING[name]
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
            "kv_connector_module_path": __name__,
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
            "kv_connector_module_path": __name__,
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
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": self._host_blocks * _HOST_BLOCK_BYTES
            },
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
        )
        self.texts[request_id] = Text(prompt)
        self._promise(request)
        self.scheduler.add_request(request)
        return request

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
        return named

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


# --- helpers of the tests ----------------------------------------------------------------


@contextlib.contextmanager
def world(**kwargs: Any) -> Iterator[World]:
    """Make a world, and close its engines."""
    made = World(**kwargs)
    try:
        yield made
    finally:
        made.close()


def pair(made: World, **kwargs: Any) -> tuple[Engine, Engine]:
    """Make a prefill and a decode engine that may pull from each other."""
    prefill = Engine(made, "prefill-0", peers=["decode-0"], **kwargs)
    decode = Engine(made, "decode-0", peers=["prefill-0"], **kwargs)
    return prefill, decode


def tokens(count: int, start: int = 1000) -> list[int]:
    """Return a prompt; other starts give other prompts from the first token on."""
    return [2 + (start * 13 + i * 7) % (VOCAB - 2) for i in range(count)]


def reading(
    reader: Engine,
    source: Engine,
    *,
    blocks: int = 8,
    local_blocks: int = 0,
    request_id: str = "r",
    max_tokens: int = 1,
) -> Request:
    """Bring a request to the point where its read has started: the wire must hold it.

    Args:
        reader: pulls.
        source: has served the same prompt.
        blocks: full blocks of the prompt; two more tokens follow.
        local_blocks: leading blocks that the reader has itself.
        request_id: of the request.
        max_tokens: to sample.
    """
    prompt = tokens(blocks * BLOCK + 2)
    source.call(f"warm-{request_id}", prompt, session="s")
    if local_blocks:
        reader.call(f"local-{request_id}", [*prompt[: local_blocks * BLOCK], 7])
    request = reader.add(request_id, prompt, session="s", source=source.name, max_tokens=max_tokens)
    started = len(reader.world.transfers)
    reader.run(lambda: len(reader.world.transfers) > started)
    return request


@dataclass
class Conversation:
    """A session whose history grows by answers and tool results."""

    session: str
    history: list[int] = field(default_factory=list)
    calls: int = 0

    def more(self, count: int) -> list[int]:
        """Append new tokens, and return the prompt."""
        start = 100 + 31 * len(self.history) + zlib.crc32(self.session.encode()) % 1000
        self.history += [2 + (start + i) % (VOCAB - 2) for i in range(count)]
        self.calls += 1
        return list(self.history)

    def call(self, engine: Engine, new_tokens: int, **kwargs: Any) -> str:
        """Serve a call on an engine and keep its answer; returns the call's id."""
        prompt = self.more(new_tokens)
        request_id = f"{self.session}-{self.calls}-{engine.name}"
        self.history = engine.call(request_id, prompt, session=self.session, **kwargs)
        return request_id
