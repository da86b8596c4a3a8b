"""Decodes that leave to the pool of the node and come back, step by step: a worker of twenty blocks of four tokens."""

from typing import Any

import pytest

from alignedserve.core.ids import BlockId, LeaseId, RequestId
from alignedserve.core.lifecycle import epoch_end
from alignedserve.messages.caches import (
    ArenaOffered,
    BlockCopy,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    CopyGranted,
    CopyMissing,
    FetchCopy,
    Handoff,
    LeasesReleased,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Received, Send
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    UnmapArena,
)
from alignedserve.messages.pools import DropRequest
from alignedserve.messages.wire import Message
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.colocated import FOUR, SEVEN, ColocatedHarness, run, runs
from tests.harnesses.scheduling import Step
from tests.support.samples import R1, blocks

POOL = "pool-0"
ARENA = ArenaOffered("/arena", 100, 64, "digest")
LEASE = LeaseId(9)
COPY = BlockCopy(9, 4, (BlockRun(40, 1, 5),))


class Worker(ColocatedHarness):
    """r1 has its first token, in block 0, r2 in blocks 1 and 2; nothing runs."""

    def __init__(self) -> None:
        super().__init__(decode_pool=POOL)
        self.do(PeerConnected(Role.KV_POOL, POOL))
        assert self.hear_pool(ARENA) == [MapArena(POOL, ARENA)]
        self.begin(FOUR)
        self.begin(SEVEN)
        self.follow(Step(r1=4, r2=6), Step(r2=1))
        self.sampled(r1=7)
        self.sampled(r2=7)

    def hear_pool(self, message: Message) -> list[WorkerCommand]:
        return self.do(Received(POOL, message))

    def leave(self) -> None:
        """Let r1 leave, up to the copy."""
        assert self.follow(Step(depart=["r1"])) == [to_pool(ReserveBlocks(R1, 1, 2, may_wait=False))]
        (copying,) = self.hear_pool(BlocksReserved(R1, 1, LEASE, 9, (BlockId(40), BlockId(41))))
        self.copying: Any = copying

    def away(self) -> "Worker":
        """Let r1 leave to its end."""
        self.leave()
        (offer,) = self.do(BlocksOffloaded(self.copying, COPY.runs))
        assert offer == to_pool(BlocksWritten(LEASE, COPY, 1, FOUR, (7,), 8.0, 0.0))
        assert self.hear_pool(BlocksTaken(R1, 1, is_accepted=True)) == []
        return self

    def fetch(self) -> "Worker":
        """Let it come back, up to the pool's answer."""
        assert self.follow(Step(back=["r1"])) == [to_pool(FetchCopy(R1, 1))]
        return self

    def load(self) -> LoadBlocks:
        """Let it come back, up to the copy."""
        handoff = Handoff(FOUR, 3, (7,), LeaseId(9), COPY)
        (loading,) = self.fetch().hear_pool(CopyGranted(handoff, 1))
        assert isinstance(loading, LoadBlocks)
        return loading

    @property
    def num_free(self) -> int:
        return self.loads[-1].num_free_blocks


def to_pool(message: Message) -> Send:
    return Send(POOL, message)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def test_its_blocks_are_free_once_the_pool_has_taken_it(worker: Worker) -> None:
    worker.leave()
    assert (worker.copying.block_ids, worker.copying.target_block_ids) == (blocks(0), blocks(40))
    assert worker.num_free == 17
    worker.do(BlocksOffloaded(worker.copying, COPY.runs))
    worker.hear_pool(BlocksTaken(R1, 1, is_accepted=True))
    assert (worker.num_free, worker.loads[-1].num_waiting) == (18, 2)


def test_others_compute_meanwhile_and_it_decodes_until_the_copy_begins(worker: Worker) -> None:
    commands = worker.follow(Step(depart=["r1"], r1=1, r2=1))
    assert runs(commands) == [run(grown=[("r1", 3)], r1=1, r2=1)]
    assert worker.hear_pool(BlocksReserved(R1, 1, LEASE, 9, (BlockId(40), BlockId(41)))) == []
    worker.script.steps.append(Step(r2=1))
    commands = worker.sampled(r1=8, r2=8)
    (leaving,) = [one for one in commands if isinstance(one, OffloadBlocks)]
    assert leaving.block_ids == blocks(0, 3)
    assert runs(commands) == [run(removals=("r1",), grown=[("r2", 4)], r2=1)]


