"""A cost model that is a weighted sum, and how its weights are fitted to measured iterations."""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from alignedserve.costmodel.model import CostModel
from alignedserve.costmodel.work import IterationWork

FloatArray = npt.NDArray[np.float64]

_TOLERANCE = 1e-10


def nonnegative_least_squares(rows: FloatArray, targets: FloatArray) -> FloatArray:
    """Return the x >= 0 that minimises |rows @ x - targets|, `rows` [samples, unknowns]. Columns of zeros get 0.

    Lawson and Hanson's active sets: unknowns join one at a time, the steepest first; what would turn negative leaves.
    """
    scales = np.linalg.norm(rows, axis=0)
    is_used = scales > 0.0
    scaled = rows[:, is_used] / scales[is_used]
    solution = np.zeros(rows.shape[1])
    solution[is_used] = _solve(scaled, targets) / scales[is_used]
    return solution


def _solve(rows: FloatArray, targets: FloatArray) -> FloatArray:
    num_unknowns = rows.shape[1]
    solution = np.zeros(num_unknowns)
    is_free = np.zeros(num_unknowns, np.bool_)
    for _ in range(10 * num_unknowns):
        slopes = rows.T @ (targets - rows @ solution)
        slopes[is_free] = -np.inf
        if is_free.all() or slopes.max() <= _TOLERANCE * np.linalg.norm(targets):
            break
        is_free[np.argmax(slopes)] = True
        solution = _step_inside(rows, targets, solution, is_free)
    return solution


def _step_inside(
    rows: FloatArray, targets: FloatArray, solution: FloatArray, is_free: npt.NDArray[np.bool_]
) -> FloatArray:
    while True:
        optimum = np.zeros_like(solution)
        optimum[is_free] = np.linalg.lstsq(rows[:, is_free], targets, rcond=None)[0]
        blocking = is_free & (optimum <= 0.0)
        if not blocking.any():
            return optimum
        steps = solution[blocking] / np.maximum(solution[blocking] - optimum[blocking], np.finfo(float).tiny)
        solution = solution + steps.min() * (optimum - solution)
        is_free &= solution > _TOLERANCE
        solution[~is_free] = 0.0


class Sample(NamedTuple):
    """An iteration that was measured."""

    work: IterationWork
    seconds: float


Weights = tuple[float, ...]  # seconds for each of `features_of`


class Form(NamedTuple):
    """The shape of a device's time: where it bends, and how long decodes wait for the longest context."""

    bend_tokens: float = 0.0  # 0: a straight line
    straggler: float = 0.0  # shares of the device that the longest context cannot use (straggler.py)


BENDS = (64, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024)  # forward sizes at which a device may reach its flops
_BENT_MISFIT = 0.8  # a bend is believed from this share of the straight line's misfit on
_LEAST_MISFIT = 1e-6  # of a line that is straight: 0.1 %, squared


@dataclass(frozen=True, slots=True)
class LinearCoefficients:
    """Seconds for each unit of work, none negative, and the forward size from which tokens cost more.

    A GPU computes its first tokens for nothing beside reading the weights, so that its time is bent: flat up to
    `bend_tokens`, then rising by `beyond_token_s`.
    """

    base_s: float = 0.0  # an iteration, whatever is in it
    prompt_token_s: float = 0.0
    prompt_pair_s: float = 0.0
    chunk_s: float = 0.0
    decode_s: float = 0.0
    context_token_s: float = 0.0  # a key that decodes read, of max(sum, straggler * longest context)
    hidden_token_s: float = 0.0
    sampled_s: float = 0.0
    constrained_s: float = 0.0  # a row that is sampled under a grammar: matching its last token, and its mask
    beyond_token_s: float = 0.0  # a token of prompt or decode beyond the first `bend_tokens` of an iteration
    bend_tokens: float = 0.0  # no weight, as the next: see Form
    straggler: float = 0.0

    @classmethod
    def of(cls, weights: Iterable[float], form: Form) -> "LinearCoefficients":
        return replace(cls(*weights), bend_tokens=form.bend_tokens, straggler=form.straggler)

    @property
    def form(self) -> Form:
        return Form(self.bend_tokens, self.straggler)

    @property
    def weights(self) -> Weights:
        """Return the seconds of each of `features_of`."""
        return astuple(self)[:-2]


