"""Matrix products with weights of 4 or 8 bits in groups, on GPUs: quantised checkpoints as stored.

A group of inputs has a scale for each output, and whole numbers a zero point or a minimum: a weight is
scale * (number - zero point), or scale * number + minimum; or scale * number of floats: FP8 (e4m3), or 4 bits (e2m1)
with powers of two as scales (MXFP4), or with scales of FP8 and a factor (NVFP4). Inputs are not rounded. Scales of
blocks of outputs and inputs (128 x 128, say) are repeated for every output, so that rows can be cut and reordered.

Worked example: numbers [8, 11] of 4 bits with zero point 8 and scale 0.5 are [0, 1.5]; inputs [2, 4] give 6.

Mixtures of experts on a GPU: rows lie sorted by expert, and every expert's weights meet its own rows alone.

All of it on the device: nothing waits for the routing, whatever the number of rows, so that a CUDA graph can record it,
and of the weights only those of chosen experts are read. Example: rows 0, 1 and 2 choose experts 2, 0 and 2 of three;
sorted they are rows 1, 0, 2, and the experts' rows end at 1, 1 and 3."""

import enum
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from kernels.activation import ACTIVATIONS, Activated, Gated
from kernels.addends import Addends
from kernels.block_values import FLOATS_OF_4_BITS
from kernels.feed_forward import Router, Routing, weighted
from kernels.gpu_dispatch import can_launch, fused_kernels

_LIBRARY_BYTES = 16  # rows of which its operands must be multiples


class ExpertRows(NamedTuple):
    """The rows of a pass by expert."""

    rows: Tensor  # integers [rows * chosen]: the row in the pass that each sorted row is
    places: Tensor  # integers [rows, chosen]: the place of each choice among the sorted rows
    ends: Tensor  # int32 [experts]: behind each expert's last sorted row

    @property
    def experts(self) -> Tensor:
        """Return the expert of each sorted row: int64 [rows * chosen]."""
        places = torch.arange(len(self.rows), dtype=self.ends.dtype, device=self.ends.device)
        return torch.searchsorted(self.ends, places, right=True)


