"""Writes the values of a GGUF file again in blocks of another type, to compare types on one trained model.

The K formats have superblocks of 256 values. A llama whose widths these do not fill is widened with zeros first, whole
groups of heads included; norms, which divide by the width, are scaled so that the model computes the same.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from alignedserve.gguf.file import GgufFile, GgufTensor
from kernels.block_values import unpack_rows

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SUPERBLOCK = 256
_OWN = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")


def write_requantized(source: GgufFile, path: Path, type_name: str) -> None:
    """Write the file with all matrices in `type_name`; wider, where that is a K format."""
    reader: Any = gguf.GGUFReader(source.path)
    writer: Any = gguf.GGUFWriter(path, str(source.metadata["general.architecture"]))
    widening = _Widening(source) if type_name.endswith("_K") else None
    changed = widening.metadata() if widening else {}
    for key, field in reader.fields.items():
        if key not in _OWN:
            writer.add_key_value(key, changed.get(key, field.contents()), field.types[0], _list_type(field))
    tensor_type = gguf.GGMLQuantizationType[type_name]
    for tensor in source.tensors.values():
        values = unpack_rows(source.raw_rows(tensor), tensor.type.name)
        values = widening.values(tensor, values) if widening else values
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, values[0])
        else:
            writer.add_tensor(tensor.name, quantized_rows(values, type_name), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantized_rows(values: Floats, type_name: str) -> Bytes:
    """Return rows of blocks: uint8 [rows, bytes of a row]."""
    if type_name not in _SUPERBLOCKS:
        rows: Bytes = gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name])
        return rows
    return _SUPERBLOCKS[type_name](values.reshape(-1, SUPERBLOCK)).reshape(len(values), -1)


class _Widening:
    """A llama of the next width that superblocks fill, with zeros in what is added."""

    def __init__(self, file: GgufFile) -> None:
        self._numbers: dict[str, Any] = {
            name: file.metadata[f"llama.{name}"] for name in ("embedding_length", *_HEADS, _EPSILON)
        }
        self._width = int(self._numbers["embedding_length"])
        group = self._numbers[_HEADS[0]] // self._numbers[_HEADS[1]]
        step = math.lcm(SUPERBLOCK, self._width // self._numbers[_HEADS[1]])
        self._wider = -(-self._width // step) * step
        num_kv_heads = self._wider * self._numbers[_HEADS[1]] // self._width
        self._heads = {_HEADS[0]: num_kv_heads * group, _HEADS[1]: num_kv_heads}
        self._share = self._width / self._wider

    def metadata(self) -> dict[str, Any]:
        """Return the entries that change."""
        changed = {"embedding_length": self._wider, _EPSILON: self._numbers[_EPSILON] * self._share, **self._heads}
        return {f"llama.{name}": value for name, value in changed.items()}

    def values(self, tensor: GgufTensor, values: Floats) -> Floats:
        """Return a tensor's values with zeros in the rows and columns that are added."""
        rows, columns = values.shape
        if len(tensor.shape) == 1:
            return self._padded(values * np.float32(math.sqrt(self._share)), 1, self._wider)
        if "attn_k" in tensor.name or "attn_v" in tensor.name:
            rows = rows * self._heads[_HEADS[1]] // self._numbers[_HEADS[1]]
        elif rows == self._width:
            rows = self._wider
        return self._padded(values, rows, self._wider if columns == self._width else columns)

    @staticmethod
    def _padded(values: Floats, rows: int, columns: int) -> Floats:
        padded = np.zeros((rows, columns), np.float32)
        padded[: values.shape[0], : values.shape[1]] = values
        return padded


_HEADS = ("attention.head_count", "attention.head_count_kv")
_EPSILON = "attention.layer_norm_rms_epsilon"


def _q4_k(values: Floats) -> Bytes:
    blocks = values.reshape(-1, 8, 32)
    lowest = np.minimum(blocks.min(-1), 0.0)
    scales, scale = _in_steps((blocks.max(-1).clip(0.0) - lowest) / 15, 63)
    minima, minimum = _in_steps(-lowest, 63)
    steps = (scale * scales)[:, :, None]
    shifted = blocks + (minimum * minima)[:, :, None]
    quants = np.divide(shifted, steps, out=np.zeros_like(blocks), where=steps > 0.0)
    quants = np.rint(quants).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = np.concatenate(
        [
            scales[:, :4] | scales[:, 4:] >> 4 << 6,
            minima[:, :4] | minima[:, 4:] >> 4 << 6,
            scales[:, 4:] & 15 | (minima[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    nibbles = (quants[:, :, 0] | quants[:, :, 1] << 4).reshape(len(blocks), 128)
    return np.concatenate([_half_bytes(scale), _half_bytes(minimum), packed, nibbles], axis=1)


def _q6_k(values: Floats) -> Bytes:
    blocks = values.reshape(-1, 16, 16)
    scales, scale = _in_steps(np.abs(blocks).max(-1) / 31, 127)
    steps = (scale * scales)[:, :, None]
    quants = np.divide(blocks, steps, out=np.zeros_like(blocks), where=steps > 0.0)
    quants = (np.rint(quants).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 128)
    low = (quants[:, :, :64] & 15 | (quants[:, :, 64:] & 15) << 4).reshape(len(blocks), 128)
    parts = (quants >> 4).reshape(-1, 2, 4, 32)
    high = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return np.concatenate([low, high.reshape(len(blocks), 64), scales, _half_bytes(scale)], axis=1)


def _in_steps(numbers: Floats, highest: int) -> tuple[Bytes, Floats]:
    """Return numbers [blocks, n] as steps of up to `highest`, and the step [blocks, 1], which is a float16."""
    step = (numbers.max(-1, keepdims=True) / highest).astype(np.float16).astype(np.float32)
    steps = np.divide(numbers, step, out=np.zeros_like(numbers), where=step > 0.0)
    return np.rint(steps).clip(0, highest).astype(np.uint8), step


def _half_bytes(numbers: Floats) -> Bytes:
    return numbers.astype("<f2").view(np.uint8)


_SUPERBLOCKS = {"Q4_K": _q4_k, "Q6_K": _q6_k}


def _list_type(field: Any) -> Any:
    return field.types[-1] if len(field.types) > 1 else None
