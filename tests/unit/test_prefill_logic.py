"""The prefill worker, decision by decision: twelve blocks of four tokens, ten tokens an iteration."""

from typing import Any

import pytest

from alignedserve.core.ids import LeaseId, RequestId
from alignedserve.core.request import FinishReason, Request, SampledToken, SamplingParams, TokenLogprob
from alignedserve.messages.events import PeerLinked, PeerLost, Received, Send, SendTo, Ticked
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import (
    Addition,
    IterationCompleted,
    MapArena,
    OffloadBlocks,
    PromptScores,
    RunIteration,
)
from alignedserve.messages.links import (
    AbortRequest,
    ArenaOffered,
    AttemptFailed,
    BatchGranted,
    BlockRun,
    BlocksReserved,
    BlocksTaken,
    BlocksWritten,
    CancelReservation,
    FailureKind,
    PrefillCompleted,
    PrefillRequest,
    PromptScored,
    RequestFinished,
    RequestPreempted,
    ReservationRefused,
    ReserveBlocks,
    TokenDelta,
    TokensEmitted,
    WorkerLoad,
)
from alignedserve.messages.wire import Message
from prefill_worker.logic import OffloadCompleted, PrefillCommand, PrefillLimits, PrefillLogic
from tests.samples import POOL, R1, R2, REPLY_TO, ROUTER, blocks, request, worker

ARENA = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
REGISTERED = worker(num_blocks=12, can_prefill=True, can_decode=False)
EOS = 2
RUNS = (BlockRun(5, 1, 99),)


class Desk:
    """A prefill worker with a router and a pool. Its load reports are left out."""

    def __init__(self, *, has_pool: bool = True, max_running: int = 3) -> None:
        limits = PrefillLimits(max_tokens=10, max_running=max_running)
        self.logic = PrefillLogic(registered=REGISTERED, limits=limits, eos_token_ids=frozenset({EOS}))
        self.do(PeerLinked(Role.ROUTER, ROUTER))
        if has_pool:
            self.hear(ARENA, POOL)

    def do(self, event: Any) -> list[PrefillCommand]:
        commands = self.logic.on_event(event, 0.0)
        return [one for one in commands if not (isinstance(one, Send) and isinstance(one.message, WorkerLoad))]

    def hear(self, message: Message, peer: str = ROUTER) -> list[PrefillCommand]:
        return self.do(Received(peer, message))

    def begin(self, of: Request, attempt: int = 1, *generated: int) -> list[PrefillCommand]:
        return self.hear(PrefillRequest(of, attempt, generated))

    def sampled(self, *tokens: SampledToken, **more: Any) -> list[PrefillCommand]:
        return self.do(IterationCompleted(tokens, **more))

    def copied(self, reserved: BlocksReserved, runs: tuple[BlockRun, ...] | None = RUNS) -> list[PrefillCommand]:
        return self.do(OffloadCompleted(reserved.request_id, reserved, runs))

    def free_blocks(self) -> int:
        """As the next router is told."""
        commands = self.logic.on_event(PeerLinked(Role.ROUTER, ROUTER), 0.0)
        loads = [one.message for one in commands if isinstance(one, Send) and isinstance(one.message, WorkerLoad)]
        return loads[-1].num_free_blocks


def token(token_id: int, name: str = "r1", logprob: TokenLogprob | None = None) -> SampledToken:
    return SampledToken(RequestId(name), token_id, logprob)


def run(*additions: Addition, slices: dict[str, int], removals: tuple[str, ...] = ()) -> RunIteration:
    parts = tuple((RequestId(name), count) for name, count in slices.items())
    return RunIteration(tuple(map(RequestId, removals)), additions, (), parts)


def added(of: Request, *numbers: int, generated: tuple[int, ...] = ()) -> Addition:
    return Addition(of, generated, blocks(*numbers))


def reserved(lease: int = 1, attempt: int = 1) -> BlocksReserved:
    return BlocksReserved(R1, attempt, LeaseId(lease), lease, blocks(5))


