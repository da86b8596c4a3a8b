"""The KV pool: batches, what comes back from workers, and the ends of leases."""

import msgspec
import pytest

from alignedserve.core.attempts import epoch_end
from alignedserve.core.ids import BatchId, LeaseId, RequestId, WorkerName
from alignedserve.core.request import Slo
from alignedserve.messages.caches import (
    BatchGranted,
    CopyMissing,
    DecodePace,
    FetchCopy,
    LeasesReleased,
    LeasesReturned,
    ReservationRefused,
)
from alignedserve.messages.events import PeerDisconnected, Send, Ticked
from alignedserve.messages.gateways import SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import (
    BatchFormed,
    CopyLost,
    DropRequest,
    FormBatch,
    PoolLoad,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.workers import JoinedBatch
from kvpool.logic import PoolCommand
from kvpool.policies import make_batch_former
from kvpool.policies.batch_former import BatchFormer
from kvpool.waiting_forms import LINK_WAIT_S
from tests.harnesses.pool import (
    ARENA,
    ASKED,
    BATCH,
    FORM,
    L1,
    L2,
    PoolHarness,
    freed,
    grants,
    handoff_of,
    leased,
    reserved,
    taken,
    written,
)
from tests.support.samples import DECODE, PREFILL, R1, R2, R3, ROUTER, epoch, request

END = epoch_end(L1)


def density_first() -> BatchFormer:
    return make_batch_former("density_first", block_size=4, starvation_s=1000.0)


# --- batches


def test_a_batch_is_granted_shortest_first_and_the_router_hears_of_it() -> None:
    made = PoolHarness()
    long, short = made.pool("r1", 3), made.pool("r2", 1)
    handoffs = (handoff_of(short), handoff_of(long))
    assert made.hear(ROUTER, FORM) == [
        Send(ROUTER, BatchFormed(BATCH, ASKED, ((R2, epoch(1, 2)), (R1, epoch(1, 2))))),
        Send(DECODE, BatchGranted(BATCH, handoffs, is_aligned=False)),
    ]


def test_a_batch_of_similar_lengths_says_so() -> None:
    made = PoolHarness(density_first())
    content = made.pool("r1", 3)
    assert Send(DECODE, BatchGranted(BATCH, (handoff_of(content),), is_aligned=True)) in made.hear(ROUTER, FORM)


def test_only_what_is_of_the_running_lengths_joins_a_batch() -> None:
    made = PoolHarness(density_first())
    made.pool("r1", 1)
    content = made.pool("r2", 3)
    join = FormBatch(BatchId(2), ASKED, 100, 100, joins=JoinedBatch(BATCH, 9, 13))
    assert made.hear(ROUTER, join) == [
        Send(ROUTER, BatchFormed(BatchId(2), ASKED, ((R2, epoch(1, 2)),))),
        Send(DECODE, BatchGranted(BatchId(2), (handoff_of(content),), joins=BATCH)),
    ]
    assert made.hear(ROUTER, join) == [Send(ROUTER, BatchFormed(BatchId(2), ASKED, ()))]


def test_who_must_be_done_soon_is_in_the_next_batch() -> None:
    made = PoolHarness(density_first())
    made.pool("r1")
    made.pool("r2")
    urgent = request("r3", prompt_len=12, max_tokens=101, slo=Slo(deadline_s=10.0))
    made.pool(urgent, 3)
    only_one = FormBatch(BATCH, ASKED, 100, 1)
    # Nothing is known of the decode worker: half of the time is kept.
    made.now = 4.9
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R1]
    made.now = 5.0
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R3]


@pytest.mark.parametrize(("paces", "urgent_at_s"), [((0.02,), 8.0), ((0.04,), 6.0), ((0.02, 0.03), 7.0), ((0.2,), 5.0)])
def test_what_the_remaining_tokens_take_is_known_from_the_slowest_decode_worker(
    paces: tuple[float, ...], urgent_at_s: float
) -> None:
    made = PoolHarness(density_first())
    for number, iteration_s in enumerate(paces):
        made.link(f"decode-{number}", Role.DECODE_WORKER)
        assert made.hear(f"decode-{number}", DecodePace(iteration_s)) == []
    made.link("lost", Role.DECODE_WORKER)
    made.hear("lost", DecodePace(9.0))
    made.lose("lost")
    made.pool("r1")
    made.pool(request("r3", prompt_len=12, max_tokens=101, slo=Slo(deadline_s=10.0)), 3)  # 100 tokens to come
    only_one = FormBatch(BATCH, ASKED, 100, 1)
    made.now = urgent_at_s - 0.1
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R1]
    made.now = urgent_at_s
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R3]


