"""The check of one library for prompts and chunks beside our kernel, in a process of its own.

    python -m alignedserve.runtime.attention.library_check PyTorch '{"device": "cuda:0", "layout": {...}, ...}'

Its blocks have the engine's layout, and are as many, up to where every offset of 32 bits has overflowed. It computes on
the last layer and in the highest blocks, contexts of odd lengths, and every slot outside of contexts holds no number.
Results are compared with results of our kernel; then the memory that only had to be read is compared.

Prints a line of JSON, a CheckResult, and ends with 0. A crash or a hang is for the parent to see."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.libraries import (
    FAR_BYTES,
    AttentionLibrary,
    CheckResult,
    ChunkComputer,
    ChunkShape,
    ContextChunks,
    LibraryChunks,
    LibraryPrompts,
    PromptSetup,
    library_named,
    raise_failure,
)
from alignedserve.runtime.attention.sequence_table import NewSequence, SequenceTable, tokens_of
from alignedserve.runtime.attention.triton_backend import GpuPlanner
from alignedserve.runtime.device.accelerator import free_bytes, is_refusal, synchronize, use_device
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.gpu_dispatch import on_device

# Of results whose values are normally distributed: rounding of weights and sums to the dtype.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
_LONGEST_REASON = 300
_LEFT_BYTES = 1 << 30  # of the device's memory, for results beside the blocks
_SCANNED_BYTES = 256 << 20
_GUARD = 1024  # elements before and behind each input
_NO_NUMBERS = 0xFF  # of every byte: NaN in each dtype
_DIFFERS = "its results differ from ours by"
_WRITES = "it writes where it should only read"
_NO_RESULT = f"{_DIFFERS} nan"
_ONCE = SamplingParams(max_tokens=1)

Work = Callable[[], list[Tensor]]


class CheckedChunks:
    """ChunkComputer of contexts in the highest blocks of a storage, on its last layer, with random numbers."""

    def __init__(self, setup: PromptSetup, storage: BlockStorage, shape: ChunkShape) -> None:
        self._setup, self._storage, self._layer = setup, storage, setup.layout.num_layers - 1
        self._table, self.num_blocks = _table_of(shape, setup.layout.block_size, storage.num_blocks)
        lengths, counts = np.array(shape.lengths), np.array(shape.counts)
        self._rows, self._counts = np.arange(len(lengths)), counts
        positions = tokens_of(self._rows, np.zeros_like(lengths), lengths)
        blocks, offsets = self._table.places(*positions)
        is_new = positions[1] >= (lengths - counts)[positions[0]]
        arrays = [blocks * storage.slot_stride + offsets, np.flatnonzero(is_new)]
        self._slots, self._new_places = to_device(arrays, storage.device)
        layout, dtype = setup.layout, storage.blocks.dtype
        random = torch.Generator(storage.device).manual_seed(0)
        self._cached = [
            torch.empty((len(blocks), layout.kv_width), dtype=dtype, device=storage.device).normal_(generator=random)
            for _ in range(2)
        ]
        sizes = (int(counts.sum()), layout.num_kv_heads, setup.group, layout.head_dim)
        self.inputs = GuardedInputs([sizes, *((sizes[0], layout.kv_width),) * 2], dtype, storage.device)
        self._queries = torch.empty(sizes, dtype=dtype, device=storage.device).normal_(generator=random)

    def write(self) -> None:
        storage, layer = self._storage, self._layer
        for slots, cached in zip((storage.key_slots(layer), storage.value_slots(layer)), self._cached, strict=True):
            slots[self._slots] = cached
        new = [cached[self._new_places] for cached in self._cached]
        self.inputs.fill(float("nan"))
        for tensor, content in zip(self.inputs.tensors, [self._queries, *new], strict=True):
            tensor.copy_(content)
        self.inputs.seal()

    def sums(self) -> Tensor:
        blocks = self._storage.bytes[-self.num_blocks :].view(torch.int64)
        return torch.stack([block.sum() for block in blocks])

    def zero_tails(self) -> None:
        size = self._setup.layout.block_size
        lengths = self._table.num_tokens[self._rows]
        for row, length in zip(self._rows.tolist(), lengths.tolist(), strict=True):
            if length % size:
                self._storage.zero_tail(BlockId(int(self._table.block_tables[row, length // size])), length % size)

    def work(self, library: AttentionLibrary | None = None) -> Work:
        """Return work that computes the layer, of each kind that the model has; a call overwrites earlier results."""
        setup = self._setup
        planner = GpuPlanner(self._table, self._storage, setup.window, setup.group, num_programs=1)  # of no decode
        ours = planner.plan(self._rows[:0], self._rows, self._counts).prompts
        assert ours is not None, "a check without chunks"
        part = ours if library is None else self._by_library(library, ours)
        part.bind(to_device(part.host_arrays, self._storage.device))
        kinds = (False,) if setup.window is None else (False, True)
        queries, *new = self.inputs.tensors
        outs = [torch.empty_like(queries) for _ in kinds]

        def compute() -> list[Tensor]:
            for out, is_windowed in zip(outs, kinds, strict=True):
                part.run(queries, (new[0], new[1]), out, self._layer, is_windowed)
            return outs

        return compute

    def _by_library(self, library: AttentionLibrary, ours: ChunkComputer) -> ChunkComputer:
        window = self._setup.window
        if not self._table.num_computed[self._rows].any():
            return LibraryPrompts(library, self._counts, window, ours, raise_failure)
        chunks = ContextChunks(self._table, self._rows, self._counts)
        return LibraryChunks(library, self._storage, chunks, window, ours, raise_failure, clears_tails=False)


class LibraryCheck:
    """A library beside our kernel."""

    def __init__(self, setup: PromptSetup, library: AttentionLibrary) -> None:
        self._setup, self._library = setup, library
        self._device = torch.device(setup.device)
        block_bytes = setup.layout.block_bytes
        num_blocks = min(setup.num_blocks, -(-FAR_BYTES // block_bytes))
        if self._device.type == CUDA:
            num_blocks = min(num_blocks, (free_bytes(self._device) - _LEFT_BYTES) // block_bytes)
        assert num_blocks >= 1, "no memory for a check"
        self.num_blocks = num_blocks
        self._storage = BlockStorage(setup.layout, self.num_blocks, self._device)

    def result(self) -> CheckResult:
        shapes = self._setup.shapes
        whole_reason, _ = self._check(shapes.odd_whole, shapes.whole)
        paged_reason, clears_tails = self._check(shapes.odd_chunks, shapes.chunks)
        return CheckResult(self.num_blocks, whole_reason or "", paged_reason or "", clears_tails)

    def _check(self, odd: ChunkShape, long: ChunkShape) -> tuple[str | None, bool]:
        clears_tails = False
        reason = self._obstacle(odd)
        if reason == _NO_RESULT and not odd.is_whole:
            clears_tails = True
            reason = self._obstacle(odd, has_zeros=True)
        if reason is None:
            self._storage.bytes.zero_()
            chunks = self._chunks(long)
            chunks.write()
            reason = self._compared(chunks, elsewhere=0)
        return reason, clears_tails and reason is None

    def _chunks(self, shape: ChunkShape) -> CheckedChunks:
        fitting_shape = fitting(shape, self._setup.layout.block_size, self.num_blocks)
        return CheckedChunks(self._setup, self._storage, fitting_shape)

    def _obstacle(self, odd: ChunkShape, *, has_zeros: bool = False) -> str | None:
        """Return why results cannot be used where unused slots hold no numbers, or, of contexts' last blocks, zeros. A
        call over nothing but NaN comes first: what a kernel leaves in the memory of a multiprocessor is NaN then."""
        chunks = self._chunks(odd)
        self._storage.bytes.fill_(_NO_NUMBERS)
        chunks.inputs.fill(float("nan"))
        reason = _failure(chunks.work(self._library))
        if reason is None and not self._are_all(self._storage.bytes, -1):
            reason = _WRITES
        chunks.write()
        if has_zeros:
            chunks.zero_tails()
        return reason or self._compared(chunks)

    def _compared(self, chunks: CheckedChunks, *, elsewhere: int = -1) -> str | None:
        """Return the library's first fault beside our kernel. `elsewhere`: the 8 bytes that fill all other blocks."""
        expected = [result.clone() for result in chunks.work()()]
        before = chunks.sums()
        reason = differing(chunks.work(self._library), expected)
        if reason is not None:
            return reason
        synchronize(self._device)
        is_intact = chunks.inputs.are_intact() and bool((chunks.sums() == before).all())
        others = self._storage.bytes[: self.num_blocks - chunks.num_blocks]
        return None if is_intact and self._are_all(others, elsewhere) else _WRITES

    def _are_all(self, blocks: Tensor, value: int) -> bool:
        rows = max(1, _SCANNED_BYTES // self._setup.layout.block_bytes)
        return all(bool((part == value).all()) for part in torch.split(blocks.view(torch.int64), rows))


class GuardedInputs:
    """Inputs of a kernel with memory on both sides that it must not write."""

    def __init__(self, sizes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> None:
        lengths = [math.prod(size) for size in sizes]
        self._buffers = [torch.empty(length + 2 * _GUARD, dtype=dtype, device=device) for length in lengths]
        self.tensors = [
            buffer[_GUARD : _GUARD + length].view(size)
            for buffer, length, size in zip(self._buffers, lengths, sizes, strict=True)
        ]
        self._sealed: list[Tensor] = []

    def fill(self, value: float) -> None:
        for buffer in self._buffers:
            buffer.fill_(value)

    def seal(self) -> None:
        self._sealed = [buffer.clone() for buffer in self._buffers]

    def are_intact(self) -> bool:
        pairs = zip(self._buffers, self._sealed, strict=True)
        return all(torch.equal(buffer.view(torch.uint8), sealed.view(torch.uint8)) for buffer, sealed in pairs)


def differing(work: Work, expected: Sequence[Tensor]) -> str | None:
    """Return why results of a library cannot be used; None: they are ours."""
    try:
        differences = [(theirs - ours).abs().max() for theirs, ours in zip(work(), expected, strict=True)]
        differs = float(torch.stack(differences).max())  # NaN where a difference is
    except Exception as error:  # noqa: BLE001  (of its compiler, of a driver: a library may raise anything)
        return _reason_of(error)
    # NaN is above every tolerance, too.
    return None if differs <= _TOLERANCES[expected[0].dtype] else f"{_DIFFERS} {differs:.2g}"


def _failure(work: Work) -> str | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001  (as above)
        return _reason_of(error)
    return None


def _reason_of(error: Exception) -> str:
    if isinstance(error, torch.AcceleratorError) and not is_refusal(error):
        raise error  # nothing can be computed behind it
    lines = str(error).strip().splitlines() or ["no more is known"]
    return f"{type(error).__name__}: {lines[-1][:_LONGEST_REASON]}"


def fitting(shape: ChunkShape, block_size: int, num_blocks: int) -> ChunkShape:
    """Return the shape, or a half, quarter, ... of it that fits into so many blocks."""
    while sum(blocks_for(length, block_size) for length in shape.lengths) > num_blocks:
        assert max(shape.lengths) > 1, f"a check needs more than {num_blocks} blocks"
        lengths = tuple(max(1, length // 2) for length in shape.lengths)
        counts = tuple(min(max(1, count // 2), length) for count, length in zip(shape.counts, lengths, strict=True))
        shape = ChunkShape(lengths, counts)
    return shape


def _table_of(shape: ChunkShape, block_size: int, num_blocks: int) -> tuple[SequenceTable, int]:
    widths = [blocks_for(length, block_size) for length in shape.lengths]
    table = SequenceTable(max_sequences=len(widths), max_context_len=max(shape.lengths), block_size=block_size)
    free = (num_blocks - 1 - np.random.default_rng(0).permutation(sum(widths))).tolist()
    for index, (length, count, width) in enumerate(zip(*shape, widths, strict=True)):
        blocks = tuple(BlockId(free.pop()) for _ in range(width))
        row = table.add(NewSequence(RequestId(str(index)), (0,) * length, length, length - count, blocks, _ONCE))
        assert row == index, "rows of a new table are taken in order"
    return table, sum(widths)


def main() -> None:
    name, setup = sys.argv[1], PromptSetup.from_json(sys.argv[2])
    device, library = torch.device(setup.device), library_named(name)
    assert library is not None, f"{name} cannot be imported"
    use_device(device)
    with torch.inference_mode(), on_device(device):
        print(json.dumps(asdict(LibraryCheck(setup, library).result())), flush=True)


if __name__ == "__main__":
    main()
