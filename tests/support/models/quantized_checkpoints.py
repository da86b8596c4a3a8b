"""Quantised checkpoints, written as published descriptions of their formats have them, for tests and benchmarks.

Weights are rounded to the nearest number: formats, not methods of calibration, are what is tried.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from alignedserve.runtime.engine.forward.decoder import Decoder
from alignedserve.runtime.model.model_files import read_config
from alignedserve.runtime.model.quantized.source import QuantizedSource
from alignedserve.runtime.model.weights.safetensors_source import SafetensorsSource
from alignedserve.runtime.model.weights.weight_loader import assemble_weights

Tensors = dict[str, Tensor]


class Quantized(NamedTuple):
    """One matrix: its tensors by their names below the module, and the values that they stand for."""

    tensors: Tensors
    values: Tensor  # float32 [rows, width]


class CheckpointFormat(NamedTuple):
    """One format of checkpoints."""

    config: dict[str, Any]  # quantization_config
    quantize: Callable[[Tensor], Quantized]


class Groups(NamedTuple):
    """A matrix rounded in groups of inputs; a value is scale * (number - zero point)."""

    numbers: Tensor  # int64 [rows, width], from 0 on
    scales: Tensor  # [rows, groups], in the dtype that is stored
    zeros: Tensor  # int64 [rows, groups]
    group_of: Tensor  # int64 [width]

    @property
    def values(self) -> Tensor:
        """Return the values in float32."""
        return (self.numbers - self.zeros[:, self.group_of]) * self.scales.float()[:, self.group_of]


def round_in_groups(
    weight: Tensor,
    bits: int,
    group_size: int | None = None,
    *,
    is_symmetric: bool = True,
    scale_dtype: torch.dtype = torch.float16,
    group_of: Tensor | None = None,
) -> Groups:
    """Round a matrix. `group_of`: the group of each input; None: they are runs of `group_size`, or of all inputs."""
    rows, width = weight.shape
    group_of = torch.arange(width) // (group_size or width) if group_of is None else group_of
    count, top = int(group_of.max()) + 1, (1 << bits) - 1
    index = group_of.expand(rows, -1)
    highest = torch.zeros(rows, count).scatter_reduce(1, index, weight, "amax")
    lowest = torch.zeros(rows, count).scatter_reduce(1, index, weight, "amin")
    if is_symmetric:
        highest = torch.maximum(highest, -lowest)
        lowest = -highest
    scales = ((highest - lowest) / top).clamp(min=1e-6).to(scale_dtype)
    zeros = (-lowest / scales.float()).round().clamp(0, top).long()
    if is_symmetric:
        zeros.fill_((top + 1) // 2)
    numbers = (weight / scales.float()[:, group_of]).round().long() + zeros[:, group_of]
    return Groups(numbers.clamp(0, top), scales, zeros, group_of)


def packed_words(numbers: Tensor, bits: int) -> Tensor:
    """Put numbers [rows, n] into int32 words, lowest first, zeros behind the last."""
    per_word = 32 // bits
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_word)).view(len(numbers), -1, per_word)
    return as_int32((padded << torch.arange(per_word) * bits).sum(-1))


def as_int32(words: Tensor) -> Tensor:
    """Return unsigned words as int32."""
    return ((words + (1 << 31)) % (1 << 32) - (1 << 31)).to(torch.int32).contiguous()


def packed_rows(weight: Tensor, bits: int, group_size: int | None, **options: Any) -> Quantized:
    """Write compressed-tensors' pack-quantized."""
    groups = round_in_groups(weight, bits, group_size, **options)
    tensors = {
        "weight_packed": packed_words(groups.numbers, bits),
        "weight_scale": groups.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not options.get("is_symmetric", True):
        tensors["weight_zero_point"] = packed_words(groups.zeros.T, bits).T.contiguous()
    if options.get("group_of") is not None:
        tensors["weight_g_idx"] = groups.group_of.to(torch.int32)
    return Quantized(tensors, groups.values)


def int8_rows(
    weight: Tensor, *, is_by_row: bool = True, is_symmetric: bool = True, is_static: bool = False
) -> Quantized:
    """Write compressed-tensors' int-quantized, with one scale per row or one in all."""
    shape = weight.shape
    weight = weight if is_by_row else weight.reshape(1, -1)
    groups = round_in_groups(weight, 8, is_symmetric=is_symmetric, scale_dtype=torch.bfloat16)
    tensors = {
        "weight": (groups.numbers - 128).to(torch.int8).view(shape),
        "weight_scale": groups.scales if is_by_row else groups.scales[0],
    }
    if not is_symmetric:
        tensors["weight_zero_point"] = (groups.zeros - 128).to(torch.int8)
    if is_static:
        tensors |= {"input_scale": torch.tensor([0.02]), "input_zero_point": torch.tensor([0], dtype=torch.int8)}
    return Quantized(tensors, groups.values.view(shape))


def float8_rows(weight: Tensor, *, is_by_row: bool = True, is_static: bool = False) -> Quantized:
    """Write compressed-tensors' float-quantized, with one scale per row or one in all."""
    largest = weight.abs().amax(1, keepdim=True) if is_by_row else weight.abs().amax().view(1)
    scales = (largest / 448.0).to(torch.bfloat16)
    rounded = (weight / scales.float()).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    tensors = {"weight": rounded, "weight_scale": scales}
    return Quantized(
        tensors | ({"input_scale": torch.tensor([0.01])} if is_static else {}), rounded.float() * scales.float()
    )


def float8_blocks(weight: Tensor, block: int) -> Quantized:
    """Write FP8 with a scale for every block of outputs and inputs."""
    rows, width = weight.shape
    places = (torch.arange(rows) // block)[:, None], (torch.arange(width) // block)[None, :]
    scales = torch.zeros(-(-rows // block), -(-width // block))
    for row in range(len(scales)):
        for column in range(scales.shape[1]):
            part = weight[row * block : (row + 1) * block, column * block : (column + 1) * block]
            scales[row, column] = part.abs().max() / 448.0
    rounded = (weight / scales[places]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return Quantized({"weight": rounded, "weight_scale_inv": scales}, rounded.float() * scales[places])


def nvfp4_rows(weight: Tensor, *, is_modelopt: bool = False) -> Quantized:
    """Write floats of 4 bits with a scale of FP8 for every 16 inputs, and a float32 for the whole matrix."""
    groups = weight.view(len(weight), -1, 16)
    whole = weight.abs().max() / (6.0 * 448.0)
    scales = (groups.abs().amax(-1) / 6.0 / whole).to(torch.float8_e4m3fn)
    sizes = scales.float()[..., None] * whole
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = ((groups.abs() / sizes)[..., None] - magnitudes).abs().argmin(-1)
    values = (magnitudes[numbers] * groups.sign() * sizes).view(weight.shape)
    codes = (numbers + 8 * (groups < 0)).to(torch.uint8).view(weight.shape)
    words = codes[:, ::2] | codes[:, 1::2] << 4
    if is_modelopt:
        return Quantized({"weight": words, "weight_scale": scales, "weight_scale_2": whole}, values)
    tensors = {"weight_packed": words, "weight_scale": scales, "weight_global_scale": 1.0 / whole.view(1)}
    return Quantized(tensors, values)


def awq_columns(weight: Tensor, group_size: int | None) -> Quantized:
    """Write AWQ's gemm packing."""
    groups = round_in_groups(weight, 4, group_size, is_symmetric=False)

    def words(numbers: Tensor) -> Tensor:
        octets = numbers.view(len(numbers), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return packed_words(octets.flatten(1), 4)

    tensors = {
        "qweight": words(groups.numbers.T),
        "qzeros": words(groups.zeros.T),
        "scales": groups.scales.T.contiguous(),
    }
    return Quantized(tensors, groups.values)


def gptq_columns(
    weight: Tensor,
    bits: int,
    group_size: int | None,
    *,
    is_symmetric: bool = True,
    seed: int | None = None,
    is_v2: bool = False,
) -> Quantized:
    """Write GPTQ's packing. `seed`: of an order of the inputs, as desc_act has it."""
    width = weight.shape[1]
    group_of = torch.arange(width) // (group_size or width)
    if seed is not None:
        group_of = group_of[torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    groups = round_in_groups(weight, bits, group_size, is_symmetric=is_symmetric, group_of=group_of)
    ones = 0 if is_v2 else (0x11111111 if bits == 4 else 0x01010101)
    zeros = packed_words(groups.zeros.T, bits).long()
    tensors = {
        "qweight": packed_words(groups.numbers, bits).T.contiguous(),
        "qzeros": as_int32(zeros - ones),
        "scales": groups.scales.T.contiguous(),
        "g_idx": group_of.to(torch.int32),
    }
    return Quantized(tensors, groups.values)


def compressed_tensors(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the config of compressed-tensors, with one group for all linear layers but the head."""
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "version": "0.9.0",
    }


def _int(bits: int, strategy: str, group_size: int | None = None, **options: Any) -> dict[str, Any]:
    common = {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group_size, "symmetric": True}
    return {**common, "dynamic": False, "observer": "minmax", **options}


def _gptq(bits: int, group_size: int, **options: Any) -> dict[str, Any]:
    common = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "damp_percent": 0.01, "sym": True}
    return {**common, "desc_act": False, "true_sequential": True, "lm_head": False, **options}


_FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FLOAT_TOKENS = {**_TOKENS, "type": "float"}
_STATIC = {**_TOKENS, "strategy": "tensor", "dynamic": False}
_FLOAT_OF_4 = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": "local"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}

FORMATS: dict[str, CheckpointFormat] = {
    "w8a8": CheckpointFormat(compressed_tensors("int-quantized", _int(8, "channel"), _TOKENS), int8_rows),
    "w8a8 static, by tensor": CheckpointFormat(
        compressed_tensors("int-quantized", _int(8, "tensor"), _STATIC),
        lambda weight: int8_rows(weight, is_by_row=False, is_static=True),
    ),
    "w8a8 with zero points": CheckpointFormat(
        compressed_tensors("int-quantized", _int(8, "channel", symmetric=False), _TOKENS),
        lambda weight: int8_rows(weight, is_symmetric=False),
    ),
    "w8a16": CheckpointFormat(
        compressed_tensors("pack-quantized", _int(8, "channel")),
        lambda weight: packed_rows(weight, 8, None, scale_dtype=torch.bfloat16),
    ),
    "w4a16 in groups": CheckpointFormat(
        compressed_tensors("pack-quantized", _int(4, "group", 32)),
        lambda weight: packed_rows(weight, 4, 32, scale_dtype=torch.bfloat16),
    ),
    "w4a16 with zero points": CheckpointFormat(
        compressed_tensors("pack-quantized", _int(4, "group", 32, symmetric=False)),
        lambda weight: packed_rows(weight, 4, 32, is_symmetric=False, scale_dtype=torch.bfloat16),
    ),
    "w4a16 by row": CheckpointFormat(
        compressed_tensors("pack-quantized", _int(4, "channel")),
        lambda weight: packed_rows(weight, 4, None, scale_dtype=torch.float32),
    ),
    "fp8": CheckpointFormat(compressed_tensors("float-quantized", _FLOAT, _FLOAT_TOKENS), float8_rows),
    "fp8 static, by tensor": CheckpointFormat(
        compressed_tensors("float-quantized", {**_FLOAT, "strategy": "tensor"}, {**_STATIC, "type": "float"}),
        lambda weight: float8_rows(weight, is_by_row=False, is_static=True),
    ),
    "fp8 in blocks": CheckpointFormat(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [32, 32]},
        lambda weight: float8_blocks(weight, 32),
    ),
    "nvfp4": CheckpointFormat(
        compressed_tensors("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}, _FLOAT_OF_4),
        nvfp4_rows,
    ),
    "nvfp4 of modelopt": CheckpointFormat(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, lambda weight: nvfp4_rows(weight, is_modelopt=True)
    ),
    "awq": CheckpointFormat(_AWQ, lambda weight: awq_columns(weight, 32)),
    "awq by row": CheckpointFormat({**_AWQ, "group_size": -1}, lambda weight: awq_columns(weight, None)),
    "gptq": CheckpointFormat(_gptq(4, 32), lambda weight: gptq_columns(weight, 4, 32)),
    "gptq desc_act": CheckpointFormat(
        _gptq(4, 32, desc_act=True), lambda weight: gptq_columns(weight, 4, 32, seed=weight.shape[1])
    ),
    "gptq desc_act, different orders": CheckpointFormat(
        _gptq(4, 32, desc_act=True), lambda weight: gptq_columns(weight, 4, 32, seed=int(weight[0, 0] * 1e6) % 1000)
    ),
    "gptq with zero points": CheckpointFormat(
        _gptq(4, 32, sym=False), lambda weight: gptq_columns(weight, 4, 32, is_symmetric=False)
    ),
    "gptq of 8 bits": CheckpointFormat(_gptq(8, 32), lambda weight: gptq_columns(weight, 8, 32)),
    "gptq v2": CheckpointFormat(
        _gptq(4, -1, sym=False, checkpoint_format="gptq_v2"),
        lambda weight: gptq_columns(weight, 4, None, is_symmetric=False, is_v2=True),
    ),
}


def is_linear(name: str) -> bool:
    """Return whether a tensor is the weight of a linear layer, other than the head and routers."""
    module = name.removesuffix(".weight")
    left_out = ("norm", "embed", "lm_head", "embed_out", "positions", "mlp.gate", "block_sparse_moe.gate")
    last = ".".join(module.split(".")[-2:])
    return module != name and not any(
        part in last if part in ("norm", "embed") else last.endswith(part) for part in left_out
    )


def quantize_folder(
    folder: Path, checkpoint_format: CheckpointFormat, chooses: Callable[[str], bool] = is_linear
) -> Tensors:
    """Rewrite a folder with one file of plain weights; return the values of all its tensors in float32."""
    path = folder / "model.safetensors"
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in load_file(path).items():
        stored[name], values[name] = tensor, tensor.float()
        if tensor.ndim == 2 and chooses(name):
            del stored[name]
            quantized = checkpoint_format.quantize(tensor.float())
            module = name.removesuffix("weight")
            stored |= {module + suffix: part.contiguous().clone() for suffix, part in quantized.tensors.items()}
            values[name] = quantized.values
    save_file(stored, path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": checkpoint_format.config}))
    return values


def unpacked_source(folder: Path) -> QuantizedSource:
    """Return the weights of a folder, none of which stays packed."""
    quantization = read_config(folder).stored_quantization
    assert quantization is not None
    plain = SafetensorsSource(folder, torch.float32, torch.device("cpu"))
    return QuantizedSource(plain, quantization, unpacks_all=True)


def unpacked_decoder(folder: Path) -> Decoder:
    """Return a decoder that computes with no packed weight, for comparison."""
    config = read_config(folder)
    return Decoder(config, assemble_weights(config, unpacked_source(folder)))
