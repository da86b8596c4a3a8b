"""What is done to blocks, as the benchmark of the kernels measures it: lists of them, 8 bits, the hidden cache."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from alignedserve.microbench.kernels.work import TORCH, TRITON, KernelBench, KernelWork
from alignedserve.runtime.device.dtypes import dtype_name
from kernels.int8_blocks import RANGE_BYTES, plain_dequantise, plain_quantise
from kernels.norm import rms_norm
from kernels.rotary import rotate_

_BLOCK_SIZE = 16
_LISTED_BYTES = 512 << 20
_TOY_BLOCKS = 3
_HIDDEN_TOKENS, _TOY_HIDDEN_TOKENS = 4096, 24


def block_works(bench: KernelBench) -> Iterator[list[KernelWork]]:
    """Groups to be measured by turns."""
    for group in (_block_lists, _int8_blocks, _hidden_cache):
        yield list(group(bench))


def _listed_blocks(bench: KernelBench) -> tuple[Tensor, Tensor]:
    """Blocks [num_blocks, runs, block_size, width], and half of them in no order."""
    config = bench.config
    shape = (2 * config.num_layers, _BLOCK_SIZE, config.kv_width)
    block_bytes = int(np.prod(shape)) * bench.dtype.itemsize
    count = _TOY_BLOCKS if bench.is_toy else max(1, _LISTED_BYTES // block_bytes)
    blocks = torch.empty((2 * count, *shape), dtype=bench.dtype, device=bench.device).normal_()
    return blocks, _in_no_order(2 * count, bench.device)[:count]


def _in_no_order(count: int, device: torch.device) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).permutation(count)).to(device)


def _block_lists(bench: KernelBench) -> Iterator[KernelWork]:
    blocks, ids = _listed_blocks(bench)
    rows = blocks.view(len(blocks), -1).view(torch.uint8)
    staging = torch.empty((len(ids), rows.shape[1]), dtype=torch.uint8, device=bench.device)
    words, staged_words = rows.view(torch.int64), staging.view(torch.int64)
    case, num_bytes = f"{len(ids)} x {rows.shape[1] / 1024:g} KiB", 2 * staging.numel()
    gather, scatter = (
        partial(KernelWork, kernel, case, num_bytes=num_bytes) for kernel in ("gather blocks", "scatter blocks")
    )
    kernels = bench.kernels("block_copies")
    yield gather(TORCH, lambda: torch.index_select(words, 0, ids, out=staged_words))
    if kernels is not None:
        yield gather(TRITON, lambda: kernels.gather_blocks(rows, ids, staging))
    yield scatter(TORCH, lambda: words.index_copy_(0, ids, staged_words))
    if kernels is not None:
        yield scatter(TRITON, lambda: kernels.scatter_blocks(staging, rows, ids))


def _int8_blocks(bench: KernelBench) -> Iterator[KernelWork]:
    kernels = bench.kernels("int8_blocks")
    blocks, ids = _listed_blocks(bench)
    _, runs, block_size, width = blocks.shape
    row_bytes = (block_size + RANGE_BYTES) * runs * width
    rows = torch.empty((len(ids), row_bytes), dtype=torch.uint8, device=bench.device)
    case = f"{len(ids)} blocks of {dtype_name(bench.dtype)}"
    num_bytes = rows.numel() + len(ids) * blocks[0].numel() * bench.dtype.itemsize
    outwards, inwards = (
        partial(KernelWork, kernel, case, num_bytes=num_bytes) for kernel in ("blocks to int8", "blocks from int8")
    )
    yield outwards(TORCH, lambda: plain_quantise(blocks, ids, rows))
    if kernels is not None:
        yield outwards(TRITON, lambda: kernels.quantise_blocks(blocks, ids, rows))
    yield inwards(TORCH, lambda: plain_dequantise(rows, blocks, ids))
    if kernels is not None:
        yield inwards(TRITON, lambda: kernels.dequantise_blocks(rows, blocks, ids))


def _hidden_cache(bench: KernelBench) -> Iterator[KernelWork]:
    """Against the steps that the kernel puts into one: gather, norm, product, rotation."""
    config, kernels = bench.config, bench.kernels("hidden_cache")
    num_tokens = _TOY_HIDDEN_TOKENS if bench.is_toy else _HIDDEN_TOKENS
    width, kv_width = config.hidden_size, config.kv_width
    num_blocks = -(-num_tokens // _BLOCK_SIZE)
    blocks, table = bench.randn(num_blocks, _BLOCK_SIZE, width), _in_no_order(num_blocks, bench.device)
    norm_weight = torch.ones(width, dtype=bench.dtype, device=bench.device)
    weight = bench.randn(2 * kv_width, width) / width**0.5
    heads = (num_tokens, config.num_kv_heads, config.head_dim)
    keys, values = (torch.empty(heads, dtype=bench.dtype, device=bench.device) for _ in range(2))
    cos, sin = bench.angles(num_tokens)
    rounded = (cos.to(bench.dtype), sin.to(bench.dtype))

    def plain() -> None:
        x = blocks.index_select(0, table).view(-1, width)[:num_tokens]
        fused = rms_norm(x, norm_weight, config.norm_eps) @ weight.T
        keys.copy_(fused[:, :kv_width].view(heads))
        values.copy_(fused[:, kv_width:].view(heads))
        rotate_(keys, *rounded)

    work = partial(
        KernelWork,
        "hidden cache",
        f"{num_tokens} tokens",
        num_bytes=bench.dtype.itemsize * (num_tokens * (width + 2 * kv_width) + weight.numel()),
        num_operations=2 * num_tokens * weight.numel(),
    )
    yield work(TORCH, plain)
    if kernels is not None:
        layer = kernels.HiddenLayer(norm_weight, None, config.norm_eps, weight, None)
        rotation = (cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous())
        yield work(TRITON, lambda: kernels.keys_and_values(layer, blocks, table, rotation, keys, values))
