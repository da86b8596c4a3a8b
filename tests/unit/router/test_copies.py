"""The router and the pools' copies: who is told to keep, to fetch and to drop; returned requests; urgent ones."""

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.request import Request, Slo
from alignedserve.messages.events import Send
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.gateways import AbortRequest, RequestFailed, RequestInterrupted, ResumeRequest
from alignedserve.messages.pools import (
    BatchFormed,
    BatchReceived,
    CopyKept,
    CopyLost,
    DropRequest,
    FormBatch,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.workers import (
    AttemptFailed,
    JoinedBatch,
    PeerNeeded,
    PrefillCompleted,
    RequestFinished,
    RequestPreempted,
    WorkerLoad,
)
from tests.harnesses.router import (
    ASKED,
    BATCH,
    DISPATCHED,
    END,
    GRANTED,
    INTERRUPTED,
    POOLED,
    RouterHarness,
    aborted,
    connected_router,
    decoding,
    dropped,
    given,
    granted,
    pooled,
    prefilling,
)
from tests.support.marks import each
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, R2, epoch, request, worker

RETURNED, GRANTED_AGAIN = epoch(1, 3), epoch(1, 4)
OTHER_POOL, OTHER_PREFILL = "pool-1", "prefill-1"


def other_node(made: RouterHarness) -> None:
    made.hear(OTHER_POOL, PoolRegistered(100))
    made.hear(OTHER_PREFILL, worker(can_prefill=True, can_decode=False, pool_name=OTHER_POOL))


# --- the end of a request ends its copy


def test_failed_while_decoding_the_pool_hears_of_it() -> None:
    assert decoding().hear(DECODE, AttemptFailed(R1, GRANTED, FailureKind.INTERNAL, "a fault")) == [
        aborted(DECODE),
        dropped(),
        Send(GATEWAY, RequestFailed(R1, FailureKind.INTERNAL, "a fault")),
    ]


def test_a_copy_that_went_with_its_pool_is_not_dropped() -> None:
    made = decoding()
    made.lose(POOL)
    made.hear(POOL, PoolRegistered(100))
    assert made.hear(DECODE, RequestFinished(R1, GRANTED, 8)) == []


def test_a_copy_elsewhere_is_dropped_when_another_pool_has_the_request() -> None:
    made = decoding()
    other_node(made)
    let_go = Send(DECODE, AbortRequest(R1, GRANTED))
    assert made.hear(OTHER_POOL, RequestPooled(R1, RETURNED, 6, 2)) == [dropped(), let_go]


@each("message", [CopyKept(R1, DISPATCHED), RequestPooled(R1, POOLED, 4, 1)], ids=["kept", "pooled"])
def test_a_late_message_of_a_pool_does_not_touch_what_another_has(message: CopyKept | RequestPooled) -> None:
    made = decoding()
    other_node(made)
    made.hear(OTHER_POOL, RequestPooled(R1, RETURNED, 6, 2))
    assert made.hear(POOL, message) == [Send(POOL, DropRequest(R1, message.attempt))]
    assert made.status().num_pooled == 1
    assert made.hear(GATEWAY, AbortRequest(R1)) == [Send(OTHER_POOL, DropRequest(R1, END))]


def test_the_copy_of_a_request_that_is_over_is_dropped() -> None:
    made = decoding()
    made.hear(DECODE, RequestFinished(R1, GRANTED, 8))
    assert made.hear(POOL, CopyKept(R1, DISPATCHED)) == [dropped()]


def test_a_kept_copy_is_dropped_at_the_end() -> None:
    made = prefilling()
    made.hear(DECODE, BatchReceived(NO_BATCH, ((R1, POOLED),)))
    assert made.hear(POOL, CopyKept(R1, DISPATCHED)) == []
    assert made.hear(DECODE, RequestFinished(R1, POOLED, 8)) == [dropped()]


# --- who computes again asks for it


def test_the_worker_beside_the_pool_is_told_of_the_copy() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.hear(GATEWAY, ResumeRequest(request(), (7,))) == [given(request(), 2, 7, has_copy=True)]


def test_a_pool_that_came_back_has_no_copy() -> None:
    made = decoding()
    made.lose(POOL)
    made.hear(POOL, PoolRegistered(100))
    made.lose(DECODE)
    assert made.hear(GATEWAY, ResumeRequest(request(), (7,))) == [given(request(), 2, 7)]


def test_a_worker_of_another_pool_is_not_told_of_the_copy() -> None:
    made = decoding()
    other_node(made)
    made.lose(PREFILL)
    made.lose(DECODE)
    assert made.hear(GATEWAY, ResumeRequest(request(), (7,))) == [given(request(), 2, 7, to=OTHER_PREFILL)]


# --- hand-overs in any order


def test_a_batch_may_be_received_before_the_pool_says_that_it_had_the_request() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),))) == []
    assert made.hear(POOL, RequestPooled(R1, POOLED, 4, 1)) == [Send(POOL, DropRequest(R1, POOLED))]
    assert made.status().num_decoding == 1
    assert made.hear(DECODE, RequestFinished(R1, GRANTED, 8)) == [dropped()]  # the pool has a copy all the same


