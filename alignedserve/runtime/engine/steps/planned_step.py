"""The forward batch of one step on the host, and what is to be found where in its results."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignedserve.core.ids import BlockId
from alignedserve.runtime.attention.backend import StepAttention
from alignedserve.runtime.attention.ring_tables import RingPlan
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.arrays import Array, to_device
from alignedserve.runtime.engine.forward.forward_batch import ForwardBatch, LastTokens
from alignedserve.runtime.engine.steps.hidden_cache import HiddenPlan
from alignedserve.runtime.pictures import PictureRows
from kernels.adapters.device_lora import DevicePlan
from kernels.adapters.lora import AdapterRows
from kernels.states.device_rows import DeviceStatePlan
from kernels.states.state_rows import StateRows


class StepBatch(NamedTuple):
    """A forward batch on the host, and the places of its results. Slices are in batch order: decodes, then chunks.

    The token rows of a batch of decodes may be padded to a size that has a CUDA graph.
    """

    token_ids: IntArray  # [token rows]
    positions: IntArray  # [token rows]
    slots: IntArray  # [token rows], see ForwardBatch
    fresh_blocks: IntArray  # see ForwardBatch
    unclean_tails: tuple[tuple[BlockId, int], ...]  # see ForwardBatch
    attention: StepAttention
    rows: IntArray  # [slices] rows of the sequence table
    counts: IntArray  # [slices] tokens of each
    first_rows: IntArray  # [slices] first token row of each
    sampled_rows: IntArray  # rows of the sequence table that reach their last known token
    sampled_at: IntArray  # the token rows whose logits they need, in the same order
    wants_prompt_logprobs: tuple[int, ...]  # slices that compute prompt tokens of sequences that asked
    wants_embeddings: IntArray  # places in sampled_rows of sequences that asked for their prompt's
    is_decode: bool  # one token of each slice, each the last known one, and keys and values in its blocks
    hidden: HiddenPlan | None = None  # of the last slices
    last: LastTokens | None = None  # of the sampled rows; None: the last layer computes all tokens to the end
    adapters: AdapterRows | DevicePlan | None = None  # of the token rows; None: no sequence has one
    places: Tensor | None = None  # see ForwardBatch; on the device already, as the next
    pictures: PictureRows | None = None  # on the device already; None: no token row has the embedding of one
    states: StateRows | DeviceStatePlan | None = None  # of the token rows; None: the model has none
    rings: RingPlan | None = None  # of the sequences; None: they have none

    @property
    def needs_hidden(self) -> bool:
        return bool(self.wants_prompt_logprobs) or len(self.wants_embeddings) > 0

    @property
    def num_tokens(self) -> int:
        return len(self.rows) if self.is_decode else int(self.counts.sum())

    def written_blocks(self, slot_stride: int) -> IntArray:
        count = self.num_tokens
        blocks = self.slots[:count] // slot_stride
        return blocks if self.rings is None else np.concatenate((blocks, self.rings.written_by(count, slot_stride)))

    @property
    def host_arrays(self) -> tuple[Array, ...]:
        arrays = () if self.hidden is None else self.hidden.arrays
        adapters = () if self.adapters is None else self.adapters.host_arrays
        states = () if self.states is None else self.states.host_arrays
        rings = () if self.rings is None else self.rings.host_arrays
        own = (*adapters, *states, *rings, *arrays)
        return (self.token_ids, self.positions, self.slots, *own, *self.attention.host_arrays)

    def to_forward_batch(self, tensors: Sequence[Tensor]) -> ForwardBatch:
        token_ids, positions, slots, *others = tensors
        hidden, adapters, states, rings = None, None, None, None
        if self.adapters is not None:
            num_arrays = len(self.adapters.host_arrays)
            adapters, others = self.adapters.bound(others[:num_arrays]), others[num_arrays:]
        if self.states is not None:
            num_arrays = len(self.states.host_arrays)
            states, others = self.states.bound(others[:num_arrays]), others[num_arrays:]
        if self.rings is not None:
            num_arrays = len(self.rings.host_arrays)
            rings, others = self.rings.bound(others[:num_arrays]), others[num_arrays:]
        if self.hidden is not None:
            num_arrays = len(self.hidden.arrays)
            hidden, others = self.hidden.to_rows(len(token_ids), others[:num_arrays]), others[num_arrays:]
        self.attention.bind(others)
        last = None if self.last is None else self.last.to_rows()
        rest = (self.fresh_blocks, self.unclean_tails, self.attention, hidden, last, adapters)
        return ForwardBatch(token_ids, positions, slots, *rest, self.places, self.pictures, states, rings)

    def forward_batch(self, device: torch.device, inputs: Tensor | None = None) -> ForwardBatch:
        """Bring the arrays to the device and build the forward batch. `inputs`: its first tokens, on the device."""
        tensors = to_device(self.host_arrays, device)
        if inputs is not None:
            tensors[0][: len(inputs)] = inputs
        return self.to_forward_batch(tensors)
