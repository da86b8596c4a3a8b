"""What every KVTransfer must do: bring exactly the bytes that were sent, or refuse.

Sender and receiver have storages of their own; blocks are scattered on both sides and in between. Checksums, bounds,
order and generation are the receiver's to check: it is told nothing that it may believe.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.blocks import blocks_for
from alignedserve.core.errors import HandoffRejected
from alignedserve.core.ids import BlockId, LeaseId
from alignedserve.messages.links import BlockRun, Handoff
from alignedserve.runtime.arena import Arena
from alignedserve.runtime.block_storage import BlockStorage
from alignedserve.runtime.transfer import ShmTransfer, neighbours
from tests.desks.transfer import (
    BLOCK_SIZE,
    MEDIA,
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
from tests.samples import blocks, request


@pytest.fixture(params=[(name, dtype) for name in MEDIA for dtype in ("float32", "bfloat16")], ids="-".join)
def setup(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Setup]:
    name, dtype = request.param
    layout = layout_of(dtype)
    medium = MEDIA[name](tmp_path, layout)
    yield Setup(medium, layout, filled(layout, 1), filled(layout, 2))
    medium.close()


# --- what arrives


def test_several_requests_arrive_as_they_were_sent(setup: Setup) -> None:
    sources = ([3, 1, 2], [9], [14, 0, 15, 7, 8])
    targets = ([0, 15, 4], [3], [9, 8, 7, 1, 2])
    handoffs = [setup.send(BLOCK_SIZE * len(source) - 2, source) for source in sources]
    for handoff, source, target in reversed(list(zip(handoffs, sources, targets, strict=True))):
        assert (setup.fetch(handoff, *target) == content(setup.sender, source)).all()


def test_only_the_blocks_in_use_are_touched(setup: Setup) -> None:
    before_pool, before_there, before_here = (
        setup.medium.content(),
        everything(setup.receiver),
        everything(setup.sender),
    )
    handoff = setup.send(20, [5, 11, 6])
    used = {run.first_block + offset for run in handoff.runs for offset in range(run.num_blocks)}
    setup.fetch(handoff, 2, 13, 4)
    after_pool, after_there = setup.medium.content(), everything(setup.receiver)
    assert {i for i in range(NUM_POOL_BLOCKS) if (after_pool[i] != before_pool[i]).any()} == used
    assert {i for i in range(NUM_STORAGE_BLOCKS) if (after_there[i] != before_there[i]).any()} == {2, 13, 4}
    assert (everything(setup.sender) == before_here).all()


def test_room_beyond_the_handoff_is_left_alone(setup: Setup) -> None:
    before = content(setup.receiver, [9])
    handoff = setup.send(16, [5, 11])
    setup.fetch(handoff, 2, 13, 9)
    assert (content(setup.receiver, [2, 13]) == content(setup.sender, [5, 11])).all()
    assert (content(setup.receiver, [9]) == before).all()


def test_a_handoff_may_be_fetched_again_while_its_lease_holds(setup: Setup) -> None:
    handoff = setup.send(16, [5, 11])
    setup.fetch(handoff, 2, 13)
    assert (setup.fetch(handoff, 7, 1) == content(setup.sender, [5, 11])).all()


def test_runs_say_which_blocks_in_order(setup: Setup) -> None:
    setup.medium.stamp(blocks(4, 5, 6, 2, 9, 10), 9)
    runs = setup.sending.offload(blocks(0, 1, 2, 3, 4, 5), blocks(4, 5, 6, 2, 9, 10), 9)
    assert [(run.first_block, run.num_blocks) for run in runs] == [(4, 3), (2, 1), (9, 2)]


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [((), []), ((4,), [(4, 1)]), ((4, 5, 6, 2, 3, 9), [(4, 3), (2, 2), (9, 1)]), ((3, 2, 1), [(3, 1), (2, 1), (1, 1)])],
)
def test_neighbours(numbers: tuple[int, ...], expected: list[tuple[int, int]]) -> None:
    assert neighbours(blocks(*numbers)) == expected


# --- what is refused on the way out


@pytest.mark.parametrize("generation", [0, 2, 1 << 40])
def test_offloading_under_another_generation_is_refused(setup: Setup, generation: int) -> None:
    _, taken = setup.lease(2)
    with pytest.raises(HandoffRejected):
        setup.sending.offload(blocks(0, 1), taken, generation)
    assert not setup.medium.content().any()


def test_offloading_into_nobodys_blocks_is_refused(setup: Setup) -> None:
    with pytest.raises(HandoffRejected):
        setup.sending.offload(blocks(0, 1), blocks(3, 4), 0)
    assert not setup.medium.content().any()


def test_offloading_under_a_lease_that_was_taken_back_is_refused(setup: Setup) -> None:
    generation, taken = setup.lease(2)
    setup.medium.stamp(taken[:1], 0)
    with pytest.raises(HandoffRejected):
        setup.sending.offload(blocks(0, 1), taken, generation)


@pytest.mark.parametrize("arena_blocks", [(0,), (0, 1, 2), (0, NUM_POOL_BLOCKS), (-1, 0)])
def test_offloading_into_other_blocks_than_there_are_is_refused(setup: Setup, arena_blocks: tuple[int, ...]) -> None:
    setup.medium.stamp(blocks(0, 1, 2, NUM_POOL_BLOCKS - 1), 1)
    with pytest.raises(HandoffRejected):
        setup.sending.offload(blocks(0, 1), blocks(*arena_blocks), 1)
    assert not setup.medium.content().any()


# --- what is refused on the way in


@dataclass
class Sent:
    """A valid handoff of five blocks in three runs, of two, two and one, to be spoilt."""

    setup: Setup
    handoff: Handoff

    def is_refused(self, handoff: Handoff, num_targets: int = 6) -> bool:
        try:
            self.setup.fetch(handoff, *range(num_targets))
        except HandoffRejected:
            return True
        return False


@pytest.fixture
def sent(setup: Setup) -> Sent:
    setup.medium.stamp(blocks(4, 5, 1, 2, 9), 77)
    runs = setup.sending.offload(blocks(3, 8, 1, 14, 6), blocks(4, 5, 1, 2, 9), 77)
    handoff = Handoff(request(prompt_len=37), 1, (7,), LeaseId(77), 77, 37, runs)
    assert (setup.fetch(handoff, 0, 1, 2, 3, 4) == content(setup.sender, (3, 8, 1, 14, 6))).all()
    return Sent(setup, handoff)


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
    runs = spoilt_runs(sent.handoff.runs)[how]
    assert sent.is_refused(changed(sent.handoff, runs=runs))


@pytest.mark.parametrize("generation", [76, 78, 0, -77, 77 + (1 << 64)])
def test_another_generation_is_refused(sent: Sent, generation: int) -> None:
    assert sent.is_refused(changed(sent.handoff, generation=generation))


@pytest.mark.parametrize("block_id", [4, 5, 1, 2, 9])
@pytest.mark.parametrize("generation", [0, 78])
def test_a_lease_that_ended_before_the_copy_is_refused(sent: Sent, block_id: int, generation: int) -> None:
    sent.setup.medium.stamp(blocks(block_id), generation)
    assert sent.is_refused(sent.handoff)


def test_freed_blocks_are_refused_even_when_the_handoff_says_nobodys(sent: Sent) -> None:
    sent.setup.medium.stamp(blocks(4, 5, 1, 2, 9), 0)
    assert sent.is_refused(changed(sent.handoff, generation=0))


@pytest.mark.parametrize("block_id", [4, 5, 1, 2, 9])
def test_a_flipped_bit_in_any_block_is_refused(sent: Sent, block_id: int) -> None:
    for offset in (0, sent.setup.layout.block_bytes // 2, sent.setup.layout.block_bytes - 1):
        sent.setup.medium.flip(BlockId(block_id), offset)
        assert sent.is_refused(sent.handoff)
        sent.setup.medium.flip(BlockId(block_id), offset)
    assert not sent.is_refused(sent.handoff)


@pytest.mark.parametrize("context_len", [0, 1, 32, 41, 48, 1 << 40])
def test_a_context_of_other_blocks_is_refused(sent: Sent, context_len: int) -> None:
    assert sent.is_refused(changed(sent.handoff, context_len=context_len))


@pytest.mark.parametrize("num_targets", [0, 1, 4])
def test_too_few_target_blocks_are_refused(sent: Sent, num_targets: int) -> None:
    assert sent.is_refused(sent.handoff, num_targets)


def test_a_receiver_of_another_layout_never_gets_to_it(tmp_path: Path) -> None:
    medium = ShmMedium(tmp_path, layout_of("float32"))
    other = BlockStorage(BlockLayout(BLOCK_SIZE, 2, 4, 2, "float32"), 4)  # of the same size
    with pytest.raises(HandoffRejected, match="layout"):
        ShmTransfer(other, Arena.attach(tmp_path / "pool.arena", other.layout))
    medium.close()


class InterferingStorage(BlockStorage):
    """A storage around whose copies something happens to what lies in between."""

    interfere: Callable[[], None]

    def read_blocks(self, block_ids: Any, out: Any) -> None:
        super().read_blocks(block_ids, out)
        self.interfere()

    def write_blocks(self, block_ids: Any, source: Any) -> None:
        self.interfere()
        super().write_blocks(block_ids, source)
        self.interfere()


@pytest.mark.parametrize("generation", [0, 78])
def test_a_lease_that_ends_during_the_copy_is_refused(sent: Sent, generation: int) -> None:
    storage = InterferingStorage(sent.setup.layout, NUM_STORAGE_BLOCKS)
    storage.interfere = lambda: sent.setup.medium.stamp(blocks(9), generation)
    with pytest.raises(HandoffRejected):
        sent.setup.medium.transfer(storage).fetch(sent.handoff, blocks(0, 1, 2, 3, 4))


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
    storage = InterferingStorage(sent.setup.layout, NUM_STORAGE_BLOCKS)
    storage.interfere = stray_writer(sent.setup.medium, block_id)
    with pytest.raises(HandoffRejected):
        sent.setup.medium.transfer(storage).fetch(sent.handoff, blocks(0, 1, 2, 3, 4))


def test_a_stray_write_while_blocks_are_offloaded_changes_nothing_or_is_refused(setup: Setup) -> None:
    storage = InterferingStorage(setup.layout, NUM_STORAGE_BLOCKS)
    storage.interfere = stray_writer(setup.medium, 6)
    BlockStorage.write_blocks(storage, blocks(0, 1), content(setup.sender, [0, 1]))
    setup.medium.stamp(blocks(6, 7), 3)
    runs = setup.medium.transfer(storage).offload(blocks(0, 1), blocks(6, 7), 3)
    handoff = Handoff(request(prompt_len=16), 1, (7,), LeaseId(3), 3, 16, runs)
    try:
        rows = setup.fetch(handoff, 4, 5)
    except HandoffRejected:
        return
    assert (rows == content(setup.sender, [0, 1])).all()


# --- at random


def mutated(handoff: Handoff, rng: random.Random) -> Handoff:
    runs = list(handoff.runs)
    place = rng.randrange(len(runs))
    number = rng.choice([-1, 0, 1, 2, 5, rng.randrange(NUM_POOL_BLOCKS), NUM_POOL_BLOCKS, 1 << 33])
    match rng.randrange(9):
        case 0:
            runs[place] = run_of(runs[place], first_block=number)
        case 1:
            runs[place] = run_of(runs[place], num_blocks=number)
        case 2:
            runs[place] = run_of(runs[place], checksum=runs[place].checksum ^ (1 << rng.randrange(64)))
        case 3:
            del runs[place]
        case 4:
            runs.insert(rng.randrange(len(runs) + 1), runs[place])
        case 5:
            rng.shuffle(runs)
        case 6:
            runs[place] = rng.choice(runs)
        case 7:
            return changed(handoff, context_len=max(handoff.context_len + rng.randrange(-20, 21), 0))
        case 8:
            return changed(handoff, generation=handoff.generation + rng.choice([-1, 1, 0]))
    return changed(handoff, runs=tuple(runs))


def test_random_changes_are_refused_or_change_nothing(setup: Setup) -> None:
    rng = random.Random(11)
    sources = [rng.sample(range(NUM_STORAGE_BLOCKS), count) for count in (3, 5, 4, 6)]
    handoffs = [setup.send(BLOCK_SIZE * len(source) - 3, source) for source in sources]
    num_refused = 0
    for _ in range(400):
        choice = rng.randrange(len(handoffs))
        handoff = handoffs[choice]
        for _ in range(rng.randrange(1, 4)):
            handoff = mutated(handoff, rng) if handoff.runs else handoff
        target = rng.sample(range(NUM_STORAGE_BLOCKS), rng.randrange(3, 9))
        try:
            rows = setup.fetch(handoff, *target)
        except HandoffRejected:
            num_refused += 1
        else:
            source = sources[choice]
            assert blocks_for(handoff.context_len, BLOCK_SIZE) == len(source)
            assert (rows[: len(source)] == content(setup.sender, source)).all()
    assert 200 < num_refused < 400
