"""Evictions: victims, targets, and how evicted requests come back or return to the pool."""

from typing import Any

import msgspec

from alignedserve.core.ids import RequestId
from alignedserve.core.request import RequestClass, Slo
from alignedserve.messages.caches import (
    BlockCopy,
    BlockRun,
    Handoff,
    RequestReturned,
    ReserveBlocks,
    ReturnOutcome,
    ReturnRequest,
)
from alignedserve.messages.events import PeerDisconnected, Send, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import Addition, OffloadBlocks, UnmapArena
from alignedserve.messages.workers import AttemptFailed, RequestPreempted
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.decode import EOS, DecodeHarness, loads, offloads, run, runs, to_router
from tests.support.marks import each
from tests.support.samples import POOL, PREFILL, R1, R2, blocks, handoff, request

TEN_BLOCKS = (BlockRun(0, 10, 55),)
R3 = RequestId("r3")


def long(name: str, prompt_len: int, lease: int) -> Handoff:
    return handoff(request(name, prompt_len=prompt_len, max_tokens=60), lease)


def grown(buffer_blocks: int = 16) -> DecodeHarness:
    """r1 is of 40 tokens and r2 of 38; together they hold all twenty blocks, and r1 needs another one soon."""
    made = DecodeHarness(buffer_blocks=buffer_blocks)
    made.enter(long("r1", 7, 11), long("r2", 5, 12))
    for _ in range(31):
        assert offloads(made.sampled(r1=20, r2=20)) == []
    return made


GENERATED = (7, *(20,) * 32)  # of both, then
OFFLOAD = OffloadBlocks(R1, 1, blocks(0, 1, *range(4, 20, 2)), PREFILL, blocks(*range(10)), 1)


def evicting() -> DecodeHarness:
    """r1 is being copied out."""
    made = grown()
    made.sampled(r1=20, r2=20)
    return made


def evicted() -> DecodeHarness:
    """r1 is in the buffer."""
    made = evicting()
    made.offloaded(OFFLOAD, TEN_BLOCKS)
    return made


def there(generation: int = 1) -> BlockCopy:
    return BlockCopy(generation, 39, TEN_BLOCKS)


PREEMPTED = to_router(RequestPreempted(R1, 1, GENERATED))


# --- case 3: there is no room for the next iteration


def test_the_longest_leaves_one_iteration_before_blocks_run_out() -> None:
    assert grown().sampled(r1=20, r2=20)[:2] == [run(removals=("r1",), slices={"r2": 1}), OFFLOAD]


def test_blocks_of_a_victim_are_free_when_they_are_copied() -> None:
    made = evicting()
    assert runs(made.sampled(r2=20)) == [run(slices={"r2": 1})]  # 39 tokens
    assert runs(made.sampled(r2=20)) == [run(slices={"r2": 1})]  # 40
    assert runs(made.sampled(r2=20)) == []  # it stalls
    assert len(runs(made.offloaded(OFFLOAD, TEN_BLOCKS))) == 1


def test_evictions_are_counted() -> None:
    assert evicting().load().num_evictions == 1


def test_the_only_request_is_not_evicted_though_it_outgrows_the_worker() -> None:
    made = DecodeHarness(buffer_blocks=24)
    commands = made.enter(handoff(request("r1", prompt_len=7, max_tokens=100), 11))
    while runs(commands):
        assert offloads(commands) == []
        commands = made.sampled(r1=20)
    assert [type(one.message) for one in commands if isinstance(one, Send)] == [AttemptFailed]


def test_an_evicted_request_comes_back_with_all_its_tokens() -> None:
    made = evicted()
    (command,) = loads(made.sampled(r2=EOS))
    assert command.source == PREFILL
    assert [(part.request_id, part.copy, len(part.block_ids)) for part in command.loads] == [(R1, there(), 10)]
    (iteration,) = runs(made.loaded(command))
    (load,) = command.loads
    assert iteration.additions == (Addition(long("r1", 7, 11).request, GENERATED, load.block_ids, 39),)


def test_an_evicted_request_does_not_come_back_only_to_be_evicted_again() -> None:
    made = evicted()
    # There are ten free blocks for its ten, but none for what both will grow by.
    assert loads(made.sampled(r2=20)) == []


