"""The worker's side of a read: deadlines, errors, and handles that outlive their request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders import Engine, Transfer, WiredWorker, World, world
from turncache_server.connector.worker import PeerEndpoint, TurncacheMetadata, WorkerReport


@pytest.fixture
def made() -> Iterator[World]:
    """A wire that holds reads until the test moves them."""
    with world(hold=True) as made:
        yield made


@pytest.fixture
def worker(made: World) -> WiredWorker:
    """The worker of an engine that has greeted another one."""
    reader = Engine(made, "reader", peers=[])
    Engine(made, "source", peers=[])
    return reader.workers[0]


def order(
    worker: WiredWorker,
    made: World,
    request_id: str = "r",
    *,
    attempt: int = 1,
    local: tuple[int, ...] = (1, 2),
    remote: tuple[int, ...] = (5, 6, 7),
    deadline_s: float = 2.0,
) -> Transfer:
    """Start a read."""
    meta = TurncacheMetadata()
    meta.deadlines_s[request_id] = deadline_s
    meta.attempts[request_id] = attempt
    meta.add_new_req_to_recv(
        request_id=request_id,
        local_block_ids=(list(local),),
        kv_transfer_params={
            "remote_block_ids": (list(remote),),
            "remote_engine_id": "source",
            "remote_request_id": f"tc-{request_id}-{attempt}",
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "tp_size": 1,
            "remote_num_tokens": len(local) * 4,
        },
        local_num_computed_blocks=(0,),
        awaiting_kvs=True,
    )
    worker.start_load_kv(meta)
    return made.transfers[-1]


def results(worker: WiredWorker) -> tuple[set[str], set[str]]:
    """Return what the worker reports as finished and as failed."""
    found = worker.get_transfer_results()
    assert worker.get_block_ids_with_load_errors() == set(), "never block ids"
    return found.finished_recving, found.failed_recving


def idle(worker: WiredWorker) -> None:
    """Take a step without orders."""
    worker.start_load_kv(TurncacheMetadata())


def test_a_read_that_ends_in_time_is_finished(worker: WiredWorker, made: World) -> None:
    """Its deadline is forgotten with it, and there is nothing to report."""
    transfer = order(worker, made, remote=(5, 6))
    assert results(worker) == (set(), set())
    transfer.advance()
    assert results(worker) == ({"r"}, set())
    made.now_s += 60
    assert results(worker) == (set(), set())
    assert worker.take_report() is None


def test_a_read_that_is_done_is_not_late_because_the_step_was_long(
    worker: WiredWorker, made: World
) -> None:
    """It is looked at once per step, and a step of a long prefill takes seconds."""
    transfer = order(worker, made)
    transfer.advance()
    made.now_s += 60
    assert results(worker) == ({"r"}, set())
    assert worker.take_report() is None
    assert not worker._deadlines


def test_the_tail_of_the_remote_blocks_is_read(worker: WiredWorker, made: World) -> None:
    """The destination is paired with the last of the remote blocks."""
    transfer = order(worker, made, local=(1, 2), remote=(5, 6, 7))
    assert {(source, destination) for source, destination, _ in transfer.pieces} == {(6, 1), (7, 2)}


def test_a_late_read_is_abandoned_and_polled(worker: WiredWorker, made: World) -> None:
    """Reported as finished and failed at once, as gone only when its handle is released."""
    transfer = order(worker, made)
    made.now_s += 2.5
    assert results(worker) == ({"r"}, {"r"})
    assert worker.take_report() == WorkerReport(abandoned={("r", 1): 1})
    for _ in range(3):
        idle(worker)
        assert results(worker) == (set(), set())
        assert worker.take_report() == WorkerReport(), "the hook must run until it is gone"
    transfer.advance()
    assert results(worker) == (set(), set())
    assert worker.take_report() == WorkerReport(released={("r", 1): 1})
    assert transfer.released
    assert worker.take_report() is None


def test_an_error_that_still_writes_is_kept_until_the_deadline(
    worker: WiredWorker, made: World
) -> None:
    """Its handle cannot be released: the request fails by its deadline, the blocks stay."""
    transfer = order(worker, made)
    transfer.fail(still_writing=True)
    assert results(worker) == (set(), set())
    made.now_s += 2.5
    assert results(worker) == ({"r"}, {"r"})
    assert worker.take_report() == WorkerReport(abandoned={("r", 1): 1})
    transfer.stop_writing()
    results(worker)
    assert worker.take_report() == WorkerReport(released={("r", 1): 1})


def test_an_error_that_is_over_fails_at_once(worker: WiredWorker, made: World) -> None:
    """The whole request, never single blocks."""
    order(worker, made).fail()
    assert results(worker) == ({"r"}, {"r"})
    assert worker.take_report() is None
    assert not worker._deadlines


def test_a_second_read_is_told_apart_from_an_abandoned_first(
    worker: WiredWorker, made: World
) -> None:
    """The first ends after the second: each is reported by its own attempt."""
    first = order(worker, made)
    made.now_s += 2.5
    results(worker)
    worker.take_report()
    second = order(worker, made, attempt=2, local=(3, 4))
    made.now_s += 2.5
    assert results(worker) == ({"r"}, {"r"})
    assert worker.take_report() == WorkerReport(abandoned={("r", 2): 1})
    second.advance()
    results(worker)
    assert worker.take_report() == WorkerReport(released={("r", 2): 1})
    first.advance()
    results(worker)
    assert worker.take_report() == WorkerReport(released={("r", 1): 1})


def test_refused_requests_are_reported_as_finished_and_failed(
    worker: WiredWorker, made: World
) -> None:
    """What verify refused goes back to the scheduler in the way that it understands."""
    meta = TurncacheMetadata()
    meta.failures = {"r"}
    worker.start_load_kv(meta)
    assert results(worker) == ({"r"}, {"r"})
    idle(worker)
    assert results(worker) == (set(), set())


def test_a_report_is_made_when_it_is_asked_for(worker: WiredWorker, made: World) -> None:
    """An empty one makes vLLM call the scheduler side on a quiet step."""
    meta = TurncacheMetadata()
    meta.report = True
    worker.start_load_kv(meta)
    assert worker.take_report() == WorkerReport()
    idle(worker)
    assert worker.take_report() is None


def test_a_handshake_that_ends_too_late_starts_nothing(worker: WiredWorker, made: World) -> None:
    """The blocks of a request that was abandoned meanwhile belong to somebody else."""
    agents = worker._remote_agents.pop("source")
    waiting: list[tuple[str, object]] = []
    worker._background_nixl_handshake = (  # type: ignore[method-assign]
        lambda req_id, engine_id, meta: waiting.append((req_id, meta))
    )
    started = len(made.transfers)
    with pytest.raises(IndexError):
        order(worker, made)
    made.now_s += 2.5
    assert results(worker) == ({"r"}, {"r"})
    assert worker.take_report() is None, "nothing was on the wire"
    worker._remote_agents["source"] = agents
    worker._ready_requests.put(waiting[0])
    idle(worker)
    assert len(made.transfers) == started


def test_peers_are_greeted_when_they_are_named(worker: WiredWorker, made: World) -> None:
    """At hello, never on a first call."""
    meta = TurncacheMetadata()
    meta.handshakes = (PeerEndpoint(engine_id="new", host="127.0.0.1", port=1, tp_size=1),)
    worker.start_load_kv(meta)
    assert worker.greeted == ["new"]


def test_a_peers_descriptors_live_as_long_as_an_abandoned_transfer(
    worker: WiredWorker, made: World
) -> None:
    """What vLLM knows of a replaced peer is released, and a late transfer still uses it."""
    removed: list[str] = []
    worker._cleanup_remote_engine = (  # type: ignore[method-assign]
        lambda engine_id, **_: removed.append(engine_id)
    )
    transfer = order(worker, made)
    made.now_s += 2.5
    results(worker)
    worker._engine_by_address.clear()  # every peer was replaced
    assert "source" in worker._engines_with_inflight_transfers()
    results(worker)
    assert removed == []
    transfer.advance()
    results(worker)
    results(worker)
    assert "source" in removed


def test_a_stuck_transfer_keeps_no_other_peer_from_being_cleaned_up(
    worker: WiredWorker, made: World
) -> None:
    """A frozen peer that is still known costs only what is its own."""
    removed: list[str] = []
    worker._cleanup_remote_engine = (  # type: ignore[method-assign]
        lambda engine_id, **_: (removed.append(engine_id), worker._remote_agents.pop(engine_id))
    )
    order(worker, made)
    made.now_s += 2.5
    results(worker)
    worker._remote_agents["replaced"] = {(0, 0): "agent-replaced"}
    results(worker)
    assert removed == ["replaced"]


def test_ranks_add_their_reports() -> None:
    """Counts by read, as the executor merges them."""
    merged = WorkerReport(abandoned={("r", 1): 1}).aggregate(
        WorkerReport(abandoned={("r", 1): 1, ("q", 1): 1}, released={("r", 2): 1})
    )
    assert merged == WorkerReport(abandoned={("r", 1): 2, ("q", 1): 1}, released={("r", 2): 1})
