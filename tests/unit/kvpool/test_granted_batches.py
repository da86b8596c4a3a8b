"""The KV pool: batches that it forms and grants, and what it tells of the lengths that wait."""

from alignedserve.core.ids import BatchId, RequestId, WorkerName
from alignedserve.core.lifecycle import epoch_end
from alignedserve.core.request import Slo
from alignedserve.messages.caches import (
    BatchGranted,
    BlockRun,
    CopyGranted,
    CopyMissing,
    DecodePace,
    FetchCopy,
    LeasesReleased,
)
from alignedserve.messages.cluster_view import MAX_RANGES, FormedBatch, LengthLeaf, LengthTree, tree_of
from alignedserve.messages.events import PeerDisconnected, Send, Ticked
from alignedserve.messages.fields import NO_BATCH
from alignedserve.messages.handshake import Role
from alignedserve.messages.pools import BatchFormed, DropRequest, FormBatch
from alignedserve.messages.workers import JoinedBatch
from kvpool.logic import LINK_WAIT_S, PoolCommand
from kvpool.policies import make_batch_former
from kvpool.policies.batch_former import BatchFormer
from kvpool.policies.density_first import DensityFirstBatchFormer, DensityFirstConfig
from kvpool.quad_tree import QuadTree
from kvpool.state import PooledRequest, SetBlockGeneration
from tests.harnesses.pool import (
    ASKED,
    BATCH,
    FORM,
    L1,
    PoolHarness,
    freed,
    grants,
    handoff_of,
    reserved,
    taken,
    written,
)
from tests.support.marks import each
from tests.support.samples import DECODE, PREFILL, R1, R2, R3, ROUTER, epoch, request


def density_first() -> BatchFormer:
    return make_batch_former("density_first", block_size=4, starvation_s=1000.0)


def test_only_what_is_of_the_running_lengths_joins_a_batch() -> None:
    made = PoolHarness(density_first())
    made.pool("r1", 1)
    content = made.pool("r2", 3)
    join = FormBatch(BatchId(2), ASKED, 100, 100, joins=JoinedBatch(BATCH, 9, 13))
    assert made.hear(ROUTER, join) == [
        Send(ROUTER, BatchFormed(BatchId(2), ASKED, ((R2, epoch(1, 2)),))),
        Send(DECODE, BatchGranted(BatchId(2), (handoff_of(content),), joins=BATCH)),
    ]
    assert made.hear(ROUTER, join) == [Send(ROUTER, BatchFormed(BatchId(2), ASKED, ()))]


def test_while_tenants_share_requests_go_by_turn_and_join_whatever_runs() -> None:
    made = PoolHarness(density_first())
    last, first = made.pool("r1", 1, epoch(2)), made.pool("r2", 3, epoch(1))
    by_turn = FormBatch(BATCH, ASKED, 100, 2, by_turn=True)
    assert made.hear(ROUTER, by_turn) == [
        Send(ROUTER, BatchFormed(BATCH, ASKED, ((R2, epoch(1, 2)), (R1, epoch(2, 2))))),
        Send(DECODE, BatchGranted(BATCH, (handoff_of(first), handoff_of(last)), joins=NO_BATCH)),
    ]


def test_who_must_be_done_soon_is_in_the_next_batch() -> None:
    made = PoolHarness(density_first())
    made.pool("r1")
    made.pool("r2")
    urgent = request("r3", prompt_len=12, max_tokens=101, slo=Slo(deadline_s=10.0))
    made.pool(urgent, 3)
    only_one = FormBatch(BATCH, ASKED, 100, 1)
    # Nothing is known of the decode worker: half of the time is kept.
    made.now = 4.9
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R1]
    made.now = 5.0
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R3]


@each(("paces", "urgent_at_s"), [((0.02,), 8.0), ((0.04,), 6.0), ((0.02, 0.03), 7.0), ((0.2,), 5.0)])
def test_what_the_remaining_tokens_take_is_known_from_the_slowest_decode_worker(
    paces: tuple[float, ...], urgent_at_s: float
) -> None:
    made = PoolHarness(density_first())
    for number, iteration_s in enumerate(paces):
        made.link(f"decode-{number}", Role.DECODE_WORKER)
        assert made.hear(f"decode-{number}", DecodePace(iteration_s)) == []
    made.link("lost", Role.DECODE_WORKER)
    made.hear("lost", DecodePace(9.0))
    made.lose("lost")
    made.pool("r1")
    made.pool(request("r3", prompt_len=12, max_tokens=101, slo=Slo(deadline_s=10.0)), 3)  # 100 tokens to come
    only_one = FormBatch(BATCH, ASKED, 100, 1)
    made.now = urgent_at_s - 0.1
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R1]
    made.now = urgent_at_s
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, only_one))] == [R3]


ELSEWHERE = WorkerName("decode-1")
FORM_ELSEWHERE = FormBatch(BATCH, ELSEWHERE, 100, 100)


