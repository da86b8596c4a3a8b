"""Pictures in the engine: embeddings in place of prompt tokens, their places, and who makes them.

Some models rotate by time, row and column (M-RoPE; Qwen2-VL, section 2.1). A word has one place along all axes. A
picture of R rows and C columns has one place in time; its tokens count rows and columns from there, and the next word
stands max(R, C) places later.

Example: two words, a picture of 2 rows and 3 columns, a word: times 0 1 2 2 2 2 2 2 5, rows 0 1 2 2 2 3 3 3 5, columns
0 1 2 3 4 2 3 4 5."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from alignedserve.core.ids import RequestId
from alignedserve.core.picture import Picture
from alignedserve.core.request import Request

NUM_AXES = 3  # time, row, column
IntArray = npt.NDArray[np.int64]
Turn = Callable[[float], bool]  # takes steps for so many seconds; returns whether the picture is encoded
TakeTurn = Callable[[Turn, bool], "Future[bool]"]  # True: somebody waits for the picture


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


def picture_rows(slices: list[tuple[int, int, int, SequenceEmbeddings]], device: torch.device) -> PictureRows | None:
    """Return the rows of slices (first position, tokens, first token row, embeddings); None: there are none."""
    rows, values = [], []
    for first, count, first_row, embeddings in slices:
        positions, vectors = embeddings.between(first, first + count)
        if len(positions):
            rows.append(positions - first + first_row)
            values.append(vectors)
    if not rows:
        return None
    return PictureRows(torch.from_numpy(np.concatenate(rows)).to(device), torch.cat(values))


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
    """Return the places of a prompt with pictures; None: without pictures, words keep their positions."""
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


def places_of_rows(positions: IntArray, slices: Sequence[tuple[int, int, RopePlaces | None]]) -> Tensor:
    """Return the places [tokens, axes] of token rows at these positions.

    `slices`: the first token row, the number and the places of each slice whose sequence has its own."""
    places = np.repeat(positions[:, None], NUM_AXES, axis=1)
    for first, count, of_sequence in slices:
        assert of_sequence is not None, "a sequence without places"
        rows = slice(first, first + count)
        places[rows] = of_sequence.of(positions[rows])
    return torch.from_numpy(places)


class Pictures(Protocol):
    """The pictures of a worker's sequences. The plugin `vision` has them for a model that sees."""

    def prepare(self, message: Any) -> "Sequence[Future[Any]]":
        """Begin to encode the pictures that a message brings; return what its requests wait for."""

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        """Return the embeddings of a sequence that is added; None: it needs none from `num_cached` on, or fails."""

    def remove(self, request_id: RequestId) -> None:
        """Forget a sequence that is removed."""

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        """Return which of these sequences lack their pictures, and why."""

    def close(self) -> None:
        """End the decoding process and its thread."""


class FailedSequences:
    """Sequences that lack their pictures, and why."""

    def __init__(self) -> None:
        self._failures: dict[RequestId, str] = {}

    def remove(self, request_id: RequestId) -> None:
        self._failures.pop(request_id, None)

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        if not self._failures:
            return {}
        return {request_id: self._failures[request_id] for request_id in request_ids if request_id in self._failures}


class NoPictures(FailedSequences):
    """Of a model that does not see. A request with pictures fails: the gateway has let none pass."""

    def prepare(self, message: Any) -> "Sequence[Future[Any]]":
        return ()

    def add(self, request: Request, num_cached: int) -> SequenceEmbeddings | None:
        if request.pictures:
            self._failures[request.request_id] = "this worker's model does not see pictures"
        return None

    def close(self) -> None: ...
