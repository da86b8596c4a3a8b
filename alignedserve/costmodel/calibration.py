"""What a roofline leaves out of an iteration, as others have measured it; each set of figures has a name.

layers    = (flops ^ corner + weights ^ corner) ^ (1 / corner)          small matrices reach neither bound
chunk     = (queries + more_queries) * (keys + more_keys)               pairs charged for a chunk of a prompt
attention = beside * (chunks + decodes), where an iteration has both

A chunk's keys are all tokens before its end: the mask hides half of the last ones, and the kernel computes them all the
same. docs/costmodels.md names every source, what it measured, and how far these figures are from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from alignedserve.costmodel.work import IterationWork


@dataclass(frozen=True, slots=True)
class Calibration:
    """Figures beside the shares of the peaks. The defaults are those of a plain roofline."""

    corner: float | None = None  # exponent; None: the larger bound alone
    chunk_flops: float | None = None  # share of the peak that chunks' attention reaches; None: Efficiency's, of pairs
    more_queries: float = 0.0  # of every chunk: blocks of queries that are not filled, keys read again for each
    more_keys: float = 0.0  # of every chunk: what a block of queries takes before its first key
    beside: float = 1.0  # at least 1: attention of prompts and decodes in one iteration, by that of both apart

    def __post_init__(self) -> None:
        assert self.beside >= 1.0, "an iteration would get cheaper by more work"

    def bounded_s(self, flops_s: float, weights_s: float) -> float:
        """Return the seconds of a product by those of its operations and of its weights."""
        if self.corner is None:
            return flops_s if flops_s > weights_s else weights_s
        return float((flops_s**self.corner + weights_s**self.corner) ** (1.0 / self.corner))

    def charged_pairs(self, work: IterationWork) -> float:
        """Return the (query, key) pairs that the chunks of an iteration are charged for.

        Example: 100 tokens after 400, with 68 queries and 740 keys more: 168 * 1240 = 208 320, not 45 050.
        """
        if self.chunk_flops is None:
            return work.prompt_pairs
        unmasked = work.prompt_pairs + (work.prompt_squares - work.num_prompt_tokens) / 2
        begun = self.more_keys * (work.num_prompt_tokens + self.more_queries * work.num_chunks)
        return unmasked + self.more_queries * work.prompt_keys + begun


PLAIN = Calibration()
_MEASURED = Calibration(corner=1.7, chunk_flops=0.483, more_queries=68.0, more_keys=740.0, beside=1.08)
CALIBRATIONS: Mapping[str, Calibration] = {
    "calibrated": _MEASURED,
    "contended": replace(_MEASURED, beside=1.84),
}
"""By name of the cost model. `contended`: with the most that a kernel has been seen to lose by taking both kinds."""
