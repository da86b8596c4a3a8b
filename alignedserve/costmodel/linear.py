"""A cost model that is a weighted sum, and how its weights are fitted to measured iterations."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.costmodel.least_squares import nonnegative_least_squares
from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork


class Sample(NamedTuple):
    """An iteration that was measured."""

    work: IterationWork
    seconds: float


@dataclass(frozen=True, slots=True)
class LinearCoefficients:
    """Seconds for each unit of work, none negative."""

    base_s: float = 0.0  # an iteration, whatever is in it
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    chunk_s: float = 0.0
    decode_s: float = 0.0
    context_token_s: float = 0.0  # a key that a decode reads: attention whose time follows the sum of the contexts
    padded_token_s: float = 0.0  # num_decodes * the longest context: attention whose straggler is the longest
    hidden_token_s: float = 0.0
    sampled_s: float = 0.0

    @property
    def straggler_share(self) -> float | None:
        """Return the share of decode attention's time that follows the longest context, not the sum.

        None without any.
        """
        both = self.context_token_s + self.padded_token_s
        return self.padded_token_s / both if both else None


def features_of(work: IterationWork) -> tuple[float, ...]:
    """Return the factors of LinearCoefficients, in their order."""
    return (
        1.0,
        work.num_prompt_tokens,
        work.prompt_pairs,
        work.num_chunks,
        work.num_decodes,
        work.decode_context_len,
        work.num_decodes * work.max_decode_context_len,
        work.hidden_context_len,
        work.num_sampled,
    )


class LinearIterationModel:
    """iteration_s = max(coefficients * features, copies). Grows with the work, as no coefficient is negative."""

    def __init__(self, coefficients: LinearCoefficients, swap_token_s: float = 0.0) -> None:
        """`swap_token_s`: seconds to copy the cache of one token between device and host."""
        self.coefficients = coefficients
        self.swap_token_s = swap_token_s
        self._weights: tuple[float, ...] = astuple(coefficients)

    def iteration_s(self, work: IterationWork) -> float:
        """See CostModel."""
        return max(weighted(self._weights, work), self.swap_s(work.swap_in_tokens + work.swap_out_tokens))

    def swap_s(self, num_tokens: float) -> float:
        """See CostModel."""
        return self.swap_token_s * num_tokens


def weighted(weights: tuple[float, ...], work: IterationWork) -> float:
    """Return the sum of weights times features, written out: it is asked for hundreds of times while a policy packs."""
    base, token, pair, chunk, decode, context, padded, hidden, sampled = weights
    return (
        base
        + token * work.num_prompt_tokens
        + pair * work.prompt_pairs
        + chunk * work.num_chunks
        + decode * work.num_decodes
        + context * work.decode_context_len
        + padded * work.num_decodes * work.max_decode_context_len
        + hidden * work.hidden_context_len
        + sampled * work.num_sampled
    )


def fit_linear(samples: Sequence[Sample], swap_token_s: float = 0.0) -> LinearIterationModel:
    """Return the model whose squared relative errors on these samples are least, with no coefficient negative.

    A kind of work that no sample has costs nothing. Samples without any time, or none at all, are a broken call.
    """
    assert samples, "nothing to fit"
    seconds = np.array([sample.seconds for sample in samples])
    assert (seconds > 0.0).all(), "an iteration takes time"
    rows = np.array([features_of(sample.work) for sample in samples], np.float64) / seconds[:, None]
    weights = nonnegative_least_squares(rows, np.ones(len(samples)))
    return LinearIterationModel(LinearCoefficients(*weights.tolist()), swap_token_s)


class FitError(NamedTuple):
    """Distance of predictions from measured times: |predicted / measured - 1|."""

    num_samples: int
    median: float
    p90: float
    bias: float  # the median of predicted / measured - 1, with its sign


def fit_error(costs: CostModel, samples: Iterable[Sample]) -> FitError:
    """Compare a cost model with measured iterations; at least one."""
    errors: npt.NDArray[np.float64] = np.array([costs.iteration_s(work) / seconds - 1.0 for work, seconds in samples])
    sizes = np.abs(errors)
    return FitError(len(errors), float(np.median(sizes)), float(np.quantile(sizes, 0.9)), float(np.median(errors)))
