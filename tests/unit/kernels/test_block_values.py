"""Unpacking of every type of GGUF tensor against the `gguf` package."""

import gguf
import numpy as np
import pytest

from alignedserve.gguf.tensor_types import OTHER_TYPES, TENSOR_TYPES, computed_as
from kernels import block_values
from kernels import block_values as wider_blocks

NAMES = [known.name for known in TENSOR_TYPES.values()]


@pytest.mark.parametrize("name", NAMES)
def test_any_bits_unpack_as_in_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_values, "_CHUNK_VALUES", 1024)  # several chunks, the last one shorter
    tensor_type = gguf.GGMLQuantizationType[name]
    block_values_, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (7, 768 // block_values_ * block_bytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        ours = block_values.unpack_rows(raw, name)
        theirs = gguf.quants.dequantize(raw, tensor_type)
    assert ours.dtype == np.float32
    np.testing.assert_array_equal(ours, theirs)


# The scale of a wider block is a float16: that of the file, or one within 2^-12 of it.
@pytest.mark.parametrize("name", [name for name in NAMES if computed_as(name) not in (None, name)])
def test_wider_blocks_hold_the_same_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wider_blocks, "_CHUNK_ROWS", 3)
    values, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    raw = np.random.default_rng(1).integers(0, 256, (7, 768 // values, block_bytes), dtype=np.uint8)
    scale = slice(108, 110) if name == "Q3_K" else slice(0, 2)
    raw[..., scale] = np.frombuffer(np.float16(0.00173).tobytes(), np.uint8)
    raw[3, :, scale] = 0
    rows = raw.reshape(7, -1)
    wide = computed_as(name)
    assert wide is not None
    found = block_values.unpack_rows(wider_blocks.wider_blocks(rows, name), wide)
    expected = block_values.unpack_rows(rows, name)
    assert abs(expected).max() > 0.01
    is_exact = name in ("Q5_0", "IQ4_NL", "Q3_K")
    np.testing.assert_allclose(found, expected, rtol=1e-6 if is_exact else 2**-11, atol=0)


def test_the_worked_example() -> None:
    block = np.zeros((1, 22), np.uint8)
    block[0, :2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[0, 2] = 1  # the fifth bit of place 0
    block[0, 6] = 0x3F
    values = block_values.unpack_rows(block, "Q5_0")[0]
    assert (values[0], values[16]) == (7.5, -6.5)


def test_types_have_the_packages_numbers_and_sizes() -> None:
    for number, known in TENSOR_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == known.name
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (known.block_values, known.block_bytes)
    for number, name in OTHER_TYPES.items():
        assert gguf.GGMLQuantizationType(number).name == name
