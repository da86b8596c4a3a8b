"""What launching any of the kernels needs to know."""

import torch
import triton

_LEAST_SIDE = 16  # of a matrix product
_ELEMENTS_OF_WARP = 512  # of a row, 16 for each of its threads
_MOST_WARPS = 16


def padded(size: int) -> int:
    """A side of a tile that a matrix product takes, at least `size`."""
    return max(_LEAST_SIDE, int(triton.next_power_of_2(size)))


def row_warps(padded_width: int) -> int:
    """Warps of a program that holds a row of so many elements, a power of two."""
    return min(max(1, padded_width // _ELEMENTS_OF_WARP), _MOST_WARPS)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def upcast(dtype: torch.dtype) -> bool:
    """Whether factors are widened to float32 before a product: Triton's interpreter multiplies the bits of bfloat16."""
    return dtype == torch.bfloat16 and is_interpreted()