def emitted(*deltas: TokenDelta) -> SendTo:
    return SendTo(REPLY_TO, TokensEmitted(deltas))


def to_router(message: Message) -> Send:
    return Send(ROUTER, message)


def to_pool(message: Message) -> Send:
    return Send(POOL, message)


RESERVE = to_pool(ReserveBlocks(R1, 1, 1))
CANCEL = to_pool(CancelReservation(R1, 1))
ABORT = AbortRequest(R1)


def computing() -> Desk:
    made = Desk()
    made.begin(request())
    return made


def leaving() -> Desk:
    """r1 is computed, its first token is out, and it has asked the pool for room."""
    made = computing()
    made.sampled(token(7))
    return made


def copying() -> Desk:
    made = leaving()
    made.hear(reserved(), POOL)
    return made


def offered() -> Desk:
    made = copying()
    made.copied(reserved())
    return made


# --- introductions


def test_the_router_is_told_what_this_worker_is_and_what_it_holds() -> None:
    logic = PrefillLogic(registered=REGISTERED, limits=PrefillLimits(10, 3), eos_token_ids=frozenset())
    assert logic.on_event(PeerLinked(Role.ROUTER, ROUTER), 0.0) == [
        to_router(REGISTERED),
        to_router(WorkerLoad(0, 0, 0, 0, 12, 0)),
    ]
    assert logic.on_event(Ticked(), 0.0) == []


def test_the_pools_arena_is_mapped() -> None:
    assert Desk(has_pool=False).hear(ARENA, POOL) == [MapArena(ARENA)]


# --- iterations


def test_a_prompt_within_the_budget_is_computed_at_once() -> None:
    assert Desk().begin(request(prompt_len=9)) == [run(added(request(prompt_len=9), 0, 1, 2), slices={"r1": 9})]


def test_emitted_tokens_are_recomputed_with_the_prompt() -> None:
    addition = added(request(), 0, 1, generated=(7, 8))
    assert Desk().begin(request(), 3, 7, 8) == [run(addition, slices={"r1": 6})]


def test_a_long_prompt_is_computed_in_chunks_and_what_is_left_goes_to_the_next() -> None:
    made = Desk()
    long, short = request(prompt_len=13), request("r2", prompt_len=4)
    assert made.begin(long) == [run(added(long, 0, 1, 2, 3), slices={"r1": 10})]
    assert made.begin(short) == []
    assert made.sampled() == [run(added(short, 4), slices={"r1": 3, "r2": 4})]


def test_one_iteration_at_a_time() -> None:
    made = computing()
    assert made.begin(request("r2")) == []
    assert made.do(Ticked()) == []


def test_jobs_that_do_not_fit_wait_and_are_not_overtaken() -> None:
    made = Desk()
    five_blocks, one_block = request("r2", prompt_len=20), request("r3", prompt_len=1)
    made.begin(request(prompt_len=30))  # leaves four
    made.begin(five_blocks)
    made.begin(one_block)
    assert made.sampled() == [run(slices={"r1": 10})]
    assert made.sampled() == [run(slices={"r1": 10})]
    additions = (added(five_blocks, *range(5)), added(one_block, 5))
    assert made.sampled(token(EOS))[0] == run(*additions, slices={"r2": 10}, removals=("r1",))


def test_no_more_jobs_hold_blocks_than_may() -> None:
    made = Desk(max_running=1)
    made.begin(request())
    made.begin(request("r2"))
    assert made.sampled(token(7))[-1] == RESERVE  # r1 still holds its blocks
    made.hear(reserved(), POOL)
    made.copied(reserved())
    following = made.hear(BlocksTaken(R1, 1, is_accepted=True), POOL)
    assert following == [run(added(request("r2"), 0), slices={"r2": 4}, removals=("r1",))]


def test_a_context_larger_than_this_worker_fails_instead_of_blocking_the_line() -> None:
    made = Desk()
    reason = "its context needs more cache blocks than a prefill worker has"
    assert made.begin(request(prompt_len=49)) == [
        to_router(AttemptFailed(R1, 1, FailureKind.UNSERVABLE, reason)),
    ]
    assert made.begin(request("r2")) == [run(added(request("r2"), 0), slices={"r2": 4})]


