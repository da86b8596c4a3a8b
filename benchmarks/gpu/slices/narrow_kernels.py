"""Kernels over narrow numbers: products with every form of weights that checkpoints have, by tilings for the table
`kernels.gpu.grouped_weights.TILINGS` too, and decodes over a cache of FP8, each against the model's dtype."""

from collections.abc import Iterator
from functools import partial
from itertools import count, product

import torch
from torch import Tensor
from torch.nn import functional

from alignedserve.core.block_layout import FP8, BlockLayout
from alignedserve.runtime.device.dtypes import dtype_name
from alignedserve.runtime.kv.block_storage import BlockStorage
from benchmarks.kernels.attention import DECODE, Groups, name_of
from benchmarks.kernels.attention_batches import attention_batch, num_blocks_of
from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup
from kernels.float8_linear import Float8Linear, has_float8_products
from kernels.gpu_dispatch import fused_kernels
from kernels.grouped_linear import (
    DeviceWeight,
    ExpertWeights,
    GroupedLinear,
    Numbers,
    SortedLinear,
    StackedProduct,
    random_weight,
    rows_by_expert,
)

_ROWS, _TOY_ROWS = (1, 16, 64, 256, 4096), (3,)
_SWEPT_ROWS = (1, 16, 32, 64, 128, 256)
_CHOICES = tuple(product((16, 32, 64, 128), (64, 128), (4, 8), (3, 4)))
_TOY_CHOICES = ((16, 64, 4, 3), (32, 32, 4, 2))
_FORMS = (Numbers.INT4, Numbers.FLOAT8)
_EXPERTS, _CHOSEN = 8, 2
_LAYERS, _BLOCK_SIZE = 2, 16
_BATCHES: tuple[Groups, ...] = (((64, 4096),), ((60, 256), (4, 16384)))
_TOY_BATCHES: tuple[Groups, ...] = (((3, 40),),)
_AS_SERVED = "as served"
_PRODUCT, _MIXTURE = "product", "product of experts"


