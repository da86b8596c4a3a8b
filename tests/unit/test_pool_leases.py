"""The KV pool: batches, and the ends of leases."""

import pytest

from alignedserve.core.ids import BlockId, LeaseId, WorkerName
from alignedserve.messages.events import Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    BatchFormed,
    BatchGranted,
    BlocksReserved,
    CopyLost,
    DropRequest,
    FormBatch,
    LeasesReleased,
    PoolRegistered,
    SubmitRequest,
)
from kvpool.logic import StampBlocks
from tests.desks.pool import ARENA, ASKED, BATCH, FORM, Desk, freed, grants, handoff_of, leased, taken, written
from tests.samples import DECODE, PREFILL, R1, R2, R3, ROUTER, blocks, request

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
