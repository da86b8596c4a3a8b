"""Decode steps recorded once and replayed: launching the kernels of a layer one by one takes longer than they do.

One graph for each of some batch sizes; a smaller batch is padded to the next, with rows that read and write the
storage's scratch block. What a step brings (tokens, positions, slots, the plan of its attention) is copied into memory
that the graph reads, all in one copy.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import FixedArrays
from alignedserve.runtime.engine.decoder import Decoder
from alignedserve.runtime.engine.step_batch import StepBatch
from alignedserve.runtime.kv.block_storage import BlockStorage

_CUDA: Any = torch.cuda
_WARM_UPS = 2  # in which kernels are compiled and libraries take their memory


class Capture(Protocol):
    """Records work on a device."""

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Do the work, and return what does it again: on the same memory, with what lies there by then. The result of
        a replay is valid until any other one."""


def repeat(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A Capture that records nothing: for devices without graphs."""
    work()
    return work


class CudaCapture:
    """CUDA graphs, which share their memory: no two of them are ever at work at once."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # PyTorch's own would be of the GPU that was first captured on in this process

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Capture."""
        for _ in range(_WARM_UPS):
            work()
        self._stream = self._stream or _CUDA.Stream()
        graph = _CUDA.CUDAGraph()
        # Only this thread's calls count: others copy blocks and take memory meanwhile.
        with _CUDA.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def graph_sizes(max_sequences: int) -> list[int]:
    """Batch sizes that are recorded, ascending: the padding of a batch costs little, a size some memory and time."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)]
    return sorted({min(size, max_sequences) for size in sizes})


class DecodeGraphs:
    """The graphs of one model over one storage. One is recorded when a step of its size comes first."""

    def __init__(self, model: Decoder, storage: BlockStorage, capture: Capture, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._model = model
        self._storage = storage
        self._capture = capture
        # Of the block tables of a batch, which differ from step to step. Sequences that share blocks may have more.
        self._max_entries = storage.num_blocks + sizes[-1]
        # Of all graphs: were each to keep its own, those of 128 256 tokens for up to 256 rows would take 0.6 GB.
        self._logits = torch.empty((sizes[-1], model.config.vocab_size), dtype=model.dtype, device=storage.device)
        self._graphs: dict[int, tuple[FixedArrays, Callable[[], Tensor]]] = {}

    def run(self, step: StepBatch) -> Tensor | None:
        """Logits [token rows, vocab_size] of a step of decodes, valid until the next one; None: it has no graph."""
        arrays = step.host_arrays
        size = len(step.token_ids)
        if size not in self.sizes or len(arrays[-1]) > self._max_entries:
            return None
        recorded = self._graphs.get(size)
        if recorded is None:
            recorded = self._graphs[size] = self._record(step)
        fixed, replay = recorded
        fixed.fill(arrays)
        return replay()

    def _record(self, step: StepBatch) -> tuple[FixedArrays, Callable[[], Tensor]]:
        fixed = FixedArrays(step.host_arrays, self._storage.device, last_size=self._max_entries)
        batch, logits = step.placed(fixed.tensors), self._logits[: len(step.token_ids)]
        model, storage = self._model, self._storage
        return fixed, self._capture(lambda: logits.copy_(model.logits(model.forward(batch, storage))))