def test_without_a_buffer_the_longest_is_preempted_for_those_who_stall() -> None:
    made = grown(buffer_blocks=0)
    made.sampled(r1=20, r2=20)
    commands = made.sampled(r1=20, r2=20)
    assert commands[:2] == [
        run(removals=("r1",), slices={"r2": 1}),
        to_router(RequestPreempted(R1, 1, (*GENERATED, 20))),
    ]


def test_a_prefetched_request_that_still_lies_in_the_pool_gives_way_to_an_eviction() -> None:
    made = grown(buffer_blocks=10)
    made.grant(handoff(request("r3"), 13), batch=2)
    made.prefetched("r3", 1)
    (offload,) = offloads(made.sampled(r1=20, r2=20))
    assert offload.target_block_ids == blocks(*range(10))  # block 0 was r3's


def test_a_request_that_lies_nowhere_else_does_not_give_way_to_an_eviction() -> None:
    made = grown(buffer_blocks=10)
    made.hear(ReserveBlocks(R3, 1, 1), PREFILL)
    assert offloads(made.sampled(r1=20, r2=20)) == []


def test_a_copy_that_does_not_arrive_is_recomputed() -> None:
    made = evicting()
    assert made.offloaded(OFFLOAD, None) == [PREEMPTED]
    assert made.logic._candidates.space.num_used == 0


def test_the_prefill_worker_is_lost_while_it_is_copied_out() -> None:
    made = evicting()
    assert made.do(PeerDisconnected(Role.PREFILL_WORKER, PREFILL)) == [UnmapArena(PREFILL)]
    assert made.offloaded(OFFLOAD, TEN_BLOCKS) == [PREEMPTED]


def test_the_prefill_worker_is_lost_and_back_while_it_is_copied_out() -> None:
    made = evicting()
    made.do(PeerDisconnected(Role.PREFILL_WORKER, PREFILL))
    made.lend(16)
    assert made.offloaded(OFFLOAD, TEN_BLOCKS) == [PREEMPTED]
    assert made.logic._candidates.space.num_used == 0


def test_the_pool_is_lost_and_the_evicted_stay() -> None:
    made = evicted()
    assert made.do(PeerDisconnected(Role.KV_POOL, POOL)) == [UnmapArena(POOL)]
    assert len(loads(made.sampled(r2=EOS))) == 1


def test_aborted_while_it_is_copied_out() -> None:
    made = evicting()
    assert made.hear(AbortRequest(R1)) == []
    assert made.offloaded(OFFLOAD, TEN_BLOCKS) == []
    assert made.logic._candidates.space.num_used == 0


def test_a_later_attempt_waits_until_the_earlier_one_is_copied_out() -> None:
    made = evicting()
    again = handoff(request(), 14, attempt=2)
    made.sampled(r2=EOS)
    made.grant(again, batch=2)
    assert loads(made.prefetched("r1", 2)) == []
    assert [part.request_id for one in loads(made.offloaded(OFFLOAD, TEN_BLOCKS)) for part in one.loads] == [R1]


# --- case 2: a batch switch


def two(num_blocks: int = 60, best_effort_floor: float | None = None, **changes: Any) -> DecodeHarness:
    """Two requests make a batch; r1 runs alone, of batch 1."""
    made = DecodeHarness(num_blocks=num_blocks, min_requests=2, buffer_blocks=16, best_effort_floor=best_effort_floor)
    made.enter(handoff(request(max_tokens=60, **changes), 11))
    return made


IN_A_HURRY: dict[str, Any] = {"request_class": RequestClass.REAL_TIME, "slo": Slo(tpot_s=0.05)}
NEWCOMERS = (long("r2", 9, 12), long("r3", 11, 13))


def test_a_batch_that_is_replaced_leaves_at_once() -> None:
    made = two()
    made.grant(*NEWCOMERS, batch=2)
    assert made.sampled(r1=8)[:1] == [OffloadBlocks(R1, 1, blocks(0, 1), PREFILL, blocks(0, 1), 1)]


