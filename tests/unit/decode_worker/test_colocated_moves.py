"""Requests that move between elastic workers, step by step: a giver and a receiver of twenty blocks of four tokens."""

import msgspec
import pytest

from alignedserve.core.ids import LeaseId, RequestId, WorkerName
from alignedserve.messages.caches import (
    ArenaOffered,
    BlockCopy,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    ReservationRefused,
    ReserveBlocks,
)
from alignedserve.messages.events import Dial, HangUp, PeerConnected, PeerDisconnected, Received, Send, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    BlocksLoaded,
    BlocksOffloaded,
    BufferOpened,
    CloseBuffer,
    Load,
    LoadBlocks,
    MapArena,
    OffloadBlocks,
    OpenBuffer,
    UnmapArena,
)
from alignedserve.messages.request_notes import RequestsNoted
from alignedserve.messages.request_notes import Step as NotedStep
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    BlocksFetched,
    MoveRequest,
    PeerNeeded,
    PrefillRequest,
    RequestMoved,
    RequestPreempted,
    RequestStayed,
)
from alignedserve.worker_core.block_peers import LINK_IDLE_S, UNREACHED_REST_S
from alignedserve.worker_core.moves import lent_by
from alignedserve.worker_core.part import WorkerCommand
from alignedserve.worker_core.request_notes import Phases, WorkerNotes
from tests.harnesses.colocated import EOS, FOUR, SEVEN, ColocatedHarness, run, runs, to_router
from tests.harnesses.scheduling import Step
from tests.support.marks import each
from tests.support.samples import R1, ROUTER, blocks, epoch, request

OTHER = "decode-1"
R3 = RequestId("r3")
BUFFER = ArenaOffered("/arena", 8, 64, "")
RESERVED = BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1))
RUNS = (BlockRun(0, 1, 5),)
OFFLOAD = OffloadBlocks(R1, 1, blocks(0), OTHER, blocks(0), 1, LeaseId(1))
WRITTEN = BlocksWritten(LeaseId(1), BlockCopy(1, 4, RUNS), 1, FOUR, (7,), 8.0, 0.5)


def hear(made: ColocatedHarness, message: Message) -> list[WorkerCommand]:
    return made.do(Received(OTHER, message))


def to_other(message: Message) -> Send:
    return Send(OTHER, message)


def linked() -> ColocatedHarness:
    made = ColocatedHarness(can_move=True)
    assert made.do(PeerConnected(Role.DECODE_WORKER, OTHER)) == [OpenBuffer(OTHER, 1)]
    assert made.do(BufferOpened(OTHER, 1, BUFFER)) == [to_other(BUFFER)]
    assert hear(made, BUFFER) == [MapArena(lent_by(OTHER), BUFFER, stamps=True)]
    return made


def giver() -> ColocatedHarness:
    """r1 has its first token, in block 0, and rests."""
    made = linked()
    made.begin(FOUR, predicted_output_len=8.0)
    made.follow(Step(r1=4))
    made.sampled(r1=7)
    return made


def asked() -> ColocatedHarness:
    made = giver()
    order = MoveRequest(R1, 1, WorkerName(OTHER))
    assert made.hear(order) == [to_other(ReserveBlocks(R1, 1, 2, may_wait=False))]
    return made


def copying() -> ColocatedHarness:
    made = asked()
    assert hear(made, RESERVED) == [OFFLOAD]
    return made


def offered() -> ColocatedHarness:
    made = copying()
    made.now = 0.5
    assert made.do(BlocksOffloaded(OFFLOAD, RUNS)) == [to_other(WRITTEN)]
    return made


# --- the giver


def test_a_request_that_was_taken_is_gone() -> None:
    made = offered()
    assert made.loads[-1].num_free_blocks == 19
    assert hear(made, BlocksTaken(R1, 1, is_accepted=True)) == []
    assert (made.loads[-1].num_waiting, made.loads[-1].num_free_blocks) == (0, 20)


def test_one_that_was_not_taken_is_decoded_on() -> None:
    made = offered()
    assert hear(made, BlocksTaken(R1, 1, is_accepted=False)) == [to_router(RequestStayed(R1, 1))]
    (iteration,) = runs(made.follow(Step(r1=1)))
    assert [(one.request.request_id, one.num_cached, one.block_ids) for one in iteration.additions] == [
        (R1, 4, blocks(0, 1))
    ]


