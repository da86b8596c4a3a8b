"""Blocks to and from the host by streams, in pieces; and who waits for whom at the same blocks."""

from collections.abc import Callable
from itertools import chain

import numpy as np
import pytest
import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import ArrayPacking, FixedArrays, to_device
from alignedserve.runtime.device.streams import DeviceStreams, HostStreams
from alignedserve.runtime.kv.direct_copies import PendingCopies
from alignedserve.runtime.kv.staged_copies import StagedCopies, exact_codec
from tests.support.devices.checked_streams import CheckedStreams
from tests.support.devices.cpu_accelerator import CpuAccelerator

NUM_BLOCKS, BLOCK_BYTES, PIECE = 11, 24, 3
CPU = torch.device("cpu")

stream_kinds = pytest.mark.parametrize("make_streams", [HostStreams, lambda: CheckedStreams(3)])
block_lists = pytest.mark.parametrize("ids", [[], [5], [4, 1, 9], [0, 10, 3, 7, 2, 8, 1, 6]])


def some_blocks() -> Tensor:
    return torch.arange(NUM_BLOCKS * BLOCK_BYTES).to(torch.uint8).view(NUM_BLOCKS, BLOCK_BYTES)


def copies(blocks: Tensor, streams: DeviceStreams, is_staged: bool) -> StagedCopies:
    form, stream = exact_codec(blocks), streams.stream("copies")
    return StagedCopies(form, stream, CpuAccelerator() if is_staged else None, staged_bytes=PIECE * BLOCK_BYTES)


@stream_kinds
@block_lists
@pytest.mark.parametrize("is_staged", [True, False])
def test_blocks_come_out_and_go_back(
    ids: list[int], is_staged: bool, make_streams: Callable[[], DeviceStreams]
) -> None:
    blocks, block_ids = some_blocks(), np.array(ids, np.int64)
    streams = make_streams()
    staged = copies(blocks, streams, is_staged)
    rows = staged.pinned(len(ids))
    staged.copy_out(block_ids, rows)
    streams.stream("copies").record().synchronize()
    assert torch.equal(rows, some_blocks()[ids])
    blocks.zero_()
    staged.copy_in(rows, block_ids)
    streams.stream("copies").record().synchronize()
    assert torch.equal(blocks[ids], some_blocks()[ids])
    others = [block for block in range(NUM_BLOCKS) if block not in ids]
    assert not blocks[others].any()


@stream_kinds
@block_lists
def test_pieces_are_walked_while_others_travel(ids: list[int], make_streams: Callable[[], DeviceStreams]) -> None:
    blocks, block_ids = some_blocks(), np.array(ids, np.int64)
    staged = copies(blocks, make_streams(), True)
    pieces = [piece.blocks[piece.block_ids].tolist() for piece in staged.pieces_to_read(block_ids)]
    assert list(chain(*pieces)) == some_blocks()[ids].tolist()
    to_write = iter(ids)
    for piece in staged.pieces_to_write(block_ids):
        piece.blocks[:] = [[100 + next(to_write)] for _ in piece.block_ids]
    assert blocks[ids].tolist() == [[100 + block_id] * BLOCK_BYTES for block_id in ids]


def test_only_the_next_use_of_a_block_waits_for_a_copy() -> None:
    streams, pending = CheckedStreams(0), PendingCopies(4)
    taken: list[str] = []
    first, second = streams.stream("first"), streams.stream("second")
    first.run(lambda: taken.append("copy"))
    pending.record(first, np.array([1, 2]))
    assert not pending.is_idle
    pending.wait(second, np.array([0, 3]))
    second.run(lambda: taken.append("elsewhere"))
    second.record().synchronize()
    assert "elsewhere" in taken  # whether or not the copy has happened
    pending.wait(second, np.array([2]))
    second.run(lambda: taken.append("same block"))
    second.record().synchronize()
    assert taken.index("copy") < taken.index("same block")
    pending.synchronize(np.array([1]))
    assert pending.is_idle


def test_the_host_waits_for_a_copy() -> None:
    streams, pending = CheckedStreams(1), PendingCopies(2)
    taken: list[str] = []
    streams.stream("out").run(lambda: taken.append("copy"))
    pending.record(streams.stream("out"), np.array([1]))
    pending.synchronize(np.array([0]))
    assert taken == []
    pending.synchronize(np.array([0, 1]))
    assert taken == ["copy"]


def test_copies_that_are_done_are_forgotten_though_nobody_waits_for_them() -> None:
    """As where steps are launched ahead, hundreds of thousands an hour, and nothing else is copied."""
    streams, pending = CheckedStreams(2), PendingCopies(2)
    stream = streams.stream("compute")
    for _ in range(5):
        pending.record(stream, np.array([0]))
    assert len(pending._pending) == 5
    streams.drain()
    for _ in range(5):
        pending.record(stream, np.array([1]))
        streams.drain()
    assert len(pending._pending) == 1


def test_arrays_of_any_kind_are_packed_and_found_again() -> None:
    arrays = [
        np.arange(5, dtype=np.int32),
        np.array([True, False, True]),
        np.arange(4, dtype=np.float64) / 3,
        np.empty(0, np.int64),
        np.arange(7, dtype=np.int8),
    ]
    packing = ArrayPacking(arrays)
    packed = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    assert packing.fill(packed.numpy(), arrays) <= packing.num_bytes
    for view, array in zip(packing.views(packed), arrays, strict=True):
        assert np.array_equal(view.numpy(), array)
    for tensor, array in zip(to_device(arrays, CPU), arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)


def test_fixed_arrays_stay_where_they_are_and_the_last_may_grow() -> None:
    fixed = FixedArrays([np.zeros(3, np.int64), np.array([7], np.int32)], CPU, last_size=4)
    places = [tensor.data_ptr() for tensor in fixed.tensors]
    fixed.fill([np.array([1, 2, 3]), np.array([4, 5, 6], np.int32)])
    assert [tensor.data_ptr() for tensor in fixed.tensors] == places
    assert fixed.tensors[0].tolist() == [1, 2, 3]
    assert fixed.tensors[1][:3].tolist() == [4, 5, 6]
    with pytest.raises((AssertionError, ValueError), match="larger than its place"):
        fixed.fill([np.array([1, 2, 3]), np.zeros(5, np.int32)])