def test_it_comes_back_with_its_cache_and_the_lease_is_given_back(worker: Worker) -> None:
    loading = worker.away().load()
    (load,) = loading.loads
    assert (loading.source, load.copy, len(load.block_ids)) == (POOL, COPY, 1)
    assert worker.num_free == 17
    assert worker.do(BlocksLoaded(POOL, loading.loads, frozenset())) == [to_pool(LeasesReleased((LEASE,)))]
    (iteration,) = runs(worker.follow(Step(r1=1)))
    (added,) = iteration.additions
    assert (added.num_cached, added.generated_token_ids, added.block_ids[:1]) == (4, (7,), load.block_ids)


def test_the_policy_sees_what_is_there_and_on_its_way(worker: Worker) -> None:
    worker.leave()
    worker.follow(Step(r2=1))
    pool = worker.view.pool
    assert pool is not None
    assert (pool.num_coming, pool.leaving, dict(pool.away)) == (1, (), {})
    worker.do(BlocksOffloaded(worker.copying, COPY.runs))
    worker.hear_pool(BlocksTaken(R1, 1, is_accepted=True))
    worker.script.steps.append(Step(r2=1))
    worker.sampled(r2=8)
    pool = worker.view.pool
    assert pool is not None
    assert (pool.num_coming, dict(pool.away), pool.num_returning) == (0, {R1: False}, 0)
    assert worker.view.table.num_swapped[worker.view.table.row(R1)] == 4


def test_without_room_in_the_pool_it_stays_and_the_policy_is_told(worker: Worker) -> None:
    worker.follow(Step(depart=["r1"]))
    assert worker.hear_pool(ReservationRefused(R1, 1)) == []
    worker.follow(Step(r1=1))
    assert worker.view.pool is not None
    assert not worker.view.pool.has_room
    worker.now = 2.0
    worker.sampled(r1=8)
    assert worker.view.pool.has_room


def test_a_copy_that_fails_leaves_it_here(worker: Worker) -> None:
    worker.leave()
    assert worker.do(BlocksOffloaded(worker.copying, None)) == [to_pool(CancelReservation(R1, 1))]
    assert runs(worker.follow(Step(r1=1)))[0].additions[0].num_cached == 4


@pytest.mark.parametrize("answer", ["missing", "other", "damaged", "lost"])
def test_what_does_not_come_back_is_computed_again(worker: Worker, answer: str) -> None:
    if answer == "missing":
        worker.away().fetch().hear_pool(CopyMissing(R1, 1))
    elif answer == "other":
        other = Handoff(FOUR, 3, (7,), LEASE, BlockCopy(9, 5, (BlockRun(40, 2, 5),)))
        assert worker.away().fetch().hear_pool(CopyGranted(other, 1)) == [to_pool(LeasesReleased((LEASE,)))]
    elif answer == "damaged":
        loading = worker.away().load()
        worker.do(BlocksLoaded(POOL, loading.loads, frozenset({R1})))
    else:
        assert worker.away().do(PeerDisconnected(Role.KV_POOL, POOL)) == [UnmapArena(POOL)]
    assert worker.num_free == 18
    (iteration,) = runs(worker.follow(Step(r1=5)))
    (added,) = iteration.additions
    assert (added.num_cached, added.generated_token_ids) == (0, (7,))


def test_a_load_outlives_its_pool(worker: Worker) -> None:
    loading = worker.away().load()
    worker.do(PeerDisconnected(Role.KV_POOL, POOL))
    assert worker.do(BlocksLoaded(POOL, loading.loads, frozenset())) == []
    assert runs(worker.follow(Step(r1=1)))[0].additions[0].num_cached == 4


@pytest.mark.parametrize("stage", ["offered", "away", "asked", "loading"])
def test_one_whose_client_leaves_is_dropped_there_and_holds_nothing_here(worker: Worker, stage: str) -> None:
    loading = None
    if stage == "offered":
        worker.leave()
        worker.do(BlocksOffloaded(worker.copying, COPY.runs))
    elif stage == "loading":
        loading = worker.away().load()
    else:
        worker.away()
        if stage == "asked":
            worker.fetch()
    cancelled = [to_pool(CancelReservation(R1, 1))] if stage == "offered" else []
    assert worker.hear(AbortRequest(R1)) == [*cancelled, to_pool(DropRequest(R1, epoch_end(1)))]
    if stage == "asked":  # the grant was on its way
        late = CopyGranted(Handoff(FOUR, 3, (7,), LEASE, COPY), 1)
        assert worker.hear_pool(late) == [to_pool(LeasesReleased((LEASE,)))]
    if loading is not None:
        assert worker.do(BlocksLoaded(POOL, loading.loads, frozenset())) == [to_pool(LeasesReleased((LEASE,)))]
    assert (worker.num_free, worker.loads[-1].num_waiting) == (18, 1)
    assert RequestId("r1") not in worker.logic._requests.by_id
