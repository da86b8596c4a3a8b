"""What LoRA adapters add to a decode step's products: rows of many adapters, by our kernels and one after another."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup
from kernels.addend_layout import LayerProduct, ProductShape, site_of
from kernels.cpu.lora import LoraModule
from kernels.linear import Linear
from kernels.lora import AdapterMatrices, AdapterRows

_SIZES, _TOY_SIZES = ((1, 1, 16), (64, 1, 16), (64, 8, 16), (64, 64, 16), (64, 8, 64), (256, 32, 16)), ((4, 2, 3),)
_SITE = site_of(0, LayerProduct.QKV)


def adapter_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group for each number of rows, adapters and ranks: the product alone, then what adds to it."""
    config = setup.config
    shapes = [ProductShape(config.hidden_size, config.query_width + 2 * config.kv_width)] * len(LayerProduct)
    weight = setup.randn(shapes[0].out_width, shapes[0].in_width)
    multiply = Linear(weight, allow_packing=False)
    for num_rows, num_adapters, rank in _TOY_SIZES if setup.is_toy else _SIZES:
        modules = [_module(shapes[0], rank) for _ in range(num_adapters)]
        of_row = np.arange(num_rows) % num_adapters
        x = setup.randn(num_rows, config.hidden_size)
        added = 2 * num_adapters * rank * (shapes[0].in_width + shapes[0].out_width)
        case = partial(
            KernelCase,
            "adapters",
            f"{num_rows} rows, {num_adapters} adapters of rank {rank}",
            is_copy=False,
            num_operations=2 * num_rows * weight.numel(),
        )
        group = [
            case(f"{TORCH}, without", partial(multiply, x), num_bytes=weight.nbytes),
            case(TORCH, _one_by_one(setup, multiply, x, modules, of_row), num_bytes=weight.nbytes + added),
        ]
        if setup.runs_triton:
            run = _together(setup, multiply, x, modules, of_row, shapes)
            group.append(case(TRITON, run, num_bytes=weight.nbytes + added))
        yield group


def _module(shape: ProductShape, rank: int) -> LoraModule:
    return LoraModule(0, shape.out_width, (torch.randn(rank, shape.in_width), torch.randn(shape.out_width, rank)))


def _together(
    setup: KernelSetup,
    multiply: Linear,
    x: Tensor,
    modules: list[LoraModule],
    of_row: np.ndarray[tuple[int], np.dtype[np.int64]],
    shapes: list[ProductShape],
) -> Callable[[], object]:
    adapters = []
    for module in modules:
        adapter = AdapterMatrices(shapes, 1, setup.dtype, setup.device)
        adapter.set(_SITE, [module])
        adapters.append(adapter)
    rows = AdapterRows(adapters, of_row, setup.device)
    return lambda: rows.product(_SITE, multiply, x)


def _one_by_one(
    setup: KernelSetup,
    multiply: Linear,
    x: Tensor,
    modules: list[LoraModule],
    of_row: np.ndarray[tuple[int], np.dtype[np.int64]],
) -> Callable[[], object]:
    matrices = [tuple(part.to(setup.device, setup.dtype) for part in module.matrices or ()) for module in modules]
    places = [torch.from_numpy(np.flatnonzero(of_row == index)).to(setup.device) for index in range(len(modules))]

    def run() -> object:
        product = multiply(x)
        for (a, b), own in zip(matrices, places, strict=True):
            product.index_add_(0, own, x[own] @ a.T @ b.T)
        return product

    return run