def test_a_returned_request_is_pooled_again() -> None:
    made = decoding()
    made.hear(DECODE, WorkerLoad())
    let_go = Send(DECODE, AbortRequest(R1, GRANTED))  # it answers for the request until it hears this
    again = Send(POOL, FormBatch(BatchId(2), ASKED, 20, 1))
    assert made.hear(POOL, RequestPooled(R1, RETURNED, 6, 2)) == [let_go, again]
    made.hear(DECODE, BatchReceived(BatchId(2), ((R1, GRANTED_AGAIN),)))
    assert made.status().num_decoding == 1


def test_a_message_of_an_earlier_handoff_is_stale() -> None:
    made = decoding()
    made.hear(POOL, RequestPooled(R1, RETURNED, 6, 2))
    let_go = Send(DECODE, AbortRequest(R1, GRANTED))  # it may have sent it back before it said that it had it
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),))) == [let_go]
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),))) == []
    assert made.hear(POOL, CopyLost(R1, GRANTED)) == []
    assert made.status().num_pooled == 1


def test_what_the_pool_has_of_a_request_in_the_queue_is_not_wanted() -> None:
    made = prefilling()
    made.lose(PREFILL)
    assert made.hear(POOL, RequestPooled(R1, POOLED, 4, 1)) == [dropped()]


def test_a_copy_lost_on_the_way_lets_its_worker_be_asked_for_again() -> None:
    made = granted()
    assert made.hear(POOL, CopyLost(R1, GRANTED, DECODE, BATCH)) == [INTERRUPTED]
    made.submit(request("r2"))
    assert made.hear(POOL, RequestPooled(R2, epoch(2, 1), 4, 1)) == [Send(POOL, FormBatch(BatchId(2), ASKED, 20, 1))]


def test_a_lost_copy_does_not_end_the_wait_for_a_later_batch() -> None:
    made = pooled()
    for number in (2, 3):
        made.submit(request(f"r{number}"))
    made.hear(PREFILL, PrefillCompleted(R2, epoch(2), 4))
    made.hear(POOL, RequestPooled(R2, epoch(2, 1), 4, 1))
    made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED), (R2, epoch(2, 2)))))
    asked_again = Send(POOL, FormBatch(BatchId(2), ASKED, 20, 1))
    assert made.hear(POOL, CopyLost(R1, GRANTED, DECODE, BATCH)) == [INTERRUPTED, asked_again]
    assert made.hear(POOL, CopyLost(R2, epoch(2, 2), DECODE, BATCH)) == [Send(GATEWAY, RequestInterrupted(R2))]
    r3 = RequestId("r3")
    assert made.hear(POOL, RequestPooled(r3, epoch(3, 1), 4, 1)) == []
    assert made.hear(POOL, BatchFormed(BatchId(2), ASKED, ((r3, epoch(3, 2)),))) == []


def test_the_next_question_waits_for_what_the_worker_reports_of_the_last_batch() -> None:
    made = decoding()
    made.submit(request("r2"))
    assert made.hear(POOL, RequestPooled(R2, epoch(2, 1), 4, 1)) == []
    load = WorkerLoad(num_running=1, num_free_blocks=18, running=JoinedBatch(BATCH, 0, 16))
    (asked,) = made.hear(DECODE, load)
    assert asked == Send(POOL, FormBatch(BatchId(2), ASKED, 8, 1))


