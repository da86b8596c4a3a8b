"""What attention's kernels make of scores, and which tokens they read, beside the plain form (`kernels.attention`).

Scores are in units of log2(e), as weights are powers of 2, which is what the hardware computes."""

import math

import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
SCORE_UNIT = tl.constexpr(LOG2_E)


@triton.jit
def capped(scores, cap):
    """Return cap * tanh(scores / cap), by the one power that the hardware computes."""
    return cap - 2.0 * cap / (1.0 + tl.exp2(scores / cap * (2.0 * SCORE_UNIT)))


@triton.jit
def first_read(positions, window, IS_CHUNKED: tl.constexpr):
    """Return the first token that each position reads, perhaps below 0. `window` 0: all up to its own. `IS_CHUNKED`:
    those since the last multiple of the window."""
    if IS_CHUNKED:
        return positions // window * window
    return tl.where(window > 0, positions - window + 1, 0)