def test_without_blocks_at_the_receiver_it_stays() -> None:
    assert hear(asked(), ReservationRefused(R1, 1)) == [to_router(RequestStayed(R1, 1))]


def test_it_is_decoded_while_the_receiver_is_asked_and_leaves_between_iterations() -> None:
    made = asked()
    assert runs(made.follow(Step(r1=1))) == [run(grown=[("r1", 1)], r1=1)]
    assert hear(made, RESERVED) == []
    (left,) = [one for one in made.sampled(r1=8) if isinstance(one, OffloadBlocks)]
    assert (left.block_ids, left.target_block_ids) == (blocks(0, 1), blocks(0, 1))


def test_an_order_for_what_cannot_leave_is_answered() -> None:
    made = linked()
    assert made.hear(MoveRequest(R1, 1, WorkerName(OTHER))) == [to_router(RequestStayed(R1, 1))]
    made.begin(FOUR)  # without a cache yet
    assert made.hear(MoveRequest(R1, 1, WorkerName(OTHER))) == [to_router(RequestStayed(R1, 1))]
    assert giver().hear(MoveRequest(R1, 1, WorkerName("decode-9"))) == [to_router(RequestStayed(R1, 1))]


def test_a_receiver_lost_before_the_offer_changes_nothing() -> None:
    gone = PeerDisconnected(Role.DECODE_WORKER, OTHER)
    closed = [CloseBuffer(OTHER), to_router(RequestStayed(R1, 1)), UnmapArena(lent_by(OTHER))]
    assert asked().do(gone) == closed
    made = copying()
    assert made.do(gone) == [CloseBuffer(OTHER), UnmapArena(lent_by(OTHER))]
    assert made.do(BlocksOffloaded(OFFLOAD, RUNS)) == [to_router(RequestStayed(R1, 1))]


def test_a_receiver_lost_after_the_offer_may_have_it() -> None:
    made = offered()
    commands = made.do(PeerDisconnected(Role.DECODE_WORKER, OTHER))
    assert to_router(RequestPreempted(R1, 1, (7,))) in commands
    assert made.loads[-1].num_free_blocks == 20


@each("stage", [copying, offered])
def test_an_aborted_request_frees_its_blocks(stage: object) -> None:
    made = copying() if stage is copying else offered()
    made.hear(AbortRequest(R1, 1))
    if stage is copying:
        assert made.do(BlocksOffloaded(OFFLOAD, RUNS)) == [to_other(CancelReservation(R1, 1))]
    assert made.loads[-1].num_free_blocks == 20


def test_it_may_leave_whatever_its_own_limit_is() -> None:
    made = linked()
    made.begin(request(max_tokens=76), predicted_output_len=8.0)  # all twenty blocks
    made.follow(Step(r1=4))
    made.sampled(r1=7)
    assert made.hear(MoveRequest(R1, 1, WorkerName(OTHER))) == [to_other(ReserveBlocks(R1, 1, 2, may_wait=False))]


# --- the receiver


def reserved() -> ColocatedHarness:
    made = linked()
    assert hear(made, ReserveBlocks(R1, 1, 2, may_wait=False)) == [to_other(RESERVED)]
    assert made.loads[-1].num_free_blocks == 18
    return made


def loading() -> ColocatedHarness:
    made = reserved()
    assert hear(made, WRITTEN) == [LoadBlocks(lent_by(OTHER), (Load(R1, WRITTEN.copy, blocks(0)),))]
    return made


def loaded(refused: bool = False, is_reached: bool = True) -> BlocksLoaded:
    load = Load(R1, WRITTEN.copy, blocks(0))
    return BlocksLoaded(lent_by(OTHER), (load,), frozenset({R1} if refused else ()), is_reached=is_reached)


def test_a_request_that_arrives_is_decoded_on_from_its_cache() -> None:
    made = loading()
    taken = [to_router(RequestMoved(R1, 2, 1)), to_other(BlocksTaken(R1, 1, is_accepted=True))]
    assert made.do(loaded()) == taken
    (iteration,) = runs(made.follow(Step(r1=1)))
    assert [(one.generated_token_ids, one.num_cached, one.block_ids) for one in iteration.additions] == [
        ((7,), 4, blocks(0, 1))
    ]
    assert made.view.table.first_token_s[0] == -0.5
    assert made.loads[-1].num_handoffs_verified == 1


