"""The prefill worker, decision by decision: twelve blocks of four tokens, ten tokens an iteration."""

from alignedserve.core.errors import FailureKind
from alignedserve.core.request import FinishReason, SamplingParams, TokenLogprob
from alignedserve.messages.caches import BlocksTaken, ReservationRefused, ReserveBlocks
from alignedserve.messages.events import PeerConnected, SendTo, Ticked
from alignedserve.messages.gateways import PromptScored, TokenDelta
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import PromptScores
from alignedserve.messages.workers import AttemptFailed, PrefillCompleted, RequestFinished, WorkerLoad
from alignedserve.scheduling.iteration_scheduler import FcfsIterationScheduler
from prefill_worker.logic import PrefillLogic
from tests.harnesses.prefill import (
    EOS,
    REGISTERED,
    RESERVE,
    PrefillHarness,
    added,
    computing,
    emitted,
    leaving,
    offered,
    offload,
    reserved,
    run,
    to_pool,
    to_router,
    token,
)
from tests.support.samples import POOL, R1, REPLY_TO, ROUTER, request

# --- introductions


def test_the_router_is_told_what_this_worker_is_and_what_it_holds() -> None:
    logic = PrefillLogic(
        registered=REGISTERED, max_running_requests=3, scheduler=FcfsIterationScheduler(10), eos_token_ids=frozenset()
    )
    assert logic.on_event(PeerConnected(Role.ROUTER, ROUTER), 0.0) == [
        to_router(REGISTERED),
        to_router(WorkerLoad(num_free_blocks=12)),
    ]
    assert logic.on_event(Ticked(), 0.0) == []


# --- iterations


def test_emitted_tokens_are_recomputed_with_the_prompt() -> None:
    addition = added(request(), 0, 1, generated=(7, 8))
    assert PrefillHarness().begin(request(), 3, 7, 8) == [run(addition, slices={"r1": 6})]


def test_a_long_prompt_is_computed_in_chunks_and_what_is_left_goes_to_the_next() -> None:
    made = PrefillHarness()
    long, short = request(prompt_len=13), request("r2", prompt_len=4)
    assert made.begin(long) == [run(added(long, 0, 1, 2, 3), slices={"r1": 10})]
    assert made.begin(short) == []
    assert made.sampled() == [run(added(short, 4), slices={"r1": 3, "r2": 4})]


def test_one_iteration_at_a_time() -> None:
    made = computing()
    assert made.begin(request("r2")) == []
    assert made.do(Ticked()) == []


def test_jobs_that_do_not_fit_wait_and_are_not_overtaken() -> None:
    made = PrefillHarness()
    five_blocks, one_block = request("r2", prompt_len=20), request("r3", prompt_len=1)
    made.begin(request(prompt_len=30))  # leaves four
    made.begin(five_blocks)
    made.begin(one_block)
    assert made.sampled() == [run(slices={"r1": 10})]
    assert made.sampled() == [run(slices={"r1": 10})]
    additions = (added(five_blocks, *range(5)), added(one_block, 5))
    assert made.sampled(token(EOS))[0] == run(*additions, slices={"r2": 10}, removals=("r1",))


def test_a_context_larger_than_this_worker_fails_instead_of_blocking_the_line() -> None:
    made = PrefillHarness()
    reason = "its context needs more cache blocks than a prefill worker has"
    assert made.begin(request(prompt_len=49)) == [to_router(AttemptFailed(R1, 1, FailureKind.UNSERVABLE, reason))]
    assert made.begin(request("r2")) == [run(added(request("r2"), 0), slices={"r2": 4})]


# --- the first token


def test_the_first_token_goes_to_the_gateway_before_anything_else() -> None:
    assert computing().sampled(token(7)) == [
        emitted(TokenDelta(R1, 0, (7,))),
        to_router(PrefillCompleted(R1, 1, 4)),
        RESERVE,
    ]


def test_a_token_after_others_keeps_its_place() -> None:
    made = PrefillHarness()
    made.begin(request(), 3, 7, 8)
    assert made.sampled(token(9)) == [
        emitted(TokenDelta(R1, 2, (9,))),
        to_router(PrefillCompleted(R1, 3, 6)),
        to_pool(ReserveBlocks(R1, 3, 2)),
    ]


def test_scores_of_a_prompt_go_before_its_token() -> None:
    made = PrefillHarness()
    made.begin(request(sampling=SamplingParams(max_tokens=0, num_prompt_logprobs=0)))
    entries = (TokenLogprob(11, -1.0),)
    commands = made.sampled(token(7), prompt_scores=(PromptScores(R1, 1, entries),))
    assert commands == [
        SendTo(REPLY_TO, PromptScored(R1, 1, entries)),
        emitted(TokenDelta(R1, 0, (), (), FinishReason.LENGTH)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 0)),
    ]


def test_a_model_without_usable_logits_fails_the_request() -> None:
    made = computing()
    assert made.sampled(failed=(R1,)) == [
        to_router(AttemptFailed(R1, 1, FailureKind.INTERNAL, "the model gave no usable logits"))
    ]
    assert made.begin(request("r2"))[0] == run(added(request("r2"), 0), slices={"r2": 4}, removals=("r1",))


# --- leaving for the pool


def test_reserved_blocks_are_written() -> None:
    assert leaving().hear(reserved(), POOL) == [offload()]


def test_what_the_pool_took_is_forgotten() -> None:
    made = offered()
    assert made.hear(BlocksTaken(R1, 1, is_accepted=True), POOL) == []
    assert made.free_blocks() == 12


def test_what_the_pool_did_not_take_is_reserved_again() -> None:
    assert offered().hear(BlocksTaken(R1, 1, is_accepted=False), POOL) == [RESERVE]


def test_a_pool_that_is_too_small_fails_the_request() -> None:
    made = leaving()
    assert made.hear(ReservationRefused(R1, 1), POOL) == [
        to_router(AttemptFailed(R1, 1, FailureKind.UNSERVABLE, "the KV pool is too small for it"))
    ]
    assert made.free_blocks() == 12
