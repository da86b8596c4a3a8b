"""The names that a model's tensors have in its files, and the matrices among them. Families': `families.names`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_type_hints

from alignedserve.runtime.model.decoder.decoder_parts import ExpertConfig, LatentConfig, LayerExtras
from alignedserve.runtime.model.decoder.model_config import ModelConfig, inner_size

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Names = TypeVar("Names", bound="DataclassInstance")


def read_names(path: Path, kind: type[Names]) -> dict[str, Names]:
    """Return the names of each row of a file: a row may be `like` one above it, and say what it is `about`."""
    known, rows = {"about", *(field.name for field in fields(kind))}, dict[str, dict[str, Any]]()
    for name, row in json.loads(path.read_text()).items():
        rows[name] = {**rows.get(row.pop("like", ""), {}), **row}
        assert rows[name].keys() <= known, f"unknown fields of {name} in {path}"
    hints = get_type_hints(kind)
    plain = {name: {key: value for key, value in row.items() if key != "about"} for name, row in rows.items()}
    return {name: kind(**{key: _read(value, hints[key]) for key, value in row.items()}) for name, row in plain.items()}


def _read(value: Any, hint: Any) -> Any:
    """Return what a field holds: a list is a tuple, an object a record of names, a text perhaps an enum's value."""
    if isinstance(value, dict):
        return ExtraNames(**{key: _read(inner, None) for key, inner in value.items()})
    if isinstance(hint, type) and issubclass(hint, Enum):
        return hint(value)
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class ExtraNames:
    """Names of modules that models with LayerExtras have, as in ParameterNames; those of a layer: below `layer`."""

    embedding_table: str = "embed_tokens_per_layer"
    embedding_projection: str = "per_layer_model_projection"
    embedding_norm: str = "per_layer_projection_norm"
    widening: str = "altup_projections.{stream}"
    narrowing: str = "altup_unembed_projections.{stream}"
    # Of a layer:
    embedding_gate: str = "per_layer_input_gate"
    embedding_output: str = "per_layer_projection"
    embedding_output_norm: str = "post_per_layer_input_norm"
    stream_norm: str = "altup.router_norm"
    stream_router: str = "altup.modality_router"
    predictions: str = "altup.prediction_coefs"
    corrections: str = "altup.correction_coefs"
    corrected_scale: str = "altup.correct_output_scale"  # a full name, as other scales below
    laurel: tuple[str, str] = ("laurel.linear_left", "laurel.linear_right")
    laurel_norm: str = "laurel.post_laurel_norm"
    scale: str = "layer_scalar"
    router_scale: str = "router.scale"
    expert_scales: str = "router.per_expert_scale"
    dense_norm: str = "post_feedforward_layernorm_1"  # behind the feed-forward part that is beside experts
    expert_norms: tuple[str, str] = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_2")


@dataclass(frozen=True, slots=True)
class ParameterNames:
    """Names of modules below `prefixes[i]` (a layer's: below `layer`); `.weight` and `.bias` follow each."""

    prefixes: tuple[str, ...]  # the first one under which the embedding is found
    embedding: str
    final_norm: str
    lm_heads: tuple[str, ...]  # full names; the first one that exists
    layer: str  # with {layer}
    attention_norm: str
    mlp_norm: str
    qkv: tuple[str, ...]  # three modules, or one of all rows
    output: str
    gate_up: tuple[str, ...]  # gate and up, one module of both, or up alone
    down: str
    interleaves_heads: bool = False  # the rows of the one module lie [num_heads, 3, head_dim]
    interleaves_pairs: bool = False  # the two rows that a rotation turns are neighbours, not half a head apart
    positions: str = ""  # learned positions
    project_in: str = ""
    project_out: str = ""
    query_norm: str = ""
    key_norm: str = ""
    router: str = ""  # of a mixture of experts
    expert_gate_up: tuple[str, ...] = ()  # with {expert}
    expert_down: str = ""
    router_correction: str = ""  # a full name in the layer: what is added to scores for the choice
    shared_gate_up: tuple[str, ...] = ()  # of the expert that every token passes
    shared_down: str = ""
    shared_gate: str = ""
    transposes_experts: bool = False  # an expert's matrices lie [inputs, outputs]
    interleaves_gates: bool = False  # of an expert the rows of gates and ups follow each other in turn
    sinks: str = ""  # a full name in the layer
    # Of latent attention, in place of `qkv`:
    query: tuple[str, ...] = ()  # the one module, and the two, with a norm between, that make queries of short rows
    query_row_norm: str = ""
    latent: str = ""  # the latent and the key that heads share
    latent_norm: str = ""
    heads_of_latent: str = ""  # keys and values of each head
    # Of layers with a state, in place of `qkv` and `output`:
    mixer_inputs: tuple[str, ...] = ()
    mixer_output: str = ""
    mixer: str = ""  # in front of all other names
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    extras: ExtraNames | None = None


class LinearModule(NamedTuple):
    """The matrix of one module in the files."""

    name: str
    rows: int
    width: int
    is_expert: bool = False


def layer_prefixes(config: ModelConfig, names: ParameterNames, layer: int) -> tuple[str, str]:
    """Return what stands before the names of a layer's mixer, and of its feed-forward part."""
    numbers = config.parts_in_files[layer] if config.parts_in_files else (layer, layer)
    first, second = (names.layer.format(layer=number) for number in numbers)
    return first, second


def find_prefix(names: ParameterNames, has: Callable[[str], bool]) -> str:
    return next((prefix for prefix in names.prefixes if has(f"{prefix}{names.embedding}.weight")), names.prefixes[0])


