"""Sequences whose keys and values are in a storage without having been computed, to measure attention alone."""

import importlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from alignedserve.core.block_allocator import blocks_for
from alignedserve.core.errors import ConfigError
from alignedserve.core.ids import BlockId, RequestId
from alignedserve.core.request import SamplingParams
from alignedserve.runtime.attention.backend import AUTO, CHOICES, TRITON, AttentionPlanner, StepAttention
from alignedserve.runtime.attention.libraries import AttentionLibrary, installed_libraries
from alignedserve.runtime.attention.registry import attention_planner
from alignedserve.runtime.attention.sequence_table import IntArray, NewSequence, SequenceTable
from alignedserve.runtime.device.arrays import to_device
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from kernels.gpu_dispatch import gpu_kernels_available

_NO_ROWS = np.zeros(0, np.int64)


def num_blocks_of(lengths: Sequence[int], block_size: int) -> int:
    return sum(blocks_for(length, block_size) for length in lengths)


class AttentionBatch(NamedTuple):
    """Sequences of one step, all of which decode or compute a chunk."""

    table: SequenceTable
    storage: BlockStorage
    rows: IntArray  # of the table

    def planners(self, config: ModelConfig) -> dict[str, AttentionPlanner]:
        """Return the implementations that run here, by name; those of libraries compute prompts and chunks alone."""
        found = {}
        for choice in CHOICES:
            if choice not in (AUTO, TRITON):
                try:
                    found[choice] = attention_planner(
                        choice, self.table, self.storage, config, self.storage.blocks.dtype
                    )
                except ConfigError:  # not on this device, or not for this dtype
                    continue
        if gpu_kernels_available(self.storage.device) and self.storage.has_scratch:
            found |= self._gpu_planners(config)
        return found

    def _gpu_planners(self, config: ModelConfig) -> dict[str, AttentionPlanner]:
        gpu = importlib.import_module("alignedserve.runtime.attention.triton_backend")  # loads Triton
        storage, group = self.storage, config.group_size
        if not gpu.gpu_attention_works(storage.layout, group, storage.device):
            return {}
        found = {TRITON: gpu.GpuPlanner(self.table, storage, config.sliding_window, group)}
        for library in installed_libraries(storage.layout, storage.device):
            found[library.name] = gpu.GpuPlanner(self.table, storage, config.sliding_window, group)
            found[library.name].use_library(library, for_whole=True, for_paged=True)
            found[library.name].on_failure = _refuse
        return found

    def decodes(self, planner: AttentionPlanner) -> StepAttention:
        return _placed(planner.plan(self.rows, _NO_ROWS, _NO_ROWS), self.storage.device)

    def chunks(self, planner: AttentionPlanner, num_new: int) -> StepAttention:
        counts = np.full(len(self.rows), num_new)
        return _placed(planner.plan(_NO_ROWS, self.rows, counts), self.storage.device)


def attention_batch(storage: BlockStorage, lengths: Sequence[int], num_new: int) -> AttentionBatch:
    """Make a batch of sequences of these lengths, whose last `num_new` tokens are to be computed, their blocks in no
    order among all that the storage has.
    """
    block_size = storage.layout.block_size
    table = SequenceTable(max_sequences=len(lengths), max_context_len=max(lengths), block_size=block_size)
    free = np.random.default_rng(0).permutation(storage.num_blocks).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    for index, length in enumerate(lengths):
        blocks = tuple(BlockId(free.pop()) for _ in range(blocks_for(length, block_size)))
        table.add(NewSequence(RequestId(str(index)), (0,) * length, length, length - num_new, blocks, sampling))
    return AttentionBatch(table, storage, table.rows([RequestId(str(index)) for index in range(len(lengths))]))


def _refuse(library: AttentionLibrary, error: Exception) -> None:
    raise RuntimeError(f"{library.name} does not run") from error


def _placed(step: StepAttention, device: torch.device) -> StepAttention:
    step.bind(to_device(step.host_arrays, device))
    return step
