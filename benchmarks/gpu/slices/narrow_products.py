"""Products with narrow weights, by every form that checkpoints have, against the same product in the model's dtype."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup
from kernels.float8_linear import Float8Linear, has_float8_products
from kernels.gpu_dispatch import fused_kernels
from kernels.grouped_linear import GroupedLinear, Numbers, SortedLinear, random_weight
from kernels.sorted_experts import ExpertWeights, StackedProduct, rows_by_expert

_ROWS, _TOY_ROWS = (1, 16, 64, 256, 4096), (3,)
_EXPERTS, _CHOSEN = 8, 2
_AS_SERVED = "as served"
_PRODUCT, _MIXTURE = "product", "product of experts"


def product_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group for each number of rows: of one product, then of one of a mixture of experts."""
    config, device = setup.config, setup.device
    columns, width = 2 * config.intermediate_size, config.hidden_size
    plain = setup.randn(columns, width)
    grouped = {form: GroupedLinear(random_weight(form, device, columns, width), dtype=setup.dtype) for form in Numbers}
    for count in _TOY_ROWS if setup.is_toy else _ROWS:
        x = setup.randn(count, width)
        case = partial(
            KernelCase, num_operations=2 * count * columns * width, is_copy=False, case=f"{count} x {width} x {columns}"
        )
        cases = [case(_PRODUCT, by=TORCH, run=partial(functional.linear, x, plain), num_bytes=plain.nbytes)]
        if has_float8_products(device):
            cases.append(_by_scaled_mm(setup, x, plain, case))
        if setup.runs_triton:
            cases += [
                case(_PRODUCT, by=f"{TRITON}, {form.value}", run=partial(product, x), num_bytes=_row_bytes(form, plain))
                for form, product in grouped.items()
            ]
        yield cases
    yield from _mixture_cases(setup)


def _by_scaled_mm(setup: KernelSetup, x: Tensor, plain: Tensor, case: "partial[KernelCase]") -> KernelCase:
    scales = torch.ones(len(plain), device=setup.device)
    product = Float8Linear(plain.to(torch.float8_e4m3fn), scales, dtype=setup.dtype)
    return case(_PRODUCT, by="torch._scaled_mm, FP8", run=partial(product, x), num_bytes=plain.numel())


def _row_bytes(form: Numbers, plain: Tensor) -> int:
    return form.num_bytes(plain.numel())


def _mixture_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    if not setup.runs_triton:
        return
    columns, width = setup.config.intermediate_size, setup.config.hidden_size
    plain = setup.randn(_EXPERTS, columns, width)
    stacked, kernels = StackedProduct(ExpertWeights(plain)), fused_kernels("stacked_weights", setup.device, setup.dtype)
    forms = {form: SortedLinear(random_weight(form, setup.device, *plain.shape), dtype=setup.dtype) for form in Numbers}
    for count in _TOY_ROWS if setup.is_toy else _ROWS:
        experts = torch.rand(count, _EXPERTS, device=setup.device).argsort(1)[:, :_CHOSEN]
        rows = rows_by_expert(experts, _EXPERTS)
        x = setup.randn(count * _CHOSEN, width)
        case = partial(
            KernelCase,
            _MIXTURE,
            f"{count} rows x {_CHOSEN} of {_EXPERTS} experts",
            num_operations=2 * len(x) * columns * width,
            is_copy=False,
        )
        yield [
            case(_AS_SERVED, partial(stacked, x, rows), num_bytes=plain.nbytes),
            *(
                [case(TRITON, partial(kernels.multiply_sorted, x, plain, rows.ends), num_bytes=plain.nbytes)]
                if kernels is not None
                else []
            ),
            *(
                case(f"{TRITON}, {form.value}", partial(product, x, rows), num_bytes=_row_bytes(form, plain))
                for form, product in forms.items()
            ),
        ]
