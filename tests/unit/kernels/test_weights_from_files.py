"""Weights packed straight from files, and converted on the way, against those packed from tensors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.packed_linear import INT8, FileRows, PackedLinear, packed_levels

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
STORED = (*DTYPES, torch.float16)
LEVELS = [(dtype, level) for dtype in DTYPES for level in packed_levels(dtype, CPU)]
FORMS: list[tuple[Any, ...]] = [(dtype, dtype, level) for dtype, level in LEVELS]
FORMS += [(INT8, dtype, level) for dtype in DTYPES for level in packed_levels(INT8, CPU)]
skipped = pytest.mark.skip("not built, or no such processor")
levels = pytest.mark.parametrize(("dtype", "level"), LEVELS or [pytest.param(None, None, marks=skipped)])
forms = pytest.mark.parametrize(("element", "dtype", "level"), FORMS or [pytest.param(*[None] * 3, marks=skipped)])


def randoms(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_files(folder: Path, parts: Sequence[Tensor]) -> list[FileRows]:
    """Write each part into a file of its own but the last two, which share one, behind bytes of something else."""
    described: list[FileRows] = []
    for index, part in enumerate(parts):
        path = folder / f"{min(index, max(len(parts) - 2, 0))}.bin"
        offset = path.stat().st_size if path.exists() else 0
        with path.open("ab") as file:
            file.write(bytes(3 + index) + part.contiguous().view(torch.uint8).numpy().tobytes())
        described.append(FileRows(path, offset + 3 + index, len(part), part.shape[1], part.dtype))
    return described


@forms
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("rows", "in_width"), [((1,), 2), ((33,), 66), ((20, 7, 9), 34), ((64, 64), 130)])
@pytest.mark.parametrize("is_gated", [False, True])
def test_the_same_product_as_from_tensors(
    is_gated: bool,
    rows: tuple[int, ...],
    in_width: int,
    stored: torch.dtype,
    element: torch.dtype | str,
    dtype: torch.dtype,
    level: str,
    tmp_path: Path,
) -> None:
    rows = rows * 2 if is_gated else rows
    parts = [randoms(index, count, in_width).to(stored) for index, count in enumerate(rows)]
    bias, x = randoms(8, sum(rows)), randoms(9, 5, in_width).to(dtype)
    activation = "silu" if is_gated else None
    form: Any = {"level": level, "element": element, "activation": activation, "is_gated": is_gated}
    from_files = PackedLinear(in_files(tmp_path, parts), bias, dtype=dtype, **form)
    from_tensor = PackedLinear(torch.cat(parts).to(dtype), bias, **form)
    assert torch.equal(from_files(x), from_tensor(x))


def has_full_precision(numbers: Tensor) -> Tensor:
    """Return which are no smaller than the smallest normal float32: products of bfloat16 take others for 0."""
    return numbers.float().abs() >= torch.finfo(torch.float32).tiny


def unpacked(weight: Sequence[FileRows], dtype: torch.dtype, level: str) -> Tensor:
    """Return a weight of finite numbers out of its packed form."""
    linear = PackedLinear(weight, None, level=level, element=dtype, dtype=dtype)
    return linear(torch.eye(linear.in_width, dtype=dtype)).T


@levels
def test_every_number_of_16_bits_is_converted_exactly_or_to_the_nearest(
    dtype: torch.dtype, level: str, tmp_path: Path
) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    for stored in (torch.float16, torch.bfloat16):
        numbers = bits.view(stored)
        numbers = numbers[numbers.isfinite() & has_full_precision(numbers)]
        numbers = torch.cat([numbers, numbers.new_zeros(-len(numbers) % 64)]).view(-1, 64)
        assert torch.equal(unpacked(in_files(tmp_path, [numbers]), dtype, level), numbers.to(dtype))
        (tmp_path / "0.bin").unlink()


@levels
def test_numbers_of_32_bits_are_rounded_to_the_nearest(dtype: torch.dtype, level: str, tmp_path: Path) -> None:
    bits = torch.randint(-(2**31), 2**31, (64, 256), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    bits[:, :64] &= -0x8000  # halfway between two, and next to that
    bits[:, 64:96] |= 0x7FFF
    numbers = bits.view(torch.float32)
    numbers = numbers.where((numbers.abs() < 3e38) & has_full_precision(numbers), 1.0)
    assert torch.equal(unpacked(in_files(tmp_path, [numbers]), dtype, level), numbers.to(dtype))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_what_8_bits_cannot_hold_is_refused(wrong: float, stored: torch.dtype, tmp_path: Path) -> None:
    found = packed_levels(INT8, CPU)
    if not found:
        pytest.skip("not built, or no such processor")
    weight = torch.ones(40, 34, dtype=stored)
    weight[39, 33] = wrong
    with pytest.raises(ValueError, match="not finite"):
        PackedLinear(in_files(tmp_path, [weight]), None, level=found[0], element=INT8, dtype=torch.float32)


@levels
def test_a_file_that_is_too_short_or_gone_is_an_error(dtype: torch.dtype, level: str, tmp_path: Path) -> None:
    (rows,) = in_files(tmp_path, [torch.ones(500, 34, dtype=dtype)])
    for size in (rows.path.stat().st_size - 1, 0):
        with rows.path.open("r+b") as file:
            file.truncate(size)
        with pytest.raises(OSError, match="cannot be read"):
            PackedLinear([rows], None, level=level, element=dtype, dtype=dtype)
    rows.path.unlink()
    with pytest.raises(FileNotFoundError):
        PackedLinear([rows], None, level=level, element=dtype, dtype=dtype)
