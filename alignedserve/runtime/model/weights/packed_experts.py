"""Mixtures of experts whose weights stay packed as their file has them, on a GPU."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.model.weights.packed_products import Float8Rows, GroupedRows, Rows, are_alike
from kernels.activation import Activated, Gated
from kernels.feed_forward import Router
from kernels.narrow.grouped_linear import GROUPS, GroupedWeight, Numbers, SortedLinear, joined_weights
from kernels.sorted_experts import SortedExperts


class ExpertPart(NamedTuple):
    """One module of an expert, or a part of it."""

    rows: Rows
    bias: Tensor | None = None  # in the dtype of the model


def grouped_experts(
    router: Router,
    experts: Sequence[tuple[Sequence[ExpertPart], ExpertPart]],
    gated: Gated | Activated,
    *,
    scales_inputs: bool = False,
) -> SortedExperts | None:
    """Return the mixture of experts, each the parts of its first product, gates first, and its second one; None: their
    forms differ, or are not for this. `gated`, `scales_inputs`: see SortedExperts."""
    gate_up = _products([parts for parts, _ in experts], gated.dtype)
    down = _products([[last] for _, last in experts], gated.dtype)
    if gate_up is None or down is None:
        return None
    return SortedExperts(router, gate_up, down[0], gated, scales_inputs=scales_inputs)


def _products(experts: Sequence[Sequence[ExpertPart]], dtype: torch.dtype) -> list[SortedLinear] | None:
    """Return one product of all experts for each part, or one for all parts where each expert's are alike; None: they
    are not for this."""
    parts = [[_grouped(part.rows) for part in own] for own in experts]
    joined = [_joined(own) for own in parts]
    if all(own is not None for own in joined):
        products = [_product(joined, _biases([part for own in experts for part in own], len(experts)), dtype)]
    else:
        of_parts = zip(zip(*parts, strict=True), zip(*experts, strict=True), strict=True)
        products = [_product(rows, _biases(own, len(experts)), dtype) for rows, own in of_parts]
    made = [product for product in products if product is not None]
    return made if len(made) == len(products) else None


def _biases(parts: Sequence[ExpertPart], num_experts: int) -> Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    return torch.cat(biases).view(num_experts, -1) if biases else None


def _joined(parts: Sequence[GroupedRows | None]) -> GroupedRows | None:
    grouped = [part for part in parts if part is not None]
    if len(grouped) < len(parts) or not are_alike(grouped):
        return None
    return GroupedRows(joined_weights([part.weight for part in grouped]), grouped[0].order)


def _product(experts: Sequence[GroupedRows | None], bias: Tensor | None, dtype: torch.dtype) -> SortedLinear | None:
    grouped = [own for own in experts if own is not None]
    if len(grouped) < len(experts) or any(own.kind != grouped[0].kind for own in grouped):
        return None
    weight = joined_weights([own.weight for own in grouped], torch.stack)
    orders = None
    if any(own.order is not None for own in grouped):
        as_they_come = torch.arange(weight.in_width, device=weight.words.device)
        orders = torch.stack([as_they_come if own.order is None else own.order for own in grouped])
    return SortedLinear(weight, orders, bias, dtype=dtype)


def _grouped(rows: Rows) -> GroupedRows | None:
    if isinstance(rows, GroupedRows):
        return rows
    if not isinstance(rows, Float8Rows):
        return None
    width = rows.rows.shape[1]
    group = next((size for size in reversed(GROUPS) if width % size == 0), None)
    if group is None:
        return None
    scales = rows.scales.float()[:, None].expand(-1, width // group)
    return GroupedRows(GroupedWeight(Numbers.FLOAT8, rows.rows.view(torch.uint8), scales, None))