# --- the first token


def test_the_first_token_goes_to_the_gateway_before_anything_else() -> None:
    assert computing().sampled(token(7)) == [
        emitted(TokenDelta(R1, 0, (7,))),
        to_router(PrefillCompleted(R1, 1, 4)),
        RESERVE,
    ]


def test_a_token_after_others_keeps_its_place() -> None:
    made = Desk()
    made.begin(request(), 3, 7, 8)
    assert made.sampled(token(9)) == [
        emitted(TokenDelta(R1, 2, (9,))),
        to_router(PrefillCompleted(R1, 3, 6)),
        to_pool(ReserveBlocks(R1, 3, 2)),
    ]


def test_tokens_for_one_gateway_travel_together() -> None:
    made = Desk()
    made.begin(request("r1", prompt_len=1))
    made.begin(request("r2", prompt_len=1, reply_to="unix:other"))
    made.begin(request("r3", prompt_len=1))
    commands = made.sampled(token(7, "r1"), token(8, "r2"), token(9, "r3"))
    assert commands[:2] == [
        emitted(TokenDelta(R1, 0, (7,)), TokenDelta(RequestId("r3"), 0, (9,))),
        SendTo("unix:other", TokensEmitted((TokenDelta(R2, 0, (8,)),))),
    ]


def test_logprobs_go_with_their_token() -> None:
    logprob = TokenLogprob(7, -0.5)
    assert computing().sampled(token(7, logprob=logprob))[0] == emitted(TokenDelta(R1, 0, (7,), (logprob,)))


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "reason"), [(EOS, 8, FinishReason.STOP), (7, 1, FinishReason.LENGTH)]
)
def test_an_answer_may_be_over_with_its_first_token(token_id: int, max_tokens: int, reason: FinishReason) -> None:
    made = Desk()
    made.begin(request(max_tokens=max_tokens))
    assert made.sampled(token(token_id)) == [
        emitted(TokenDelta(R1, 0, (token_id,), (), reason)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 1)),
    ]
    assert made.free_blocks() == 12


def test_scores_of_a_prompt_go_before_its_token() -> None:
    made = Desk()
    made.begin(request(sampling=SamplingParams(max_tokens=0, num_prompt_logprobs=0)))
    entries = (TokenLogprob(11, -1.0),)
    commands = made.sampled(token(7), prompt_scores=(PromptScores(R1, 1, entries),))
    assert commands == [
        SendTo(REPLY_TO, PromptScored(R1, 1, entries)),
        emitted(TokenDelta(R1, 0, (), (), FinishReason.LENGTH)),
        to_router(PrefillCompleted(R1, 1, 4)),
        to_router(RequestFinished(R1, 1, 0)),
    ]


def test_what_ended_is_removed_from_the_engine_by_the_next_iteration() -> None:
    made = leaving()
    assert made.begin(request("r2")) == [run(added(request("r2"), 1), slices={"r2": 4}, removals=("r1",))]


def test_a_model_without_usable_logits_fails_the_request() -> None:
    made = computing()
    assert made.sampled(failed=(R1,)) == [
        to_router(AttemptFailed(R1, 1, FailureKind.INTERNAL, "the model gave no usable logits"))
    ]
    assert made.begin(request("r2"))[0] == run(added(request("r2"), 0), slices={"r2": 4}, removals=("r1",))


# --- leaving for the pool


def test_reserved_blocks_are_written() -> None:
    assert leaving().hear(reserved(), POOL) == [OffloadBlocks(R1, blocks(0), reserved())]


def test_written_blocks_are_offered() -> None:
    content = BlocksWritten(LeaseId(1), 1, RUNS, 4, 1, request(), (7,))
    assert copying().copied(reserved()) == [to_pool(content)]


def test_what_the_pool_took_is_forgotten() -> None:
    made = offered()
    assert made.hear(BlocksTaken(R1, 1, is_accepted=True), POOL) == []
    assert made.free_blocks() == 12


