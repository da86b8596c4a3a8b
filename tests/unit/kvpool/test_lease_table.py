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
    book: LeaseTable, name: str, num_blocks: int = 1, arrival_s: float = 0.0, of: RequestClass = REAL_TIME
) -> Lease:
    """A lease that is written, but still where a new one is."""
    written = request(name, arrival_s=arrival_s, request_class=of)
    lease = book.open(Reservation(written.request_id, 1, num_blocks, PREFILL), 10.0)
    lease.content = BlocksWritten(lease.lease_id, BlockCopy(lease.lease_id, 4, ()), 1, written, (7,))
    return lease


def kept(
    book: LeaseTable, name: str, num_blocks: int = 1, arrival_s: float = 0.0, of: RequestClass = REAL_TIME
) -> Lease:
    lease = opened(book, name, num_blocks, arrival_s, of)
    book.move(lease, LeaseStage.KEPT)
    return lease


def counts(book: LeaseTable) -> tuple[int, int]:
    return book.num_used, book.num_kept


# --- counting


def test_leases_are_numbered_from_the_first_one_on() -> None:
    book = LeaseTable(8, first_lease=40)
    assert [opened(book, name).lease_id for name in ("r1", "r2")] == [40, 41]


def test_a_lease_is_found_by_number_and_by_request_until_it_ends() -> None:
    book = LeaseTable(8, first_lease=1)
    first, second = opened(book, "r1", 2), opened(book, "r1")
    assert book.of_request(R1) == [first, second]
    assert book.end(first) == blocks(0, 1)
    assert book.get(first.lease_id) is None
    assert book.of_request(R1) == book.all() == [second]
    book.end(second)
    assert book.of_request(R1) == book.all() == []


@pytest.mark.parametrize("stage", [stage for stage in LeaseStage if stage is not LeaseStage.RESERVED])
def test_what_is_being_written_is_listed_until_it_moves_on(stage: LeaseStage) -> None:
    book = LeaseTable(8, first_lease=1)
    lease = opened(book, "r1")
    assert book.reserved() == [lease]
    book.move(lease, stage)
    assert book.reserved() == []


def test_kept_blocks_are_used_and_counted_apart() -> None:
    book = LeaseTable(8, first_lease=1)
    lease = opened(book, "r1", 3)
    assert counts(book) == (3, 0)
    book.move(lease, LeaseStage.KEPT)
    assert counts(book) == (3, 3)
    book.move(lease, LeaseStage.GRANTED)
    assert counts(book) == (3, 0)
    book.move(lease, LeaseStage.KEPT)
    book.end(lease)
    assert counts(book) == (0, 0)


def test_room_is_what_is_free_or_kept() -> None:
    book = LeaseTable(8, first_lease=1)
    opened(book, "r1", 3)
    kept(book, "r2", 2)
    assert book.can_have(5)
    assert not book.can_have(6)


def test_a_lease_on_blocks_that_are_not_free_is_a_broken_invariant() -> None:
    book = LeaseTable(8, first_lease=1)
    with pytest.raises(AssertionError, match="not free"):
        opened(book, "r1", 9)


# --- giving up copies


def give_up(book: LeaseTable, num_blocks: int) -> list[LeaseId]:
    leases = book.copies_to_give_up(num_blocks)
    for lease in leases:
        book.end(lease)
    return [lease.lease_id for lease in leases]


def test_best_effort_goes_first_then_the_youngest_then_the_first_to_come() -> None:
    book = LeaseTable(6, first_lease=1)
    kept(book, "r1", arrival_s=1.0)
    kept(book, "r2", arrival_s=2.0, of=BEST_EFFORT)
    kept(book, "r3", arrival_s=3.0)
    kept(book, "r4", arrival_s=4.0, of=BEST_EFFORT)
    kept(book, "r5", arrival_s=3.0)
    kept(book, "r6", arrival_s=0.0, of=BEST_EFFORT)
    assert give_up(book, 6) == [4, 2, 6, 3, 5, 1]


def test_no_more_is_given_up_than_is_needed() -> None:
    book = LeaseTable(8, first_lease=1)
    for number in range(3):
        kept(book, f"r{number}", 2, arrival_s=float(number))
    assert give_up(book, 2) == []
    assert give_up(book, 3) == [3]
    assert give_up(book, 4) == []


def test_a_copy_that_is_read_again_is_passed_over() -> None:
    book = LeaseTable(2, first_lease=1)
    young = kept(book, "r1", arrival_s=1.0)
    kept(book, "r2", arrival_s=0.0)
    book.move(young, LeaseStage.GRANTED)
    assert give_up(book, 1) == [2]


def test_a_copy_kept_again_is_given_up_once() -> None:
    book = LeaseTable(3, first_lease=1)
    young = kept(book, "r1", arrival_s=1.0)
    for _ in range(3):
        book.move(young, LeaseStage.GRANTED)
        book.move(young, LeaseStage.KEPT)
    kept(book, "r2", arrival_s=0.0)
    assert give_up(book, 3) == [1, 2]
    assert counts(book) == (0, 0)


def test_a_copy_that_was_passed_over_is_found_when_it_is_kept_again() -> None:
    book = LeaseTable(2, first_lease=1)
    young = kept(book, "r1", arrival_s=1.0)
    kept(book, "r2", arrival_s=0.0)
    book.move(young, LeaseStage.GRANTED)
    give_up(book, 1)
    book.move(young, LeaseStage.KEPT)
    assert give_up(book, 2) == [1]


def test_copies_that_ended_take_no_memory_while_there_is_room() -> None:
    book = LeaseTable(1, first_lease=1)
    tracemalloc.start()
    try:
        for number in range(4000):
            book.end(kept(book, f"r{number}"))
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_random_histories_keep_the_counts_and_the_order() -> None:
    rng = random.Random(7)
    book = LeaseTable(40, first_lease=1)
    for number in range(3000):
        num_blocks = rng.randrange(1, 5)
        leases = [lease for lease in book.all() if lease.stage is LeaseStage.KEPT]
        right = sorted(leases, key=lambda lease: lease.reclaim_key)
        if book.can_have(num_blocks):
            given_up = book.copies_to_give_up(num_blocks)
            assert given_up == right[: len(given_up)]
            for lease in given_up:
                book.end(lease)
            opened(book, f"r{number}", num_blocks, float(rng.randrange(20)), rng.choice(list(RequestClass)))
        for lease in rng.sample(book.all(), min(3, len(book.all()))):
            if rng.random() < 0.3:
                book.end(lease)
            elif lease.stage is not LeaseStage.KEPT:
                book.move(lease, LeaseStage.KEPT)
            else:
                book.move(lease, LeaseStage.GRANTED)
        assert book.num_used == sum(len(lease.block_ids) for lease in book.all())
        assert book.num_kept == sum(len(lease.block_ids) for lease in book.all() if lease.stage is LeaseStage.KEPT)
