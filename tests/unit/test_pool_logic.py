"""The KV pool, decision by decision: eight blocks of four tokens, leases of ten seconds."""

import tracemalloc
from typing import Any

import pytest

from alignedserve.core.ids import BatchId, BlockId, LeaseId, RequestId, WorkerName
from alignedserve.messages.events import PeerLinked, PeerLost, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    ArenaOffered,
    BatchFormed,
    BatchGranted,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    CopyLost,
    DropRequest,
    FormBatch,
    Handoff,
    LeasesReleased,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
    ReservationRefused,
    ReserveBlocks,
    SubmitRequest,
)
from alignedserve.messages.wire import Message
from kvpool.logic import PoolCommand, PoolLogic, StampBlocks
from kvpool.policies.fcfs import FcfsBatchFormer
from tests.samples import DECODE, PREFILL, R1, R2, R3, ROUTER, blocks, request

ARENA = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
BATCH, ASKED = BatchId(1), WorkerName(DECODE)
FORM = FormBatch(BATCH, ASKED, 100, 100)


class Desk:
    """A pool with a router, a prefill worker and a decode worker. Its counts for the router are left out."""

    def __init__(self) -> None:
        self.now = 0.0
        self.logic = PoolLogic(arena=ARENA, block_size=4, batch_former=FcfsBatchFormer(), lease_s=10.0)
        self.link(ROUTER, Role.ROUTER)
        self.link(PREFILL, Role.PREFILL_WORKER)
        self.link(DECODE, Role.DECODE_WORKER)

    def do(self, event: Any) -> list[PoolCommand]:
        commands = self.logic.on_event(event, self.now)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, PoolLoad))]

    def link(self, peer: str, role: Role) -> list[PoolCommand]:
        return self.do(PeerLinked(role, peer))

    def lose(self, peer: str) -> list[PoolCommand]:
        return self.do(PeerLost(Role.ROUTER if peer == ROUTER else Role.PREFILL_WORKER, peer))

    def hear(self, peer: str, message: Message) -> list[PoolCommand]:
        return self.do(Received(peer, message))

    def reserve(self, name: str, num_blocks: int, attempt: int = 1, peer: str = PREFILL) -> list[PoolCommand]:
        return self.hear(peer, ReserveBlocks(RequestId(name), attempt, num_blocks))

    def pool(self, name: str, num_blocks: int = 1, attempt: int = 1) -> BlocksWritten:
        """Reserve and write; what was written."""
        reserved = next(one for one in self.reserve(name, num_blocks, attempt) if isinstance(one, Send)).message
        assert isinstance(reserved, BlocksReserved)
        message = written(name, reserved)
        self.hear(PREFILL, message)
        return message


def written(name: str, reserved: BlocksReserved, **changes: Any) -> BlocksWritten:
    facts: dict[str, Any] = {
        "lease_id": reserved.lease_id,
        "generation": reserved.generation,
        "runs": tuple(BlockRun(block_id, 1, 99) for block_id in reserved.block_ids),
        "context_len": 4 * len(reserved.block_ids),
        "attempt": reserved.attempt,
        "request": request(name, prompt_len=4 * len(reserved.block_ids)),
        "generated_token_ids": (7,),
    }
    return BlocksWritten(**{**facts, **changes})


def leased(name: str, lease: int, *numbers: int, attempt: int = 1, to: str = PREFILL) -> list[PoolCommand]:
    reserved = BlocksReserved(RequestId(name), attempt, LeaseId(lease), lease, blocks(*numbers))
    return [StampBlocks(blocks(*numbers), lease), Send(to, reserved)]


def freed(*numbers: int) -> StampBlocks:
    return StampBlocks(blocks(*numbers), 0)


def taken(name: str, is_accepted: bool, attempt: int = 1) -> Send:
    return Send(PREFILL, BlocksTaken(RequestId(name), attempt, is_accepted))


def handoff_of(content: BlocksWritten) -> Handoff:
    return Handoff(
        content.request,
        content.attempt,
        content.generated_token_ids,
        content.lease_id,
        content.generation,
        content.context_len,
        content.runs,
    )


def grants(commands: list[PoolCommand]) -> list[Handoff]:
    sent = [one.message for one in commands if isinstance(one, Send)]
    return [handoff for one in sent if isinstance(one, BatchGranted) for handoff in one.handoffs]


# --- peers


def test_a_worker_is_offered_the_arena() -> None:
    assert Desk().link("decode-1", Role.DECODE_WORKER) == [Send("decode-1", ARENA)]


def test_the_router_hears_of_the_pool() -> None:
    assert Desk().link(ROUTER, Role.ROUTER) == [Send(ROUTER, PoolRegistered(8))]


