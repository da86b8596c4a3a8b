"""Reads products, and the tensors that they are made of, out of a source.

Assembles layers with a state: their two products, and what lies between these."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig, StateConfig
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.packed_products import PlainRows, Rows, packed_product
from alignedserve.runtime.model.weights.weight_source import RowLookup, WeightSource
from kernels.cpu.packed_linear import INT8, Int8Linear, PackedLinear, fits, int8_obstacle, packed_levels
from kernels.linear import AdaptableProjection, Linear
from kernels.states.convolution import ShortConvolution
from kernels.states.delta_rule import DeltaRule, DeltaSizes, DeltaWeights
from kernels.states.state_rows import StateMixer
from kernels.states.state_space import SpaceSizes, SpaceWeights, StateSpace

_CPU = torch.device("cpu")


class LoadingObserver(Protocol):
    """A receiver of how far the loading has come."""

    def tensor_read(self, num_bytes: int) -> None:
        """Count a tensor."""

    def layer_packed(self) -> None:
        """Count a layer."""


class Nonlinearity(NamedTuple):
    """The nonlinearity after a product."""

    activation: str | None = None
    is_gated: bool = False


NONE = Nonlinearity()


class ProductReader:
    """Reads one tensor, or the product of one or several modules, at a time."""

    def __init__(self, source: WeightSource, observer: LoadingObserver | None, *, is_int8: bool) -> None:
        """`is_int8`: weights of linear layers are packed with 8 bits, whatever they are in the files."""
        self.source = source
        self._is_int8, self._observer = is_int8, observer
        self.dtype, self.device = torch.float32, torch.device("cpu")  # of the weights; known when the first is read

    def linear(
        self, modules: Sequence[str], rows: Sequence[int], in_width: int, has_bias: bool, then: Nonlinearity = NONE
    ) -> AdaptableProjection:
        bias = None
        if has_bias:
            bias = torch.cat([self.tensor(f"{name}.bias", n) for name, n in zip(modules, rows, strict=True)])
        from_files = self.file_product(modules, rows, in_width, bias, then)
        if from_files is not None:
            return from_files
        weights = [self.rows(name, count, in_width) for name, count in zip(modules, rows, strict=True)]
        return self.product(modules, weights, bias, then)

    def file_product(
        self, modules: Sequence[str], rows: Sequence[int], in_width: int, bias: Tensor | None, then: Nonlinearity
    ) -> AdaptableProjection | None:
        """Return the product of stacked modules, packed from their files; None where the kernels pack none such."""
        source = self.source
        if not self._packs_files(in_width):
            return None
        stored = [source.file_rows(f"{name}.weight", (n, in_width)) for name, n in zip(modules, rows, strict=True)]
        parts = [part for part in stored if part is not None]
        if len(parts) < len(stored):
            return None
        element = INT8 if self._is_int8 else source.dtype
        try:
            product = PackedLinear(
                parts,
                bias,
                level=packed_levels(element, _CPU)[0],
                element=element,
                dtype=source.dtype,
                activation=then.activation,
                is_gated=then.is_gated,
            )
        except OSError as error:
            where = ", ".join(dict.fromkeys(str(part.path) for part in parts))
            raise ModelError(f"{where}: {modules[0]} cannot be read: {error}") from error
        except ValueError as error:  # numbers that 8 bits cannot hold
            raise _not_quantizable(modules[0], str(error)) from error
        self.count(sum(rows) * in_width, source.dtype)
        return product

    def _packs_files(self, in_width: int) -> bool:
        dtype = self.source.dtype
        if self._is_int8:
            return dtype in (torch.float32, torch.bfloat16) and bool(packed_levels(INT8, _CPU))
        return fits(dtype, in_width) and bool(packed_levels(dtype, _CPU))

    def turned_rows(self, module: str, count: int, in_width: int) -> Rows:
        packed = self.packed_rows(f"{module}.weight", count, in_width)
        return PlainRows(self.tensor(f"{module}.weight", in_width, count).T) if packed is None else packed

    def rows(self, module: str, count: int, in_width: int) -> Rows:
        """Return the weight of a module, packed as its file has it where products are computed so."""
        packed = self.packed_rows(f"{module}.weight", count, in_width)
        return PlainRows(self.tensor(f"{module}.weight", count, in_width)) if packed is None else packed

    def packed_rows(self, name: str, count: int, in_width: int) -> Rows | None:
        """Return a weight as its file has it packed; None: it is plain, or to be unpacked."""
        rows = None if self._is_int8 else self.source.packed(name, (count, in_width))
        if rows is not None:
            self.count(count * in_width, self.source.dtype)  # as unpacked, by which the whole is known
        return rows

    def lookup(self, name: str, count: int, width: int) -> RowLookup:
        """Return a matrix for looking up rows, packed where its file has it so."""
        rows = None if self._is_int8 else self.source.looked_up(name, (count, width))
        if rows is None:
            return self.tensor(name, count, width)
        self.count(count * width, rows.dtype)
        return rows

    def product(
        self,
        modules: Sequence[str],
        weights: Sequence[Rows],
        bias: Tensor | None,
        then: Nonlinearity = NONE,
        *,
        has_few_rows: bool = False,
    ) -> AdaptableProjection:
        """Return the product with weights that read the same input. `has_few_rows`: see packed_product."""
        plain = [weight.rows for weight in weights if isinstance(weight, PlainRows)]
        if len(plain) == len(weights):
            return self.projected(modules[0], torch.cat(plain) if len(plain) > 1 else plain[0], bias, then)
        return packed_product(weights, bias, self.dtype, *then, has_few_rows=has_few_rows)

    def projected(
        self, name: str, weight: Tensor, bias: Tensor | None = None, then: Nonlinearity = NONE
    ) -> AdaptableProjection:
        """Return the product with a plain weight, packed with 8 bits if the model's are. `name`: for errors."""
        if not self._is_int8:
            return Linear(weight, bias, activation=then.activation, is_gated=then.is_gated)
        obstacle = int8_obstacle(weight)
        if obstacle is not None:
            raise _not_quantizable(name, obstacle)
        return Int8Linear(weight, bias, activation=then.activation, is_gated=then.is_gated)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the model's dtype, unpacked. Raises ModelError."""
        tensor = self.source.tensor(name, shape)
        self.count(tensor.numel(), tensor.dtype)
        return tensor

    def count(self, num_values: int, dtype: torch.dtype) -> None:
        if self._observer is not None:
            self._observer.tensor_read(num_values * dtype.itemsize)


