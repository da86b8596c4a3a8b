"""The types of tensors in GGUF files: how many values a block of each holds, in how many bytes."""

from typing import NamedTuple

FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


# Types whose products are computed in blocks on a CPU, and the blocks: some wider ones (kernels/block_values).
_COMPUTED_AS = {
    "Q8_0": "Q8_0",
    **dict.fromkeys(("Q5_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_XXS", "IQ1_S"), "Q8_0"),
    "Q3_K": "Q6_K",
    "Q4_0": "Q4_0",
    "Q4_1": "Q4_1",
    "Q4_K": "Q4_K",
    "Q6_K": "Q6_K",
    "MXFP4": "MXFP4",
}
# Of a number on a GPU, in sixteenths, with its share in a float32 scale and a zero point or a float32 minimum.
_GROUPED_BITS = {"Q8_0": 148, "Q6_K": 168, "Q4_0": 84, "Q4_1": 96, "Q4_K": 96, "MXFP4": 68}
# What a block takes more once it is packed: the 6-bit scales and minima of a Q4_K become bytes.
_EXTRA_BYTES = {"Q4_K": 4}


def computed_as(type_name: str) -> str | None:
    """Return the type of blocks in which products are computed; None: the tensor is unpacked."""
    return _COMPUTED_AS.get(type_name)


def packed_row_bytes(type_name: str, width: int) -> int | None:
    """Return the bytes of a row of `width` values once it is packed for products in blocks; None when it is not."""
    computed = _COMPUTED_AS.get(type_name)
    if computed is None:
        return None
    layout = next(layout for layout in TENSOR_TYPES.values() if layout.name == computed)
    num_blocks = width // layout.block_values
    return num_blocks * (layout.block_bytes + _EXTRA_BYTES.get(computed, 0))


def grouped_row_bytes(type_name: str, width: int) -> int | None:
    """Return the bytes of a row of `width` values in groups, as GPUs have them; None where it is unpacked there."""
    bits = _GROUPED_BITS.get(_COMPUTED_AS.get(type_name, ""))
    return None if bits is None else width * bits // 128


def row_bytes(type_name: str, width: int) -> int:
    """Return the bytes of a row of `width` values, which fill blocks."""
    layout = next(layout for layout in TENSOR_TYPES.values() if layout.name == type_name)
    return width // layout.block_values * layout.block_bytes


class TensorType(NamedTuple):
    """One type of tensor."""

    name: str
    block_values: int
    block_bytes: int

    def row_bytes(self, width: int) -> int | None:
        """Return the bytes of a row of `width` values; None when blocks do not fill it."""
        num_blocks, rest = divmod(width, self.block_values)
        return None if rest else num_blocks * self.block_bytes


# By their numbers in files.
TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}
# Named in errors, not read.
OTHER_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0"}
