"""The router, decision by decision. At time 0 epochs are numbered 1, 2, 3 in the order of dispatch."""

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BatchId, RequestId
from alignedserve.core.request import RequestClass
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest, ClusterStatus, RequestFailed, RequestRejected
from alignedserve.messages.pools import (
    BatchFormed,
    BatchReceived,
    DropRequest,
    FormBatch,
    PoolRegistered,
    RequestPooled,
)
from alignedserve.messages.workers import AttemptFailed, PrefillCompleted, RequestFinished, RequestPreempted
from router.policies import FcfsOrder
from tests.harnesses.router import (
    ASKED,
    BATCH,
    DISPATCHED,
    FORM_FIRST,
    GRANTED,
    POOLED,
    RouterHarness,
    aborted,
    colocated_router,
    connected_router,
    decoding,
    dropped,
    given,
    pooled,
    prefilling,
)
from tests.support.samples import DECODE, GATEWAY, POOL, PREFILL, R1, R2, epoch, request, worker

# --- admission

REFUSED_AGAIN = RequestFailed(R1, FailureKind.INTERNAL, "its cache was refused again and again")


def test_a_request_waits_while_no_worker_can_prefill() -> None:
    made = RouterHarness()
    assert made.submit(request()) == []
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == []
    assert made.hear(POOL, PoolRegistered(100)) == [given(request(), 1)]


def test_a_request_goes_to_a_worker_at_once() -> None:
    assert connected_router().submit(request()) == [given(request(), 1)]


def test_attempts_are_at_least_the_time_in_milliseconds() -> None:
    made = connected_router()
    made.now = 12.5
    assert made.submit(request()) == [given(request(), 12_500)]
    assert made.submit(request("r2")) == [given(request("r2"), 12_501)]


def test_attempts_go_on_above_those_that_workers_and_pools_have_had() -> None:
    made = connected_router()
    made.hear(DECODE, worker(latest_attempt=epoch(7) + 2))
    assert made.submit(request()) == [given(request(), 8)]
    made.hear(POOL, PoolRegistered(100, latest_attempt=epoch(20)))
    made.hear(POOL, PoolRegistered(100, latest_attempt=epoch(10)))
    assert made.submit(request("r2")) == [given(request("r2"), 21)]


def test_the_first_attempt_of_a_router_on_a_host_that_runs_for_long_is_reported_at_once() -> None:
    made = connected_router()
    made.now = 1e6
    sent = made.submit(request())
    assert sent[0] == given(request(), 10**9)
    (status,) = (send.message for send in sent[1:])
    assert isinstance(status, ClusterStatus)
    assert status.latest_attempt == epoch(10**9)
    assert made.submit(request("r2")) == [given(request("r2"), 10**9 + 1)]


def test_a_request_that_is_being_served_is_not_accepted_again() -> None:
    rejected = RequestRejected(R1, "this request is already being served", 0.0)
    assert prefilling().submit(request()) == [Send(GATEWAY, rejected)]


def test_a_request_that_fits_nowhere_fails_at_once() -> None:
    (command,) = connected_router().submit(request(prompt_len=70, max_tokens=11))
    assert isinstance(command.message, RequestFailed)
    assert command.message.kind is FailureKind.UNSERVABLE
    assert connected_router().submit(request(prompt_len=70, max_tokens=10)) != [command]


def test_the_queue_is_bounded_by_requests() -> None:
    made = RouterHarness(max_queued_requests=1)
    assert made.submit(request()) == []
    assert made.submit(request("r2")) == [Send(GATEWAY, RequestRejected(R2, "the queue is full", 1.0))]


def test_the_queue_is_bounded_by_tokens() -> None:
    made = RouterHarness(max_queued_tokens=10)
    assert made.submit(request(prompt_len=6)) == []
    assert made.submit(request("r2", prompt_len=5)) == [Send(GATEWAY, RequestRejected(R2, "the queue is full", 1.0))]
    assert made.submit(request("r3", prompt_len=4)) == []


