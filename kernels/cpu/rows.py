"""Operations on rows of activations, each in one pass over memory, by the native kernels where they are built.

`native_level` says where they run; elsewhere the plain forms beside each of them do (`kernels.activation`,
`kernels.activation`, `kernels.rotary`, `kernels.sampling`). Elements are float32 or bfloat16; arithmetic is float32."""

from typing import Any

import torch
from torch import Tensor

from kernels.cache_rows import int8_row_width
from kernels.cpu.native import load_native, vector_levels

DTYPES = (torch.float32, torch.bfloat16)


_native = load_native("RowNormaliser")


def native_level(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the best level that runs here for tensors of this kind; None: use plain PyTorch."""
    if _native is None or device.type != "cpu" or dtype not in DTYPES:
        return None
    levels = vector_levels()
    return levels[0] if levels else None


class NormRows:
    """Layer normalisation over rows, or the root mean square form of it."""

    __slots__ = ("_bias", "_dtype", "_kernel", "_weight", "_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        is_rms: bool,
        level: str,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`weight` [width], `bias` [width] or None: on the CPU, kept as float32. `dtype`: of the rows; None: the
        weight's."""
        self._dtype = dtype or weight.dtype
        self._weight = weight.float().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        self._width = weight.shape[0]
        assert bias is None or bias.shape == weight.shape, "a bias of another shape"
        addresses = (self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr())
        is_bfloat16 = self._dtype == torch.bfloat16
        self._kernel = _native.RowNormaliser(level, *addresses, self._width, eps, is_rms, is_bfloat16)

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def kernel(self) -> Any:
        return self._kernel

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Normalise x [rows, width] -> normalised [rows, width]. With `residual` of the same shape, residual += x
        first, in place, and the result is the normalised residual. Rows may be strided."""
        assert _is_rows(x, self._width, self._dtype), f"not [rows, {self._width}]: {x.shape}"
        out = torch.empty(x.shape, dtype=x.dtype)
        address, stride = 0, 0
        if residual is not None:
            assert _is_rows(residual, self._width, x.dtype), f"not [rows, {self._width}]: {residual.shape}"
            assert residual.shape == x.shape, "the residual has as many rows"
            address, stride = residual.data_ptr(), residual.stride(0)
        threads = torch.get_num_threads()
        self._kernel.run(x.data_ptr(), x.stride(0), address, stride, out.data_ptr(), x.shape[0], threads)
        return out


class GateRows:
    """activation(gate) * up over rows."""

    __slots__ = ("_dtype", "_kernel")

    ACTIVATIONS = ("silu", "gelu_tanh")

    def __init__(self, activation: str, dtype: torch.dtype, *, level: str) -> None:
        self._dtype = dtype
        self._kernel = _native.Gates(level, activation, dtype == torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, width = x.shape[0], x.shape[1] // 2
        assert _is_rows(x, 2 * width, self._dtype), f"not rows of gates and ups: {x.shape}"
        assert x.is_contiguous(), "gates and ups are one run of memory"
        out = torch.empty((num_rows, width), dtype=x.dtype)
        self._kernel.run(x.data_ptr(), out.data_ptr(), num_rows, width, torch.get_num_threads())
        return out


class HeadRows:
    """Rotates queries and keys, and writes keys and values, or keys alone, into the cache."""

    __slots__ = ("_dtype", "_has_values", "_head_dim", "_int8_width", "_kernel", "_kv_width", "_width")

    def __init__(
        self, num_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, *, level: str, has_values: bool = True
    ) -> None:
        self._dtype = dtype
        self._head_dim = head_dim
        self._kv_width = kv_heads * head_dim
        self._int8_width = int8_row_width(kv_heads, head_dim)
        self._width = (num_heads + (2 if has_values else 1) * kv_heads) * head_dim
        self._has_values = has_values
        self._kernel = _native.Placer(level, num_heads, kv_heads, head_dim, dtype == torch.bfloat16)

    def __call__(
        self, fused: Tensor, rotation: tuple[Tensor, Tensor] | None, slots: Tensor, keys: Tensor, values: Tensor
    ) -> None:
        """Place fused [tokens, (num_heads + 2 * kv_heads) * head_dim]: queries and keys are rotated in place. Without
        values [tokens, (num_heads + kv_heads) * head_dim]; `values` is not read.

        rotation   cos, sin [tokens, 1, rotary_dim / 2] float32; None: nothing is rotated
        slots      [tokens] int64, all different: rows of keys and values to be overwritten; one outside raises
                   ValueError before anything is written
        keys       [slots, kv_heads * head_dim] contiguous, or int8 rows (`kernels.cache_rows`); values alike"""
        count = fused.shape[0]
        assert _is_rows(fused, self._width, self._dtype), f"not rows of queries, keys and values: {fused.shape}"
        slots_at, is_int8 = self.slots(slots, count), self.is_int8_cache(keys, values)
        num_slots = min(keys.shape[0], values.shape[0])
        cached_at = (keys.data_ptr(), values.data_ptr() if self._has_values else 0, num_slots, is_int8)
        angles = (0, 0, 0) if rotation is None else self.angles(rotation, count)
        threads = torch.get_num_threads()
        self._kernel.run(fused.data_ptr(), fused.stride(0), *angles, slots_at, *cached_at, count, threads)

    @property
    def kernel(self) -> Any:
        return self._kernel

    def slots(self, slots: Tensor, count: int) -> int:
        """Check `slots` and return their address."""
        assert slots.dtype == torch.int64, "slots are int64"
        assert slots.shape == (count,), "one slot per token"
        assert slots.is_contiguous(), "slots are one run of memory"
        return slots.data_ptr()

    def is_int8_cache(self, keys: Tensor, values: Tensor) -> bool:
        """Check `keys` and `values` and return whether they are rounded to int8."""
        is_int8 = keys.dtype == torch.int8
        cached_kind = (self._int8_width, torch.int8) if is_int8 else (self._kv_width, self._dtype)
        for cached in (keys, values):
            assert _is_rows(cached, *cached_kind), f"not rows of the cache: {cached.shape}"
            assert cached.is_contiguous(), "the rows of the cache are one run of memory"
        return is_int8

    def angles(self, rotation: tuple[Tensor, Tensor], count: int) -> tuple[int, int, int]:
        """Check `rotation` and return the addresses of its parts, and their width."""
        cos, sin = rotation
        assert 2 * cos.shape[-1] <= self._head_dim, f"angles of wider heads: {cos.shape}"
        for angle in rotation:
            assert angle.dtype == torch.float32, "angles are float32"
            assert angle.is_contiguous(), "angles are one run of memory"
            assert angle.shape == (count, 1, cos.shape[-1]), f"not one row of angles per token: {angle.shape}"
        return cos.data_ptr(), sin.data_ptr(), cos.shape[-1]


def highest(x: Tensor, *, level: str) -> tuple[Tensor, Tensor]:
    """Find, of x [rows, width] on the CPU, the first index of each row's highest element [rows] int64, and the element
    [rows] float32: NaN where the row holds one."""
    num_rows, width = x.shape
    assert width, "a row without elements has no highest"
    assert x.dtype in DTYPES, f"no native kernel for {x.dtype}"
    assert _is_rows(x, width, x.dtype), "not rows of contiguous elements on the CPU"
    indices = torch.empty(num_rows, dtype=torch.int64)
    values = torch.empty(num_rows, dtype=torch.float32)
    shape = (x.stride(0), num_rows, width, (x.dtype == torch.bfloat16))
    results = (indices.data_ptr(), values.data_ptr())
    _native.highest(level, x.data_ptr(), *shape, *results, torch.get_num_threads())
    return indices, values


def _is_rows(x: Tensor, width: int, dtype: torch.dtype) -> bool:
    if x.ndim != 2 or x.shape[1] != width or x.dtype != dtype or x.device.type != "cpu":
        return False
    return width == 1 or x.stride(1) == 1
