"""What adapters add to products: against float64, in every level, alone and in any batch to the bit."""

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from kernels.addend_layout import LayerProduct, ProductShape, site_of, up_column
from kernels.addends import Addends
from kernels.cpu.block_quantized_linear import BlockQuantizedLinear, JoinedLinear, block_levels
from kernels.cpu.lora import LoraModule, NativeAdapter, lora_levels
from kernels.cpu.packed_linear import Int8Linear
from kernels.linear import AdaptableProjection, Linear
from kernels.lora import PLAIN, AdapterMatrices, AdapterRows
from tests.support.marks import each

CPU = torch.device("cpu")
IN_WIDTH, OUT_WIDTH = 37, 83  # no multiples of a vector
LEVELS = [PLAIN, *lora_levels()]


def matrices(seed: int, rank: int, columns: int, in_width: int = IN_WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, in_width, generator=generator), torch.randn(columns, rank, generator=generator) / 4


def single(seed: int, rank: int, level: str = "", dtype: torch.dtype = torch.float32) -> AdapterMatrices:
    """Make an adapter of one product, whose columns from 20 to 29 it leaves as they are."""
    adapter = AdapterMatrices([ProductShape(IN_WIDTH, OUT_WIDTH)], 1, dtype, CPU, level)
    first, last = matrices(seed, rank, 20), matrices(seed + 1, rank + 1, OUT_WIDTH - 30)
    modules = [LoraModule(0, 20, first), LoraModule(20, 10, None), LoraModule(30, OUT_WIDTH - 30, last)]
    adapter.set(0, modules)
    return adapter


def expected(x: Tensor, seed: int, rank: int) -> Tensor:
    first, last = matrices(seed, rank, 20), matrices(seed + 1, rank + 1, OUT_WIDTH - 30)
    parts = [x.double() @ a.double().T @ b.double().T for a, b in (first, last)]
    return torch.cat((parts[0], torch.zeros(len(x), 10, dtype=torch.float64), parts[1]), dim=1)


def rows_of(adapters: Sequence[AdapterMatrices], of_row: Sequence[int]) -> AdapterRows:
    return AdapterRows(adapters, np.array(of_row, np.int64), CPU)


@each("level", LEVELS)
@each("dtype", [torch.float32, torch.bfloat16])
@each("rank", [1, 8, 19])
def test_each_row_gets_what_its_own_adapter_adds(level: str, dtype: torch.dtype, rank: int) -> None:
    of_row = [1, -1, 0, 1, 1, -1, 0, 1, 1, 2]
    adapters = [single(seed, rank, level, dtype) for seed in (10, 20, 30)]
    x = torch.randn(len(of_row), IN_WIDTH).to(dtype)
    addends = rows_of(adapters, of_row).addends(0, x)
    seen = {int(place): row for place, row in zip(addends.places, addends.values, strict=True)}
    assert sorted(seen) == [row for row, adapter in enumerate(of_row) if adapter >= 0]
    for row, values in seen.items():
        own = expected(x[row : row + 1], 10 * (of_row[row] + 1), rank)[0]
        torch.testing.assert_close(values[:OUT_WIDTH].double(), own, rtol=1e-5, atol=1e-5)
        assert int(addends.of_row[row]) == int((addends.places == row).nonzero())


def products(weight: Tensor, activation: str | None, *, is_gated: bool) -> dict[str, AdaptableProjection]:
    q8, width = quantized(weight), weight.shape[1]

    def blocks(*, allow_native: bool) -> AdaptableProjection:
        return BlockQuantizedLinear(
            q8, "Q8_0", width, activation=activation, is_gated=is_gated, allow_native=allow_native
        )

    found: dict[str, AdaptableProjection] = {
        "packed": Linear(weight, activation=activation, is_gated=is_gated),
        "plain": Linear(weight, allow_packing=False, activation=activation, is_gated=is_gated),
        "bfloat16": Linear(weight.bfloat16(), activation=activation, is_gated=is_gated),
        "int8": Int8Linear(weight, activation=activation, is_gated=is_gated),
        "int8 by oneDNN": Int8Linear(weight, allow_native=False, activation=activation, is_gated=is_gated),
        "blocks": blocks(allow_native=True),
        "unpacked blocks": blocks(allow_native=False),
    }
    if activation is None:
        found["joined"] = JoinedLinear([BlockQuantizedLinear(part, "Q8_0", width) for part in (q8[:30], q8[30:])])
    return found


