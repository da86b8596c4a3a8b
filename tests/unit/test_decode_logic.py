"""The decode worker, decision by decision: twenty blocks of four tokens, four requests, ten tokens an iteration."""

import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import FinishReason, SampledToken, TokenLogprob
from alignedserve.messages.events import PeerLinked, Received, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import MapArena
from alignedserve.messages.links import (
    ArenaOffered,
    AttemptFailed,
    BatchGranted,
    FailureKind,
    RequestFinished,
    RequestPreempted,
    TokenDelta,
    TokensEmitted,
    WorkerLoad,
)
from decode_worker.logic import DecodeLimits, DecodeLogic
from tests.desks.decode import (
    BATCH,
    EOS,
    H1,
    H2,
    Desk,
    added,
    emitted,
    received,
    released,
    run,
    running,
    runs,
    to_router,
)
from tests.samples import POOL, R1, R2, ROUTER, handoff, request, worker

# --- introductions


def test_the_router_is_told_what_this_worker_is_and_what_it_holds() -> None:
    logic = DecodeLogic(registered=worker(), limits=DecodeLimits(4, 10), eos_token_ids=frozenset())
    assert logic.on_event(PeerLinked(Role.ROUTER, ROUTER), 0.0) == [
        to_router(worker()),
        to_router(WorkerLoad(0, 0, 0, 0, 20, 0)),
    ]
    assert logic.on_event(Ticked(), 0.0) == []


def test_the_pools_arena_is_mapped() -> None:
    offered = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
    assert Desk().hear(offered, POOL) == [MapArena(offered)]


# --- admission


def test_a_granted_batch_is_acknowledged_and_admitted() -> None:
    expected = run(added(H1, 0, 1), added(H2, 2, 3), slices={"r1": 1, "r2": 1})
    assert Desk().grant(H1, H2) == [expected, received((R1, 1), (R2, 1))]


def test_candidates_wait_for_the_end_of_the_iteration() -> None:
    made = running()
    assert made.grant(H2) == [received((R2, 1))]
    assert runs(made.sampled(r1=7)) == [run(added(H2, 2, 3), slices={"r1": 1, "r2": 1})]


def test_no_more_run_than_may() -> None:
    made = Desk(max_running=1)
    assert runs(made.grant(H1, H2)) == [run(added(H1, 0, 1), slices={"r1": 1})]
    assert runs(made.sampled(r1=EOS)) == [run(added(H2, 0, 1), removals=("r1",), slices={"r2": 1})]


def test_every_running_request_keeps_a_block_in_reserve() -> None:
    made = Desk(num_blocks=4)
    made.grant(H1)  # takes two, two are free
    made.grant(H2)  # needs two, one is r1's in reserve
    assert runs(made.sampled(r1=7)) == [run(slices={"r1": 1})]


def test_with_the_reserve_left_over_it_is_admitted() -> None:
    made = Desk(num_blocks=5)
    made.grant(H1)
    made.grant(H2)
    assert runs(made.sampled(r1=7)) == [run(added(H2, 2, 3), slices={"r1": 1, "r2": 1})]


def test_the_first_needs_no_reserve() -> None:
    assert runs(Desk(num_blocks=2).grant(H1)) == [run(added(H1, 0, 1), slices={"r1": 1})]


def test_nobody_overtakes_a_candidate_that_does_not_fit() -> None:
    made = Desk(num_blocks=6)
    large, small = handoff(request("r2", prompt_len=16), 12), handoff(request("r3", prompt_len=1), 13)
    assert runs(made.grant(H1, large, small)) == [run(added(H1, 0, 1), slices={"r1": 1})]


def test_what_waits_is_counted_for_the_router() -> None:
    made = Desk(num_blocks=4)
    commands = made.logic.on_event(Received(POOL, BatchGranted(BATCH, (H1, H2))), 0.0)
    load = WorkerLoad(
        num_waiting=0,
        num_running=1,
        num_candidates=1,
        num_candidate_blocks=2,
        num_free_blocks=2,
        num_handoffs_verified=0,
    )
    assert commands[-1] == to_router(load)


# --- tokens


def test_a_token_goes_to_the_gateway_and_the_lease_back() -> None:
    assert running().sampled(r1=8) == [
        run(slices={"r1": 1}),
        emitted(TokenDelta(R1, 1, (8,))),
        released(11),
    ]


def test_a_lease_is_given_back_once() -> None:
    made = running()
    made.sampled(r1=8)
    assert made.sampled(r1=9) == [run(slices={"r1": 1}), emitted(TokenDelta(R1, 2, (9,)))]


