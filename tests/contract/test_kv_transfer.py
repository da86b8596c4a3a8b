"""The contract of every KVTransfer: deliver exactly the bytes that were sent, or refuse.

Sender and receiver have separate storages; blocks are scattered on both sides and in between. The receiver checks
checksums, bounds, order and generation, and trusts no message.
"""

import pytest

from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from tests.harnesses.transfer import (
    BLOCK_SIZE,
    NUM_POOL_BLOCKS,
    NUM_STORAGE_BLOCKS,
    Setup,
    changed,
    content,
    everything,
)
from tests.support.samples import blocks

pytestmark = pytest.mark.slow

# --- what arrives


def test_only_the_blocks_in_use_are_touched(setup: Setup) -> None:
    before_pool, before_there, before_here = (
        setup.medium.content(),
        everything(setup.receiver),
        everything(setup.sender),
    )
    handoff = setup.send(20, [5, 11, 6])
    used = {run.first_block + offset for run in handoff.runs for offset in range(run.num_blocks)}
    setup.expect(handoff, [2, 13, 4], [5, 11, 6])
    after_pool, after_there = setup.medium.content(), everything(setup.receiver)
    assert {i for i in range(NUM_POOL_BLOCKS) if (after_pool[i] != before_pool[i]).any()} == used
    assert {i for i in range(NUM_STORAGE_BLOCKS) if (after_there[i] != before_there[i]).any()} == {2, 13, 4}
    assert (everything(setup.sender) == before_here).all()


def test_room_beyond_the_handoff_is_left_alone(setup: Setup) -> None:
    before = content(setup.receiver, [9])
    copy = setup.send(16, [5, 11])
    assert setup.fetch(copy, 2, 13, 9) is not None
    assert (content(setup.receiver, [2, 13]) == content(setup.sender, [5, 11])).all()
    assert (content(setup.receiver, [9]) == before).all()


def test_a_handoff_may_be_fetched_again_while_its_lease_holds(setup: Setup) -> None:
    handoff = setup.send(16, [5, 11])
    setup.expect(handoff, [2, 13], [5, 11])
    setup.expect(handoff, [7, 1], [5, 11])


# --- several requests at once


def test_requests_of_one_call_arrive_in_order(setup: Setup) -> None:
    sources = ([3, 1, 2], [9], [14, 0, 15, 7, 8])
    targets = ([0, 15, 4], [3], [9, 8, 7, 1, 2])
    leases = [setup.lease(len(source)) for source in sources]
    outgoing = [
        OffloadRequest(blocks(*source), taken, generation)
        for source, (generation, taken) in zip(sources, leases, strict=True)
    ]
    copies = [
        BlockCopy(generation, BLOCK_SIZE * len(taken), runs or ())
        for runs, (generation, taken) in zip(setup.sending.offload(outgoing), leases, strict=True)
    ]
    incoming = [FetchRequest(copy, blocks(*target)) for copy, target in zip(copies, targets, strict=True)]
    assert setup.receiving.fetch(incoming) == [True, True, True]
    for source, target in zip(sources, targets, strict=True):
        assert (content(setup.receiver, target) == content(setup.sender, source)).all()


def test_blocks_of_a_prefix_are_fetched_in_other_runs_than_they_were_written_in(setup: Setup) -> None:
    generation, taken = setup.lease(6)
    first, later = (
        OffloadRequest(blocks(3, 1), taken[:2], generation, num_before=0),
        OffloadRequest(blocks(9, 14, 0, 7), taken[2:], generation, num_before=2),
    )
    sent = setup.sending.offload([first, later])
    runs = tuple(run for part in sent for run in part or ())
    assert [(run.first_block, run.num_blocks) for run in runs] == [(block_id, 1) for block_id in taken]
    middle = BlockCopy(generation, 3 * BLOCK_SIZE, runs[1:4], num_before=1)
    rows = setup.fetch(middle, 0, 15, 4)
    assert rows is not None
    assert (rows == content(setup.sender, [1, 9, 14])).all()
    assert setup.fetch(changed(middle, num_before=2), 0, 15, 4) is None  # they stand elsewhere


def test_nothing_to_do_is_nothing_done(setup: Setup) -> None:
    assert setup.sending.offload([]) == []
    assert setup.receiving.fetch([]) == []


def test_one_refused_offload_fails_no_other(setup: Setup) -> None:
    (first, taken), (last, also_taken) = setup.lease(2), setup.lease(1)
    before = setup.medium.content()
    outgoing = [
        OffloadRequest(blocks(4, 9), taken, first),
        OffloadRequest(blocks(3), blocks(NUM_POOL_BLOCKS), first),
        OffloadRequest(blocks(7), also_taken, last),
    ]
    sent, refused, also_sent = setup.sending.offload(outgoing)
    assert refused is None
    assert sent is not None
    assert also_sent is not None
    after = setup.medium.content()
    used = {*taken, *also_taken}
    assert all((after[i] == before[i]).all() for i in range(NUM_POOL_BLOCKS) if i not in used)
    assert (after[list(also_taken)] == content(setup.sender, [7])).all()
    rows = setup.fetch(BlockCopy(first, 16, sent), 0, 1)
    assert rows is not None
    assert (rows == content(setup.sender, [4, 9])).all()


# --- what is refused on the way out


def refused(setup: Setup, source: tuple[BlockId, ...], taken: tuple[BlockId, ...], generation: int) -> bool:
    return setup.sending.offload([OffloadRequest(source, taken, generation)]) == [None]


def test_offloading_under_another_generation_is_refused(pool: Setup) -> None:
    _, taken = pool.lease(2)
    for generation in (0, 2, 1 << 40):
        assert refused(pool, blocks(0, 1), taken, generation)
    assert not pool.medium.content().any()


def test_offloading_under_a_lease_that_was_taken_back_is_refused(pool: Setup) -> None:
    generation, taken = pool.lease(2)
    pool.medium.stamp(taken[:1], 0)
    assert refused(pool, blocks(0, 1), taken, generation)


# --- what a writer stamps


def test_in_a_candidate_buffer_the_writer_stamps_the_blocks(buffer: Setup) -> None:
    old = buffer.send(16, [3, 1])
    taken = [BlockId(old.runs[0].first_block), BlockId(old.runs[-1].first_block + old.runs[-1].num_blocks - 1)]
    new = buffer.send_to(taken, old.generation + 1, 16, [5, 6])
    assert buffer.fetch(old, 0, 1) is None
    rows = buffer.fetch(new, 0, 1)
    assert rows is not None
    assert (rows == content(buffer.sender, [5, 6])).all()
