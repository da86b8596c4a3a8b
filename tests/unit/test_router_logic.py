"""The router, decision by decision. At time 0 attempts are numbered 1, 2, 3 in the order of giving out."""

from typing import Any

import pytest

from alignedserve.config.sections import RouterConfig
from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.request import Request, RequestClass
from alignedserve.messages.events import PeerLinked, PeerLost, Received, Send, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.links import (
    AbortRequest,
    AttemptFailed,
    BatchFormed,
    BatchReceived,
    BlocksTaken,
    ClusterStatus,
    CopyLost,
    DropRequest,
    FailureKind,
    FormBatch,
    PoolLoad,
    PoolRegistered,
    PrefillCompleted,
    PrefillRequest,
    RequestFailed,
    RequestFinished,
    RequestInterrupted,
    RequestPooled,
    RequestPreempted,
    RequestRejected,
    ResumeRequest,
    SubmitRequest,
    WorkerLoad,
)
from alignedserve.messages.wire import Message
from router.logic import RouterLogic
from router.policies.prefill_order import LeastSlackOrder
from tests.samples import DECODE, GATEWAY, POOL, PREFILL, R1, R2, request, worker

BATCH, ASKED = BatchId(1), WorkerName(DECODE)
FORM_FIRST = Send(POOL, FormBatch(BATCH, ASKED, max_blocks=20, max_requests=1))
INTERRUPTED = Send(GATEWAY, RequestInterrupted(R1))


class Desk:
    """A router that is told things at a time that only moves when asked to."""

    def __init__(self, **config: Any) -> None:
        self.now = 0.0
        self.logic = RouterLogic(config=RouterConfig(**config), order=LeastSlackOrder())
        self.link(GATEWAY, Role.GATEWAY)

    def link(self, peer: str, role: Role) -> list[Send]:
        return self.logic.on_event(PeerLinked(role, peer), self.now)

    def lose(self, peer: str) -> list[Send]:
        role = {GATEWAY: Role.GATEWAY, POOL: Role.KV_POOL, PREFILL: Role.PREFILL_WORKER}.get(peer, Role.DECODE_WORKER)
        return self.logic.on_event(PeerLost(role, peer), self.now)

    def hear(self, peer: str, message: Message) -> list[Send]:
        return self.logic.on_event(Received(peer, message), self.now)

    def submit(self, of: Request) -> list[Send]:
        return self.hear(GATEWAY, SubmitRequest(of))

    def tick(self) -> list[Send]:
        return self.logic.on_event(Ticked(), self.now)

    def status(self) -> ClusterStatus:
        for _ in range(4):
            for command in self.tick():
                if isinstance(command.message, ClusterStatus):
                    return command.message
        raise AssertionError("no status within four ticks")


def desk(**config: Any) -> Desk:
    """With one gateway, pool, prefill worker and decode worker."""
    made = Desk(**config)
    made.hear(POOL, PoolRegistered(100))
    made.hear(PREFILL, worker(can_prefill=True, can_decode=False))
    made.hear(DECODE, worker())
    return made


def colocated_desk(**changes: Any) -> Desk:
    made = Desk()
    made.hear(DECODE, worker(can_prefill=True, **changes))
    return made


def prefilling(**config: Any) -> Desk:
    """r1 is with the prefill worker."""
    made = desk(**config)
    made.submit(request())
    return made


def pooled(**config: Any) -> Desk:
    """r1 lies in the pool, which was asked for a batch."""
    made = prefilling(**config)
    made.hear(PREFILL, PrefillCompleted(R1, 1, 4))
    made.hear(POOL, RequestPooled(R1, 1, 4, 1))
    return made


def granted(**config: Any) -> Desk:
    """r1 is on its way to the decode worker."""
    made = pooled(**config)
    made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, 1),)))
    return made


def decoding(**config: Any) -> Desk:
    """r1 has arrived there."""
    made = granted(**config)
    made.hear(DECODE, BatchReceived(BATCH, ((R1, 1),)))
    return made


def given(of: Request, attempt: int, *generated: int, to: str = PREFILL) -> Send:
    return Send(to, PrefillRequest(of, attempt, generated))


# --- admission


def test_a_request_waits_while_nobody_can_prefill() -> None:
    made = Desk()
    assert made.submit(request()) == []
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == []
    assert made.hear(POOL, PoolRegistered(100)) == [given(request(), 1)]