def test_what_is_granted_is_not_granted_again() -> None:
    made = PoolHarness()
    made.pool("r1")
    made.hear(ROUTER, FORM)
    assert made.hear(ROUTER, FORM) == [Send(ROUTER, BatchFormed(BATCH, ASKED, ()))]


ELSEWHERE = WorkerName("decode-1")
FORM_ELSEWHERE = FormBatch(BATCH, ELSEWHERE, 100, 100)


def test_a_worker_that_is_not_linked_gets_its_batch_when_it_is() -> None:
    made = PoolHarness()
    made.pool("r1")
    assert made.hear(ROUTER, FORM_ELSEWHERE) == []
    assert len(grants(made.link(ELSEWHERE, Role.DECODE_WORKER))) == 1
    made.do(PeerDisconnected(Role.DECODE_WORKER, ELSEWHERE))
    assert grants(made.link(ELSEWHERE, Role.DECODE_WORKER)) == []  # it was asked for once


def test_where_links_never_come_none_is_waited_for() -> None:
    made = PoolHarness(link_wait_s=0.0)
    made.pool("r1")
    assert forms(made.hear(ROUTER, FORM_ELSEWHERE)) == [BatchFormed(BATCH, ELSEWHERE, ())]
    assert len(grants(made.hear(ROUTER, FORM))) == 1


def test_a_worker_that_does_not_link_in_time_gets_nothing() -> None:
    made = PoolHarness()
    made.pool("r1")
    made.hear(ROUTER, FORM_ELSEWHERE)
    made.now += LINK_WAIT_S - 0.01
    assert forms(made.do(Ticked())) == []
    made.now += 0.01
    assert forms(made.do(Ticked())) == [BatchFormed(BATCH, ELSEWHERE, ())]
    assert grants(made.link(ELSEWHERE, Role.DECODE_WORKER)) == []
    assert len(grants(made.hear(ROUTER, FORM))) == 1


def test_a_batch_that_waits_for_a_link_is_not_held_up_by_others_and_ends_with_its_router() -> None:
    made = PoolHarness()
    made.pool("r1")
    made.hear(ROUTER, FORM_ELSEWHERE)
    assert len(grants(made.hear(ROUTER, FORM))) == 1
    made.link(ROUTER, Role.ROUTER)
    assert [type(command) for command in made.link(ELSEWHERE, Role.DECODE_WORKER)] == [Send]
    made.now += LINK_WAIT_S
    assert forms(made.do(Ticked())) == []


def forms(commands: list[PoolCommand]) -> list[BatchFormed]:
    """The answers to FormBatch among these commands."""
    messages = [command.message for command in commands if isinstance(command, Send)]
    return [message for message in messages if isinstance(message, BatchFormed)]


@pytest.mark.parametrize(("max_blocks", "max_requests"), [(2, 100), (100, 1)])
def test_the_limits_of_the_router_hold(max_blocks: int, max_requests: int) -> None:
    made = PoolHarness()
    for name in ("r1", "r2"):
        made.pool(name, 2)
    form = FormBatch(BATCH, ASKED, max_blocks, max_requests)
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, form))] == [R1]


# --- releases and returns


def test_what_is_released_is_kept_and_counted_as_such() -> None:
    made = PoolHarness()
    handoff = made.grant("r1", 3)
    assert made.load == PoolLoad(num_blocks_used=3, num_pooled=0, num_reserved=0, num_blocks_kept=0)
    assert made.hear(DECODE, LeasesReleased((handoff.lease_id,))) == []
    assert made.load == PoolLoad(num_blocks_used=3, num_pooled=0, num_reserved=0, num_blocks_kept=3)


def test_released_blocks_go_to_the_next_in_line() -> None:
    made = PoolHarness()
    handoff = made.grant("r1", 8)
    made.reserve("r2", 2)
    assert made.hear(DECODE, LeasesReleased((handoff.lease_id,))) == [freed(*range(8)), *leased("r2", 2, 0, 1)]