def product_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group for each number of rows: of one product, then of one of a mixture of experts."""
    config, device = setup.config, setup.device
    columns, width = 2 * config.intermediate_size, config.hidden_size
    plain = setup.randn(columns, width)
    grouped = {form: GroupedLinear(random_weight(form, device, columns, width), dtype=setup.dtype) for form in Numbers}
    for num_rows in _TOY_ROWS if setup.is_toy else _ROWS:
        x = setup.randn(num_rows, width)
        case = partial(
            KernelCase,
            num_operations=2 * num_rows * columns * width,
            is_copy=False,
            case=f"{num_rows} x {width} x {columns}",
        )
        cases = [case(_PRODUCT, by=TORCH, run=partial(functional.linear, x, plain), num_bytes=plain.nbytes)]
        if has_float8_products(device):
            cases.append(_by_scaled_mm(setup, x, plain, case))
        if setup.runs_triton:
            cases += [
                case(_PRODUCT, by=f"{TRITON}, {form.value}", run=partial(linear, x), num_bytes=_row_bytes(form, plain))
                for form, linear in grouped.items()
            ]
        yield cases
    yield from _mixture_cases(setup)


def _by_scaled_mm(setup: KernelSetup, x: Tensor, plain: Tensor, case: "partial[KernelCase]") -> KernelCase:
    scales = torch.ones(len(plain), device=setup.device)
    linear = Float8Linear(plain.to(torch.float8_e4m3fn), scales, dtype=setup.dtype)
    return case(_PRODUCT, by="torch._scaled_mm, FP8", run=partial(linear, x), num_bytes=plain.numel())


def _row_bytes(form: Numbers, plain: Tensor) -> int:
    return form.num_bytes(plain.numel())


def _mixture_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    if not setup.runs_triton:
        return
    columns, width = setup.config.intermediate_size, setup.config.hidden_size
    plain = setup.randn(_EXPERTS, columns, width)
    stacked, kernels = StackedProduct(ExpertWeights(plain)), fused_kernels("stacked_weights", setup.device, setup.dtype)
    forms = {form: SortedLinear(random_weight(form, setup.device, *plain.shape), dtype=setup.dtype) for form in Numbers}
    for num_rows in _TOY_ROWS if setup.is_toy else _ROWS:
        experts = torch.rand(num_rows, _EXPERTS, device=setup.device).argsort(1)[:, :_CHOSEN]
        rows = rows_by_expert(experts, _EXPERTS)
        x = setup.randn(num_rows * _CHOSEN, width)
        case = partial(
            KernelCase,
            _MIXTURE,
            f"{num_rows} rows x {_CHOSEN} of {_EXPERTS} experts",
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
                case(f"{TRITON}, {form.value}", partial(linear, x, rows), num_bytes=_row_bytes(form, plain))
                for form, linear in forms.items()
            ),
        ]


def tiling_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group for each form, shape of an 8B layer's products and number of rows: every tiling of about as many
    rows, and the product with the weight unpacked first, as it is of more rows."""
    kernels = setup.kernels("grouped_weights")
    if kernels is None:
        return
    config = setup.config
    shapes = (
        ("gate and up", 2 * config.intermediate_size, config.hidden_size),
        ("down", config.hidden_size, config.intermediate_size),
    )
    for form, (name, columns, width), num_rows in product(_FORMS, shapes, _TOY_ROWS if setup.is_toy else _SWEPT_ROWS):
        stored, x = random_weight(form, setup.device, columns, width), setup.randn(num_rows, width)
        weight, unpacked = DeviceWeight(stored, setup.dtype), GroupedLinear(stored, dtype=setup.dtype)
        case = partial(
            KernelCase,
            f"product, {form.value}",
            f"{num_rows} rows, {name}",
            num_bytes=stored.words.nbytes,
            num_operations=2 * num_rows * columns * width,
            is_copy=False,
        )
        choices = [kernels.Tiling(*sizes) for sizes in (_TOY_CHOICES if setup.is_toy else _CHOICES)]
        yield [
            case(
                f"{TRITON}, {tiling.rows} x {tiling.columns}, {tiling.num_warps} warps, {tiling.num_stages} stages", run
            )
            for tiling in choices
            if num_rows <= 2 * tiling.rows and tiling.rows <= max(2 * num_rows, 16)
            for run in [partial(kernels.multiply, x, weight, tiling=tiling)]
        ] + [case(TORCH + ", unpacked first", partial(_unpacked_first, unpacked, x))]


def _unpacked_first(linear: GroupedLinear, x: Tensor) -> Tensor:
    return functional.linear(x, linear.unpacked())


def cache_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    """Yield a group per batch: over a cache of the model's dtype and over one of FP8, as an engine computes them."""
    if not setup.runs_triton:
        return
    for groups in _TOY_BATCHES if setup.is_toy else _BATCHES:
        yield [_decodes(setup, groups, cache) for cache in (dtype_name(setup.dtype), FP8)]


def _decodes(setup: KernelSetup, groups: Groups, cache: str) -> KernelCase:
    config = setup.config
    lengths = [length for number, length in groups for _ in range(number)]
    layout = BlockLayout(_BLOCK_SIZE, _LAYERS, config.num_kv_heads, config.head_dim, cache)
    storage = BlockStorage(layout, num_blocks_of(lengths, _BLOCK_SIZE), setup.device, has_scratch=True)
    storage.bytes.fill_(0x31)  # a small number in every dtype
    batch = attention_batch(storage, lengths, 1)
    step = batch.decodes(batch.planners(config)[TRITON])
    queries = setup.randn(len(lengths), config.num_kv_heads, config.group_size, config.head_dim)
    out, calls = torch.empty_like(queries), count()
    num_bytes = sum(lengths) * layout.token_bytes // _LAYERS

    def run() -> None:
        step.decode(queries, out, next(calls) % _LAYERS, False)

    by = f"{TRITON}, cache of {cache}"
    return KernelCase(f"{DECODE} over caches", name_of(groups), by, run, num_bytes, is_copy=False)