def test_counts_are_told_when_they_change() -> None:
    made = Desk()
    sent = made.logic.on_event(Received(PREFILL, ReserveBlocks(R1, 1, 3)), 0.0)
    assert sent[-1] == Send(ROUTER, PoolLoad(num_blocks_used=3, num_pooled=0, num_reserved=0))
    assert made.logic.on_event(Ticked(), 0.0) == []


# --- reservations


def test_a_reservation_gets_its_blocks_stamped_first() -> None:
    assert Desk().reserve("r1", 3) == leased("r1", 1, 0, 1, 2)


def test_leases_are_numbered_from_where_this_life_of_the_pool_begins() -> None:
    logic = PoolLogic(arena=ARENA, block_size=4, batch_former=FcfsBatchFormer(), lease_s=10.0, first_lease=100)
    assert logic.on_event(Received(PREFILL, ReserveBlocks(R1, 1, 2)), 0.0) == leased("r1", 100, 0, 1)


def test_leases_are_never_reused() -> None:
    made = Desk()
    made.reserve("r1", 3)
    made.hear(PREFILL, CancelReservation(R1, 1))
    assert made.reserve("r1", 3) == leased("r1", 2, 0, 1, 2)


def test_more_than_the_pool_has_is_refused() -> None:
    assert Desk().reserve("r1", 9) == [Send(PREFILL, ReservationRefused(R1, 1))]


def test_reservations_are_served_in_order_and_never_overtaken() -> None:
    made = Desk()
    made.reserve("r1", 6)
    assert made.reserve("r2", 4) == []
    assert made.reserve("r3", 1) == []  # there would be room, but r2 came first
    assert made.hear(PREFILL, CancelReservation(R1, 1)) == [
        freed(0, 1, 2, 3, 4, 5),
        *leased("r2", 2, 0, 1, 2, 3),
        *leased("r3", 3, 4),
    ]


def test_one_that_leaves_the_line_lets_the_next_in() -> None:
    made = Desk()
    made.reserve("r1", 6)
    made.reserve("r2", 4)
    made.reserve("r3", 1)
    assert made.hear(PREFILL, CancelReservation(R2, 1)) == leased("r3", 2, 6)


def test_a_repeated_reservation_replaces_the_one_before() -> None:
    made = Desk()
    made.reserve("r1", 3)
    assert made.reserve("r1", 2, attempt=2) == [freed(0, 1, 2), *leased("r1", 2, 0, 1, attempt=2)]


def test_a_repeated_reservation_in_the_line_is_there_once() -> None:
    made = Desk()
    made.reserve("r1", 8)
    made.reserve("r2", 2)
    made.reserve("r2", 3, attempt=2)
    assert made.hear(PREFILL, CancelReservation(R1, 1))[1:] == leased("r2", 2, 0, 1, 2, attempt=2)


def test_a_stale_reservation_is_refused_and_the_later_one_stays() -> None:
    made = Desk()
    made.reserve("r1", 3, attempt=2, peer="prefill-1")
    assert made.reserve("r1", 3, attempt=1) == [Send(PREFILL, ReservationRefused(R1, 1))]


def test_a_stale_reservation_is_refused_in_the_line_as_well() -> None:
    made = Desk()
    made.reserve("r1", 8)
    made.reserve("r2", 3, attempt=2)
    assert made.reserve("r2", 3, attempt=1) == [Send(PREFILL, ReservationRefused(R2, 1))]


@pytest.mark.parametrize("message", [CancelReservation(R1, 1), DropRequest(R1, 1)], ids=["cancel", "drop"])
def test_a_stale_end_leaves_a_later_attempt_alone(message: Message) -> None:
    made = Desk()
    made.reserve("r1", 3, attempt=2)
    assert made.hear(PREFILL, message) == []


@pytest.mark.parametrize("message", [CancelReservation(R2, 5), DropRequest(R2, 5)], ids=["cancel", "drop"])
def test_the_end_of_something_unknown_is_ignored(message: Message) -> None:
    made = Desk()
    made.reserve("r1", 3)
    assert made.hear(PREFILL, message) == []


# --- writing


def test_written_blocks_are_the_pools() -> None:
    made = Desk()
    made.reserve("r1", 2)
    content = written("r1", BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1)))
    assert made.hear(PREFILL, content) == [taken("r1", True), Send(ROUTER, RequestPooled(R1, 1, 8, 2))]


