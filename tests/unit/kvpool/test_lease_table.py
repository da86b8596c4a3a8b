"""The pool's books: blocks, leases by stage, and the order in which kept copies are given up."""

import random
import tracemalloc

import pytest

from alignedserve.core.ids import LeaseId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import BlockCopy, BlocksWritten
from kvpool.lease_table import LeaseTable
from kvpool.state import Lease, LeaseStage, Reservation
from tests.support.samples import PREFILL, R1, blocks, request

REAL_TIME, BEST_EFFORT = RequestClass.REAL_TIME, RequestClass.BEST_EFFORT


def opened(
    table: LeaseTable, name: str, num_blocks: int = 1, arrival_s: float = 0.0, of: RequestClass = REAL_TIME
) -> Lease:
    """A lease that is written, but still where a new one is."""
    written = request(name, arrival_s=arrival_s, request_class=of)
    lease = table.open(Reservation(written.request_id, 1, num_blocks, PREFILL), 10.0)
    lease.content = BlocksWritten(lease.lease_id, BlockCopy(lease.lease_id, 4, ()), 1, written, (7,))
    return lease


def kept(
    table: LeaseTable, name: str, num_blocks: int = 1, arrival_s: float = 0.0, of: RequestClass = REAL_TIME
) -> Lease:
    lease = opened(table, name, num_blocks, arrival_s, of)
    table.move(lease, LeaseStage.KEPT)
    return lease


def counts(table: LeaseTable) -> tuple[int, int]:
    return table.num_used, table.num_kept


# --- counting


def test_leases_are_numbered_from_the_first_one_on() -> None:
    table = LeaseTable(8, first_lease=40)
    assert [opened(table, name).lease_id for name in ("r1", "r2")] == [40, 41]


def test_a_lease_is_found_by_number_and_by_request_until_it_ends() -> None:
    table = LeaseTable(8, first_lease=1)
    first, second = opened(table, "r1", 2), opened(table, "r1")
    assert table.of_request(R1) == [first, second]
    assert table.close(first) == blocks(0, 1)
    assert table.get(first.lease_id) is None
    assert table.of_request(R1) == table.all() == [second]
    table.close(second)
    assert table.of_request(R1) == table.all() == []


@pytest.mark.parametrize("stage", [stage for stage in LeaseStage if stage is not LeaseStage.RESERVED])
def test_what_is_being_written_is_listed_until_it_moves_on(stage: LeaseStage) -> None:
    table = LeaseTable(8, first_lease=1)
    lease = opened(table, "r1")
    assert table.reserved() == [lease]
    table.move(lease, stage)
    assert table.reserved() == []


def test_kept_blocks_are_used_and_counted_apart() -> None:
    table = LeaseTable(8, first_lease=1)
    lease = opened(table, "r1", 3)
    assert counts(table) == (3, 0)
    table.move(lease, LeaseStage.KEPT)
    assert counts(table) == (3, 3)
    table.move(lease, LeaseStage.GRANTED)
    assert counts(table) == (3, 0)
    table.move(lease, LeaseStage.KEPT)
    table.close(lease)
    assert counts(table) == (0, 0)


def test_room_is_what_is_free_or_kept() -> None:
    table = LeaseTable(8, first_lease=1)
    opened(table, "r1", 3)
    kept(table, "r2", 2)
    assert table.can_allocate(5)
    assert not table.can_allocate(6)


def test_a_lease_on_blocks_that_are_not_free_is_a_broken_invariant() -> None:
    table = LeaseTable(8, first_lease=1)
    with pytest.raises(AssertionError, match="not free"):
        opened(table, "r1", 9)


# --- giving up copies


def evict(table: LeaseTable, num_blocks: int) -> list[LeaseId]:
    leases = table.copies_to_evict(num_blocks)
    for lease in leases:
        table.close(lease)
    return [lease.lease_id for lease in leases]


def test_best_effort_goes_first_then_the_youngest_then_the_first_to_come() -> None:
    table = LeaseTable(6, first_lease=1)
    kept(table, "r1", arrival_s=1.0)
    kept(table, "r2", arrival_s=2.0, of=BEST_EFFORT)
    kept(table, "r3", arrival_s=3.0)
    kept(table, "r4", arrival_s=4.0, of=BEST_EFFORT)
    kept(table, "r5", arrival_s=3.0)
    kept(table, "r6", arrival_s=0.0, of=BEST_EFFORT)
    assert evict(table, 6) == [4, 2, 6, 3, 5, 1]


def test_no_more_is_given_up_than_is_needed() -> None:
    table = LeaseTable(8, first_lease=1)
    for number in range(3):
        kept(table, f"r{number}", 2, arrival_s=float(number))
    assert evict(table, 2) == []
    assert evict(table, 3) == [3]
    assert evict(table, 4) == []


def test_a_copy_that_is_read_again_is_passed_over() -> None:
    table = LeaseTable(2, first_lease=1)
    young = kept(table, "r1", arrival_s=1.0)
    kept(table, "r2", arrival_s=0.0)
    table.move(young, LeaseStage.GRANTED)
    assert evict(table, 1) == [2]


def test_a_copy_kept_again_is_given_up_once() -> None:
    table = LeaseTable(3, first_lease=1)
    young = kept(table, "r1", arrival_s=1.0)
    for _ in range(3):
        table.move(young, LeaseStage.GRANTED)
        table.move(young, LeaseStage.KEPT)
    kept(table, "r2", arrival_s=0.0)
    assert evict(table, 3) == [1, 2]
    assert counts(table) == (0, 0)


def test_a_copy_that_was_passed_over_is_found_when_it_is_kept_again() -> None:
    table = LeaseTable(2, first_lease=1)
    young = kept(table, "r1", arrival_s=1.0)
    kept(table, "r2", arrival_s=0.0)
    table.move(young, LeaseStage.GRANTED)
    evict(table, 1)
    table.move(young, LeaseStage.KEPT)
    assert evict(table, 2) == [1]


def test_copies_that_ended_take_no_memory_while_there_is_room() -> None:
    table = LeaseTable(1, first_lease=1)
    tracemalloc.start()
    try:
        for number in range(4000):
            table.close(kept(table, f"r{number}"))
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
