"""Rows that are looked up in their blocks are those of the whole matrix, unpacked."""

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from alignedserve.runtime.model.weights.weight_source import BlockLookup
from kernels.weight_blocks.block_values import unpack_rows
from tests.support.marks import each


@each("type_name", ["Q8_0", "Q4_0", "Q4_1"])
@each("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_blocks_are_those_of_the_unpacked_matrix(type_name: str, dtype: torch.dtype) -> None:
    values = np.random.default_rng(0).normal(size=(40, 64)).astype(np.float32)
    raw = np.ascontiguousarray(quantize(values, GGMLQuantizationType[type_name]))
    whole = torch.from_numpy(unpack_rows(raw, type_name)).to(dtype)
    lookup = BlockLookup(torch.from_numpy(raw), type_name, 64, dtype)
    for chosen in ([39, 0, 7, 7], [5], []):
        index = torch.tensor(chosen, dtype=torch.int64)
        assert torch.equal(lookup.index_select(0, index), whole.index_select(0, index))
