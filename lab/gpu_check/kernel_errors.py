"""Each kernel on a device against the same in float64 on the CPU: the largest error, by the largest result."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.activation import Gated, RmsNorm
from kernels.addend_layout import LayerProduct, ProductShape, site_of
from kernels.block_digests import row_digests
from kernels.cache_blocks import gather_blocks, scatter_blocks
from kernels.cache_rows import dequantise_float8_rows, quantise_float8_rows
from kernels.cpu.lora import LoraModule
from kernels.float8_linear import float8_inputs, rounded_inputs
from kernels.gpu_dispatch import launch_failures
from kernels.grouped_linear import (
    ExpertRows,
    ExpertWeights,
    GroupedLinear,
    Numbers,
    SortedLinear,
    StackedProduct,
    random_weight,
    rows_by_expert,
)
from kernels.linear import Linear
from kernels.lora import GRAPH_ROWS, AdapterMatrices, AdapterRows
from kernels.rotary import HeadPlacement
from kernels.sampling import Filters, RowParameters, sample

DTYPES = (torch.bfloat16, torch.float32)
# Of the largest result: some roundings of inputs, of weights of softmax and of the result.
_LIMITS = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-15}
_CPU = torch.device("cpu")
_KV_HEADS, _GROUP, _HEAD_DIM, _BLOCK_SIZE = 2, 4, 128, 16
_LENGTHS, _CHUNKS = (1, 17, 129, 300), (1, 9, 129, 70)


class Found(NamedTuple):
    """How far one kernel is off. Every field is plain JSON."""

    kernel: str
    dtype: str
    error: float  # of the largest result
    limit: float

    @property
    def is_right(self) -> bool:
        """Return whether the error can be explained by rounding; what is not a number is not."""
        return self.error <= self.limit


def kernel_errors(device: torch.device, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[Found]:
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        for kernel, compute in _CASES.items():
            torch.manual_seed(1)
            yield Found(kernel, name, compute(device, dtype), _LIMITS[dtype])
    for kernel, differs in _EXACT.items():
        torch.manual_seed(1)
        yield Found(kernel, "bytes", float(differs(device)), 0.0)


def replaced_kernels() -> list[str]:
    return [f"{name}: {reason}" for name, reason in launch_failures().items()]


def _off(result: Tensor, expected: Tensor) -> float:
    return float((result.double().cpu() - expected).abs().max() / expected.abs().max())


def _norm(device: torch.device, dtype: torch.dtype) -> float:
    x, weight = torch.randn(7, 1000).to(dtype), torch.randn(1000).to(dtype)
    result = RmsNorm(weight.to(device), 1e-5)(x.to(device))
    wide = x.double()
    return _off(result, wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())


def _gate(device: torch.device, dtype: torch.dtype) -> float:
    x = torch.randn(5, 2 * 1300).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    return _off(Gated("silu", dtype, device)(x.to(device)), gate * gate.sigmoid() * up)


def _placement(device: torch.device, dtype: torch.dtype) -> float:
    count, heads = 6, _KV_HEADS * (_GROUP + 2)
    fused = torch.randn(count, heads * _HEAD_DIM).to(dtype)
    head_placement = HeadPlacement(_KV_HEADS * _GROUP, _KV_HEADS, _HEAD_DIM, dtype, device)
    angles = torch.rand(count, 1, _HEAD_DIM // 2) * 6
    rotation = tuple(part.to(device, head_placement.angle_dtype) for part in (angles.cos(), angles.sin()))
    cached = torch.zeros((2, 20, _KV_HEADS * _HEAD_DIM), dtype=dtype, device=device)
    slots, there = torch.randperm(20)[:count], fused.clone().to(device)
    head_placement(there, None, (rotation[0], rotation[1]), slots.to(device), cached[0], cached[1])
    halves = fused.double().view(count, heads, 2, _HEAD_DIM // 2)
    first, other = halves[:, :, 0], halves[:, :, 1]
    cos, sin = angles.double().cos(), angles.double().sin()
    rotated = torch.stack((first * cos - other * sin, other * cos + first * sin), dim=2)
    expected = torch.cat((rotated[:, :-_KV_HEADS], halves[:, -_KV_HEADS:]), dim=1).flatten(1)
    keys, values = (cache[slots.to(device)] for cache in cached)
    width = _KV_HEADS * _HEAD_DIM
    return max(_off(there, expected), _off(torch.cat((keys, values), 1), expected[:, -2 * width :]))


class _Contexts:
    def __init__(self, device: torch.device, dtype: torch.dtype, *, is_float8: bool) -> None:
        from kernels.gpu.blocks import BlockTables, BlockView

        widths = [-(-length // _BLOCK_SIZE) for length in _LENGTHS]
        order, heads = np.random.default_rng(1).permutation(sum(widths)).astype(np.int32), (_KV_HEADS, _HEAD_DIM)
        shape = (sum(widths), 1, 2, _BLOCK_SIZE)
        blocks = torch.full((*shape, _KV_HEADS * (_HEAD_DIM + 4)), 255, dtype=torch.uint8)
        if not is_float8:
            blocks = torch.full((*shape, *heads), float("nan"), dtype=dtype)
        starts = np.cumsum(widths) - widths
        self.cached: list[tuple[Tensor, Tensor]] = []
        for start, length in zip(starts.tolist(), _LENGTHS, strict=True):
            tokens, pair = np.arange(length), []
            places = torch.from_numpy(order[start + tokens // _BLOCK_SIZE].astype(np.int64))
            for index in range(2):
                rows = torch.randn(length, *heads).to(dtype)
                stored = quantise_float8_rows(rows) if is_float8 else rows
                blocks[places, 0, index, torch.from_numpy(tokens % _BLOCK_SIZE)] = stored
                pair.append(_as_cached(stored) if is_float8 else rows)
            self.cached.append((pair[0].double(), pair[1].double()))
        arrays = (order, starts.astype(np.int32), np.zeros(len(_LENGTHS), np.int8))
        self.view = BlockView(blocks.to(device), 0)
        self.tables = BlockTables(*(torch.from_numpy(array).to(device) for array in arrays))


def _as_cached(rows: Tensor) -> Tensor:
    out = torch.empty((len(rows), _KV_HEADS * _HEAD_DIM))
    return dequantise_float8_rows(rows, _KV_HEADS, out).view(len(rows), _KV_HEADS, _HEAD_DIM)


def _attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    count, length = len(queries), len(keys)
    scores = torch.einsum("qhgd,khd->hgqk", queries.double(), keys) / math.sqrt(_HEAD_DIM)
    is_later = torch.arange(length)[None, :] > torch.arange(length - count, length)[:, None]
    return torch.einsum("hgqk,khd->qhgd", scores.masked_fill(is_later, -math.inf).softmax(-1), values)


def _decode(device: torch.device, dtype: torch.dtype, *, is_float8: bool = False) -> float:
    from kernels.gpu.attention.decode_attention import TILE, decode_batch, paged_decode
    from kernels.gpu.attention.work_partition import partition

    there = _Contexts(device, dtype, is_float8=is_float8)
    queries = torch.randn(len(_LENGTHS), _KV_HEADS, _GROUP, _HEAD_DIM).to(dtype)
    placed_queries, lengths = queries.to(device), np.array(_LENGTHS)
    parts = partition(lengths, tile=TILE, num_programs=7, window=None)
    arrays = [torch.from_numpy(array).to(device) for array in (lengths.astype(np.int32), *parts)]
    out = torch.full_like(placed_queries, math.nan)
    batch = decode_batch(there.tables, arrays[0], arrays[1:], (_KV_HEADS, _GROUP, _HEAD_DIM))
    paged_decode(placed_queries, out, there.view, batch)
    return _off(out, torch.cat([_attended(queries[row][None], *pair) for row, pair in enumerate(there.cached)]))


def _prefill(device: torch.device, dtype: torch.dtype, *, is_float8: bool = False) -> float:
    from kernels.gpu.attention.prefill_attention import ChunkBatch, chunk_tiles, paged_prefill, tiling
    from kernels.gpu.launching import program_shared_bytes

    there = _Contexts(device, dtype, is_float8=is_float8)
    queries = torch.randn(sum(_CHUNKS), _KV_HEADS, _GROUP, _HEAD_DIM).to(dtype)
    sizes = tiling(_HEAD_DIM, there.view.blocks.dtype, program_shared_bytes(device))
    tiles = chunk_tiles(np.array(_LENGTHS), np.array(_CHUNKS), group=_GROUP, query_rows=sizes.query_rows)
    placed_queries = queries.to(device)
    out = torch.full_like(placed_queries, math.nan)
    batch = ChunkBatch(there.tables, [torch.from_numpy(array).to(device) for array in tiles])
    paged_prefill(placed_queries, out, there.view, batch)
    chunks = zip(torch.split(queries, list(_CHUNKS)), there.cached, strict=True)
    return _off(out, torch.cat([_attended(chunk, *pair) for chunk, pair in chunks]))


def _decode_float8(device: torch.device, dtype: torch.dtype) -> float:
    return _decode(device, dtype, is_float8=True)


def _prefill_float8(device: torch.device, dtype: torch.dtype) -> float:
    return _prefill(device, dtype, is_float8=True)


def _grouped(numbers: Numbers) -> Callable[[torch.device, torch.dtype], float]:
    def compute(device: torch.device, dtype: torch.dtype) -> float:
        weight, x = random_weight(numbers, _CPU, 80, 192), torch.randn(37, 192).to(dtype)
        result = GroupedLinear(weight.changed(lambda part: part.to(device)), dtype=dtype)(x.to(device))
        return _off(result, x.double() @ weight.unpacked(torch.float64).mT)

    return compute


def _expert_rows(device: torch.device) -> tuple[ExpertRows, Tensor]:
    rows = rows_by_expert(torch.randint(0, 5, (20, 2)), 5)
    return ExpertRows(*(part.to(device) for part in rows)), rows.experts


def _sorted(device: torch.device, dtype: torch.dtype) -> float:
    weight, x = random_weight(Numbers.INT4, _CPU, 5, 80, 192), torch.randn(40, 192).to(dtype)
    rows, experts = _expert_rows(device)
    result = SortedLinear(weight.changed(lambda part: part.to(device)), dtype=dtype)(x.to(device), rows)
    return _off(result, torch.einsum("ri,roi->ro", x.double(), weight.unpacked(torch.float64)[experts]))


def _stacked(device: torch.device, dtype: torch.dtype) -> float:
    weight, x = torch.randn(5, 96, 128).to(dtype), torch.randn(40, 128).to(dtype)
    rows, experts = _expert_rows(device)
    result = StackedProduct(ExpertWeights(weight.to(device)))(x.to(device), rows)
    return _off(result, torch.einsum("ri,roi->ro", x.double(), weight.double()[experts]))


_PARTS = (96, 32, 48)  # of queries, keys and values
_PRODUCTS = (ProductShape(1100, sum(_PARTS)), ProductShape(96, 64), ProductShape(64, 80, is_gated=True))


def _adapted(num_rows: int) -> Callable[[torch.device, torch.dtype], float]:
    def compute(device: torch.device, dtype: torch.dtype) -> float:
        of_row = np.random.default_rng(1).integers(-1, 3, num_rows)
        adapters = [AdapterMatrices((*_PRODUCTS, _PRODUCTS[1]), 1, dtype, device) for _ in range(3)]
        expected: list[tuple[LayerProduct, Tensor, Tensor, Tensor]] = []
        for product, parts in ((LayerProduct.QKV, _PARTS), (LayerProduct.GATE_UP, (80, 80))):
            x = torch.randn(num_rows, _PRODUCTS[product].in_width).to(dtype)
            weight = torch.randn(sum(parts), x.shape[1]).to(dtype)
            results = x.double() @ weight.double().mT
            for index, adapter in enumerate(adapters):
                modules, is_of = _modules(parts, x.shape[1], rank=3 + 15 * index), torch.from_numpy(of_row == index)
                adapter.set(site_of(0, product), modules)
                pairs = [module.matrices for module in modules if module.matrices is not None]
                results[is_of] += x[is_of].double() @ torch.cat([b.double() @ a.double() for a, b in pairs]).mT
            expected.append((product, x, weight, results))
        rows, worst = AdapterRows(adapters, of_row, device), 0.0
        for product, x, weight, results in expected:
            multiply = Linear(weight.to(device), allow_packing=False)
            worst = max(worst, _off(rows.product(site_of(0, product), multiply, x.to(device)), results))
        return worst

    return compute


def _modules(parts: Sequence[int], in_width: int, rank: int) -> list[LoraModule]:
    firsts = np.cumsum(parts) - parts
    return [
        LoraModule(int(first), columns, (torch.randn(rank, in_width) / 8, torch.randn(columns, rank) / 8))
        for first, columns in zip(firsts, parts, strict=True)
    ]


def _shares(device: torch.device, dtype: torch.dtype) -> float:
    from kernels.gpu.expert_rows import add_up, choose

    logits, results = torch.randn(70, 128), torch.randn(70 * 8, 1300).to(dtype)
    expected, experts = logits.double().softmax(-1).topk(8)
    expected /= expected.sum(-1, keepdim=True)
    _, shares = choose(logits.to(device), 8, normalises=True)
    rows = rows_by_expert(experts, 128)
    out = add_up(results.to(device), rows.places.int().to(device), expected.float().to(device))
    sums = (results[rows.places.flatten()].double().view(70, 8, -1) * expected[..., None]).sum(1)
    return max(_off(shares, expected), _off(out, sums))


def _routes_differ(device: torch.device) -> int:
    from kernels.gpu.expert_rows import choose, sort

    logits = torch.randn(150, 20)
    experts, _ = choose(logits.to(device), 8, normalises=False)
    expected = rows_by_expert(logits.topk(8).indices, 20)
    order = sort(experts, 20)
    num_others = int((experts.cpu() != logits.topk(8).indices).sum())
    return num_others + sum(int((a.cpu() != b).sum()) for a, b in zip(order, expected, strict=True))


def _samples_differ(device: torch.device) -> int:
    logits = torch.randn(64, 3000) * 3
    filters = Filters(torch.tensor([0, 0, 20, 0] * 16), torch.tensor([1.0, 0.9] * 32), torch.tensor([0.0] * 64))
    temperatures, draws = torch.tensor([1.0, 0.7, 1.3, 0.9] * 16), torch.rand(64, dtype=torch.float64)
    expected, _ = sample(logits / temperatures[:, None], filters, draws)
    columns = RowParameters(temperatures, *filters, draws)
    tensor = _sample(logits.to(device), [column.to(device) for column in columns])
    greedy = _sample(logits.to(device), [torch.zeros_like(columns[0]).to(device), *(c.to(device) for c in columns[1:])])
    return int((tensor.cpu() != expected).sum() + (greedy.cpu() != logits.argmax(-1)).sum())


def _sample(logits: Tensor, columns: list[Tensor]) -> Tensor:
    from kernels.gpu.token_sampling import sample_tokens

    return sample_tokens(logits, columns)[0]


def _copies_differ(device: torch.device) -> int:
    blocks, ids = torch.randint(0, 256, (9, 5 * 4096), dtype=torch.uint8), torch.tensor([4, 0, 7])
    there, rows = blocks.to(device), torch.zeros((3, blocks.shape[1]), dtype=torch.uint8, device=device)
    gather_blocks(there, ids.to(device), rows)
    back = torch.zeros_like(there)
    scatter_blocks(rows, back, ids.to(device))
    return int((rows.cpu() != blocks[ids]).sum() + (back.cpu()[ids] != blocks[ids]).sum())


def _digests_differ(device: torch.device) -> int:
    rows = torch.randint(0, 256, (3, 4096), dtype=torch.uint8)
    changed = rows.clone()
    changed[1, 77] ^= 1
    sums, other = row_digests(rows.to(device)).cpu(), row_digests(changed.to(device)).cpu()
    return int((sums != row_digests(rows)).sum()) + int(((sums != other) != torch.tensor([False, True, False])).sum())


def _inputs_differ(device: torch.device) -> int:
    x = torch.randn(9, 512).bfloat16()
    there, here = float8_inputs(x.to(device)), rounded_inputs(x)
    return sum(int((a.cpu().float() != b.float()).sum()) for a, b in zip(there, here, strict=True))


_CASES: dict[str, Callable[[torch.device, torch.dtype], float]] = {
    "norm": _norm,
    "gate": _gate,
    "rotation and placement": _placement,
    "decode attention": _decode,
    "prompt attention": _prefill,
    "decode attention, FP8 cache": _decode_float8,
    "prompt attention, FP8 cache": _prefill_float8,
    "products of 4 bits": _grouped(Numbers.INT4),
    "products of 8 bits": _grouped(Numbers.INT8),
    "products of FP8 in groups": _grouped(Numbers.FLOAT8),
    "products of MXFP4": _grouped(Numbers.MXFP4),
    "products of NVFP4": _grouped(Numbers.NVFP4),
    "experts of 4 bits": _sorted,
    "experts": _stacked,
    "shares of experts": _shares,
    "adapters": _adapted(40),
    "adapters, a long prompt": _adapted(GRAPH_ROWS + 50),
}
_EXACT: dict[str, Callable[[torch.device], Any]] = {
    "drawn tokens": _samples_differ,
    "copies of blocks": _copies_differ,
    "digests of blocks": _digests_differ,
    "inputs rounded to FP8": _inputs_differ,
    "choices of experts": _routes_differ,
}
