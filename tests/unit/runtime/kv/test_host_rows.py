"""Caches that leave a device for host memory that was registered once, and come back whatever the order of copies."""

import random

import numpy as np
import pytest
import torch
from typing_extensions import override

from alignedserve.core.ids import BlockId, RequestId
from alignedserve.messages.iterations import Swap, Swaps
from alignedserve.runtime.engine.swap_space import SlotSwapSpace, SwapSpace
from alignedserve.runtime.kv.block_storage import BlockStorage
from tests.harnesses.transfer import layout_of
from tests.support.devices.device_stand_in import Machine, StandInDevice, StandInStorage
from tests.support.marks import each

LAYOUT = layout_of("float32")
NUM_BLOCKS, NUM_ROWS = 12, 8


class CountingDevice(StandInDevice):
    """A device that counts registrations, or refuses them."""

    refusal: str | None = None
    num_registered = 0
    num_own = 0  # pieces of memory allocated for one copy

    @override
    def register(self, address: int, size: int) -> str | None:
        self.num_registered += 1
        return self.refusal or super().register(address, size)

    @override
    def pinned(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        self.num_own += 1
        return super().pinned(num_rows, row_bytes)


class Swapping:
    """Blocks of a stand-in, each with what its cache holds, and its swap space."""

    def __init__(
        self, seed: int = 0, *, by_slots: bool = False, num_rows: int = NUM_ROWS, refusal: str | None = None
    ) -> None:
        self.device = CountingDevice(Machine(seed), "one")
        self.device.refusal = refusal
        self.device.use()
        self.plain = BlockStorage(LAYOUT, NUM_BLOCKS)
        storage = StandInStorage(self.plain, self.device)
        self.streams = self.device.streams()
        host_bytes = num_rows * LAYOUT.block_bytes
        make: type[SwapSpace | SlotSwapSpace] = SlotSwapSpace if by_slots else SwapSpace
        self.space = make(storage, self.streams, host_bytes=host_bytes)

    def write(self, block: int, value: int) -> None:
        """Fill a block, once earlier copies of it are done, as an engine does."""
        self.plain.pending_copies.synchronize(np.array([block]))
        self.plain.bytes[block] = value

    def value(self, block: int) -> int:
        self.plain.pending_copies.synchronize(np.array([block]))
        (value,) = set(self.plain.bytes[block].tolist())
        return int(value)

    def perform(self, *, out: Swap | None = None, back: Swap | None = None) -> None:
        self.space.perform(Swaps((), () if out is None else (out,), () if back is None else (back,)))


def swap(name: str, blocks: list[int]) -> Swap:
    return Swap(RequestId(name), len(blocks) * LAYOUT.block_size, tuple(map(BlockId, blocks)))


@each("by_slots", [False, True])
@each("seed", range(6))
def test_random_swaps_bring_back_what_left_and_register_nothing(seed: int, *, by_slots: bool) -> None:
    """Rows that one cache leaves are the next one's, while the copy back to the device may be under way."""
    rng, own = random.Random(seed), Swapping(seed, by_slots=by_slots)
    assert own.device.num_registered == 1
    away, expected, num_back = dict[str, list[int]](), dict[int, int](), 0
    for step in range(80):
        count = rng.randint(1, 3)
        if sum(map(len, away.values())) + count <= NUM_ROWS:
            unread = [block for block in range(NUM_BLOCKS) if block not in expected]
            if len(unread) < count:
                assert {block: own.value(block) for block in expected} == expected
                expected.clear()
                continue
            blocks, values = rng.sample(unread, count), [rng.randrange(256) for _ in range(count)]
            for block, value in zip(blocks, values, strict=True):
                own.write(block, value)
            own.perform(out=swap(f"r{step}", blocks))
            away[f"r{step}"] = values
            continue
        name = rng.choice(list(away))
        values = away.pop(name)
        if rng.random() < 0.3:
            own.space.perform(Swaps((RequestId(name),), (), ()))
            continue
        blocks = rng.sample(range(NUM_BLOCKS), len(values))
        own.perform(back=swap(name, blocks))
        expected |= dict(zip(blocks, values, strict=True))
        num_back += 1
    assert {block: own.value(block) for block in expected} == expected
    assert num_back > 10
    assert (own.device.num_registered, own.device.num_own) == (1, 0)


@pytest.mark.parametrize("by_slots", [False, True])
@pytest.mark.parametrize(("num_rows", "refusal"), [(1, None), (NUM_ROWS, "out of memory")])
def test_without_room_or_registered_memory_a_copy_has_memory_of_its_own(
    num_rows: int, refusal: str | None, caplog: pytest.LogCaptureFixture, *, by_slots: bool
) -> None:
    own = Swapping(by_slots=by_slots, num_rows=num_rows, refusal=refusal)
    assert refusal is None or refusal in caplog.text
    own.device.refusal = None
    for block in (3, 4):
        own.write(block, block)
    own.perform(out=swap("a", [3, 4]))
    own.perform(back=swap("a", [7, 8]))
    assert [own.value(block) for block in (7, 8)] == [3, 4]
    assert own.device.num_own == 1
