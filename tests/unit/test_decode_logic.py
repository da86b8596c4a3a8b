"""The decode worker, decision by decision: twenty blocks of four tokens, four requests, ten tokens an iteration."""

from typing import Any

import pytest

from alignedserve.core.ids import BatchId, LeaseId, RequestId
from alignedserve.core.request import FinishReason, Request, SampledToken, SamplingParams, TokenLogprob
from alignedserve.messages.events import PeerLinked, PeerLost, Received, Send, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, IterationCompleted, MapArena, PromptScores, RunIteration
from alignedserve.messages.links import (
    AbortRequest,
    ArenaOffered,
    AttemptFailed,
    BatchGranted,
    BatchReceived,
    BlocksTaken,
    FailureKind,
    Handoff,
    LeasesReleased,
    PrefillCompleted,
    PrefillRequest,
    PromptScored,
    RequestFinished,
    RequestPreempted,
    TokenDelta,
    TokensEmitted,
    WorkerLoad,
)
from alignedserve.messages.wire import Message
from decode_worker.logic import DecodeCommand, DecodeLimits, DecodeLogic
from tests.samples import POOL, R1, R2, REPLY_TO, ROUTER, blocks, handoff, request, worker

BATCH = BatchId(1)
EOS = 2


class Desk:
    """A decode worker with a router and a pool. Its load reports are left out."""

    def __init__(self, *, num_blocks: int = 20, max_running: int = 4, max_tokens: int = 10) -> None:
        self.registered = worker(num_blocks=num_blocks, max_running=max_running)
        limits = DecodeLimits(max_running, max_tokens)
        self.logic = DecodeLogic(registered=self.registered, limits=limits, eos_token_ids=frozenset({EOS}))
        self.do(PeerLinked(Role.ROUTER, ROUTER))

    def do(self, event: Any) -> list[DecodeCommand]:
        commands = self.logic.on_event(event, 0.0)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, WorkerLoad))]

    def hear(self, message: Message, peer: str = ROUTER) -> list[DecodeCommand]:
        return self.do(Received(peer, message))

    def grant(self, *handoffs: Handoff) -> list[DecodeCommand]:
        return self.hear(BatchGranted(BATCH, handoffs), POOL)

    def begin(self, of: Request, attempt: int = 1, *generated: int) -> list[DecodeCommand]:
        return self.hear(PrefillRequest(of, attempt, generated))

    def sampled(self, **tokens: int) -> list[DecodeCommand]:
        """The iteration is over with these tokens."""
        return self.completed(*(SampledToken(RequestId(name), token) for name, token in tokens.items()))

    def completed(self, *tokens: SampledToken, **more: Any) -> list[DecodeCommand]:
        return self.do(IterationCompleted(tokens, **more))

    def load(self) -> WorkerLoad:
        """As the next router is told."""
        commands = self.logic.on_event(PeerLinked(Role.ROUTER, ROUTER), 0.0)
        return [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, WorkerLoad)][-1]


def added(of: Handoff, *numbers: int) -> Addition:
    return Addition(of.request, of.generated_token_ids, blocks(*numbers), of)


def run(*additions: Addition, removals: tuple[str, ...] = (), grown: Any = (), slices: dict[str, int]) -> RunIteration:
    extensions = tuple((RequestId(name), blocks(number)) for name, number in grown)
    parts = tuple((RequestId(name), count) for name, count in slices.items())
    return RunIteration(tuple(map(RequestId, removals)), additions, extensions, parts)


def runs(commands: list[DecodeCommand]) -> list[RunIteration]:
    return [one for one in commands if isinstance(one, RunIteration)]


def emitted(*deltas: TokenDelta) -> SendTo:
    return SendTo(REPLY_TO, TokensEmitted(deltas))


def received(*members: tuple[RequestId, int]) -> Send:
    return Send(ROUTER, BatchReceived(BATCH, members))


def released(*leases: int) -> Send:
    return Send(POOL, LeasesReleased(tuple(map(LeaseId, leases))))


def to_router(message: Message) -> Send:
    return Send(ROUTER, message)


H1 = handoff(request(), 11)  # four tokens cached, one to compute: two blocks
H2 = handoff(request("r2", prompt_len=7), 12)  # the same with seven tokens


def running() -> Desk:
    """r1 is in its first iteration here, which fetches its cache."""
    made = Desk()
    made.grant(H1)
    return made


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


# --- stale attempts


@pytest.fixture
def second() -> Desk:
    """r1 runs under attempt 2; whatever is said of attempt 1 is stale."""
    made = Desk()
    made.grant(handoff(request(), 11, attempt=2))
    return made


def test_an_abort_of_an_earlier_attempt_changes_nothing(second: Desk) -> None:
    assert second.hear(AbortRequest(R1, 1)) == []
    assert second.sampled(r1=8)[1] == emitted(TokenDelta(R1, 1, (8,)))


def test_an_abort_of_an_earlier_attempt_leaves_a_candidate_alone() -> None:
    made = Desk(max_running=1)
    later = handoff(request(), 11, attempt=2)
    made.grant(H2, later)
    assert made.hear(AbortRequest(R1, 1)) == []
    assert runs(made.sampled(r2=EOS)) == [run(added(later, 0, 1), removals=("r2",), slices={"r1": 1})]


def test_a_later_attempt_ends_the_one_that_runs_and_waits_for_its_end() -> None:
    made = running()
    again = handoff(request(), 14, attempt=2, generated=(7, 8))
    assert made.grant(again) == [received((R1, 2))]
    assert made.sampled(r1=9) == [
        run(added(again, 0, 1), removals=("r1",), slices={"r1": 1}),
        released(11),
    ]


