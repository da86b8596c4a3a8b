"""The states of a model's layers in the blocks of a storage, as tensors, and how far each block's stand."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignedserve.runtime.device.dtypes import torch_dtype
from alignedserve.runtime.kv.block_storage import BlockStorage
from alignedserve.runtime.kv.state_headers import UNFINISHED, states_of, tokens_behind_states
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.decoder.state_config import HEADER_BYTES, StateConfig, layers_in_block, state_bytes
from kernels.states.device_rows import DeviceStateRows
from kernels.states.state_rows import StateRows


class StateStorage:
    """Views of a storage's states; the storage is the only owner."""

    def __init__(self, config: ModelConfig, storage: BlockStorage) -> None:
        assert config.state is not None, "a model without states"
        self.storage = storage
        self._num_tokens = tokens_behind_states(storage)
        self._parts: dict[int, Sequence[Tensor]] = {}
        self._columns: dict[int, int] = {}
        states, num_layers = states_of(storage), len(config.state_layers)
        if storage.layout.state_blocks:
            num_layers = layers_in_block(config.state, storage.layout.dtype, storage.layout.block_bytes)
        layer_bytes = state_bytes(config.state, storage.layout.dtype)
        for place, layer in enumerate(config.state_layers):
            self._columns[layer], place_in_block = divmod(place, num_layers)
            first = HEADER_BYTES + place_in_block * layer_bytes
            self._parts[layer] = _views(config.state, storage.layout.dtype, states[:, first : first + layer_bytes])

    def parts(self, layer: int) -> Sequence[Tensor]:
        return self._parts[layer]

    def column(self, layer: int) -> int:
        return self._columns[layer]

    def begin(self, rows: StateRows | DeviceStateRows) -> None:
        self._num_tokens.index_fill_(0, torch.as_tensor(rows.targets), UNFINISHED)

    def end(self, rows: StateRows | DeviceStateRows) -> None:
        self._num_tokens.index_copy_(0, torch.as_tensor(rows.targets), torch.as_tensor(rows.num_tokens))


def _views(config: StateConfig, cache_dtype: str, layer: Tensor) -> list[Tensor]:
    views, first = [], 0
    for part in config.parts:
        dtype, size = torch_dtype(part.dtype(cache_dtype)), part.num_bytes(cache_dtype)
        flat = layer[:, first : first + size].view(dtype)
        views.append(flat[:, : torch.Size(part.shape).numel()].view(-1, *part.shape))
        first += size
    return views
