"""Places by which a model rotates that tells rows and columns of pictures apart (M-RoPE; Qwen2-VL, section 2.1).

A word is at one place along all axes. A picture of R rows and C columns is at one place in time; its tokens count rows
and columns from there, and what follows goes on max(R, C) places later.

Example: two words, a picture of 2 rows and 3 columns, a word: times 0 1 2 2 2 2 2 2 5, rows 0 1 2 2 2 3 3 3 5, columns
0 1 2 3 4 2 3 4 5.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.picture import Picture

NUM_AXES = 3  # time, row, column
IntArray = npt.NDArray[np.int64]


class RopePlaces(NamedTuple):
    """The places of one sequence."""

    of_prompt: IntArray  # [prompt_len, axes]
    shift: int  # from the position of a later token to its place along all axes

    def of(self, positions: IntArray) -> IntArray:
        """Return the places [positions, axes] at these positions of the context."""
        places = np.repeat(positions[:, None] + self.shift, NUM_AXES, axis=1)
        is_in_prompt = positions < len(self.of_prompt)
        places[is_in_prompt] = self.of_prompt[positions[is_in_prompt]]
        return places


def rope_places(prompt_len: int, pictures: Sequence[Picture]) -> RopePlaces | None:
    """Return the places of a prompt with pictures; None: there are none, so that words are where they stand."""
    if not pictures:
        return None
    places = np.repeat(np.arange(prompt_len, dtype=np.int64)[:, None], NUM_AXES, axis=1)
    shift = 0
    for picture in pictures:
        assert picture.grid is not None, "a picture without rows and columns"
        (first, count), (rows, columns) = picture.runs[0], picture.grid
        down, across = np.divmod(np.arange(count), columns)
        places[first : first + count] = first + shift + np.stack((np.zeros_like(down), down, across), axis=1)
        shift += max(rows, columns) - count
        places[first + count :] = np.arange(first + count, prompt_len)[:, None] + shift
    return RopePlaces(places, shift)


def places_of_rows(positions: IntArray, own: Sequence[tuple[int, int, RopePlaces | None]]) -> Tensor:
    """Return the places [tokens, axes] of token rows at these positions.

    `own`: the first token row, the number and the places of each slice whose sequence has its own.
    """
    places = np.repeat(positions[:, None], NUM_AXES, axis=1)
    for first, count, of_sequence in own:
        assert of_sequence is not None, "a sequence without places"
        rows = slice(first, first + count)
        places[rows] = of_sequence.of(positions[rows])
    return torch.from_numpy(places)