def rows_by_expert(experts: Tensor, num_experts: int) -> ExpertRows:
    """Sort the choices `experts` [rows, chosen] of integers, with PyTorch's operations."""
    flat = experts.flatten().long()
    order = flat.argsort(stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    ends = counts.scatter_add_(0, flat, torch.ones_like(flat)).cumsum(0).int()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=flat.device))
    return ExpertRows(order // experts.shape[1], places.view(experts.shape), ends)


class ExpertProduct(Protocol):
    """One product of all experts."""

    in_width: int
    out_width: int

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1, sorted by expert -> [rows, out_width]."""


def by_every_expert(x: Tensor, rows: ExpertRows, weights: Callable[[int], Tensor]) -> Tensor:
    """Multiply x [rows, in_width] by all `weights`, [columns, in_width] each, and keep of each row its own expert's.
    The way of plain PyTorch that reads nothing on the host; where no kernel runs."""
    experts, out = rows.experts[:, None], None
    for expert in range(len(rows.ends)):
        product = functional.linear(x, weights(expert))
        out = product if out is None else torch.where(experts == expert, product, out)
    assert out is not None, "no experts"
    return out


class ExpertWeights(NamedTuple):
    """The plain weights of one product of all experts."""

    weight: Tensor  # [experts, out_width, in_width]
    bias: Tensor | None = None  # [experts, out_width]


class ExpertBias:
    """The biases of one product of all experts."""

    __slots__ = ("_bias", "_kernels")

    def __init__(self, bias: Tensor) -> None:
        self._bias = bias.contiguous()
        self._kernels: Any | None = fused_kernels("expert_rows", bias.device, bias.dtype)

    def add_to(self, product: Tensor, rows: ExpertRows) -> Tensor:
        """Add to a product [rows, out_width], contiguous, each row its expert's; in place."""
        if self._kernels is None:
            return product.add_(self._bias.index_select(0, rows.experts))
        self._kernels.add_biases(product, self._bias, rows.ends)
        return product


class StackedProduct:
    """The product with plain weights that lie side by side."""

    __slots__ = ("_bias", "_has_library", "_kernels", "_weight", "in_width", "out_width")

    def __init__(self, weights: ExpertWeights) -> None:
        """`weights`: kept."""
        self._weight = weights.weight.contiguous()
        self._bias = None if weights.bias is None else ExpertBias(weights.bias)
        device, dtype = self._weight.device, self._weight.dtype
        _, self.out_width, self.in_width = self._weight.shape
        self._has_library = has_grouped_products(self._weight)
        self._kernels: Any | None = None if self._has_library else fused_kernels("stacked_weights", device, dtype)

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        product = self._multiplied(x, rows)
        return product if self._bias is None else self._bias.add_to(product, rows)

    def _multiplied(self, x: Tensor, rows: ExpertRows) -> Tensor:
        if self._has_library:
            return functional.grouped_mm(x, self._weight.mT, offs=rows.ends)
        if self._kernels is not None:
            product: Tensor = self._kernels.multiply_sorted(x, self._weight, rows.ends)
            return product
        return by_every_expert(x, rows, self._weight.__getitem__)


def has_grouped_products(weight: Tensor) -> bool:
    """Return whether `torch.nn.functional.grouped_mm` multiplies by these weights [experts, columns, in_width] without
    the host: elsewhere it reads the rows' ends there, and calls a product for each expert."""
    device = weight.device
    if device.type != "cuda" or weight.dtype != torch.bfloat16:
        return False
    major, minor = torch.cuda.get_device_capability(device)
    is_aligned = all(side * weight.element_size() % _LIBRARY_BYTES == 0 for side in weight.shape[1:])
    if not is_aligned or ((major, minor) != (9, 0) and major != 10):
        return False

    def trial() -> None:
        ends = torch.ones(2, dtype=torch.int32, device=device)
        x = torch.zeros((1, 64), dtype=weight.dtype, device=device)
        functional.grouped_mm(x, x.new_zeros((2, 64, 64)).mT, offs=ends)
        torch.cuda.synchronize(device)

    return can_launch("torch.nn.functional.grouped_mm", trial)


class SortedExperts:
    """x [rows, hidden_size] -> the sum of the chosen experts' results, each times its share."""

    __slots__ = ("_down", "_gate_up", "_gated", "_kernels", "_scales_inputs", "in_width", "out_width", "router")

    def __init__(
        self,
        router: Router,
        gate_up: Sequence[ExpertProduct],
        down: ExpertProduct,
        gated: Gated | Activated,
        *,
        scales_inputs: bool = False,
    ) -> None:
        """`gate_up`: their results lie side by side, gates first; `gated`: on the device and of the dtype of rows.
        `scales_inputs`: see Experts."""
        self._scales_inputs = scales_inputs
        self.router, self._gate_up, self._down, self._gated = router, gate_up, down, gated
        self._kernels: Any | None = fused_kernels("expert_rows", gated.device, gated.dtype)
        self.in_width, self.out_width = gate_up[0].in_width, down.out_width

    def __call__(self, x: Tensor) -> Tensor:
        """Compute x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        return self.routed(x, self.router(x))

    def routed(self, x: Tensor, routing: Routing) -> Tensor:
        """Compute the same with experts that are chosen already."""
        experts, shares = routing
        rows = self._sorted(experts)
        inputs = x.index_select(0, rows.rows)
        if self._scales_inputs:
            by_place = torch.empty(len(rows.rows), dtype=shares.dtype, device=x.device)
            by_place.scatter_(0, rows.places.flatten().long(), shares.flatten())
            inputs, shares = inputs.mul_(by_place[:, None].to(x.dtype)), torch.ones_like(shares)
        inner = [product(inputs, rows) for product in self._gate_up]
        results = self._down(self._gated(inner[0] if len(inner) == 1 else torch.cat(inner, dim=1)), rows)
        if self._kernels is not None:
            out: Tensor = self._kernels.add_up(results, rows.places, shares)
            return out
        by_choice = results.index_select(0, rows.places.flatten())
        return weighted(by_choice.view(*experts.shape, -1), shares)

    def _sorted(self, experts: Tensor) -> ExpertRows:
        if self._kernels is None:
            return rows_by_expert(experts, self.router.num_experts)
        return ExpertRows(*self._kernels.sort(experts.int(), self.router.num_experts))


def stacked_experts(
    router: Router,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    activation: str,
    *,
    is_gated: bool = True,
    scales_inputs: bool = False,
) -> SortedExperts:
    """Return the mixture with plain weights `gate_up` [experts, 2 * width, hidden_size], gates first, and `down`
    [experts, hidden_size, width], both kept. `activation`: see Gated. `is_gated`: False: there are no gates.
    `scales_inputs`: see Experts."""
    gated = (Gated if is_gated else Activated)(activation, gate_up.weight.dtype, gate_up.weight.device)
    products = ([StackedProduct(gate_up)], StackedProduct(down), gated)
    return SortedExperts(router, *products, scales_inputs=scales_inputs)


class ProductEnd:
    """product [rows, columns] -> activation(product + bias) [rows, out_width]. With gates: activation(gate) * up, of a
    product whose first half makes the gates."""

    __slots__ = ("_bias", "_is_gated", "_then", "out_width")

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: str | None = None,
        is_gated: bool = False,
    ) -> None:
        """`weight` [columns, ...]: for its rows and its device; `bias` [columns]; `dtype` of products. `activation`: a
        name in ACTIVATIONS, needed with gates."""
        self.out_width = len(weight) // 2 if is_gated else len(weight)
        self._bias = None if bias is None else bias.to(dtype)
        self._is_gated = is_gated
        self._then: Callable[[Tensor], Tensor] | None = (
            None if activation is None or is_gated else ACTIVATIONS[activation]
        )
        if is_gated:
            assert activation is not None, "gates without a nonlinearity"
            self._then = Gated(activation, dtype, weight.device)

    def round_results(self, unread: Tensor | None = None) -> None:
        """Round gated results for a product in FP8 as they are computed, where a kernel does so. `unread`: see Norm."""
        if isinstance(self._then, Gated):
            self._then.round_results(unread)

    def __call__(self, product: Tensor, addends: Addends | None) -> Tensor:
        if self._bias is not None:
            product = product + self._bias
        if addends is not None:
            product = addends.added_to(product, is_gated=self._is_gated)
        return product if self._then is None else self._then(product)


GROUPS = (32, 64, 128)  # inputs of a group
HALF_GROUP = 16  # the same of NVFP4, and of some numbers of 8 bits
# Products of more rows are of the unpacked weight, which is written and read once for all of them: by the rates of an
# H100 that costs 4.5 bytes a weight, as much as widening it again for every 128 of some 250 rows.
UNPACKING_ROWS = 256


class Numbers(enum.Enum):
    """Forms of a weight's numbers."""

    INT4 = "4 bits"
    INT8 = "8 bits"
    FLOAT8 = "FP8"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"

    @property
    def are_halves(self) -> bool:
        """Return whether a byte has two."""
        return self in (Numbers.INT4, *_FLOATS_OF_4_BITS)

    @property
    def are_whole(self) -> bool:
        """Return whether they are whole, and have zero points."""
        return self in (Numbers.INT4, Numbers.INT8)

    def num_bytes(self, width: int) -> int:
        """Return the bytes of so many."""
        return width // 2 if self.are_halves else width


_FLOATS_OF_4_BITS = (Numbers.MXFP4, Numbers.NVFP4)
_LEAST_SCALE = 0x400000  # 2 ** -127, which has no exponent of its own in float32


class GroupedWeight(NamedTuple):
    """One weight, or one of each expert in a further dimension in front."""

    numbers: Numbers
    words: Tensor  # uint8 [columns, in_width], of 4 bits half as many: group after group, its first half in lower bits
    # float32 [columns, groups]; uint8 of MXFP4: exponents of two, plus 127 (e8m0), and of NVFP4: FP8 (e4m3)
    scales: Tensor
    zeros: Tensor | None  # uint8 likewise; None: floats, or numbers with minima
    factors: Tensor | None = None  # float32 [columns], of all scales; None: not of NVFP4
    minima: Tensor | None = None  # float32 as scales are: a value is scale * number + minimum

    @property
    def in_width(self) -> int:
        """Return the number of inputs."""
        return self.words.shape[-1] * (2 if self.numbers.are_halves else 1)

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.in_width // self.scales.shape[-1]

    @property
    def together(self) -> int:
        """Return the inputs that lie together: a group, or two of NVFP4, of which the first is in lower bits."""
        return self.group * (2 if self.numbers is Numbers.NVFP4 else 1)

    def check(self) -> None:
        """Assert that shapes agree."""
        is_nvfp4, is_bytes = self.numbers is Numbers.NVFP4, not self.numbers.are_halves
        groups = (HALF_GROUP,) if is_nvfp4 else (HALF_GROUP, *GROUPS) if is_bytes else GROUPS
        assert self.group in groups, f"groups of {self.group}"
        shape = (*self.words.shape[:-1], self.in_width // self.group)
        assert self.scales.shape == shape, "a scale for each group"
        has_one = (self.zeros is None) != (self.minima is None)
        assert has_one == self.numbers.are_whole, "zero points of whole numbers, or minima"
        assert (self.scales.dtype == torch.uint8) == (self.numbers in _FLOATS_OF_4_BITS), "scales of one byte"
        assert self.zeros is None or self.zeros.shape == shape, "a zero point for each group"
        assert self.minima is None or self.minima.shape == shape, "a minimum for each group"
        assert (self.factors is not None) == is_nvfp4, "factors of NVFP4"

    def changed(self, change: Callable[[Tensor], Tensor]) -> "GroupedWeight":
        """Return the weight with each of its tensors changed: other columns, or another device."""
        more = (None if part is None else change(part) for part in (self.zeros, self.factors, self.minima))
        return GroupedWeight(self.numbers, change(self.words), change(self.scales), *more)

    def inputs(self, start: int, stop: int) -> "GroupedWeight":
        """Return the weight of these inputs, all of what lies together, in memory of its own."""
        first, last = (self.numbers.num_bytes(index) for index in (start, stop))
        words = self.words[..., first:last]
        groups = slice(start // self.group, stop // self.group)
        zeros, minima = (None if part is None else _copied(part[..., groups]) for part in (self.zeros, self.minima))
        copied = (_copied(words), _copied(self.scales[..., groups]), zeros)
        return GroupedWeight(self.numbers, *copied, self.factors, minima)

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """Return the values [columns, in_width], computed in float32."""
        words = self.words.view(*self.words.shape[:-1], self.in_width // self.together, -1)
        if self.numbers.are_halves:
            words = torch.cat((words & 15, words >> 4), dim=-1)
        groups = words.reshape(*self.scales.shape, self.group)
        if self.numbers in _FLOATS_OF_4_BITS:
            values = torch.from_numpy(FLOATS_OF_4_BITS).to(groups.device)[groups.long()]
        elif self.numbers is Numbers.FLOAT8:
            values = groups.view(torch.float8_e4m3fn).float()
        else:
            values = groups.float() if self.zeros is None else groups.float() - self.zeros[..., None].float()
        values = values * self._sizes[..., None]
        return (values if self.minima is None else values + self.minima[..., None]).flatten(-2).to(dtype)

    @property
    def _sizes(self) -> Tensor:
        if self.numbers is Numbers.MXFP4:
            exponents = self.scales.int()
            return exponents.bitwise_left_shift(23).masked_fill(exponents == 0, _LEAST_SCALE).view(torch.float32)
        if self.factors is None:
            return self.scales
        return self.scales.view(torch.float8_e4m3fn).float() * self.factors[..., None]


def _copied(part: Tensor) -> Tensor:
    return part.clone(memory_format=torch.contiguous_format)


def joined_weights(
    weights: Sequence[GroupedWeight], join: Callable[[list[Tensor]], Tensor] = torch.cat
) -> GroupedWeight:
    """Return weights of one form as one: their columns one after another, or `join` of each of their tensors."""
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    factors = [weight.factors for weight in weights if weight.factors is not None]
    minima = [weight.minima for weight in weights if weight.minima is not None]
    words, scales = join([weight.words for weight in weights]), join([weight.scales for weight in weights])
    more = (join(part) if part else None for part in (zeros, factors, minima))
    return GroupedWeight(weights[0].numbers, words, scales, *more)


class DeviceWeight:
    """A weight as the kernel reads it: scales and zero points of neighbouring outputs side by side."""

    __slots__ = ("_numbers", "factors", "in_width", "kernels", "minima", "scales", "words", "zeros")

    def __init__(self, weight: GroupedWeight, dtype: torch.dtype) -> None:
        """`weight`: its words are kept; `dtype` of inputs and products."""
        weight.check()
        self._numbers, self.in_width = weight.numbers, weight.in_width
        self.words = weight.words.contiguous()
        is_narrow = weight.scales.dtype == torch.uint8
        self.scales = (weight.scales if is_narrow else weight.scales.float()).mT.contiguous()
        self.zeros = None if weight.zeros is None else weight.zeros.mT.contiguous()
        self.minima = None if weight.minima is None else weight.minima.mT.contiguous()
        self.factors = weight.factors
        # `kernels.gpu.grouped_weights` where it runs; None: PyTorch.
        self.kernels: Any | None = fused_kernels("grouped_weights", weight.words.device, dtype)

    def unpacked(self, dtype: torch.dtype, part: int | None = None) -> Tensor:
        """Return the values [columns, in_width]; `part`: of this expert."""
        if self.kernels is not None and part is None:
            out = torch.empty((len(self.words), self.in_width), dtype=dtype, device=self.words.device)
            self.kernels.unpack(self, out)
            return out
        chosen = ... if part is None else part
        zeros, minima = (None if each is None else each[chosen].mT for each in (self.zeros, self.minima))
        factors = None if self.factors is None else self.factors[chosen]
        parts = (self.words[chosen], self.scales[chosen].mT, zeros, factors, minima)
        return GroupedWeight(self._numbers, *parts).unpacked(dtype)


class GroupedLinear:
    """x [rows, in_width] -> activation(x @ weight.T + bias) [rows, out_width], of dtype `dtype`. With gates:
    activation(gate) * up, of a weight whose first half makes the gates."""

    __slots__ = ("_dtype", "_end", "_most_rows", "_weight", "in_width", "out_width")

    def __init__(
        self,
        weight: GroupedWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype,
        activation: str | None = None,
        is_gated: bool = False,
        has_few_rows: bool = False,
    ) -> None:
        """`weight`: kept; `bias` [columns]. `activation`: a name in ACTIVATIONS, needed with gates. `has_few_rows`: the
        weight, which may be large, is not unpacked for those that have many."""
        self.in_width, self._dtype = weight.in_width, dtype
        self._weight = DeviceWeight(weight, dtype)
        self._most_rows = math.inf if has_few_rows else UNPACKING_ROWS
        self._end = ProductEnd(weight.words, bias, dtype=dtype, activation=activation, is_gated=is_gated)
        self.out_width = self._end.out_width

    def __call__(self, x: Tensor, addends: Addends | None = None) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        kernels = self._weight.kernels
        if kernels is not None and len(x) <= self._most_rows:
            return self._end(kernels.multiply(x, self._weight), addends)
        return self._end(functional.linear(x, self.unpacked()), addends)

    def unpacked(self) -> Tensor:
        """Return the weight [columns, in_width]."""
        return self._weight.unpacked(self._dtype)


class SortedLinear:
    """x [rows, in_width], sorted by expert -> the product of each row with its expert's weight, of dtype `dtype`."""

    __slots__ = ("_bias", "_dtype", "_orders", "_weight", "in_width", "out_width")

    def __init__(
        self, weight: GroupedWeight, orders: Tensor | None = None, bias: Tensor | None = None, *, dtype: torch.dtype
    ) -> None:
        """`weight`: of all experts, in a dimension in front; `orders` int64 [experts, in_width], of inputs; None: as
        they come; `bias` [experts, columns]. All kept."""
        self._weight, self._orders, self._dtype = DeviceWeight(weight, dtype), orders, dtype
        self._bias = None if bias is None else ExpertBias(bias)
        self.in_width, self.out_width = weight.in_width, weight.words.shape[1]

    def __call__(self, x: Tensor, rows: ExpertRows) -> Tensor:
        """Multiply x [rows, in_width], rows >= 1 -> [rows, out_width]."""
        if self._orders is not None:
            x = x.gather(1, self._orders[rows.experts])
        kernels = self._weight.kernels
        if kernels is None:
            product = by_every_expert(x, rows, lambda expert: self._weight.unpacked(self._dtype, expert))
        else:
            product = kernels.multiply_sorted(x, self._weight, rows.ends)
        return product if self._bias is None else self._bias.add_to(product, rows)


def random_weight(numbers: Numbers, device: torch.device, *shape: int) -> GroupedWeight:
    """Draw a weight of `shape` [.., columns, in_width] in groups of 128 inputs, or fewer where they do not fit; floats
    of 4 bits in groups of 32 (MXFP4) or 16 (NVFP4)."""
    *columns, width = shape
    words = torch.randint(0, 0x7F, (*columns, numbers.num_bytes(width)), dtype=torch.uint8, device=device)
    if numbers is Numbers.MXFP4:
        exponents = torch.randint(110, 118, (*columns, width // GROUPS[0]), dtype=torch.uint8, device=device)
        return GroupedWeight(numbers, words, exponents, None)
    if numbers is Numbers.NVFP4:
        own = torch.randint(0x20, 0x48, (*columns, width // HALF_GROUP), dtype=torch.uint8, device=device)
        return GroupedWeight(numbers, words, own, None, torch.rand(columns, device=device) / width)
    group = next(size for size in reversed(GROUPS) if width % size == 0)
    scales = torch.rand((*columns, width // group), device=device) / width
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device=device) if numbers.are_whole else None
    return GroupedWeight(numbers, words, scales, zeros)
