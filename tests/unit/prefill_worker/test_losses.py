"""The prefill worker when things go wrong: stale word, aborts, losses."""

from typing import Any

import msgspec

from alignedserve.messages.caches import BlocksTaken
from alignedserve.messages.events import PeerConnected, PeerDisconnected, Ticked
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import MapArena
from alignedserve.messages.workers import RequestPreempted
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.prefill import (
    ABORT,
    ARENA,
    CANCEL,
    REGISTERED,
    RESERVE,
    PrefillHarness,
    added,
    computing,
    copying,
    leaving,
    offered,
    offload,
    reserved,
    run,
    to_pool,
    to_router,
    token,
    written,
)
from tests.support.marks import each
from tests.support.samples import POOL, R1, ROUTER, request

# --- stale attempts


def test_an_abort_of_an_earlier_attempt_changes_nothing() -> None:
    made = PrefillHarness()
    made.begin(request(), 2)
    made.sampled(token(7))
    made.hear(reserved(lease=4, attempt=2), POOL)
    assert made.hear(AbortRequest(R1, 1), ROUTER) == []
    assert made.copied(offload(4, 2)) == [to_pool(written(4, 2))]


def test_given_again_while_it_waits_the_later_attempt_counts() -> None:
    made = PrefillHarness()
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
    assert made.copied(offload()) == [following, CANCEL]


def test_given_again_and_aborted_before_it_began_anew() -> None:
    made = copying()
    made.begin(request(), 2, 7)
    assert made.hear(AbortRequest(R1, 2)) == []
    assert made.copied(offload()) == [CANCEL]
    assert made.free_blocks() == 12


# --- aborts, in every stage


def test_aborted_while_it_is_computed_its_token_is_not_sent() -> None:
    made = computing()
    assert made.hear(ABORT) == []
    assert made.sampled(token(7)) == []
    assert made.free_blocks() == 12


def test_aborted_while_it_waits_for_the_pool() -> None:
    made = leaving()
    assert made.hear(ABORT) == [CANCEL]
    assert made.free_blocks() == 12


def test_aborted_while_it_is_offered() -> None:
    made = offered()
    assert made.hear(ABORT) == [CANCEL]
    assert made.hear(BlocksTaken(R1, 1, is_accepted=True), POOL) == []


# --- losses, in every stage


def lose_pool(made: PrefillHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.KV_POOL, POOL))


def test_the_pool_is_lost_while_it_waits_for_room() -> None:
    made = leaving()
    assert lose_pool(made) == []
    assert made.hear(reserved(), POOL) == []  # word of the one that is lost
    assert made.hear(ARENA, POOL) == [MapArena(POOL, ARENA), RESERVE]


def test_the_pool_is_lost_and_back_while_it_is_copied() -> None:
    made = copying()
    lose_pool(made)
    assert made.hear(ARENA, POOL) == [MapArena(POOL, ARENA)]
    assert made.copied(offload()) == [RESERVE]  # the lease was the lost one's


def test_a_pool_whose_memory_is_out_of_reach_is_not_tried_for_ever() -> None:
    made = copying()
    assert made.copied(offload(), None) == [CANCEL, RESERVE]
    for _ in range(6):
        assert made.hear(reserved(), POOL) == [offload()]
        assert made.copied(offload(), None) == [CANCEL]
        assert RESERVE in made.do(Ticked())
    made.hear(reserved(), POOL)
    told = made.copied(offload(), None)
    assert to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True)) in told  # perhaps another worker reaches it
    assert made.free_blocks() == 12


def test_a_worker_without_descriptors_for_a_moment_loses_no_request() -> None:
    made = copying()
    made.copied(offload(), None)
    made.hear(reserved(), POOL)
    made.copied(offload(), None)
    assert made.do(Ticked()) == [RESERVE]
    made.hear(reserved(), POOL)
    assert made.copied(offload()) == [to_pool(written())]


def test_aborted_between_two_copies_that_fail() -> None:
    made = copying()
    made.copied(offload(), None)
    made.hear(reserved(), POOL)
    made.copied(offload(), None)
    assert made.hear(ABORT) == []
    assert made.do(Ticked()) == []
    assert made.free_blocks() == 12


def test_the_pool_is_lost_while_it_is_offered() -> None:
    made = offered()
    assert lose_pool(made) == [to_router(RequestPreempted(R1, 1, (7,)))]
    assert made.free_blocks() == 12


@each("stage", [computing, leaving, copying, offered])
def test_a_router_that_comes_back_empties_the_worker(stage: Any) -> None:
    made = stage()
    made.do(PeerDisconnected(Role.ROUTER, ROUTER))
    registered = msgspec.structs.replace(REGISTERED, latest_attempt=1)
    assert made.do(PeerConnected(Role.ROUTER, ROUTER))[0] == to_router(registered)
    made.sampled(token(7)) if stage is computing else None
    made.copied(offload()) if stage is copying else None
    assert made.free_blocks() == 12
