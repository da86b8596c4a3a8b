"""Embeddings in place of prompt tokens: of a sequence, and of the token rows of one forward pass."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

IntArray = npt.NDArray[np.int64]


class SequenceEmbeddings(NamedTuple):
    """The embeddings of a sequence's positions."""

    positions: IntArray  # [embeddings] ascending
    values: Tensor  # [embeddings, hidden_size]

    def between(self, first: int, stop: int) -> tuple[IntArray, Tensor]:
        """Return the positions in this half-open range, and their embeddings."""
        begin, end = np.searchsorted(self.positions, (first, stop)).tolist()
        return self.positions[begin:end], self.values[begin:end]


class PictureRows(NamedTuple):
    """The token rows of a forward pass whose inputs are embeddings."""

    rows: Tensor  # [embeddings] int64
    values: Tensor  # [embeddings, hidden_size]

    def put_into(self, hidden: Tensor) -> Tensor:
        """Return the inputs [tokens, hidden_size] with the embeddings in their rows, in place."""
        return hidden.index_copy_(0, self.rows, self.values.to(hidden.dtype))


def picture_rows(found: list[tuple[int, int, int, SequenceEmbeddings]], device: torch.device) -> PictureRows | None:
    """Return the rows of slices (first position, tokens, first token row, embeddings); None: there are none."""
    rows, values = [], []
    for first, count, first_row, embeddings in found:
        positions, own = embeddings.between(first, first + count)
        if len(positions):
            rows.append(positions - first + first_row)
            values.append(own)
    if not rows:
        return None
    return PictureRows(torch.from_numpy(np.concatenate(rows)).to(device), torch.cat(values))
