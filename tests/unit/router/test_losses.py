"""The router when things go wrong: stale word, aborts, losses, going on; and what it says of itself."""

from typing import Any

import pytest

from alignedserve.core.errors import FailureKind
from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.core.lifecycle import beyond_unreported
from alignedserve.core.request import Slo
from alignedserve.messages.caches import BlocksTaken
from alignedserve.messages.events import Send
from alignedserve.messages.gateways import AbortRequest, RequestFailed, ResumeRequest, SubmitRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import BatchFormed, BatchReceived, CopyKept, CopyLost, PoolRegistered, RequestPooled
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import (
    AttemptFailed,
    MoveRequest,
    PeersChanged,
    PrefillCompleted,
    PrefillRequest,
    RequestFinished,
    RequestPreempted,
    WorkerLoad,
)
from router.state import FORGIVEN_TOKENS
from tests.harnesses.router import (
    ASKED,
    BATCH,
    DISPATCHED,
    END,
    FORM_FIRST,
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

NOT_DIALLED = Send(DECODE, PeersChanged((), left=(WorkerName(PREFILL),)))

# --- stale attempts: r1 was interrupted and dispatched again, so that its first epoch has ended and the second goes on


@pytest.fixture
def second() -> RouterHarness:
    made = prefilling()
    made.lose(PREFILL)
    made.hear(GATEWAY, ResumeRequest(request(), (7,)))
    registered = worker(can_prefill=True, can_decode=False)
    joined = Send(DECODE, PeersChanged((WorkerName(PREFILL),)))
    assert made.hear(PREFILL, registered) == [joined, given(request(), 2, 7)]
    return made


@pytest.mark.parametrize(
    ("peer", "stale", "answer"),
    [
        (PREFILL, PrefillCompleted(R1, DISPATCHED, 4), []),
        (POOL, RequestPooled(R1, POOLED, 4, 1), [dropped()]),
        (POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),)), []),
        (DECODE, BatchReceived(BATCH, ((R1, GRANTED),)), [aborted(DECODE)]),
        (POOL, CopyKept(R1, DISPATCHED), [dropped()]),
        (POOL, CopyLost(R1, GRANTED), []),
        (DECODE, RequestFinished(R1, GRANTED, 3), []),
        (DECODE, RequestPreempted(R1, GRANTED, (7, 8)), []),
        (DECODE, AttemptFailed(R1, GRANTED, FailureKind.INTERNAL, "a fault"), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_of_an_earlier_attempt_changes_nothing(
    second: RouterHarness, peer: str, stale: Message, answer: list[Send]
) -> None:
    assert second.hear(peer, stale) == answer
    status = second.status()
    assert (status.num_prefilling, status.num_preemptions) == (1, 0)
    assert second.hear(PREFILL, PrefillCompleted(R1, epoch(2), 5)) == []
    assert second.hear(POOL, RequestPooled(R1, epoch(2, 1), 5, 2)) == [FORM_FIRST]


def test_a_completion_of_an_earlier_attempt_does_not_count_for_the_later_one() -> None:
    made = decoding()
    made.hear(DECODE, RequestPreempted(R1, GRANTED, (7, 8)))
    made.hear(GATEWAY, ResumeRequest(request(), (7,)))
    assert made.hear(PREFILL, PrefillCompleted(R1, epoch(2), 6)) == []
    assert made.hear(PREFILL, PrefillCompleted(R1, epoch(3), 5)) == []
    assert made.lose(POOL) == [INTERRUPTED]  # it was on its way there


@each(
    ("peer", "unknown", "answer"),
    [
        (POOL, RequestPooled(R2, POOLED, 4, 1), [dropped(R2)]),
        (DECODE, BatchReceived(BATCH, ((R2, GRANTED),)), [Send(DECODE, AbortRequest(R2, END))]),
        (POOL, CopyKept(R2, DISPATCHED), [dropped(R2)]),
        (POOL, CopyLost(R2, GRANTED), [dropped(R2)]),
        (POOL, BatchFormed(BATCH, ASKED, ((R2, GRANTED),)), []),
        (DECODE, RequestFinished(R2, GRANTED, 3), []),
        (GATEWAY, AbortRequest(R2), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_of_an_unknown_request_is_answered_by_a_release(
    peer: str, unknown: Message, answer: list[Send]
) -> None:
    assert connected_router().hear(peer, unknown) == answer


# --- aborts, in every stage


def test_aborted_in_the_queue() -> None:
    made = RouterHarness()
    made.submit(request())
    assert made.hear(GATEWAY, AbortRequest(R1)) == []
    assert made.status().num_queued == 0


def test_aborted_before_it_decodes() -> None:
    assert prefilling().hear(GATEWAY, AbortRequest(R1)) == [aborted(PREFILL), dropped()]
    assert pooled().hear(GATEWAY, AbortRequest(R1)) == [dropped()]


def test_aborted_on_the_way_to_the_decode_worker() -> None:
    made = granted()
    assert made.hear(GATEWAY, AbortRequest(R1)) == [dropped()]
    assert made.hear(DECODE, BatchReceived(BATCH, ((R1, GRANTED),))) == [aborted(DECODE)]


def test_aborted_while_decoding() -> None:
    made = decoding()
    assert made.hear(GATEWAY, AbortRequest(R1)) == [aborted(DECODE), dropped()]
    assert made.status().num_decoding == 0


def test_an_abort_frees_the_queue_for_the_next() -> None:
    made = connected_router(max_prefill_tokens_per_worker=4)
    made.submit(request())
    made.submit(request("r2"))
    assert made.hear(GATEWAY, AbortRequest(R1))[-1] == given(request("r2"), 2)


def test_a_lost_gateway_aborts_what_is_its() -> None:
    made = decoding()
    made.link("gateway-1", Role.GATEWAY)
    made.hear("gateway-1", SubmitRequest(request("r2")))
    assert made.lose(GATEWAY) == [aborted(DECODE), dropped()]
    assert made.status().num_prefilling == 1


# --- losses, in every stage


@each(
    ("stage", "peer", "commands"),
    [
        (prefilling, PREFILL, [INTERRUPTED, NOT_DIALLED]),
        (pooled, PREFILL, [NOT_DIALLED]),
        (decoding, PREFILL, [NOT_DIALLED]),
        (pooled, POOL, [INTERRUPTED]),
        (granted, POOL, [INTERRUPTED]),
        (decoding, POOL, []),
        (granted, DECODE, [INTERRUPTED]),
        (decoding, DECODE, [INTERRUPTED]),
    ],
)
def test_a_loss_interrupts_who_was_there(stage: Any, peer: str, commands: list[Send]) -> None:
    assert stage().lose(peer) == commands


@each("comes_back", [False, True])
def test_the_pool_is_lost_while_prefilling(comes_back: bool) -> None:
    made = prefilling()
    assert made.lose(POOL) == []
    if comes_back:
        made.hear(POOL, PoolRegistered(100))
    assert made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4)) == [
        Send(PREFILL, AbortRequest(R1, DISPATCHED)),
        INTERRUPTED,
    ]


def test_a_lost_grant_is_not_waited_for_though_its_request_has_moved_on() -> None:
    made = granted()
    made.hear(GATEWAY, AbortRequest(R1))
    assert made.hear(POOL, CopyLost(R1, GRANTED, DECODE, BATCH)) == [dropped()]
    made.submit(request("r2"))
    made.hear(PREFILL, PrefillCompleted(R2, epoch(2), 4))
    (form,) = made.hear(POOL, RequestPooled(R2, epoch(2, 1), 4, 1))
    assert form.peer == POOL


def test_the_pool_is_lost_while_it_takes_the_blocks() -> None:
    made = prefilling()
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    assert made.lose(POOL) == [INTERRUPTED]


def test_the_decode_worker_is_lost_before_the_pool_says_what_went_to_it() -> None:
    made = pooled()
    assert made.lose(DECODE) == []
    assert made.hear(POOL, BatchFormed(BATCH, ASKED, ((R1, GRANTED),))) == [INTERRUPTED]


def test_the_worker_that_was_to_take_a_request_over_is_lost() -> None:
    made = RouterHarness()
    made.hear(DECODE, worker(can_prefill=True, can_move=True))
    for nth, name in ((1, R1), (2, R2)):
        made.submit(request(name))
        made.hear(DECODE, PrefillCompleted(name, epoch(nth), 4))
    made.hear("decode-1", worker(can_prefill=True, can_move=True))
    made.hear(DECODE, WorkerLoad(num_free_blocks=20, lean=0.0))
    assert made.tick() == [Send(DECODE, MoveRequest(R1, epoch(1), WorkerName("decode-1")))]
    assert made.lose("decode-1") == [aborted(DECODE), INTERRUPTED]


def test_a_copy_lost_with_its_receiver() -> None:
    assert granted().hear(POOL, CopyLost(R1, GRANTED)) == [INTERRUPTED]


def test_a_copy_lost_after_it_arrived_may_be_lost_on_its_way_back() -> None:
    made = decoding()
    assert made.hear(POOL, CopyLost(R1, GRANTED)) == [aborted(DECODE), INTERRUPTED]
    assert made.lose(DECODE) == []


def test_a_copy_lost_and_gone_further_since_is_no_loss() -> None:
    made = decoding()
    made.hear(DECODE, BatchReceived(BatchId(2), ((R1, epoch(1, 4)),)))
    assert made.hear(POOL, CopyLost(R1, GRANTED)) == []


def test_a_loss_is_counted_and_the_last_one_fails_the_request() -> None:
    failed = RequestFailed(R1, FailureKind.WORKER_LOST, "its workers were lost again and again")
    made = decoding(max_retries=0)
    assert made.lose(DECODE) == [INTERRUPTED]
    assert made.hear(GATEWAY, ResumeRequest(request(), (7, 8))) == [dropped(), Send(GATEWAY, failed)]


@each(("tokens_between", "is_served"), [(FORGIVEN_TOKENS, True), (FORGIVEN_TOKENS - 1, False)])
def test_losses_before_it_came_further_are_forgotten(tokens_between: int, is_served: bool) -> None:
    """A document of hours outlives more workers than a crash of its own may cost."""
    made, of = RouterHarness(max_retries=1), request(max_tokens=4096)
    large = worker(can_prefill=True, num_blocks=2000)
    made.hear(DECODE, large)
    made.submit(of)
    told: list[Send] = []
    for turn in range(1, 5 if is_served else 3):
        made.lose(DECODE)
        told += made.hear(GATEWAY, ResumeRequest(of, tuple(range(turn * tokens_between))))
        made.hear(DECODE, large)
    assert [type(one.message) for one in told] == ([] if is_served else [RequestFailed])
    assert made.status().num_prefilling == is_served


# --- going on


def test_an_interrupted_request_goes_on_from_what_the_client_has() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.tick() == []  # not before the gateway has said where
    assert made.hear(GATEWAY, ResumeRequest(request(), (7, 8, 9))) == [given(request(), 2, 7, 8, 9, has_copy=True)]


@each("ttft_s", [None, 2.0])
def test_one_that_goes_on_elsewhere_is_as_far_as_it_was(ttft_s: float | None) -> None:
    """Its first token was in time; else a chat would be late, or at its ease, for as long as it goes on."""
    of = request(slo=Slo(ttft_s=ttft_s, tpot_s=0.5))
    made = connected_router()
    made.submit(of)
    made.now = 1.5
    made.hear(PREFILL, PrefillCompleted(R1, DISPATCHED, 4))
    made.lose(PREFILL)
    made.now = 6.0
    made.hear(GATEWAY, ResumeRequest(of, (7, 8, 9)))
    told = made.hear(PREFILL, worker(can_prefill=True, can_decode=False))
    assert [one.message.begun_s for one in told if isinstance(one.message, PrefillRequest)] == [4.5]
    after = connected_router()  # of an earlier router's it is only known when it was due
    after.now = 6.0
    (again,) = after.hear(GATEWAY, ResumeRequest(of, (7, 8, 9)))
    assert isinstance(again.message, PrefillRequest)
    assert again.message.begun_s == (6.0 - of.arrival_s - ttft_s if ttft_s else 1.5)


def test_an_interrupted_request_may_be_aborted() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.hear(GATEWAY, AbortRequest(R1)) == [dropped()]
    assert made.status().num_queued == 0


def test_resuming_twice_queues_it_once_and_the_last_message_counts() -> None:
    made = decoding()
    made.lose(PREFILL)
    made.lose(DECODE)
    made.hear(GATEWAY, ResumeRequest(request(), (7,)))
    made.hear(GATEWAY, ResumeRequest(request(), (7, 8)))
    assert made.hear(PREFILL, worker(can_prefill=True, can_decode=False)) == [given(request(), 2, 7, 8, has_copy=True)]


def test_a_request_of_an_earlier_router_is_taken_on() -> None:
    assert connected_router().hear(GATEWAY, ResumeRequest(request(), (7, 8))) == [given(request(), 1, 7, 8)]


def test_a_request_of_an_earlier_router_is_taken_on_even_when_the_queue_is_full() -> None:
    made = RouterHarness(max_queued_requests=1)
    made.submit(request("r2"))
    assert made.hear(GATEWAY, ResumeRequest(request(), ())) == []
    assert made.status().num_queued == 2


@each("stage", [prefilling, pooled, granted, decoding])
def test_resuming_what_goes_on_changes_nothing(stage: Any) -> None:
    assert stage().hear(GATEWAY, ResumeRequest(request(), (7,))) == []


def test_a_first_token_that_the_client_never_got_is_made_again() -> None:
    assert pooled().hear(GATEWAY, ResumeRequest(request(), ())) == [dropped(), given(request(), 2, has_copy=True)]


def test_resuming_from_another_gateway_is_ignored() -> None:
    made = decoding()
    made.lose(DECODE)
    assert made.hear("gateway-1", ResumeRequest(request(), (7,))) == []


def test_tokens_that_a_lost_worker_took_with_it_are_made_again() -> None:
    made = decoding()
    made.hear(DECODE, RequestPreempted(R1, GRANTED, (7, 8, 9)))  # but the client has only the first
    assert made.hear(GATEWAY, ResumeRequest(request(), (7,))) == [
        aborted(PREFILL, 2),
        dropped(nth=2),
        given(request(), 3, 7, has_copy=True),
    ]


def test_a_request_that_an_earlier_router_accepted_goes_on_above_all_that_it_may_have_had() -> None:
    made = connected_router()
    (sent,) = (one for one in made.hear(GATEWAY, ResumeRequest(request(), (7,), epoch(1000))) if one.peer == PREFILL)
    assert isinstance(sent.message, PrefillRequest)
    assert sent.message.attempt == beyond_unreported(epoch(1000)) + epoch(1)


def test_a_request_that_this_router_knows_takes_no_other_number() -> None:
    made = decoding()
    made.lose(DECODE)
    resumed = made.hear(GATEWAY, ResumeRequest(request(), (7,), epoch(1000)))
    assert [one.message.attempt for one in resumed if isinstance(one.message, PrefillRequest)] == [epoch(2)]


def test_a_message_that_the_router_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take BlocksTaken"):
        connected_router().hear(POOL, BlocksTaken(R1, 1, is_accepted=True))