# --- urgent requests


def urgent_router() -> RouterHarness:
    """Requests have waited a second in the pool."""
    made = pooled()
    made.now = 1.0
    made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),)))
    return made


def urgent(name: str = "r2") -> Request:
    return request(name, slo=Slo(tpot_s=0.05))


SKIPPING = epoch(1000)  # attempts are at least the time in milliseconds


def test_who_cannot_wait_that_long_goes_straight_to_a_decode_worker() -> None:
    made = urgent_router()
    assert made.submit(urgent()) == [given(urgent(), 1000, bypass_to=WorkerName(DECODE))]
    assert made.submit(request("r3", slo=Slo(tpot_s=1.1))) == [given(request("r3", slo=Slo(tpot_s=1.1)), 1001)]


def test_it_goes_to_a_decode_worker_of_the_prefill_workers_own_node() -> None:
    made = urgent_router()
    made.hear("decode-00", worker(pool_name="pool-1"))  # idle, and first by name, but linked to other prefill workers
    assert made.submit(urgent()) == [given(urgent(), 1000, bypass_to=WorkerName(DECODE))]


def test_it_goes_to_one_of_another_node_while_its_own_has_no_slot() -> None:
    made = RouterHarness()
    made.hear(POOL, PoolRegistered(100))
    made.hear(PREFILL, worker(can_prefill=True, can_decode=False))
    made.hear(DECODE, worker(max_running_requests=1))
    made.submit(request())
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    made.hear(POOL, RequestPooled(R1, POOLED, 4, 1))
    made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),)))
    made.now = 1.0
    made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),)))
    made.hear("decode-far", worker(pool_name="pool-1"))
    assert made.submit(urgent()) == [
        given(urgent(), 1000, bypass_to=WorkerName("decode-far")),
        Send("decode-far", PeerNeeded(WorkerName(PREFILL))),
    ]


def test_a_batch_from_another_nodes_pool_has_the_later_copy_whatever_is_heard_first() -> None:
    made = decoding()  # by a worker beside POOL, which keeps a copy
    made.hear("pool-1", PoolRegistered(100))
    made.hear("decode-far", worker(pool_name="pool-1"))
    pooled_there, granted_there = GRANTED + 1, GRANTED + 2
    received = BatchReceived(BatchId(7), ((R1, granted_there),))
    assert made.hear("decode-far", received) == [Send(DECODE, AbortRequest(R1, GRANTED)), dropped()]
    late = made.hear("pool-1", RequestPooled(R1, pooled_there, 6, 2))
    assert late == [Send("pool-1", DropRequest(R1, pooled_there))]  # and nothing later of it
    assert made.hear("decode-far", RequestFinished(R1, granted_there, 8)) == [Send("pool-1", DropRequest(R1, END))]


def test_a_request_that_skipped_the_pool_is_the_workers_when_it_says_so() -> None:
    made = urgent_router()
    made.submit(urgent())
    made.hear(DECODE, BatchReceived(NO_BATCH, ((R2, SKIPPING + 1),)))
    assert made.status().num_decoding == 2


def test_a_request_that_found_no_space_there_is_pooled_as_any_other() -> None:
    made = urgent_router()
    made.submit(urgent())
    made.hear(POOL, RequestPooled(R2, SKIPPING + 1, 4, 1))
    assert made.status().num_pooled == 1


def test_the_decode_worker_is_lost_perhaps_with_a_request_that_skipped_the_pool() -> None:
    made = urgent_router()
    made.submit(urgent())
    assert [command.message for command in made.lose(DECODE)] == [INTERRUPTED.message, type(INTERRUPTED.message)(R2)]


@each("handoff_refused", [False, True])
def test_a_copy_is_dropped_only_when_what_came_from_it_was_refused(handoff_refused: bool) -> None:
    made = decoding()
    preempted = RequestPreempted(R1, GRANTED, (7,), handoff_refused=handoff_refused)
    kept, refused = [given(request(), 2, 7, has_copy=True)], [dropped(), given(request(), 2, 7)]
    assert made.hear(DECODE, preempted) == (refused if handoff_refused else kept)


def test_a_router_without_waits_sends_no_request_past_the_pool() -> None:
    assert connected_router().submit(urgent("r1")) == [given(urgent("r1"), 1)]
