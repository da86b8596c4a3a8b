"""Refusals of the pass through all layers; its results are compared in runtime/engine/test_native_pass.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.block_quantized_linear import BlockQuantizedLinear
from kernels.cpu.decode_pass import (
    AllowedTokens,
    CachePart,
    CacheSlots,
    DecodePass,
    HeadParts,
    HighestLogits,
    LayerParts,
    Pause,
    decode_pass_available,
)
from kernels.cpu.native import supported_levels, vector_levels
from kernels.cpu.paged_attention import PagedAttention, PagedPlan
from kernels.cpu.rows import HeadRows, NormRows, highest
from kernels.sampling import mask_tokens_
from tests.support.block_weights import random_blocks
from tests.support.marks import each

pytestmark = pytest.mark.skipif(not decode_pass_available(), reason="the native kernels are not built")

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, BLOCKS, BLOCK_SIZE = 64, 4, 2, 16, 96, 8, 4
NUM_LAYERS = 2
LAYERS = range(NUM_LAYERS)


def norm(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> NormRows:
    return NormRows(torch.ones(width, dtype=dtype), None, 1e-5, is_rms=True, level=vector_levels()[0])


def product(columns: int, width: int) -> tuple[Any, ...]:
    return BlockQuantizedLinear(random_blocks("Q8_0", columns, width), "Q8_0", width).native_parts


def layer(**changed: Any) -> LayerParts:
    qkv, output = product((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH), product(WIDTH, HEADS * HEAD_DIM)
    parts = LayerParts(norm(), qkv, output, norm(), product(INNER, WIDTH), product(WIDTH, INNER), None, False)
    return parts._replace(**changed)


def make_pass(*layers: LayerParts) -> DecodePass:
    place = HeadRows(HEADS, KV_HEADS, HEAD_DIM, torch.float32, level=vector_levels()[0])
    return DecodePass(layers, place, WIDTH, torch.float32)


class Cache(NamedTuple):
    blocks: Tensor
    slots: CacheSlots
    attention: PagedAttention

    def plan(self, num_rows: int) -> PagedPlan:
        tables = np.arange(BLOCKS, dtype=np.int64).reshape(-1, 1)
        rows = np.arange(num_rows, dtype=np.int64)
        return self.attention.plan_decode(tables, rows, np.ones(num_rows, np.int64), None, 1)


def cache_for(own: DecodePass, num_layers: int = NUM_LAYERS) -> Cache:
    blocks = torch.zeros(BLOCKS, num_layers, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    runs = [blocks.view(-1)[start:] for start in range(0, blocks[0].numel(), BLOCK_SIZE * KV_HEADS * HEAD_DIM)]
    rows = [run.view(-1, KV_HEADS * HEAD_DIM) for run in runs]
    attention = PagedAttention(blocks, group=HEADS // KV_HEADS, level=supported_levels()[0])
    return Cache(blocks, own.slots_of(rows[::2], rows[1::2]), attention)


def run(own: DecodePass, cache: Cache, slots: list[int], num_planned: int | None = None) -> Tensor:
    residual = torch.randn(len(slots), WIDTH, generator=torch.Generator().manual_seed(0))
    plan = cache.plan(len(slots) if num_planned is None else num_planned)
    return own.run(residual, [CachePart(plan, torch.tensor(slots))], [], LAYERS, cache.slots)[0]


def test_rows_do_not_depend_on_one_another() -> None:
    own = make_pass(layer(), layer())
    stride = 2 * NUM_LAYERS * BLOCK_SIZE
    together = run(own, cache_for(own), [0, stride, 2 * stride])
    assert together.isfinite().all()
    assert torch.equal(run(own, cache_for(own), [0]), together[:1])


@pytest.mark.parametrize("slot", [-1, 10**12])
def test_a_slot_outside_the_storage_is_refused_and_nothing_written(slot: int) -> None:
    own = make_pass(layer(), layer())
    cache = cache_for(own)
    with pytest.raises(ValueError, match="slot"):
        run(own, cache, [0, slot])
    assert not cache.blocks.any()


def test_attention_of_other_rows_or_layers_is_refused() -> None:
    own = make_pass(layer(), layer())
    with pytest.raises(ValueError, match="attention"):
        run(own, cache_for(own), [0, 16], num_planned=1)
    three = make_pass(layer(), layer(), layer())
    with pytest.raises(ValueError, match="attention"):
        own.run(
            torch.zeros(1, WIDTH),
            [CachePart(cache_for(three, 3).plan(1), torch.zeros(1, dtype=torch.int64))],
            [],
            LAYERS,
            cache_for(own).slots,
        )


def test_layers_may_have_contexts_of_their_own() -> None:
    """The second layer's keys and values in other blocks of the same memory, of one layer each."""
    own = make_pass(layer(), layer())
    rows, stride = 3, 2 * BLOCK_SIZE
    residual = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))
    cache = cache_for(own, 1)
    tables = np.arange(BLOCKS, dtype=np.int64).reshape(-1, 1)
    plans = [
        cache.attention.plan_decode(tables, first + np.arange(rows), np.ones(rows, np.int64), None, 1)
        for first in (0, rows)
    ]
    slots = [stride * (first + torch.arange(rows)) for first in (0, rows)]
    parts = [CachePart(plan, own_slots) for plan, own_slots in zip(plans, slots, strict=True)]
    pending, _ = own.run(residual.clone(), parts, [], LAYERS, cache.slots)
    together = cache_for(own)
    assert torch.equal(pending, run(own, together, [0, 2 * stride, 4 * stride]))
    assert torch.equal(cache.blocks[:rows, 0], together.blocks[:rows, 0])
    assert torch.equal(cache.blocks[rows : 2 * rows, 0], together.blocks[:rows, 1])
    for places in ([0], [0, 2], [-1, 0]):
        with pytest.raises(ValueError, match=r"place|attention"):
            own.run(residual.clone(), parts, [], places, cache.slots)