def features_of(work: IterationWork, form: Form) -> tuple[float, ...]:
    return (
        1.0,
        work.num_prompt_tokens,
        work.prompt_pairs,
        work.num_chunks,
        work.num_decodes,
        max(work.decode_context_len, form.straggler * work.max_decode_context_len),
        work.hidden_context_len,
        work.num_sampled,
        work.num_constrained,
        max(work.num_tokens - form.bend_tokens, 0),
    )


class LinearIterationModel:
    """iteration_s = max(coefficients * features, copies). Grows with the work, as no coefficient is negative."""

    def __init__(self, coefficients: LinearCoefficients, swap_token_s: float = 0.0) -> None:
        """`swap_token_s`: seconds to copy the cache of one token between device and host."""
        self.coefficients = coefficients
        self.swap_token_s = swap_token_s
        self._weights, self._form = coefficients.weights, coefficients.form

    def iteration_s(self, work: IterationWork) -> float:
        return max(weighted(self._weights, self._form, work), self.swap_s(work.swapped_tokens))

    def swap_s(self, num_tokens: float) -> float:
        return self.swap_token_s * num_tokens


def weighted(weights: Weights, form: Form, work: IterationWork) -> float:
    bend_tokens, straggler = form
    base, token, pair, chunk, decode, context, hidden, sampled, constrained, beyond = weights
    num_keys, longest = work.decode_context_len, straggler * work.max_decode_context_len
    num_beyond = work.num_prompt_tokens + work.num_decodes - bend_tokens
    return (
        base
        + token * work.num_prompt_tokens
        + pair * work.prompt_pairs
        + chunk * work.num_chunks
        + decode * work.num_decodes
        + context * (num_keys if num_keys > longest else longest)
        + hidden * work.hidden_context_len
        + sampled * work.num_sampled
        + constrained * work.num_constrained
        + (beyond * num_beyond if num_beyond > 0 else 0.0)
    )


def fit_linear(
    samples: Sequence[Sample], swap_token_s: float = 0.0, *, bends: Sequence[float] = BENDS, straggler: float = 0.0
) -> LinearIterationModel:
    """Return the model whose squared relative errors on these samples are least, with no coefficient negative.

    The line bends at one of `bends` where the fit is clearly nearer. `straggler`: see Form. A kind of work without
    samples costs nothing.
    """
    assert samples, "nothing to fit"
    seconds = np.array([sample.seconds for sample in samples])
    assert (seconds > 0.0).all(), "an iteration takes time"
    straight = _fit_bent(samples, seconds, Form(0.0, straggler))
    largest = max(sample.work.num_tokens for sample in samples)
    places = [bend for bend in bends if bend < largest] if straight.misfit > _LEAST_MISFIT else []
    fits = (_fit_bent(samples, seconds, Form(bend, straggler)) for bend in places)
    bent = min(fits, key=lambda fit: fit.misfit, default=straight)
    best = bent if bent.misfit < _BENT_MISFIT * straight.misfit else straight
    return LinearIterationModel(best.coefficients, swap_token_s)


class _Fit(NamedTuple):
    coefficients: LinearCoefficients
    misfit: float


def feature_rows(samples: Sequence[Sample], form: Form) -> FloatArray:
    """Return the features of every sample [samples, weights]; without a bend, at 0, nothing is beyond it."""
    rows = np.array([features_of(sample.work, form) for sample in samples], np.float64)
    if not form.bend_tokens:
        rows[:, -1] = 0.0
    return rows


def _fit_bent(samples: Sequence[Sample], seconds: FloatArray, form: Form) -> _Fit:
    rows, targets = feature_rows(samples, form) / seconds[:, None], np.ones(len(samples))
    weights = nonnegative_least_squares(rows, targets)
    misfit = float(np.square(rows @ weights - targets).mean())
    return _Fit(LinearCoefficients.of(weights.tolist(), form), misfit)


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
