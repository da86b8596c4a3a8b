"""The contract of every KVTransfer: deliver exactly the bytes that were sent, or refuse.

Sender and receiver have separate storages; blocks are scattered on both sides and in between. The receiver checks
checksums, bounds, order and generation, and trusts no message.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from alignedserve.core.block_allocator import contiguous_runs
from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.shm_transfer import ShmTransfer
from tests.harnesses.transfer import (
    BLOCK_SIZE,
    ELSEWHERE,
    IN_SLOW_TESTS,
    MEDIA,
    NUM_DEVICES,
    NUM_POOL_BLOCKS,
    NUM_STORAGE_BLOCKS,
    Medium,
    Setup,
    ShmMedium,
    changed,
    content,
    everything,
    filled,
    layout_of,
    run_of,
)
from tests.support.samples import blocks
from tests.support.stored_blocks import write_blocks


def cases() -> Iterator[object]:
    for name in MEDIA:
        yield pytest.param((name, "float32"), id=name, marks=[pytest.mark.slow] if name in IN_SLOW_TESTS else [])
    yield pytest.param(("shm pool", "bfloat16"), id="shm pool, bfloat16")
    for name in ELSEWHERE:
        marks = [pytest.mark.gpu] if name in NUM_DEVICES else [pytest.mark.slow]
        yield pytest.param((name, "bfloat16"), id=name, marks=marks)


@pytest.fixture(params=cases())
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    name, dtype = request.param
    if torch.cuda.device_count() < NUM_DEVICES.get(name, 0):
        pytest.skip(f"needs {NUM_DEVICES[name]} CUDA devices")
    layout = layout_of(dtype)
    medium = (MEDIA | ELSEWHERE)[name](tmp_path, layout)
    yield Setup(medium, layout, filled(layout, 1, medium.device), filled(layout, 2, medium.device))
    medium.close()


@pytest.fixture
def pool(setup: Setup) -> Setup:
    """Where the owner stamps the blocks."""
    if setup.medium.writer_stamps:
        pytest.skip("in a candidate buffer the writer stamps the blocks")
    return setup


@pytest.fixture
def buffer(setup: Setup) -> Setup:
    """Where the writer stamps the blocks."""
    if not setup.medium.writer_stamps:
        pytest.skip("in the pool's arena the pool stamps the blocks")
    return setup


# --- what arrives


def test_requests_arrive_as_they_were_sent(setup: Setup) -> None:
    sources = ([3, 1, 2], [9], [14, 0, 15, 7, 8])
    targets = ([0, 15, 4], [3], [9, 8, 7, 1, 2])
    handoffs = [setup.send(BLOCK_SIZE * len(source) - 2, source) for source in sources]
    for handoff, source, target in reversed(list(zip(handoffs, sources, targets, strict=True))):
        setup.expect(handoff, target, source)


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


def test_runs_say_which_blocks_in_order(setup: Setup) -> None:
    setup.medium.stamp(blocks(4, 5, 6, 2, 9, 10), 9)
    copy = setup.send_to(blocks(4, 5, 6, 2, 9, 10), 9, 48, range(6))
    assert [(run.first_block, run.num_blocks) for run in copy.runs] == [(4, 3), (2, 1), (9, 2)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((), []), ((4,), [(4, 1)]), ((4, 5, 6, 2, 3, 9), [(4, 3), (2, 2), (9, 1)]), ((3, 2, 1), [(3, 1), (2, 1), (1, 1)])],
)
def test_neighbours(numbers: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    assert contiguous_runs(blocks(*numbers)) == expected


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


def test_nothing_to_do_is_nothing_done(setup: Setup) -> None:
    assert setup.sending.offload([]) == []
    assert setup.receiving.fetch([]) == []


def test_one_refused_offload_fails_nobody_else(setup: Setup) -> None:
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


def test_one_refused_fetch_fails_nobody_else(setup: Setup) -> None:
    copies = [setup.send(16, source) for source in ([3, 1], [9, 6], [14, 0])]
    before = content(setup.receiver, [10, 11])
    copies[1] = changed(copies[1], generation=copies[1].generation + 50)
    targets = ([0, 15], [10, 11], [4, 5])
    incoming = [FetchRequest(copy, blocks(*target)) for copy, target in zip(copies, targets, strict=True)]
    assert setup.receiving.fetch(incoming) == [True, False, True]
    assert (content(setup.receiver, [0, 15, 4, 5]) == content(setup.sender, [3, 1, 14, 0])).all()
    assert (content(setup.receiver, [10, 11]) == before).all()


def test_one_spoilt_in_between_fails_nobody_else(setup: Setup) -> None:
    copies = [setup.send(16, source) for source in ([3, 1], [9, 6], [14, 0])]
    setup.medium.flip(BlockId(copies[1].runs[0].first_block), 7)
    targets = ([0, 15], [10, 11], [4, 5])
    incoming = [FetchRequest(copy, blocks(*target)) for copy, target in zip(copies, targets, strict=True)]
    assert setup.receiving.fetch(incoming) == [True, False, True]
    assert (content(setup.receiver, [0, 15, 4, 5]) == content(setup.sender, [3, 1, 14, 0])).all()


# --- what is refused on the way out


def refused(setup: Setup, source: tuple[BlockId, ...], taken: tuple[BlockId, ...], generation: int) -> bool:
    return setup.sending.offload([OffloadRequest(source, taken, generation)]) == [None]


@pytest.mark.parametrize("generation", [0, 2, 1 << 40])
def test_offloading_under_another_generation_is_refused(pool: Setup, generation: int) -> None:
    _, taken = pool.lease(2)
    assert refused(pool, blocks(0, 1), taken, generation)
    assert not pool.medium.content().any()


def test_offloading_under_a_lease_that_was_taken_back_is_refused(pool: Setup) -> None:
    generation, taken = pool.lease(2)
    pool.medium.stamp(taken[:1], 0)
    assert refused(pool, blocks(0, 1), taken, generation)


@pytest.mark.parametrize("generation", [0, -1, 1 << 64])
def test_offloading_into_nobodys_blocks_is_refused(setup: Setup, generation: int) -> None:
    assert refused(setup, blocks(0, 1), blocks(3, 4), generation)
    assert not setup.medium.content().any()


@pytest.mark.parametrize("target", [(0,), (0, 1, 2), (0, NUM_POOL_BLOCKS), (-1, 0), (1, 1)])
def test_offloading_into_other_blocks_than_there_are_is_refused(setup: Setup, target: tuple[int, ...]) -> None:
    setup.medium.stamp(blocks(0, 1, 2, NUM_POOL_BLOCKS - 1), 1)
    assert refused(setup, blocks(0, 1), blocks(*target), 1)
    assert not setup.medium.content().any()


# --- what a writer stamps


def test_in_a_candidate_buffer_the_writer_stamps_the_blocks(buffer: Setup) -> None:
    old = buffer.send(16, [3, 1])
    taken = [BlockId(old.runs[0].first_block), BlockId(old.runs[-1].first_block + old.runs[-1].num_blocks - 1)]
    new = buffer.send_to(taken, old.generation + 1, 16, [5, 6])
    assert buffer.fetch(old, 0, 1) is None
    rows = buffer.fetch(new, 0, 1)
    assert rows is not None
    assert (rows == content(buffer.sender, [5, 6])).all()


# --- what is refused on the way in


@dataclass
class Sent:
    """A valid copy of five blocks in three runs, of two, two and one, to be spoilt."""

    setup: Setup
    copy: BlockCopy

    def is_refused(self, copy: BlockCopy, num_targets: int = 6) -> bool:
        return self.setup.fetch(copy, *range(num_targets)) is None


SOURCE = (3, 8, 1, 14, 6)


@pytest.fixture
def sent(setup: Setup) -> Sent:
    setup.medium.stamp(blocks(4, 5, 1, 2, 9), 77)
    copy = setup.send_to(blocks(4, 5, 1, 2, 9), 77, 37, SOURCE)
    setup.expect(copy, range(5), SOURCE)
    return Sent(setup, copy)


def spoilt_runs(runs: tuple[BlockRun, ...]) -> dict[str, tuple[BlockRun, ...]]:
    first, second, last = runs
    return {
        "none": (),
        "the last one is missing": (first, second),
        "the first one is missing": (second, last),
        "one is shorter": (run_of(first, num_blocks=1), second, last),
        "one is longer": (first, second, run_of(last, num_blocks=2)),
        "one is shorter, another longer": (run_of(first, num_blocks=1), second, run_of(last, num_blocks=2)),
        "reordered": (second, first, last),
        "rotated": (last, first, second),
        "one is there twice": (first, first, last),
        "one is there twice and all the others": (first, second, second, last),
        "another block": (first, run_of(second, first_block=4), last),
        "another block with its checksum": (first, run_of(second, first_block=4, checksum=first.checksum), last),
        "beyond the arena": (first, second, run_of(last, first_block=NUM_POOL_BLOCKS)),
        "far beyond the arena": (first, second, run_of(last, first_block=1 << 40)),
        "negative": (first, second, run_of(last, first_block=-1)),
        "negative, from the end": (run_of(first, first_block=4 - NUM_POOL_BLOCKS), second, last),
        "absurdly long": (first, second, run_of(last, num_blocks=1 << 40)),
        "of negative length": (first, second, last, run_of(last, num_blocks=-1), run_of(last, num_blocks=1)),
        "an empty one": (first, second, last, BlockRun(0, 0, 0)),
        "a wrong checksum": (first, second, run_of(last, checksum=last.checksum ^ 1)),
        "checksums swapped": (run_of(first, checksum=second.checksum), run_of(second, checksum=first.checksum), last),
        "a negative checksum": (first, second, run_of(last, checksum=-1)),
    }


@pytest.mark.parametrize("how", spoilt_runs((BlockRun(4, 2, 1), BlockRun(1, 2, 2), BlockRun(9, 1, 3))))
def test_spoilt_runs_are_refused(sent: Sent, how: str) -> None:
    runs = spoilt_runs(sent.copy.runs)[how]
    assert sent.is_refused(changed(sent.copy, runs=runs))


@pytest.mark.parametrize("generation", [76, 78, 0, -77, 77 + (1 << 64)])
def test_another_generation_is_refused(sent: Sent, generation: int) -> None:
    assert sent.is_refused(changed(sent.copy, generation=generation))


@pytest.mark.parametrize("block_id", [4, 5, 1, 2, 9])
@pytest.mark.parametrize("generation", [0, 78])
def test_a_lease_that_ended_before_the_copy_is_refused(sent: Sent, block_id: int, generation: int) -> None:
    sent.setup.medium.stamp(blocks(block_id), generation)
    assert sent.is_refused(sent.copy)


def test_freed_blocks_are_refused_even_when_the_handoff_says_nobodys(sent: Sent) -> None:
    sent.setup.medium.stamp(blocks(4, 5, 1, 2, 9), 0)
    assert sent.is_refused(changed(sent.copy, generation=0))


@pytest.mark.parametrize("block_id", [4, 5, 1, 2, 9])
def test_a_flipped_bit_in_any_block_is_refused(sent: Sent, block_id: int) -> None:
    for offset in (0, sent.setup.layout.block_bytes // 2, sent.setup.layout.block_bytes - 1):
        sent.setup.medium.flip(BlockId(block_id), offset)
        assert sent.is_refused(sent.copy)
        sent.setup.medium.flip(BlockId(block_id), offset)
    assert not sent.is_refused(sent.copy)


@pytest.mark.parametrize("context_len", [0, 1, 32, 41, 48, 1 << 40])
def test_a_context_of_other_blocks_is_refused(sent: Sent, context_len: int) -> None:
    assert sent.is_refused(changed(sent.copy, context_len=context_len))


@pytest.mark.parametrize("num_targets", [0, 1, 4])
def test_too_few_target_blocks_are_refused(sent: Sent, num_targets: int) -> None:
    assert sent.is_refused(sent.copy, num_targets)


def test_a_receiver_of_another_layout_never_gets_to_it(tmp_path: Path) -> None:
    medium = ShmMedium(tmp_path, layout_of("float32"))
    other = BlockStorage(BlockLayout(BLOCK_SIZE, 2, 4, 2, "float32"), 4)  # of the same size
    with pytest.raises(HandoffRejected, match="layout"):
        ShmTransfer(other, Arena.attach(tmp_path / "shared.arena", other.layout))
    medium.close()


class InterferingStorage(BlockStorage):
    """A storage around whose rows something happens to what lies in between."""

    interfere: Callable[[], None]

    def rows_to_read(self, block_ids: Any) -> Any:
        for row in super().rows_to_read(block_ids):
            yield row
            self.interfere()

    def rows_to_write(self, block_ids: Any) -> Any:
        self.interfere()
        for row in super().rows_to_write(block_ids):
            yield row
            self.interfere()


def fetched_while(sent: Sent, interfere: Callable[[], None]) -> bool:
    """Return whether the copy was refused; assert that it is right otherwise."""
    storage = InterferingStorage(sent.setup.layout, NUM_STORAGE_BLOCKS, sent.setup.medium.device)
    storage.interfere = interfere
    transfer = sent.setup.medium.transfer(storage)
    (is_held,) = transfer.fetch([FetchRequest(sent.copy, blocks(0, 1, 2, 3, 4))])
    transfer.close()
    assert not is_held or (content(storage, range(5)) == content(sent.setup.sender, SOURCE)).all()
    return not is_held


@pytest.mark.parametrize("generation", [0, 78])
def test_a_lease_that_ends_during_the_copy_is_refused(sent: Sent, generation: int) -> None:
    is_refused = fetched_while(sent, lambda: sent.setup.medium.stamp(blocks(9), generation))
    # Elsewhere the bytes may have been read, and the lease checked, before anything is written here.
    assert is_refused or not sent.setup.medium.is_shared


# A worker that was stopped while it wrote goes on under a lease that it has lost, into blocks that are others' by now.


def stray_writer(medium: Medium, block_id: int) -> Callable[[], None]:
    """Spoils this block the first time it is called."""
    strays = iter([BlockId(block_id)])

    def stray() -> None:
        for one in strays:
            medium.flip(one, 3)

    return stray


@pytest.mark.parametrize("block_id", [4, 9])
def test_a_stray_write_while_blocks_are_fetched_is_refused(sent: Sent, block_id: int) -> None:
    is_refused = fetched_while(sent, stray_writer(sent.setup.medium, block_id))
    assert is_refused or not sent.setup.medium.is_shared


def test_a_stray_write_while_blocks_are_offloaded_changes_nothing_or_is_refused(setup: Setup) -> None:
    storage = InterferingStorage(setup.layout, NUM_STORAGE_BLOCKS, setup.medium.device)
    storage.interfere = stray_writer(setup.medium, 6)
    write_blocks(storage, blocks(0, 1), content(setup.sender, [0, 1]))
    setup.medium.stamp(blocks(6, 7), 3)
    transfer = setup.medium.transfer(storage)
    (runs,) = transfer.offload([OffloadRequest(blocks(0, 1), blocks(6, 7), 3)])
    transfer.close()
    rows = setup.fetch(BlockCopy(3, 16, runs or ()), 4, 5)
    assert rows is None or (rows == content(setup.sender, [0, 1])).all()