@pytest.mark.parametrize(
    "changes",
    [
        {"lease_id": LeaseId(2)},
        {"generation": 2},
        {"generation": 0},
        {"attempt": 2},
        {"request": request("r2", prompt_len=8)},
        {"context_len": 4},
        {"context_len": 9},
        {"context_len": 0},
        {"runs": ()},
        {"runs": (BlockRun(0, 1, 99),)},
        {"runs": (BlockRun(1, 1, 99), BlockRun(0, 1, 99))},
        {"runs": (BlockRun(0, 1, 99), BlockRun(0, 1, 99))},
        {"runs": (BlockRun(0, 3, 99),)},
        {"runs": (BlockRun(0, 1, 99), BlockRun(2, 1, 99))},
        {"runs": (BlockRun(0, 2, 99), BlockRun(5, 1, 99))},
    ],
    ids=str,
)
def test_what_does_not_describe_the_lease_is_not_believed(changes: dict[str, Any]) -> None:
    made = Desk()
    made.reserve("r1", 2)
    content = written("r1", BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1)), **changes)
    assert made.hear(PREFILL, content) == [taken(content.request.request_id, False, content.attempt)]
    assert grants(made.hear(ROUTER, FORM)) == []


def test_one_run_may_cover_neighbours() -> None:
    made = Desk()
    made.reserve("r1", 2)
    reserved = BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1))
    assert made.hear(PREFILL, written("r1", reserved, runs=(BlockRun(0, 2, 99),)))[0] == taken("r1", True)


def test_an_absurd_run_is_refused_without_being_spelt_out() -> None:
    made = Desk()
    made.reserve("r1", 2)
    reserved = BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1))
    content = written("r1", reserved, runs=(BlockRun(0, 1 << 19, 99),))
    tracemalloc.start()
    try:
        assert made.hear(PREFILL, content) == [taken("r1", False)]
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_a_worker_that_does_not_hold_the_lease_cannot_write_it() -> None:
    made = Desk()
    made.reserve("r1", 2)
    content = written("r1", BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1)))
    assert made.hear("prefill-1", content) == [Send("prefill-1", BlocksTaken(R1, 1, is_accepted=False))]


def test_writing_twice_is_refused_the_second_time() -> None:
    made = Desk()
    content = made.pool("r1")
    assert made.hear(PREFILL, content) == [taken("r1", False)]
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(content)]


# --- batches


def test_a_batch_is_granted_shortest_first_and_the_router_hears_of_it() -> None:
    made = Desk()
    long, short = made.pool("r1", 3), made.pool("r2", 1)
    handoffs = (handoff_of(short), handoff_of(long))
    assert made.hear(ROUTER, FORM) == [
        Send(ROUTER, BatchFormed(BATCH, ASKED, ((R2, 1), (R1, 1)))),
        Send(DECODE, BatchGranted(BATCH, handoffs)),
    ]


def test_what_is_granted_is_not_granted_again() -> None:
    made = Desk()
    made.pool("r1")
    made.hear(ROUTER, FORM)
    assert made.hear(ROUTER, FORM) == [Send(ROUTER, BatchFormed(BATCH, ASKED, ()))]


def test_a_worker_that_is_not_linked_gets_nothing() -> None:
    made = Desk()
    made.pool("r1")
    elsewhere = WorkerName("decode-1")
    assert made.hear(ROUTER, FormBatch(BATCH, elsewhere, 100, 100)) == [Send(ROUTER, BatchFormed(BATCH, elsewhere, ()))]
    assert len(grants(made.hear(ROUTER, FORM))) == 1


@pytest.mark.parametrize(("max_blocks", "max_requests"), [(2, 100), (100, 1)])
def test_the_limits_of_the_router_hold(max_blocks: int, max_requests: int) -> None:
    made = Desk()
    for name in ("r1", "r2"):
        made.pool(name, 2)
    form = FormBatch(BATCH, ASKED, max_blocks, max_requests)
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, form))] == [R1]


def test_released_blocks_are_free_and_stamped_as_nobodys() -> None:
    made = Desk()
    content = made.pool("r1", 8)
    made.reserve("r2", 2)
    made.hear(ROUTER, FORM)
    released = made.hear(DECODE, LeasesReleased((content.lease_id,)))
    assert released == [freed(0, 1, 2, 3, 4, 5, 6, 7), *leased("r2", 2, 0, 1)]


def test_releasing_twice_frees_once() -> None:
    made = Desk()
    lease_id = made.pool("r1").lease_id
    made.hear(ROUTER, FORM)
    assert made.hear(DECODE, LeasesReleased((lease_id, lease_id))) == [freed(0)]
    assert made.hear(DECODE, LeasesReleased((lease_id,))) == []


def test_only_the_holder_can_release() -> None:
    made = Desk()
    lease_id = made.pool("r1").lease_id
    made.hear(ROUTER, FORM)
    assert made.hear("decode-1", LeasesReleased((lease_id,))) == []
    assert made.hear(DECODE, LeasesReleased((lease_id,))) == [freed(0)]


def test_what_is_not_granted_cannot_be_released() -> None:
    made = Desk()
    lease_id = made.pool("r1").lease_id
    made.reserve("r2", 1)
    assert made.hear(DECODE, LeasesReleased((lease_id, LeaseId(2), LeaseId(77)))) == []