def test_missing_rotations_are_refused() -> None:
    own = make_pass(layer(), layer(rope=0))
    with pytest.raises(ValueError, match="angles"):
        run(own, cache_for(own), [0])


@each(
    "changed",
    [
        lambda: {"attention_norm": norm(48)},
        lambda: {"mlp_norm": norm(dtype=torch.bfloat16)},
        lambda: {"qkv": product(32, WIDTH)},
        lambda: {"output": product(WIDTH, 32)},
        lambda: {"output": product(32, WIDTH)},
        lambda: {"gate_up": product(32, WIDTH)},
        lambda: {"down": product(32, INNER)},
        lambda: {"gate_up": ()},
    ],
)
def test_parts_that_do_not_fit_together_are_refused(changed: Callable[[], dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r"a norm of|product"):
        make_pass(layer(**changed()))


@each("num_threads", [1, 2])
@each("level", vector_levels())
@each("head", [lambda: product(75, WIDTH), lambda: (*product(40, WIDTH), *product(55, WIDTH))])
def test_the_highest_are_sought_among_the_tokens_that_a_row_may_choose(
    head: Callable[[], tuple[Any, ...]], num_threads: int, level: str
) -> None:
    num_rows, products = 6, head()
    width = sum(part.out_width for part in products)
    place = HeadRows(HEADS, KV_HEADS, HEAD_DIM, torch.float32, level=level)
    own = DecodePass((layer(), layer()), place, WIDTH, torch.float32, HeadParts(norm(), products))
    generator = torch.Generator().manual_seed(2)
    residual = torch.randn(num_rows, WIDTH, generator=generator)
    residual[5, 3] = torch.nan
    slots = torch.arange(num_rows) * 2 * NUM_LAYERS * BLOCK_SIZE
    bits = torch.randint(-(1 << 31), 1 << 31, (4, -(-width // 32)), generator=generator).to(torch.int32)
    bits[1], bits[3] = 0, -1
    places = torch.tensor([2, -1, 0, 1, 3, 3])
    logits = torch.empty(num_rows, width)
    found = HighestLogits(torch.empty(num_rows, dtype=torch.int64), torch.empty(num_rows))
    torch.set_num_threads(num_threads)
    for results in ((logits, None, None), (None, found, AllowedTokens(places, bits))):
        cache = cache_for(own)
        own.run(residual.clone(), [CachePart(cache.plan(num_rows), slots)], [], LAYERS, cache.slots, *results)
    torch.set_num_threads(1)
    masked = (places >= 0).nonzero()[:, 0]
    mask_tokens_(logits, masked, bits[places[masked]])
    expected = highest(logits, level=vector_levels()[0])
    assert torch.equal(found.token_ids, expected[0])
    assert torch.equal(found.values.nan_to_num(7.0), expected[1].nan_to_num(7.0))
    assert found.values[3] == -torch.inf


@each("num_threads", [1, 2])
@each("num_slices", [1, 2, 7])
def test_a_run_in_parts_has_the_same_bits(num_slices: int, num_threads: int) -> None:
    """Another run comes and goes in every pause: each has its own buffers."""
    place = HeadRows(HEADS, KV_HEADS, HEAD_DIM, torch.float32, level=vector_levels()[0])
    head = HeadParts(norm(), product(171, WIDTH))
    own = DecodePass((layer(), layer()), place, WIDTH, torch.float32, head)
    slots = torch.arange(6) * 2 * NUM_LAYERS * BLOCK_SIZE
    residual = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(3))

    def results(pause: Pause | None) -> list[Tensor]:
        logits = torch.empty(6, 171)
        found = HighestLogits(torch.empty(6, dtype=torch.int64), torch.empty(6))
        caches = [cache_for(own) for _ in range(3)]
        for cache, kept in zip(caches, ((logits, None), (None, found), (None, None)), strict=True):
            left = residual.clone()
            pending, _ = own.run(left, [CachePart(cache.plan(6), slots)], [], LAYERS, cache.slots, *kept, pause=pause)
        apart, _ = own.logits(left + pending, pause)
        return [logits, apart, *found, *(cache.blocks for cache in caches)]

    torch.set_num_threads(num_threads)
    whole, stops = results(None), list[Tensor]()
    in_parts = results(Pause(lambda: stops.append(run(own, cache_for(own), [0, 16, 32])), 1, num_slices))
    torch.set_num_threads(1)
    assert all(torch.equal(one, other) for one, other in zip(in_parts, whole, strict=True))
    assert torch.equal(whole[0], whole[1])
    num_with_head = NUM_LAYERS - 1 + (num_slices if num_slices > 1 else 0)
    assert len(stops) == 2 * num_with_head + NUM_LAYERS - 1 + num_slices - 1
    assert all(torch.equal(one, stops[0]) for one in stops)


@pytest.mark.parametrize("pause", [Pause(print, 0, 1), Pause(print, 1, 0), Pause(print, 1, 1 << 20)])
def test_parts_of_nothing_are_refused(pause: Pause) -> None:
    own = make_pass(layer(), layer())
    cache = cache_for(own)
    parts = [CachePart(cache.plan(1), torch.tensor([0]))]
    with pytest.raises(ValueError, match="parts"):
        own.run(torch.zeros(1, WIDTH), parts, [], LAYERS, cache.slots, pause=pause)
    assert not cache.blocks.any()
