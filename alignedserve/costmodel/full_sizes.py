"""Numbers of tokens at which an iteration's products fill a GPU, found by measuring.

A product is cut into tiles of some rows, which the multiprocessors take in waves: the time of an iteration over its
tokens is a staircase, and one token more than a stair holds may cost a third more (Sarathi-Serve, section 4.3, calls it
tile quantization). Which numbers are good depends on the GPU, the model and the library.
"""

import bisect
from collections.abc import Iterable
from typing import NamedTuple

from alignedserve.costmodel.linear import Sample

TRIED_SIZES = range(512, 2112, 64)  # tokens of the prompts that a GPU's calibration measures for this
_LEAST_SIZES = 8  # measured, for a staircase to show
_LEAST_SHARE = 0.75  # of the tokens that time allows: fewer make no better iteration, but more of them
_LEAST_GAIN = 1.03  # in tokens per second: less is noise
_ALIKE = 0.99  # of the best rate: of sizes with as much, the largest


class FullSizes(NamedTuple):
    """Iterations of one prompt each, without any cached token."""

    sizes: tuple[int, ...]  # tokens, rising
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, measured: Iterable[Sample]) -> "FullSizes | None":
        """Find them among a calibration's samples; None: too few."""
        least: dict[int, float] = {}
        for sample in measured:
            work, size = sample.work, sample.work.num_prompt_tokens
            if size and work.num_chunks == 1 and work.prompt_keys == size and not work.num_decodes:
                least[size] = min(least.get(size, sample.seconds), sample.seconds)
        if len(least) < _LEAST_SIZES:
            return None
        sizes = tuple(sorted(least))
        return cls(sizes, tuple(least[size] for size in sizes))

    def best(self, most: int) -> int:
        """Return how many tokens, up to `most` and not far below, an iteration computes best; `most` where it matters
        little, or is not known."""
        above = bisect.bisect_left(self.sizes, most)  # whose time it is taken to need: a stair begins behind its edge
        if not 0 < above < len(self.sizes):
            return most
        rate = most / self.seconds[above]
        first = bisect.bisect_left(self.sizes, _LEAST_SHARE * most)
        rates = {self.sizes[index]: self.sizes[index] / self.seconds[index] for index in range(first, above)}
        best_rate = max(rates.values(), default=0.0)
        if best_rate < _LEAST_GAIN * rate:
            return most
        return max(size for size, own in rates.items() if own >= _ALIKE * best_rate)
