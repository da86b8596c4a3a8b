"""A pool that keeps decodes for workers of both phases: for the one that wrote them, and no router hears of it."""

from alignedserve.core.lifecycle import epoch_end
from alignedserve.messages.caches import BlockRun, CopyGranted, CopyMissing, FetchCopy, LeasesReleased
from alignedserve.messages.events import Send
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import DropRequest
from kvpool.state import SetBlockGeneration
from tests.harnesses.pool import L1, PoolHarness, freed, reserved, taken, written
from tests.support.samples import DECODE, PREFILL, R1


def made() -> PoolHarness:
    """r1 is there, in blocks 0 and 1, written by the worker named PREFILL."""
    pool = PoolHarness(takes_requests=False)
    pool.pool("r1", 2)
    return pool


def test_its_length_is_in_the_tree_and_no_router_hears_of_it() -> None:
    pool = PoolHarness(takes_requests=False)
    pool.reserve("r1", 2)
    assert pool.hear(PREFILL, written("r1", reserved("r1", 1, 0, 1))) == [taken("r1", is_accepted=True)]
    assert list(pool.logic._pooled) == [R1]


def test_the_worker_that_wrote_it_gets_it_back_and_no_copy_stays() -> None:
    pool = made()
    (answer,) = pool.hear(PREFILL, FetchCopy(R1, L1))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, CopyGranted)
    handoff = answer.message.handoff
    assert (handoff.request.request_id, answer.message.attempt) == (R1, L1)
    assert pool.hear(PREFILL, LeasesReleased((handoff.lease_id,))) == [freed(0, 1)]


def test_another_worker_gets_nothing() -> None:
    assert made().hear(DECODE, FetchCopy(R1, L1)) == [Send(DECODE, CopyMissing(R1, L1))]


def test_with_its_worker_its_blocks_are_free() -> None:
    assert made().lose(PREFILL) == [freed(0, 1)]


def test_one_that_has_ended_is_dropped() -> None:
    assert made().hear(PREFILL, DropRequest(R1, epoch_end(L1))) == [freed(0, 1)]


def test_one_that_ends_while_it_is_read_is_free_when_it_was() -> None:
    pool = made()
    (answer,) = pool.hear(PREFILL, FetchCopy(R1, L1))
    assert isinstance(answer, Send)
    assert isinstance(answer.message, CopyGranted)
    assert pool.hear(PREFILL, DropRequest(R1, epoch_end(L1))) == []
    assert pool.hear(PREFILL, LeasesReleased((answer.message.handoff.lease_id,))) == [freed(0, 1)]


def test_a_router_that_is_new_changes_nothing() -> None:
    pool = made()
    pool.lose("router")
    assert [one for one in pool.link("router", Role.ROUTER) if isinstance(one, SetBlockGeneration)] == []
    assert list(pool.logic._pooled) == [R1]


def test_blocks_that_were_reserved_and_not_needed_are_free() -> None:
    pool = PoolHarness(takes_requests=False)
    pool.reserve("r1", 3)
    message = written("r1", reserved("r1", 1, 0, 1, 2), context_len=8, runs=(BlockRun(0, 2, 99),))
    assert pool.hear(PREFILL, message) == [taken("r1", is_accepted=True), freed(2)]
