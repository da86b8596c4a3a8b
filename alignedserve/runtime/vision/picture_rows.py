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
    values: Tensor  # [embeddings, width]: the inputs, and what is added behind the first layers, one after another

    def between(self, first: int, stop: int) -> tuple[IntArray, Tensor]:
        """Return the positions in this half-open range, and their embeddings."""
        begin, end = np.searchsorted(self.positions, (first, stop)).tolist()
        return self.positions[begin:end], self.values[begin:end]


class PictureRows(NamedTuple):
    """The token rows of a forward pass whose inputs are embeddings."""

    rows: Tensor  # [embeddings] int64
    values: Tensor  # [embeddings, width], as of SequenceEmbeddings

    def put_into(self, hidden: Tensor) -> Tensor:
        """Return the inputs [tokens, hidden_size] with the embeddings in their rows, in place."""
        return hidden.index_copy_(0, self.rows, self.values[:, : hidden.shape[1]].to(hidden.dtype))

    def add_behind(self, layer: int, hidden: Tensor) -> None:
        """Add to the residual stream [tokens, .., hidden_size] behind a layer what it gets there, in place."""
        first = (layer + 1) * hidden.shape[-1]
        if first < self.values.shape[1]:
            hidden.index_add_(0, self.rows, self.values[:, first : first + hidden.shape[-1]].to(hidden.dtype))

    def are_inputs_alone(self, hidden_size: int) -> bool:
        """Return whether nothing is added behind layers."""
        return self.values.shape[1] == hidden_size


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
