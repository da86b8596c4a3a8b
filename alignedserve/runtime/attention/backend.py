"""The interface of attention backends: a planner plans each step once, and the plan runs on every layer."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from alignedserve.core.errors import ConfigError
from alignedserve.runtime.attention.sequence_table import BoolArray, IntArray
from alignedserve.runtime.device.arrays import Array
from kernels.cpu.native import supported_levels
from kernels.cpu.paged_attention import LEVELS
from kernels.gpu_dispatch import gpu_kernels_available

AUTO, TORCH, TRITON = "auto", "torch", "triton"
CHOICES = (AUTO, *LEVELS, TRITON, TORCH)


class Contexts(Protocol):
    """The part of a SequenceTable that planning reads: the places of sequences' contexts."""

    block_size: int
    block_tables: IntArray  # [rows, blocks]
    is_reversed: BoolArray  # [rows]: token i of a block lies in slot block_size - 1 - i

    @property
    def version(self) -> int:
        """Return what changes whenever a row, or its blocks, change owner."""

    @property
    def num_computed(self) -> IntArray:
        """Return how many tokens of each row are computed [rows]."""


class StepAttention(Protocol):
    """One step's attention. Token rows: one for each of `decode_rows`, then those of the chunks one after another."""

    @property
    def decode_rows(self) -> IntArray:
        """Rows of the sequence table that decode one token, in the order of their token rows."""

    @property
    def padded_share(self) -> float:
        """Share of `decode`'s time spent on slots that are read only because another sequence is longer."""

    @property
    def host_arrays(self) -> Sequence[Array]:
        """Arrays that must be on the device before a layer is computed."""

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """Use these tensors: the same arrays, on the device."""

    def set_last_blocks(self, blocks: IntArray) -> None:
        """Set the block of each decode's own token, unknown when the step was planned ahead; before `bind`."""

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill the rows of `out` that decode, both [tokens, kv_heads, group, head_dim]. The new keys and values of this
        layer are already in the storage."""

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """Fill the other rows of `out`. `new`: keys and values [tokens, kv_heads * head_dim], also in the storage."""


class AttentionPlanner(Protocol):
    """Plans steps over one storage; keeps state that the next step can use."""

    reads_unused_slots: bool  # then every slot of a block in use must hold finite numbers
    plans_ahead: bool  # a step may be planned before the one before it is computed

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> StepAttention:
        """Plan rows of the sequence table that decode one token, and rows that compute `chunk_counts` tokens.

        `num_padding`: padding rows behind those that decode, for DecodeGraphs alone."""


@runtime_checkable
class TableKeeper(Protocol):
    """An AttentionPlanner whose plans can have block tables of their own."""

    def keep_tables(self) -> None:
        """Let them: they may be computed when those of the sequences have changed."""


@runtime_checkable
class RunPlanner(Protocol):
    """An AttentionPlanner that can compute several tokens of a sequence as decodes of one step. Its
    `reads_unused_slots` is false: some of the slots before a token are written in the same step."""

    def plan_runs(self, rows: IntArray, counts: IntArray) -> StepAttention:
        """Plan rows of the sequence table that compute `counts` tokens each, one after another, all as decodes."""


def attention_level(choice: str, device: torch.device, dtype: torch.dtype) -> str:
    """Resolve `choice` to one of LEVELS, TRITON or TORCH. Raises ConfigError for an unavailable choice."""
    if choice not in CHOICES:
        raise ConfigError(f"attention must be one of {', '.join(CHOICES)}, not {choice!r}.")
    fits = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    available = supported_levels() if fits else ()
    if choice == AUTO and device.type == "cuda" and gpu_kernels_available(device):
        return TRITON
    if choice == AUTO:
        return available[0] if available else TORCH
    if choice == TRITON and gpu_kernels_available(device):
        return TRITON
    if choice != TORCH and choice not in available:
        has = ", ".join((*available, TORCH))
        raise ConfigError(f"attention {choice!r} is not available for {dtype} on {device}; available: {has}.")
    return choice