def test_releasing_twice_keeps_once() -> None:
    made = PoolHarness()
    lease_id = made.grant("r1", 2).lease_id
    made.hear(DECODE, LeasesReleased((lease_id, lease_id)))
    made.hear(DECODE, LeasesReleased((lease_id,)))
    assert made.load == PoolLoad(2, 0, 0, 2)


@pytest.mark.parametrize("kind", [LeasesReleased, LeasesReturned])
def test_only_the_holder_can_release(kind: type[LeasesReleased | LeasesReturned]) -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    assert made.hear("decode-1", kind((handoff.lease_id,))) == []
    assert made.load == PoolLoad(num_blocks_used=1, num_pooled=0, num_reserved=0)


@pytest.mark.parametrize("kind", [LeasesReleased, LeasesReturned])
def test_only_granted_leases_can_be_released(kind: type[LeasesReleased | LeasesReturned]) -> None:
    made = PoolHarness()
    lease_id = made.pool("r1").lease_id
    made.reserve("r2", 1)
    assert made.hear(DECODE, kind((lease_id, LeaseId(2), LeaseId(77)))) == []
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=1, num_reserved=0)


def test_what_is_returned_is_indexed_again_with_the_next_step() -> None:
    made = PoolHarness()
    handoff = made.grant("r1", 2)
    pooled_again = Send(ROUTER, RequestPooled(R1, epoch(1, 3), 8, 2))
    assert made.hear(DECODE, LeasesReturned((handoff.lease_id,))) == [pooled_again]
    (second,) = grants(made.hear(ROUTER, FORM))
    assert second == msgspec.structs.replace(handoff, attempt=epoch(1, 4))


def test_returning_twice_indexes_once() -> None:
    made = PoolHarness()
    lease_id = made.grant("r1").lease_id
    assert len(made.hear(DECODE, LeasesReturned((lease_id, lease_id)))) == 1
    assert made.hear(DECODE, LeasesReturned((lease_id,))) == []


def test_a_request_may_be_pooled_again_while_its_old_lease_is_not_yet_released() -> None:
    made = PoolHarness()
    first = made.grant("r1")
    second = made.pool("r1", attempt=L2)
    assert made.hear(DECODE, LeasesReleased((first.lease_id,))) == [freed(0)]  # void since the second was written
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(second)]


def test_a_later_attempt_ends_what_is_pooled_when_it_reserves() -> None:
    made = PoolHarness()
    made.pool("r1", 2)
    assert made.reserve("r1", 2, attempt=L2) == [freed(0, 1), *leased("r1", 2, 0, 1, attempt=L2)]
    assert grants(made.hear(ROUTER, FORM)) == []


def test_a_reservation_behind_what_is_here_is_stale() -> None:
    made = PoolHarness()
    made.grant("r1")
    assert made.reserve("r1", 1) == [Send(PREFILL, ReservationRefused(R1, L1))]


# --- drops


def test_dropped_while_reserved() -> None:
    made = PoolHarness()
    made.reserve("r1", 2)
    assert made.hear(ROUTER, DropRequest(R1, L1)) == [freed(0, 1)]
    assert made.hear(PREFILL, written("r1", reserved("r1", 1, 0, 1))) == [taken("r1", False)]


def test_dropped_in_the_line() -> None:
    made = PoolHarness()
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    assert made.hear(ROUTER, DropRequest(R2, L1)) == []
    assert made.hear(ROUTER, DropRequest(R1, L1)) == [freed(*range(8))]


def test_dropped_while_pooled() -> None:
    made = PoolHarness()
    made.pool("r1", 2)
    assert made.hear(ROUTER, DropRequest(R1, END)) == [freed(0, 1)]
    assert grants(made.hear(ROUTER, FORM)) == []


def test_an_earlier_step_dropped_leaves_the_later_ones_alone() -> None:
    made = PoolHarness()
    content = made.pool("r1", 2)
    assert made.hear(ROUTER, DropRequest(R1, content.attempt)) == []
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(content)]


@pytest.mark.parametrize("kind", [LeasesReleased, LeasesReturned])
def test_dropped_while_granted_it_is_freed_when_its_reader_lets_go(kind: type[LeasesReleased | LeasesReturned]) -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    assert made.hear(ROUTER, DropRequest(R1, END)) == []
    assert made.hear(DECODE, kind((handoff.lease_id,))) == [freed(0)]
    assert grants(made.hear(ROUTER, FORM)) == []