def test_a_request_goes_to_a_worker_at_once() -> None:
    assert desk().submit(request()) == [given(request(), 1)]


def test_attempts_are_at_least_the_time_in_milliseconds() -> None:
    made = desk()
    made.now = 12.5
    assert made.submit(request()) == [given(request(), 12_500)]
    assert made.submit(request("r2")) == [given(request("r2"), 12_501)]


def test_a_request_that_is_being_served_is_not_accepted_again() -> None:
    rejected = RequestRejected(R1, "this request is already being served", 0.0)
    assert prefilling().submit(request()) == [Send(GATEWAY, rejected)]


def test_a_request_that_fits_nowhere_fails_at_once() -> None:
    (command,) = desk().submit(request(prompt_len=70, max_tokens=11))
    assert isinstance(command.message, RequestFailed)
    assert command.message.kind is FailureKind.UNSERVABLE
    assert desk().submit(request(prompt_len=70, max_tokens=10)) != [command]


def test_the_queue_is_bounded_by_requests() -> None:
    made = Desk(max_queued_requests=1)
    assert made.submit(request()) == []
    assert made.submit(request("r2")) == [Send(GATEWAY, RequestRejected(R2, "the queue is full", 1.0))]


def test_the_queue_is_bounded_by_tokens() -> None:
    made = Desk(max_queued_tokens=10)
    assert made.submit(request(prompt_len=6)) == []
    assert made.submit(request("r2", prompt_len=5)) == [Send(GATEWAY, RequestRejected(R2, "the queue is full", 1.0))]
    assert made.submit(request("r3", prompt_len=4)) == []


def test_a_full_queue_says_when_it_will_have_drained() -> None:
    made = desk(max_prefill_tokens_per_worker=10, max_queued_tokens=100)
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
    return 1 if number == 1 else 1000 * (number - 1)


def test_a_rejected_request_is_not_held() -> None:
    made = Desk(max_queued_requests=1)
    made.submit(request())
    made.submit(request("r2"))
    made.hear(GATEWAY, AbortRequest(R1))
    assert made.submit(request("r2")) == []


# --- prefills


def test_prefills_are_handed_out_up_to_the_allowance_and_nobody_overtakes() -> None:
    made = desk(max_prefill_tokens_per_worker=10)
    long, short = request("r2", prompt_len=7), request("r3", prompt_len=1)
    assert made.submit(request(prompt_len=6)) == [given(request(prompt_len=6), 1)]
    assert made.submit(long) == []
    assert made.submit(short) == []
    assert made.hear(PREFILL, PrefillCompleted(R1, 1, 6)) == [given(long, 2), given(short, 3)]


def test_a_prompt_above_the_allowance_goes_to_a_worker_with_nothing_else() -> None:
    made = desk(max_prefill_tokens_per_worker=10)
    assert made.submit(request(prompt_len=30)) == [given(request(prompt_len=30), 1)]


def test_the_order_of_the_queue_is_the_policys() -> None:
    made = Desk()
    document = request("r1", request_class=RequestClass.BEST_EFFORT)
    chat = request("r2", arrival_s=5.0)
    made.submit(document)
    made.submit(chat)
    made.hear(POOL, PoolRegistered(100))
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == [given(chat, 1), given(document, 2)]


def test_a_colocated_worker_keeps_what_it_has_prefilled() -> None:
    made = colocated_desk(max_running=1)
    assert made.submit(request()) == [given(request(), 1, to=DECODE)]
    assert made.submit(request("r2")) == []
    assert made.hear(DECODE, PrefillCompleted(R1, 1, 4)) == []
    assert made.hear(DECODE, RequestFinished(R1, 1, 8)) == [given(request("r2"), 2, to=DECODE)]


# --- pool and decode


def test_what_is_pooled_is_formed_into_a_batch() -> None:
    made = prefilling()
    assert made.hear(PREFILL, PrefillCompleted(R1, 1, 4)) == []
    assert made.hear(POOL, RequestPooled(R1, 1, 4, 1)) == [FORM_FIRST]


def test_a_batch_on_its_way_is_not_asked_for_again() -> None:
    made = pooled()
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, 1),))) == []
    assert made.tick() == []
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, 1),))) == []


