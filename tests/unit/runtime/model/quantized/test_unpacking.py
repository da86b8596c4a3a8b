"""Layouts of quantised matrices, word by word, and what kernels get of them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from alignedserve.core.json_fields import JsonFields
from alignedserve.runtime.model.quantized.config import read_quantization
from alignedserve.runtime.model.quantized.layout import Computing, ProductForm, StoredMatrix, stored_matrix
from alignedserve.runtime.model.quantized.source import (
    packed_integers,
    read_float8,
    read_integers,
    unpacked_float8,
    unpacked_integers,
)
from alignedserve.runtime.model.weight_index import TensorHeader
from alignedserve.runtime.model.weights.packed_products import BlockRows, Int8Rows
from kernels.block_formats import dequantize
from tests.support.marks import each
from tests.support.models.quantized_checkpoints import (
    FORMATS,
    Quantized,
    as_int32,
    awq_columns,
    compressed_tensors,
    gptq_columns,
    int8_rows,
    packed_rows,
)

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.int32: "I32"}
_NAMES |= {torch.int64: "I64", torch.float8_e4m3fn: "F8_E4M3"}


class Tensors:
    """The tensors of one module `m`."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {f"m.{name}": tensor for name, tensor in tensors.items()}

    def header(self, name: str) -> TensorHeader | None:
        tensor = self.tensors.get(name)
        return None if tensor is None else TensorHeader(tuple(tensor.shape), _NAMES[tensor.dtype])


def matrix_of(tensors: Tensors, config: dict[str, Any], shape: tuple[int, int]) -> tuple[StoredMatrix, int]:
    quantization = read_quantization(JsonFields({"quantization_config": config}, "config.json"))
    assert quantization is not None
    matrix = stored_matrix(tensors, quantization, "m", shape)
    assert matrix is not None
    return matrix, quantization.zero_offset


def values_of(config: dict[str, Any], shape: tuple[int, int], **parts: Tensor) -> Tensor:
    tensors = Tensors(**parts)
    matrix, offset = matrix_of(tensors, config, shape)
    if matrix.scheme.is_float:
        return unpacked_float8(matrix, read_float8(matrix, tensors.tensors.__getitem__), torch.float32)
    return unpacked_integers(read_integers(matrix, tensors.tensors.__getitem__, offset), torch.float32)


def words(*values: int) -> Tensor:
    return as_int32(torch.tensor(values))


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 8}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 1, "version": "GEMM"}
ONE_SCALE = torch.tensor([[0.5]], dtype=torch.float16)


def test_gptq_words() -> None:
    """Inputs lie in a word, the lowest first; zero points are stored minus 1."""
    parts = {"scales": ONE_SCALE.expand(1, 8).contiguous(), "qzeros": words(0x77777777)[None]}
    values = values_of(GPTQ, (8, 8), qweight=words(*([0xFEDCBA98] * 8))[None], **parts)
    assert values[3].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5]


def test_gptq_zero_points_of_zero_borrow_from_their_neighbours() -> None:
    stored = 0x00000050 - 0x11111111  # zero points 0, 5, 0 and so on
    parts = {"scales": ONE_SCALE.expand(1, 8).contiguous(), "qzeros": words(stored)[None]}
    values = values_of(GPTQ, (8, 8), qweight=words(*([0x77777777] * 8))[None], **parts)
    assert values[:, 0].tolist() == [3.5, 1.0, 3.5, 3.5, 3.5, 3.5, 3.5, 3.5]


def test_gptq_orders() -> None:
    order = torch.tensor([1, 0, 0, 1, 1, 0, 0, 1], dtype=torch.int32)
    scales = torch.tensor([[1.0], [2.0]], dtype=torch.float16).expand(2, 8).contiguous()
    config = {**GPTQ, "group_size": 4, "desc_act": True, "sym": False}
    parts = {"qweight": words(*([0x99999999] * 8))[None], "qzeros": words(0x77777777, 0x66666666)[:, None]}
    values = values_of(config, (8, 8), scales=scales, g_idx=order, **parts)
    assert values[0].tolist() == [4.0, 1.0, 1.0, 4.0, 4.0, 1.0, 1.0, 4.0]


