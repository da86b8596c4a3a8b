"""An urgent request goes straight to a decode worker, and to the pool only as a copy."""

from alignedserve.core.ids import LeaseId, WorkerName
from alignedserve.messages.caches import BlocksReserved, BlocksTaken, ReservationRefused, ReserveBlocks
from alignedserve.messages.events import PeerDisconnected, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import CloseBuffer
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.prefill import PrefillHarness, offload, reserved, to_pool, token, written
from tests.support.samples import DECODE, POOL, R1, blocks, request

ASK_FOR_COPY = to_pool(ReserveBlocks(R1, 1, 1, is_copy=True, may_wait=False))
ASK_POOL = to_pool(ReserveBlocks(R1, 1, 1))
ROOM = BlocksReserved(R1, 1, LeaseId(1), 1, blocks(5))
OFFLOAD = offload(target=DECODE)
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


def lose_decode(made: PrefillHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.DECODE_WORKER, DECODE))


def lose_pool(made: PrefillHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.KV_POOL, POOL))


# --- taken


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


def test_refused_it_goes_to_the_pool() -> None:
    assert asking().hear(ReservationRefused(R1, 1), DECODE) == [ASK_POOL]


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


def test_the_pool_is_lost_and_what_goes_to_the_decode_worker_goes_on() -> None:
    made = asking()
    assert lose_pool(made) == []
    assert made.hear(ROOM, DECODE) == [OFFLOAD]


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
