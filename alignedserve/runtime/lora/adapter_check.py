"""Checks an adapter's files against a model, by the config and the header alone; without torch."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import safetensors
from safetensors import SafetensorError

from alignedserve.core.errors import AdapterError
from alignedserve.runtime.lora.adapter_config import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    AdapterConfig,
    AdapterFiles,
    parse_adapter_config,
)
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.weight_names import ParameterNames
from kernels.addend_layout import LayerProduct, ProductShape, up_column


class AdaptableModule(NamedTuple):
    """One module of one layer."""

    layer: int
    product: LayerProduct
    in_width: int
    num_rows: int  # of its weight
    first_column: int  # of its results in a row of addends
    interleaves_heads: bool = False  # its rows lie [num_heads, 3, head_dim]
    interleaves_pairs: bool = False  # the rows of a rotated pair are neighbours
    splits: bool = False  # its rows are gates and ups, which a row of addends has apart


def product_shapes(config: ModelConfig) -> tuple[ProductShape, ...]:
    """Return the shapes of a layer's products, in the order of LayerProduct."""
    hidden, inner = config.hidden_size, config.intermediate_size
    return (
        ProductShape(hidden, config.query_width + 2 * config.kv_width),
        ProductShape(config.query_width, hidden),
        ProductShape(hidden, inner, config.is_gated),
        ProductShape(inner, hidden),
    )


def adaptable_modules(config: ModelConfig) -> dict[str, AdaptableModule]:
    names = FAMILIES[config.family].names
    return {
        prefix + names.layer.format(layer=layer) + name: module
        for layer in range(config.num_layers)
        for name, module in _modules(config, names, layer)
        for prefix in names.prefixes
    }


