"""An urgent request goes straight to a decode worker, and to the pool only as a copy."""

from collections.abc import Callable

from alignedserve.core.ids import LeaseId, WorkerName
from alignedserve.messages.caches import (
    BlocksReserved,
    BlocksTaken,
    CancelReservation,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import PeerDisconnected, Send
from alignedserve.messages.gateways import AbortRequest, TokenDelta
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import CloseBuffer
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillCompleted, RequestPreempted
from prefill_worker.logic import PrefillCommand
from tests.harnesses.prefill import PrefillHarness, emitted, offload, reserved, to_pool, to_router, token, written
from tests.support.marks import each
from tests.support.samples import DECODE, POOL, R1, blocks, request

ASK = Send(DECODE, ReserveBlocks(R1, 1, 1))
ASK_FOR_COPY = to_pool(ReserveBlocks(R1, 1, 1, is_copy=True, may_wait=False))
ASK_POOL = to_pool(ReserveBlocks(R1, 1, 1))
ROOM = BlocksReserved(R1, 1, LeaseId(1), 1, blocks(5))
OFFLOAD = offload(target=DECODE)
CANCEL_THERE = Send(DECODE, CancelReservation(R1, 1))
CLOSED = CloseBuffer(DECODE)


def urgent(*, has_buffer: bool = True, has_pool: bool = True) -> PrefillHarness:
    """r1 is in its only iteration."""
    made = PrefillHarness(has_pool=has_pool)
    if has_buffer:
        made.link()
    made.begin(request(), bypass_to=WorkerName(DECODE))
    return made


def asking() -> PrefillHarness:
    made = urgent()
    made.sampled(token(7))
    return made


def copying() -> PrefillHarness:
    made = asking()
    made.hear(ROOM, DECODE)
    return made


def offered() -> PrefillHarness:
    made = copying()
    made.copied(OFFLOAD)
    return made


def taken() -> PrefillHarness:
    """The decode worker has it, and the pool was asked for room for a copy."""
    made = offered()
    made.hear(BlocksTaken(R1, 1, is_accepted=True), DECODE)
    return made


def lose_decode(made: PrefillHarness) -> list[PrefillCommand]:
    return made.do(PeerDisconnected(Role.DECODE_WORKER, DECODE))


def lose_pool(made: PrefillHarness) -> list[PrefillCommand]:
    return made.do(PeerDisconnected(Role.KV_POOL, POOL))


# --- taken


def test_room_is_asked_for_in_the_decode_workers_buffer() -> None:
    expected = [emitted(TokenDelta(R1, 0, (7,))), to_router(PrefillCompleted(R1, 1, 4)), ASK]
    assert urgent().sampled(token(7)) == expected


def test_it_is_copied_into_the_buffer() -> None:
    assert asking().hear(ROOM, DECODE) == [OFFLOAD]


def test_it_is_offered_to_the_decode_worker() -> None:
    assert copying().copied(OFFLOAD) == [Send(DECODE, written())]


def test_of_what_was_taken_the_pool_is_offered_a_copy() -> None:
    assert offered().hear(BlocksTaken(R1, 1, is_accepted=True), DECODE) == [ASK_FOR_COPY]


def test_the_copy_is_written_and_then_forgotten() -> None:
    made = taken()
    assert made.hear(reserved(2), POOL) == [offload(2)]
    assert made.copied(offload(2)) == [to_pool(written(2))]
    assert made.hear(BlocksTaken(R1, 1, is_accepted=True), POOL) == []
    assert made.free_blocks() == 12


def test_a_pool_without_room_keeps_no_copy() -> None:
    made = taken()
    assert made.hear(ReservationRefused(R1, 1), POOL) == []
    assert made.free_blocks() == 12


def test_without_a_pool_there_is_no_copy() -> None:
    made = urgent(has_pool=False)
    made.sampled(token(7))
    made.hear(ROOM, DECODE)
    made.copied(OFFLOAD)
    assert made.hear(BlocksTaken(R1, 1, is_accepted=True), DECODE) == []
    assert made.free_blocks() == 12


# --- not taken


def test_without_a_buffer_there_it_goes_to_the_pool() -> None:
    assert urgent(has_buffer=False).sampled(token(7))[-1] == ASK_POOL


def test_refused_it_goes_to_the_pool() -> None:
    assert asking().hear(ReservationRefused(R1, 1), DECODE) == [ASK_POOL]


def test_not_taken_it_goes_to_the_pool() -> None:
    assert offered().hear(BlocksTaken(R1, 1, is_accepted=False), DECODE) == [ASK_POOL]


def test_what_could_not_be_written_is_tried_again() -> None:
    assert copying().copied(OFFLOAD, None) == [ASK]


@each("stale", [reserved(), BlocksTaken(R1, 1, True), ReservationRefused(R1, 1)], ids=repr)
def test_the_pools_word_is_not_the_decode_workers(stale: Message) -> None:
    made = asking()
    assert made.hear(stale, POOL) == []
    assert made.hear(ROOM, DECODE) == [OFFLOAD]


# --- losses and aborts


def test_the_decode_worker_is_lost_before_it_is_computed() -> None:
    made = urgent()
    lose_decode(made)
    assert made.sampled(token(7))[-1] == ASK_POOL


def test_the_decode_worker_is_lost_while_it_is_asked() -> None:
    assert lose_decode(asking()) == [CLOSED, ASK_POOL]


def test_the_decode_worker_is_lost_while_it_is_copied() -> None:
    made = copying()
    assert lose_decode(made) == [CLOSED]
    assert made.copied(OFFLOAD, None) == [ASK_POOL]


def test_the_decode_worker_is_lost_and_back_while_it_is_copied() -> None:
    made = copying()
    lose_decode(made)
    made.link()
    assert made.copied(OFFLOAD) == [ASK]


def test_the_decode_worker_is_lost_while_it_is_offered_and_may_have_it() -> None:
    made = offered()
    assert lose_decode(made) == [CLOSED, to_router(RequestPreempted(R1, 1, (7,)))]
    assert made.free_blocks() == 12


def test_the_decode_worker_is_lost_with_what_it_took_and_the_copy_is_still_made() -> None:
    made = taken()
    assert lose_decode(made) == [CLOSED]
    assert made.hear(reserved(2), POOL) == [offload(2)]


def test_the_pool_is_lost_and_what_goes_to_the_decode_worker_goes_on() -> None:
    made = asking()
    assert lose_pool(made) == []
    assert made.hear(ROOM, DECODE) == [OFFLOAD]


def test_the_pool_is_lost_while_it_is_asked_for_room_for_a_copy() -> None:
    made = taken()
    assert lose_pool(made) == []
    assert made.free_blocks() == 12


def test_the_pool_is_lost_while_the_copy_is_made() -> None:
    made = taken()
    made.hear(reserved(2), POOL)
    assert lose_pool(made) == []
    assert made.copied(offload(2), None) == []
    assert made.free_blocks() == 12


def test_the_pool_is_lost_while_the_copy_is_offered() -> None:
    made = taken()
    made.hear(reserved(2), POOL)
    made.copied(offload(2))
    assert lose_pool(made) == []  # it is optional
    assert made.free_blocks() == 12


@each("stage", [asking, offered])
def test_aborted_the_reservation_is_cancelled_where_it_is(stage: Callable[[], PrefillHarness]) -> None:
    made = stage()
    assert made.hear(AbortRequest(R1)) == [CANCEL_THERE]
    assert made.free_blocks() == 12


def test_aborted_while_it_is_copied() -> None:
    made = copying()
    assert made.hear(AbortRequest(R1)) == []
    assert made.copied(OFFLOAD) == [CANCEL_THERE]


def test_aborted_when_it_is_taken_no_copy_is_made() -> None:
    made = taken()
    assert made.hear(AbortRequest(R1)) == [to_pool(CancelReservation(R1, 1))]
    assert made.free_blocks() == 12
