"""Reads `quantization_config` of a config.json. Whatever is not supported is refused by name.

Which modules are quantised is not read from `targets`, `ignore` or `modules_to_not_convert`: the files' tensors say so,
and each has to fit one of the schemes read here."""

from collections.abc import Callable

from alignedserve.core.errors import UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import CheckpointQuantization, QuantMethod, WeightScheme
from alignedserve.runtime.model.hf_fields import MAX_WIDTH

MAX_CONFIG_GROUPS = 64
_MXFP4 = "mxfp4-pack-quantized"
_NVFP4 = "nvfp4-pack-quantized"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", _MXFP4, _NVFP4)
_FLOAT8 = WeightScheme(8, is_float=True, has_8_bit_inputs=True)
_MXFP4_SCHEME = WeightScheme(4, is_float=True, group_size=32)
_BLOCK_SCHEME = WeightScheme(4, group_size=32, is_symmetric=False)
_FLOAT_GROUPS = {_MXFP4: 32, _NVFP4: 16}  # of 4 bits
_STRATEGIES = ("tensor", "channel", "group", "block")
_BITS = (4, 8)


def read_quantization(fields: JsonFields) -> CheckpointQuantization | None:
    """Return how the weights are quantised; None: not at all. Raises UnsupportedModel naming the option, ModelError."""
    names = ("quantization_config", "compression_config")
    section = next((section for name in names if (section := fields.section(name)) is not None), None)
    if section is None:
        return None
    method = section.text("quant_method")
    known = [each.value for each in QuantMethod]
    if method not in known:
        raise UnsupportedModel(f"{section.where}: quant_method {method!r} is not one of {', '.join(known)}.")
    return _READERS[QuantMethod(method)](section)


def _read_compressed_tensors(section: JsonFields) -> CheckpointQuantization:
    _require(section, "quantization_status", ("compressed",), "compressed")
    form = _require(section, "format", _FORMATS)
    sparsity = section.section("sparsity_config")
    if sparsity is not None:
        _require(sparsity, "format", ("dense",), "dense")
    transforms = section.section("transform_config")
    if transforms is not None and transforms.sections("config_groups", MAX_CONFIG_GROUPS):
        raise UnsupportedModel(f"{section.where}: transform_config is not supported.")
    groups = section.sections("config_groups", MAX_CONFIG_GROUPS)
    if not groups:
        raise section.error("config_groups", "must name at least one group")
    remarks: tuple[str, ...] = ()
    if section.has("kv_cache_scheme"):
        remarks = ("kv_cache_scheme not applied: engine.kv_cache_dtype sets the cache's form",)
    schemes = tuple(_read_group(group, form) for group in groups)
    return CheckpointQuantization(QuantMethod.COMPRESSED_TENSORS, schemes, remarks=remarks)


def _read_group(group: JsonFields, default: str) -> WeightScheme:
    form = _require(group, "format", _FORMATS, default)
    weights = group.section("weights")
    if weights is None:
        raise UnsupportedModel(f"{group.where}: a group without quantised weights is not supported.")
    if group.has("output_activations"):
        raise UnsupportedModel(f"{group.where}: output_activations are not supported.")
    is_float = _require(weights, "type", ("int", "float"), "int") == "float"
    if form in _FLOAT_GROUPS:
        return _read_floats_of_4_bits(weights, form, is_float=is_float)
    inputs = group.section("input_activations")
    if inputs is not None:
        _require_bits(inputs, (8,))
    num_bits = _require_bits(weights, (8,) if is_float else _BITS)
    strategy = _require(weights, "strategy", _STRATEGIES, "group" if weights.has("group_size") else "tensor")
    is_symmetric = weights.flag("symmetric", True)
    if is_float and not is_symmetric:
        raise UnsupportedModel(f"{weights.where}: float weights that are not symmetric are not supported.")
    if strategy == "block" and not is_float:
        raise UnsupportedModel(f"{weights.where}: strategy 'block' of whole numbers is not supported.")
    return WeightScheme(
        num_bits=num_bits,
        is_float=is_float,
        group_size=weights.integer("group_size", 1, MAX_WIDTH) if strategy == "group" else None,
        block=_block(weights, "block_structure") if strategy == "block" else None,
        is_symmetric=is_symmetric,
        has_8_bit_inputs=inputs is not None,
    )