def test_a_worker_that_is_not_linked_gets_its_batch_when_it_is() -> None:
    made = PoolHarness()
    made.pool("r1")
    assert made.hear(ROUTER, FORM_ELSEWHERE) == []
    assert len(grants(made.link(ELSEWHERE, Role.DECODE_WORKER))) == 1
    made.do(PeerDisconnected(Role.DECODE_WORKER, ELSEWHERE))
    assert grants(made.link(ELSEWHERE, Role.DECODE_WORKER)) == []  # it was asked for once


def test_where_links_never_come_none_is_waited_for() -> None:
    made = PoolHarness(link_wait_s=0.0)
    made.pool("r1")
    assert forms(made.hear(ROUTER, FORM_ELSEWHERE)) == [BatchFormed(BATCH, ELSEWHERE, ())]
    assert len(grants(made.hear(ROUTER, FORM))) == 1


def test_a_worker_that_does_not_link_in_time_gets_nothing() -> None:
    made = PoolHarness()
    made.pool("r1")
    made.hear(ROUTER, FORM_ELSEWHERE)
    made.now += LINK_WAIT_S - 0.01
    assert forms(made.do(Ticked())) == []
    made.now += 0.01
    assert forms(made.do(Ticked())) == [BatchFormed(BATCH, ELSEWHERE, ())]
    assert grants(made.link(ELSEWHERE, Role.DECODE_WORKER)) == []
    assert len(grants(made.hear(ROUTER, FORM))) == 1


def test_a_batch_that_waits_for_a_link_is_not_held_up_by_others_and_ends_with_its_router() -> None:
    made = PoolHarness()
    made.pool("r1")
    made.hear(ROUTER, FORM_ELSEWHERE)
    assert len(grants(made.hear(ROUTER, FORM))) == 1
    made.link(ROUTER, Role.ROUTER)
    assert [type(command) for command in made.link(ELSEWHERE, Role.DECODE_WORKER)] == [Send]
    made.now += LINK_WAIT_S
    assert forms(made.do(Ticked())) == []


def forms(commands: list[PoolCommand]) -> list[BatchFormed]:
    """Return the answers to FormBatch among these commands."""
    messages = [command.message for command in commands if isinstance(command, Send)]
    return [message for message in messages if isinstance(message, BatchFormed)]


@each(("max_blocks", "max_requests"), [(2, 100), (100, 1)])
def test_the_limits_of_the_router_hold(max_blocks: int, max_requests: int) -> None:
    made = PoolHarness()
    for name in ("r1", "r2"):
        made.pool(name, 2)
    form = FormBatch(BATCH, ASKED, max_blocks, max_requests)
    assert [handoff.request.request_id for handoff in grants(made.hear(ROUTER, form))] == [R1]


def tree_with(*lengths: int, max_context_len: int = 4096) -> QuadTree:
    tree = QuadTree(block_size=16, max_context_len=max_context_len)
    for number, length in enumerate(lengths):
        tree.insert(PooledRequest(RequestId(f"r{number}"), length, -(-length // 16), 0.0, None), 0.0)
    return tree


def test_the_leaves_of_a_tree_with_few_are_told_one_by_one() -> None:
    leaves = (LengthLeaf(0, 2, 2), LengthLeaf(3, 1, 4), LengthLeaf(255, 1, 256))
    assert tree_with(5, 16, 64, 4096).seen() == LengthTree(4096, 16, leaves)
    assert tree_with().seen() == LengthTree(4096, 4096)


@each("step", [16, 33, 64])
def test_a_tree_with_many_is_told_as_coarsely_as_it_takes(step: int) -> None:
    lengths = range(1, 4096, step)
    seen = tree_with(*lengths).seen()
    by_leaf: dict[int, tuple[int, int]] = {}
    for length in lengths:
        num_requests, num_blocks = by_leaf.get((length - 1) // 16, (0, 0))
        by_leaf[(length - 1) // 16] = (num_requests + 1, num_blocks + -(-length // 16))
    assert seen == tree_of(by_leaf, leaf_len=16, max_len=4096)
    assert MAX_RANGES / 4 < len(seen.leaves) <= MAX_RANGES
    assert sum(one.num_requests for one in seen.leaves) == len(lengths)


def test_the_pool_tells_its_lengths_and_its_last_batch() -> None:
    made = PoolHarness(DensityFirstBatchFormer(DensityFirstConfig(block_size=4, max_context_len=64)))
    made.pool("r1", 2)
    waiting = made.lengths
    assert waiting is not None
    assert [leaf.num_requests for leaf in waiting.leaves] == [1]
    assert waiting.formed is None
    made.hear(ROUTER, FORM)
    assert made.lengths is not None
    assert isinstance(made.lengths.formed, FormedBatch)
    assert (made.lengths.formed.batch_id, made.lengths.formed.worker) == (BatchId(1), DECODE)


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
