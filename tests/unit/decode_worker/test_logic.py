"""The decode worker, decision by decision: twenty blocks of four tokens, four requests."""

from alignedserve.core.ids import BatchId
from alignedserve.core.request import RequestClass
from alignedserve.messages.caches import ArenaOffered, BatchGranted
from alignedserve.messages.events import PeerConnected, Received, Send, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import BlocksLoaded, MapArena
from alignedserve.messages.workers import JoinedBatch, RequestPreempted, WorkerLoad
from alignedserve.worker_core.part import WorkerCommand
from decode_worker.batching.batch_order import DecodeLimits
from decode_worker.logic import DecodeLogic
from tests.harnesses.decode import (
    BATCH,
    EOS,
    H1,
    H2,
    H3,
    DecodeHarness,
    added,
    from_pool,
    load,
    loads,
    received,
    released,
    returned,
    run,
    running,
    runs,
    to_router,
)
from tests.support.samples import POOL, PREFILL, R1, R2, ROUTER, handoff, request, worker

# --- introductions


def test_the_router_is_told_what_this_worker_is_and_what_it_holds() -> None:
    logic = DecodeLogic(registered=worker(), limits=DecodeLimits(4), eos_token_ids=frozenset())
    assert logic.on_event(PeerConnected(Role.ROUTER, ROUTER), 0.0) == [
        to_router(worker()),
        to_router(WorkerLoad(num_free_blocks=20)),
    ]
    assert logic.on_event(Ticked(), 0.0) == []


def test_the_pools_arena_is_mapped() -> None:
    offered = ArenaOffered("/dev/shm/x.arena", 8, 64, "digest")
    assert DecodeHarness().hear(offered, POOL) == [MapArena(POOL, offered)]


def test_a_prefill_workers_buffer_is_mapped() -> None:
    made, offered = DecodeHarness(), ArenaOffered("/dev/shm/b.arena", 8, 64, "digest")
    assert made.hear(offered, PREFILL) == [MapArena(PREFILL, offered, stamps=True)]


# --- admission


def test_a_granted_batch_is_acknowledged_and_copied_in_one_transfer() -> None:
    expected = from_pool(load(H1, 0, 1), load(H2, 2, 3))
    assert DecodeHarness().grant(H1, H2) == [received((R1, 1), (R2, 1)), expected]


def test_what_is_copied_in_enters_and_its_lease_goes_back() -> None:
    expected = run(added(H1, 0, 1), added(H2, 2, 3), slices={"r1": 1, "r2": 1})
    assert DecodeHarness().enter(H1, H2) == [expected, released(11), released(12)]


def test_candidates_are_copied_in_beside_the_iteration_and_enter_with_the_next() -> None:
    made = running()
    assert made.enter(H2) == [released(12)]
    assert runs(made.sampled(r1=7)) == [run(added(H2, 2, 3), slices={"r1": 1, "r2": 1})]


def test_no_more_run_than_may() -> None:
    made = DecodeHarness(max_running_requests=1)
    assert runs(made.enter(H1, H2)) == [run(added(H1, 0, 1), slices={"r1": 1})]
    assert loads(made.sampled(r1=EOS)) == [from_pool(load(H2, 0, 1))]


def test_a_candidate_must_fit_with_what_it_and_all_beside_it_will_grow_by() -> None:
    made = DecodeHarness(num_blocks=5)
    made.enter(H1)  # takes two and may come to three
    assert loads(made.grant(H2)) == []  # takes two and may come to four


def test_the_first_needs_no_room_to_grow() -> None:
    assert loads(DecodeHarness(num_blocks=2).grant(H1)) == [from_pool(load(H1, 0, 1))]


def test_none_overtakes_a_candidate_that_does_not_fit() -> None:
    made = DecodeHarness(num_blocks=6)
    large, small = handoff(request("r2", prompt_len=16), 12), handoff(request("r3", prompt_len=1), 13)
    assert loads(made.grant(H1, large, small)) == [from_pool(load(H1, 0, 1))]


