"""CUDA graphs of decode steps: launching the kernels of a layer one by one takes longer than running them.

There is one graph for each of some batch sizes; a smaller batch is padded to the next, with rows that read and write
the storage's scratch block. The inputs of a step (tokens, positions, slots, the plan of its attention) are copied, all
at once, into memory that the graph reads.
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
        """Do the work and return its replay on the same memory, whose result is valid until any other replay."""


class CudaCapture:
    """Captures CUDA graphs that share their memory: no two of them ever run at once."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # PyTorch's own would belong to the first GPU captured on in this process

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See Capture."""
        for _ in range(_WARM_UPS):
            work()
        self._stream = self._stream or _CUDA.Stream()
        graph = _CUDA.CUDAGraph()
        # Only this thread's calls count: others copy blocks and allocate memory meanwhile.
        with _CUDA.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = work()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def graph_sizes(max_sequences: int) -> list[int]:
    """Return the batch sizes to record, ascending: padding a batch costs little, each size some memory and time."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)]
    return sorted({min(size, max_sequences) for size in sizes})


class DecodeGraphs:
    """The graphs of one model over one storage, each recorded at the first step of its size."""

    def __init__(self, model: Decoder, storage: BlockStorage, capture: Capture, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self._model = model
        self._storage = storage
        self._capture = capture
        # Entries in the block tables of a batch, which vary from step to step. Sequences that share blocks may have
        # more.
        self._max_entries = storage.num_blocks + sizes[-1]
        # Shared by all graphs: separate logits of 128 256 tokens for up to 256 rows would take 0.6 GB.
        self._logits = torch.empty((sizes[-1], model.config.vocab_size), dtype=model.dtype, device=storage.device)
        self._graphs: dict[int, tuple[FixedArrays, Callable[[], Tensor]]] = {}

    def run(self, step: StepBatch) -> Tensor | None:
        """Return logits [token rows, vocab_size] of decodes, valid until the next step; None: it has no graph."""
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
        batch, logits = step.to_forward_batch(fixed.tensors), self._logits[: len(step.token_ids)]
        model, storage = self._model, self._storage
        return fixed, self._capture(lambda: logits.copy_(model.logits(model.forward(batch, storage))))
