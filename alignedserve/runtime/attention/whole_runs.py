"""Runs of tokens that read one another both ways, as those of a picture do in some models, and are computed together.

A scheduler knows nothing of them, and cuts prompts where it likes. So a slice that would end inside a run ends before
it, and what it leaves out is owed: the slice that reaches the run's end computes all of it. Nothing is computed twice.

Example: a run of positions 4 to 9, in slices of 6, 3 and 3 tokens: they compute 4, 0 and 8.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from alignedserve.core.picture import PictureRun

IntArray = npt.NDArray[np.int64]
Runs = Sequence[PictureRun]


def ends_of(runs: Mapping[int, Runs], rows: IntArray, before: IntArray, counts: IntArray) -> IntArray | None:
    """Return where what each token of these chunks reads ends [tokens]; None: none of them reads a later one.

    `runs`: of rows that have some; `before`: computed tokens in front of each chunk.
    """
    if not any(row in runs for row in rows.tolist()):
        return None
    ends = []
    for row, first, count in zip(rows.tolist(), before.tolist(), counts.tolist(), strict=True):
        own = np.arange(first, first + count) + 1
        for start, length in runs.get(row, ()):
            own[max(start - first, 0) : max(start + length - first, 0)] = start + length
        assert own[-1] == first + count, "a chunk that ends inside a run"
        ends.append(own)
    return np.concatenate(ends)
