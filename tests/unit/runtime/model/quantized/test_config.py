"""`quantization_config`: what is read, and what is refused by name."""

from typing import Any

import pytest

from alignedserve.core.errors import ModelError, UnsupportedModel
from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.decoder.decoder_parts import CheckpointQuantization, QuantMethod, WeightScheme
from alignedserve.runtime.model.quantized.config import read_quantization
from tests.support.marks import each
from tests.support.models.quantized_checkpoints import FORMATS

GPTQ, AWQ, FP8 = (FORMATS[name].config for name in ("gptq", "awq", "fp8 in blocks"))
W8A8 = FORMATS["w8a8"].config


def read(config: dict[str, Any], key: str = "quantization_config") -> CheckpointQuantization:
    quantization = read_quantization(JsonFields({key: config}, "config.json"))
    assert quantization is not None
    return quantization


def with_weights(**changes: Any) -> dict[str, Any]:
    return with_group(weights={**W8A8["config_groups"]["group_0"]["weights"], **changes})


def with_group(**changes: Any) -> dict[str, Any]:
    return {**W8A8, "config_groups": {"a": {**W8A8["config_groups"]["group_0"], **changes}}}


def test_schemes() -> None:
    assert read_quantization(JsonFields({"quantization_config": None}, "config.json")) is None
    assert read(W8A8).schemes == (WeightScheme(8, has_8_bit_inputs=True),)
    assert read(W8A8, "compression_config") == read(W8A8)
    with_zeros = read(FORMATS["w4a16 with zero points"].config)
    assert with_zeros.schemes == (WeightScheme(4, group_size=32, is_symmetric=False),)
    assert read(FORMATS["fp8"].config).schemes == (WeightScheme(8, is_float=True, has_8_bit_inputs=True),)
    assert read(FP8).schemes == (WeightScheme(8, is_float=True, block=(32, 32), has_8_bit_inputs=True),)
    assert read(AWQ).schemes == (WeightScheme(4, group_size=32, is_symmetric=False),)
    assert read({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}).schemes[0].group_size == 64
    assert (read(GPTQ).schemes, read(GPTQ).zero_offset) == ((WeightScheme(4, group_size=32),), 1)
    assert read({**GPTQ, "group_size": -1, "checkpoint_format": "gptq_v2"}).zero_offset == 0
    assert read({**GPTQ, "dynamic": {"-:.*down": {}}}).method is QuantMethod.GPTQ


def test_a_form_of_the_cache_is_left_out_with_a_remark() -> None:
    (remark,) = read({**W8A8, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}).remarks
    assert remark.startswith("kv_cache_scheme not applied")


@each(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not one of compressed-tensors, awq, gptq, fp8"),
        ({**AWQ, "version": "gemv"}, "version 'gemv'"),
        ({**AWQ, "bits": 3}, "bits 3"),
        ({**AWQ, "zero_point": False}, "zero points"),
        ({**GPTQ, "bits": 2}, "bits 2"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format"),
        ({**GPTQ, "pack_dtype": "int16"}, "pack_dtype 'int16'"),
        ({**GPTQ, "dynamic": {"+:.*down": {"bits": 8}}}, "dynamic"),
        ({**FP8, "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({**W8A8, "format": "marlin-24"}, "format 'marlin-24'"),
        ({**W8A8, "quantization_status": "frozen"}, "quantization_status 'frozen'"),
        ({**W8A8, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**W8A8, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config"),
        (with_group(format="nvfp4-pack-quantized"), "nvfp4-pack-quantized of other than floats in groups of 16"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        (with_group(output_activations={"num_bits": 8}), "output_activations"),
        (with_group(input_activations={"num_bits": 4}), "num_bits 4"),
        (with_group(weights=None), "without quantised weights"),
        (with_weights(num_bits=3), "num_bits 3"),
        (with_weights(num_bits=4, type="float"), "num_bits 4"),
        (with_weights(type="float", symmetric=False), "not symmetric"),
        (with_weights(strategy="tensor_group"), "strategy 'tensor_group'"),
        (with_weights(strategy="block", block_structure=[2, 2]), "strategy 'block'"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(config)


@each(
    ("config", "named"),
    [
        ({}, "quant_method is missing"),
        ({**GPTQ, "group_size": 0}, "group_size must not be 0"),
        ({**GPTQ, "group_size": 1 << 40}, "group_size must be between"),
        ({**GPTQ, "sym": "yes"}, "sym must be true or false"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size must be a list of 2"),
        ({**W8A8, "config_groups": {}}, "config_groups must name at least one group"),
        ({**W8A8, "config_groups": {str(index): {} for index in range(65)}}, "at most 64 entries"),
        ({**W8A8, "config_groups": {"W8A8": ["Linear"]}}, "W8A8 must be an object"),
        (with_weights(strategy="group"), "group_size is missing"),
    ],
)
def test_wrong_fields_are_named(config: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(config)