def test_a_request_may_be_pooled_again_while_its_old_lease_is_not_yet_released() -> None:
    made = Desk()
    first = made.pool("r1", attempt=1)
    made.hear(ROUTER, FORM)
    second = made.pool("r1", attempt=2)
    assert (first.runs[0].first_block, second.runs[0].first_block) == (BlockId(0), BlockId(1))
    assert made.hear(DECODE, LeasesReleased((first.lease_id,))) == [freed(0)]
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(second)]


# --- drops


def test_dropped_while_reserved() -> None:
    made = Desk()
    made.reserve("r1", 2)
    assert made.hear(ROUTER, DropRequest(R1, 1)) == [freed(0, 1)]
    content = written("r1", BlocksReserved(R1, 1, LeaseId(1), 1, blocks(0, 1)))
    assert made.hear(PREFILL, content) == [taken("r1", False)]


def test_dropped_in_the_line() -> None:
    made = Desk()
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    assert made.hear(ROUTER, DropRequest(R2, 1)) == []
    assert made.hear(ROUTER, DropRequest(R1, 1)) == [freed(*range(8))]


def test_dropped_while_pooled() -> None:
    made = Desk()
    made.pool("r1", 2)
    assert made.hear(ROUTER, DropRequest(R1, 1)) == [freed(0, 1)]
    assert grants(made.hear(ROUTER, FORM)) == []


def test_dropped_while_granted_it_is_the_workers_to_release() -> None:
    made = Desk()
    lease_id = made.pool("r1").lease_id
    made.hear(ROUTER, FORM)
    assert made.hear(ROUTER, DropRequest(R1, 1)) == []
    assert made.hear(DECODE, LeasesReleased((lease_id,))) == [freed(0)]


# --- leases that end by themselves


def test_a_lease_not_used_in_time_is_taken_back() -> None:
    made = Desk()
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    made.now = 10.0
    assert made.do(Ticked()) == []
    made.now = 10.25
    assert made.do(Ticked()) == [freed(*range(8)), *leased("r2", 2, 0)]
    late = written("r1", BlocksReserved(R1, 1, LeaseId(1), 1, blocks(*range(8))))
    assert made.hear(PREFILL, late) == [taken("r1", False)]


def test_what_is_pooled_or_granted_has_no_deadline() -> None:
    made = Desk()
    made.pool("r1")
    made.hear(ROUTER, FORM)
    made.pool("r2")
    made.now = 1e6
    assert made.do(Ticked()) == []


def test_a_lost_prefill_worker_leaves_the_line_and_its_leases() -> None:
    made = Desk()
    made.link("prefill-1", Role.PREFILL_WORKER)
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    made.reserve("r3", 1, peer="prefill-1")
    assert made.lose(PREFILL) == [freed(*range(8)), *leased("r3", 2, 0, to="prefill-1")]


def test_what_a_lost_prefill_worker_had_written_stays() -> None:
    made = Desk()
    content = made.pool("r1")
    assert made.lose(PREFILL) == []
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(content)]


def test_what_a_lost_decode_worker_was_granted_is_lost() -> None:
    made = Desk()
    made.pool("r1")
    made.pool("r2")
    made.hear(ROUTER, FormBatch(BATCH, ASKED, 100, 1))
    assert made.lose(DECODE) == [Send(ROUTER, CopyLost(R1, 1)), freed(0)]
    assert made.link(DECODE, Role.DECODE_WORKER) == [Send(DECODE, ARENA)]
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, FORM))] == [R2]


def test_a_lost_router_is_waited_for() -> None:
    made = Desk()
    made.pool("r1")
    assert made.lose(ROUTER) == []
    made.reserve("r2", 1)
    content = written("r2", BlocksReserved(R2, 1, LeaseId(2), 2, blocks(1)))
    assert made.hear(PREFILL, content) == [taken("r2", True)]


def test_a_router_that_comes_back_knows_nothing_so_all_but_grants_go() -> None:
    made = Desk()
    lease_id = made.pool("r1").lease_id
    made.hear(ROUTER, FORM)
    made.pool("r2")
    made.reserve("r3", 6)
    made.reserve("r4", 6)
    made.lose(ROUTER)
    assert made.link(ROUTER, Role.ROUTER) == [Send(ROUTER, PoolRegistered(8)), freed(1), freed(2, 3, 4, 5, 6, 7)]
    assert made.hear(DECODE, LeasesReleased((lease_id,))) == [freed(0)]
    assert made.reserve("r3", 8)[0] == StampBlocks(blocks(0, 2, 3, 4, 5, 6, 7, 1), 4)


def test_a_message_that_the_pool_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take SubmitRequest"):
        Desk().hear(ROUTER, SubmitRequest(request(R3)))