def test_a_copy_that_does_not_verify_is_not_taken() -> None:
    made = loading()
    assert made.do(loaded(refused=True)) == [to_other(BlocksTaken(R1, 1, is_accepted=False))]
    assert made.loads[-1].num_free_blocks == 20


def test_nothing_is_reserved_without_blocks_or_a_buffer() -> None:
    refused = [to_other(ReservationRefused(R1, 1))]
    assert hear(linked(), ReserveBlocks(R1, 1, 9, may_wait=False)) == refused  # the buffer has eight
    made = linked()
    made.begin(request("r2", prompt_len=70))  # may need all blocks
    assert hear(made, ReserveBlocks(R1, 1, 2, may_wait=False)) == refused


def test_a_cancelled_reservation_is_free_again() -> None:
    made = reserved()
    assert hear(made, CancelReservation(R1, 1)) == []
    assert made.loads[-1].num_free_blocks == 20


def test_what_a_lost_giver_had_written_is_not_taken() -> None:
    made = loading()
    made.do(PeerDisconnected(Role.DECODE_WORKER, OTHER))
    assert made.do(loaded()) == [to_other(BlocksTaken(R1, 1, is_accepted=False))]
    assert made.loads[-1].num_free_blocks == 20


def test_a_giver_whose_buffer_cannot_be_read_is_refused_for_a_while() -> None:
    made = loading()
    assert made.do(loaded(refused=True, is_reached=False)) == [to_other(BlocksTaken(R1, 1, is_accepted=False))]
    asks = ReserveBlocks(R1, 3, 2, may_wait=False)
    assert hear(made, asks) == [to_other(ReservationRefused(R1, 3))]  # else it pauses again, in vain
    made.now += UNREACHED_REST_S
    assert hear(made, asks) != [to_other(ReservationRefused(R1, 3))]


def test_the_time_that_a_request_spent_in_iterations_moves_with_it() -> None:
    made = linked()
    made.begin(FOUR, predicted_output_len=8.0)
    made.follow(Step(r1=4))
    made.now = 2.0
    made.sampled(r1=7)
    made.hear(MoveRequest(R1, 1, WorkerName(OTHER)))
    hear(made, RESERVED)
    (offer,) = made.do(BlocksOffloaded(OFFLOAD, RUNS))
    assert isinstance(offer, Send)
    assert isinstance(offer.message, BlocksWritten)
    taker = reserved()
    hear(taker, offer.message)
    taker.do(loaded())
    taker.follow(Step(r1=1))
    assert (offer.message.service_s, taker.view.table.service_s.tolist()) == (2.0, [2.0])


def test_a_prompt_that_might_need_blocks_on_their_way_waits_for_them() -> None:
    made = reserved()
    made.begin(request("r2", prompt_len=70))
    assert made.loads[-1].num_waiting == 1
    assert made.follow(Step(r2=10)) == []
    assert [[part[0] for part in one.slices] for one in runs(hear(made, CancelReservation(R1, 1)))] == [["r2"]]


LONG = request(max_tokens=72)  # r1 may need 19 blocks


def postponed_beside_an_iteration() -> ColocatedHarness:
    """r2 is in an iteration, two blocks are held for r3, and a later attempt at r1 waits for all blocks."""
    made = linked()
    made.begin(SEVEN)
    assert runs(made.follow(Step(r2=7)))
    hear(made, ReserveBlocks(R3, 1, 2, may_wait=False))
    made.begin(LONG, epoch(2), 7)
    return made


def test_an_earlier_attempt_that_arrives_gives_way_to_a_postponed_one() -> None:
    made = postponed_beside_an_iteration()
    hear(made, ReserveBlocks(R1, 1, 2, may_wait=False))
    copy = BlockCopy(2, 4, (BlockRun(2, 1, 5),))
    (load,) = hear(made, BlocksWritten(LeaseId(2), copy, 1, LONG, (7,), 8.0, 0.5))
    assert isinstance(load, LoadBlocks)
    assert to_router(RequestMoved(R1, 2, 1)) in made.do(BlocksLoaded(load.source, load.loads, frozenset()))
    made.sampled(r2=EOS)
    hear(made, CancelReservation(R3, 1))
    (iteration,) = runs(made.follow(Step(r1=5)))
    assert [(one.request.request_id, one.num_cached) for one in iteration.additions] == [(R1, 0)]


