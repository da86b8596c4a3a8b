"""What launching any of the kernels needs to know."""

import torch
import triton

_LEAST_SIDE = 16  # of a matrix product


def padded(size: int) -> int:
    """A side of a tile that a matrix product takes, at least `size`."""
    return max(_LEAST_SIDE, int(triton.next_power_of_2(size)))


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def upcast(dtype: torch.dtype) -> bool:
    """Whether factors are widened to float32 before a product: Triton's interpreter multiplies the bits of bfloat16."""
    return dtype == torch.bfloat16 and is_interpreted()
