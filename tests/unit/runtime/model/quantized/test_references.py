"""The tests' quantised tensors, unpacked by the libraries that define the formats, where these are installed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.quantized_checkpoints import FORMATS, Quantized, awq_columns, gptq_columns

pytestmark = pytest.mark.slow
WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))


def close(values: Tensor, made: Quantized) -> bool:
    return bool(torch.allclose(values.float(), made.values, rtol=2.0**-8, atol=1e-6))


@pytest.mark.parametrize(
    "name", [name for name, made in FORMATS.items() if made.config["quant_method"] == "compressed-tensors"]
)
def test_compressed_tensors(name: str) -> None:
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    layout, made = FORMATS[name].config["format"], FORMATS[name].quantize(WEIGHT)
    scheme = quantization.QuantizationScheme(**FORMATS[name].config["config_groups"]["group_0"])
    compressor = compressors.BaseCompressor.load_from_registry(layout)
    assert close(compressor.decompress(dict(made.tensors), scheme)["weight"], made)


def test_awq() -> None:
    packing: Any = pytest.importorskip("awq.utils.packing_utils")
    made = awq_columns(WEIGHT, 32)
    tensors = made.tensors
    values = packing.dequantize_gemm(tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), 4, 32)
    assert close(values.T, made)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("seed", [None, 1])
def test_gptq(seed: int | None, is_symmetric: bool, bits: int) -> None:
    qlinear: Any = pytest.importorskip("auto_gptq.nn_modules.qlinear.qlinear_cuda")
    made = gptq_columns(WEIGHT, bits, 32, is_symmetric=is_symmetric, seed=seed)
    linear = qlinear.QuantLinear(bits, 32, 128, 64, False, weight_dtype=torch.float32)
    for name, tensor in made.tensors.items():
        setattr(linear, name, tensor.float() if name == "scales" else tensor)
    assert close(linear(torch.eye(128)).T, made)