def test_a_chat_is_copied_in_without_waiting_for_documents() -> None:
    made = DecodeHarness(best_effort_floor=0.1)
    document = handoff(request("r2", prompt_len=30, request_class=RequestClass.BEST_EFFORT), 12)
    copied = loads(made.grant(document, H1))
    assert [[part.request_id for part in command.loads] for command in copied] == [[R1], [R2]]
    assert [one.additions[0].request.request_id for one in runs(made.loaded(copied[0]))] == [R1]


def test_one_whose_aborted_attempt_is_still_copied_in_holds_up_none() -> None:
    made = DecodeHarness()
    (first,) = loads(made.grant(H1))
    made.hear(AbortRequest(R1, 1))
    again = handoff(request(), 14, attempt=2)
    assert loads(made.grant(again, H2, batch=2)) == [from_pool(load(H2, 2, 3))]
    assert loads(made.loaded(first)) == [from_pool(load(again, 0, 1))]


def test_what_waits_is_counted_for_the_router() -> None:
    commands = DecodeHarness(num_blocks=4).logic.on_event(Received(POOL, BatchGranted(BATCH, (H1, H2))), 0.0)
    expected = WorkerLoad(num_running=1, num_candidate_requests=1, num_candidate_blocks=2, num_free_blocks=2)
    assert commands[-1] == to_router(expected)


def test_the_lengths_that_run_are_told_in_steps() -> None:
    made = DecodeHarness()
    (command,) = loads(made.grant(handoff(request(prompt_len=15), 11), handoff(request("r2", prompt_len=30), 12)))
    told = made.logic.on_event(BlocksLoaded(POOL, command.loads, frozenset()), 0.0)[-1]
    assert isinstance(told, Send)
    assert isinstance(told.message, WorkerLoad)
    assert told.message.running == JoinedBatch(BATCH, 16, 32)  # they are of 16 and 31 tokens


def test_of_a_batch_of_any_lengths_none_are_told() -> None:
    made = DecodeHarness()
    (command,) = loads(made.grant(H1, is_aligned=False))
    told = made.logic.on_event(BlocksLoaded(POOL, command.loads, frozenset()), 0.0)[-1]
    assert told == to_router(WorkerLoad(num_running=1, num_free_blocks=18, num_handoffs_verified=1))


def test_the_load_is_told_after_every_grant_even_if_it_is_as_before() -> None:
    made = running()
    made.sampled(r1=EOS)
    late = Received(POOL, BatchGranted(BatchId(4), (H2,), joins=BATCH))
    made.grant(H3, batch=2)  # so that BATCH runs no more
    told = WorkerLoad(num_running=1, num_free_blocks=18, num_handoffs_verified=1)
    assert made.logic.on_event(late, 0.0) == [received((R2, 1), batch=4), returned(12), to_router(told)]


# --- handoffs that do not hold


def refused() -> tuple[DecodeHarness, list[WorkerCommand]]:
    """r1 does not verify, r2 does."""
    made = DecodeHarness()
    (command,) = loads(made.grant(H1, H2))
    return made, made.loaded(command, R1)


def test_a_refused_handoff_is_recomputed_elsewhere_and_never_a_token() -> None:
    made, commands = refused()
    assert commands == [
        run(added(H2, 2, 3), slices={"r2": 1}),
        to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True)),
        released(11),
        released(12),
    ]
    assert made.load().num_handoffs_verified == 1


def test_a_handoff_out_of_reach_is_given_back_with_the_next_tick() -> None:
    made = DecodeHarness()
    (command,) = loads(made.grant(H1))
    every = frozenset({R1})
    assert made.do(BlocksLoaded(POOL, command.loads, every, is_reached=False)) == [released(11)]
    given_back = to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True))
    assert [given_back in made.do(Ticked()) for _ in range(2)] == [True, False]


# --- growing


def test_a_request_that_fills_its_last_block_gets_one_more() -> None:
    made = running()  # holds eight slots for its five tokens
    for token_id in (8, 9, 10):
        assert runs(made.sampled(r1=token_id)) == [run(slices={"r1": 1})]
    assert runs(made.sampled(r1=11)) == [run(grown=[("r1", 2)], slices={"r1": 1})]
