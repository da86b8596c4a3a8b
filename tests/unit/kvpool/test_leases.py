"""The KV pool: leases that come back from workers, their ends, and the table that holds them."""

import random
import tracemalloc

import msgspec
import pytest

from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.core.lifecycle import epoch_end
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import (
    BlockCopy,
    BlocksWritten,
    CopyMissing,
    FetchCopy,
    LeasesReleased,
    LeasesReturned,
    ReservationRefused,
)
from alignedserve.messages.events import Send, Ticked
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import (
    CopyLost,
    DropRequest,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
)
from kvpool.lease_table import LeaseTable
from kvpool.state import Lease, LeaseStage, Reservation
from tests.harnesses.pool import (
    ARENA,
    BATCH,
    FORM,
    L1,
    L2,
    PoolHarness,
    freed,
    grants,
    handoff_of,
    leased,
    reserved,
    taken,
    written,
)
from tests.support.marks import each
from tests.support.samples import DECODE, PREFILL, R1, R2, R3, ROUTER, epoch, request

END = epoch_end(L1)


# --- releases and returns


def test_releasing_twice_keeps_once() -> None:
    made = PoolHarness()
    lease_id = made.grant("r1", 2).lease_id
    made.hear(DECODE, LeasesReleased((lease_id, lease_id)))
    made.hear(DECODE, LeasesReleased((lease_id,)))
    assert made.load == PoolLoad(2, 0, 0, 2)


@each("kind", [LeasesReleased, LeasesReturned])
def test_only_the_holder_can_release(kind: type[LeasesReleased | LeasesReturned]) -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    assert made.hear("decode-1", kind((handoff.lease_id,))) == []
    assert made.load == PoolLoad(num_blocks_used=1, num_pooled=0, num_reserved=0)


@each("kind", [LeasesReleased, LeasesReturned])
def test_only_granted_leases_can_be_released(kind: type[LeasesReleased | LeasesReturned]) -> None:
    made = PoolHarness()
    lease_id = made.pool("r1").lease_id
    made.reserve("r2", 1)
    assert made.hear(DECODE, kind((lease_id, LeaseId(2), LeaseId(77)))) == []
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=1, num_reserved=0)


def test_what_is_returned_is_indexed_again_with_the_next_step() -> None:
    made = PoolHarness()
    handoff = made.grant("r1", 2)
    pooled_again = Send(ROUTER, RequestPooled(R1, epoch(1, 3), 8, 2))
    assert made.hear(DECODE, LeasesReturned((handoff.lease_id,))) == [pooled_again]
    (second,) = grants(made.hear(ROUTER, FORM))
    assert second == msgspec.structs.replace(handoff, attempt=epoch(1, 4))


def test_a_request_may_be_pooled_again_while_its_old_lease_is_not_yet_released() -> None:
    made = PoolHarness()
    first = made.grant("r1")
    second = made.pool("r1", attempt=L2)
    assert made.hear(DECODE, LeasesReleased((first.lease_id,))) == [freed(0)]  # void since the second was written
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(second)]


def test_a_later_attempt_ends_what_is_pooled_when_it_reserves() -> None:
    made = PoolHarness()
    made.pool("r1", 2)
    assert made.reserve("r1", 2, attempt=L2) == [freed(0, 1), *leased("r1", 2, 0, 1, attempt=L2)]
    assert grants(made.hear(ROUTER, FORM)) == []


def test_a_reservation_behind_what_is_here_is_stale() -> None:
    made = PoolHarness()
    made.grant("r1")
    assert made.reserve("r1", 1) == [Send(PREFILL, ReservationRefused(R1, L1))]


# --- drops


def test_dropped_in_the_line() -> None:
    made = PoolHarness()
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    assert made.hear(ROUTER, DropRequest(R2, L1)) == []
    assert made.hear(ROUTER, DropRequest(R1, L1)) == [freed(*range(8))]


def test_an_earlier_step_dropped_leaves_the_later_ones_alone() -> None:
    made = PoolHarness()
    content = made.pool("r1", 2)
    assert made.hear(ROUTER, DropRequest(R1, content.attempt)) == []
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(content)]


@each("kind", [LeasesReleased, LeasesReturned])
def test_dropped_while_granted_it_is_freed_when_its_reader_lets_go(kind: type[LeasesReleased | LeasesReturned]) -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    assert made.hear(ROUTER, DropRequest(R1, END)) == []
    assert made.hear(DECODE, kind((handoff.lease_id,))) == [freed(0)]
    assert grants(made.hear(ROUTER, FORM)) == []


# --- leases that end by themselves


def test_a_lease_not_used_in_time_is_taken_back() -> None:
    made = PoolHarness()
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    made.now = 10.0
    assert made.do(Ticked()) == []
    made.now = 10.25
    assert made.do(Ticked()) == [freed(*range(8)), *leased("r2", 2, 0)]
    late = written("r1", reserved("r1", 1, *range(8)))
    assert made.hear(PREFILL, late) == [taken("r1", False)]


def test_what_is_pooled_granted_or_kept_has_no_deadline() -> None:
    made = PoolHarness()
    made.keep("r1")
    made.grant("r2")
    made.pool("r3")
    made.now = 1e6
    assert made.do(Ticked()) == []