def _not_quantizable(name: str, obstacle: str) -> ModelError:
    return ModelError(f"{name} cannot be packed with 8 bits: {obstacle}; leave model.quantization unset.")


class ScaledModule(NamedTuple):
    """A module without biases, and the factors of its rows: of so many each."""

    name: str
    factors: tuple[tuple[int, float], ...]

    @property
    def num_rows(self) -> int:
        return sum(count for count, _ in self.factors)


def scaled_product(
    read: ProductReader, modules: Sequence[ScaledModule], in_width: int, then: Nonlinearity = NONE
) -> AdaptableProjection:
    """Return the product of stacked modules. Raises UnsupportedModel where a weight is not plain."""
    rows = []
    for module in modules:
        plain = read.rows(module.name, module.num_rows, in_width)
        if not isinstance(plain, PlainRows):
            raise UnsupportedModel(f"{module.name} is quantised, and the factors of its rows cannot be put into it.")
        row_factors, device = module.factors, plain.rows.device
        factors = torch.cat([torch.full((count, 1), factor, device=device) for count, factor in row_factors])
        rows.append(PlainRows((plain.rows.float() * factors).to(plain.rows.dtype)))
    return read.product([module.name for module in modules], rows, None, then)


def pairs_apart(rows: Tensor, config: ModelConfig) -> Tensor:
    """Reorder rows of heads [heads * head_dim, ...] where a rotated pair is neighbours: the kernels have its two rows
    half of the rotated ones apart. Example: of a head of 6 rows, 4 of them rotated, come rows 0, 2, 1, 3, 4, 5."""
    rotated = config.head_dim if config.rope is None else config.rope.rotary_dim
    order = torch.arange(config.head_dim, device=rows.device)
    order[:rotated] = torch.cat([order[:rotated:2], order[1:rotated:2]])
    heads = rows.view(-1, config.head_dim, *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


def gates_first(rows: Tensor) -> Tensor:
    return torch.cat([rows[::2], rows[1::2]])


def rotated_first(rows: Tensor, rope_dim: int, num_heads: int, *, is_paired: bool) -> Tensor:
    """Reorder rows of heads [heads * width, ...] whose last `rope_dim` are rotated: the kernels have them first, and
    the two of a pair half of them apart. `is_paired`: in `rows` they are neighbours."""
    heads = rows.view(num_heads, -1, *rows.shape[1:])
    plain, turned = heads[:, :-rope_dim], heads[:, -rope_dim:]
    if is_paired:
        turned = torch.cat([turned[:, ::2], turned[:, 1::2]], dim=1)
    return torch.cat([turned, plain], dim=1).reshape(rows.shape)


def heads_to_qkv(rows: Tensor, config: ModelConfig) -> Tensor:
    shape = (config.num_heads, 3, config.head_dim, -1)
    return rows.view(shape).transpose(0, 1).reshape(rows.shape)


def halves_of_heads(rows: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Divide rows of heads [heads * 2 * head_dim, ...] into the first halves of all heads, and the second ones."""
    heads = rows.view(-1, 2, head_dim, *rows.shape[1:])
    return heads[:, 0].flatten(0, 1), heads[:, 1].flatten(0, 1)


def parts_of_key_heads(rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Reorder rows that lie key head by key head, each in parts of these widths: the kernels have each part of all
    heads in one place."""
    heads = rows.view(-1, sum(widths), *rows.shape[1:])
    return torch.cat([part.flatten(0, 1) for part in heads.split_with_sizes(list(widths), dim=1)])


def pairs_of_rows_first(rows: Tensor, head_dim: int, *, are_neighbours: bool) -> Tensor:
    """Reorder rows of heads [heads * head_dim, ...] that turn by a patch's column first: the kernels have those first
    that turn by its row, and the two rows of a pair half a head apart. `are_neighbours`: in `rows` a pair's are side by
    side; False: a quarter of a head apart. Example: of a head of 8 rows come rows 4, 6, 0, 2, 5, 7, 1, 3; or 4, 5, 0,
    1, 6, 7, 2, 3."""
    places = torch.arange(head_dim, device=rows.device)
    pairs = places.view(-1, 2) if are_neighbours else places.view(2, 2, -1).transpose(1, 2).reshape(-1, 2)
    heads = rows.view(-1, head_dim, *rows.shape[1:])
    return heads[:, pairs.roll(head_dim // 4, 0).T.flatten()].reshape(rows.shape)


class StateReader:
    """Reads the layers with a state of one model."""

    def __init__(self, config: ModelConfig, names: ParameterNames, read: ProductReader) -> None:
        self._config, self._names, self._read = config, names, read

    def inputs(self, prefix: str) -> AdaptableProjection:
        state, width = self._state, self._config.hidden_size
        modules = [prefix + name for name in self._names.mixer_inputs]
        if not isinstance(state, DeltaConfig) or not state.has_mixed_rows:
            return self._read.linear(modules, state.in_widths, width, state.has_product_bias)
        rows = [self._read.rows(name, count, width) for name, count in zip(modules, state.in_widths, strict=True)]
        group = state.num_heads // state.num_key_heads
        parts = ([state.key_dim] * 2 + [group * state.value_dim] * 2, [group] * 2)
        ordered = [
            each.changed(partial(parts_of_key_heads, widths=widths)) for each, widths in zip(rows, parts, strict=True)
        ]
        return self._read.product(modules, ordered, None)

    def output(self, prefix: str) -> AdaptableProjection:
        state, module = self._state, prefix + self._names.mixer_output
        return self._read.linear([module], [self._config.hidden_size], state.out_width, state.has_product_bias)

    def beside_attention(self, prefix: str) -> AdaptableProjection:
        """Return the first product of a layer that attends as well: queries, keys and values come first."""
        config, names, state, factors = self._config, self._names, self._state, self._config.multipliers
        assert isinstance(state, SpaceConfig), "another kind of state"
        assert factors is not None, "a model without multipliers"
        queries, keys, values = (prefix + name for name in names.qkv)
        shared = state.num_groups * state.state_size
        counts = (state.out_width, state.out_width, shared, shared, state.num_heads)
        modules = (
            ScaledModule(queries, ((config.query_width, factors.queries),)),
            ScaledModule(keys, ((config.kv_width, factors.keys),)),
            ScaledModule(values, ((config.kv_width, factors.values),)),
            ScaledModule(prefix + names.mixer_inputs[0], tuple(zip(counts, factors.mixer_inputs, strict=True))),
        )
        return scaled_product(self._read, modules, config.hidden_size)

    def attended(self, prefix: str) -> AdaptableProjection:
        assert self._config.multipliers is not None, "a model without multipliers"
        return self._scaled(prefix + self._names.output, self._config.query_width, self._config.multipliers.attended)

    def mixed(self, prefix: str) -> AdaptableProjection:
        assert self._config.multipliers is not None, "a model without multipliers"
        return self._scaled(prefix + self._names.mixer_output, self._state.out_width, self._config.multipliers.mixed)

    def _scaled(self, name: str, in_width: int, factor: float) -> AdaptableProjection:
        return scaled_product(self._read, [ScaledModule(name, ((self._config.hidden_size, factor),))], in_width)

    def mixer(self, prefix: str) -> StateMixer:
        return _MIXERS[type(self._state)](self, prefix + self._names.mixer)

    def short_convolution(self, module: str) -> StateMixer:
        state = self._state
        assert isinstance(state, ShortConvConfig), "another kind of state"
        return ShortConvolution(*self._convolution(f"{module}conv", state.width, state.kernel_size, state.has_bias))

    def state_space(self, module: str) -> StateMixer:
        state = self._state
        assert isinstance(state, SpaceConfig), "another kind of state"
        heads = state.num_heads
        weights = SpaceWeights(
            *self._convolution(f"{module}conv1d", state.convolved, state.kernel_size, state.has_conv_bias),
            self._exact(f"{module}A_log", heads),
            self._exact(f"{module}dt_bias", heads),
            self._exact(f"{module}D", heads),
            self._exact(f"{module}norm.weight", state.out_width) if state.has_norm else None,
        )
        return StateSpace(
            SpaceSizes(heads, state.head_dim, state.num_groups, state.state_size),
            weights,
            eps=self._config.norm_eps,
            dt_limits=state.dt_limits,
            gates_first=state.gates_first,
        )

    def delta_rule(self, module: str) -> StateMixer:
        state = self._state
        assert isinstance(state, DeltaConfig), "another kind of state"
        convolution, _ = self._convolution(f"{module}conv1d", state.convolved, state.kernel_size, False)
        weights = DeltaWeights(
            convolution,
            self._exact(f"{module}A_log", state.num_heads),
            self._exact(f"{module}dt_bias", state.num_heads),
            self._exact(f"{module}norm.weight", state.value_dim),
        )
        sizes = DeltaSizes(state.num_key_heads, state.key_dim, state.num_heads, state.value_dim)
        return DeltaRule(sizes, weights, eps=self._config.norm_eps)

    @property
    def _state(self) -> StateConfig:
        assert self._config.state is not None, "a model without states"
        return self._config.state

    def _convolution(self, module: str, width: int, size: int, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = self._exact(f"{module}.weight", width, 1, size)[:, 0].T.contiguous()
        return weight, self._exact(f"{module}.bias", width) if has_bias else None

    def _exact(self, name: str, *shape: int) -> Tensor:
        tensor = self._read.source.exact(name, shape)
        self._read.count(tensor.numel(), self._read.dtype)
        return tensor.to(torch.float32)


_MIXERS: dict[type, Callable[[StateReader, str], StateMixer]] = {
    ShortConvConfig: StateReader.short_convolution,
    SpaceConfig: StateReader.state_space,
    DeltaConfig: StateReader.delta_rule,
}
