"""Random weights in blocks."""

import torch
from torch import Tensor

from kernels.block_formats import BLOCK_FORMATS


def random_blocks(type_name: str, rows: int, width: int, seed: int = 0) -> Tensor:
    """Make rows of any bits, but scales of the size that files have: uint8 [rows, row bytes]."""
    layout, generator = BLOCK_FORMATS[type_name], torch.Generator().manual_seed(seed)
    num_blocks = rows * layout.row_bytes(width) // layout.num_bytes
    blocks = torch.randint(0, 256, (num_blocks, layout.num_bytes), dtype=torch.uint8, generator=generator)
    if layout.scale_bytes == 1:  # a power of two
        blocks[:, 0] = torch.randint(117, 122, (num_blocks,), dtype=torch.uint8, generator=generator)
        return blocks.reshape(rows, -1)
    dtype = torch.float16 if layout.scale_bytes == 2 else torch.float32
    for place in layout.scale_places:
        scales = torch.randn(num_blocks, 1, generator=generator).mul_(0.01).to(dtype)
        blocks[:, place : place + layout.scale_bytes] = scales.view(torch.uint8)
    return blocks.reshape(rows, -1)
