"""Decode workers' buffers in a prefill worker's memory: one copy of each at a time, in order."""

from collections.abc import Callable

from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.messages.caches import (
    BlockCopy,
    BlockRun,
    BlocksPrefetched,
    BlocksReserved,
    BlocksTaken,
    CancelPrefetch,
    CancelReservation,
    PrefetchBlocks,
    RequestReturned,
    ReservationRefused,
    ReserveBlocks,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksRelayed, BufferOpened, CloseBuffer, MapArena, OpenBuffer, RelayBlocks
from alignedserve.messages.wire import Message
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.prefill import ARENA, BUFFER, RUNS, PrefillHarness, to_pool
from tests.support.marks import each
from tests.support.samples import DECODE, POOL, R1, R2, blocks, request

IN_POOL, IN_BUFFER = BlockCopy(40, 7, (BlockRun(2, 2, 1),)), BlockCopy(9, 7, (BlockRun(0, 2, 2),))
OTHER = "decode-1"
RETURN = ReturnRequest(request(), 3, (7, 8), IN_BUFFER)
RESERVE = to_pool(ReserveBlocks(R1, 3, 2, may_wait=False))
ROOM = BlocksReserved(R1, 3, LeaseId(50), 50, blocks(4, 6))


def prefetch(name: RequestId = R1, generation: int = 1) -> PrefetchBlocks:
    return PrefetchBlocks(name, 3, IN_POOL, blocks(generation), generation)


def relay(name: RequestId = R1, generation: int = 1, peer: str = DECODE) -> RelayBlocks:
    """Return a relay from the pool into a buffer."""
    return RelayBlocks(name, 3, POOL, IN_POOL, peer, blocks(generation), generation)


BACK = RelayBlocks(R1, 3, DECODE, IN_BUFFER, POOL, blocks(4, 6), 50, LeaseId(50))


def to_decode(message: Message, peer: str = DECODE) -> Send:
    return Send(peer, message)


def there(name: RequestId = R1, generation: int = 1) -> Send:
    return to_decode(BlocksPrefetched(name, generation, BlockCopy(generation, 7, RUNS)))


def not_there(name: RequestId = R1, generation: int = 1, *, is_refused: bool = False) -> Send:
    return to_decode(BlocksPrefetched(name, generation, None, is_refused))


def answer(outcome: ReturnOutcome) -> Send:
    return to_decode(RequestReturned(R1, 3, outcome))


def linked() -> PrefillHarness:
    made = PrefillHarness()
    made.link()
    return made


def busy() -> PrefillHarness:
    """r1 is on its way from the pool into the buffer."""
    made = linked()
    made.hear(prefetch(), DECODE)
    return made


def returning() -> PrefillHarness:
    """The pool was asked for room for r1."""
    made = linked()
    made.hear(RETURN, DECODE)
    return made


def on_its_way() -> PrefillHarness:
    """r1 is being copied back into the pool."""
    made = returning()
    made.hear(ROOM, POOL)
    return made


def offered() -> PrefillHarness:
    """The pool was offered r1 and has not answered."""
    made = on_its_way()
    made.relayed(BACK)
    return made


def lose_decode(made: PrefillHarness, peer: str = DECODE) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.DECODE_WORKER, peer))


def lose_pool(made: PrefillHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.KV_POOL, POOL))


# --- buffers come and go with decode workers


def test_a_decode_worker_gets_a_buffer() -> None:
    assert PrefillHarness().do(PeerConnected(Role.DECODE_WORKER, DECODE)) == [OpenBuffer(DECODE, 1)]


def test_a_buffer_made_for_an_earlier_life_is_not_offered() -> None:
    made = PrefillHarness()
    made.do(PeerConnected(Role.DECODE_WORKER, DECODE))
    lose_decode(made)
    assert made.do(PeerConnected(Role.DECODE_WORKER, DECODE)) == [OpenBuffer(DECODE, 2)]
    assert made.do(BufferOpened(DECODE, 1, BUFFER)) == []
    assert made.do(BufferOpened(DECODE, 2, BUFFER)) == [to_decode(BUFFER)]


def test_a_lost_decode_workers_buffer_is_closed() -> None:
    assert lose_decode(linked()) == [CloseBuffer(DECODE)]


# --- prefetch


def test_a_prefetch_is_copied_from_the_pool_into_the_buffer() -> None:
    assert linked().hear(prefetch(), DECODE) == [relay()]


def test_what_did_not_verify_is_told() -> None:
    assert busy().relayed(relay(), None) == [not_there(is_refused=True)]
    out_of_reach = BlocksRelayed(relay(), None, is_reached=False)
    assert busy().do(out_of_reach) == [not_there()]  # the copy may be right


def test_one_copy_of_a_buffer_at_a_time_in_order() -> None:
    made = busy()
    r3 = RequestId("r3")
    assert made.hear(prefetch(R2, 2), DECODE) == []
    assert made.hear(prefetch(r3, 1), DECODE) == []
    assert made.relayed(relay()) == [there(), relay(R2, 2)]
    assert made.relayed(relay(R2, 2)) == [there(R2, 2), relay(r3, 1)]