# --- leases that end by themselves


def test_a_lease_not_used_in_time_is_taken_back() -> None:
    made = PoolHarness()
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    made.now = 10.0
    assert made.do(Ticked()) == []
    made.now = 10.25
    assert made.do(Ticked()) == [freed(*range(8)), *leased("r2", 2, 0)]
    late = written("r1", reserved("r1", 1, *range(8)))
    assert made.hear(PREFILL, late) == [taken("r1", False)]


def test_what_is_pooled_granted_or_kept_has_no_deadline() -> None:
    made = PoolHarness()
    made.keep("r1")
    made.grant("r2")
    made.pool("r3")
    made.now = 1e6
    assert made.do(Ticked()) == []


def test_a_lost_prefill_worker_leaves_the_line_and_its_leases() -> None:
    made = PoolHarness()
    made.link("prefill-1", Role.PREFILL_WORKER)
    made.reserve("r1", 8)
    made.reserve("r2", 1)
    made.reserve("r3", 1, peer="prefill-1")
    assert made.lose(PREFILL) == [freed(*range(8)), *leased("r3", 2, 0, to="prefill-1")]


def test_what_a_lost_prefill_worker_had_written_stays() -> None:
    made = PoolHarness()
    content = made.pool("r1")
    assert made.lose(PREFILL) == []
    assert grants(made.hear(ROUTER, FORM)) == [handoff_of(content)]


def test_grants_of_a_lost_decode_worker_are_kept_and_reported() -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    made.pool("r2")
    assert made.lose(DECODE) == [Send(ROUTER, CopyLost(R1, handoff.attempt, DECODE, BATCH))]
    assert made.load == PoolLoad(num_blocks_used=2, num_pooled=1, num_reserved=0, num_blocks_kept=1)
    assert made.link(DECODE, Role.DECODE_WORKER) == [Send(DECODE, ARENA)]
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, FORM))] == [R2]


def test_what_a_lost_worker_read_of_a_request_that_is_over_is_freed() -> None:
    made = PoolHarness()
    handoff = made.grant("r1")
    made.hear(ROUTER, DropRequest(R1, END))
    assert made.lose(DECODE) == [Send(ROUTER, CopyLost(R1, handoff.attempt, DECODE, BATCH)), freed(0)]


def test_blocks_read_by_a_lost_worker_go_to_the_next_in_line() -> None:
    made = PoolHarness()
    handoff = made.grant("r1", 8)
    made.reserve("r2", 1)
    assert made.lose(DECODE) == [
        Send(ROUTER, CopyLost(R1, handoff.attempt, DECODE, BATCH)),
        freed(*range(8)),
        *leased("r2", 2, 0),
    ]


def test_a_lost_router_is_waited_for() -> None:
    made = PoolHarness()
    made.pool("r1")
    assert made.lose(ROUTER) == []
    made.reserve("r2", 1)
    assert made.hear(PREFILL, written("r2", reserved("r2", 2, 1))) == [taken("r2", True)]


def test_a_router_that_comes_back_knows_nothing_so_all_but_grants_go() -> None:
    made = PoolHarness()
    kept, lease_id = made.keep("r0"), made.grant("r1").lease_id
    made.pool("r2")
    made.reserve("r3", 5)
    made.reserve("r4", 6)
    made.lose(ROUTER)
    assert made.link(ROUTER, Role.ROUTER) == [
        Send(ROUTER, PoolRegistered(8, "digest", latest_attempt=epoch(1))),
        freed(0),
        freed(2),
        freed(3, 4, 5, 6, 7),
    ]
    assert made.hear(PREFILL, FetchCopy(kept.request.request_id, L2)) == [
        Send(PREFILL, CopyMissing(RequestId("r0"), L2))
    ]
    assert made.hear(DECODE, LeasesReleased((lease_id,))) == [freed(1)]
    assert made.load == PoolLoad(num_blocks_used=0, num_pooled=0, num_reserved=0)


def test_a_message_that_the_pool_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take SubmitRequest"):
        PoolHarness().hear(ROUTER, SubmitRequest(request(R3)))