def test_a_lost_prefill_worker_leaves_the_line_and_its_leases() -> None:
    made = PoolHarness()
    made.link("prefill-1", Role.PREFILL_WORKER)
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    made.reserve("r3", 1, peer="prefill-1")
    assert made.lose(PREFILL) == [freed(*range(8)), *leased("r3", 2, 0, to="prefill-1")]


def test_what_a_lost_prefill_worker_had_written_stays() -> None:
    made = PoolHarness()
    content = made.pool("r1")
    assert made.lose(PREFILL) == []
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(content)]


def test_grants_of_a_lost_decode_worker_are_kept_and_reported() -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    made.pool("r2")
    assert made.lose(DECODE) == [Send(ROUTER, CopyLost(R1, handoff.attempt, DECODE, BATCH))]
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=1, num_reserved=0, num_blocks_kept=1)
    assert made.link(DECODE, Role.DECODE_WORKER) == [Send(DECODE, ARENA)]
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, FORM))] == [R2]


def test_a_lost_router_is_waited_for() -> None:
    made = PoolHarness()
    made.pool("r1")
    assert made.lose(ROUTER) == []
    made.reserve("r2", 1)
    assert made.hear(PREFILL, written("r2", reserved("r2", 2, 1))) == [taken("r2", True)]


def test_a_router_that_comes_back_knows_nothing_so_all_but_grants_and_what_waits_go() -> None:
    made = PoolHarness()
    kept, lease_id = made.keep("r0"), made.grant("r1").lease_id
    made.pool("r2")
    made.reserve("r3", 5)
    made.reserve("r4", 6)
    made.lose(ROUTER)
    assert made.link(ROUTER, Role.ROUTER) == [
        Send(ROUTER, PoolRegistered(8, "digest", latest_attempt=epoch(1))),
        freed(0),
        freed(2),
        freed(3, 4, 5, 6, 7),
        *leased("r4", 5, 3, 4, 5, 6, 7, 2),  # its worker waits, and would do so for ever
    ]
    assert made.hear(PREFILL, written("r4", reserved("r4", 5, 3, 4, 5, 6, 7, 2)))[0] == taken("r4", True)
    assert made.hear(ROUTER, DropRequest(RequestId("r4"), END)) == [freed(3, 4, 5, 6, 7, 2)]
    assert made.hear(PREFILL, FetchCopy(kept.request.request_id, L2)) == [
        Send(PREFILL, CopyMissing(RequestId("r0"), L2))
    ]
    assert made.hear(DECODE, LeasesReleased((lease_id,))) == [freed(1)]
    assert made.load == PoolLoad(num_blocks_used=0, num_pooled=0, num_reserved=0)


def test_a_message_that_the_pool_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take SubmitRequest"):
        PoolHarness().hear(ROUTER, SubmitRequest(request(R3)))


REAL_TIME, BEST_EFFORT = RequestClass.REAL_TIME, RequestClass.BEST_EFFORT


def opened(
    table: LeaseTable, name: str, num_blocks: int = 1, arrival_s: float = 0.0, of: RequestClass = REAL_TIME
) -> Lease:
    """Open a lease that is written, but still where a new one is."""
    written = request(name, arrival_s=arrival_s, request_class=of)
    lease = table.open(Reservation(written.request_id, 1, num_blocks, PREFILL), 10.0)
    lease.content = BlocksWritten(lease.lease_id, BlockCopy(lease.lease_id, 4, ()), 1, written, (7,))
    return lease


def test_a_lease_on_blocks_that_are_not_free_is_a_broken_invariant() -> None:
    table = LeaseTable(8, first_lease=1)
    with pytest.raises(AssertionError, match="not free"):
        opened(table, "r1", 9)


def test_copies_that_ended_take_no_memory_while_there_is_room() -> None:
    table = LeaseTable(1, first_lease=1)
    tracemalloc.start()
    try:
        for number in range(4000):
            lease = opened(table, f"r{number}")
            table.move(lease, LeaseStage.KEPT)
            table.close(lease)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_random_histories_keep_the_counts_and_the_order() -> None:
    rng = random.Random(7)
    table = LeaseTable(40, first_lease=1)
    for number in range(3000):
        num_blocks = rng.randrange(1, 5)
        leases = [lease for lease in table.all() if lease.stage is LeaseStage.KEPT]
        right = sorted(leases, key=lambda lease: lease.reclaim_key)
        if table.can_allocate(num_blocks):
            evicted = table.copies_to_evict(num_blocks)
            assert evicted == right[: len(evicted)]
            for lease in evicted:
                table.close(lease)
            opened(table, f"r{number}", num_blocks, float(rng.randrange(20)), rng.choice(list(RequestClass)))
        for lease in rng.sample(table.all(), min(3, len(table.all()))):
            if rng.random() < 0.3:
                table.close(lease)
            elif lease.stage is not LeaseStage.KEPT:
                table.move(lease, LeaseStage.KEPT)
            else:
                table.move(lease, LeaseStage.GRANTED)
        assert table.num_used == sum(len(lease.block_ids) for lease in table.all())
        assert table.num_kept == sum(len(lease.block_ids) for lease in table.all() if lease.stage is LeaseStage.KEPT)