def _read_floats_of_4_bits(weights: JsonFields, form: str, *, is_float: bool) -> WeightScheme:
    expected = _FLOAT_GROUPS[form]
    size = weights.integer("group_size", 1, MAX_WIDTH, expected)
    if not is_float or size != expected:
        raise UnsupportedModel(
            f"{weights.where}: {form} of other than floats in groups of {expected} is not supported."
        )
    return WeightScheme(_require_bits(weights, (4,)), is_float=True, group_size=size)


def _read_awq(section: JsonFields) -> CheckpointQuantization:
    _require(section, "version", ("gemm",), "gemm")
    _require_bits(section, (4,), "bits" if section.has("bits") else "w_bit")
    if not section.flag("zero_point", True):
        raise UnsupportedModel(f"{section.where}: AWQ without zero points is not supported.")
    name = "group_size" if section.has("group_size") else "q_group_size"
    return CheckpointQuantization(
        QuantMethod.AWQ, (WeightScheme(4, group_size=_group(section, name), is_symmetric=False),)
    )


def _read_gptq(section: JsonFields) -> CheckpointQuantization:
    stored_as = _require(section, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if section.flag("is_marlin_format", False):
        raise UnsupportedModel(f"{section.where}: is_marlin_format is not supported.")
    _require(section, "pack_dtype", ("int32",), "int32")
    scheme = WeightScheme(
        num_bits=_require_bits(section, _BITS, "bits"),
        group_size=_group(section, "group_size"),
        is_symmetric=section.flag("sym", True),
    )
    section.flag("desc_act", False)
    overrides = section.sections("dynamic", MAX_WIDTH)
    if any(fields.has(name) for fields in overrides for name in ("bits", "group_size")):
        raise UnsupportedModel(f"{section.where}: dynamic with other bits or groups for some modules is not supported.")
    return CheckpointQuantization(QuantMethod.GPTQ, (scheme,), zero_offset=0 if stored_as == "gptq_v2" else 1)


def _read_fp8(section: JsonFields) -> CheckpointQuantization:
    _require(section, "fmt", ("e4m3",), "e4m3")
    _require(section, "activation_scheme", ("dynamic", "static"), "dynamic")
    block = _block(section, "weight_block_size") if section.has("weight_block_size") else None
    return CheckpointQuantization(
        QuantMethod.FP8, (WeightScheme(8, is_float=True, block=block, has_8_bit_inputs=True),)
    )


def _read_modelopt(section: JsonFields) -> CheckpointQuantization:
    is_nvfp4 = _require(section, "quant_algo", ("nvfp4", "fp8")) == "nvfp4"
    scheme = WeightScheme(4, is_float=True, group_size=_FLOAT_GROUPS[_NVFP4]) if is_nvfp4 else _FLOAT8
    return CheckpointQuantization(QuantMethod.MODELOPT, (scheme,))


_READERS: dict[QuantMethod, Callable[[JsonFields], CheckpointQuantization]] = {
    QuantMethod.COMPRESSED_TENSORS: _read_compressed_tensors,
    QuantMethod.AWQ: _read_awq,
    QuantMethod.GPTQ: _read_gptq,
    QuantMethod.FP8: _read_fp8,
    QuantMethod.MXFP4: lambda _: CheckpointQuantization(QuantMethod.MXFP4, (_MXFP4_SCHEME,)),
    QuantMethod.MODELOPT: _read_modelopt,
    QuantMethod.BLOCKS: lambda _: CheckpointQuantization(QuantMethod.BLOCKS, (_BLOCK_SCHEME,)),
}


def _require(fields: JsonFields, name: str, allowed: tuple[str, ...], default: str | None = None) -> str:
    value = fields.text(name, default)
    if value.lower() not in allowed:
        raise UnsupportedModel(f"{fields.where}: {name} {value!r} is not one of {', '.join(allowed)}.")
    return value.lower()


def _require_bits(fields: JsonFields, allowed: tuple[int, ...], name: str = "num_bits") -> int:
    bits = fields.integer(name, 1, 64, 8 if name == "num_bits" else None)
    if bits not in allowed:
        raise UnsupportedModel(f"{fields.where}: {name} {bits} is not one of {', '.join(map(str, allowed))}.")
    return bits


def _group(fields: JsonFields, name: str) -> int | None:
    size = fields.integer(name, -1, MAX_WIDTH)
    if size == 0:
        raise fields.error(name, "must not be 0")
    return None if size == -1 else size


def _block(fields: JsonFields, name: str) -> tuple[int, int]:
    sizes = fields.integers(name, 1, MAX_WIDTH)
    if len(sizes) != 2:
        raise fields.error(name, "must be a list of 2 whole numbers")
    return sizes[0], sizes[1]