def find_head(names: ParameterNames, has: Callable[[str], bool]) -> str:
    """Return the name of the language-model head that is found; otherwise the first."""
    return next((name for name in names.lm_heads if has(f"{name}.weight")), names.lm_heads[0])


def linear_modules(
    config: ModelConfig, names: ParameterNames, prefix: str, has: Callable[[str], bool]
) -> Iterator[LinearModule]:
    for layer in range(config.num_layers):
        in_layer, in_second = (prefix + part for part in layer_prefixes(config, names, layer))
        if layer in config.attention_layers:
            yield from _attention_modules(config, names, in_layer, layer)
        if layer in config.state_layers:
            yield from _state_modules(config, names, in_layer)
        experts = config.experts_of(layer)
        if layer in config.bare_layers:
            continue
        if experts is None or experts.is_beside:
            yield from _feed_forward(in_second, names.gate_up, names.down, config, inner_size(config, layer))
        if experts is not None:
            yield from _expert_modules(config, names, in_second, experts)
    if config.embedding_size != config.hidden_size:
        yield LinearModule(prefix + names.project_in, config.hidden_size, config.embedding_size)
        yield LinearModule(prefix + names.project_out, config.embedding_size, config.hidden_size)
    if not config.ties_embeddings:
        yield LinearModule(find_head(names, has), config.vocab_size, config.embedding_size)


def _attention_modules(config: ModelConfig, names: ParameterNames, prefix: str, layer: int) -> Iterator[LinearModule]:
    if config.latent is not None:
        yield from _latent_modules(config, config.latent, names, prefix)
        return
    if config.extras is not None:
        yield from _extra_modules(config, config.extras, names, prefix, layer)
        return
    rows = [config.query_width * (2 if config.has_attention_gate else 1), config.kv_width, config.kv_width]
    rows = rows if len(names.qkv) == len(rows) else [sum(rows)]
    for name, count in zip(names.qkv, rows, strict=True):
        yield LinearModule(prefix + name, count, config.hidden_size)
    yield LinearModule(prefix + names.output, config.hidden_size, config.query_width)


def _extra_modules(
    config: ModelConfig, extras: LayerExtras, names: ParameterNames, prefix: str, layer: int
) -> Iterator[LinearModule]:
    extra_names, width = names.extras, config.hidden_size
    assert extra_names is not None, "a family without these names"
    kv_heads, head_dim = config.heads_of(layer)
    queries = config.num_heads * head_dim
    products = own_products(config, extras, layer)
    for name, count in zip(names.qkv[:products], (queries, *(kv_heads * head_dim,) * 2), strict=False):
        yield LinearModule(prefix + name, count, width)
    yield LinearModule(prefix + names.output, width, queries)
    if extras.embedding_width:
        yield LinearModule(prefix + extra_names.embedding_gate, extras.embedding_width, width)
        yield LinearModule(prefix + extra_names.embedding_output, width, extras.embedding_width)
    if extras.laurel_rank:
        left, right = extra_names.laurel
        yield LinearModule(prefix + left, extras.laurel_rank, width)
        yield LinearModule(prefix + right, width, extras.laurel_rank)


def own_products(config: ModelConfig, extras: LayerExtras, layer: int) -> int:
    """Return how many of the modules of queries, keys and values a layer has, the first ones."""
    if layer not in config.cached_layers:
        return 1
    return 2 if extras.repeats_keys and layer not in config.windowed_layers else 3


def _state_modules(config: ModelConfig, names: ParameterNames, prefix: str) -> Iterator[LinearModule]:
    assert config.state is not None, "a model without states"
    for name, count in zip(names.mixer_inputs, config.state.in_widths, strict=True):
        yield LinearModule(prefix + name, count, config.hidden_size)
    yield LinearModule(prefix + names.mixer_output, config.hidden_size, config.state.out_width)


def _latent_modules(
    config: ModelConfig, latent: LatentConfig, names: ParameterNames, prefix: str
) -> Iterator[LinearModule]:
    num_heads, width = config.num_heads, config.hidden_size
    *first, last = query_modules(names, latent)
    for name in first:
        yield LinearModule(prefix + name, latent.query_rank or 0, width)
    yield LinearModule(prefix + last, num_heads * latent.query_dim, latent.query_rank or width)
    yield LinearModule(prefix + names.latent, latent.row_width, width)
    yield LinearModule(prefix + names.output, width, num_heads * latent.value_dim)


def query_modules(names: ParameterNames, latent: LatentConfig) -> tuple[str, ...]:
    return names.query[:1] if latent.query_rank is None else names.query[1:]


def _feed_forward(
    prefix: str, gate_up: tuple[str, ...], down: str, config: ModelConfig, inner: int, *, is_expert: bool = False
) -> Iterator[LinearModule]:
    rows = inner * (2 if config.is_gated else 1) // len(gate_up)
    for name in gate_up:
        yield LinearModule(prefix + name, rows, config.hidden_size, is_expert)
    yield LinearModule(prefix + down, config.hidden_size, inner, is_expert)


def _expert_modules(
    config: ModelConfig, names: ParameterNames, prefix: str, experts: ExpertConfig
) -> Iterator[LinearModule]:
    for index in range(experts.num_experts):
        gate_up = tuple(name.format(expert=index) for name in names.expert_gate_up)
        down = names.expert_down.format(expert=index)
        yield from _feed_forward(prefix, gate_up, down, config, experts.intermediate_size, is_expert=True)
    if experts.shared_size:
        yield from _feed_forward(prefix, names.shared_gate_up, names.shared_down, config, experts.shared_size)