def test_an_empty_batch_is_asked_for_again_after_a_tick() -> None:
    made = pooled()
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ())) == []
    assert made.tick() == [Send(POOL, FormBatch(BatchId(2), ASKED, 20, 1))]


def test_the_word_of_the_worker_may_be_faster_than_that_of_the_pool() -> None:
    made = pooled()
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, 1),))) == []
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, 1),))) == []
    assert made.status().num_decoding == 1


def test_the_word_of_the_worker_may_be_faster_than_that_of_the_pool_having_it() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, 1, 4))
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, 1),))) == []
    assert made.hear(POOL, RequestPooled(R1, 1, 4, 1)) == [Send(POOL, DropRequest(R1, 1))]


def test_a_finished_request_is_forgotten() -> None:
    made = decoding()
    assert made.hear(DECODE, RequestFinished(R1, 1, 8)) == []
    assert made.submit(request()) == [given(request(), 2)]


def test_a_finished_request_may_end_at_the_prefill_worker() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, 1, 4))
    assert made.hear(PREFILL, RequestFinished(R1, 1, 1)) == []
    assert made.status().num_prefilling == 0


def test_a_preempted_request_is_recomputed_with_its_tokens() -> None:
    made = decoding()
    assert made.hear(DECODE, RequestPreempted(R1, 1, (7, 8))) == [given(request(), 2, 7, 8)]
    status = made.status()
    assert (status.num_preemptions, status.num_handoffs_refused) == (1, 0)


def test_a_refused_handoff_is_recomputed_and_counted() -> None:
    made = decoding()
    assert made.hear(DECODE, RequestPreempted(R1, 1, (7,), handoff_refused=True)) == [given(request(), 2, 7)]
    status = made.status()
    assert (status.num_preemptions, status.num_handoffs_refused) == (0, 1)


def test_refused_again_and_again_it_fails() -> None:
    made = decoding(max_requeues=0)
    failed = RequestFailed(R1, FailureKind.INTERNAL, "its cache was refused again and again")
    assert made.hear(DECODE, RequestPreempted(R1, 1, (7,), handoff_refused=True)) == [Send(GATEWAY, failed)]


def test_preemption_for_want_of_room_is_no_strike_against_a_request() -> None:
    made = decoding(max_requeues=0)
    assert made.hear(DECODE, RequestPreempted(R1, 1, (7,))) == [given(request(), 2, 7)]


def test_a_prefill_worker_that_gives_up_what_others_have_taken_is_not_heeded() -> None:
    made = decoding()
    assert made.hear(PREFILL, RequestPreempted(R1, 1, (7,))) == []
    assert made.status().num_decoding == 1


def test_a_failed_attempt_fails_its_request() -> None:
    made = prefilling()
    failed = AttemptFailed(R1, 1, FailureKind.UNSERVABLE, "the KV pool is too small for it")
    assert made.hear(PREFILL, failed) == [
        Send(PREFILL, AbortRequest(R1, 1)),
        Send(POOL, DropRequest(R1, 1)),
        Send(GATEWAY, RequestFailed(R1, FailureKind.UNSERVABLE, "the KV pool is too small for it")),
    ]


# --- stale attempts: r1 was interrupted and given out again, so that attempt 1 is over and attempt 2 goes on


@pytest.fixture
def second() -> Desk:
    made = prefilling()
    made.lose(PREFILL)
    made.hear(GATEWAY, ResumeRequest(request(), (7,)))
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == [given(request(), 2, 7)]
    return made


