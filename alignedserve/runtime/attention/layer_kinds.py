"""Attention where layers have heads of several sizes: a planner for each kind of layers, over the same contexts."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor
from typing_extensions import override

from alignedserve.runtime.attention.backend import AttentionPlanner, StepAttention
from alignedserve.runtime.attention.native_backend import PagedPlanner
from alignedserve.runtime.attention.sequence_table import IntArray
from alignedserve.runtime.device.arrays import Array


class StepOfKinds:
    """A StepAttention over layers of several kinds."""

    host_arrays: Sequence[Array] = ()

    def __init__(self, steps: Sequence[StepAttention], places: Sequence[tuple[int, int]]) -> None:
        """`places`: the kind of each cached layer, and its place among those."""
        self.steps, self._places = steps, places
        self.decode_rows = steps[0].decode_rows
        self.padded_share = max(step.padded_share for step in steps)
        assert all(np.array_equal(step.decode_rows, self.decode_rows) for step in steps), "rows in several orders"

    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention: nothing to bind."""

    def set_last_blocks(self, blocks: IntArray) -> None:
        raise AssertionError("these planners do not plan ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        kind, place = self._places[layer]
        self.steps[kind].decode(queries, out, place, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        kind, place = self._places[layer]
        self.steps[kind].chunks(queries, new, out, place, is_windowed)


class DeviceStepOfKinds(StepOfKinds):
    """The same on a GPU, with all arrays of the steps, the block tables of the first behind all else."""

    def __init__(
        self, steps: Sequence[StepAttention], places: Sequence[tuple[int, int]], num_tables: int, *, share_tables: bool
    ) -> None:
        """`num_tables`: of the arrays of each step, the last. `share_tables`: those of the others are the same."""
        super().__init__(steps, places)
        counts = [len(step.host_arrays) for step in steps]
        with_tables = len(steps) if share_tables else 1
        self._num_own = [count - num_tables for count in counts[:with_tables]] + counts[with_tables:]
        self._shares_tables = share_tables
        own = [array for step, count in zip(steps, self._num_own, strict=True) for array in step.host_arrays[:count]]
        self.host_arrays = [*own, *steps[0].host_arrays[self._num_own[0] :]]

    @override
    def bind(self, tensors: Sequence[Tensor]) -> None:
        tables, first = tensors[sum(self._num_own) :], 0
        for index, (step, count) in enumerate(zip(self.steps, self._num_own, strict=True)):
            has_tables = self._shares_tables or not index
            step.bind([*tensors[first : first + count], *(tables if has_tables else ())])
            first += count

    @override
    def set_last_blocks(self, blocks: IntArray) -> None:
        self.steps[0].set_last_blocks(blocks)


class PlannerOfKinds:
    """An AttentionPlanner over layers of several kinds."""

    def __init__(
        self,
        planners: Sequence[AttentionPlanner],
        num_layers: Sequence[int],
        num_tables: int = 0,
        *,
        share_tables: bool = True,
    ) -> None:
        """`planners`, `num_layers`: of each kind. `num_tables`: of the arrays of a step that decodes, the last, which
        are those of block tables. `share_tables`: all kinds have the same."""
        self.plans_ahead = all(planner.plans_ahead for planner in planners)
        self._num_tables, self._share_tables = num_tables, share_tables
        self._planners = planners
        self._places = [(kind, place) for kind, count in enumerate(num_layers) for place in range(count)]
        self.reads_unused_slots = any(planner.reads_unused_slots for planner in planners)

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> StepOfKinds:
        own = (decode_rows, chunk_rows, chunk_counts, num_padding)
        steps = [planner.plan(*own) for planner in self._planners]
        if not self.plans_ahead:
            return StepOfKinds(steps, self._places)
        num_tables = self._num_tables if len(decode_rows) + num_padding else 0
        return DeviceStepOfKinds(steps, self._places, num_tables, share_tables=self._share_tables)


class PagedPlannerOfKinds(PlannerOfKinds):
    """The same of native kernels, which is a RunPlanner too."""

    def __init__(self, planners: Sequence[PagedPlanner], num_layers: Sequence[int]) -> None:
        super().__init__(planners, num_layers)
        self._paged = planners

    def keep_tables(self) -> None:
        for planner in self._paged:
            planner.keep_tables()

    def plan_runs(self, rows: IntArray, counts: IntArray) -> StepOfKinds:
        return StepOfKinds([planner.plan_runs(rows, counts) for planner in self._paged], self._places)
