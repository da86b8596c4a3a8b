"""The decode worker's candidates: prefetched into a prefill worker's memory, given back, or straight from a prefill."""

from collections.abc import Callable

import msgspec

from alignedserve.core.ids import LeaseId
from alignedserve.messages.caches import (
    BlockCopy,
    BlocksPrefetched,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import PeerDisconnected, Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Load, LoadBlocks, UnmapArena
from alignedserve.messages.workers import RequestPreempted
from alignedserve.worker_core.handoff import BufferSlot, BufferSpace
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.decode import (
    BUFFER_RUNS,
    EOS,
    H1,
    H2,
    H3,
    DecodeHarness,
    added,
    cancel,
    from_pool,
    load,
    loads,
    prefetch,
    received,
    released,
    returned,
    run,
    to_router,
)
from tests.support.marks import each
from tests.support.samples import POOL, PREFILL, R1, blocks, handoff, request

MISSED = to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True))


def full(buffer_blocks: int = 8) -> DecodeHarness:
    """r2 runs, and no other request may."""
    made = DecodeHarness(max_running_requests=1, buffer_blocks=buffer_blocks)
    made.enter(H2)
    return made


def coming() -> DecodeHarness:
    """r1 is on its way from the pool into block 0 of the buffer."""
    made = full()
    made.grant(H1)
    return made


def there() -> DecodeHarness:
    """r1 is in the buffer, and in the pool."""
    made = coming()
    made.prefetched("r1", 1)
    return made


def from_buffer(*numbers: int, generation: int = 1) -> LoadBlocks:
    return LoadBlocks(PREFILL, (Load(R1, BlockCopy(generation, 4, BUFFER_RUNS), blocks(*numbers)),))


def not_prefetched(*, is_refused: bool = False) -> BlocksPrefetched:
    return BlocksPrefetched(R1, 1, None, is_refused)


# --- prefetch


def test_who_cannot_enter_is_prefetched() -> None:
    assert full().grant(H1) == [received((R1, 1)), prefetch(H1, 1, 0)]


def test_what_does_not_fit_into_the_buffer_waits_in_the_pool() -> None:
    assert full(buffer_blocks=1).grant(H1) == [received((R1, 1))]


def test_a_prefetched_one_is_loaded_from_the_buffer_and_then_its_lease_goes_back() -> None:
    made = there()
    (command,) = loads(made.sampled(r2=EOS))
    assert command == from_buffer(0, 1)
    assert made.loaded(command) == [run(added(H1, 0, 1), removals=("r2",), slices={"r1": 1}), released(11)]


def test_buffer_blocks_are_free_again_when_it_is_loaded() -> None:
    made = there()
    (command,) = loads(made.sampled(r2=EOS))
    assert made.grant(H3)[1:] == [prefetch(H3, 2, 1)]
    made.loaded(command)
    assert made.grant(H2)[1:] == [prefetch(H2, 3, 0)]


def test_one_that_is_on_its_way_is_waited_for() -> None:
    made = coming()
    assert loads(made.sampled(r2=EOS)) == []
    assert loads(made.prefetched("r1", 1)) == [from_buffer(0, 1)]


def test_others_may_enter_before_one_that_is_on_its_way() -> None:
    made = DecodeHarness(max_running_requests=1, buffer_blocks=4)
    made.enter(H2)
    made.grant(H1)
    made.grant(handoff(request("r3"), 13, runs=(BUFFER_RUNS[0],) * 3))  # for which the buffer is too small now
    (command,) = loads(made.sampled(r2=EOS))
    assert command.source == POOL
    assert [part.request_id for part in command.loads] == ["r3"]


def test_what_did_not_verify_in_the_pool_is_a_miss() -> None:
    assert coming().hear(not_prefetched(is_refused=True), PREFILL) == [released(11), MISSED]


def test_what_could_not_be_prefetched_stays_in_the_pool_and_is_not_tried_again() -> None:
    made = coming()
    assert made.hear(not_prefetched(), PREFILL) == []
    assert loads(made.sampled(r2=EOS)) == [from_pool(load(H1, 0, 1))]


def test_what_does_not_verify_in_the_buffer_is_a_miss() -> None:
    made = there()
    (command,) = loads(made.sampled(r2=EOS))
    assert made.loaded(command, R1) == [MISSED, released(11)]


def test_word_of_an_unknown_prefetch_is_ignored() -> None:
    assert there().hear(BlocksPrefetched(R1, 9, None, is_refused=True), PREFILL) == []


