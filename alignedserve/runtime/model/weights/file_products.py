"""Products with weights that are packed straight from their files, so that none is in memory twice."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.packed_linear import INT8, FileRows, PackedLinear, fits, packed_levels

_CPU = torch.device("cpu")


class FileSource(Protocol):
    """A source of weights whose matrices lie in files, row after row."""

    dtype: torch.dtype  # that products are computed in

    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        """Return where the matrix lies; None where it cannot be packed from there. Raises ModelError naming it."""


class NotFiniteError(ValueError):
    """A weight that cannot be rounded to 8 bits."""


def packs_files(dtype: torch.dtype, in_width: int, *, is_int8: bool) -> bool:
    if is_int8:
        return dtype in (torch.float32, torch.bfloat16) and bool(packed_levels(INT8, _CPU))
    return fits(dtype, in_width) and bool(packed_levels(dtype, _CPU))


def file_parts(source: FileSource, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> list[FileRows] | None:
    """Return where all these matrices lie; None where one cannot be packed from its file."""
    parts = [source.file_rows(name, shape) for name, shape in zip(names, shapes, strict=True)]
    found = [part for part in parts if part is not None]
    return found if len(found) == len(parts) else None


def file_product(
    parts: Sequence[FileRows],
    bias: Tensor | None,
    dtype: torch.dtype,
    activation: str | None,
    is_gated: bool,
    *,
    is_int8: bool = False,
) -> PackedLinear:
    """Return the product with the stacked rows, then the nonlinearity; see `packs_files`.

    Raises OSError for a file that cannot be read, NotFiniteError for numbers that 8 bits cannot hold.
    """
    element = INT8 if is_int8 else dtype
    level = packed_levels(element, _CPU)[0]
    try:
        return PackedLinear(
            parts, bias, level=level, element=element, dtype=dtype, activation=activation, is_gated=is_gated
        )
    except ValueError as error:
        raise NotFiniteError(str(error)) from error
