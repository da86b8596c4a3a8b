"""The KV pool's copies of what workers have: kept while blocks are free, found again, dropped at the end."""

from typing import Any

from alignedserve.core.lifecycle import epoch_end
from alignedserve.core.request import Request, RequestClass
from alignedserve.messages.caches import (
    BlocksTaken,
    CopyGranted,
    CopyMissing,
    FetchCopy,
    LeasesReleased,
    ReservationRefused,
)
from alignedserve.messages.events import Send
from alignedserve.messages.pools import CopyKept, CopyLost, DropRequest, PoolLoad
from tests.harnesses.pool import FORM, L1, L2, PoolHarness, freed, grants, leased, reserved, taken, written
from tests.support.marks import each
from tests.support.samples import PREFILL, R1, ROUTER, epoch, request

END = epoch_end(L1)


def chat(name: str, arrival_s: float = 0.0, **changes: Any) -> Request:
    return request(name, arrival_s=arrival_s, **changes)


def document(name: str, arrival_s: float = 0.0) -> Request:
    return chat(name, arrival_s, request_class=RequestClass.BEST_EFFORT)


# --- kept for as long as blocks are free


def test_copies_go_best_effort_first_then_the_youngest_and_the_oldest_person_last() -> None:
    made = PoolHarness()
    for one in (chat("r1", 1.0), document("r2", 2.0), chat("r3", 3.0), document("r4", 4.0)):
        made.keep(one)
    made.reserve("r5", 4)
    assert [made.reserve(name, 1)[0] for name in ("r6", "r7", "r8", "r9")] == [freed(3), freed(1), freed(2), freed(0)]


def test_what_is_read_is_not_given_up() -> None:
    made = PoolHarness()
    handoff = made.keep(chat("r1"), 1)
    made.hear(PREFILL, FetchCopy(R1, L2))
    made.reserve("r2", 7)
    assert made.reserve("r3", 1) == []
    released = made.hear(PREFILL, LeasesReleased((handoff.lease_id,)))
    assert released == [freed(0), *leased("r3", 3, 0)]


def test_a_copy_is_evicted_for_one_that_does_not_wait() -> None:
    made = PoolHarness()
    made.keep("r1", 8)
    assert made.reserve("r2", 1, may_wait=False) == [freed(*range(8)), *leased("r2", 2, 0)]


def test_a_copy_stays_until_a_later_attempt_has_been_written() -> None:
    made = PoolHarness()
    made.keep("r1")
    assert made.reserve("r1", 2, attempt=L2) == leased("r1", 2, 1, 2, attempt=L2)
    written_again = made.hear(PREFILL, written("r1", reserved("r1", 2, 1, 2, attempt=L2)))
    assert written_again[:2] == [taken("r1", True, L2), freed(0)]


# --- beside what went straight to a decode worker


def test_a_copy_beside_a_decode_worker_is_kept_not_indexed() -> None:
    made = PoolHarness()
    assert made.reserve("r1", 2, is_copy=True, may_wait=False) == leased("r1", 1, 0, 1)
    assert made.hear(PREFILL, written("r1", reserved("r1", 1, 0, 1))) == [
        Send(PREFILL, BlocksTaken(R1, L1, is_accepted=True)),
        Send(ROUTER, CopyKept(R1, L1)),
    ]
    assert grants(made.hear(ROUTER, FORM)) == []
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=0, num_reserved=0, num_blocks_kept=2)


def test_a_copy_beside_a_decode_worker_is_evicted_for_the_next_in_line() -> None:
    made = PoolHarness()
    made.reserve("r1", 8, is_copy=True, may_wait=False)
    made.reserve("r2", 1)
    commands = made.hear(PREFILL, written("r1", reserved("r1", 1, *range(8))))
    assert commands[2:] == [freed(*range(8)), *leased("r2", 2, 0)]


def test_a_copy_beside_a_decode_worker_replaces_the_one_of_an_earlier_attempt() -> None:
    made = PoolHarness()
    made.keep("r1")
    made.pool("r1", attempt=L2, is_copy=True)
    assert made.load == PoolLoad(num_blocks_used=1, num_pooled=0, num_reserved=0, num_blocks_kept=1)
    assert made.hear(PREFILL, FetchCopy(R1, L1)) == [Send(PREFILL, CopyMissing(R1, L1))]


def test_no_copy_is_taken_of_what_is_stale() -> None:
    made = PoolHarness()
    made.pool("r1", attempt=L2)
    refused = made.reserve("r1", 1, attempt=L1, is_copy=True, may_wait=False)
    assert refused == [Send(PREFILL, ReservationRefused(R1, L1))]


# --- found again


def test_a_copy_is_granted_to_the_worker_that_recomputes_the_request() -> None:
    made = PoolHarness()
    handoff = made.keep("r1", 2)
    assert made.hear(PREFILL, FetchCopy(R1, L2)) == [Send(PREFILL, CopyGranted(handoff, L2))]
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=0, num_reserved=0, num_blocks_kept=0)
    assert made.hear(PREFILL, LeasesReleased((handoff.lease_id,))) == []
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=0, num_reserved=0, num_blocks_kept=2)


@each("name", ["r1", "r2", "r3"])
def test_what_is_not_kept_is_missing(name: str) -> None:
    made = PoolHarness()
    made.grant("r1")
    made.pool("r2")
    asked = FetchCopy(request(name).request_id, L2)
    assert made.hear(PREFILL, asked) == [Send(PREFILL, CopyMissing(asked.request_id, L2))]


def test_a_lost_prefill_worker_leaves_the_copy_that_it_read() -> None:
    made = PoolHarness()
    handoff = made.keep("r1")
    made.hear(PREFILL, FetchCopy(R1, L2))
    assert made.lose(PREFILL) == [Send(ROUTER, CopyLost(R1, handoff.attempt, PREFILL))]
    assert made.hear("prefill-1", FetchCopy(R1, epoch(3))) == [Send("prefill-1", CopyGranted(handoff, epoch(3)))]


# --- dropped


def test_the_end_of_an_earlier_epoch_leaves_the_copy_of_a_later_one() -> None:
    made = PoolHarness()
    handoff = made.keep("r1", attempt=L2)
    assert made.hear(ROUTER, DropRequest(R1, END)) == []
    assert made.hear(PREFILL, FetchCopy(R1, epoch(3))) == [Send(PREFILL, CopyGranted(handoff, epoch(3)))]


def test_a_copy_of_a_request_that_is_over_is_freed_when_its_reader_lets_go() -> None:
    made = PoolHarness()
    handoff = made.keep("r1")
    made.hear(PREFILL, FetchCopy(R1, L2))
    assert made.hear(ROUTER, DropRequest(R1, END)) == []
    assert made.hear(PREFILL, LeasesReleased((handoff.lease_id,))) == [freed(0)]
