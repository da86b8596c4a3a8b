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
        """See StepAttention."""
        raise AssertionError("these planners do not plan ahead")

    def decode(self, queries: Tensor, out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        kind, place = self._places[layer]
        self.steps[kind].decode(queries, out, place, is_windowed)

    def chunks(self, queries: Tensor, new: tuple[Tensor, Tensor], out: Tensor, layer: int, is_windowed: bool) -> None:
        """See StepAttention."""
        kind, place = self._places[layer]
        self.steps[kind].chunks(queries, new, out, place, is_windowed)


class DeviceStepOfKinds(StepOfKinds):
    """The same on a GPU: block tables, which all kinds read, are there once, behind all else."""

    def __init__(self, steps: Sequence[StepAttention], places: Sequence[tuple[int, int]], num_shared: int) -> None:
        """`num_shared`: of the arrays of each step, the last, which are those of the others too."""
        super().__init__(steps, places)
        self._num_own = [len(step.host_arrays) - num_shared for step in steps]
        self._last = steps[-1]
        own = [array for step, count in zip(steps, self._num_own, strict=True) for array in step.host_arrays[:count]]
        self.host_arrays = [*own, *self._last.host_arrays[self._num_own[-1] :]]

    @override
    def bind(self, tensors: Sequence[Tensor]) -> None:
        """See StepAttention."""
        shared, first = tensors[sum(self._num_own) :], 0
        for step, count in zip(self.steps, self._num_own, strict=True):
            step.bind([*tensors[first : first + count], *shared])
            first += count

    @override
    def set_last_blocks(self, blocks: IntArray) -> None:
        """See StepAttention."""
        self._last.set_last_blocks(blocks)


class PlannerOfKinds:
    """An AttentionPlanner over layers of several kinds."""

    def __init__(self, planners: Sequence[AttentionPlanner], num_layers: Sequence[int], num_tables: int = 0) -> None:
        """`planners`, `num_layers`: of each kind. `num_tables`: of the arrays of a step that decodes, the last, which
        are those of block tables."""
        self.plans_ahead = all(planner.plans_ahead for planner in planners)
        self._num_tables = num_tables
        self._planners = planners
        self._places = [(kind, place) for kind, count in enumerate(num_layers) for place in range(count)]
        self.reads_unused_slots = any(planner.reads_unused_slots for planner in planners)

    def plan(
        self, decode_rows: IntArray, chunk_rows: IntArray, chunk_counts: IntArray, num_padding: int = 0
    ) -> StepOfKinds:
        """See AttentionPlanner."""
        own = (decode_rows, chunk_rows, chunk_counts, num_padding)
        steps = [planner.plan(*own) for planner in self._planners]
        if not self.plans_ahead:
            return StepOfKinds(steps, self._places)
        return DeviceStepOfKinds(steps, self._places, self._num_tables if len(decode_rows) + num_padding else 0)


class PagedPlannerOfKinds(PlannerOfKinds):
    """The same of native kernels, which is a RunPlanner too."""

    def __init__(self, planners: Sequence[PagedPlanner], num_layers: Sequence[int]) -> None:
        super().__init__(planners, num_layers)
        self._paged = planners

    def keep_tables(self) -> None:
        """See TableKeeper."""
        for planner in self._paged:
            planner.keep_tables()

    def plan_runs(self, rows: IntArray, counts: IntArray) -> StepOfKinds:
        """See RunPlanner."""
        return StepOfKinds([planner.plan_runs(rows, counts) for planner in self._paged], self._places)