def test_a_batch_is_replaced_as_soon_as_its_iteration_is_over_beside_the_copies_of_the_new_one() -> None:
    made = two()
    (command,) = loads(made.grant(*NEWCOMERS, batch=2))
    made.sampled(r1=8)
    assert runs(made.loaded(command))[0].slices == ((R2, 1), (R3, 1))


def test_of_a_batch_that_is_replaced_eight_at_most_leave_at_a_time() -> None:
    made = DecodeHarness(num_blocks=200, max_running_requests=12, min_requests=10, buffer_blocks=60)
    made.enter(*(handoff(request(f"a{number}", prompt_len=4 + number), number) for number in range(9)))
    made.grant(*(handoff(request(f"b{number}"), 20 + number) for number in range(10)), batch=2)
    leaving = offloads(made.sampled(**{f"a{number}": 20 for number in range(9)}))
    assert [one.request_id for one in leaving] == [f"a{number}" for number in range(8, 0, -1)]  # the longest first


def test_who_must_not_be_late_finishes_beside_the_new_batch() -> None:
    made = two(**IN_A_HURRY)
    made.grant(*NEWCOMERS, batch=2)
    assert offloads(made.sampled(r1=8)) == []


@each(("deadline_s", "is_urgent"), [(20.0, False), (9.0, True)])
def test_a_document_that_would_be_late_stays(deadline_s: float, is_urgent: bool) -> None:
    """With a second for a token, 60 tokens take longer than half of the time to the deadline, which is over at 5 s."""
    made = two(request_class=RequestClass.BEST_EFFORT, slo=Slo(deadline_s=deadline_s))
    made.now = 1.0
    made.sampled(r1=8)
    made.now = 5.0
    made.grant(*NEWCOMERS, batch=2)
    assert [one.request_id for one in offloads(made.sampled(r1=8))] == ([] if is_urgent else [R1])


def test_chat_without_an_objective_leaves_to_chat_alone() -> None:
    """Where it stayed in any case, a worker of such chat alone aligned nothing."""
    made = two(best_effort_floor=0.05)
    made.grant(*NEWCOMERS, batch=2)
    assert [one.request_id for one in offloads(made.sampled(r1=8))] == [R1]
    made = two(best_effort_floor=0.05)
    documents = [handoff(request(f"d{number}", request_class=RequestClass.BEST_EFFORT), number) for number in (12, 13)]
    made.now = 3.0
    made.grant(*documents, batch=2)
    assert offloads(made.sampled(r1=8)) == []


def test_a_batch_too_small_for_a_switch_evicts_none() -> None:
    made = two()
    made.grant(NEWCOMERS[0], batch=2)
    assert offloads(made.sampled(r1=8)) == []


def switched() -> DecodeHarness:
    """r1 has given way to batch 2 and lies in the buffer; its batch does not run any more."""
    made = two()
    made.all_loaded(made.grant(*NEWCOMERS, batch=2))
    (command,) = offloads(made.sampled(r1=8))
    made.offloaded(command)
    return made


def test_the_victim_is_of_the_outgoing_batch_even_if_others_are_longer() -> None:
    made = two(32, **IN_A_HURRY)
    made.all_loaded(made.grant(*NEWCOMERS, batch=2))
    commands = made.sampled(r1=20)
    while not offloads(commands):
        commands = made.sampled(r1=20, r2=20, r3=20)
    assert [one.request_id for one in offloads(commands)] == [R1]


# --- back to the pool


def back(made: DecodeHarness, outcome: ReturnOutcome) -> list[WorkerCommand]:
    return made.hear(RequestReturned(R1, 1, outcome), PREFILL)


def test_an_evicted_request_whose_batch_has_gone_returns_to_the_pool() -> None:
    made = two()
    made.all_loaded(made.grant(*NEWCOMERS, batch=2))
    (command,) = offloads(made.sampled(r1=8))
    returning = ReturnRequest(request(max_tokens=60), 1, (7, 8), BlockCopy(1, 5, (BlockRun(0, 1, 55),)))
    assert made.offloaded(command) == [Send(PREFILL, returning)]


