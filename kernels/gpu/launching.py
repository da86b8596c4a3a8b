"""Launch parameters that the kernels share."""

import torch
import triton

_LEAST_SIDE = 16  # of a matrix product
_ELEMENTS_OF_WARP = 512  # of a row, 16 for each of its threads
_MOST_WARPS = 16


def padded(size: int) -> int:
    """Return the smallest tile side for a matrix product that is at least `size`."""
    return max(_LEAST_SIDE, int(triton.next_power_of_2(size)))


def row_warps(padded_width: int) -> int:
    """Return the warps of a program that holds a row of so many elements, a power of two."""
    return min(max(1, padded_width // _ELEMENTS_OF_WARP), _MOST_WARPS)


def is_interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def upcast(dtype: torch.dtype) -> bool:
    """Return whether to widen factors to float32 before a product: Triton's interpreter multiplies bfloat16 wrongly."""
    return dtype == torch.bfloat16 and is_interpreted()