def test_what_a_postponed_attempt_replaces_is_not_taken() -> None:
    made = postponed_beside_an_iteration()
    made.sampled(r2=EOS)
    hear(made, ReserveBlocks(R1, 1, 2, may_wait=False))
    assert hear(made, WRITTEN) == [to_other(BlocksTaken(R1, 1, is_accepted=False))]
    hear(made, CancelReservation(R3, 1))
    assert made.loads[-1].num_free_blocks == 20


def test_limits_that_are_far_away_keep_nothing_from_coming() -> None:
    made = ColocatedHarness(num_blocks=200, can_move=True)
    made.do(PeerConnected(Role.DECODE_WORKER, OTHER))
    hear(made, BUFFER)
    made.begin(request("r2", prompt_len=4, max_tokens=796))
    assert hear(made, ReserveBlocks(R1, 1, 8, may_wait=False)) != [to_other(ReservationRefused(R1, 1))]
    made.begin(request("r3", prompt_len=508, max_tokens=292))  # with 256 tokens more just beside the eight blocks
    assert made.follow(Step(r3=10))
    made.begin(request("r4", prompt_len=513, max_tokens=287))
    assert made.logic._postponed.keys() == {RequestId("r4")}


def test_who_outgrows_what_was_foreseen_waits_for_blocks_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.worker_core.held_requests._FORESEEN_TOKENS", 0)
    made = linked()
    made.begin(request("r2", prompt_len=46, max_tokens=34))
    for num_tokens in (10, 10, 10, 10):
        made.follow(Step(r2=num_tokens))
        made.completed()
    made.follow(Step(r2=6))
    made.sampled(r2=9)
    hear(made, ReserveBlocks(R1, 1, 7, may_wait=False))  # 13 blocks are left, for 52 tokens
    for _ in range(6):
        assert runs(made.follow(Step(r2=1)))
        made.sampled(r2=9)
    assert made.follow(Step(r2=1)) == []
    assert [one.slices for one in runs(hear(made, CancelReservation(R1, 1)))] == [((RequestId("r2"), 1),)]


def test_a_worker_of_another_node_is_dialled_when_it_is_needed_and_hung_up_on_later() -> None:
    made = ColocatedHarness(can_move=True)
    needed = PeerNeeded(WorkerName("decode-9"))
    assert made.hear(needed) == [Dial("decode-9")]
    assert made.hear(needed) == []
    made.do(PeerConnected(Role.DECODE_WORKER, "decode-9"))
    made.now += LINK_IDLE_S - 1.0
    assert HangUp("decode-9") not in made.do(Ticked())
    made.now += 1.0
    assert HangUp("decode-9") in made.do(Ticked())


@each("pool", ["", "pool-0", "pool-9"])
def test_a_request_from_another_node_tells_how_long_its_blocks_took(pool: str) -> None:
    made = ColocatedHarness(can_move=True)
    made.do(PeerConnected(Role.DECODE_WORKER, OTHER))
    hear(made, msgspec.structs.replace(BUFFER, pool_name=pool))
    hear(made, ReserveBlocks(R1, 1, 2, may_wait=False))
    hear(made, WRITTEN)
    load = Load(R1, WRITTEN.copy, blocks(0))
    commands = made.do(BlocksLoaded(lent_by(OTHER), (load,), frozenset(), 0.25))
    assert to_router(RequestMoved(R1, 2, 1)) in commands
    assert (to_router(BlocksFetched(OTHER, 1, 0.25)) in commands) is (pool == "pool-9")


def test_who_stays_is_explained_as_evicted_where_its_memory_is_taken_later() -> None:
    made, notes = giver(), WorkerNotes(lambda: (), Phases.BOTH)
    order, stays = MoveRequest(R1, 1, WorkerName(OTHER)), ReservationRefused(R1, 1)
    notes.observe(Received(ROUTER, PrefillRequest(FOUR, 1)), 0.0, ())
    for event in (Received(ROUTER, order), Received(OTHER, stays)):
        notes.observe(event, 1.0, made.do(event))
    notes.observe(None, 2.0, (run(removals=("r1",)),))
    (sent,) = notes.observe(Ticked(), 3.0, ())
    assert isinstance(sent.message, RequestsNoted)
    steps = [note.step for note in sent.message.notes]
    assert steps == [NotedStep.ACCEPTED, NotedStep.OFFERED, NotedStep.HANDOFF_REFUSED, NotedStep.EVICTED]
