"""Vector index of finished requests: output lengths of requests with similar prompts.

Up to 2 048 requests are compared one by one. Beyond that they are in cells around centroids (spherical k-means over a
sample), and only the cells nearest to the key are searched: an inverted file. It is rebuilt each time the index has
taken as many requests as it held at the last rebuild, so that the cost per request stays bounded.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.prediction.encoders import KEY_LEN, Vector

_FEWEST_TO_INDEX = 2048
_CELLS_PER_ROOT = 3.0  # cells by the square root of the number of requests
_NUM_PROBES = 6  # cells that are searched
_SAMPLES_PER_CELL = 16
_NUM_ROUNDS = 3  # of k-means
_CHUNK = 8192  # keys compared with the centroids at a time, to bound memory
_FEWEST_ROWS = 4  # that a cell grows by
_KEY_BYTES = 4 * KEY_LEN + 8  # a key and its slot
# At the most: a cell has up to twice the rows that it needs, and all keys are there once more while cells are made.
REQUEST_BYTES = 3 * _KEY_BYTES + 20

Matrix = npt.NDArray[np.float32]
Places = npt.NDArray[np.int64]


class Neighbours(NamedTuple):
    """Similar finished requests, most similar first."""

    similarities: Vector
    output_lens: Vector


class FinishedRequests:
    """At most `capacity` finished requests; the newest replaces the oldest. Deterministic for a seed."""

    def __init__(self, *, capacity: int, seed: int = 0) -> None:
        assert capacity > 0, "a store of nothing"
        self._capacity = capacity
        self._rng = np.random.default_rng(seed)
        self._cells = [_Cell()]
        self._centroids: Matrix = np.zeros((1, KEY_LEN), np.float32)
        self._output_lens = np.zeros(capacity, np.float32)  # by slot, as below
        self._cell_of: Places = np.zeros(capacity, np.int64)
        self._row_of: Places = np.zeros(capacity, np.int64)  # within its cell
        self._num_added = 0
        self._num_until_made = _FEWEST_TO_INDEX

    def __len__(self) -> int:
        return min(self._num_added, self._capacity)

    @property
    def num_bytes(self) -> int:
        """Bytes of all arrays."""
        own = (self._centroids, self._output_lens, self._cell_of, self._row_of)
        cells = (array for cell in self._cells for array in (cell.keys, cell.slots))
        return sum(array.nbytes for array in (*own, *cells))

    def add(self, key: Vector, output_len: float) -> None:
        """Add a finished request."""
        slot = self._num_added % self._capacity
        if self._num_added >= self._capacity:
            self._remove(slot)
        self._output_lens[slot] = output_len
        self._put(slot, key, int(np.argmax(self._centroids @ key)))
        self._num_added += 1
        self._num_until_made -= 1
        if self._num_until_made == 0:
            self._make_cells()

    def search(self, key: Vector, *, num_wanted: int, least_similarity: float) -> Neighbours:
        """Return at most `num_wanted` requests whose cosine with the key is at least `least_similarity`."""
        cells = [self._cells[number] for number in self._nearest_cells(key)]
        found = [cell.keys[: cell.count] @ key for cell in cells]
        similarities = np.concatenate(found) if len(found) > 1 else found[0]
        similar = (similarities >= least_similarity).nonzero()[0]
        if not len(similar):
            return Neighbours(similarities[:0], self._output_lens[:0])
        if len(similar) > num_wanted:
            similar = similar[np.argpartition(-similarities[similar], num_wanted - 1)[:num_wanted]]
        similar = similar[np.argsort(-similarities[similar], kind="stable")]
        slots = np.concatenate([cell.slots[: cell.count] for cell in cells])[similar]
        return Neighbours(similarities[similar], self._output_lens[slots])

    # --- cells

    def _nearest_cells(self, key: Vector) -> npt.NDArray[np.intp]:
        if len(self._cells) <= _NUM_PROBES:
            return np.arange(len(self._cells))
        return np.argpartition(-(self._centroids @ key), _NUM_PROBES - 1)[:_NUM_PROBES]

    def _put(self, slot: int, key: Vector, cell: int) -> None:
        self._cell_of[slot] = cell
        self._row_of[slot] = self._cells[cell].append(key, slot)

    def _remove(self, slot: int) -> None:
        row = int(self._row_of[slot])
        moved = self._cells[int(self._cell_of[slot])].remove(row)
        self._row_of[moved] = row

    def _make_cells(self) -> None:
        keys = np.concatenate([cell.keys[: cell.count] for cell in self._cells])
        slots = np.concatenate([cell.slots[: cell.count] for cell in self._cells])
        self._cells = []  # before the next copy of their keys
        self._num_until_made = len(keys)
        num_cells = int(_CELLS_PER_ROOT * len(keys) ** 0.5)
        sampled = self._rng.choice(len(keys), min(len(keys), num_cells * _SAMPLES_PER_CELL), replace=False)
        self._centroids = _centroids_of(keys[sampled], num_cells)
        nearest = _nearest(keys, self._centroids)
        by_cell = np.argsort(nearest, kind="stable")
        bounds = np.searchsorted(nearest[by_cell], np.arange(num_cells + 1))
        for cell in range(num_cells):
            members = by_cell[bounds[cell] : bounds[cell + 1]]
            self._cells.append(_Cell.of(keys[members], slots[members]))
            self._cell_of[slots[members]] = cell
            self._row_of[slots[members]] = np.arange(len(members))


class _Cell:
    """Keys contiguous in memory, and the slots of their requests. Rows are dense and in no order."""

    __slots__ = ("count", "keys", "slots")

    def __init__(self) -> None:
        self.keys: Matrix = np.zeros((0, KEY_LEN), np.float32)
        self.slots: Places = np.zeros(0, np.int64)
        self.count = 0

    @classmethod
    def of(cls, keys: Matrix, slots: Places) -> "_Cell":
        """Build a cell that takes over these arrays."""
        cell = cls()
        cell.keys, cell.slots, cell.count = keys, slots, len(keys)
        return cell

    def append(self, key: Vector, slot: int) -> int:
        """Add a key and return its row."""
        if self.count == len(self.keys):
            self._resize(self.count + max(_FEWEST_ROWS, self.count // 2))
        row = self.count
        self.keys[row], self.slots[row] = key, slot
        self.count += 1
        return row

    def remove(self, row: int) -> int:
        """Replace the row by the last one; return the slot of the moved row."""
        self.count -= 1
        self.keys[row], self.slots[row] = self.keys[self.count], self.slots[self.count]
        moved = int(self.slots[row])
        if len(self.keys) > 2 * (self.count + _FEWEST_ROWS):
            self._resize(self.count + max(_FEWEST_ROWS, self.count // 2))
        return moved

    def _resize(self, num_rows: int) -> None:
        keys, slots = np.zeros((num_rows, KEY_LEN), np.float32), np.zeros(num_rows, np.int64)
        keys[: self.count], slots[: self.count] = self.keys[: self.count], self.slots[: self.count]
        self.keys, self.slots = keys, slots


def _centroids_of(sample: Matrix, num_cells: int) -> Matrix:
    """Compute spherical k-means, starting from the first keys of the sample; a centroid without members stays."""
    centroids = sample[:num_cells].copy()
    for _ in range(_NUM_ROUNDS):
        nearest = _nearest(sample, centroids)
        order = np.argsort(nearest, kind="stable")
        present, begins = np.unique(nearest[order], return_index=True)
        sums = np.add.reduceat(sample[order], begins, axis=0)
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids[present] = sums / np.where(lengths > 0, lengths, 1.0)
    return centroids


def _nearest(keys: Matrix, centroids: Matrix) -> npt.NDArray[np.intp]:
    chunks = [np.argmax(keys[begin : begin + _CHUNK] @ centroids.T, axis=1) for begin in range(0, len(keys), _CHUNK)]
    return np.concatenate(chunks)
