"""Numbers of FP8 (e4m3) widened by integer operations, which every GPU has: a GPU of compute capability 8.0 converts
none itself."""

import triton
import triton.language as tl


@triton.jit
def float8_values(stored, like):
    """Return bytes of FP8 as numbers of the dtype of `like`, exactly; NaN becomes 480.

    Sign, exponent and mantissa are those of a float16 whose exponent counts from 2**-8 of theirs.
    """
    bits = stored.to(tl.uint16)
    halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return halves.to(tl.float32).to(like.dtype)