def test_copies_of_two_buffers_run_side_by_side() -> None:
    made = busy()
    made.link(OTHER)
    r3, r4 = RequestId("r3"), RequestId("r4")
    assert made.hear(prefetch(r3, 1), OTHER) == [relay(r3, 1, OTHER)]
    assert made.hear(prefetch(r4, 2), OTHER) == []
    assert made.hear(prefetch(R2, 2), DECODE) == []
    assert made.relayed(relay()) == [there(), relay(R2, 2)]
    arrived = BlocksPrefetched(r3, 1, BlockCopy(1, 7, RUNS))
    assert made.relayed(relay(r3, 1, OTHER)) == [to_decode(arrived, OTHER), relay(r4, 2, OTHER)]


def test_without_a_pool_nothing_is_prefetched() -> None:
    made = PrefillHarness(has_pool=False)
    made.link()
    assert made.hear(prefetch(), DECODE) == [not_there()]


def test_a_prefetch_that_waits_is_cancelled() -> None:
    made = busy()
    made.hear(prefetch(R2, 2), DECODE)
    assert made.hear(CancelPrefetch(R2, 2), DECODE) == [not_there(R2, 2)]
    assert made.relayed(relay()) == [there()]


def test_another_workers_prefetch_of_the_same_number_is_not_cancelled() -> None:
    made = busy()
    made.link(OTHER)
    made.hear(prefetch(), OTHER)
    made.hear(prefetch(R2, 2), OTHER)
    assert made.hear(CancelPrefetch(R2, 2), DECODE) == []
    (_, begun) = made.relayed(relay(peer=OTHER))
    assert begun == relay(R2, 2, OTHER)


def test_the_pool_is_lost_with_prefetches_that_wait() -> None:
    made = busy()
    made.hear(prefetch(R2, 2), DECODE)
    assert lose_pool(made) == [not_there(R2, 2)]
    assert made.relayed(relay(), None) == [not_there(is_refused=True)]


def test_the_decode_worker_is_lost_with_prefetches_that_wait() -> None:
    made = busy()
    made.hear(prefetch(R2, 2), DECODE)
    lose_decode(made)
    assert made.relayed(relay()) == []


# --- back to the pool


def test_the_pool_is_asked_for_room_now() -> None:
    assert linked().hear(RETURN, DECODE) == [RESERVE]


@each(("is_accepted", "outcome"), [(True, ReturnOutcome.TAKEN), (False, ReturnOutcome.STAYED)])
def test_the_pools_word_is_passed_on(is_accepted: bool, outcome: ReturnOutcome) -> None:
    assert offered().hear(BlocksTaken(R1, 3, is_accepted), POOL) == [answer(outcome)]


def test_without_room_it_stays() -> None:
    assert returning().hear(ReservationRefused(R1, 3), POOL) == [answer(ReturnOutcome.STAYED)]


def test_what_does_not_verify_stays_and_the_room_goes_back() -> None:
    expected = [to_pool(CancelReservation(R1, 3)), answer(ReturnOutcome.STAYED)]
    assert on_its_way().relayed(BACK, None) == expected


def test_one_return_of_a_request_at_a_time() -> None:
    made = returning()
    made.link(OTHER)
    assert made.hear(RETURN, OTHER) == [to_decode(RequestReturned(R1, 3, ReturnOutcome.STAYED), OTHER)]


def test_the_pool_is_lost_and_back_while_it_is_copied_back() -> None:
    made = on_its_way()
    lose_pool(made)
    assert made.hear(ARENA, POOL) == [MapArena(POOL, ARENA)]
    assert made.relayed(BACK) == [answer(ReturnOutcome.STAYED)]


def test_the_pool_is_lost_while_room_for_it_waits_for_its_turn() -> None:
    made = busy()
    made.hear(RETURN, DECODE)
    made.hear(ROOM, POOL)
    assert lose_pool(made) == [answer(ReturnOutcome.STAYED)]
    assert made.relayed(relay(), None) == [not_there(is_refused=True)]


def test_the_pool_is_lost_while_it_is_offered_and_may_have_it() -> None:
    assert lose_pool(offered()) == [answer(ReturnOutcome.UNKNOWN)]


@each("stage", [returning, offered])
def test_the_decode_worker_is_lost_and_the_room_goes_back(stage: Callable[[], PrefillHarness]) -> None:
    assert lose_decode(stage()) == [CloseBuffer(DECODE), to_pool(CancelReservation(R1, 3))]


def test_the_decode_worker_is_lost_and_back_while_it_is_copied_back() -> None:
    made = on_its_way()
    lose_decode(made)
    made.link()
    assert made.relayed(BACK) == [to_pool(CancelReservation(R1, 3))]


def test_a_chat_is_copied_before_documents_that_wait() -> None:
    made = busy()
    for number, is_best_effort in ((2, True), (3, True), (4, False), (5, False)):
        message = PrefetchBlocks(RequestId(f"r{number}"), 3, IN_POOL, blocks(number), number, is_best_effort)
        made.hear(message, DECODE)
    copied = []
    under_way = relay()
    for _ in range(4):
        (under_way,) = [one for one in made.relayed(under_way) if isinstance(one, RelayBlocks)]
        copied.append(under_way.request_id)
    assert copied == ["r4", "r5", "r2", "r3"]