def test_what_the_pool_did_not_take_is_reserved_again() -> None:
    assert offered().hear(BlocksTaken(R1, 1, is_accepted=False), POOL) == [RESERVE]


def test_a_lease_that_did_not_hold_is_reserved_again() -> None:
    assert copying().copied(reserved(), None) == [RESERVE]


def test_a_pool_that_is_too_small_fails_the_request() -> None:
    made = leaving()
    assert made.hear(ReservationRefused(R1, 1), POOL) == [
        CANCEL,
        to_router(AttemptFailed(R1, 1, FailureKind.UNSERVABLE, "the KV pool is too small for it")),
    ]
    assert made.free_blocks() == 12


def test_without_a_pool_it_waits_for_one() -> None:
    made = Desk(has_pool=False)
    made.begin(request())
    assert made.sampled(token(7)) == [emitted(TokenDelta(R1, 0, (7,))), to_router(PrefillCompleted(R1, 1, 4))]
    assert made.hear(ARENA, POOL) == [MapArena(ARENA), RESERVE]


# --- stale attempts


@pytest.fixture
def second() -> Desk:
    """r1 is computed under attempt 2 and being copied; whatever is said of attempt 1 is stale."""
    made = Desk()
    made.begin(request(), 2)
    made.sampled(token(7))
    made.hear(reserved(lease=4, attempt=2), POOL)
    return made


