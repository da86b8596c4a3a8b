"""The memory of KV blocks on one device.

Layout [num_blocks, num_layers, 2 (keys, values), block_size, num_kv_heads, head_dim], the last two one slot_width where
the cache has scales; of layers whose heads have other sizes, the same behind it; and behind that the states of models
that have some: one block is one contiguous run of bytes, which pool and transports copy as a whole
(docs/decisions/0002-block-layout.md).

Blocks of a device as pieces in host memory, for transports that read and write the host.

The keys and values of layers of one kind in the blocks of a storage: of those whose heads have the same sizes.
"""

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import Tensor

from alignedserve.core.block_layout import BlockLayout
from alignedserve.core.errors import NotEnoughMemory
from alignedserve.core.ids import BlockId
from alignedserve.runtime.device.accelerator import Accelerator, accelerator_of
from alignedserve.runtime.device.dtypes import cache_dtype
from alignedserve.runtime.device.memory_maps import huge_pages
from alignedserve.runtime.kv.block_runs import BlockIds
from alignedserve.runtime.kv.direct_copies import PendingCopies
from alignedserve.runtime.kv.shm_arena import WHOLE, ArenaPart
from alignedserve.runtime.kv.staged_copies import CopyLanes, Lanes, StagedCopies, exact_codec
from kernels.cpu.block_copies import BlockList


class CachedLayers(Protocol):
    """Holds what attention reads: a storage whose layers are all alike, or one kind of several."""

    layout: BlockLayout
    device: torch.device

    @property
    def blocks(self) -> Tensor:
        """All blocks [num_blocks, num_layers, num_parts, block_size, num_kv_heads, head_dim]; see BlockStorage."""

    @property
    def run_stride(self) -> int:
        """Distance of the runs of consecutive blocks: block b's run is row b * run_stride of `key_runs(layer)`."""

    def key_runs(self, layer: int) -> Tensor:
        """Return rows [.., run_elements], first block 0's keys of this layer."""

    def value_runs(self, layer: int) -> Tensor:
        """Return rows as `key_runs` does, for values."""


class LayerKind:
    """Layers of one kind, numbered among themselves. Views of a storage's blocks, which it owns. A slot has a number: b
    * block_size + i, slot i of block b."""

    run_stride = 1  # runs are as far apart as blocks

    def __init__(self, layout: BlockLayout, blocks: Tensor, first: int) -> None:
        """`layout`: of these layers alone. `blocks` [num_blocks, elements], `first`: the layers' first element."""
        self.layout, self.device = layout, blocks.device
        self._elements = blocks[:, first : first + layout.kv_elements]
        # All token slots [num_blocks, kv_runs, block_size, slot_width].
        self.slots = self._elements.view(len(blocks), layout.kv_runs, layout.block_size, layout.slot_width)
        # From a block's slot to the same of the next, where that is a whole number of slots.
        self._slot_stride, rest = divmod(blocks.stride(0), layout.slot_width)
        # Rows [.., slot_width] from block 0's first slot of every run on; empty where that is none.
        self._rows: list[Tensor] = []
        if not rest and blocks.is_contiguous():
            starts = range(first, first + layout.kv_elements, layout.run_elements)
            self._rows = [_rows(blocks.view(-1)[start:], layout.slot_width) for start in starts]

    @property
    def blocks(self) -> Tensor:
        layout = self.layout
        slot = (layout.slot_width,) if layout.has_scales else (layout.num_kv_heads, layout.head_dim)
        return self._elements.view(len(self._elements), layout.num_layers, layout.num_parts, layout.block_size, *slot)

    def key_runs(self, layer: int) -> Tensor:
        return self.slots[:, layer * self.layout.num_parts].flatten(1)

    def value_runs(self, layer: int) -> Tensor:
        return self.slots[:, (layer + 1) * self.layout.num_parts - 1].flatten(1)

    def rows(self, numbers: Tensor) -> Tensor:
        if not self._rows:
            return numbers
        size = self.layout.block_size
        return numbers + numbers.div(size, rounding_mode="floor") * (self._slot_stride - size)

    def write(self, layer: int, rows: Tensor, write_rows: Callable[[Tensor, Tensor, Tensor], None]) -> None:
        """Let `write_rows` write keys and values of one layer; `rows`: of their slots. write_rows (rows, keys, values):
        writes those rows of keys and values [.., slot_width], both contiguous"""
        parts = (layer * self.layout.num_parts, (layer + 1) * self.layout.num_parts - 1)
        if self._rows:
            write_rows(rows, *(self._rows[part] for part in parts))
            return
        shape = (len(rows), self.layout.slot_width)
        written = [torch.empty(shape, dtype=self.slots.dtype, device=self.device) for _ in parts]
        write_rows(torch.arange(len(rows), device=self.device), *written)
        blocks, offsets = rows.div(self.layout.block_size, rounding_mode="floor"), rows % self.layout.block_size
        for part, tensor in zip(parts, written, strict=True):
            self.slots[blocks, part, offsets] = tensor


