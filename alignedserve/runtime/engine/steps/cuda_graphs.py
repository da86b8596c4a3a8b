"""CUDA graphs of decode steps: launching the kernels of a layer one by one takes longer than running them.

There is one graph for each of some batch sizes; a smaller batch is padded to the next, with rows that read and write
the storage's scratch block. The inputs of a step (tokens, positions, slots, the plan of its attention) are copied, all
at once, into memory that the graph reads.
"""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import FixedArrays
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch
from alignedserve.runtime.engine.steps.planned_step import StepBatch
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.states.device_rows import DeviceStatePlan, DeviceStateRows

_CUDA: Any = torch.cuda
_WARM_UPS = 2  # in which kernels are compiled and libraries take their memory
_captures: list[bool] = []  # those under way: whether garbage was collected before
_captures_lock = threading.Lock()


class Capture(Protocol):
    """Records work on a device."""

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Do the work and return its replay on the same memory, whose result is valid until any other replay.

        The replay keeps alive what the work allocates; memory that it only uses is the caller's to keep.
        """


class CudaCapture:
    """Captures CUDA graphs that share their memory: no two of them ever run at once."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: Any = None  # PyTorch's own would belong to the first GPU captured on in this process

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        for _ in range(_WARM_UPS):
            work()
        self._stream = self._stream or _CUDA.Stream()
        graph = _CUDA.CUDAGraph()
        # Only this thread's calls count: others copy blocks and allocate memory meanwhile.
        recorded = _CUDA.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with _no_garbage_collected(), recorded:
            result = work()
        self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Collect no garbage meanwhile: with an engine that is gone its graphs would be destroyed, which CUDA permits no
    thread that captures, and PyTorch ends the process."""
    with _captures_lock:
        _captures.append(gc.isenabled())
        gc.disable()
    try:
        yield
    finally:
        with _captures_lock:
            was_enabled = _captures.pop(0)  # of the first one, where several threads capture
            if _captures:
                _captures[0] = was_enabled
            elif was_enabled:
                gc.enable()


def graph_sizes(max_sequences: int) -> list[int]:
    """Return the batch sizes to record, ascending: padding a batch costs little, each size some memory and time."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    return sorted({min(size, max_sequences) for size in sizes})


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    inputs: FixedArrays
    batch: ForwardBatch
    replay: Callable[[], Tensor]


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
        # Shared by all graphs: separate logits of 128 256 tokens for up to 512 rows would take 1.4 GB.
        self._logits = torch.empty((sizes[-1], model.logits_width), dtype=model.dtype, device=storage.device)
        # By size, and whether some row has an adapter.
        self._graphs: dict[tuple[int, bool], _RecordedStep] = {}

    def run(self, step: StepBatch, inputs: Tensor | None = None) -> Tensor | None:
        """Return logits [token rows, logits_width] of decodes, valid until the next step; None: it has no graph.

        `inputs` int64: the step's first tokens, on the device; None: its own.
        """
        arrays = step.host_arrays
        size = len(step.token_ids)
        if size not in self.sizes or len(arrays[-1]) > self._max_entries:
            return None
        if step.adapters is not None and not step.adapters.is_of_a_graph:
            return None
        if isinstance(step.states, DeviceStatePlan) and not step.states.is_of_a_graph:
            return None
        key = size, step.adapters is not None
        recorded = self._graphs.get(key)
        if recorded is None:
            recorded = self._graphs[key] = self._record(step)
        recorded.inputs.fill(arrays)
        if inputs is not None:
            recorded.inputs.tensors[0][: inputs.shape[0]].copy_(inputs)
        return recorded.replay()

    def _record(self, step: StepBatch) -> _RecordedStep:
        fixed = FixedArrays(step.host_arrays, self._storage.device, last_size=self._max_entries)
        batch, logits = step.to_forward_batch(fixed.tensors), self._logits[: len(step.token_ids)]
        model, storage = self._model, self._storage
        if isinstance(batch.states, DeviceStateRows):  # recording computes the step, and states go on from themselves
            batch.states.all_targets.fill_(storage.scratch_block)
        replay = self._capture(lambda: logits.copy_(model.logits(model.forward(batch, storage))))
        return _RecordedStep(fixed, batch, replay)