def test_a_full_queue_says_when_it_will_have_drained() -> None:
    made = connected_router(max_prefill_tokens_per_worker=10, max_queued_tokens=100)
    for number in range(1, 6):
        made.submit(request(f"r{number}", prompt_len=10))
    for number in (1, 2):
        made.now = float(number)
        made.hear(PREFILL, PrefillCompleted(RequestId(f"r{number}"), _attempt_of(number), 10))
    made.submit(request("r6", prompt_len=60))
    made.now = 2.0
    (command,) = made.submit(request("r7", prompt_len=30))
    # 10 tokens a second, and 20 + 60 of them wait.
    assert command == Send(GATEWAY, RequestRejected(RequestId("r7"), "the queue is full", 8.0))


def _attempt_of(number: int) -> int:
    return epoch(1 if number == 1 else 1000 * (number - 1))


def test_a_rejected_request_is_not_held() -> None:
    made = RouterHarness(max_queued_requests=1)
    made.submit(request())
    made.submit(request("r2"))
    made.hear(GATEWAY, AbortRequest(R1))
    assert made.submit(request("r2")) == []


# --- prefills


def test_prefills_are_dispatched_up_to_the_allowance_without_overtaking() -> None:
    made = connected_router(max_prefill_tokens_per_worker=10)
    long, short = request("r2", prompt_len=7), request("r3", prompt_len=1)
    assert made.submit(request(prompt_len=6)) == [given(request(prompt_len=6), 1)]
    assert made.submit(long) == []
    assert made.submit(short) == []
    assert made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 6)) == [given(long, 2), given(short, 3)]


def test_best_effort_prompts_take_nothing_of_the_allowance_for_real_time_ones() -> None:
    made = connected_router(max_prefill_tokens_per_worker=10)
    document = request(prompt_len=9, request_class=RequestClass.BEST_EFFORT)
    chat, second, later = (request(f"r{number}", prompt_len=5) for number in (2, 3, 4))
    assert made.submit(document) == [given(document, 1)]
    assert made.submit(chat) == [given(chat, 2)]
    assert made.submit(second) == [given(second, 3)]
    assert made.submit(later) == []


def test_first_come_first_served_has_one_allowance_for_all() -> None:
    made = connected_router(order=FcfsOrder(), max_prefill_tokens_per_worker=10)
    document = request(prompt_len=9, request_class=RequestClass.BEST_EFFORT)
    assert made.submit(document) == [given(document, 1)]
    assert made.submit(request("r2", prompt_len=5)) == []


def test_a_prompt_above_the_allowance_goes_to_a_worker_with_nothing_else() -> None:
    made = connected_router(max_prefill_tokens_per_worker=10)
    assert made.submit(request(prompt_len=30)) == [given(request(prompt_len=30), 1)]


def test_the_order_of_the_queue_is_the_policys() -> None:
    made = RouterHarness()
    document = request("r1", request_class=RequestClass.BEST_EFFORT)
    chat = request("r2", arrival_s=5.0)
    made.submit(document)
    made.submit(chat)
    made.hear(POOL, PoolRegistered(100))
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == [given(chat, 1), given(document, 2)]


def test_a_colocated_worker_keeps_what_it_has_prefilled() -> None:
    made = colocated_router(max_running_requests=1)
    assert made.submit(request()) == [given(request(), 1, to=DECODE)]
    assert made.submit(request("r2")) == []
    assert made.hear(DECODE, PrefillCompleted(R1, DISPATCHED, 4)) == []
    assert made.hear(DECODE, RequestFinished(R1, DISPATCHED, 8)) == [given(request("r2"), 2, to=DECODE)]


# --- pool and decode


def test_what_is_pooled_is_formed_into_a_batch() -> None:
    made = prefilling()
    assert made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4)) == []
    assert made.hear(POOL, RequestPooled(R1, POOLED, 4, 1)) == [FORM_FIRST]


