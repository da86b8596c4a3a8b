"""Products of the native kernels, every level of them that runs here, against float64. Skipped where not built."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.packed_linear import INT8, Int8Linear, PackedLinear, packed_levels
from kernels.linear import OneDnnLinear

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8}

FLOAT_LEVELS = [(dtype, level) for dtype in ROUNDING for level in packed_levels(dtype, CPU)]
skipped = pytest.param(None, None, marks=pytest.mark.skip("not built, or no such processor"))
float_levels = pytest.mark.parametrize(("dtype", "level"), FLOAT_LEVELS or [skipped])
slow_shapes = [
    pytest.param(*shape, marks=pytest.mark.slow) for shape in ((1, 32, 64), (7, 16, 128), (14, 64, 256), (15, 48, 2))
]
shapes = pytest.mark.parametrize(
    ("rows", "columns", "in_width"),
    [(1, 1, 2), (2, 33, 30), (13, 100, 66), (29, 31, 34), *slow_shapes],
)
activations = pytest.mark.parametrize("activation", [None, "relu", "silu", "gelu", "gelu_tanh"])


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Threads that divide the work; five are more than the cores of many machines."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def randoms(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def among_nan(x: Tensor) -> Tensor:
    """Return the same rows inside wider ones that hold NaN, and NaN before and after them."""
    wide = torch.full((x.shape[0] + 2, x.shape[1] + 6), float("nan"), dtype=x.dtype)
    wide[1:-1, 4:-2] = x
    return wide[1:-1, 4:-2]


def activated(x: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return x
    if activation == "gelu_tanh":
        return functional.gelu(x, approximate="tanh")
    result: Tensor = getattr(functional, activation)(x)
    return result


def close(result: Tensor, x: Tensor, weight: Tensor, expected: Tensor) -> bool:
    """Return whether they agree within the rounding of the sums, which grows with their numbers, and of the result."""
    sums = x.double().abs() @ weight.double().abs().T + 1.0
    if result.shape != sums.shape:  # gates: a product of two sums
        gates, ups = sums.chunk(2, dim=1)
        sums = gates * ups
    rounding = ROUNDING[result.dtype] * expected.abs() + 2.0**-21 * sums
    return bool(((result.double() - expected).abs() <= rounding).all())


@pytest.mark.parametrize("element", [*FLOAT_LEVELS, *((INT8, level) for level in packed_levels(INT8, CPU))], ids=str)
def test_rows_of_whole_pages_are_multiplied_as_others_are(element: tuple[torch.dtype | str, str]) -> None:
    """They are moved apart first, where there are many; the bits are those of each row alone."""
    kind, level = element
    dtype = kind if isinstance(kind, torch.dtype) else torch.bfloat16
    in_width = 4096 // (1 if kind == INT8 else dtype.itemsize)
    x = randoms(2, 40, in_width, dtype=dtype)
    linear = PackedLinear(randoms(0, 70, in_width, dtype=dtype), None, level=level, element=kind)
    assert torch.equal(linear(x), torch.cat([linear(x[row : row + 1]) for row in range(len(x))]))


@float_levels
@shapes
@activations
def test_products(
    activation: str | None, rows: int, columns: int, in_width: int, dtype: torch.dtype, level: str
) -> None:
    weight, bias = randoms(0, columns, in_width, dtype=dtype), randoms(1, columns, dtype=dtype)
    x = randoms(2, rows, in_width, dtype=dtype)
    linear = PackedLinear(weight, bias, level=level, element=dtype, activation=activation)
    expected = activated(functional.linear(x.double(), weight.double(), bias.double()), activation)
    result = linear(among_nan(x))
    assert (result.dtype, result.shape) == (dtype, (rows, columns))
    assert close(result, x, weight, expected)


@float_levels
@shapes
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu"])
def test_gates(activation: str, rows: int, columns: int, in_width: int, dtype: torch.dtype, level: str) -> None:
    weight, x = randoms(0, 2 * columns, in_width, dtype=dtype), randoms(1, rows, in_width, dtype=dtype)
    linear = PackedLinear(weight, None, level=level, element=dtype, activation=activation, is_gated=True)
    gates, ups = functional.linear(x.double(), weight.double()).chunk(2, dim=1)
    result = linear(among_nan(x))
    assert (linear.out_width, result.shape) == (columns, (rows, columns))
    assert close(result, x, weight, activated(gates, activation) * ups)


@float_levels
def test_many_rows_and_panels_on_several_threads(threads: int, dtype: torch.dtype, level: str) -> None:
    weight, bias = randoms(0, 700, 130, dtype=dtype), randoms(1, 700, dtype=dtype)
    linear = PackedLinear(weight, bias, level=level, element=dtype)
    for rows in (1, 3, 17, 64, 301):
        x = randoms(rows, rows, 130, dtype=dtype)
        result = linear(x)
        assert close(result, x, weight, functional.linear(x.double(), weight.double(), bias.double())), (rows, threads)


@float_levels
def test_rows_that_do_not_fit_the_cache_are_taken_in_parts(dtype: torch.dtype, level: str) -> None:
    weight, x = randoms(0, 40, 8192, dtype=dtype), randoms(1, 700, 8192, dtype=dtype)
    result = PackedLinear(weight, None, level=level, element=dtype)(x)
    assert close(result, x, weight, x.double() @ weight.double().T)


@float_levels
def test_a_row_is_the_same_in_any_batch(threads: int, dtype: torch.dtype, level: str) -> None:
    """Bit by bit: what else is in the batch decides neither the order of a sum nor its rounding."""
    for in_width in (96, 1026):
        linear = PackedLinear(randoms(0, 100, in_width, dtype=dtype), None, level=level, element=dtype)
        x = randoms(1, 61, in_width, dtype=dtype)
        together = linear(x)
        for first, last in ((0, 1), (5, 12), (10, 27), (20, 61)):
            assert torch.equal(linear(x[first:last]), together[first:last]), (in_width, threads)


def test_tiles_of_8_bits_give_what_vectors_do() -> None:
    if "amx" not in packed_levels(INT8, CPU):
        pytest.skip("not built, or no such processor")
    weight, bias, x = randoms(0, 100, 90), randoms(1, 100), randoms(2, 37, 90)
    by_level = [
        PackedLinear(weight, bias, level=level, element=INT8, activation="silu")(x) for level in ("amx", "avx512bf16")
    ]
    assert torch.equal(*by_level)


@float_levels
def test_not_a_number_stays_in_its_row(dtype: torch.dtype, level: str) -> None:
    linear = PackedLinear(randoms(0, 40, 32, dtype=dtype), None, level=level, element=dtype, activation="relu")
    x = randoms(1, 4, 32, dtype=dtype)
    x[2, 5] = float("nan")
    result = linear(x)
    assert result[2].isnan().all()
    assert result[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_8_bits_cannot_hold_makes_its_row_not_a_number(wrong: float, dtype: torch.dtype) -> None:
    if not packed_levels(INT8, CPU):
        pytest.skip("not built, or no such processor")
    linear = Int8Linear(randoms(0, 40, 33, dtype=dtype), activation="relu")
    for place in (0, 16, 32):
        x = randoms(1, 4, 33, dtype=dtype)
        x[2, place] = wrong
        result = linear(x)
        assert result[2].isnan().all()
        assert result[[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", list(ROUNDING))
@activations
def test_onednn_where_the_native_kernels_are_not(activation: str | None, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("PyTorch's plain products are used: oneDNN packs no bfloat16 for this processor")
    weight, bias, x = randoms(0, 40, 64, dtype=dtype), randoms(1, 40, dtype=dtype), randoms(2, 9, 64, dtype=dtype)
    expected = activated(functional.linear(x.double(), weight.double(), bias.double()), activation)
    result = OneDnnLinear(weight, bias, activation)(x)
    assert torch.allclose(result.double(), expected, rtol=4 * ROUNDING[dtype], atol=4 * ROUNDING[dtype])


def test_the_weight_is_not_kept_and_packs_into_its_own_size() -> None:
    levels = packed_levels(torch.bfloat16, CPU)
    if not levels:
        pytest.skip("not built, or no such processor")
    weight = randoms(0, 640, 512, dtype=torch.bfloat16)
    linear = PackedLinear(weight, None, level=levels[0], element=torch.bfloat16)
    assert linear.num_bytes == weight.nbytes
    x, expected = randoms(1, 3, 512, dtype=torch.bfloat16), None
    expected = linear(x)
    weight.fill_(float("nan"))
    assert torch.equal(linear(x), expected)