def _rows(flat: Tensor, width: int) -> Tensor:
    return flat[: len(flat) // width * width].view(-1, width)


Ints = npt.NDArray[np.int64]
Walk = Callable[[StagedCopies, Ints], Iterator[BlockList]]


class DevicePieces:
    """Walks through blocks of a device in pieces of page-locked memory. From any thread."""

    def __init__(self, blocks: Tensor, lanes: CopyLanes) -> None:
        self._accelerator = lanes.accelerator
        make = partial(_new_copies, blocks, lanes.accelerator)
        self._reading, self._writing = Lanes(make), Lanes(make)

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over copies of the blocks; one is valid until the iterator is advanced."""
        yield from self._walk(self._reading, StagedCopies.pieces_to_read, np.asarray(block_ids, np.int64))

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over rows to fill, which are copied when the iterator is advanced, past its end as well."""
        yield from self._walk(self._writing, StagedCopies.pieces_to_write, np.asarray(block_ids, np.int64))

    def _walk(self, lanes: Lanes[StagedCopies], walk: Walk, block_ids: Ints) -> Iterator[BlockList]:
        self._accelerator.use()
        with lanes.taken() as copies:
            try:
                yield from walk(copies, block_ids)
            finally:
                copies.finish()


def _new_copies(blocks: Tensor, accelerator: Accelerator) -> StagedCopies:
    return StagedCopies(exact_codec(blocks), accelerator.streams().stream("staged"), accelerator)


class Stripe(NamedTuple):
    """The part of one process in blocks that several hold: heads of its own on every layer, or layers of its own."""

    memory: Tensor  # uint8, of all blocks with all their parts
    first_run: int  # of this part, in a whole block
    num_runs: int  # of a whole block


_COPIED_AT_ONCE = 32  # blocks, of one megabyte or two mostly
_READY_BYTES = 16 << 20  # of the first blocks, which are also the first to be used


class BlockStorage:
    """Blocks 0 .. num_blocks - 1, without ownership; zeros until written. Raises NotEnoughMemory saying how many bytes
    are needed."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        device: torch.device | str = "cpu",
        *,
        has_scratch: bool | None = None,
        stripe: Stripe | None = None,
        part: ArenaPart = WHOLE,
    ) -> None:
        """`has_scratch`: one more block, written by padding rows; by default not on a CPU. `stripe`: on a CPU, the
        blocks are in this memory of the ranks; None: in memory of their own. `part`: these are the parts that one
        rank has of a worker's blocks, and copies by itself."""
        assert num_blocks >= 1, "a storage needs at least one block"
        self.layout = layout
        self.part = part
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.has_scratch = self.device.type != "cpu" if has_scratch is None else has_scratch
        self._block_runs, first = 0 if layout.unlike else layout.runs_per_block, 0
        self._memory: mmap.mmap | None = None  # on a CPU, where the blocks are in memory of their own
        if stripe is None:
            with_scratch, self._memory = _allocate(layout, num_blocks + self.has_scratch, self.device)
            self._blocks, self._all_blocks = with_scratch[:num_blocks], with_scratch
        else:
            assert not self.has_scratch, "padding has no place in memory of the ranks"
            self._block_runs, first = stripe.num_runs, stripe.first_run * layout.run_elements
            with_scratch = stripe.memory.view(cache_dtype(layout.dtype))
            whole = with_scratch.view(num_blocks, stripe.num_runs * layout.run_elements)
            self._blocks = self._all_blocks = whole[:, first : first + layout.block_elements]
        self.pending_copies = PendingCopies(num_blocks)
        self._bytes = self._blocks.view(torch.uint8)
        self.accelerator = accelerator_of(self.device)  # None: on the host
        self.lanes = CopyLanes(self.accelerator) if self.accelerator is not None else None
        self._pieces = DevicePieces(self._bytes, self.lanes) if self.lanes is not None else None
        self.kinds = self._kinds()
        flat = with_scratch.view(-1)[first:]
        starts = range(0, 0 if layout.unlike else layout.kv_elements, layout.run_elements)
        runs = [flat[start:].view(-1, layout.run_elements) for start in starts]
        slots = [flat[start:].view(-1, layout.slot_width) for start in starts]
        parts = layout.num_parts  # values of one part are the keys
        self._key_runs, self._value_runs = runs[::parts], runs[parts - 1 :: parts]
        self._key_slots, self._value_slots = slots[::parts], slots[parts - 1 :: parts]

    @property
    def scratch_block(self) -> BlockId:
        """The scratch block, right behind the others, that no request owns."""
        assert self.has_scratch, "a storage without a scratch block"
        return BlockId(self.num_blocks)

    @property
    def bytes(self) -> Tensor:
        """All blocks as uint8 [num_blocks, block_bytes], on their device."""
        return self._bytes

    @property
    def all_bytes(self) -> Tensor:
        """The same with the scratch block, if there is one, behind the others."""
        return self._all_blocks.view(torch.uint8)

    @property
    def run_stride(self) -> int:
        """Distance of the runs of consecutive blocks: block b's run is row b * run_stride of `key_runs(layer)`."""
        assert self._block_runs, "runs of several lengths: see kinds"
        return self._block_runs

    @property
    def slot_stride(self) -> int:
        """Token slot i of block b is row b * slot_stride + i of `key_slots(layer)`. Where layers are of several kinds,
        which have rows of their own: its number, see LayerKind."""
        return self.layout.block_size * (1 if self.layout.unlike else self.run_stride)

    @property
    def blocks(self) -> Tensor:
        """All blocks [num_blocks, num_layers, num_parts, block_size, num_kv_heads, head_dim], on their device. Of int8
        and fp8: [.., block_size, slot_width]. Without states; the scratch block, if there is one, is the last."""
        assert not self.layout.unlike, "layers of several kinds: see kinds"
        return self.kinds[0].blocks

    def key_runs(self, layer: int) -> Tensor:
        """Return contiguous rows [.., run_elements], first block 0's keys of this layer; see `run_stride`."""
        return self._key_runs[layer]

    def value_runs(self, layer: int) -> Tensor:
        """Return rows as `key_runs` does, for values."""
        return self._value_runs[layer]

    def key_slots(self, layer: int) -> Tensor:
        """Return contiguous rows [.., slot_width] from block 0's first key of this layer on; see `slot_stride`."""
        return self._key_slots[layer]

    def value_slots(self, layer: int) -> Tensor:
        """Return rows as `key_slots` does, for values."""
        return self._value_slots[layer]

    def input_slots(self, layer: int, hidden_size: int) -> Tensor:
        """Return contiguous rows [.., hidden_size] from block 0's first layer input of this layer on. Blocks, which
        have no scales, hold layer inputs [num_layers, tokens, hidden_size]; the next block is num_layers * tokens rows
        further."""
        assert self._block_runs == self.layout.runs_per_block, "blocks of several ranks hold no layer inputs"
        start = layer * (self.layout.block_elements // self.layout.num_layers)
        return self._blocks.view(-1)[start:].view(-1, hidden_size)

    # On the host, once pending copies of the blocks are done. From any thread.

    def pieces_to_read(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over lists of blocks on the host that hold these, in order: the blocks themselves, or copies. A list
        is valid until the iterator is advanced."""
        ids = self.settled(block_ids)
        if self._pieces is None:
            return iter((BlockList(self._bytes.numpy(), ids),))
        return self._pieces.pieces_to_read(ids)

    def pieces_to_write(self, block_ids: BlockIds) -> Iterator[BlockList]:
        """Iterate over lists of blocks on the host to fill; stopping early leaves the blocks undefined. A list is
        copied to its blocks when the iterator is advanced, the last one past its end."""
        ids = self.settled(block_ids)
        if self._pieces is None:
            return iter((BlockList(self._bytes.numpy(), ids),))
        return self._pieces.pieces_to_write(ids)

    def settled(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        """Wait until pending copies of these blocks are done and return them as an array."""
        ids = self._checked(block_ids)
        self.pending_copies.synchronize(ids)
        return ids

    def zero_blocks(self, block_ids: npt.NDArray[np.int64]) -> None:
        """Fill whole blocks with zeros."""
        self._blocks.index_fill_(0, torch.from_numpy(self._checked(block_ids)).to(self.device), 0)

    def give_back(self) -> None:
        """Give the memory of all but the first blocks back to the system, until they are written. None may be in use;
        their content is lost."""
        if self._memory is not None and len(self._memory) > _READY_BYTES:
            self._memory.madvise(mmap.MADV_DONTNEED, _READY_BYTES, len(self._memory) - _READY_BYTES)

    def copy_first_slots(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the first token slot of blocks, on all layers: sources [blocks] to targets, int64, on their device."""
        for kind in self.kinds:
            kind.slots[targets, :, 0] = kind.slots[sources, :, 0]

    def copy_whole(self, sources: Tensor, targets: Tensor) -> None:
        """Copy blocks: sources [blocks] to targets, int64, on their device; a few at a time, to need little memory."""
        for start in range(0, len(sources), _COPIED_AT_ONCE):
            part = slice(start, start + _COPIED_AT_ONCE)
            self._bytes.index_copy_(0, targets[part], self._bytes.index_select(0, sources[part]))

    def fill_tail(self, block_id: BlockId, first_slot: int) -> None:
        """Fill the token slots from `first_slot` (at least 1) on with copies of the one before, on all layers."""
        block = self._checked([block_id])[0]
        for kind in self.kinds:
            slots = kind.slots[block]
            slots[:, first_slot:] = slots[:, first_slot - 1 : first_slot]

    def zero_tail(self, block_id: BlockId, first_slot: int) -> None:
        """Fill the token slots from `first_slot` on with zeros, on all layers."""
        block = self._checked([block_id])[0]
        for kind in self.kinds:
            kind.slots[block][:, first_slot:] = 0

    def zero_slots(self, blocks: Tensor, slots: Tensor) -> None:
        """Fill single token slots with zeros, on all layers: of blocks [slots], both int64, on their device."""
        for kind in self.kinds:
            kind.slots[blocks, :, slots] = 0

    def _kinds(self) -> tuple[LayerKind, ...]:
        kinds, first = [], 0
        for layout in self.layout.kinds:
            kinds.append(LayerKind(layout, self._all_blocks, first))
            first += layout.kv_elements
        return tuple(kinds)

    def _checked(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        ids = np.asarray(block_ids, dtype=np.int64)
        assert ids.ndim == 1, "block ids must be a flat list"
        assert not len(ids) or (ids.min() >= 0 and ids.max() < self.num_blocks), "a block id outside the storage"
        return ids


def _allocate(layout: BlockLayout, num_blocks: int, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    needed = num_blocks * layout.block_bytes
    message = f"{num_blocks} KV blocks of {layout.block_bytes} bytes need {needed} bytes on {device}"
    if device.type == "cpu" and needed > psutil.virtual_memory().available:
        raise NotEnoughMemory(f"{message}, more than is available; lower the number of blocks.")
    shape = (num_blocks, layout.block_elements)
    try:
        if device.type == "cpu":
            # The first blocks are populated now, not at their first write: that would be in the middle of a pass (8 %
            # of one over 64 prompts of 32 tokens in float32, where a hypervisor provides the pages). The others take
            # memory once as many are in use: a host that idles keeps little. Small pages cost a third of the copying
            # speed.
            memory = huge_pages(needed, populated_bytes=_READY_BYTES)
            return torch.frombuffer(memory, dtype=cache_dtype(layout.dtype)).view(shape), memory
        # A library may multiply what it reads of unused slots by zero, which numbers alone survive.
        return torch.zeros(shape, dtype=cache_dtype(layout.dtype), device=device), None
    except (RuntimeError, OSError, MemoryError) as error:
        raise NotEnoughMemory(f"{message}; lower the number of blocks.") from error