def test_a_later_attempt_takes_the_place_of_a_candidate_whose_lease_goes_back() -> None:
    made = Desk(max_running=1)
    made.grant(H2, H1)
    again = handoff(request(), 14, attempt=2)
    assert made.grant(again) == [received((R1, 2)), released(11)]


def test_word_of_an_unknown_request_is_ignored() -> None:
    assert running().hear(AbortRequest(R2)) == []


# --- aborts, in every stage


def test_aborted_as_a_candidate_its_lease_goes_back() -> None:
    made = running()
    made.grant(H2)
    assert made.hear(AbortRequest(R2)) == [released(12)]


def test_aborted_in_the_iteration_that_fetches_it() -> None:
    made = running()
    assert made.hear(AbortRequest(R1)) == []
    assert made.sampled(r1=8) == [released(11)]
    assert made.load().num_free_blocks == 20


def test_aborted_and_refused_in_one_iteration_is_not_recomputed() -> None:
    made = running()
    made.hear(AbortRequest(R1))
    assert made.completed(refused=(R1,)) == [released(11)]


def test_aborted_while_it_runs_its_token_is_not_sent() -> None:
    made = running()
    made.sampled(r1=8)
    made.hear(AbortRequest(R1))
    assert made.sampled(r1=9) == []
    assert runs(made.grant(H2)) == [run(added(H2, 0, 1), removals=("r1",), slices={"r2": 1})]


# --- losses, in every stage


def lose_pool(made: Desk) -> list[DecodeCommand]:
    return made.do(PeerLost(Role.KV_POOL, POOL))


def test_the_pool_is_lost_with_the_leases_of_candidates() -> None:
    made = running()
    made.grant(H2)
    assert lose_pool(made) == [to_router(RequestPreempted(R2, 1, (7,), handoff_refused=True))]


def test_the_pool_is_lost_while_a_request_runs() -> None:
    made = running()
    made.sampled(r1=8)
    assert lose_pool(made) == []
    assert made.sampled(r1=9)[1] == emitted(TokenDelta(R1, 2, (9,)))


def test_a_colocated_worker_needs_no_pool() -> None:
    made = Desk(max_running=1)
    made.begin(request())
    made.begin(request("r2"))
    assert lose_pool(made) == []
    assert runs(made.sampled(r1=EOS))[0].slices == ((R2, 4),)


def test_another_lost_peer_is_not_noticed() -> None:
    made = running()
    made.grant(H2)
    assert made.do(PeerLost(Role.GATEWAY, "gateway-0")) == []


def test_a_router_that_comes_back_empties_the_worker() -> None:
    made = running()
    made.grant(H2)
    assert made.do(PeerLinked(Role.ROUTER, ROUTER)) == [to_router(made.registered), released(12)]
    assert made.sampled(r1=8) == [released(11)]
    assert made.load().num_free_blocks == 20


# --- colocated


def test_a_prompt_is_computed_here() -> None:
    addition = Addition(request(), (), blocks(0))
    assert Desk().begin(request()) == [run(addition, slices={"r1": 4})]


def test_the_first_token_of_a_prompt_is_reported_to_the_router() -> None:
    made = Desk()
    made.begin(request())
    assert made.sampled(r1=8) == [
        run(grown=[("r1", 1)], slices={"r1": 1}),
        emitted(TokenDelta(R1, 0, (8,))),
        to_router(PrefillCompleted(R1, 1, 4)),
    ]
    assert made.sampled(r1=9)[1:] == [emitted(TokenDelta(R1, 1, (9,)))]


def test_prompts_share_what_the_decodes_leave() -> None:
    made = Desk(max_tokens=10)
    made.begin(request())
    made.begin(request("r2", prompt_len=13))
    made.begin(request("r3", prompt_len=5))
    assert runs(made.sampled(r1=8))[0].slices == ((R1, 1), (R2, 9))
    assert runs(made.sampled(r1=9))[0].slices == ((R1, 1), (R2, 4), (RequestId("r3"), 5))


def test_decodes_always_go_in_and_prompts_get_one_token_at_least() -> None:
    made = Desk(max_tokens=2)
    made.grant(H1, H2)
    made.begin(request("r3", prompt_len=5))
    assert runs(made.sampled(r1=8, r2=8))[0].slices == ((R1, 1), (R2, 1), (RequestId("r3"), 1))


def test_with_decodes_alone_the_budget_does_not_matter() -> None:
    made = Desk(max_tokens=1)
    assert runs(made.grant(H1, H2))[0].slices == ((R1, 1), (R2, 1))


def test_the_last_token_of_a_prompt_counts_as_a_decode() -> None:
    made = Desk(max_tokens=4)
    made.begin(request(prompt_len=5))
    assert runs(made.completed())[0].slices == ((R1, 1),)


def test_scores_of_a_prompt_go_before_its_end() -> None:
    made = Desk()
    made.begin(request(sampling=SamplingParams(max_tokens=0, num_prompt_logprobs=0)))
    entries = (TokenLogprob(11, -1.0),)
    assert made.completed(SampledToken(R1, 9), prompt_scores=(PromptScores(R1, 1, entries),)) == [
        SendTo(REPLY_TO, PromptScored(R1, 1, entries)),
        emitted(TokenDelta(R1, 0, (), (), FinishReason.LENGTH)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 0)),
    ]


def test_a_prompt_is_aborted_between_two_chunks() -> None:
    made = Desk()
    made.begin(request(prompt_len=13))
    made.hear(AbortRequest(R1))
    assert made.completed() == []
    assert made.load().num_free_blocks == 20


def test_a_message_that_it_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take BlocksTaken"):
        Desk().hear(BlocksTaken(R1, 1, is_accepted=True))
