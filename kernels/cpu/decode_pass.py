"""A step of decodes through all layers of a decoder in one call of the native kernels (kernels/csrc/decode_pass).

A small model computes one token in little more than what a hundred calls from Python and as many wakings of threads
cost. Here threads are woken once per step. Every row runs through the same kernels as it does part by part, so results
are the same, bit by bit.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cpu.native import load_native
from kernels.cpu.paged_attention import PagedPlan
from kernels.cpu.rows import HeadRows, NormRows

_native = load_native("DecodePass")

NativeParts = tuple[Any, ...]  # native products whose results lie side by side


@runtime_checkable
class NativeProduct(Protocol):
    """A product that the native kernels may compute."""

    @property
    def native_parts(self) -> NativeParts:
        """Return the native products of the same inputs whose results lie side by side; none: PyTorch computes."""


class LayerParts(NamedTuple):
    """The kernels of a layer: attention, then a feed-forward part of two products, each behind a norm."""

    attention_norm: NormRows
    qkv: NativeParts
    output: NativeParts
    mlp_norm: NormRows
    gate_up: NativeParts
    down: NativeParts
    rope: int | None  # index of its rotation; None: nothing is rotated
    is_windowed: bool


class CacheSlots(NamedTuple):
    """The rows of a cache that take new keys and values, of every layer in turn."""

    keys: Sequence[Tensor]  # [slots, width] contiguous, as `HeadRows` takes them; equally far from layer to layer
    values: Sequence[Tensor]


class PassTimes(NamedTuple):
    """Seconds of a step, of the time between its beginning and its end."""

    attention_s: float
    products_s: float


def decode_pass_available() -> bool:
    """Return whether the kernels are built."""
    return _native is not None


class DecodePass:
    """All layers of a decoder, for rows that decode one token each."""

    __slots__ = ("_dtype", "_hidden_size", "_kernel", "_num_layers", "_parts", "_place")

    def __init__(self, layers: Sequence[LayerParts], place: HeadRows, hidden_size: int, dtype: torch.dtype) -> None:
        """`dtype` of the rows. Raises ValueError for parts that do not fit together."""
        self._parts = tuple(layers)  # keeps what the kernel refers to
        self._num_layers = len(self._parts)
        self._place = place
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._kernel = _native.DecodePass(place.kernel, hidden_size)
        for layer in self._parts:
            products = (layer.qkv, layer.output), (layer.gate_up, layer.down)
            (qkv, output), (gate_up, down) = ([list(parts) for parts in pair] for pair in products)
            rope = -1 if layer.rope is None else layer.rope
            norms = layer.attention_norm.kernel, layer.mlp_norm.kernel
            self._kernel.add_layer(norms[0], qkv, output, norms[1], gate_up, down, rope, layer.is_windowed)

    def run(
        self,
        residual: Tensor,
        attention: PagedPlan,
        rotations: Sequence[tuple[Tensor, Tensor]],
        slots: Tensor,
        cached: CacheSlots,
    ) -> tuple[Tensor, PassTimes]:
        """Run residual [rows, hidden_size] contiguous, updated in place, through all layers.

        attention  of as many rows, over the blocks of `cached`
        rotations  cos, sin [rows, 1, rotary_dim / 2] float32 of every rope
        slots      [rows] int64, all different, see HeadRows; one outside raises ValueError before anything is written
        returns    what the last layer adds to the residual [rows, hidden_size], and the times
        """
        count = residual.shape[0]
        assert residual.shape == (count, self._hidden_size), f"not rows of {self._hidden_size}: {residual.shape}"
        assert residual.dtype == self._dtype, f"rows are {self._dtype}, not {residual.dtype}"
        assert residual.is_contiguous(), "rows are one run of memory"
        assert residual.device.type == "cpu", "native kernels run on the CPU"
        pending = torch.empty_like(residual)
        times = self._kernel.run(
            residual.data_ptr(),
            pending.data_ptr(),
            count,
            attention,
            [self._place.angles(rotation, count) for rotation in rotations],
            self._place.slots(slots, count),
            *self._cache_addresses(cached),
            torch.get_num_threads(),
        )
        return pending, PassTimes(*times)

    def _cache_addresses(self, cached: CacheSlots) -> tuple[int, int, int, int, bool]:
        """Return the first layer's keys and values, the bytes to the next layer's, slots, and whether they are int8."""
        assert len(cached.keys) == len(cached.values) == self._num_layers, "keys and values of every layer"
        keys, values = cached.keys[0].data_ptr(), cached.values[0].data_ptr()
        layer_bytes = cached.keys[1].data_ptr() - keys if self._num_layers > 1 else 0
        is_int8 = self._place.is_int8_cache(cached.keys[-1], cached.values[-1])
        last = (self._num_layers - 1) * layer_bytes
        assert cached.keys[-1].data_ptr() == keys + last, "layers are equally far from one another"
        assert cached.values[-1].data_ptr() == values + last, "layers are equally far from one another"
        return keys, values, layer_bytes, min(cached.keys[-1].shape[0], cached.values[-1].shape[0]), is_int8
