"""The tensors of a GGUF file as a source of weights: unpacked, or as the blocks that lie in the file."""

import torch
from torch import Tensor

from alignedserve.core.errors import ModelError
from alignedserve.gguf.file import GgufFile, GgufTensor
from alignedserve.gguf.tensor_types import computed_as
from alignedserve.runtime.device.devices import CUDA
from alignedserve.runtime.model.decoder.decoder_parts import NormKind
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.gguf.names import find_tensor, tensor_names
from alignedserve.runtime.model.weights.packed_products import BLOCK_DTYPES, BlockRows, GroupedRows
from alignedserve.runtime.model.weights.row_lookup import BlockLookup
from kernels.cpu.block_quantized_linear import block_obstacle
from kernels.cpu.packed_linear import FileRows
from kernels.weight_blocks.block_groups import grouped_blocks
from kernels.weight_blocks.block_values import unpack_rows
from kernels.weight_blocks.wider_blocks import wider_blocks

# llama.cpp rotates neighbouring elements of these families' heads and puts their rows side by side for that.
_INTERLEAVED = ("llama", "mixtral", "granite")
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufSource:
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
        """`unpacks_all`: no product is computed with packed weights, for comparison. `in_groups`: as GPUs compute them;
        None: on one."""
        self._has_groups = (device.type == CUDA if in_groups is None else in_groups) and not unpacks_all
        has_kernels = device.type == "cpu" and dtype in BLOCK_DTYPES
        self._has_blocks = has_kernels and not (unpacks_all or self._has_groups)
        self._file = file
        self.names = tensor_names(file)
        self.dtype = dtype
        self._device = device
        # Files have 1 + weight where a norm scales by that: taken off again, it keeps all its bits.
        self._has_added_ones = config.norm is NormKind.RMS_PLUS_ONE
        self._interleaved_heads = (
            {".attn_q.": config.num_heads, ".attn_k.": config.num_kv_heads} if config.family in _INTERLEAVED else {}
        )

    def has(self, name: str) -> bool:
        return find_tensor(self._file, name) is not None

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the tensor, unpacked, converted and moved. Raises ModelError naming tensor and file."""
        stored = self._stored(name, shape)
        values = torch.from_numpy(unpack_rows(self._file.raw_rows(stored), stored.type.name))
        values = self._in_order(name, values if len(shape) == 2 else values[0])
        if self._has_added_ones and name.endswith("norm.weight"):
            values = values - 1.0
        return values.to(device=self._device, dtype=self.dtype)

    def packed(self, name: str, shape: tuple[int, ...]) -> BlockRows | GroupedRows | None:
        """Return the matrix as products are computed with it; None when it is to be unpacked.

        Raises ModelError naming tensor and file.
        """
        blocks = self._in_blocks(name, shape) if self._has_blocks or self._has_groups else None
        if blocks is None or self._has_blocks:
            return blocks
        return GroupedRows(grouped_blocks(blocks.rows, blocks.type_name)).moved(self._device)

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

    def looked_up(self, name: str, shape: tuple[int, int]) -> BlockLookup | None:
        """Return the matrix for looking up its rows, which stay in their blocks; None when it is to be unpacked.

        Raises ModelError naming tensor and file.
        """
        packed = self._in_blocks(name, shape) if self._has_blocks else None
        return None if packed is None else BlockLookup(packed.rows, packed.type_name, shape[1], self.dtype)

    def file_rows(self, name: str, shape: tuple[int, int]) -> FileRows | None:
        """Return where a matrix of plain floats lies; None when it is in blocks, its rows come in another order, or the
        device is not the CPU.

        Raises ModelError naming tensor and file.
        """
        stored = self._stored(name, shape)
        dtype = _FLOATS.get(stored.type.name)
        if dtype is None or self._heads_of(name) is not None or self._device.type != "cpu":
            return None
        return FileRows(stored.path, stored.offset, *shape, dtype)

    def _stored(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        stored = find_tensor(self._file, name)
        if stored is None:
            raise ModelError(f"{self._file.path} holds no tensor {name}.")
        if stored.shape != shape:
            found, expected = list(stored.shape), list(shape)
            raise ModelError(f"{stored.path}: tensor {name} has shape {found}, expected {expected}.")
        return stored

    def _in_order(self, name: str, rows: Tensor) -> Tensor:
        num_heads = self._heads_of(name)
        if num_heads is None:
            return rows
        pairs = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)

    def _heads_of(self, name: str) -> int | None:
        return next((heads for part, heads in self._interleaved_heads.items() if part in name), None)
