"""Block formats in plain PyTorch, beside the `gguf` package's."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from alignedserve.gguf.tensor_types import grouped_row_bytes
from kernels.block_formats import BLOCK_FORMATS, dequantize, grouped_blocks, has_finite_scales
from tests.support.block_weights import random_blocks

types = pytest.mark.parametrize("type_name", list(BLOCK_FORMATS))


@pytest.mark.parametrize("type_name", [name for name in BLOCK_FORMATS if name[0] == "Q"])
def test_the_same_numbers_as_gguf(type_name: str) -> None:
    raw = random_blocks(type_name, 7, 1024)
    expected = quants.dequantize(raw.numpy(), GGMLQuantizationType[type_name])
    assert np.array_equal(dequantize(raw, type_name).numpy(), expected)


@types
def test_groups_have_the_values_of_blocks(type_name: str) -> None:
    """As GPUs have them, in as many bytes as are planned for."""
    raw = random_blocks(type_name, 7, 1024)
    weight = grouped_blocks(raw, type_name)
    weight.check()
    assert torch.equal(weight.unpacked(torch.float32), dequantize(raw, type_name))
    planned = grouped_row_bytes(type_name, 1024)
    parts = (weight.words, weight.scales, weight.zeros, weight.minima)
    assert planned in (None, sum(part.nbytes for part in parts if part is not None) // 7)
    assert (planned is None) == (type_name[0] == "G")


def test_the_worked_example() -> None:
    raw = torch.zeros(1, 18, dtype=torch.uint8)
    raw[0, :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    raw[0, 2] = 0x3F
    unpacked = dequantize(raw, "Q4_0")
    assert (float(unpacked[0, 0]), float(unpacked[0, 16]), float(unpacked[0, 1])) == (3.5, -2.5, -4.0)


def test_groups_of_4_bits() -> None:
    raw = torch.zeros(1, 72, dtype=torch.uint8)
    raw[0, :8] = torch.tensor([0.5, -3.5]).view(torch.uint8)
    raw[0, 8 + 16] = 0x3F  # of the second block, inputs 32 and 48
    unpacked = dequantize(raw, "G4_128")
    assert (float(unpacked[0, 32]), float(unpacked[0, 48]), float(unpacked[0, 1])) == (4.0, -2.0, -3.5)


@types
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_scales_that_are_not_finite_are_found(wrong: float, type_name: str) -> None:
    layout = BLOCK_FORMATS[type_name]
    raw = random_blocks(type_name, 3, 512)
    assert has_finite_scales(raw, type_name)
    dtype = torch.float16 if layout.scale_bytes == 2 else torch.float32
    no_exponent = torch.tensor([0xFF], dtype=torch.uint8)  # what MXFP4 has for all of these
    scale = no_exponent if layout.scale_bytes == 1 else torch.tensor([wrong], dtype=dtype).view(torch.uint8)
    for place in layout.scale_places:
        broken = raw.clone()
        broken[1, layout.num_bytes + place :][: layout.scale_bytes] = scale
        assert not has_finite_scales(broken, type_name)
        assert not dequantize(broken, type_name).isfinite().all()


def test_what_is_no_format_or_not_whole_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Q3_K"):
        dequantize(torch.zeros(1, 110, dtype=torch.uint8), "Q3_K")
    with pytest.raises(ValueError, match="34 bytes"):
        dequantize(torch.zeros(1, 35, dtype=torch.uint8), "Q8_0")
    with pytest.raises(ValueError, match="int8"):
        dequantize(torch.zeros(1, 34, dtype=torch.int8), "Q8_0")
    with pytest.raises(ValueError, match="filled"):
        BLOCK_FORMATS["Q4_K"].row_bytes(288)
