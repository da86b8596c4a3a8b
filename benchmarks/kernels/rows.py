"""Kernel cases on rows: norms, heads, gates, sampling."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.cases import TORCH, TRITON, KernelCase, KernelSetup
from kernels.activation import gated, rms_norm
from kernels.rotary import rotate_
from kernels.sampling import Filters, RowParameters, greedy, sample

_ROWS, _TOY_ROWS = (64, 4096), (2,)  # of a decode batch and of a prompt
_SAMPLED_ROWS, _TOY_SAMPLED_ROWS = 64, 2
_SAMPLED_VOCABULARY = 128256
_PARAMETERS = {"greedy": (0.0, 0, 1.0), "top-p 0.9": (1.0, 0, 0.9), "top-k 50": (1.0, 50, 1.0)}
_ACTIVATION = "silu"


def row_cases(setup: KernelSetup) -> Iterator[list[KernelCase]]:
    for count in _TOY_ROWS if setup.is_toy else _ROWS:
        for group in (_norms, _heads, _gates):
            yield list(group(setup, count))
    for name in _PARAMETERS:
        yield list(_sampling(setup, name))


def _norms(setup: KernelSetup, count: int) -> Iterator[KernelCase]:
    width, eps = setup.config.hidden_size, setup.config.norm_eps
    weight = torch.ones(width, dtype=setup.dtype, device=setup.device)
    x, residual = setup.randn(count, width), setup.randn(count, width)
    kernels, num_bytes = setup.kernels("row_norm"), 4 * count * width * setup.dtype.itemsize
    kernel_case = partial(KernelCase, "residual and norm", f"{count} x {width}", num_bytes=num_bytes)
    yield kernel_case(TORCH, lambda: rms_norm(residual.add_(x), weight, eps))
    if kernels is not None:
        norm = kernels.RowNorm(weight, None, eps, is_rms=True)
        yield kernel_case(TRITON, lambda: norm(x, residual))


def _heads(setup: KernelSetup, count: int) -> Iterator[KernelCase]:
    config, kernels = setup.config, setup.kernels("head_placement")
    num_heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    first_value, all_heads = num_heads + kv_heads, num_heads + 2 * kv_heads
    fused, slots = setup.randn(count, all_heads * head_dim), torch.randperm(count, device=setup.device)
    keys, values = (setup.randn(count, config.kv_width) for _ in range(2))
    cos, sin = setup.angles(count)
    rounded = (cos.to(setup.dtype), sin.to(setup.dtype))

    def plain() -> None:
        heads = fused.view(count, all_heads, head_dim)
        rotate_(heads[:, :first_value], *rounded)
        keys.index_copy_(0, slots, heads[:, num_heads:first_value].flatten(1))
        values.index_copy_(0, slots, heads[:, first_value:].flatten(1))

    # Queries and keys are changed in place, values read; keys and values are written to the cache.
    num_elements = count * head_dim * (2 * first_value + 3 * kv_heads)
    kernel_case = partial(KernelCase, "heads placed", f"{count} tokens", num_bytes=num_elements * setup.dtype.itemsize)
    yield kernel_case(TORCH, plain)
    if kernels is not None:
        place = kernels.HeadRowsKernel(num_heads, kv_heads, head_dim)
        yield kernel_case(TRITON, lambda: place(fused, None, (cos, sin), slots, keys, values))


def _gates(setup: KernelSetup, count: int) -> Iterator[KernelCase]:
    width, kernels = setup.config.intermediate_size, setup.kernels("gating")
    x = setup.randn(count, 2 * width)
    kernel_case = partial(KernelCase, "gates", f"{count} x {width}", num_bytes=3 * count * width * setup.dtype.itemsize)
    yield kernel_case(TORCH, lambda: gated(x, _ACTIVATION))
    if kernels is not None:
        gates = kernels.Gates(_ACTIVATION)
        yield kernel_case(TRITON, lambda: gates(x))


def _sampling(setup: KernelSetup, name: str) -> Iterator[KernelCase]:
    kernels = setup.kernels("token_sampling")
    rows = _TOY_SAMPLED_ROWS if setup.is_toy else _SAMPLED_ROWS
    vocabulary = setup.config.vocab_size if setup.is_toy else _SAMPLED_VOCABULARY
    logits = torch.randn(rows, vocabulary, device=setup.device) * 3.0
    parameters = _parameters(setup.device, rows, *_PARAMETERS[name])
    filters = Filters(parameters.top_k, parameters.top_p, parameters.min_p)
    plain: Callable[[], tuple[Tensor, Tensor]] = partial(sample, logits, filters, parameters.draws)
    if name == "greedy":
        plain = partial(greedy, logits)
    case, num_bytes = f"{name}, {rows} x {vocabulary}", 4 * logits.numel()
    kernel_case = partial(KernelCase, "sampling", case, num_bytes=num_bytes, is_copy=False)
    yield kernel_case(TORCH, plain)
    if kernels is not None:
        yield kernel_case(TRITON, lambda: kernels.sample_tokens(logits, parameters))


def _parameters(device: torch.device, rows: int, temperature: float, top_k: int, top_p: float) -> RowParameters:
    return RowParameters(
        temperatures=torch.full((rows,), temperature, device=device),
        top_k=torch.full((rows,), top_k, device=device),
        top_p=torch.full((rows,), top_p, device=device),
        min_p=torch.zeros(rows, device=device),
        draws=torch.rand(rows, dtype=torch.float64, device=device),
    )
