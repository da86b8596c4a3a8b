"""Reads and marks how far states, and rings, are: the first bytes in front of them say so."""

import torch
from torch import Tensor

from alignedserve.runtime.kv.block_storage import BlockStorage

UNFINISHED = -1


def tokens_behind_states(storage: BlockStorage) -> Tensor:
    """Return of every block how many tokens of a context its states stand behind: [blocks] int64, in the blocks. Where
    states have blocks of their own, the first of a context's says it of all."""
    return states_of(storage)[:, :8].view(torch.int64)[:, 0]


def states_of(storage: BlockStorage) -> Tensor:
    """Return the bytes of all blocks' states, the scratch block's behind those of the others [blocks, bytes]."""
    return storage.all_bytes[:, 0 if storage.layout.state_blocks else storage.layout.kv_bytes :]
