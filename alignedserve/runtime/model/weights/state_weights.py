"""Assembles layers with a state: their two products, and what lies between these."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.decoder.state_config import DeltaConfig, ShortConvConfig, SpaceConfig, StateConfig
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.product_reader import (
    ProductReader,
    ScaledModule,
    parts_of_key_heads,
    scaled_product,
)
from kernels.linear import AdaptableProjection
from kernels.states.convolution import ShortConvolution
from kernels.states.delta_rule import DeltaRule, DeltaSizes, DeltaWeights
from kernels.states.state_rows import StateMixer
from kernels.states.state_space import SpaceSizes, SpaceWeights, StateSpace


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