def test_what_the_pool_took_is_gone() -> None:
    made = switched()
    assert back(made, ReturnOutcome.TAKEN) == []
    assert made.logic._candidates.space.num_used == 0


def test_what_a_pool_took_that_was_lost_since_is_computed_again() -> None:
    made = switched()
    assert made.do(PeerDisconnected(Role.KV_POOL, POOL)) == [UnmapArena(POOL)]
    assert back(made, ReturnOutcome.TAKEN) == [to_router(RequestPreempted(R1, 1, (7, 8)))]
    assert made.logic._candidates.space.num_used == 0


def test_what_a_pool_took_and_the_router_never_heard_of_is_computed_again() -> None:
    """The pool's word was lost with its link to the router: nobody but this worker knows that the request is there."""
    made = switched()
    assert back(made, ReturnOutcome.TAKEN) == []
    made.now += 4.9
    gone = to_router(RequestPreempted(R1, 1, (7, 8)))
    assert gone not in made.do(Ticked())
    made.now += 0.2
    assert gone in made.do(Ticked())
    assert gone not in made.do(Ticked())


def test_what_the_router_has_heard_of_is_not_reported() -> None:
    made = switched()
    back(made, ReturnOutcome.TAKEN)
    made.hear(AbortRequest(R1, 1))
    made.now += 6.0
    assert not any(isinstance(getattr(one, "message", None), RequestPreempted) for one in made.do(Ticked()))


def test_what_the_pool_did_not_take_stays_to_run_beside_whatever_does() -> None:
    (command,) = loads(back(switched(), ReturnOutcome.STAYED))
    assert [part.request_id for part in command.loads] == [R1]


def test_what_is_unknown_here_is_left_to_the_router() -> None:
    made = switched()
    assert back(made, ReturnOutcome.UNKNOWN) == [to_router(RequestPreempted(R1, 1, (7, 8)))]
    assert made.logic._candidates.space.num_used == 0


@each("outcome", ReturnOutcome)
def test_aborted_while_it_returns(outcome: ReturnOutcome) -> None:
    made = switched()
    assert made.hear(AbortRequest(R1)) == []
    assert back(made, outcome) == []
    assert made.logic._candidates.space.num_used == 0


def test_an_answer_about_another_attempt_changes_nothing() -> None:
    made = switched()
    assert made.hear(RequestReturned(R1, 2, ReturnOutcome.TAKEN), PREFILL) == []
    assert back(made, ReturnOutcome.UNKNOWN) != []


def test_the_prefill_worker_is_lost_while_it_returns() -> None:
    made = switched()
    expected = to_router(RequestPreempted(R1, 1, (7, 8)))
    assert made.do(PeerDisconnected(Role.PREFILL_WORKER, PREFILL)) == [UnmapArena(PREFILL), expected]
    assert back(made, ReturnOutcome.TAKEN) == []


def test_when_the_buffer_runs_short_the_longest_evicted_goes_back_to_the_pool() -> None:
    made = grown(buffer_blocks=12)  # with ten of them taken, fewer than a quarter are left
    made.sampled(r1=20, r2=20)
    (sent,) = [one for one in made.offloaded(OFFLOAD, TEN_BLOCKS) if isinstance(one, Send)]
    assert sent == Send(PREFILL, ReturnRequest(long("r1", 7, 11).request, 1, GENERATED, there()))


# --- copies that were shorter than the context


def test_who_is_evicted_before_it_has_computed_what_its_copy_lacked_takes_along_what_it_has() -> None:
    made = DecodeHarness(buffer_blocks=16)
    whole = long("r1", 7, 11)
    made.enter(msgspec.structs.replace(whole, copy=BlockCopy(11, 3, (BlockRun(0, 1, 0),))), long("r2", 2, 12))
    (offload,) = made.logic._evictions.free_blocks(1, num_stalled=0)
    assert offload == OffloadBlocks(R1, 1, blocks(0), PREFILL, blocks(0), 1)
    (command,) = loads(made.offloaded(offload, (BlockRun(0, 1, 55),)))  # there is room for it again
    assert [part.copy for part in command.loads] == [BlockCopy(1, 3, (BlockRun(0, 1, 55),))]