@pytest.mark.parametrize(
    ("peer", "stale", "answer"),
    [
        (PREFILL, PrefillCompleted(R1, 1, 4), []),
        (POOL, RequestPooled(R1, 1, 4, 1), [Send(POOL, DropRequest(R1, 1))]),
        (POOL, BatchFormed(BATCH, ASKED, ((R1, 1),)), []),
        (DECODE, BatchReceived(BATCH, ((R1, 1),)), [Send(DECODE, AbortRequest(R1, 1))]),
        (POOL, CopyLost(R1, 1), []),
        (DECODE, RequestFinished(R1, 1, 3), []),
        (DECODE, RequestPreempted(R1, 1, (7, 8)), []),
        (DECODE, AttemptFailed(R1, 1, FailureKind.INTERNAL, "a fault"), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_word_of_an_earlier_attempt_changes_nothing(
    second: Desk, peer: str, stale: Message, answer: list[Send]
) -> None:
    assert second.hear(peer, stale) == answer
    status = second.status()
    assert (status.num_prefilling, status.num_preemptions) == (1, 0)
    assert second.hear(PREFILL, PrefillCompleted(R1, 2, 5)) == []
    assert second.hear(POOL, RequestPooled(R1, 2, 5, 2)) == [FORM_FIRST]


@pytest.mark.parametrize(
    ("peer", "unknown", "answer"),
    [
        (POOL, RequestPooled(R2, 1, 4, 1), [Send(POOL, DropRequest(R2, 1))]),
        (DECODE, BatchReceived(BATCH, ((R2, 1),)), [Send(DECODE, AbortRequest(R2, 1))]),
        (DECODE, RequestFinished(R2, 1, 3), []),
        (GATEWAY, AbortRequest(R2), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_word_of_an_unknown_request_is_answered_by_letting_go(peer: str, unknown: Message, answer: list[Send]) -> None:
    assert desk().hear(peer, unknown) == answer


# --- aborts, in every stage


def test_aborted_in_the_queue() -> None:
    made = Desk()
    made.submit(request())
    assert made.hear(GATEWAY, AbortRequest(R1)) == []
    assert made.status().num_queued == 0


def test_aborted_while_prefilling() -> None:
    expected = [Send(PREFILL, AbortRequest(R1, 1)), Send(POOL, DropRequest(R1, 1))]
    assert prefilling().hear(GATEWAY, AbortRequest(R1)) == expected


def test_aborted_while_pooled() -> None:
    assert pooled().hear(GATEWAY, AbortRequest(R1)) == [Send(POOL, DropRequest(R1, 1))]


def test_aborted_on_the_way_to_the_decode_worker() -> None:
    made = granted()
    assert made.hear(GATEWAY, AbortRequest(R1)) == [Send(POOL, DropRequest(R1, 1))]
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, 1),))) == [Send(DECODE, AbortRequest(R1, 1))]


def test_aborted_while_decoding() -> None:
    made = decoding()
    assert made.hear(GATEWAY, AbortRequest(R1)) == [Send(DECODE, AbortRequest(R1, 1))]
    assert made.status().num_decoding == 0


def test_an_abort_makes_room_for_the_next() -> None:
    made = desk(max_prefill_tokens_per_worker=4)
    made.submit(request())
    made.submit(request("r2"))
    assert made.hear(GATEWAY, AbortRequest(R1))[-1] == given(request("r2"), 2)


def test_a_lost_gateway_aborts_what_is_its() -> None:
    made = decoding()
    made.link("gateway-1", Role.GATEWAY)
    made.hear("gateway-1", SubmitRequest(request("r2")))
    assert made.lose(GATEWAY) == [Send(DECODE, AbortRequest(R1, 1))]
    assert made.status().num_prefilling == 1


# --- losses, in every stage


def test_the_prefill_worker_is_lost_while_prefilling() -> None:
    assert prefilling().lose(PREFILL) == [INTERRUPTED]


def test_the_prefill_worker_is_lost_while_pooled_or_later() -> None:
    assert pooled().lose(PREFILL) == []
    assert decoding().lose(PREFILL) == []


def test_the_pool_is_lost_while_prefilling() -> None:
    made = prefilling()
    assert made.lose(POOL) == []
    assert made.hear(PREFILL, PrefillCompleted(R1, 1, 4)) == [Send(PREFILL, AbortRequest(R1, 1)), INTERRUPTED]


def test_the_pool_is_lost_and_back_while_prefilling() -> None:
    made = prefilling()
    made.lose(POOL)
    made.hear(POOL, PoolRegistered(100))
    assert made.hear(PREFILL, PrefillCompleted(R1, 1, 4)) == [Send(PREFILL, AbortRequest(R1, 1)), INTERRUPTED]


def test_the_pool_is_lost_while_it_takes_the_blocks() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, 1, 4))
    assert made.lose(POOL) == [INTERRUPTED]


def test_the_pool_is_lost_while_pooled() -> None:
    assert pooled().lose(POOL) == [INTERRUPTED]


def test_the_pool_is_lost_on_the_way_to_the_decode_worker() -> None:
    assert granted().lose(POOL) == [INTERRUPTED]


def test_the_pool_is_lost_while_decoding() -> None:
    assert decoding().lose(POOL) == []


