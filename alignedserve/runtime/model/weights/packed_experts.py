"""Mixtures of experts whose weights stay packed as their file has them, on a GPU."""

from collections.abc import Sequence

import torch

from alignedserve.runtime.model.weights.packed_products import Float8Rows, GroupedRows, Rows, are_alike
from kernels.activation import Gated
from kernels.feed_forward import Router
from kernels.narrow.grouped_linear import GROUPS, GroupedWeight, Numbers, SortedLinear, joined_weights
from kernels.sorted_experts import SortedExperts


def grouped_experts(
    router: Router,
    experts: Sequence[tuple[Sequence[Rows], Rows]],
    activation: str,
    dtype: torch.dtype,
) -> SortedExperts | None:
    """Return the mixture of experts, each the parts of its first product, gates first, and its second one; None: their
    forms differ, or are not for this."""
    products = [
        _products([list(parts) for parts, _ in experts], dtype),
        _products([[last] for _, last in experts], dtype),
    ]
    gate_up, down = ([own for own in part if own is not None] for part in products)
    if len(gate_up) < len(products[0]) or len(down) < len(products[1]):
        return None
    return SortedExperts(router, gate_up, down[0], Gated(activation, dtype, experts[0][1].rows.device))


def _products(experts: Sequence[Sequence[Rows]], dtype: torch.dtype) -> list[SortedLinear | None]:
    """Return one product of all experts for each part, or one for all parts where each expert's are alike."""
    parts = [[_grouped(part) for part in own] for own in experts]
    joined = [_joined(own) for own in parts]
    if all(own is not None for own in joined):
        return [_product(joined, dtype)]
    return [_product(list(own), dtype) for own in zip(*parts, strict=True)]


def _joined(parts: Sequence[GroupedRows | None]) -> GroupedRows | None:
    """Return the parts of an expert as one; None: they differ."""
    grouped = [part for part in parts if part is not None]
    if len(grouped) < len(parts) or not are_alike(grouped):
        return None
    return GroupedRows(joined_weights([part.weight for part in grouped]), grouped[0].order)


def _product(experts: Sequence[GroupedRows | None], dtype: torch.dtype) -> SortedLinear | None:
    grouped = [own for own in experts if own is not None]
    if len(grouped) < len(experts) or any(own.kind != grouped[0].kind for own in grouped):
        return None
    weight = joined_weights([own.weight for own in grouped], torch.stack)
    orders = None
    if any(own.order is not None for own in grouped):
        as_they_come = torch.arange(weight.in_width, device=weight.words.device)
        orders = torch.stack([as_they_come if own.order is None else own.order for own in grouped])
    return SortedLinear(weight, orders, dtype=dtype)


def _grouped(rows: Rows) -> GroupedRows | None:
    """Return a weight in groups; None: it cannot be."""
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
