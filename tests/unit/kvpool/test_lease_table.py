"""The table of leases: memory, broken invariants and random histories; the pool's own tests say the rest."""

import random
import tracemalloc

import pytest

from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import BlockCopy, BlocksWritten
from kvpool.lease_table import LeaseTable
from kvpool.state import Lease, LeaseStage, Reservation
from tests.support.samples import PREFILL, request

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