@pytest.mark.parametrize(
    ("peer", "stale"),
    [
        (ROUTER, AbortRequest(R1, 1)),
        (POOL, reserved(lease=3, attempt=1)),
        (POOL, BlocksTaken(R1, 1, is_accepted=True)),
        (POOL, BlocksTaken(R1, 1, is_accepted=False)),
        (POOL, ReservationRefused(R1, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_word_of_an_earlier_attempt_changes_nothing(second: Desk, peer: str, stale: Message) -> None:
    assert second.hear(stale, peer) == []
    content = BlocksWritten(LeaseId(4), 4, RUNS, 4, 2, request(), (7,))
    assert second.copied(reserved(lease=4, attempt=2)) == [to_pool(content)]


@pytest.mark.parametrize(
    "unknown",
    [
        AbortRequest(R2),
        AbortRequest(R2, 5),
        BlocksReserved(R2, 1, LeaseId(1), 1, blocks(5)),
        BlocksTaken(R2, 1, is_accepted=True),
        ReservationRefused(R2, 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_word_of_an_unknown_request_is_ignored(unknown: Message) -> None:
    assert leaving().hear(unknown, POOL) == []


def test_a_second_lease_while_the_first_is_written_is_ignored() -> None:
    assert copying().hear(reserved(lease=2), POOL) == []


def test_given_again_while_it_waits_the_later_attempt_counts() -> None:
    made = Desk()
    made.begin(request("r2"))
    made.begin(request())
    assert made.begin(request(), 2, 7) == []
    assert made.sampled(token(9, "r2"))[0] == run(
        added(request(), 1, 2, generated=(7,)), slices={"r1": 5}, removals=("r2",)
    )


def test_given_again_while_it_is_computed_it_begins_anew_when_that_is_over() -> None:
    made = computing()
    assert made.begin(request(), 2, 7) == []
    addition = added(request(), 0, 1, generated=(7,))
    assert made.sampled(token(9)) == [run(addition, slices={"r1": 5}, removals=("r1",))]


def test_given_again_while_it_is_copied_it_begins_anew_when_that_is_over() -> None:
    made = copying()
    assert made.begin(request(), 2, 7) == []
    following = run(added(request(), 0, 1, generated=(7,)), slices={"r1": 5}, removals=("r1",))
    assert made.copied(reserved()) == [following, CANCEL]


def test_given_again_and_aborted_before_it_began_anew() -> None:
    made = copying()
    made.begin(request(), 2, 7)
    assert made.hear(AbortRequest(R1, 2)) == []
    assert made.copied(reserved()) == [CANCEL]
    assert made.free_blocks() == 12


# --- aborts, in every stage


def test_aborted_while_it_waits() -> None:
    made = Desk()
    made.begin(request("r2"))
    made.begin(request())
    assert made.hear(ABORT) == []
    assert not [one for one in made.sampled(token(EOS, "r2")) if isinstance(one, RunIteration)]


def test_aborted_while_it_is_computed_its_token_is_not_sent() -> None:
    made = computing()
    assert made.hear(ABORT) == []
    assert made.sampled(token(7)) == []
    assert made.free_blocks() == 12


def test_aborted_between_two_chunks() -> None:
    made = Desk()
    made.begin(request(prompt_len=13))
    made.hear(ABORT)
    assert made.sampled() == []
    assert made.begin(request("r2"))[0] == run(added(request("r2"), 0), slices={"r2": 4}, removals=("r1",))


def test_aborted_while_it_waits_for_the_pool() -> None:
    made = leaving()
    assert made.hear(ABORT) == [CANCEL]
    assert made.free_blocks() == 12


def test_aborted_while_it_is_copied_its_blocks_are_freed_after_the_copy() -> None:
    made = copying()
    assert made.hear(ABORT) == []
    assert made.copied(reserved()) == [CANCEL]
    assert made.free_blocks() == 12


def test_aborted_while_it_is_offered() -> None:
    made = offered()
    assert made.hear(ABORT) == [CANCEL]
    assert made.hear(BlocksTaken(R1, 1, is_accepted=True), POOL) == []


# --- losses, in every stage


def lose_pool(made: Desk) -> list[PrefillCommand]:
    return made.do(PeerLost(Role.KV_POOL, POOL))


def test_the_pool_is_lost_while_it_is_computed() -> None:
    made = computing()
    assert lose_pool(made) == []
    assert made.sampled(token(7))[-1] == to_router(PrefillCompleted(R1, 1, 4))


def test_the_pool_is_lost_while_it_waits_for_room() -> None:
    made = leaving()
    assert lose_pool(made) == []
    assert made.hear(reserved(), "late") == [OffloadBlocks(R1, blocks(0), reserved())]  # writes to nobody's memory
    assert made.copied(reserved(), None) == []
    assert made.hear(ARENA, POOL) == [MapArena(ARENA), RESERVE]


def test_the_pool_is_lost_while_it_is_copied() -> None:
    made = copying()
    assert lose_pool(made) == []
    assert made.copied(reserved()) == []
    assert made.hear(ARENA, POOL) == [MapArena(ARENA), RESERVE]


def test_the_pool_is_lost_and_back_while_it_is_copied() -> None:
    made = copying()
    lose_pool(made)
    assert made.hear(ARENA, POOL) == [MapArena(ARENA)]
    content = BlocksWritten(LeaseId(1), 1, RUNS, 4, 1, request(), (7,))
    assert made.copied(reserved()) == [to_pool(content)]  # a lease that the new pool does not know
    assert made.hear(BlocksTaken(R1, 1, is_accepted=False), POOL) == [RESERVE]


def test_the_pool_is_lost_while_it_is_offered() -> None:
    made = offered()
    assert lose_pool(made) == [to_router(RequestPreempted(R1, 1, (7,)))]
    assert made.free_blocks() == 12


def test_a_lost_decode_worker_or_gateway_is_not_noticed() -> None:
    assert leaving().do(PeerLost(Role.GATEWAY, "gateway-0")) == []


@pytest.mark.parametrize("stage", [computing, leaving, copying, offered])
def test_a_router_that_comes_back_empties_the_worker(stage: Any) -> None:
    made = stage()
    made.do(PeerLost(Role.ROUTER, ROUTER))
    assert made.do(PeerLinked(Role.ROUTER, ROUTER))[0] == to_router(REGISTERED)
    made.sampled(token(7)) if stage is computing else None
    made.copied(reserved()) if stage is copying else None
    assert made.free_blocks() == 12


def test_a_message_that_it_does_not_take_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="does not take BatchGranted"):
        Desk().hear(BatchGranted(1, ()))  # type: ignore[arg-type]
