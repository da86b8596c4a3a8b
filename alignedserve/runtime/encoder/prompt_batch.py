"""The prompts of one pass, one after another without padding."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.core.ids import BlockId, RequestId

IntArray = npt.NDArray[np.int64]


class EncoderPrompt(NamedTuple):
    """One prompt with the blocks for the keys and values of the layer that is computed."""

    request_id: RequestId
    token_ids: IntArray
    second_text_at: int  # the first token of a pair's second text; 0: there is one text
    block_ids: list[BlockId]
    wants_embedding: bool

    @property
    def length(self) -> int:
        return len(self.token_ids)


class PromptBatch:
    """The arrays of one pass: of all tokens, prompt after prompt."""

    def __init__(self, prompts: Sequence[EncoderPrompt], block_size: int, slot_stride: int) -> None:
        """`slot_stride`: slots between one block's first and the next one's, as BlockStorage has it."""
        self.lengths: IntArray = np.array([prompt.length for prompt in prompts], np.int64)
        self.bounds: IntArray = np.concatenate(([0], np.cumsum(self.lengths)))
        self.token_ids: IntArray = np.concatenate([prompt.token_ids for prompt in prompts])
        self.positions: IntArray = np.concatenate([np.arange(length) for length in self.lengths.tolist()])
        self.token_types: IntArray = np.concatenate([_token_types(prompt) for prompt in prompts])
        widths = [-(-length // block_size) for length in self.lengths.tolist()]
        self.block_tables: IntArray = np.zeros((len(prompts), max(widths)), np.int64)
        for row, (prompt, width) in enumerate(zip(prompts, widths, strict=True)):
            self.block_tables[row, :width] = prompt.block_ids[:width]
        rows = np.repeat(np.arange(len(prompts)), self.lengths)
        block_table = self.block_tables[rows, self.positions // block_size]
        self.slots: IntArray = block_table * slot_stride + self.positions % block_size


def _token_types(prompt: EncoderPrompt) -> IntArray:
    types = np.zeros(prompt.length, np.int64)
    if prompt.second_text_at:
        types[prompt.second_text_at :] = 1
    return types
