"""A step of decodes through all layers of a decoder in one call of the native kernels (kernels/csrc/decode_pass).

A small model computes one token in little more than what a hundred calls from Python and as many wakings of threads
cost. Here threads are woken once per step. Every row runs through the same kernels as it does part by part, so results
are the same, bit by bit."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.cpu.lora import NativeGroups
from kernels.cpu.native import load_native
from kernels.cpu.paged_attention import PagedPlan
from kernels.cpu.rank_exchange import RankExchange
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
    head_norms: tuple[NormRows, NormRows] | None = None  # of each query and of each key head
    attention_post_norm: NormRows | None = None  # of what attention adds to the residual
    mlp_post_norm: NormRows | None = None  # of what the feed-forward part adds


class HeadParts(NamedTuple):
    """The kernels behind the last layer."""

    norm: NormRows
    products: NativeParts


class CacheSlots(NamedTuple):
    """The place of the rows of a cache that take new keys and values, which must outlive it; see `slots_of`."""

    keys: int  # addresses, of the first layer
    values: int
    layer_bytes: int  # from a layer to the next
    num_slots: int  # of the layer with the fewest
    is_int8: bool


class CachePart(NamedTuple):
    """Layers, as many as a block has, that have blocks of their own: where the contexts of a step's rows are there."""

    attention: PagedPlan  # of as many rows, over blocks of the same memory
    slots: Tensor  # [rows] int64, all different, see HeadRows


class PassAdapters(NamedTuple):
    """What the adapters of a pass add to its products, which must outlive the run."""

    groups: tuple[NativeGroups, ...]  # those that add to some product
    of_rows: tuple[Tensor, ...]  # of each: int64 [rows], see kernels.addends
    at_site: list[int]  # which of `groups` adds to the product at a site; -1: none
    widths: list[int]  # of a row of addends, of each product of a layer


class HighestLogits(NamedTuple):
    """The highest logit of each row."""

    token_ids: Tensor  # [rows] int64: the first of equals; 0 where there is a NaN
    values: Tensor  # [rows] float32: NaN where there is one


class AllowedTokens(NamedTuple):
    """The tokens that rows may choose: the highest logit of a row is that of them."""

    places: Tensor  # [rows] int64: of each row's bits; negative: it may choose any token
    bits: Tensor  # [places, words] int32: bit i of word w is for token 32 w + i


class PassTimes(NamedTuple):
    """Seconds that attention, the products of layers and that of the head took, of the time of a step."""

    attention_s: float
    products_s: float
    head_s: float


class Pause(NamedTuple):
    """Names what to call between the parts of a pass, and says how large these are."""

    call: Callable[[], object]
    num_layers: int  # of a part
    num_slices: int  # of the head's columns, a part each


def decode_pass_available() -> bool:
    """Return whether the kernels are built."""
    return _native is not None


