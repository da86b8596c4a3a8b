"""Matrix products with weights in the blocks of a GGUF file, by the native kernels (kernels/csrc/block_products).

Weights keep their bits; packing reorders them. Inputs are rounded on every call to 8 bits, symmetrically, each block of
32 of a row by a scale of its own, so that what shares the batch never changes a row's result. Sums over a block are
exact (32-bit integers), scales and sums over blocks are float32.

Worked example: a Q4_0 block has scale 0.5 and quants 15, 3 and otherwise 8, that is weights 3.5, -2.5 and 0; inputs
1.27, 0.5 and otherwise 0 have scale 0.01 and become 127, 50; the product is (127 * 7 - 50 * 5) * 0.5 * 0.01 = 3.195."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.addends import NO_ADDENDS, Addends
from kernels.block_formats import dequantize, format_named, has_finite_scales
from kernels.cpu.native import load_native
from kernels.linear import Linear

_native = load_native("BlockWeight")


def block_levels() -> tuple[str, ...]:
    """Return the levels, best first, that multiply weights in blocks here; none without the extension."""
    return () if _native is None else tuple(_native.block_levels())


def block_obstacle(raw_rows: Tensor, type_name: str) -> str | None:
    """Explain why this weight cannot be multiplied in its blocks; None when it can. Raises ValueError for a type that
    is not in BLOCK_FORMATS."""
    format_named(type_name)
    if raw_rows.device.type != "cpu":
        return f"products of blocks run on a CPU, the weight is on {raw_rows.device}"
    if not has_finite_scales(raw_rows, type_name):
        return "it holds numbers that are not finite"
    return None


class BlockQuantizedLinear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], of dtype `dtype`. With gates, the first
    half of the weight's rows: activation(gate) * up. Where the extension is not built the weight is unpacked to `dtype`
    once, and plain products compute the same without rounding inputs."""

    __slots__ = ("_dtype", "_unpacked", "_weight", "in_width", "out_width")

    def __init__(
        self,
        raw_rows: Tensor,
        type_name: str,
        in_features: int,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        activation: str | None = None,
        is_gated: bool = False,
        level: str | None = None,
        allow_native: bool = True,
    ) -> None:
        """`raw_rows` uint8 [columns, row bytes], on the CPU, of blocks named `type_name` as in the file, and `bias`
        [columns]: read here, not kept. `dtype` of inputs and results: float32 or bfloat16. `activation`: a name in
        ACTIVATIONS, needed with gates. `level`: one of `block_levels`, otherwise the best. Raises ValueError for
        an unavailable type or level and for rows that are not `in_features` values, MemoryError when the packed
        weight does not fit. See `block_obstacle` for what else does not pack."""
        _check_rows(raw_rows, type_name, in_features, is_gated)
        columns, self.in_width = raw_rows.shape[0], in_features
        assert bias is None or bias.shape == (columns,), f"not one number for each of {columns} columns: {bias.shape}"
        self.out_width = columns // 2 if is_gated else columns
        self._dtype = dtype
        self._unpacked: Linear | None = None
        if not allow_native or _native is None or dtype not in (torch.float32, torch.bfloat16):
            weight = dequantize(raw_rows, type_name).to(dtype)
            bias = None if bias is None else bias.to(dtype)
            self._unpacked = Linear(weight, bias, activation=activation, is_gated=is_gated)
            return
        assert activation is not None or not is_gated, "gates without a nonlinearity"
        raw_rows = raw_rows.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        address = 0 if bias is None else bias.data_ptr()
        source = (raw_rows.data_ptr(), columns, in_features, address)
        level = level or block_levels()[0]
        self._weight = _native.BlockWeight(level, type_name, *source, activation or "none", is_gated)

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native product, see `kernels.cpu.decode_pass`; none where the weight is unpacked."""
        return () if self._unpacked is not None else (self._weight,)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed weight; 0 where the weight is unpacked."""
        return 0 if self._unpacked is not None else int(self._weight.num_bytes)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width], possibly strided -> [rows, out_width]."""
        out = torch.empty((x.shape[0], self.out_width), dtype=x.dtype)
        self.multiply_into(x, out, addends)
        return out

    def multiply_into(self, x: Tensor, out: Tensor, addends: Addends | None = None) -> None:
        """Multiply into `out` [rows, out_width], whose rows may be strided."""
        assert x.ndim == 2, f"not rows: {x.shape}"
        assert x.shape[1] == self.in_width, f"not rows of {self.in_width}: {x.shape}"
        assert x.dtype == out.dtype == self._dtype, f"inputs and results are {self._dtype}, not {x.dtype}, {out.dtype}"
        assert out.shape == (x.shape[0], self.out_width), f"not rows of {self.out_width}: {out.shape}"
        if not len(x):
            return
        if self._unpacked is not None:
            out.copy_(self._unpacked(x, addends))
            return
        assert self.out_width == 1 or out.stride(1) == 1, "the results of a row are one run of memory"
        if x.stride(1) != 1:
            x = x.contiguous()
        rows = (x.data_ptr(), x.stride(0), out.data_ptr(), out.stride(0), x.shape[0])
        numbers = NO_ADDENDS if addends is None else addends.native_numbers(self.out_width)
        self._weight.run(*rows, x.dtype == torch.bfloat16, numbers, torch.get_num_threads())


class PartLinear(Protocol):
    """A part of a `JoinedLinear`."""

    in_width: int
    out_width: int

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed weight; 0 where it is unpacked."""

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native product, if it has one."""

    def multiply_into(self, x: Tensor, out: Tensor, addends: Addends | None = None) -> None:
        """Multiply x [rows, in_width] -> out [rows, out_width], rows possibly strided."""


class JoinedLinear:
    """Products of the same inputs side by side, such as queries, keys and values whose blocks are of several types."""

    __slots__ = ("_parts", "in_width", "out_width")

    def __init__(self, parts: Sequence[PartLinear]) -> None:
        """`parts`, one at least, of one width of inputs."""
        widths = {part.in_width for part in parts}
        assert len(widths) == 1, f"not of one width of inputs: {widths}"
        (self.in_width,) = widths
        self.out_width = sum(part.out_width for part in parts)
        self._parts = tuple(parts)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed weights; 0 where one is unpacked."""
        sizes = [part.num_bytes for part in self._parts]
        return sum(sizes) if all(sizes) else 0

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native products, see `kernels.cpu.decode_pass`; none where a weight is unpacked."""
        native = [part.native_parts for part in self._parts]
        return tuple(product for product_parts in native for product in product_parts) if all(native) else ()

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width] -> [rows, out_width]."""
        out = torch.empty((x.shape[0], self.out_width), dtype=x.dtype)
        first = 0
        for part in self._parts:
            own = None if addends is None else addends.from_column(first)
            part.multiply_into(x, out[:, first : first + part.out_width], own)
            first += part.out_width
        return out


def _check_rows(raw_rows: Tensor, type_name: str, in_features: int, is_gated: bool) -> None:
    expected = format_named(type_name).row_bytes(in_features)
    if raw_rows.ndim != 2 or raw_rows.dtype != torch.uint8 or raw_rows.shape[1] != expected or not len(raw_rows):
        shape = tuple(raw_rows.shape)
        raise ValueError(
            f"{type_name} rows of {in_features} are [rows, {expected}] bytes, not {raw_rows.dtype} {shape}"
        )
    if raw_rows.device.type != "cpu":
        raise ValueError(f"products of blocks run on a CPU, the weight is on {raw_rows.device}")
    if is_gated and len(raw_rows) % 2:
        raise ValueError(f"{len(raw_rows)} rows are not gates and as many ups")
