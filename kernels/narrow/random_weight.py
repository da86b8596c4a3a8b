"""Random weights in every form of numbers, for checks and benchmarks."""

import torch

from kernels.narrow.grouped_linear import GROUPS, HALF_GROUP, GroupedWeight, Numbers


def random_weight(numbers: Numbers, device: torch.device, *shape: int) -> GroupedWeight:
    """Draw a weight of `shape` [.., columns, in_width] in groups of 128 inputs, or fewer where they do not fit; floats
    of 4 bits in groups of 32 (MXFP4) or 16 (NVFP4)."""
    *columns, width = shape
    words = torch.randint(0, 0x7F, (*columns, numbers.num_bytes(width)), dtype=torch.uint8, device=device)
    if numbers is Numbers.MXFP4:
        exponents = torch.randint(110, 118, (*columns, width // GROUPS[0]), dtype=torch.uint8, device=device)
        return GroupedWeight(numbers, words, exponents, None)
    if numbers is Numbers.NVFP4:
        own = torch.randint(0x20, 0x48, (*columns, width // HALF_GROUP), dtype=torch.uint8, device=device)
        return GroupedWeight(numbers, words, own, None, torch.rand(columns, device=device) / width)
    group = next(size for size in reversed(GROUPS) if width % size == 0)
    scales = torch.rand((*columns, width // group), device=device) / width
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device) if numbers.are_whole else None
    return GroupedWeight(numbers, words, scales, zeros)
