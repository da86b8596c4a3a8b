"""Matrix products with weights packed for the native kernels (kernels/csrc/products.h).

Panels of 32 columns are read from memory once and multiplied by up to 14 rows at a time, or by 32 where the processor
has tiles (AMX), whose sums stay in registers; meanwhile the next panel is fetched. Bias, nonlinearity
and gates are applied before a result is written.

Matrix products with weights of 8 bits, by the native kernels or through oneDNN (VNNI where the processor has it).

Weights are rounded once, symmetrically, with one scale per output, or come so; inputs on every call, symmetrically,
with one scale per row, so that what shares the batch never changes a row's result. Sums are exact (32-bit integers).

Worked example: weight row [0.5, -1.27] has scale 1.27 / 127 = 0.01 and is kept as [50, -127]; input row [2.54, 1.27]
has scale 0.02 and becomes [127, 64]; the product is (127 * 50 - 64 * 127) * 0.02 * 0.01 = -0.356 for -0.343."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.activation import ACTIVATIONS, Gated
from kernels.addends import NO_ADDENDS, Addends
from kernels.cpu.native import load_native

_ELEMENTS = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
_STORED = {**_ELEMENTS, torch.float16: "float16", torch.int8: "int8"}
_IN_MEMORY = -1
INT8 = "int8"


_native = load_native("PackedWeight")


def packed_levels(element: torch.dtype | str, device: torch.device) -> tuple[str, ...]:
    """Return the levels, best first, that are built and multiply weights of `element` (a dtype, or INT8) here."""
    name = element if isinstance(element, str) else _ELEMENTS.get(element)
    if _native is None or device.type != "cpu" or name is None:
        return ()
    return tuple(_native.product_levels(name))


def fits(dtype: torch.dtype, in_width: int) -> bool:
    """Return whether a row of such a weight consists of whole operands of one instruction: pairs of bfloat16."""
    return dtype != torch.bfloat16 or in_width % 2 == 0


class FileRows(NamedTuple):
    """Rows [num_rows, in_width] of a weight that lie in a file, one after another."""

    path: Path
    offset: int
    num_rows: int
    in_width: int
    dtype: torch.dtype  # float32, bfloat16 or float16


class PackedLinear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], dtype of the weight. With gates, the
    first half of the weight's rows: activation(gate) * up. With `element` INT8, see `int8_linear`: one scale per
    output, and one per row of inputs."""

    __slots__ = ("_dtype", "_weight", "in_width", "out_width")

    def __init__(
        self,
        weight: Tensor | Sequence[FileRows],
        bias: Tensor | None,
        *,
        level: str,
        element: torch.dtype | str,
        activation: str | None = None,
        is_gated: bool = False,
        scales: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`weight` [columns, in_width], or rows in files that follow each other, and `bias` [columns]: read here, not
        kept. `element`: a dtype, or INT8. `activation`: a name in ACTIVATIONS. `scales` float32 [columns]: of a weight
        that is int8 already. `dtype` of inputs and results: needed with these and with rows in files, which are
        converted to it; otherwise the weight's. Raises ValueError for an unavailable level and for numbers that INT8
        cannot round, OSError when a file cannot be read, MemoryError when the packed weight does not fit."""
        if isinstance(weight, Tensor):
            assert (weight.dtype == torch.int8) == (scales is not None) == (dtype is not None), "int8 has scales"
            weight = weight.contiguous()
            columns, self.in_width = weight.shape
            self._dtype = dtype or weight.dtype
        else:
            assert dtype is not None, "rows in files are converted to a dtype"
            columns, self.in_width = sum(rows.num_rows for rows in weight), weight[0].in_width
            assert all(rows.in_width == self.in_width for rows in weight), "rows of one width"
            self._dtype = dtype
        for part in (bias, scales):
            assert part is None or part.shape == (columns,), (
                f"not one number for each of {columns} columns: {part.shape}"
            )
        self.out_width = columns // 2 if is_gated else columns
        bias = None if bias is None else bias.float().contiguous()
        scales = None if scales is None else scales.float().contiguous()
        name = element if isinstance(element, str) else _ELEMENTS[element]
        then = (self.in_width, _address(bias), activation or "none", is_gated, _address(scales))
        with _runs(weight) as runs:
            is_bfloat16, threads = self._dtype == torch.bfloat16, torch.get_num_threads()
            self._weight = _native.PackedWeight(level, name, is_bfloat16, runs, *then, threads)

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native product, see `kernels.cpu.decode_pass`."""
        return (self._weight,)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the packed weight."""
        return int(self._weight.num_bytes)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1, possibly strided -> [rows, out_width]."""
        num_rows = x.shape[0]
        assert x.ndim == 2, f"not rows: {x.shape}"
        assert x.shape[1] == self.in_width, f"not rows of {self.in_width}: {x.shape}"
        assert x.dtype == self._dtype, f"inputs are {self._dtype}, not {x.dtype}"
        if self.in_width > 1 and x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty((num_rows, self.out_width), dtype=x.dtype)
        is_bfloat16 = x.dtype == torch.bfloat16
        rows = (x.data_ptr(), x.stride(0), out.data_ptr(), num_rows, is_bfloat16)
        numbers = NO_ADDENDS if addends is None else addends.native_numbers(self.out_width)
        self._weight.run(*rows, numbers, torch.get_num_threads())
        return out


def weight_memories() -> list[tuple[int, int]]:
    """Return address and bytes, both whole pages, of the memory of every packed weight of this process."""
    return list(_native.weight_memories()) if _native is not None else []


@contextmanager
def _runs(weight: Tensor | Sequence[FileRows]) -> Iterator[list[tuple[int, int, int, str]]]:
    if isinstance(weight, Tensor):
        yield [(_IN_MEMORY, weight.data_ptr(), len(weight), _STORED[weight.dtype])]
        return
    opened: dict[Path, int] = {}
    try:
        for rows in weight:
            if rows.path not in opened:
                opened[rows.path] = os.open(rows.path, os.O_RDONLY | os.O_CLOEXEC)
        yield [(opened[rows.path], rows.offset, rows.num_rows, _STORED[rows.dtype]) for rows in weight]
    finally:
        for file_descriptor in opened.values():
            os.close(file_descriptor)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


_LARGEST = 127.0
_ZERO_POINT = 128
_SMALLEST_SCALE = 1e-12  # of a row of zeros


class Int8Linear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], dtype of the weight it was made from, or
    `dtype`. With gates: activation(gate) * up, of a weight whose first half makes the gates."""

    __slots__ = ("_multiply", "in_width", "out_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        activation: str | None = None,
        is_gated: bool = False,
        scales: Tensor | None = None,
        dtype: torch.dtype | None = None,
        allow_native: bool = True,
    ) -> None:
        """`weight` [columns, in_width] float, on the CPU, of finite numbers, or int8 with finite `scales` float32
        [columns] and a `dtype` of inputs and results; `bias` [columns]. Keeps none of them. See `int8_obstacle` for
        what does not pack."""
        computed = dtype or weight.dtype
        columns, self.in_width = weight.shape
        self.out_width = columns // 2 if is_gated else columns
        levels = packed_levels(INT8, weight.device) if allow_native else ()
        self._multiply: PackedLinear | _OneDnnInt8
        if levels and computed in (torch.float32, torch.bfloat16):
            self._multiply = PackedLinear(
                weight,
                bias,
                level=levels[0],
                element=INT8,
                activation=activation,
                is_gated=is_gated,
                scales=scales,
                dtype=dtype,
            )
            return
        then = None if activation is None or is_gated else ACTIVATIONS[activation]
        if is_gated:
            assert activation is not None, "gates without a nonlinearity"
            then = Gated(activation, computed, weight.device)
        if scales is None:
            weight, scales = _rounded(weight)
        self._multiply = _OneDnnInt8(weight, scales, bias, computed, then, is_gated=is_gated)

    @property
    def native_parts(self) -> tuple[Any, ...]:
        """Return the native product, see `kernels.cpu.decode_pass`; none where there is none."""
        return self._multiply.native_parts if isinstance(self._multiply, PackedLinear) else ()

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return self._multiply(x, addends)


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    scales = weight.abs().amax(dim=1).float().div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
    return torch.div(weight, scales[:, None]).round_().to(torch.int8), scales


class _OneDnnInt8:
    __slots__ = ("_bias", "_dtype", "_is_gated", "_packed", "_scales", "_then", "_zeros")

    def __init__(
        self,
        weight: Tensor,
        scales: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        then: Callable[[Tensor], Tensor] | None,
        *,
        is_gated: bool,
    ) -> None:
        self._dtype = dtype
        self._is_gated = is_gated
        self._bias = None if bias is None else bias.float()
        self._then = then
        self._packed: Tensor = torch.ops.onednn.qlinear_prepack(weight, None)
        self._scales = scales.float()
        self._zeros = torch.zeros(weight.shape[0], dtype=torch.int64)

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        row_scales = x.abs().amax(dim=1, keepdim=True).float().div_(_LARGEST).clamp_(min=_SMALLEST_SCALE)
        # oneDNN's fast path takes unsigned inputs; for signed ones it falls back to a loop hundreds of times as slow.
        rounded = torch.div(x, row_scales).round_().add_(_ZERO_POINT).to(torch.uint8)
        if _onednn_adds_exactly():
            product = self._product(rounded, 1.0, _ZERO_POINT)
        else:  # in two parts, of 7 bits and of the last
            product = self._product(rounded >> 1, 2.0, _ZERO_POINT >> 1).add_(self._product(rounded & 1, 1.0, 0))
        product.mul_(row_scales)
        if self._bias is not None:
            product.add_(self._bias)
        if addends is not None:
            product = addends.added_to(product, is_gated=self._is_gated)
        product = product.to(self._dtype)
        return product if self._then is None else self._then(product)

    def _product(self, x: Tensor, scale: float, zero_point: int) -> Tensor:
        weight = (self._packed, self._scales, self._zeros, None)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            x, scale, zero_point, *weight, 1.0, 0, torch.float32, "none", [], ""
        )
        return product


@cache
def _onednn_adds_exactly() -> bool:
    """Return whether sums of products are exact: without VNNI, the sum of two is cut to 16 bits, and 8 bits by 7 fill
    more."""
    weight = torch.full((16, 64), int(_LARGEST), dtype=torch.int8)
    linear = _OneDnnInt8(weight, torch.ones(16), None, torch.float32, None, is_gated=False)
    x = torch.full((1, 64), 255, dtype=torch.uint8)
    return bool((linear._product(x, 1.0, 0) == 255 * _LARGEST * 64).all())


def has_int8_products() -> bool:
    """Return whether products of 8 bits can be computed on this CPU."""
    has_onednn = torch._C._has_mkldnn and hasattr(torch.ops.onednn, "qlinear_prepack")
    return has_onednn or bool(packed_levels(INT8, torch.device("cpu")))


def int8_obstacle(weight: Tensor) -> str | None:
    """Return why this weight cannot be packed with 8 bits; None when it can."""
    if weight.device.type != "cpu":
        return f"8-bit products run on a CPU, the weight is on {weight.device}"
    if not has_int8_products():
        return "neither the native kernels nor this build of PyTorch have products of 8 bits"
    if not bool(weight.isfinite().all()):
        return "it holds numbers that are not finite"
    return None
