"""The decode worker: stale word, aborts, losses."""

import msgspec

from alignedserve.messages.events import PeerConnected, PeerDisconnected
from alignedserve.messages.gateways import AbortRequest, TokenDelta
from alignedserve.messages.handshake import Role
from alignedserve.messages.iterations import LoadBlocks, UnmapArena
from alignedserve.messages.workers import RequestPreempted
from alignedserve.worker_core.part import WorkerCommand
from tests.harnesses.decode import (
    EOS,
    H1,
    H2,
    DecodeHarness,
    added,
    emitted,
    from_pool,
    load,
    loads,
    received,
    released,
    run,
    running,
    runs,
    to_router,
)
from tests.support.samples import POOL, R1, ROUTER, handoff, request

# --- stale attempts


def test_an_abort_of_an_earlier_attempt_leaves_a_candidate_alone() -> None:
    made = DecodeHarness(max_running_requests=1)
    later = handoff(request(), 11, attempt=2)
    made.enter(H2, later)
    assert made.hear(AbortRequest(R1, 1)) == []
    assert loads(made.sampled(r2=EOS)) == [from_pool(load(later, 0, 1))]


def test_an_abort_of_an_earlier_attempt_leaves_a_copy_alone() -> None:
    made, later = DecodeHarness(), handoff(request(), 11, attempt=2)
    (command,) = loads(made.grant(later))
    assert made.hear(AbortRequest(R1, 1)) == []
    assert runs(made.loaded(command)) == [run(added(later, 0, 1), slices={"r1": 1})]


def test_a_later_attempt_ends_the_one_that_runs_and_waits_for_its_end() -> None:
    made = running()
    again = handoff(request(), 14, attempt=2, generated=(7, 8))
    assert made.grant(again) == [received((R1, 2))]
    assert made.sampled(r1=9) == [from_pool(load(again, 0, 1))]


def test_a_later_attempt_takes_the_place_of_a_candidate_whose_lease_goes_back() -> None:
    made = DecodeHarness(max_running_requests=1)
    made.enter(H2, H1)
    again = handoff(request(), 14, attempt=2)
    assert made.grant(again) == [received((R1, 2)), released(11)]


# --- aborts, in every stage


def full() -> DecodeHarness:
    """r2 runs alone and r1 waits in the pool."""
    made = DecodeHarness(max_running_requests=1)
    made.enter(H2, H1)
    return made


def copying_in() -> tuple[DecodeHarness, LoadBlocks]:
    """r1 is on its way in."""
    made = DecodeHarness()
    (command,) = loads(made.grant(H1))
    return made, command


def test_aborted_as_a_candidate_its_lease_goes_back() -> None:
    assert full().hear(AbortRequest(R1)) == [released(11)]


def test_aborted_while_it_is_copied_in_its_blocks_are_freed_after_the_copy() -> None:
    made, command = copying_in()
    assert made.hear(AbortRequest(R1)) == []
    assert made.loaded(command) == [released(11)]
    assert made.load().num_free_blocks == 20


def test_aborted_while_it_is_copied_in_and_refused_it_is_not_recomputed() -> None:
    made, command = copying_in()
    made.hear(AbortRequest(R1))
    assert made.loaded(command, R1) == [released(11)]


def test_aborted_while_it_runs_its_token_is_not_sent() -> None:
    made = running()
    made.hear(AbortRequest(R1))
    assert made.sampled(r1=9) == []
    assert runs(made.enter(H2)) == [run(added(H2, 0, 1), removals=("r1",), slices={"r2": 1})]


# --- losses, in every stage


def lose_pool(made: DecodeHarness) -> list[WorkerCommand]:
    return made.do(PeerDisconnected(Role.KV_POOL, POOL))


def test_the_pool_is_lost_with_the_leases_of_candidates() -> None:
    expected = to_router(RequestPreempted(R1, 1, (7,), handoff_refused=True))
    assert lose_pool(full()) == [UnmapArena(POOL), expected]


def test_the_pool_is_lost_while_a_request_is_copied_in() -> None:
    made, command = copying_in()
    assert lose_pool(made) == [UnmapArena(POOL)]  # what comes of the copy says how it went
    assert runs(made.loaded(command)) == [run(added(H1, 0, 1), slices={"r1": 1})]


def test_the_pool_is_lost_while_a_request_runs() -> None:
    made = running()
    assert lose_pool(made) == [UnmapArena(POOL)]
    assert made.sampled(r1=9)[1] == emitted(TokenDelta(R1, 1, (9,)))


def test_another_lost_peer_is_not_noticed() -> None:
    assert full().do(PeerDisconnected(Role.GATEWAY, "gateway-0")) == []


def test_a_router_that_comes_back_empties_the_worker() -> None:
    made = full()
    registered = msgspec.structs.replace(made.registered, latest_attempt=1)
    assert made.do(PeerConnected(Role.ROUTER, ROUTER)) == [to_router(registered), released(11)]
    assert made.sampled(r2=8) == []
    assert made.load().num_free_blocks == 20


def test_a_router_that_comes_back_ends_what_is_copied_in() -> None:
    made, command = copying_in()
    made.do(PeerConnected(Role.ROUTER, ROUTER))
    assert made.loaded(command) == [released(11)]
    assert made.load().num_free_blocks == 20
