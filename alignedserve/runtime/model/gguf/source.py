"""The tensors of a GGUF file as a source of weights: unpacked, or as the blocks that lie in the file."""

import torch
from torch import Tensor
from typing_extensions import override

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.gguf.tensor_types import computed_as
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.model.decoder.decoder_parts import NormKind
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.gguf.config import find_tensor, tensor_names
from alignedserve.runtime.model.weights.packed_products import BLOCK_DTYPES, BlockRows, GroupedRows
from alignedserve.runtime.model.weights.weight_source import BlockLookup, WeightSource
from kernels.block_formats import grouped_blocks
from kernels.block_values import unpack_rows, wider_blocks
from kernels.cpu.block_quantized_linear import block_obstacle
from kernels.cpu.packed_linear import FileRows

# llama.cpp rotates neighbouring elements of these families' heads and puts their rows side by side for that.
_INTERLEAVED = ("llama", "mixtral", "granite")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource(WeightSource):
    """The tensors of one model, in `dtype` on `device`; most matrices stay packed: on a CPU in their blocks."""

    def __init__(
        self,
        file: GgufFile,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        unpacks_all: bool = False,
        in_groups: bool | None = None,
    ) -> None:
        """`unpacks_all`: for comparison. `in_groups`: products are computed as on GPUs; None: on a GPU."""
        super().__init__(dtype, device)
        self._has_groups = (device.type == CUDA if in_groups is None else in_groups) and not unpacks_all
        has_kernels = device.type == "cpu" and dtype in BLOCK_DTYPES
        self._has_blocks = has_kernels and not (unpacks_all or self._has_groups)
        self._file = file
        self.names = tensor_names(file)
        self._unpacks_all = unpacks_all
        # Files have 1 + weight where a norm scales by that: taken off again, it keeps all its bits.
        self._has_added_ones = config.norm is NormKind.RMS_PLUS_ONE
        self._interleaved_heads = (
            {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads} if config.family in _INTERLEAVED else {}
        )

    @override
    def has(self, name: str) -> bool:
        return find_tensor(self._file, name) is not None

    @override
    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._stored(name, shape)
        values = torch.from_numpy(unpack_rows(self._file.raw_rows(stored), stored.type.name))
        values = self._in_order(name, values if len(shape) == 2 else values[0])
        if self._has_added_ones and name.endswith("norm.weight"):
            values = values - 1.0
        return values.to(device=self.device, dtype=self.dtype)

    @override
    def packed(self, name: str, shape: tuple[int, ...]) -> BlockRows | GroupedRows | None:
        blocks = self._in_blocks(name, shape) if self._has_blocks or self._has_groups else None
        if blocks is None or self._has_blocks:
            return blocks
        return GroupedRows(grouped_blocks(blocks.rows, blocks.type_name)).moved(self.device)

    def _in_blocks(self, name: str, shape: tuple[int, ...]) -> BlockRows | None:
        stored = self._stored(name, shape)
        type_name = computed_as(stored.type.name)
        if type_name is None:
            return None
        raw = wider_blocks(self._file.raw_rows(stored), stored.type.name)
        rows = self._in_order(name, torch.from_numpy(raw))
        obstacle = block_obstacle(rows, type_name)
        if obstacle is not None:
            raise ModelError(f"{stored.path}: tensor {name} cannot be used: {obstacle}.")
        return BlockRows(rows, type_name, shape[1])

    @override
    def looked_up(self, name: str, shape: tuple[int, int]) -> BlockLookup | None:
        packed = self._in_blocks(name, shape) if self._has_blocks else None
        return None if packed is None else BlockLookup(packed.rows, packed.type_name, shape[1], self.dtype)

    @override
    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        stored = self._stored(name, shape)
        dtype = _FLOATS.get(stored.type.name)
        if self._unpacks_all or dtype is None or self._heads_of(name) is not None or self.device.type != "cpu":
            return None
        return FileRows(stored.path, stored.offset, *shape, dtype)

    def _stored(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        stored = find_tensor(self._file, name)
        if stored is None:
            raise ModelError(f"{self._file.path} holds no tensor {name}.")
        if stored.shape != shape:
            actual, expected = list(stored.shape), list(shape)
            raise ModelError(f"{stored.path}: tensor {name} has shape {actual}, expected {expected}.")
        return stored

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        num_heads = self._heads_of(name)
        if num_heads is None:
            return rows
        pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _heads_of(self, name: str) -> int | None:
        return next((heads for part, heads in self._interleaved_heads.items() if part in name), None)
