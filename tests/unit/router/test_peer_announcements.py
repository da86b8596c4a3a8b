"""Prefill workers that the router tells decode workers to keep links to."""

from alignedserve.core.ids import WorkerName
from alignedserve.messages.events import Send
from alignedserve.messages.pools import BatchFormed, FormBatch, PoolRegistered, RequestPooled
from alignedserve.messages.workers import (
    PeerNeeded,
    PeersChanged,
    PrefillCompleted,
    RegistrationRefused,
    WorkerLoad,
)
from tests.harnesses.router import ASKED, BATCH, DISPATCHED, POOLED, RouterHarness
from tests.support.samples import DECODE, POOL, PREFILL, R1, request, worker

PREFILLER = worker(can_prefill=True, can_decode=False)
FAR_PREFILLER = worker(can_prefill=True, can_decode=False, pool_name="pool-1")


def names(*given: str) -> tuple[WorkerName, ...]:
    return tuple(map(WorkerName, given))


def test_a_decode_worker_is_told_the_prefill_workers_of_its_node_when_it_registers() -> None:
    router = RouterHarness()
    assert router.hear(PREFILL, PREFILLER) == []
    assert router.hear("prefill-1", FAR_PREFILLER) == []
    assert router.hear(DECODE, worker()) == [Send(DECODE, PeersChanged(names(PREFILL), is_complete=True))]


def test_a_prefill_worker_that_joins_is_announced_to_the_decode_workers_of_its_node() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    router.hear("decode-1", worker(pool_name="pool-1"))
    assert router.hear(PREFILL, PREFILLER) == [Send(DECODE, PeersChanged(names(PREFILL)))]


def test_one_that_is_lost_is_not_to_be_dialled() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    router.hear(PREFILL, PREFILLER)
    gone = PeersChanged((), left=names(PREFILL))
    assert router.lose(PREFILL) == [Send(DECODE, gone)]
    assert router.lose(PREFILL) == []


def test_a_lost_decode_worker_concerns_no_other() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    router.hear("decode-1", worker())
    assert router.lose(DECODE) == []


def test_colocated_workers_hand_nothing_over() -> None:
    router = RouterHarness()
    assert router.hear(DECODE, worker(can_prefill=True)) == []
    assert router.hear("decode-1", worker(can_prefill=True)) == []
    assert router.lose(DECODE) == []


def test_a_worker_that_is_refused_is_not_announced() -> None:
    router = RouterHarness()
    router.hear(DECODE, worker())
    (refused,) = router.hear(PREFILL, worker(can_prefill=True, can_decode=False, layout_digest="other"))
    assert isinstance(refused.message, RegistrationRefused)


def test_a_pool_is_named_to_the_worker_of_another_node_that_is_about_to_get_its_batch() -> None:
    router = RouterHarness()
    for pool in (POOL, "pool-1"):
        assert router.hear(pool, PoolRegistered(100)) == []
    router.hear(PREFILL, PREFILLER)
    router.hear(DECODE, worker(pool_name="pool-1"))
    router.submit(request())
    router.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    asked = [Send(DECODE, PeerNeeded(WorkerName(POOL))), Send(POOL, FormBatch(BATCH, ASKED, 20, 1, 1))]
    assert router.hear(POOL, RequestPooled(R1, POOLED, 4, 1)) == asked
    assert router.hear(POOL, BatchFormed(BATCH, ASKED, ())) == []  # there is no link yet
    again = router.hear(DECODE, WorkerLoad())  # there is
    assert [command.peer for command in again] == [DECODE, POOL]


def test_a_pool_of_its_own_node_is_not_named_to_a_worker() -> None:
    router = RouterHarness()
    router.hear(POOL, PoolRegistered(100))
    router.hear(PREFILL, PREFILLER)
    router.hear(DECODE, worker())
    router.submit(request())
    router.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    assert [command.peer for command in router.hear(POOL, RequestPooled(R1, POOLED, 4, 1))] == [POOL]
