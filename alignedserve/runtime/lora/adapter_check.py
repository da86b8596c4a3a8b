"""Checks an adapter's files against a model, by the config and the header alone; without torch.

adapter_config.json of a PEFT folder: which modules a LoRA adapter changes, with which rank and scale.

Every field is checked for type and bounds, and what would change the answers and is not supported is refused by name.
"""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
from pydantic_core import SchemaError, SchemaValidator, ValidationError, core_schema
from safetensors import SafetensorError

from alignedserve.core.errors import AdapterError, ModelError
from alignedserve.core.json_fields import JsonFields
from alignedserve.core.request import ADAPTER_DIGEST_BYTES
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.families.table import FAMILIES
from alignedserve.runtime.model.weight_names import ParameterNames
from kernels.addend_layout import LayerProduct, ProductShape, up_column

NamePredicate = Callable[[str], bool]
CONFIG_NAME = "adapter_config.json"
ALL_LINEAR = "all-linear"

_MAX_NAMES = 4096  # of modules, or of patterns
_MAX_PATTERN_LEN = 10_000
_MOST_ALPHA = 1e6
# Fields of PEFT that change what is computed; here only without effect.
_REFUSED_FLAGS = {
    "use_dora": "DoRA",
    "fan_in_fan_out": "fan_in_fan_out",
    "lora_bias": "lora_bias",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "BD-LoRA",
}
_REFUSED_FIELDS = (
    "modules_to_save",
    "megatron_config",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "layer_replication",
    "arrow_config",
)
# Beginnings of a training that leave the model's weights unchanged; PiSSA, for example, changes them.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What the config says of every module."""

    rank: int
    alpha: float
    uses_rslora: bool  # the scale is alpha / sqrt(rank) instead of alpha / rank
    is_target: NamePredicate
    ranks: tuple[tuple[NamePredicate, int], ...]  # of modules that have their own; the first that matches
    alphas: tuple[tuple[NamePredicate, float], ...]  # likewise
    layers: frozenset[int] | None  # the layers that are changed; None: all of them

    def changes(self, module: str, layer: int) -> bool:
        return self.is_target(module) and (self.layers is None or layer in self.layers)

    def rank_of(self, module: str) -> int:
        return next((rank for matches, rank in self.ranks if matches(module)), self.rank)

    def scale_of(self, module: str) -> float:
        alpha = next((alpha for matches, alpha in self.alphas if matches(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.uses_rslora else rank)


def parse_adapter_config(content: bytes, where: str, max_rank: int) -> AdapterConfig:
    """Read the config. Raises AdapterError naming `where` and the field."""
    fields = _object(content, where)
    try:
        return _config(JsonFields(fields, where), fields, where, max_rank)
    except AdapterError:
        raise
    except ModelError as error:  # of JsonFields
        raise AdapterError(str(error)) from error


def _object(content: bytes, where: str) -> dict[str, Any]:
    try:
        decoded = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{where} is not valid JSON.") from error
    if not isinstance(decoded, dict):
        raise AdapterError(f"{where} must hold a JSON object.")
    return decoded


def _config(fields: JsonFields, raw: Mapping[str, Any], where: str, max_rank: int) -> AdapterConfig:
    _refuse(fields, raw, where)
    rank = _rank(fields, max_rank)
    return AdapterConfig(
        rank=rank,
        alpha=fields.number("lora_alpha", -_MOST_ALPHA, _MOST_ALPHA),
        uses_rslora=fields.flag("use_rslora", default=False),
        is_target=_targets(raw, where),
        ranks=tuple(
            (
                end(key, f"{where}: rank_pattern"),
                JsonFields({"rank_pattern": value}, where).integer("rank_pattern", 1, max_rank),
            )
            for key, value in _patterns(raw, "rank_pattern", where).items()
        ),
        alphas=tuple(
            (
                end(key, f"{where}: alpha_pattern"),
                JsonFields({"alpha_pattern": value}, where).number("alpha_pattern", -_MOST_ALPHA, _MOST_ALPHA),
            )
            for key, value in _patterns(raw, "alpha_pattern", where).items()
        ),
        layers=_layers(fields, raw),
    )


def _refuse(fields: JsonFields, raw: Mapping[str, Any], where: str) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{where}: peft_type must be LORA; other kinds of adapters are not supported.")
    for name, spoken in _REFUSED_FLAGS.items():
        if raw.get(name) not in (None, False):
            raise AdapterError(f"{where}: {spoken} is not supported.")
    for name in _REFUSED_FIELDS:
        if raw.get(name):
            raise AdapterError(f"{where}: {name} is not supported.")
    if raw.get("init_lora_weights") not in _PLAIN_INITS:
        raise AdapterError(
            f"{where}: init_lora_weights names a way to begin that changes the model's own weights, which is not "
            "supported; convert the adapter to plain LoRA."
        )
    if fields.text("bias", "none") != "none":
        raise AdapterError(f"{where}: bias must be none: adapters that train biases are not supported.")


def _rank(fields: JsonFields, max_rank: int) -> int:
    rank = fields.integer("r", 1, 1 << 20)
    if rank > max_rank:
        raise fields.error("r", f"is {rank}, above lora.max_rank, which is {max_rank}")
    return rank


def _targets(raw: Mapping[str, Any], where: str) -> NamePredicate:
    selected = _selected(raw.get("target_modules"), "target_modules", where)
    if selected is None:
        raise AdapterError(f"{where}: target_modules is missing.")
    excluded = _selected(raw.get("exclude_modules"), "exclude_modules", where)
    if excluded is None:
        return selected
    return lambda name: selected(name) and not excluded(name)


def _selected(value: object, field: str, where: str) -> NamePredicate | None:
    if value is None or value == []:
        return None
    if value == ALL_LINEAR:
        return lambda _: True
    if isinstance(value, str) and len(value) <= _MAX_PATTERN_LEN:
        return whole(value, f"{where}: {field}")
    if isinstance(value, list) and len(value) <= _MAX_NAMES and all(isinstance(item, str) for item in value):
        ends = tuple(value)
        dotted = tuple(f".{end}" for end in ends)
        return lambda name: name in ends or name.endswith(dotted)
    raise AdapterError(f"{where}: {field} must be a list of at most {_MAX_NAMES} names, or an expression.")


def _patterns(raw: Mapping[str, Any], field: str, where: str) -> dict[str, Any]:
    value = raw.get(field) or {}
    if not isinstance(value, dict) or len(value) > _MAX_NAMES:
        raise AdapterError(f"{where}: {field} must be an object with at most {_MAX_NAMES} entries.")
    if any(len(key) > _MAX_PATTERN_LEN for key in value):
        raise AdapterError(f"{where}: {field} has an expression that is too long.")
    return value


def _layers(fields: JsonFields, raw: Mapping[str, Any]) -> frozenset[int] | None:
    value = raw.get("layers_to_transform")
    if value is None or value == []:
        return None
    if isinstance(value, int):
        return frozenset((fields.integer("layers_to_transform", 0, _MAX_NAMES),))
    return frozenset(fields.integers("layers_to_transform", 0, _MAX_NAMES))


def whole(expression: str, where: str) -> NamePredicate:
    """Match names that the expression matches as a whole. Raises AdapterError naming `where`."""
    return _predicate(f"^(?:{expression})$", where)


def end(expression: str, where: str) -> NamePredicate:
    """Match names whose end the expression matches, from their beginning or from behind a dot. So PEFT finds the rank
    and the scale of a module. Raises AdapterError naming `where`."""
    return _predicate(rf"^(?:.*\.)?(?:{expression})$", where)


def _predicate(pattern: str, where: str) -> NamePredicate:
    # Anyone may have written the file, so that its expressions are matched in linear time, by pydantic-core's engine.
    try:
        validator = SchemaValidator(core_schema.str_schema(pattern=pattern))
    except SchemaError as error:
        raise AdapterError(f"{where} is not a regular expression that is supported (no look-around).") from error

    def matches(name: str) -> bool:
        try:
            validator.validate_python(name)
        except ValidationError:
            return False
        return True

    return matches


WEIGHTS_NAME = "adapter_model.safetensors"
_PICKLED_NAME = "adapter_model.bin"
_MAX_CONFIG_BYTES = 4 << 20


class AdapterFiles(NamedTuple):
    """The contents of a folder."""

    folder: Path
    config: bytes
    weights: bytes

    @property
    def digest(self) -> bytes:
        digest = hashlib.blake2b(digest_size=ADAPTER_DIGEST_BYTES, person=b"lora adapter")
        for content in (self.config, self.weights):
            digest.update(len(content).to_bytes(8, "little"))
            digest.update(content)
        return digest.digest()


def read_adapter_files(folder: Path, max_bytes: int) -> AdapterFiles:
    """Read a folder whose weights have at most `max_bytes`. Raises AdapterError."""
    try:
        if not (folder / WEIGHTS_NAME).is_file() and (folder / _PICKLED_NAME).exists():
            raise AdapterError(
                f"{folder} has its weights only as {_PICKLED_NAME}, a pickle format that can run code when loaded; "
                f"save them as {WEIGHTS_NAME}."
            )
        config = _read(folder / CONFIG_NAME, _MAX_CONFIG_BYTES)
        return AdapterFiles(folder, config, _read(folder / WEIGHTS_NAME, max_bytes))
    except OSError as error:
        raise AdapterError(f"{folder} cannot be read: {error.strerror}.") from error


def _read(path: Path, max_bytes: int) -> bytes:
    if not path.is_file():
        raise AdapterError(f"{path} does not exist, or is no file.")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise AdapterError(f"{path} is larger than {max_bytes} bytes.")
    return content


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