def test_tokens_for_one_gateway_travel_together() -> None:
    made = Desk()
    other = handoff(request("r3", reply_to="unix:other"), 13)
    made.grant(H1, other, H2)
    assert made.sampled(r1=8, r3=9, r2=10)[1:3] == [
        emitted(TokenDelta(R1, 1, (8,)), TokenDelta(R2, 1, (10,))),
        SendTo("unix:other", TokensEmitted((TokenDelta(RequestId("r3"), 1, (9,)),))),
    ]


def test_logprobs_go_with_their_token() -> None:
    logprob = TokenLogprob(8, -0.5)
    commands = running().completed(SampledToken(R1, 8, logprob))
    assert commands[1] == emitted(TokenDelta(R1, 1, (8,), (logprob,)))


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "reason"), [(EOS, 8, FinishReason.STOP), (8, 2, FinishReason.LENGTH)]
)
def test_the_last_token_says_so_and_ends_it(token_id: int, max_tokens: int, reason: FinishReason) -> None:
    made = Desk()
    made.grant(handoff(request(max_tokens=max_tokens), 11))
    assert made.sampled(r1=token_id) == [
        emitted(TokenDelta(R1, 1, (token_id,), (), reason)),
        released(11),
        to_router(RequestFinished(R1, 1, 2)),
    ]
    assert made.load().num_free_blocks == 20


def test_what_ended_is_removed_from_the_engine_by_the_next_iteration() -> None:
    made = running()
    made.sampled(r1=EOS)
    assert runs(made.grant(H2)) == [run(added(H2, 0, 1), removals=("r1",), slices={"r2": 1})]


def test_a_model_without_usable_logits_fails_the_request() -> None:
    made = running()
    assert made.completed(failed=(R1,)) == [
        released(11),
        to_router(AttemptFailed(R1, 1, FailureKind.INTERNAL, "the model gave no usable logits")),
    ]


# --- handoffs that do not hold


def test_a_refused_handoff_is_recomputed_elsewhere_and_never_a_token() -> None:
    made = Desk()
    made.grant(H1, H2)
    assert made.completed(SampledToken(R2, 8), refused=(R1,)) == [
        run(grown=[("r2", 0)], slices={"r2": 1}),  # r1 never entered the engine: nothing to remove
        emitted(TokenDelta(R2, 1, (8,))),
        to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True)),
        released(11, 12),
    ]
    assert made.load().num_handoffs_verified == 1


def test_blocks_of_a_refused_handoff_are_free_again() -> None:
    made = running()
    made.completed(refused=(R1,))
    assert runs(made.grant(H2)) == [run(added(H2, 0, 1), slices={"r2": 1})]


# --- growing and preempting


def test_a_request_that_fills_its_last_block_gets_one_more() -> None:
    made = running()  # holds eight slots for its five tokens
    for token_id in (8, 9, 10):
        assert runs(made.sampled(r1=token_id)) == [run(slices={"r1": 1})]
    assert runs(made.sampled(r1=11)) == [run(grown=[("r1", 2)], slices={"r1": 1})]


def test_the_longest_gives_way_when_there_is_no_block_left() -> None:
    made = Desk(num_blocks=5)
    made.grant(handoff(request("r2", prompt_len=5), 12))  # six tokens, two blocks
    made.grant(handoff(request(prompt_len=7), 11))  # eight tokens, two blocks
    made.sampled(r2=8)
    assert runs(made.sampled(r2=9, r1=9)) == [run(grown=[("r1", 4)], slices={"r2": 1, "r1": 1})]
    # r2 has nine tokens now and needs a block: r1, the longest with ten, gives way.
    assert made.sampled(r2=10, r1=10)[:2] == [
        to_router(RequestPreempted(R1, 1, (7, 9, 10))),
        run(removals=("r1",), grown=[("r2", 2)], slices={"r2": 1}),
    ]


def test_the_longest_may_be_the_one_that_needs_the_block() -> None:
    made = Desk(num_blocks=6, max_tokens=2)
    made.begin(request(prompt_len=8))  # computed a token at a time beside another
    made.grant(handoff(request("r2", prompt_len=11, max_tokens=20), 12))
    made.completed()
    for token_id in (20, 21, 22, 23):
        made.sampled(r2=token_id)
    assert made.sampled(r2=24)[:2] == [
        to_router(RequestPreempted(R2, 1, (7, 20, 21, 22, 23, 24))),
        run(removals=("r2",), slices={"r1": 1}),
    ]


def test_a_preempted_request_may_come_again() -> None:
    made = running()
    made.sampled(r1=EOS)
    again = handoff(request(), 14, attempt=2, generated=(7, 8))
    assert runs(made.grant(again)) == [run(added(again, 0, 1), removals=("r1",), slices={"r1": 1})]