# --- aborts


def test_aborted_while_it_is_prefetched_its_blocks_stay_taken_until_the_answer() -> None:
    made = coming()
    assert made.hear(AbortRequest(R1)) == [cancel("r1", 1), released(11)]
    assert made.grant(H3)[1:] == [prefetch(H3, 2, 1)]
    made.hear(not_prefetched(), PREFILL)
    assert made.grant(H1)[1:] == [prefetch(H1, 3, 0)]


def test_granted_again_while_an_earlier_prefetch_of_it_is_under_way() -> None:
    made = coming()
    again = handoff(request(), 14, attempt=2)
    assert made.grant(again) == [received((R1, 2)), cancel("r1", 1), released(11), prefetch(again, 2, 1)]
    made.prefetched("r1", 1)  # of the first: its blocks are free, and the second still comes
    assert loads(made.sampled(r2=EOS)) == []
    assert loads(made.prefetched("r1", 2)) == [from_buffer(0, 1, generation=2)]


# --- strays


def stray(made: DecodeHarness) -> list[WorkerCommand]:
    """r1, of another batch than the one that runs, has come too late to join it."""
    return made.grant(H1, batch=5, joins=4)


def test_who_came_too_late_to_join_its_batch_goes_back_to_the_pool() -> None:
    assert stray(full()) == [received((R1, 1), batch=5), returned(11)]


def test_who_comes_to_join_the_running_batch_is_a_candidate_of_it() -> None:
    made = full(buffer_blocks=0)
    made.grant(H1, batch=5, joins=1)
    assert loads(made.sampled(r2=EOS)) == [from_pool(load(H1, 0, 1))]


# --- losses


def lose_prefill(made: DecodeHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.PREFILL_WORKER, PREFILL))


@each("stage", [coming, there])
def test_the_prefill_worker_is_lost_and_what_was_prefetched_is_still_in_the_pool(
    stage: Callable[[], DecodeHarness],
) -> None:
    made = stage()
    assert lose_prefill(made) == [UnmapArena(PREFILL)]
    assert loads(made.sampled(r2=EOS)) == [from_pool(load(H1, 0, 1))]


def test_a_prefill_worker_that_is_back_gets_what_waits() -> None:
    made = coming()
    lose_prefill(made)
    assert made.lend(8)[1:] == [prefetch(H1, 2, 0)]


def test_the_pool_is_lost_and_what_was_prefetched_goes_on() -> None:
    made = there()
    assert made.do(PeerDisconnected(Role.KV_POOL, POOL)) == [UnmapArena(POOL)]
    (command,) = loads(made.sampled(r2=EOS))
    assert command == from_buffer(0, 1)
    assert made.loaded(command) == [run(added(H1, 0, 1), removals=("r2",), slices={"r1": 1})]  # without its lease


# --- straight from a prefill worker

RESERVE = ReserveBlocks(R1, 5, 1, may_wait=False)


def bypassing() -> DecodeHarness:
    """Block 0 of the buffer is set aside for r1."""
    made = full()
    made.hear(RESERVE, PREFILL)
    return made


def written(attempt: int = 5, generation: int = 1, copied: int = 1) -> BlocksWritten:
    copy = BlockCopy(generation, 4, BUFFER_RUNS * copied)
    return BlocksWritten(LeaseId(generation), copy, attempt, request(), (7,))


def taken(attempt: int = 5, *, is_accepted: bool = True) -> Send:
    return Send(PREFILL, BlocksTaken(R1, attempt, is_accepted))


@each("buffer_blocks", [0, 1])
def test_without_room_it_is_refused_at_once(buffer_blocks: int) -> None:
    two = ReserveBlocks(R1, 5, 2, may_wait=False)
    assert full(buffer_blocks).hear(two, PREFILL) == [Send(PREFILL, ReservationRefused(R1, 5))]


def test_what_was_written_is_taken_and_the_router_told_the_next_attempt() -> None:
    received_alone = received((R1, 6), batch=NO_BATCH)
    assert bypassing().hear(written(), PREFILL) == [taken(), received_alone]


@each("wrong", [written(attempt=4), written(generation=2), written(copied=2)], ids=["attempt", "generation", "blocks"])
def test_what_was_written_elsewhere_is_not_taken(wrong: BlocksWritten) -> None:
    assert bypassing().hear(wrong, PREFILL) == [taken(wrong.attempt, is_accepted=False)]