def quantized(weight: Tensor) -> Tensor:
    """Return the weight in blocks of Q8_0."""
    blocks = weight.view(len(weight), -1, 32)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / 127).half()
    values = (blocks / scales.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat((scales.view(torch.uint8), values.view(torch.uint8)), dim=2).flatten(1)


def before_no_memory(values: Tensor) -> Tensor:
    """Copy to where no byte behind the last can be read."""
    size = mmap.PAGESIZE
    memory = mmap.mmap(-1, 2 * size)
    guarded = torch.frombuffer(memory, dtype=values.dtype)[: size // values.itemsize]
    own = guarded[len(guarded) - values.numel() :].view(values.shape)
    own.copy_(values)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(guarded.data_ptr() + size), ctypes.c_size_t(size), 0) == 0
    return own


@each("level", block_levels())
def test_addends_are_read_up_to_the_last_column(level: str) -> None:
    parts = [
        BlockQuantizedLinear(quantized(torch.randn(columns, 32)), "Q8_0", 32, level=level) for columns in (16, 8, 8)
    ]
    x, values = torch.randn(1, 32), torch.randn(1, 32)
    rows = torch.zeros(1, dtype=torch.int64)
    joined = JoinedLinear(parts)
    sums = joined(x, Addends(before_no_memory(values), rows, rows))
    torch.testing.assert_close(sums, joined(x) + values)


@each(("activation", "is_gated"), [(None, False), ("relu", False), ("silu", True)])
@each("num_rows", [1, 9, 40])
def test_addends_come_before_the_nonlinearity_and_change_no_other_row(
    activation: str | None, is_gated: bool, num_rows: int
) -> None:
    in_width, columns = 64, 86
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    weight = draw(columns, in_width) / 8
    out_width = columns // 2 if is_gated else columns
    shape = ProductShape(in_width, out_width, is_gated)
    of_row = [(row % 3) - 1 for row in range(1, num_rows + 1)]
    deltas = [draw(columns, 4) / 2 for _ in range(2)]
    a = draw(4, in_width) / 8
    x = draw(num_rows, in_width)
    for name, multiply in products(weight, activation, is_gated=is_gated).items():
        dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
        own_x = x.to(dtype)
        adapters = []
        for b in deltas:
            adapter = AdapterMatrices([shape], 1, dtype, CPU)
            gates = LoraModule(0, out_width, (a, b[:out_width]))
            ups = [LoraModule(up_column(out_width), out_width, (a, b[out_width:]))] if is_gated else []
            adapter.set(0, [gates, *ups])
            adapters.append(adapter)
        adapted = rows_of(adapters, of_row).product(0, multiply, own_x)
        base = multiply(own_x)
        for row, index in enumerate(of_row):
            if index < 0:
                assert torch.equal(adapted[row], base[row]), f"{name}: row {row}"
                continue
            sums = own_x[row].double() @ (weight.double() + deltas[index].double() @ a.double()).T
            wanted = activated(sums, activation, is_gated=is_gated)
            bound = 0.02 if name == "packed" or name == "plain" else 0.15
            assert (adapted[row].double() - wanted).abs().max() < bound, f"{name}: row {row}"
            if name in ("packed", "plain"):
                torch.testing.assert_close(adapted[row].double(), wanted, rtol=1e-5, atol=1e-5)


def activated(sums: Tensor, activation: str | None, *, is_gated: bool) -> Tensor:
    if is_gated:
        gate, up = sums.chunk(2)
        return functional.silu(gate) * up
    return sums if activation is None else functional.relu(sums)


def test_rows_of_a_part_of_a_pass_are_found_again() -> None:
    rows = rows_of([single(1, 4), single(2, 4)], [-1, 0, 1, -1, -1, 1])
    assert rows.part(3, 5) is None
    part = rows.part(1, 3)
    assert part is not None
    assert part.addends(0, torch.randn(2, IN_WIDTH)).of_row.tolist() == [0, 1]
    kept = rows.selected(np.array([5, 0]))
    assert kept is not None
    assert kept.addends(0, torch.randn(2, IN_WIDTH)).places.tolist() == [0]
    assert site_of(2, LayerProduct.DOWN) == 11


def test_other_threads_go_on_while_matrices_are_packed() -> None:
    a, b = torch.zeros(64, 8192), torch.zeros(60_000, 64)
    module = (0, len(b), len(a), a.data_ptr(), b.data_ptr())
    num_ticks, is_over = 0, False

    def tick() -> None:
        nonlocal num_ticks
        while not is_over:
            time.sleep(1e-4)
            num_ticks += 1

    def ticks_meanwhile() -> bool:
        adapter, before = NativeAdapter(1), num_ticks
        adapter.native.set(0, 8192, [module])
        return num_ticks > before

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # a thread runs only while another gives up the interpreter by itself
    thread = threading.Thread(target=tick)
    thread.start()
    try:
        assert any(ticks_meanwhile() for _ in range(50))  # on a busy machine it may not get a core in time
    finally:
        sys.setswitchinterval(interval_s)
        is_over = True
        thread.join()
