"""Alignment of running batches, from a server's metrics page before and after a run. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_BUCKET = re.compile(r'^alignedserve_batch_spread_bucket\{[^}]*le="([^"]+)"[^}]*\} (\S+)', re.MULTILINE)
_LOWEST_SPREAD = 1.0  # longest over mean of a batch of equal lengths


@dataclass(frozen=True, slots=True)
class Alignment:
    """Iterations of all decode workers in a run."""

    num_iterations: int
    mean_batch_size: float
    spread_p50: float  # longest context of a running batch over its mean
    spread_p90: float
    switch_share: float  # iterations in which two batches mixed


def alignment_of(before: Mapping[str, float], after: Mapping[str, float], pages: tuple[str, str]) -> Alignment | None:
    """Compute the alignment between two readings (`pages`: the same, as text); None when the server does not say, or
    nothing was decoded."""
    num_iterations = _gained(before, after, "alignedserve_iterations_total")
    if not num_iterations:
        return None
    counts = _bucket_gains(*pages)
    return Alignment(
        num_iterations=int(num_iterations),
        mean_batch_size=_gained(before, after, "alignedserve_iteration_requests_total") / num_iterations,
        spread_p50=quantile(counts, 0.5),
        spread_p90=quantile(counts, 0.9),
        switch_share=_gained(before, after, "alignedserve_switch_iterations_total") / num_iterations,
    )


def quantile(cumulative: Mapping[float, float], share: float) -> float:
    """Return the value below which this share lies, of a histogram as {upper edge: count up to it}; linear within a
    bucket.

    Example: {1.0: 0, 2.0: 10, 4.0: 20} has its 0.75 quantile at 3.0.
    """
    edges = sorted(cumulative)
    wanted = share * cumulative[edges[-1]]
    lower, below = _LOWEST_SPREAD, 0.0
    for edge in edges:
        count = cumulative[edge]
        if count >= wanted and count > below:
            if edge == float("inf"):
                return lower
            return lower + (edge - lower) * (wanted - below) / (count - below)
        lower, below = edge, count
    return lower


def _bucket_gains(before: str, after: str) -> dict[float, float]:
    earlier = dict(_BUCKET.findall(before))
    return {float(edge): float(count) - float(earlier.get(edge, 0.0)) for edge, count in _BUCKET.findall(after)}


def _gained(before: Mapping[str, float], after: Mapping[str, float], name: str) -> float:
    return after.get(name, 0.0) - before.get(name, 0.0)