def test_a_batch_on_its_way_is_not_asked_for_again() -> None:
    made = pooled()
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),))) == []
    assert made.tick() == []
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),))) == []


def test_an_empty_batch_is_asked_for_again_after_a_tick() -> None:
    made = pooled()
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ())) == []
    assert made.tick() == [Send(POOL, FormBatch(BatchId(2), ASKED, 20, 1))]


def test_the_message_of_the_worker_may_be_faster_than_that_of_the_pool() -> None:
    made = pooled()
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),))) == []
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),))) == []
    assert made.status().num_decoding == 1


def test_the_message_of_the_worker_may_be_faster_than_that_of_the_pool_having_it() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),))) == []
    assert made.hear(POOL, RequestPooled(R1, POOLED, 4, 1)) == [Send(POOL, DropRequest(R1, POOLED))]


def test_a_finished_request_is_forgotten_and_its_copy_dropped() -> None:
    made = decoding()
    assert made.hear(DECODE, RequestFinished(R1, GRANTED, 8)) == [dropped()]
    assert made.submit(request()) == [given(request(), 2)]


def test_a_finished_request_may_end_at_the_prefill_worker() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    assert made.hear(PREFILL, RequestFinished(R1, DISPATCHED, 1)) == []
    assert made.status().num_prefilling == 0


def test_a_preempted_request_is_recomputed_with_its_tokens() -> None:
    made = decoding()
    assert made.hear(DECODE, RequestPreempted(R1, GRANTED, (7, 8))) == [given(request(), 2, 7, 8, has_copy=True)]
    status = made.status()
    assert (status.num_preemptions, status.num_handoffs_refused) == (1, 0)


def test_a_refused_handoff_is_recomputed_and_counted() -> None:
    made = decoding()
    refused = RequestPreempted(R1, GRANTED, (7,), handoff_refused=True)
    assert made.hear(DECODE, refused) == [dropped(), given(request(), 2, 7)]  # its copy may be as wrong
    status = made.status()
    assert (status.num_preemptions, status.num_handoffs_refused) == (0, 1)


def test_refused_again_and_again_it_fails() -> None:
    made = decoding(max_retries=0)
    assert made.hear(DECODE, refused_at(GRANTED)) == [dropped(), Send(GATEWAY, REFUSED_AGAIN)]


def test_refused_often_within_one_short_trouble_it_counts_once() -> None:
    made = decoding(max_retries=1)
    assert given(request(), 2, 7) in made.hear(DECODE, refused_at(GRANTED))
    for number in (3, 4, 5):
        assert given(request(), number, 7) in made.hear(PREFILL, refused_at(epoch(number - 1)))
    made.now += 2.0
    assert Send(GATEWAY, REFUSED_AGAIN) in made.hear(PREFILL, refused_at(epoch(5)))


def refused_at(attempt: int) -> RequestPreempted:
    return RequestPreempted(R1, attempt, (7,), handoff_refused=True)


def test_preemption_for_lack_of_memory_is_no_retry() -> None:
    made = decoding(max_retries=0)
    assert made.hear(DECODE, RequestPreempted(R1, GRANTED, (7,))) == [given(request(), 2, 7, has_copy=True)]


def test_a_prefill_worker_that_gives_up_what_others_have_taken_is_not_heeded() -> None:
    made = decoding()
    assert made.hear(PREFILL, RequestPreempted(R1, GRANTED, (7,))) == []
    assert made.status().num_decoding == 1


def test_a_failed_attempt_fails_its_request() -> None:
    made = prefilling()
    failed = AttemptFailed(R1, DISPATCHED, FailureKind.UNSERVABLE, "the KV pool is too small for it")
    assert made.hear(PREFILL, failed) == [
        aborted(PREFILL),
        dropped(),
        Send(GATEWAY, RequestFailed(R1, FailureKind.UNSERVABLE, "the KV pool is too small for it")),
    ]
