"""LFM2's short convolution: gates before and behind a causal convolution, each channel by itself."""

from collections.abc import Sequence

from torch import Tensor

from kernels.states.convolution import ConvolutionGates, causal_convolution
from kernels.states.device_rows import DeviceStateRows
from kernels.states.state_rows import StateRows


class ShortConvolution:
    """Projected rows (gate, gate behind, inputs) [tokens, 3 * width] -> [tokens, width]. See StateMixer."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` [kernel_size, width], `bias` [width]: float32."""
        self._weight, self._bias = weight, bias

    def __call__(self, projected: Tensor, rows: StateRows | DeviceStateRows, state: Sequence[Tensor]) -> Tensor:
        """The state has the rows before: [blocks, kernel_size - 1, width]."""
        gate, gate_behind, x = projected.chunk(3, dim=1)
        (tails,) = state
        return causal_convolution(x, self._weight, self._bias, rows, tails, ConvolutionGates(gate, gate_behind))
