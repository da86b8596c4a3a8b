"""Decode attention as a list schedule: kernels divide contexts into blocks, which free multiprocessors take in turn.

    keys charged = max(sum of the contexts, longest block * multiprocessors / heads) + what blocks cost

A block of threads reads a part of one context for one head, at the rate of one of the accelerator's multiprocessors,
which share the memory's rate evenly. A straggler costs nothing while other contexts keep all multiprocessors
busy. That is the least that a schedule takes; where a kernel's blocks come in the worst order, the longest last,
it takes at most the sum and the longest block together. docs/costmodels.md has an example, the sources, and how far
measurements bear this out.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from alignedserve.costmodel.model import AttentionKernel, CostModel
from alignedserve.costmodel.model_shapes import ModelShape
from alignedserve.costmodel.work import IterationWork

SECTION = 512  # tokens: kSection of kernels/csrc/attention.h
_FILLED = 0.8  # of the multiprocessors: FlashAttention-2 divides no context where this many have a block
_RESIDENT = 3  # blocks of FlashInfer on a multiprocessor: what its authors say of one such kernel, assumed of all
_LEAST_CHUNK = 128  # tokens of FlashInfer's block


class Multiprocessors(NamedTuple):
    """The part of a worker's accelerator that a schedule depends on."""

    num_multiprocessors: int
    num_heads: int  # of keys and values on it
    num_query_heads: int


LongestPart = Callable[[IterationWork, Multiprocessors], float]
"""Returns the most tokens that one block reads. It never falls as work is added."""


def _whole(work: IterationWork, on: Multiprocessors) -> float:
    return work.max_decode_context_len


def _sections(work: IterationWork, on: Multiprocessors) -> float:
    return min(work.max_decode_context_len, SECTION)


def _equal_numbers(work: IterationWork, on: Multiprocessors) -> float:
    num_blocks = work.num_decodes * on.num_heads
    if num_blocks >= _FILLED * on.num_multiprocessors:
        return work.max_decode_context_len
    return work.max_decode_context_len / max(on.num_multiprocessors // num_blocks, 1)


def _chunks_that_fit(work: IterationWork, on: Multiprocessors) -> float:
    num_places = _RESIDENT * on.num_multiprocessors - work.num_decodes * on.num_heads
    if num_places <= 0:
        return work.max_decode_context_len
    chunk = max(work.decode_context_len * on.num_heads / num_places, _LEAST_CHUNK)
    return min(chunk, work.max_decode_context_len)


@dataclass(frozen=True, slots=True)
class Division:
    """How a kernel divides the contexts of decodes."""

    longest_part: LongestPart
    source: str  # of the rule
    is_measured: bool  # with a straggler, by us
    per_query_head: bool = False  # else a block is of a head of keys, with all queries that read it
    is_worst_order: bool = False  # Graham's bound: the longest block is the last to begin
    block_tokens: float = 0.0  # that could be read in the time which a block costs beside its reading


DIVISIONS: Mapping[AttentionKernel, Division] = {
    AttentionKernel.PAGED_V1: Division(
        _whole,
        "vLLM, paged_attention_v1: a grid of (heads, sequences), used up to 8 192 tokens where there are more than 512"
        " blocks (attention/ops/paged_attn.py)",
        is_measured=False,
        per_query_head=True,
    ),
    AttentionKernel.PAGED_V1_WORST_ORDER: Division(
        _whole,
        "Graham, Bounds on multiprocessing timing anomalies (1969): what no order of these blocks exceeds",
        is_measured=False,
        per_query_head=True,
        is_worst_order=True,
    ),
    AttentionKernel.FLASH_ATTENTION_2: Division(
        _equal_numbers,
        "FlashAttention-2, num_splits_heuristic: no context is divided where blocks fill 80 % of the multiprocessors;"
        " else each into as many parts (csrc/flash_attn/flash_api.cpp)",
        is_measured=False,
    ),
    AttentionKernel.FLASHINFER: Division(
        _chunks_that_fit,
        "FlashInfer, BatchDecodeWithPagedKVCacheWorkEstimation: no context is divided where sequences and key heads"
        " fill every place for a block; else all into the least chunks whose blocks do (scheduler.cuh)",
        is_measured=False,
    ),
    AttentionKernel.SECTIONS: Division(
        _sections,
        "our kernels on CPUs: sections of 512 tokens of a context (kernels/csrc/attention_division.h)",
        is_measured=True,
    ),
}
"""Kernels whose time is a list schedule."""


def charged_keys(division: Division, work: IterationWork, on: Multiprocessors) -> float:
    """Return the keys that decodes cost as much as, where attention is balanced."""
    longest, num_parts = division.longest_part(work, on), float(work.num_decodes)
    if longest < work.max_decode_context_len:
        num_parts += work.decode_context_len / longest
    num_heads = on.num_query_heads if division.per_query_head else on.num_heads
    total, last = float(work.decode_context_len), longest * on.num_multiprocessors / num_heads
    scheduled = total + last - longest / num_heads if division.is_worst_order else max(total, last)
    return scheduled + division.block_tokens * num_parts


class ListScheduledModel:
    """A cost model whose decodes are charged as a kernel of DIVISIONS schedules them. See CostModel."""

    def __init__(self, balanced: CostModel, division: Division, on: Multiprocessors) -> None:
        """`balanced`: the same worker, with attention that follows the sum of the contexts."""
        self._balanced, self._division, self._on = balanced, division, on

    def iteration_s(self, work: IterationWork) -> float:
        if not work.num_decodes:
            return self._balanced.iteration_s(work)
        charged = work.copy()
        charged.decode_context_len = ceil(charged_keys(self._division, work, self._on))
        return self._balanced.iteration_s(charged)

    def swap_s(self, num_tokens: float) -> float:
        return self._balanced.swap_s(num_tokens)


def accelerator_of(shape: ModelShape, num_multiprocessors: int, tensor_parallel: int) -> Multiprocessors:
    """Return one of a worker's accelerators; key heads that are fewer than those are held by several."""
    num_heads = max(shape.num_kv_heads // tensor_parallel, 1)
    return Multiprocessors(num_multiprocessors, num_heads, shape.num_heads // tensor_parallel)


def list_schedule(tasks: Iterable[float], num_machines: int) -> float:
    """Return when the last of these tasks ends, each begun in its turn by the first machine that is free."""
    free_at = [0.0] * num_machines
    for task in tasks:
        heapq.heapreplace(free_at, free_at[0] + task)
    return max(free_at)


def straggler_share(costs: CostModel, work: IterationWork) -> float:
    """Return the share of decode attention's time that is there only because one context is longer than the others.

    By the cost model: the iteration's time less that of as many contexts of the mean length.
    """
    if work.num_decodes < 2:
        return 0.0
    changed = work.copy()
    changed.swap_in_tokens = changed.swap_out_tokens = 0.0
    taken_s = costs.iteration_s(changed)
    changed.max_decode_context_len = -(-work.decode_context_len // work.num_decodes)
    lost_s = taken_s - costs.iteration_s(changed)
    if lost_s <= 0.0:
        return 0.0
    changed.decode_context_len = changed.max_decode_context_len = 0
    return min(lost_s / (taken_s - costs.iteration_s(changed)), 1.0)