def test_the_decode_worker_is_lost_on_the_way_to_it() -> None:
    assert granted().lose(DECODE) == [INTERRUPTED]


def test_the_decode_worker_is_lost_before_the_pool_says_what_went_to_it() -> None:
    made = pooled()
    assert made.lose(DECODE) == []
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, 1),))) == [INTERRUPTED]


def test_the_decode_worker_is_lost_while_decoding() -> None:
    assert decoding().lose(DECODE) == [INTERRUPTED]


def test_a_copy_lost_with_its_receiver() -> None:
    made = granted()
    assert made.hear(POOL, CopyLost(R1, 1)) == [INTERRUPTED]


def test_a_copy_lost_after_it_arrived_is_no_loss() -> None:
    assert decoding().hear(POOL, CopyLost(R1, 1)) == []


def test_a_loss_is_counted_and_the_last_one_fails_the_request() -> None:
    failed = RequestFailed(R1, FailureKind.WORKER_LOST, "its workers were lost again and again")
    assert decoding(max_requeues=0).lose(DECODE) == [Send(GATEWAY, failed)]


# --- going on


def test_an_interrupted_request_goes_on_from_what_the_client_has() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.tick() == []  # not before the gateway has said where
    assert made.hear(GATEWAY, ResumeRequest(request(), (7, 8, 9))) == [given(request(), 2, 7, 8, 9)]


def test_an_interrupted_request_may_be_aborted() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.hear(GATEWAY, AbortRequest(R1)) == []
    assert made.status().num_queued == 0


def test_resuming_twice_queues_it_once_and_the_last_word_counts() -> None:
    made = decoding()
    made.lose(PREFILL)
    made.lose(DECODE)
    made.hear(GATEWAY, ResumeRequest(request(), (7,)))
    made.hear(GATEWAY, ResumeRequest(request(), (7, 8)))
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == [given(request(), 2, 7, 8)]


def test_a_request_of_an_earlier_router_is_taken_on() -> None:
    assert desk().hear(GATEWAY, ResumeRequest(request(), (7, 8))) == [given(request(), 1, 7, 8)]


def test_a_request_of_an_earlier_router_is_taken_on_even_when_the_queue_is_full() -> None:
    made = Desk(max_queued_requests=1)
    made.submit(request("r2"))
    assert made.hear(GATEWAY, ResumeRequest(request(), ())) == []
    assert made.status().num_queued == 2


@pytest.mark.parametrize("stage", [prefilling, pooled, granted, decoding])
def test_resuming_what_goes_on_changes_nothing(stage: Any) -> None:
    assert stage().hear(GATEWAY, ResumeRequest(request(), (7,))) == []


def test_resuming_from_another_gateway_is_ignored() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.hear("gateway-1", ResumeRequest(request(), (7,))) == []


def test_tokens_that_a_lost_worker_took_with_it_are_made_again() -> None:
    made = decoding()
    made.hear(DECODE, RequestPreempted(R1, 1, (7, 8, 9)))  # but the client has only the first
    assert made.hear(GATEWAY, ResumeRequest(request(), (7,))) == [
        Send(PREFILL, AbortRequest(R1, 2)),
        Send(POOL, DropRequest(R1, 2)),
        given(request(), 3, 7),
    ]


# --- status


def test_every_gateway_hears_of_the_status_at_every_fourth_tick() -> None:
    made = decoding()
    made.link("gateway-1", Role.GATEWAY)
    made.submit(request("r2"))
    made.hear(POOL, PoolLoad(3, 0, 0))
    made.hear(DECODE, WorkerLoad(0, 1, 0, 0, 18, 5))
    status = ClusterStatus(
        num_queued=0,
        num_prefilling=1,
        num_pooled=0,
        num_decoding=1,
        num_prefill_workers=1,
        num_decode_workers=1,
        num_pool_blocks=100,
        num_pool_blocks_used=3,
        num_worker_blocks=40,
        num_worker_blocks_used=2,
        num_preemptions=0,
        num_handoffs_verified=5,
        num_handoffs_refused=0,
    )
    assert [made.tick(), made.tick(), made.tick()] == [[], [], []]
    assert made.tick() == [Send(GATEWAY, status), Send("gateway-1", status)]


def test_a_message_that_the_router_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take BlocksTaken"):
        desk().hear(POOL, BlocksTaken(R1, 1, is_accepted=True))