def test_a_cancelled_reservation_is_room_again() -> None:
    made = bypassing()
    assert made.hear(CancelReservation(R1, 5), PREFILL) == []
    assert made.grant(H3)[1:] == [prefetch(H3, 2, 0)]
    assert made.hear(written(), PREFILL) == [taken(is_accepted=False)]


def test_a_repeated_reservation_replaces_the_first() -> None:
    made = bypassing()
    again = BlocksReserved(R1, 6, LeaseId(2), 2, blocks(0))
    assert made.hear(ReserveBlocks(R1, 6, 1, may_wait=False), PREFILL) == [Send(PREFILL, again)]


def test_what_comes_straight_of_an_earlier_life_does_not_replace_a_later_one() -> None:
    made = bypassing()
    later = msgspec.structs.replace(H1, attempt=7)
    made.grant(later)
    assert made.hear(written(), PREFILL) == [taken(is_accepted=False)]
    assert made.logic._candidates.get(R1).attempt == 7  # type: ignore[union-attr]
    assert made.hear(RESERVE, PREFILL) == [Send(PREFILL, ReservationRefused(R1, 5))]


def test_the_prefill_worker_is_lost_with_what_came_straight_from_it() -> None:
    made = bypassing()
    made.hear(written(), PREFILL)
    assert lose_prefill(made) == [UnmapArena(PREFILL), to_router(RequestPreempted(R1, 6, (7,)))]


def test_a_router_that_comes_back_ends_what_is_reserved() -> None:
    made = bypassing()
    made.load()
    assert made.hear(written(), PREFILL) == [taken(is_accepted=False)]


def test_a_batch_behind_an_urgent_request_keeps_its_order() -> None:
    made = bypassing()
    made.grant(H3, batch=2)
    made.hear(written(), PREFILL)
    made.prefetched("r3", 2)
    (command,) = loads(made.sampled(r2=EOS))
    assert [part.request_id for part in command.loads] == ["r1"]
    made.loaded(command)
    (command,) = loads(made.sampled(r1=EOS))
    assert [part.request_id for part in command.loads] == ["r3"]


ONE, OTHER = "prefill-0", "prefill-1"


def space(**sizes: int) -> BufferSpace:
    made = BufferSpace()
    for peer, num_blocks in (sizes or {"prefill_0": 8}).items():
        made.opened(peer.replace("_", "-"), num_blocks)
    return made


def test_a_slot_says_where_it_is() -> None:
    assert space().for_prefetch(2) == BufferSlot(ONE, 1, blocks(0, 1), 1)


@each(("num_blocks", "is_there_room"), [(6, True), (7, False)])
def test_prefetches_leave_a_quarter_to_evictions(num_blocks: int, is_there_room: bool) -> None:
    assert (space().for_prefetch(num_blocks) is not None) == is_there_room


def test_it_is_short_when_no_buffer_has_its_quarter_left() -> None:
    made = space(prefill_0=8, prefill_1=8)
    made.at(ONE, 7)
    assert not made.is_short
    made.at(OTHER, 7)
    assert made.is_short


def test_what_lay_in_an_earlier_life_of_a_buffer_frees_nothing_in_this_one() -> None:
    made = space()
    slot = made.for_eviction(3)
    assert slot is not None
    made.lost(ONE)
    made.opened(ONE, 8)
    made.for_eviction(5)
    made.free(slot)
    assert made.num_used == 5


def test_a_buffer_beside_another_pool_is_for_what_comes_straight_into_it() -> None:
    made = space(prefill_0=4)
    made.opened(OTHER, 40, is_far=True)
    assert made.for_prefetch(4) is None
    evicted, handed = made.for_eviction(4), made.at(OTHER, 20)
    assert evicted is not None
    assert evicted.peer == ONE
    assert handed is not None
    assert (made.is_far(evicted), made.is_far(handed)) == (False, True)
    assert made.for_eviction(1) is None
    assert made.is_short  # the free blocks of the far one do not count
    made.free(handed)
    made.lost(OTHER)
    made.opened(OTHER, 40)
    assert made.for_eviction(1) is not None


def test_evictions_of_documents_leave_an_eighth_to_chat() -> None:
    made = space(prefill_0=16)
    assert made.for_eviction(15, leaves_room=True) is None
    assert made.for_eviction(14, leaves_room=True) is not None
    assert made.for_eviction(1, leaves_room=True) is None
    assert made.at(ONE, 2) is not None
