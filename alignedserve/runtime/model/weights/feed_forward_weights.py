"""Assembles the feed-forward parts of layers: two products, or a mixture of experts."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignedserve.runtime.model.decoder.decoder_parts import ExpertConfig, ProductMultipliers, Scoring
from alignedserve.runtime.model.decoder.model_config import ModelConfig, inner_size
from alignedserve.runtime.model.sharding.tensor_shard import ExpertShare
from alignedserve.runtime.model.weight_names import ParameterNames
from alignedserve.runtime.model.weights.packed_products import Float8Rows, GroupedRows, Rows, are_alike
from alignedserve.runtime.model.weights.product_reader import (
    Nonlinearity,
    ProductReader,
    ScaledModule,
    gates_first,
    scaled_product,
)
from kernels.activation import Activated, Gated, RmsNorm
from kernels.feed_forward import (
    DividedExperts,
    ExpertRouter,
    Experts,
    ExpertsElsewhere,
    FeedForwardPart,
    GroupRouter,
    Router,
    ScaledRouter,
    WithSharedExpert,
)
from kernels.grouped_linear import (
    GROUPS,
    ExpertWeights,
    GroupedWeight,
    Numbers,
    SortedExperts,
    SortedLinear,
    joined_weights,
    stacked_experts,
)
from kernels.linear import Linear, Projection


class ExpertPart(NamedTuple):
    """One module of an expert, or a part of it."""

    rows: Rows
    bias: Tensor | None = None  # in the dtype of the model


def grouped_experts(
    router: Router,
    experts: Sequence[tuple[Sequence[ExpertPart], ExpertPart]],
    gated: Gated | Activated,
    *,
    scales_inputs: bool = False,
) -> SortedExperts | None:
    """Return the mixture of experts, each with the parts of its first product and its second one; None: forms
    differ."""
    gate_up = _products([parts for parts, _ in experts], gated.dtype)
    down = _products([[last] for _, last in experts], gated.dtype)
    if gate_up is None or down is None:
        return None
    return SortedExperts(router, gate_up, down[0], gated, scales_inputs=scales_inputs)


def _products(experts: Sequence[Sequence[ExpertPart]], dtype: torch.dtype) -> list[SortedLinear] | None:
    """Return one product of all experts, or one for each part where an expert's parts differ; None: forms do not
    allow it."""
    parts = [[_grouped(part.rows) for part in expert] for expert in experts]
    joined = [_joined(expert_rows) for expert_rows in parts]
    if all(rows is not None for rows in joined):
        products = [_product(joined, _biases([part for expert in experts for part in expert], len(experts)), dtype)]
    else:
        of_parts = zip(zip(*parts, strict=True), zip(*experts, strict=True), strict=True)
        products = [_product(rows, _biases(expert_parts, len(experts)), dtype) for rows, expert_parts in of_parts]
    made = [product for product in products if product is not None]
    return made if len(made) == len(products) else None


def _biases(parts: Sequence[ExpertPart], num_experts: int) -> Tensor | None:
    biases = [part.bias for part in parts if part.bias is not None]
    return torch.cat(biases).view(num_experts, -1) if biases else None


def _joined(parts: Sequence[GroupedRows | None]) -> GroupedRows | None:
    grouped = [part for part in parts if part is not None]
    if len(grouped) < len(parts) or not are_alike(grouped):
        return None
    return GroupedRows(joined_weights([part.weight for part in grouped]), grouped[0].order)


def _product(experts: Sequence[GroupedRows | None], bias: Tensor | None, dtype: torch.dtype) -> SortedLinear | None:
    grouped = [expert for expert in experts if expert is not None]
    if len(grouped) < len(experts) or any(rows.kind != grouped[0].kind for rows in grouped):
        return None
    weight = joined_weights([rows.weight for rows in grouped], torch.stack)
    orders = None
    if any(rows.order is not None for rows in grouped):
        as_they_come = torch.arange(weight.in_width, device=weight.words.device)
        orders = torch.stack([as_they_come if rows.order is None else rows.order for rows in grouped])
    return SortedLinear(weight, orders, bias, dtype=dtype)


def _grouped(rows: Rows) -> GroupedRows | None:
    if isinstance(rows, GroupedRows):
        return rows
    if not isinstance(rows, Float8Rows):
        return None
    width = rows.rows.shape[1]
    group = next((size for size in reversed(GROUPS) if width % size == 0), None)
    if group is None:
        return None
    scales = rows.scales.float()[:, None].expand(-1, width // group)
    return GroupedRows(GroupedWeight(Numbers.FLOAT8, rows.rows.view(torch.uint8), scales, None))


LayerExperts = dict[int, Sequence[Projection]]  # by layer, those of one process in order


class ExpertReading(NamedTuple):
    """The experts that one of several processes reads."""

    share: ExpertShare
    elsewhere: Callable[[int], Sequence[ExpertsElsewhere]] = lambda _: ()  # of a layer
    reads_all: bool = False  # and drops other experts: a random source draws in order


class FeedForwardReader:
    """Reads the feed-forward parts of one model's layers."""

    def __init__(
        self, config: ModelConfig, names: ParameterNames, read: ProductReader, sharing: ExpertReading | None = None
    ) -> None:
        self._config, self._names, self._read = config, names, read
        self._sharing = sharing
        self.own: LayerExperts = {}  # where they are shared

    def dense(self, prefix: str, layer: int) -> FeedForwardPart:
        names, factors = self._names, self._config.multipliers
        modules = [prefix + name for name in names.gate_up]
        if factors is not None:
            return self._scaled_products(modules, prefix + names.down, factors)
        has_bias = self._config.has_mlp_bias
        return self._two_products(modules, prefix + names.down, inner_size(self._config, layer), has_bias)

    def _scaled_products(self, gate_up: Sequence[str], down: str, factors: ProductMultipliers) -> FeedForwardPart:
        config, inner = self._config, self._config.intermediate_size
        gate, up = gate_up
        scaled = (ScaledModule(gate, ((inner, factors.gates),)), ScaledModule(up, ((inner, 1.0),)))
        last = ScaledModule(down, ((config.hidden_size, factors.down),))
        then = Nonlinearity(config.activation.value, is_gated=True)
        return FeedForwardPart(
            scaled_product(self._read, scaled, config.hidden_size, then), scaled_product(self._read, [last], inner)
        )

    def mixed(self, prefix: str, experts: ExpertConfig, layer: int) -> Projection:
        names, chosen = self._names, self._chosen_experts(prefix, experts, layer)
        if not experts.shared_size:
            return chosen
        modules = [prefix + name for name in names.shared_gate_up]
        shared = self._two_products(modules, prefix + names.shared_down, experts.shared_size, False)
        gate = None
        if experts.has_shared_gate:
            gate = Linear(self._read.tensor(f"{prefix}{names.shared_gate}.weight", 1, self._config.hidden_size))
        return WithSharedExpert(chosen, shared, gate)

    def _router(self, prefix: str, experts: ExpertConfig) -> Router:
        names = self._names
        weight = self._read.tensor(f"{prefix}{names.router}.weight", experts.num_experts, self._config.hidden_size)
        if experts.is_beside:
            return self._scaled_router(prefix, weight)
        if experts.scoring is Scoring.SOFTMAX and experts.num_groups == 1 and experts.scale == 1.0:
            bias = self._read.tensor(f"{prefix}{names.router}.bias", experts.num_experts) if experts.has_bias else None
            return ExpertRouter(weight, experts.num_chosen, normalises=experts.normalises, bias=bias)
        correction = None
        if experts.scoring is Scoring.SIGMOID:
            correction = self._correction(prefix, experts).to(weight.device)
        return GroupRouter(
            weight,
            correction,
            experts.num_chosen,
            normalises=experts.normalises,
            scale=experts.scale,
            groups=(experts.num_groups, experts.num_chosen_groups),
        )

    def _scaled_router(self, prefix: str, weight: Tensor) -> ScaledRouter:
        extra_names, config = self._names.extras, self._config
        assert extra_names is not None, "a family without these names"
        assert config.experts is not None, "a router without experts"
        ones = torch.ones(config.hidden_size, dtype=weight.dtype, device=weight.device)
        return ScaledRouter(
            RmsNorm(ones, config.norm_eps, weight.dtype),
            self._read.tensor(prefix + extra_names.router_scale, config.hidden_size),
            ExpertRouter(weight, config.experts.num_chosen, normalises=config.experts.normalises),
            self._read.tensor(prefix + extra_names.expert_scales, config.experts.num_experts).float(),
        )

    def _correction(self, prefix: str, experts: ExpertConfig) -> Tensor:
        name, shape = self._names.router_correction, (experts.num_experts,)
        return self._read.source.exact(prefix + name, shape) if name else torch.zeros(shape)

    def read_own(self, prefix: str, experts: ExpertConfig, layer: int) -> Sequence[Projection]:
        """Read this process's experts of a layer; they are in `own` from then on."""
        assert self._sharing is not None, "experts that are not shared"
        span, projections = self._sharing.share.experts(experts.num_experts), list[Projection]()
        for index, (gate_up, down) in enumerate(self._modules(prefix, experts)):
            if index in span or self._sharing.reads_all:
                part = self._expert(gate_up, down, experts)
                projections += [part] if index in span else []
        self.own[layer] = projections
        return projections

    def _modules(self, prefix: str, experts: ExpertConfig) -> list[tuple[list[str], str]]:
        names = self._names
        return [
            (
                [prefix + name.format(expert=index) for name in names.expert_gate_up],
                prefix + names.expert_down.format(expert=index),
            )
            for index in range(experts.num_experts)
        ]

    def _chosen_experts(self, prefix: str, experts: ExpertConfig, layer: int) -> Projection:
        config, names, router = self._config, self._names, self._router(prefix, experts)
        inner, modules = experts.intermediate_size, self._modules(prefix, experts)
        if self._sharing is not None:
            elsewhere = self._sharing.elsewhere(layer)
            shared = self.read_own(prefix, experts, layer)
            return DividedExperts(router, shared, elsewhere, scales_inputs=experts.scales_inputs)
        if has_experts_apart(self._read.device):
            projections = [self._expert(gate_up, down, experts) for gate_up, down in modules]
            return Experts(router, projections, scales_inputs=experts.scales_inputs)
        first = inner * (2 if config.is_gated else 1) // len(names.expert_gate_up)
        shapes = ((first, config.hidden_size), (config.hidden_size, inner))
        packed = self._packed_experts(router, modules, shapes, experts)
        if packed is not None:
            return packed
        gate_ups = ExpertWeights(*self._stacked([pair for pair, _ in modules], *shapes[0], experts, has_gates=True))
        downs = ExpertWeights(*self._stacked([[down] for _, down in modules], *shapes[1], experts))
        activation = config.activation.value
        return stacked_experts(
            router, gate_ups, downs, activation, is_gated=config.is_gated, scales_inputs=experts.scales_inputs
        )

    def _stacked(
        self, modules: Sequence[Sequence[str]], rows: int, width: int, experts: ExpertConfig, *, has_gates: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return one product of all experts: weights [experts, columns, width]. `has_gates`: columns are gates and
        ups."""
        names, tensor = self._names, self._read.tensor
        weights, biases = list[Tensor](), list[Tensor]()
        in_turn = has_gates and names.interleaves_gates
        for module in modules:
            if names.transposes_experts:
                parts = [tensor(f"{name}.weight", width, rows).T for name in module]
            else:
                parts = [tensor(f"{name}.weight", rows, width) for name in module]
            weights.append(gates_first(torch.cat(parts)) if in_turn else torch.cat(parts))
            if experts.has_bias:
                bias = torch.cat([tensor(f"{name}.bias", rows) for name in module])
                biases.append(gates_first(bias) if in_turn else bias)
        return torch.stack(weights), torch.stack(biases) if biases else None

    def _packed_experts(
        self,
        router: Router,
        modules: Sequence[tuple[list[str], str]],
        shapes: Sequence[tuple[int, int]],
        experts: ExpertConfig,
    ) -> SortedExperts | None:
        if self._read.packed_rows(f"{modules[0][1]}.weight", *shapes[1]) is None:
            return None
        parts = [
            (
                [self._expert_part(name, *shapes[0], experts, has_gates=True) for name in pair],
                self._expert_part(down, *shapes[1], experts),
            )
            for pair, down in modules
        ]
        config, device = self._config, parts[0][1].rows.rows.device
        gated = (Gated if config.is_gated else Activated)(config.activation.value, self._read.dtype, device)
        return grouped_experts(router, parts, gated, scales_inputs=experts.scales_inputs)

    def _expert_part(
        self, module: str, rows: int, width: int, experts: ExpertConfig, *, has_gates: bool = False
    ) -> ExpertPart:
        read = self._read.turned_rows if self._names.transposes_experts else self._read.rows
        weight = read(module, rows, width)
        bias = self._read.tensor(f"{module}.bias", rows) if experts.has_bias else None
        if not has_gates or not self._names.interleaves_gates:
            return ExpertPart(weight, bias)
        return ExpertPart(weight.changed(gates_first), None if bias is None else gates_first(bias))

    def _two_products(self, gate_up: Sequence[str], down: str, inner: int, has_bias: bool) -> FeedForwardPart:
        config = self._config
        then = Nonlinearity(config.activation.value, config.is_gated)
        num_rows = inner * (2 if config.is_gated else 1)
        rows = [num_rows // len(gate_up)] * len(gate_up)
        return FeedForwardPart(
            self._read.linear(gate_up, rows, config.hidden_size, has_bias, then),
            self._read.linear([down], [config.hidden_size], inner, has_bias),
        )

    def _expert(self, gate_up: Sequence[str], down: str, experts: ExpertConfig) -> FeedForwardPart:
        inner, has_bias = experts.intermediate_size, experts.has_bias
        if not self._names.transposes_experts:
            return self._two_products(gate_up, down, inner, has_bias)
        (both,) = gate_up
        width, then = self._config.hidden_size, Nonlinearity(self._config.activation.value, is_gated=True)
        first = self._expert_part(both, 2 * inner, width, experts, has_gates=True)
        last = self._expert_part(down, width, inner, experts)
        return FeedForwardPart(
            self._read.product([both], [first.rows], first.bias, then),
            self._read.product([down], [last.rows], last.bias),
        )


def has_experts_apart(device: torch.device) -> bool:
    """Return whether each expert is a product of its own; on a GPU all are computed together."""
    return device.type == "cpu"