class DecodePass:
    """All layers of a decoder, for rows that decode one token each. One run at a time: its memory between the stages is
    kept from run to run."""

    __slots__ = ("_dtype", "_exchange", "_head", "_hidden_size", "_kernel", "_num_layers", "_parts", "_place")

    def __init__(
        self,
        layers: Sequence[LayerParts],
        place: HeadRows,
        hidden_size: int,
        dtype: torch.dtype,
        head: HeadParts | None = None,
        exchange: RankExchange | None = None,
    ) -> None:
        """`dtype` of the rows. `head`: for logits. `exchange`: with the ranks that have the rest of every layer; None:
        there are none. Raises ValueError for parts that do not fit together."""
        self._parts = tuple(layers)  # keeps what the kernel refers to
        self._num_layers = len(self._parts)
        self._place = place
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._kernel = _native.DecodePass(place.kernel, hidden_size)
        for layer in self._parts:
            norms = (layer.attention_norm, layer.mlp_norm, layer.attention_post_norm, layer.mlp_post_norm)
            self._kernel.add_layer(
                [None if norm is None else norm.kernel for norm in norms],
                [list(parts) for parts in (layer.qkv, layer.output, layer.gate_up, layer.down)],
                [norm.kernel for norm in layer.head_norms or ()],
                -1 if layer.rope is None else layer.rope,
                layer.is_windowed,
            )
        self._head = head
        if head is not None:
            self._kernel.set_head(head.norm.kernel, list(head.products))
        self._exchange = exchange
        if exchange is not None:
            self._kernel.set_exchange(exchange.kernel)

    def run(
        self,
        residual: Tensor,
        parts: Sequence[CachePart],
        rotations: Sequence[tuple[Tensor, Tensor]],
        places: Sequence[int],
        cached: CacheSlots,
        logits: Tensor | None = None,
        highest: HighestLogits | None = None,
        allowed: AllowedTokens | None = None,
        adapters: PassAdapters | None = None,
        pause: Pause | None = None,
    ) -> tuple[Tensor, PassTimes]:
        """Run residual [rows, hidden_size] contiguous, updated in place, through all layers.

        parts      of the cache; a slot outside raises ValueError before anything is written
        rotations  cos, sin [rows, 1, rotary_dim / 2] float32 of every rope
        places     of each layer: those of the first part's layers are 0, 1, .., those of the second follow
        logits     [rows, columns of the head] contiguous, to be written; None: they are not kept
        highest    to be written instead of all logits; with neither the head does not run
        allowed    of `highest`; None: any token. A row that may choose none has minus infinity
        adapters   of some rows
        pause      to be called between parts of the pass, in which another run may come and go; None: there is one part
        returns    what the last layer adds to the residual [rows, hidden_size], already added for logits; the times

        Raises ExchangeBroken."""
        count = residual.shape[0]
        self._check_rows(residual)
        if logits is not None:
            num_columns = self._num_columns
            assert logits.shape == (count, num_columns), f"not rows of {num_columns}: {logits.shape}"
            assert logits.dtype == self._dtype, f"rows are {self._dtype}, not {logits.dtype}"
            assert logits.is_contiguous(), "logits are one run of memory"
        pair = (0, 0)
        if highest is not None:
            assert self._head is not None, "a pass without a head"
            assert logits is None, "all logits, or the highest of them"
            pair = (_numbers(highest.token_ids, count, torch.int64), _numbers(highest.values, count, torch.float32))
        bits = (0, 0, 0) if allowed is None else self._bits(allowed, count)
        pending = torch.empty_like(residual)
        rest = (
            count,
            [part.attention for part in parts],
            [self._place.angles(rotation, count) for rotation in rotations],
            [self._place.slots(part.slots, count) for part in parts],
            places,
            *cached,
            _adapter_numbers(adapters, count),
            torch.get_num_threads(),
        )
        head = (0 if logits is None else logits.data_ptr(), pair, bits)
        times = PassTimes(*self._kernel.run(residual.data_ptr(), pending.data_ptr(), *head, *rest, pause))
        if self._exchange is not None:
            self._exchange.check()
        return pending, times

    def logits(self, residual: Tensor, pause: Pause | None = None) -> tuple[Tensor, PassTimes]:
        """Compute the logits [rows, columns of the head] of residual [rows, hidden_size] behind the last layer."""
        self._check_rows(residual)
        logits = torch.empty((len(residual), self._num_columns), dtype=self._dtype)
        rows = (residual.data_ptr(), logits.data_ptr(), len(residual))
        return logits, PassTimes(*self._kernel.run_head(*rows, torch.get_num_threads(), pause))

    def _check_rows(self, residual: Tensor) -> None:
        count = residual.shape[0]
        assert residual.shape == (count, self._hidden_size), f"not rows of {self._hidden_size}: {residual.shape}"
        assert residual.dtype == self._dtype, f"rows are {self._dtype}, not {residual.dtype}"
        assert residual.is_contiguous(), "rows are one run of memory"
        assert residual.device.type == "cpu", "native kernels run on the CPU"

    @property
    def _num_columns(self) -> int:
        assert self._head is not None, "a pass without a head"
        return sum(product.out_width for product in self._head.products)

    def _bits(self, allowed: AllowedTokens, count: int) -> tuple[int, int, int]:
        places, bits = allowed
        num_words = -(-self._num_columns // 32)
        assert bits.dtype == torch.int32, "words are int32"
        assert bits.shape[1:] == (num_words,), f"not {num_words} words: {bits.shape}"
        assert bits.is_contiguous(), "bits are one run of memory"
        address = _numbers(places, count, torch.int64)
        assert int(places.max()) < len(bits), "a place without bits"
        return address, bits.data_ptr(), num_words

    def slots_of(self, keys: Sequence[Tensor], values: Sequence[Tensor]) -> CacheSlots:
        """Find the place of the keys and values of a block's layers: [slots, width], as `HeadRows` takes them."""
        assert 0 < len(keys) == len(values) <= self._num_layers, "keys and values of every layer"
        is_int8 = {self._place.is_int8_cache(*both) for both in zip(keys, values, strict=True)}
        assert len(is_int8) == 1, "layers of one kind"
        distances = set()
        for rows in (keys, values):
            distances |= {after.data_ptr() - before.data_ptr() for before, after in pairwise(rows)}
        assert len(distances) <= 1, "layers are equally far from one another"
        num_slots = min(len(rows) for rows in (*keys, *values))
        layer_bytes = distances.pop() if distances else 0
        return CacheSlots(keys[0].data_ptr(), values[0].data_ptr(), layer_bytes, num_slots, is_int8.pop())


def _adapter_numbers(adapters: PassAdapters | None, count: int) -> tuple[list[Any], list[int], list[int], list[int]]:
    if adapters is None:
        return [], [], [], []
    for of_row in adapters.of_rows:
        assert of_row.dtype == torch.int64, f"not int64: {of_row.dtype}"
        assert of_row.shape == (count,), f"not one for each of {count} rows: {of_row.shape}"
        assert of_row.is_contiguous(), "rows are one run of memory"
    of_rows = [of_row.data_ptr() for of_row in adapters.of_rows]
    return [group.kernel for group in adapters.groups], of_rows, adapters.at_site, adapters.widths


def _numbers(tensor: Tensor, count: int, dtype: torch.dtype) -> int:
    assert tensor.shape == (count,), f"not one for each of {count} rows: {tensor.shape}"
    assert tensor.dtype == dtype, f"numbers are {dtype}, not {tensor.dtype}"
    assert tensor.is_contiguous(), "numbers are one run of memory"
    assert tensor.device.type == "cpu", "native kernels run on the CPU"
    return tensor.data_ptr()