def test_awq_words() -> None:
    """Outputs lie in a word in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    parts = {"scales": ONE_SCALE.expand(1, 8).contiguous(), "qzeros": words(0x75316420)[None]}
    values = values_of(AWQ, (8, 1), qweight=words(0x75316420)[None], **parts)
    assert values[:, 0].tolist() == [0.0] * 8
    parts["qzeros"] = words(0)[None]
    assert values_of(AWQ, (8, 1), qweight=words(0x75316420)[None], **parts)[:, 0].tolist() == [n / 2 for n in range(8)]


def test_compressed_tensors_words() -> None:
    config = compressed_tensors("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 4})
    scale = torch.tensor([[0.5, 0.25]], dtype=torch.bfloat16)
    parts = {"weight_packed": words(0xFEDCBA98)[None], "weight_shape": torch.tensor([1, 8])}
    values = values_of(config, (1, 8), weight_scale=scale, **parts)
    assert values.tolist() == [[0.0, 0.5, 1.0, 1.5, 1.0, 1.25, 1.5, 1.75]]
    config["config_groups"]["group_0"]["weights"]["symmetric"] = False
    zeros = words(0x00000007, 0x0000000A)[None]  # of the one row, in words of up to eight rows
    values = values_of(config, (1, 8), weight_scale=scale, weight_zero_point=zeros, **parts)
    assert values.tolist() == [[0.5, 1.0, 1.5, 2.0, 0.5, 0.75, 1.0, 1.25]]


def test_8_bits_and_fp8() -> None:
    eight = compressed_tensors("int-quantized", {"num_bits": 8, "strategy": "channel", "symmetric": False})
    parts = {"weight": torch.tensor([[-128, 127]], dtype=torch.int8), "weight_scale": torch.tensor([[0.5]])}
    values = values_of(eight, (1, 2), weight_zero_point=torch.tensor([[-8]], dtype=torch.int8), **parts)
    assert values.tolist() == [[-60.0, 67.5]]
    blocks = {"quant_method": "fp8", "weight_block_size": [1, 2]}
    weight = torch.tensor([[448.0, -0.5, 2.0]]).to(torch.float8_e4m3fn)
    values = values_of(blocks, (1, 3), weight=weight, weight_scale_inv=torch.tensor([[0.5, 4.0]]))
    assert values.tolist() == [[224.0, -0.25, 8.0]]


CASES: dict[str, tuple[dict[str, Any], Any, ProductForm, str]] = {
    "awq in wide groups": ({**AWQ, "group_size": 128}, lambda w: awq_columns(w, 128), ProductForm.BLOCKS_4, "G4_128"),
    "awq in groups of 64": ({**AWQ, "group_size": 64}, lambda w: awq_columns(w, 64), ProductForm.BLOCKS_4, "G4_64"),
    "gptq in wide groups, ordered": (
        {**GPTQ, "group_size": 128, "desc_act": True},
        lambda w: gptq_columns(w, 4, 128, seed=3),
        ProductForm.BLOCKS_4,
        "G4_128",
    ),
    "gptq in narrow groups": ({**GPTQ, "group_size": 32}, FORMATS["gptq"].quantize, ProductForm.BLOCKS_4, "Q4_0"),
    "bfloat16 scales": (*FORMATS["w4a16 in groups"], ProductForm.BLOCKS_4, "Q4_0"),
    "float32 scales": (
        FORMATS["w4a16 in groups"].config,
        lambda w: packed_rows(w, 4, 32, scale_dtype=torch.float32),
        ProductForm.BLOCKS_4,
        "G4_32",
    ),
    "8 bits": (*FORMATS["gptq of 8 bits"], ProductForm.BLOCKS_8, "Q8_0"),
    "8 bits by row, float32 scales": (
        FORMATS["w8a16"].config,
        lambda w: packed_rows(w, 8, None, scale_dtype=torch.float32),
        ProductForm.BLOCKS_8,
        "",
    ),
    "8 bits with inputs of 8 bits": (FORMATS["w8a8"].config, int8_rows, ProductForm.INT8, ""),
}


def quantized(name: str) -> tuple[Tensors, StoredMatrix, int, Quantized]:
    config, quantize, _, _ = CASES[name]
    weight = torch.randn(40, 256, generator=torch.Generator().manual_seed(1))
    made: Quantized = quantize(weight)
    tensors = Tensors(**made.tensors)
    return tensors, *matrix_of(tensors, config, (40, 256)), made


@each("name", list(CASES))
def test_kernels_get_every_value_as_it_is(name: str) -> None:
    """Bit by bit: minima are exact products of scales and zero points."""
    tensors, matrix, offset, made = quantized(name)
    _, _, form, type_name = CASES[name]
    assert Computing("cpu", "bfloat16", has_kernels=True).form_of(matrix) is form
    rows = packed_integers(matrix, read_integers(matrix, tensors.tensors.__getitem__, offset), form)
    if isinstance(rows, Int8Rows):
        assert torch.equal(rows.rows.float() * rows.scales[:, None], made.values)
        return
    assert isinstance(rows, BlockRows)
    assert rows.type_name == type_name
    values = dequantize(rows.rows, rows.type_name)
    expected = made.values if rows.order is None else made.values[:, rows.order]
    if name == "float32 scales":  # the minimum is rounded to float32
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    else:
        assert torch.equal(values, expected)


def test_groups_that_do_not_fill_blocks_are_unpacked() -> None:
    config = {**GPTQ, "group_size": 32, "desc_act": True}
    made = gptq_columns(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), 4, 32, seed=1)
    made.tensors["g_idx"][:] = torch.arange(64) // 40  # 40 inputs, then 24
    tensors = Tensors(**made.tensors)
    matrix, offset = matrix_of(tensors, config, (8, 64))
    integers = read_integers(matrix, tensors.tensors.__getitem__, offset)
    assert packed_integers(matrix, integers, ProductForm.BLOCKS_4) is None


@pytest.mark.parametrize(("device", "dtype", "has_kernels"), [("cpu", "float16", True), ("cpu", "float32", False)])
def test_without_kernels_all_is_unpacked(device: str, dtype: str, has_kernels: bool) -> None:
    for name in CASES:
        matrix = quantized(name)[1]
        assert Computing(device, dtype, has_kernels=has_kernels).form_of(matrix) is ProductForm.UNPACKED
