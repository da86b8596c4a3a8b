"""Reservations of both classes that wait for blocks of the pool."""

from dataclasses import dataclass

from alignedserve.core.ids import RequestId
from kvpool.reservations import WaitingReservations
from kvpool.state import Reservation


@dataclass
class Pool:
    num_free: int

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self.num_free


def reservation(name: str, num_blocks: int, *, is_best_effort: bool = False) -> Reservation:
    return Reservation(RequestId(name), 1, num_blocks, "prefill-0", is_best_effort=is_best_effort)


def taken(waiting: WaitingReservations, pool: Pool) -> list[str]:
    names = []
    while (one := waiting.take()) is not None:
        pool.num_free -= one.num_blocks
        names.append(str(one.request_id))
    return names


def test_chat_goes_first_and_documents_leave_an_eighth() -> None:
    pool = Pool(40)
    waiting = WaitingReservations(80, pool.can_allocate)
    for name in ("document", "next"):
        waiting.add(reservation(name, 20, is_best_effort=True))
    waiting.add(reservation("chat", 5))
    assert taken(waiting, pool) == ["chat", "document"]  # 15 are left, 10 of them kept
    pool.num_free = 29
    assert taken(waiting, pool) == []
    pool.num_free = 30
    assert taken(waiting, pool) == ["next"]


def test_a_document_that_would_never_fit_beside_what_is_kept_has_all_blocks() -> None:
    pool = Pool(80)
    waiting = WaitingReservations(80, pool.can_allocate)
    waiting.add(reservation("document", 75, is_best_effort=True))
    assert taken(waiting, pool) == ["document"]


def test_no_document_takes_blocks_for_which_chat_waits() -> None:
    pool = Pool(30)
    waiting = WaitingReservations(80, pool.can_allocate)
    waiting.add(reservation("chat", 40))
    small = reservation("document", 1, is_best_effort=True)
    assert waiting.must_wait(small)
    waiting.add(small)
    assert taken(waiting, pool) == []
    waiting.cancel(RequestId("chat"), 1)
    assert taken(waiting, pool) == ["document"]
