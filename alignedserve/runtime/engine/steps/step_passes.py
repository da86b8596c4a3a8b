"""The forward passes of steps, each in the quickest form that gives what the step needs."""

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.request import TokenLogprob
from alignedserve.runtime.attention.sequence_table import SequenceTable
from alignedserve.runtime.device.arrays import FixedArrays, to_device
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch
from alignedserve.runtime.engine.sampling.sampler import Sampler, logprob_entries
from alignedserve.runtime.engine.steps.batch_builder import BatchBuilder
from alignedserve.runtime.engine.steps.step import PromptLogprobs, StepBatch, StepLaunch
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.cpu.decode_pass import HighestLogits
from kernels.lora import DevicePlan, device_kernels
from kernels.states.state_rows import DeviceStatePlan, DeviceStateRows

_CUDA: Any = torch.cuda
_WARM_UPS = 2  # in which kernels are compiled and libraries take their memory
_captures: list[bool] = []  # those under way: whether garbage was collected before
_captures_lock = threading.Lock()


class Capture(Protocol):
    """Records work on a device."""

    def __call__(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Do the work and return its replay on the same memory, whose result is valid until any other replay. The
        replay keeps alive what the work allocates; memory that it only uses is the caller's to keep."""


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
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16), *range(288, 513, 32), *range(576, 1025, 64)]
    return sorted({min(size, max_sequences) for size in sizes})


@dataclass(frozen=True, slots=True)
class _RecordedStep:
    inputs: FixedArrays
    batch: ForwardBatch
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """The CUDA graphs of one model over one storage, each recorded at the first step of its size. Launching the kernels
    of a layer one by one takes longer than running them. There is a graph for some batch sizes; a smaller batch is
    padded with rows that read and write the storage's scratch block. The inputs of a step are copied, all at once, into
    memory that the graph reads."""

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
        `inputs` int64: the step's first tokens, on the device; None: its own."""
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


class StepPasses:
    """The passes of one model over one storage; for the compute stream."""

    def __init__(self, model: Decoder, storage: BlockStorage, graphs: DecodeGraphs | None) -> None:
        self.graphs = graphs
        self._model = model
        self._storage = storage

    def record_all(
        self, builder: BatchBuilder, compute: Stream, sampler: Sampler, *, has_adapters: bool = False
    ) -> None:
        assert self.graphs is not None, "a device without graphs"
        dtype, device = self._model.dtype, self._storage.device
        adapter_kernels = device_kernels(dtype, device) if has_adapters else None
        for size in reversed(self.graphs.sizes):  # the largest allocates the memory that all use
            compute.run(partial(self.logits, builder.build_padding(size)))
            if adapter_kernels is not None:
                compute.run(partial(self.logits, builder.build_padding(size, DevicePlan(adapter_kernels, size))))
        logits = torch.zeros((1, self._model.config.vocab_size), dtype=dtype, device=device)
        compute.run(partial(sampler.warm_up, logits))

    def may_record(self, step: StepBatch) -> bool:
        return self.graphs is not None and step.is_decode

    def logits(self, step: StepBatch, inputs: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return last hidden vectors of all tokens, and the logits of the sampled ones; `inputs`: see forward_batch."""
        computed = self._logits(step, inputs)
        self._leave_kept(step)
        return computed

    def _logits(self, step: StepBatch, inputs: Tensor | None) -> tuple[Tensor, Tensor]:
        has_own_inputs = step.pictures is not None or step.places is not None  # which no graph reads
        if self.graphs is not None and step.is_decode and not step.needs_hidden and not has_own_inputs:
            logits = self.graphs.run(step, inputs)
            if logits is not None:
                return logits[:0], logits[: len(step.rows)]
        batch = step.forward_batch(self._storage.device, inputs)
        if step.is_decode and not step.needs_hidden:
            logits = self._model.decode(batch, self._storage)
            if logits is not None:
                return logits[:0], logits
        hidden = self._model.forward(batch, self._storage)
        if not len(step.sampled_at):
            return hidden, hidden[:0]
        if len(step.sampled_at) == len(hidden):  # all of them: the places ascend
            return hidden, self._model.logits(hidden)
        (sampled_at,) = to_device([step.sampled_at], self._storage.device)
        return hidden, self._model.logits(hidden[sampled_at])

    def highest(self, launch: StepLaunch, inputs: Tensor | None = None) -> HighestLogits | None:
        """Find the highest logits alone; None: the step needs more, or the model has no such pass."""
        if not launch.takes_highest:
            return None
        batch = launch.step.forward_batch(self._storage.device, inputs)
        computed = self._model.decode_highest(batch, self._storage, launch.allowed_tokens())
        if computed is not None:
            self._leave_kept(launch.step)
        return computed

    def _leave_kept(self, step: StepBatch) -> None:
        if step.rings is not None:
            step.rings.leave_kept(self._storage)


# Logits of this many prompt tokens are held at a time for prompt logprobs.
_ROWS = 64


class PromptResults:
    """Embeddings and log-probabilities of prompts, from a step's last hidden vectors [tokens, hidden_size]."""

    def __init__(self, model: Decoder, table: SequenceTable) -> None:
        self._model, self._table = model, table

    def embeddings(self, step: StepBatch, hidden: Tensor) -> dict[int, bytes]:
        if not len(step.wants_embeddings):
            return {}
        places = step.wants_embeddings if step.last is not None else step.sampled_at[step.wants_embeddings]
        (at,) = to_device([places], hidden.device)
        vectors = self._model.outputs(hidden[at]).float().cpu().numpy()
        return {int(index): vector.tobytes() for index, vector in zip(step.wants_embeddings, vectors, strict=True)}

    def logprobs(self, step: StepBatch, hidden: Tensor) -> list[PromptLogprobs]:
        return [self._logprobs(step, index, hidden) for index in step.wants_prompt_logprobs]

    def make_passes(self, step: StepBatch, hidden: Tensor) -> None:
        for index in step.wants_prompt_logprobs:
            for _ in self._logits(step, index, hidden):
                pass

    def _logprobs(self, step: StepBatch, index: int, hidden: Tensor) -> PromptLogprobs:
        row = int(step.rows[index])
        sequence = self._table.sequence(row)
        first, count = self._scored_tokens(step, index)
        targets = torch.from_numpy(self._table.tokens[row, first : first + count].astype(np.int64)).to(hidden.device)
        num_top = sequence.sampling.num_prompt_logprobs or 0
        entries: list[TokenLogprob] = []
        for logits in self._logits(step, index, hidden):
            start = len(entries)
            stop = start + len(logits)
            entries += logprob_entries(logits.float(), targets[start:stop], [num_top] * len(logits))
            self._model.give_way()  # a chunk takes as long here as in the layers
        return PromptLogprobs(sequence.request_id, first, tuple(entries))

    def _logits(self, step: StepBatch, index: int, hidden: Tensor) -> Iterator[Tensor]:
        first_row, (_, count) = int(step.first_rows[index]), self._scored_tokens(step, index)
        for start in range(0, count, _ROWS):
            yield self._model.logits(hidden[first_row + start : first_row + min(start + _ROWS, count)])

    def _scored_tokens(self, step: StepBatch, index: int) -> tuple[int, int]:
        first = int(step.positions[int(step.first_rows[index])]) + 1
        last_computed = first + int(step.counts[index]) - 1
        return first, min(last_computed + 1, self._table.sequence(int(step.rows[index])).prompt_len) - first
