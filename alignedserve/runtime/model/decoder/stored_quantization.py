"""The forms of quantised weights in a checkpoint, by its `quantization_config`; plain values, without torch."""

import enum
from dataclasses import dataclass

MXFP4_GROUP, NVFP4_GROUP = 32, 16  # inputs that share a scale


class QuantMethod(enum.Enum):
    """Formats of quantised checkpoints by their `quant_method`."""

    COMPRESSED_TENSORS = "compressed-tensors"
    AWQ = "awq"
    GPTQ = "gptq"
    FP8 = "fp8"
    MXFP4 = "mxfp4"
    MODELOPT = "modelopt"
    BLOCKS = "gguf_blocks"  # our own: of GGUF's, in safetensors


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """One way in which matrices of a checkpoint may be quantised."""

    num_bits: int
    is_float: bool = False
    group_size: int | None = None  # inputs that share a scale; None: a whole row, or the whole matrix
    block: tuple[int, int] | None = None  # outputs and inputs that share a scale, in place of `group_size`
    is_symmetric: bool = True  # there are no zero points; GPTQ: they are all the same
    has_8_bit_inputs: bool = False  # made for products whose inputs are rounded to 8 bits as well

    @property
    def label(self) -> str:
        bits = f"{'float' if self.is_float else 'int'}{self.num_bits}"
        if self.block is not None:
            return f"{bits} in blocks of {self.block[0]} x {self.block[1]}"
        return bits if self.group_size is None else f"{bits} in groups of {self.group_size}"


@dataclass(frozen=True, slots=True)
class CheckpointQuantization:
    """The quantised matrices of a checkpoint; others are stored as in any folder."""

    method: QuantMethod
    schemes: tuple[WeightScheme, ...]  # every quantised matrix has one of them
    zero_offset: int = 0  # GPTQ: stored zero points are smaller by this
    remarks: tuple[str, ...] = ()  # what the config asks for beside the weights and is done otherwise

    def has_float4(self, group_size: int) -> bool:
        """Return whether matrices may be floats of 4 bits, of which so many share a scale."""
        return any(own.is_float and own.num_bits == 4 and own.group_size == group_size for own in self.schemes)
