"""The forward passes of steps, each in the quickest form that gives what the step needs."""

from functools import partial

import torch
from torch import Tensor

from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.device.streams import Stream
from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.engine.sampling.sampler import Sampler
from alignedserve.runtime.engine.steps.cuda_graphs import DecodeGraphs
from alignedserve.runtime.engine.steps.planned_step import StepBatch
from alignedserve.runtime.engine.steps.step_batch import BatchBuilder
from alignedserve.runtime.engine.steps.step_launch import StepLaunch
from alignedserve.runtime.kv.block_storage import BlockStorage
from kernels.adapters.device_lora import DevicePlan, device_kernels
from kernels.cpu.decode_pass import HighestLogits


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
