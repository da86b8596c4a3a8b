"""`quantization_config`: what is read, and what is refused by name."""

from pathlib import Path
from typing import Any

import pytest
import yaml

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


REFUSED = yaml.safe_load((Path(__file__).parents[1] / "refused.yaml").read_text())
MANY: list[Any] = ["w8a8", {"config_groups": {str(index): {} for index in range(65)}}, "at most 64 entries"]


def changed(base: str, changes: dict[str, Any]) -> dict[str, Any]:
    if base in ("group", "weights"):
        return with_group(**changes) if base == "group" else with_weights(**changes)
    return {**{"awq": AWQ, "gptq": GPTQ, "fp8": FP8, "w8a8": W8A8, "none": {}}[base], **changes}


@each(("base", "changes", "named"), REFUSED["unsupported_quantization"])
def test_what_is_not_supported_is_named(base: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        read(changed(base, changes))


@each(("base", "changes", "named"), [*REFUSED["wrong_quantization"], MANY])
def test_wrong_fields_are_named(base: str, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        read(changed(base, changes))
