"""What moves or changes rows, as the benchmark of the kernels measures it: lists of blocks, blocks of 8 bits, the
hidden cache, norms, heads, gates, sampling."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignedserve.bench.kernel_work import TORCH, TRITON, KernelBench, KernelWork
from alignedserve.runtime.dtypes import dtype_name
from kernels.activation import ACTIVATIONS, gated
from kernels.norm import rms_norm
from kernels.rotary import rotary_angles, rotate_
from kernels.sampling import Filters, greedy, sample

_BLOCK_SIZE = 16
_LISTED_BYTES = 512 << 20
_TOY_BLOCKS = 3
_ROWS = (64, 4096)  # of a decode batch and of a prompt
_TOY_ROWS = (2,)
_HIDDEN_TOKENS, _TOY_HIDDEN_TOKENS = 4096, 24
_SAMPLED_ROWS, _TOY_SAMPLED_ROWS = 64, 2
_SAMPLED_VOCABULARY = 128256
_PARAMETERS = {"greedy": (0.0, 0, 1.0), "top-p 0.9": (1.0, 0, 0.9), "top-k 50": (1.0, 50, 1.0)}
_ACTIVATION = "silu"

Group = Callable[[KernelBench], Iterator[KernelWork]]


def other_works(bench: KernelBench) -> Iterator[list[KernelWork]]:
    """Groups to be measured by turns."""
    groups: tuple[Group, ...] = (_block_lists, _int8_blocks, _hidden_cache, _norms, _heads, _gates, _sampling)
    for group in groups:
        yield list(group(bench))


def _kernels(bench: KernelBench, name: str) -> Any | None:
    """A module of kernels.gpu where it is there and runs."""
    if not bench.runs_triton or importlib.util.find_spec(f"kernels.gpu.{name}") is None:
        return None
    return importlib.import_module(f"kernels.gpu.{name}")


def _rows(bench: KernelBench) -> tuple[int, ...]:
    return _TOY_ROWS if bench.is_toy else _ROWS


# --- blocks


def _listed_blocks(bench: KernelBench) -> tuple[Tensor, Tensor]:
    """Blocks [num_blocks, runs, block_size, width], and half of them in no order."""
    config = bench.config
    shape = (2 * config.num_layers, _BLOCK_SIZE, config.kv_width)
    block_bytes = int(np.prod(shape)) * bench.dtype.itemsize
    count = _TOY_BLOCKS if bench.is_toy else max(1, _LISTED_BYTES // block_bytes)
    blocks = torch.empty((2 * count, *shape), dtype=bench.dtype, device=bench.device).normal_()
    ids = np.random.default_rng(0).permutation(2 * count)[:count]
    return blocks, torch.from_numpy(ids).to(bench.device)


def _block_lists(bench: KernelBench) -> Iterator[KernelWork]:
    blocks, ids = _listed_blocks(bench)
    rows = blocks.view(len(blocks), -1).view(torch.uint8)
    staging = torch.empty((len(ids), rows.shape[1]), dtype=torch.uint8, device=bench.device)
    words, staged_words = rows.view(torch.int64), staging.view(torch.int64)
    case, num_bytes = f"{len(ids)} x {rows.shape[1] / 1024:g} KiB", 2 * staging.numel()
    kernels = _kernels(bench, "block_copies")
    yield KernelWork(
        "gather blocks", case, TORCH, lambda: torch.index_select(words, 0, ids, out=staged_words), num_bytes
    )
    if kernels is not None:
        yield KernelWork("gather blocks", case, TRITON, lambda: kernels.gather_blocks(rows, ids, staging), num_bytes)
    yield KernelWork("scatter blocks", case, TORCH, lambda: words.index_copy_(0, ids, staged_words), num_bytes)
    if kernels is not None:
        yield KernelWork("scatter blocks", case, TRITON, lambda: kernels.scatter_blocks(staging, rows, ids), num_bytes)


def _int8_blocks(bench: KernelBench) -> Iterator[KernelWork]:
    kernels = _kernels(bench, "int8_blocks")
    if kernels is None:
        return
    blocks, ids = _listed_blocks(bench)
    shape = (len(ids), *blocks.shape[1:])
    rounded = torch.empty(shape, dtype=torch.uint8, device=bench.device)
    ranges = torch.empty((*shape[:2], 2, shape[3]), dtype=torch.float32, device=bench.device)
    case = f"{len(ids)} blocks of {dtype_name(bench.dtype)}"
    num_bytes = rounded.numel() * (1 + bench.dtype.itemsize) + 4 * ranges.numel()
    yield KernelWork(
        "blocks to 8 bits", case, TRITON, lambda: kernels.quantise_blocks(blocks, ids, rounded, ranges), num_bytes
    )
    yield KernelWork(
        "blocks from 8 bits", case, TRITON, lambda: kernels.dequantise_blocks(rounded, ranges, blocks, ids), num_bytes
    )


def _hidden_cache(bench: KernelBench) -> Iterator[KernelWork]:
    """Against the steps that it puts into one: gather, norm, product, rotation."""
    config, kernels = bench.config, _kernels(bench, "hidden_cache")
    num_tokens = _TOY_HIDDEN_TOKENS if bench.is_toy else _HIDDEN_TOKENS
    width, kv_width = config.hidden_size, config.kv_width
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    blocks = bench.randn(num_blocks, _BLOCK_SIZE, width)
    table = torch.from_numpy(np.random.default_rng(0).permutation(num_blocks)).to(bench.device)
    norm_weight = torch.ones(width, dtype=bench.dtype, device=bench.device)
    weight = bench.randn(2 * kv_width, width) / width**0.5
    heads = (num_tokens, config.num_kv_heads, config.head_dim)
    keys, values = (torch.empty(heads, dtype=bench.dtype, device=bench.device) for _ in range(2))
    cos, sin = _angles(bench, num_tokens)
    flat = (cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous())

    def plain() -> None:
        x = blocks.index_select(0, table).view(-1, width)[:num_tokens]
        fused = rms_norm(x, norm_weight, config.norm_eps) @ weight.T
        keys.copy_(fused[:, :kv_width].view(heads))
        values.copy_(fused[:, kv_width:].view(heads))
        rotate_(keys, cos.to(bench.dtype), sin.to(bench.dtype))

    num_bytes = bench.dtype.itemsize * (num_tokens * (width + 2 * kv_width) + weight.numel())
    case, num_operations = f"{num_tokens} tokens", 2 * num_tokens * weight.numel()
    yield KernelWork("hidden cache", case, TORCH, plain, num_bytes, num_operations)
    if kernels is not None:
        layer = kernels.HiddenLayer(norm_weight, None, config.norm_eps, weight, None)
        yield KernelWork(
            "hidden cache",
            case,
            TRITON,
            lambda: kernels.keys_and_values(layer, blocks, table, flat, keys, values),
            num_bytes,
            num_operations,
        )


def _angles(bench: KernelBench, num_tokens: int) -> tuple[Tensor, Tensor]:
    """cos, sin [tokens, 1, head_dim / 2] float32."""
    half = bench.config.head_dim // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=bench.device) / half)
    return rotary_angles(torch.arange(num_tokens, device=bench.device), frequencies, torch.float32)


# --- rows


def _norms(bench: KernelBench) -> Iterator[KernelWork]:
    width, eps = bench.config.hidden_size, bench.config.norm_eps
    weight = torch.ones(width, dtype=bench.dtype, device=bench.device)
    kernels = _kernels(bench, "row_norm")
    for count in _rows(bench):
        x, residual = bench.randn(count, width), bench.randn(count, width)
        num_bytes = 4 * count * width * bench.dtype.itemsize
        case = f"{count} x {width}"

        def plain(x: Tensor = x, residual: Tensor = residual) -> None:
            rms_norm(residual.add_(x), weight, eps)

        yield KernelWork("residual and norm", case, TORCH, plain, num_bytes)
        if kernels is not None:
            norm = kernels.RowNorm(weight, None, eps, is_rms=True)
            yield KernelWork("residual and norm", case, TRITON, lambda n=norm, x=x, r=residual: n(x, r), num_bytes)


def _heads(bench: KernelBench) -> Iterator[KernelWork]:
    config, kernels = bench.config, _kernels(bench, "head_placement")
    num_heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    all_heads = num_heads + 2 * kv_heads
    for count in _rows(bench):
        fused, slots = bench.randn(count, all_heads * head_dim), torch.randperm(count, device=bench.device)
        keys, values = (bench.randn(count, config.kv_width) for _ in range(2))
        rotation = _angles(bench, count)
        rounded = (rotation[0].to(bench.dtype), rotation[1].to(bench.dtype))
        # Queries and keys are changed in place, values read; keys and values are written to the cache.
        num_bytes = bench.dtype.itemsize * count * head_dim * (2 * (num_heads + kv_heads) + 3 * kv_heads)
        case = f"{count} tokens"

        def plain(
            fused: Tensor = fused,
            slots: Tensor = slots,
            rounded: tuple[Tensor, Tensor] = rounded,
            cache: tuple[Tensor, Tensor] = (keys, values),
        ) -> None:
            heads = fused.view(len(fused), all_heads, head_dim)
            rotate_(heads[:, : num_heads + kv_heads], *rounded)
            cache[0].index_copy_(0, slots, heads[:, num_heads : num_heads + kv_heads].flatten(1))
            cache[1].index_copy_(0, slots, heads[:, num_heads + kv_heads :].flatten(1))

        yield KernelWork("heads placed", case, TORCH, plain, num_bytes)
        if kernels is not None:
            place = kernels.HeadRows(num_heads, kv_heads, head_dim)
            arguments = (fused, None, rotation, slots, keys, values)
            yield KernelWork("heads placed", case, TRITON, lambda p=place, a=arguments: p(*a), num_bytes)


def _gates(bench: KernelBench) -> Iterator[KernelWork]:
    width, kernels = bench.config.intermediate_size, _kernels(bench, "gating")
    for count in _rows(bench):
        x = bench.randn(count, 2 * width)
        num_bytes, case = 3 * count * width * bench.dtype.itemsize, f"{count} x {width}"
        yield KernelWork("gates", case, TORCH, lambda x=x: gated(x, ACTIVATIONS[_ACTIVATION]), num_bytes)
        if kernels is not None:
            gates = kernels.Gates(_ACTIVATION)
            yield KernelWork("gates", case, TRITON, lambda g=gates, x=x: g(x), num_bytes)


def _sampling(bench: KernelBench) -> Iterator[KernelWork]:
    """Bytes count once, whatever an implementation reads."""
    kernels = _kernels(bench, "token_sampling")
    rows = _TOY_SAMPLED_ROWS if bench.is_toy else _SAMPLED_ROWS
    vocabulary = bench.config.vocab_size if bench.is_toy else _SAMPLED_VOCABULARY
    logits = torch.randn(rows, vocabulary, device=bench.device) * 3.0
    draws = torch.rand(rows, dtype=torch.float64, device=bench.device)
    for name, (temperature, top_k, top_p) in _PARAMETERS.items():
        columns = _columns(bench.device, rows, temperature, top_k, top_p)
        filters = Filters(*columns[1:])
        case = f"{name}, {rows} x {vocabulary}"
        plain: Callable[[], object] = lambda f=filters: sample(logits, f, draws)  # noqa: E731
        if temperature == 0.0:
            plain = lambda: greedy(logits)  # noqa: E731
        yield KernelWork("sampling", case, TORCH, plain, 4 * logits.numel(), is_copy=False)
        if kernels is not None:
            parameters = (*columns, draws)
            yield KernelWork(
                "sampling",
                case,
                TRITON,
                lambda p=parameters: kernels.sample_tokens(logits, p),
                4 * logits.numel(),
                is_copy=False,
            )


def _columns(
    device: torch.device, rows: int, temperature: float, top_k: int, top_p: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Temperatures, top_k, top_p, min_p of every row, as kernels.sampling orders them."""
    values = ((temperature, torch.float32), (top_k, torch.int64), (top_p, torch.float32), (0.0, torch.float32))
    one, two, three, four = (torch.full((rows,), value, dtype=dtype, device=device) for value, dtype in values)
    return one, two, three, four
