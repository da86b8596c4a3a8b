"""Products with weights in the blocks of GGUF files: every level that runs here, against exact sums and float64."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from alignedserve.gguf.tensor_types import packed_row_bytes
from kernels.activation import ACTIVATIONS
from kernels.block_formats import BLOCK_FORMATS, dequantize
from kernels.cpu.block_quantized_linear import BlockQuantizedLinear, JoinedLinear, block_levels, block_obstacle
from tests.support.block_weights import random_blocks

pytestmark = pytest.mark.slow

ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}
skipped = pytest.param("", marks=pytest.mark.skip("not built"))
levels = pytest.mark.parametrize("level", block_levels() or [skipped])
types = pytest.mark.parametrize("type_name", list(BLOCK_FORMATS))
dtypes = pytest.mark.parametrize("dtype", list(ROUNDING))
ways = pytest.mark.parametrize("way", [*block_levels(), "unpacked"])


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads that divide the work; five are more than the cores of many machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randoms(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def made(
    way: str,
    raw: Tensor,
    type_name: str,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    activation: str | None = None,
    is_gated: bool = False,
) -> BlockQuantizedLinear:
    """Make a linear layer on a level, or unpacked."""
    layout = BLOCK_FORMATS[type_name]
    return BlockQuantizedLinear(
        raw,
        type_name,
        raw.shape[1] // layout.num_bytes * layout.num_values,
        bias,
        dtype=dtype,
        activation=activation,
        is_gated=is_gated,
        level=None if way == "unpacked" else way,
        allow_native=way != "unpacked",
    )


def rounded_inputs(x: Tensor) -> Tensor:
    """Round as the kernels do: 8 bits and a scale for each 32 inputs of a row."""
    blocks = x.float().reshape(len(x), -1, 32)
    scales = (blocks.abs().amax(dim=2, keepdim=True) / 127.0).clamp(min=1e-12)
    quants = (blocks * (1.0 / scales)).round()
    assert int(quants.abs().max()) <= 127
    return (quants.double() * scales.double()).reshape(x.shape)


def product(x: Tensor, raw: Tensor, type_name: str) -> tuple[Tensor, Tensor]:
    """Return the product in float64, and the sum of the sizes of its terms, weights and minima apart."""
    weight = dequantize(raw, type_name).double()
    sizes = x.double().abs() @ weight.abs().T + 15.0 * x.double().abs().sum(1, keepdim=True) * weight.abs().amax(1)
    return x.double() @ weight.T, sizes


@levels
@types
@dtypes
@pytest.mark.parametrize(("rows", "columns", "width"), [(1, 1, 256), (2, 33, 512), (13, 100, 256), (70, 47, 1024)])
def test_exact_products_of_rounded_inputs(
    rows: int, columns: int, width: int, dtype: torch.dtype, type_name: str, level: str
) -> None:
    """The only error is that of float32 sums over blocks."""
    raw, x = random_blocks(type_name, columns, width), randoms(1, rows, width, dtype=dtype)
    result = BlockQuantizedLinear(raw, type_name, width, dtype=dtype, level=level)(x)
    expected, sizes = product(rounded_inputs(x), raw, type_name)
    assert (result.dtype, result.shape) == (dtype, (rows, columns))
    assert ((result.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + 2.0**-21 * sizes).all()


@levels
@types
def test_every_number_of_rows(type_name: str, level: str) -> None:
    raw = random_blocks(type_name, 40, 256)
    linear = BlockQuantizedLinear(raw, type_name, 256, level=level)
    x = randoms(1, 230, 256)
    expected, sizes = product(rounded_inputs(x), raw, type_name)
    for rows in (*range(1, 71), 112, 113, 230):
        assert ((linear(x[:rows]).double() - expected[:rows]).abs() <= 2.0**-20 * sizes[:rows]).all(), rows


@levels
@types
def test_the_largest_quants_and_inputs(type_name: str, level: str) -> None:
    """Sums of two products fit where an instruction keeps them in 16 bits."""
    layout = BLOCK_FORMATS[type_name]
    for filling in (0x00, 0x7F, 0x80, 0xFF):
        raw = torch.full((20 * layout.row_bytes(512) // layout.num_bytes, layout.num_bytes), filling, dtype=torch.uint8)
        dtype = {1: torch.uint8, 2: torch.float16, 4: torch.float32}[layout.scale_bytes]
        scale = torch.tensor([126 if layout.scale_bytes == 1 else 0.5], dtype=dtype)
        for place in layout.scale_places:
            raw[:, place : place + layout.scale_bytes] = scale.view(torch.uint8)
        raw = raw.reshape(20, -1)
        linear = BlockQuantizedLinear(raw, type_name, 512, level=level)
        for x in (torch.full((3, 512), 2.0), torch.full((3, 512), -2.0)):
            expected, sizes = product(rounded_inputs(x), raw, type_name)
            assert ((linear(x).double() - expected).abs() <= 2.0**-20 * sizes).all(), filling


@levels
@types
@dtypes
def test_a_row_is_the_same_in_any_batch(threads: int, dtype: torch.dtype, type_name: str, level: str) -> None:
    """Rows are equal bit by bit: the batch decides neither the order of a sum nor its rounding."""
    raw = random_blocks(type_name, 100, 256)
    linear = BlockQuantizedLinear(raw, type_name, 256, randoms(2, 100), dtype=dtype, level=level)
    x = randoms(1, 261, 256, dtype=dtype)
    together = linear(x)
    for first, last in ((0, 1), (3, 5), (5, 12), (20, 61), (7, 240)):
        assert torch.equal(linear(x[first:last]), together[first:last]), (threads, first, last)


@ways
@dtypes
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_bias_nonlinearity_and_gates(activation: str | None, is_gated: bool, dtype: torch.dtype, way: str) -> None:
    if is_gated and activation is None:
        activation = "silu"
    raw, bias, x = random_blocks("Q4_K", 74, 256), randoms(1, 74, dtype=dtype), randoms(2, 7, 256, dtype=dtype)
    result = made(way, raw, "Q4_K", bias, dtype=dtype, activation=activation, is_gated=is_gated)(x)
    sums = product(x, raw, "Q4_K")[0] + bias.double()
    if is_gated:
        gates, ups = sums.chunk(2, dim=1)
        expected = ACTIVATIONS[str(activation)](gates.clone()) * ups
    else:
        expected = sums if activation is None else ACTIVATIONS[activation](sums.clone())
    assert (result.dtype, result.shape) == (dtype, expected.shape)
    assert float((result.double() - expected).norm() / expected.norm()) < (0.015 if dtype == torch.float32 else 0.03)


@ways
@dtypes
def test_strided_rows_among_nan(dtype: torch.dtype, way: str) -> None:
    raw, x = random_blocks("Q4_1", 40, 64), randoms(1, 9, 64, dtype=dtype)
    linear = made(way, raw, "Q4_1", dtype=dtype)
    wide = torch.full((11, 70), float("nan"), dtype=dtype)
    wide[1:-1, 4:-2] = x
    assert torch.equal(linear(wide[1:-1, 4:-2]), linear(x))
    assert torch.equal(linear(x.T.contiguous().T), linear(x))
    out = torch.full((9, 50), 7.0, dtype=dtype)
    linear.multiply_into(x, out[:, 5:45])
    assert torch.equal(out[:, 5:45], linear(x))
    assert (out[:, :5] == 7.0).all()
    assert (out[:, 45:] == 7.0).all()


@levels
@types
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_cannot_be_rounded_makes_its_row_not_a_number(wrong: float, type_name: str, level: str) -> None:
    linear = BlockQuantizedLinear(random_blocks(type_name, 40, 256), type_name, 256, activation="relu", level=level)
    for place in (0, 37, 255):
        x = randoms(1, 4, 256)
        x[2, place] = wrong
        result = linear(x)
        assert result[2].isnan().all()
        assert result[[0, 1, 3]].isfinite().all()


@levels
def test_the_weight_is_not_kept_and_packs_into_as_many_bytes_as_are_planned(level: str) -> None:
    for type_name in BLOCK_FORMATS:
        raw, x = random_blocks(type_name, 640, 512), randoms(1, 3, 512)
        linear = BlockQuantizedLinear(raw, type_name, 512, level=level)
        assert raw.nbytes <= linear.num_bytes <= 1.03 * raw.nbytes
        # Types of GGUF files are planned by their rows; others are packed into as many bytes as they come in.
        assert linear.num_bytes == 640 * (packed_row_bytes(type_name, 512) or raw.shape[1])
        before = linear(x)
        raw.fill_(0)
        assert torch.equal(linear(x), before)


@ways
def test_parts_of_several_types_are_joined(way: str) -> None:
    x = randoms(1, 6, 256)
    parts = [
        made(way, random_blocks(type_name, columns, 256), type_name)
        for type_name, columns in (("Q4_K", 50), ("Q6_K", 20), ("Q8_0", 33))
    ]
    joined = JoinedLinear(parts)
    assert (joined.in_width, joined.out_width) == (256, 103)
    assert torch.equal(joined(x), torch.cat([part(x) for part in parts], dim=1))


def test_the_worked_example() -> None:
    raw = torch.full((1, 18), 0x88, dtype=torch.uint8)
    raw[0, :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    raw[0, 2:4] = torch.tensor([0x8F, 0x83], dtype=torch.uint8)
    x = torch.zeros(1, 32)
    x[0, :2] = torch.tensor([1.27, 0.5])
    assert float(BlockQuantizedLinear(raw, "Q4_0", 32)(x)) == pytest.approx(3.195, abs=1e-4)


def test_floats_of_4_bits_and_their_power_of_two() -> None:
    raw = torch.zeros(1, 17, dtype=torch.uint8)
    raw[0, 0], raw[0, 1:9] = 128, torch.arange(0x80, 0x100, 0x11, dtype=torch.uint8)[:8]
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    expected = [2 * value for value in values] + [0.0] * 8 + [-2 * value for value in values] + [0.0] * 8
    assert dequantize(raw, "MXFP4")[0].tolist() == expected
    raw[0, 0] = 255
    assert "not finite" in str(block_obstacle(raw, "MXFP4"))


def test_what_does_not_fit_is_refused() -> None:
    raw = random_blocks("Q4_K", 5, 512)
    with pytest.raises(ValueError, match="Q2_K"):
        BlockQuantizedLinear(raw, "Q2_K", 512)
    with pytest.raises(ValueError, match=r"\[rows, 576\] bytes"):
        BlockQuantizedLinear(raw, "Q4_K", 1024)
    with pytest.raises(ValueError, match="filled"):
        BlockQuantizedLinear(raw, "Q4_K", 500)
    with pytest.raises(ValueError, match="gates"):
        BlockQuantizedLinear(raw, "Q4_K", 512, activation="silu", is_gated=True)
    with pytest.raises(ValueError, match="bytes"):
        BlockQuantizedLinear(raw[:0], "Q4_K", 512)
    with pytest.raises(AssertionError, match="each of 5 columns"):
        BlockQuantizedLinear(raw, "Q4_K", 512, torch.ones(4))
    if block_levels():
        with pytest.raises(ValueError, match="level"):
            BlockQuantizedLinear(raw, "Q4_K", 512, level="avx1024")


def test_obstacles() -> None:
    raw = random_blocks("Q4_1", 5, 64)
    assert block_obstacle(raw, "Q4_1") is None
    assert "on meta" in str(block_obstacle(raw.to("meta"), "Q4_1"))
    raw[2, 2:4] = torch.tensor([float("inf")], dtype=torch.float16).view(torch.uint8)
    assert "not finite" in str(block_obstacle(raw, "Q4_1"))
