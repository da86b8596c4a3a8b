"""The states of a model's layers in the blocks of a storage, as tensors, and how far each block's stand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.model.model_config import ModelConfig
from alignedserve.runtime.model.state_config import HEADER_BYTES
from kernels.states.state_rows import StateRows

_UNFINISHED = -1


def tokens_behind_states(storage: BlockStorage) -> Tensor:
    """Return of every block how many tokens of a context its states stand behind: [blocks] int64, in the blocks."""
    return storage.states[:, :8].view(torch.int64)[:, 0]


class StateStorage:
    """Views of a storage's states; the storage is the only owner."""

    def __init__(self, config: ModelConfig, storage: BlockStorage) -> None:
        assert config.state is not None, "a model without states"
        self.storage = storage
        self._num_tokens = tokens_behind_states(storage)
        self._parts: dict[int, Sequence[Tensor]] = {}
        first, cache_dtype = HEADER_BYTES, storage.layout.dtype
        for layer in config.state_layers:
            views = []
            for part in config.state.parts:
                dtype, size = torch_dtype(part.dtype(cache_dtype)), part.num_bytes(cache_dtype)
                flat = storage.states[:, first : first + size].view(dtype)
                num_elements = torch.Size(part.shape).numel()
                views.append(flat[:, :num_elements].view(-1, *part.shape))
                first += size
            self._parts[layer] = views

    def parts(self, layer: int) -> Sequence[Tensor]:
        """Return the tensors of a layer's states, each [blocks, ..]."""
        return self._parts[layer]

    def begin(self, rows: StateRows) -> None:
        """Mark the states that a pass is about to write."""
        self._num_tokens[torch.from_numpy(rows.targets)] = _UNFINISHED

    def end(self, rows: StateRows) -> None:
        """Note behind which tokens these states stand now."""
        self._num_tokens[torch.from_numpy(rows.targets)] = torch.from_numpy(rows.num_tokens)
