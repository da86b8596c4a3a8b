"""Copies that a KVTransfer refuses to fetch: spoilt, of leases that ended, or changed while they are read.

The contract of test_kv_transfer.py, at the receiving end.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from typing_extensions import override

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId
from alignedserve.messages.blocks import BlocksAnswered, NamedBlocks, ReadBlocks
from alignedserve.messages.caches import BlockCopy, BlockRun
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.shm_arena import Arena
from alignedserve.runtime.kv.transfers.block_server import TransferSession
from alignedserve.runtime.kv.transfers.control_socket import ControlSocket
from alignedserve.runtime.kv.transfers.host_blocks import ArenaBuffer
from alignedserve.runtime.kv.transfers.kv_transfer import FetchRequest, OffloadRequest
from alignedserve.runtime.kv.transfers.local_transfer import ShmTransfer
from alignedserve.runtime.kv.transfers.requests import plan_fetch, plan_offload
from tests.harnesses.transfer import (
    BLOCK_SIZE,
    NUM_POOL_BLOCKS,
    NUM_STORAGE_BLOCKS,
    Medium,
    Setup,
    ShmMedium,
    changed,
    content,
    layout_of,
    run_of,
)
from tests.support.marks import each
from tests.support.samples import blocks
from tests.support.stored_blocks import write_blocks

pytestmark = pytest.mark.slow


@dataclass
class Sent:
    """A valid copy of five blocks in three runs, of two, two and one, to be spoilt."""

    setup: Setup
    copy: BlockCopy

    def is_refused(self, copy: BlockCopy) -> bool:
        return self.setup.fetch(copy, *range(6)) is None


SOURCE = (3, 8, 1, 14, 6)


@pytest.fixture
def sent(setup: Setup) -> Sent:
    setup.medium.stamp(blocks(4, 5, 1, 2, 9), 77)
    copy = setup.send_to(blocks(4, 5, 1, 2, 9), 77, 37, SOURCE)
    setup.expect(copy, range(5), SOURCE)
    return Sent(setup, copy)


def spoilt_runs(runs: tuple[BlockRun, ...]) -> dict[str, tuple[BlockRun, ...]]:
    """Return runs that cannot be those of a copy of five blocks, whatever lies in them."""
    first, second, last = runs
    return {
        "none": (),
        "the last one is missing": (first, second),
        "one is shorter": (run_of(first, num_blocks=1), second, last),
        "one is longer": (first, second, run_of(last, num_blocks=2)),
        "one is there twice and all the others": (first, second, second, last),
        "beyond the arena": (first, second, run_of(last, first_block=NUM_POOL_BLOCKS)),
        "far beyond the arena": (first, second, run_of(last, first_block=1 << 40)),
        "negative": (first, second, run_of(last, first_block=-1)),
        "absurdly long": (first, second, run_of(last, num_blocks=1 << 40)),
        "of negative length": (first, second, last, run_of(last, num_blocks=-1), run_of(last, num_blocks=1)),
        "an empty one": (first, second, last, BlockRun(0, 0, 0)),
    }


RUNS = (BlockRun(4, 2, 1), BlockRun(1, 2, 2), BlockRun(9, 1, 3))
COPY = BlockCopy(77, 37, RUNS)


def is_asked_for(copy: BlockCopy, num_targets: int = 6) -> bool:
    return bool(plan_fetch([FetchRequest(copy, blocks(*range(num_targets)))], layout_of("float32"), NUM_POOL_BLOCKS))


@each(
    ("copy", "num_targets"),
    [
        *((changed(COPY, runs=runs), 6) for runs in spoilt_runs(RUNS).values()),
        *((changed(COPY, generation=generation), 6) for generation in (0, -77, 77 + (1 << 64))),
        *((changed(COPY, context_len=context_len), 6) for context_len in (0, 1, 32, 41, 48, 1 << 40)),
        *((COPY, num_targets) for num_targets in (0, 1, 4)),
    ],
)
def test_what_cannot_be_a_copy_is_not_even_asked_for(copy: BlockCopy, num_targets: int) -> None:
    """What could be one, and is not, is drawn for every transport in test_transfer_fuzzing.py."""
    assert is_asked_for(COPY)
    assert not is_asked_for(copy, num_targets)


@each(
    ("target", "generation"),
    [
        *((target, 1) for target in ((0,), (0, 1, 2), (0, NUM_POOL_BLOCKS), (-1, 0), (1, 1))),
        *(((3, 4), generation) for generation in (0, -1, 1 << 64)),
    ],
)
def test_what_cannot_be_written_is_not_even_sent(target: tuple[int, ...], generation: int) -> None:
    def is_sent(target: tuple[int, ...], generation: int) -> bool:
        return bool(plan_offload([OffloadRequest(blocks(0, 1), blocks(*target), generation)], NUM_POOL_BLOCKS))

    assert is_sent((3, 4), 1)
    assert not is_sent(target, generation)


def test_a_lease_that_ended_before_the_copy_is_refused(sent: Sent) -> None:
    for block_id in (4, 9):
        for generation in (0, 78):
            sent.setup.medium.stamp(blocks(block_id), generation)
            assert sent.is_refused(sent.copy)
        sent.setup.medium.stamp(blocks(block_id), 77)
    assert not sent.is_refused(sent.copy)
    sent.setup.medium.stamp(blocks(4, 5, 1, 2, 9), 0)
    assert sent.is_refused(changed(sent.copy, generation=0))


def test_a_receiver_of_another_layout_never_gets_to_it(tmp_path: Path) -> None:
    medium = ShmMedium(tmp_path, layout_of("float32"))
    other = BlockStorage(BlockLayout(BLOCK_SIZE, 2, 4, 2, "float32"), 4)  # of the same size
    with pytest.raises(HandoffRejected, match="layout"):
        ShmTransfer(other, Arena.attach(tmp_path / "shared.arena", other.layout))
    medium.close()


class InterferingStorage(BlockStorage):
    """A storage around whose blocks something happens to what lies in between."""

    interfere: Callable[[], None]

    @override
    def settled(self, block_ids: Any) -> Any:
        self.interfere()
        return super().settled(block_ids)

    @override
    def pieces_to_read(self, block_ids: Any) -> Any:
        for piece in super().pieces_to_read(block_ids):
            for place in range(len(piece)):
                yield piece.part(place, place + 1)
                self.interfere()

    @override
    def pieces_to_write(self, block_ids: Any) -> Any:
        self.interfere()
        for piece in super().pieces_to_write(block_ids):
            for place in range(len(piece)):
                yield piece.part(place, place + 1)
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


@dataclass
class Answers:
    """A peer's connection that keeps what it is sent."""

    sent: list[Any]

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_blocks_of_a_lease_that_ended_are_not_even_sent(tmp_path: Path) -> None:
    with closing(Arena.create(tmp_path / "a.arena", layout_of("float32"), NUM_POOL_BLOCKS)) as arena:
        arena.stamp(blocks(4, 5), 77)
        arena.stamp(blocks(5), 78)
        answers = Answers([])
        session = TransferSession(ArenaBuffer(arena), cast(ControlSocket, answers), None)
        session.handle(ReadBlocks((NamedBlocks(77, ((4, 1),)), NamedBlocks(77, ((4, 2),)), NamedBlocks(78, ((5, 1),)))))
        assert answers.sent == [BlocksAnswered((True, False, True))]


def test_a_lease_that_ends_during_the_copy_is_refused(sent: Sent) -> None:
    is_refused = fetched_while(sent, lambda: sent.setup.medium.stamp(blocks(9), 78))
    # Elsewhere the bytes may have been read, and the lease checked, before anything is written here.
    assert is_refused or not sent.setup.medium.is_shared


# A worker that was stopped while it wrote goes on under a lease that it has lost, into blocks that are others' by now.


def stray_writer(medium: Medium, block_id: int) -> Callable[[], None]:
    """Return what spoils this block the first time it is called."""
    strays = iter([BlockId(block_id)])

    def stray() -> None:
        for one in strays:
            medium.flip(one, 3)

    return stray


def test_a_stray_write_while_blocks_are_fetched_is_refused(sent: Sent) -> None:
    is_refused = fetched_while(sent, stray_writer(sent.setup.medium, 9))
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