def _modules(config: ModelConfig, names: ParameterNames, layer: int) -> Iterator[tuple[str, AdaptableModule]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    widths = (config.query_width, config.kv_width, config.kv_width)
    if len(names.qkv) == 1:
        yield names.qkv[0], AdaptableModule(layer, LayerProduct.QKV, hidden, sum(widths), 0, names.interleaves_heads)
    else:
        for index, (name, width) in enumerate(zip(names.qkv, widths, strict=True)):
            is_paired = names.interleaves_pairs and index < 2  # queries and keys
            yield (
                name,
                AdaptableModule(
                    layer, LayerProduct.QKV, hidden, width, sum(widths[:index]), interleaves_pairs=is_paired
                ),
            )
    yield names.output, AdaptableModule(layer, LayerProduct.OUTPUT, config.query_width, hidden, 0)
    if config.experts_of(layer) is not None:
        return
    if len(names.gate_up) == 1:
        num_rows = inner * (2 if config.is_gated else 1)
        up = AdaptableModule(layer, LayerProduct.GATE_UP, hidden, num_rows, 0, splits=config.is_gated)
        yield names.gate_up[0], up
    else:
        for name, column in zip(names.gate_up, (0, up_column(inner)), strict=True):
            yield name, AdaptableModule(layer, LayerProduct.GATE_UP, hidden, inner, column)
    yield names.down, AdaptableModule(layer, LayerProduct.DOWN, inner, hidden, 0)


_PEFT_PREFIX = "base_model.model."
_TENSOR_NAME = re.compile(r"(?P<module>[\w.]{1,300})\.lora_(?P<part>[AB])\.weight", re.ASCII)
_SHOWN_NAME = re.compile(r"[\w.]{1,300}", re.ASCII)
_DTYPES = ("F32", "BF16", "F16")


class TensorForm(NamedTuple):
    """The form of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors spells it


class MatrixNames(NamedTuple):
    """The names of the two tensors of one module."""

    a: str
    b: str


def tensor_forms(content: bytes, where: str) -> dict[str, TensorForm]:
    """Return the forms of all tensors of a file. Raises AdapterError."""
    library: Any = safetensors  # whose functions on bytes have no types
    try:
        tensors = library.deserialize(content)
        return {name: TensorForm(tuple(form["shape"]), form["dtype"]) for name, form in tensors}
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise AdapterError(f"{where} is truncated or not a safetensors file.") from error


def adapted_modules(
    forms: Mapping[str, TensorForm], modules: Mapping[str, AdaptableModule], adapter: AdapterConfig, where: str
) -> dict[str, MatrixNames]:
    """Return the modules that the adapter changes. Raises AdapterError naming what does not fit."""
    parts: dict[str, dict[str, str]] = defaultdict(dict)
    for name in forms:
        module, part = _module_and_part(name, modules, where)
        parts[module][part] = name
    if not parts:
        raise AdapterError(f"{where} holds no matrices.")
    _check_completeness(parts, modules, adapter, where)
    matrices: dict[str, MatrixNames] = {}
    for module, named in parts.items():
        if len(named) != 2:
            raise AdapterError(f"{where} has only one of the two matrices of {module}.")
        matrices[module] = MatrixNames(named["A"], named["B"])
        _check_forms(module, matrices[module], forms, modules[module], adapter.rank_of(module), where)
    return matrices


def _module_and_part(name: str, modules: Mapping[str, AdaptableModule], where: str) -> tuple[str, str]:
    matched = _TENSOR_NAME.fullmatch(name.removeprefix(_PEFT_PREFIX))
    if matched is None:
        shown = name if _SHOWN_NAME.fullmatch(name) else "with a strange name"
        raise AdapterError(f"{where}: tensor {shown} is not a LoRA matrix of a linear layer.")
    module = matched["module"]
    if module not in modules:
        raise AdapterError(
            f"{where}: {module} is not a projection of this model's layers; embeddings, heads, routers and experts "
            "cannot be adapted."
        )
    return module, matched["part"]


def _check_completeness(
    parts: Mapping[str, object], modules: Mapping[str, AdaptableModule], adapter: AdapterConfig, where: str
) -> None:
    prefixes = {_prefix_of(name, modules[name]) for name in parts}
    if len(prefixes) > 1:
        raise AdapterError(f"{where} names modules in more than one way.")
    for name, module in modules.items():
        is_named = adapter.changes(name, module.layer)
        if name in parts and not is_named:
            raise AdapterError(f"{where} has matrices of {name}, which target_modules does not name.")
        if name not in parts and is_named and _prefix_of(name, module) in prefixes:
            raise AdapterError(f"{where} lacks the matrices of {name}, which target_modules names.")


def _prefix_of(name: str, module: AdaptableModule) -> str:
    return name[: name.index(f".{module.layer}.")]


def _check_forms(
    module: str, names: MatrixNames, forms: Mapping[str, TensorForm], known: AdaptableModule, rank: int, where: str
) -> None:
    for part, name, shape in (("A", names.a, (rank, known.in_width)), ("B", names.b, (known.num_rows, rank))):
        form = forms[name]
        if form.shape != shape:
            raise AdapterError(
                f"{where}: lora_{part} of {module} has shape {list(form.shape)}, expected {list(shape)}."
            )
        if form.dtype not in _DTYPES:
            raise AdapterError(f"{where}: lora_{part} of {module} must be a float of 16 or 32 bits.")


class CheckedAdapter(NamedTuple):
    """An adapter that fits the model."""

    config: AdapterConfig
    modules: dict[str, tuple[AdaptableModule, MatrixNames]]  # that it changes, by name


def check_adapter(files: AdapterFiles, model: ModelConfig, *, max_rank: int) -> CheckedAdapter:
    """Return what the adapter changes. Raises AdapterError naming what does not fit the model."""
    config = parse_adapter_config(files.config, f"{files.folder.name}/{CONFIG_NAME}", max_rank)
    where = f"{files.folder.name}/{WEIGHTS_NAME}"
    if model.latent is not None:
        raise AdapterError(f"{where}: the projections of latent attention cannot be adapted.")
    if model.state is not None:
        raise AdapterError(f"{where}: a model with {model.state.title} cannot be adapted.")
    if model.extras is not None:
        raise AdapterError(f"{where}: a model with {model.extras.title} cannot be adapted.")
    modules = adaptable_modules(model)
    matrices = adapted_modules(tensor_forms(files.weights, where), modules, config, where)
    return CheckedAdapter(config, {name: (modules[name], names) for name, names in matrices.items()})
