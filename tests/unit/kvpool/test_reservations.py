"""Reservations of both classes that wait for blocks of the pool."""

from dataclasses import dataclass

from alignedserve.core.ids import RequestId
from kvpool.lease_table import WaitingReservations
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


def test_documents_have_their_floor_while_chats_never_cease_to_wait() -> None:
    """They had no block in an overload, for as long as it lasted."""
    pool = Pool(0)
    waiting = WaitingReservations(80, pool.can_allocate, floor=0.05)
    for number in range(50):
        waiting.add(reservation(f"document{number}", 7, is_best_effort=True))
    got: list[str] = []
    for number in range(400):
        waiting.add(reservation(f"chat{number}", 5))
        pool.num_free += 5
        got += taken(waiting, pool)
    assert sum(name.startswith("document") for name in got) == 14  # 98 of 2 000 blocks
    assert got.index("document0") == 27


def test_a_large_document_holds_up_no_chat_while_its_blocks_are_not_free() -> None:
    pool = Pool(5)
    waiting = WaitingReservations(80, pool.can_allocate, floor=0.5)
    waiting.add(reservation("document", 11, is_best_effort=True))
    for number in range(4):
        waiting.add(reservation(f"chat{number}", 5))
    assert taken(waiting, pool) == ["chat0"]
    pool.num_free = 10
    assert taken(waiting, pool) == ["chat1", "chat2"]
    pool.num_free = 10
    assert taken(waiting, pool) == ["chat3"]  # it is owed eleven, and ten are free
    waiting.add(reservation("chat4", 5))
    pool.num_free = 11
    assert taken(waiting, pool) == ["document"]
