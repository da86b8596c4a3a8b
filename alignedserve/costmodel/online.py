"""A linear cost model that a worker corrects after every iteration.

Weighted least squares on relative errors, older iterations forgotten little by little:

    minimise  sum(decay^age * w * (predicted / measured - 1)^2) + mu * sum((c / (s * prior) - 1)^2)   over c >= 0

The second sum holds what iterations so far say nothing about (a worker that has only decoded) at the prior, scaled by
how fast this machine is (s); it is not forgotten, so that a long run of equal iterations cannot let the rest drift.

The time of grammars is measured apart in every iteration, so it is no part of the fitted sum: rows under a grammar cost
what the last such rows did, as a moving mean.

Copies to and from the host run beside the computing. An iteration unusually longer than its computing has waited for
copies: its time is the copies' time, if copies are known to take half as long as the computing. With fewer copies, a
small error in the computing would become a large error of the copies, and a cost too high would stop all copying and
never be corrected. Every other iteration bounds the time of its copies from above.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from operator import mul

import numpy as np

from alignedserve.costmodel.linear import LinearCoefficients, Sample, features_of, fit_linear, weighted
from alignedserve.costmodel.straggler import is_alone, straggler_in
from alignedserve.costmodel.work import IterationWork
from kernels.cpu.iteration_costs import CostSums, Priors, is_native, learn

_DECAY = 0.995  # an iteration counts half after 140 more
_PRIOR_WEIGHT = 0.3  # mu: of a coefficient that is off by its whole size, in iterations
_SCALE_STEP = 0.01  # of the logarithm of s, once a hundred iterations have set it
_NUM_RESCALED = 10  # iterations after which the data, and no longer s, say what coefficients are
_ERROR_STEP = 0.05
_MAX_ERRORS = 2.0  # larger errors, in multiples of the usual one, count in proportion, not squared
_MIN_ERROR = 0.01
_COPY_STEP = 0.2  # towards what an iteration tells of its copies
_LEAST_COPIED = 0.5  # of the time of computing: that copies take which an iteration may have waited for
_MOST_DEARER = 2.0  # times as dear as known: the most that one iteration tells of copies
_LEAST_MEASURED = 0.2  # of what an iteration is predicted to take, once that is known
_LEAST_REST = 0.1  # of an iteration's time, which its grammars did not take
_GRAMMAR_STEP = 0.05  # towards what an iteration tells of its rows' grammars
_COPY_SHARE = 0.25  # of the time to compute a token: to copy it, as long as nothing is known of copies
_LEAST_SHARE = 0.1  # of the generic prior: what costs nothing there could never be learned to cost something

# Without a prior: how the parts of a transformer's pass relate to each other. The first iteration sets the scale.
GENERIC = LinearCoefficients(
    base_s=0.010,
    prompt_token_s=1e-4,
    prompt_pair_s=1e-8,
    chunk_s=1e-4,
    decode_s=1e-4,
    context_token_s=5e-7,
    hidden_token_s=1.5e-5,
    sampled_s=1e-5,
    constrained_s=1e-5,
)


class OnlineIterationModel:
    """Cost model that learns as it goes (see CostModel).

    Deterministic: the same observations in the same order give the same predictions.

    Never negative, and it grows with the work, as no coefficient is negative. What costs nothing in the prior stays at
    nothing.
    """

    def __init__(
        self, prior: LinearCoefficients = GENERIC, swap_token_s: float = 0.0, *, allow_kernels: bool = True
    ) -> None:
        """`prior`: coefficients to start from; at least one is above 0."""
        self._constrained_s = prior.constrained_s
        self._prior, self._form = replace(prior, constrained_s=0.0).weights, prior.form
        self._used = [index for index, value in enumerate(self._prior) if value > 0.0]
        assert self._used, "a prior by which everything is free"
        self._swap_token_s = swap_token_s
        self._weights: tuple[float, ...] = self._prior
        size = len(self._prior)
        # Of feature * feature / measured^2, and of feature / measured.
        self._sums = CostSums(np.zeros((size, size)), np.zeros(size))
        self._has_kernel = allow_kernels and is_native()
        self._log_scale = 0.0
        self._usual_error = 1.0
        self.num_observed = 0

    @property
    def coefficients(self) -> LinearCoefficients:
        fitted = LinearCoefficients.of(self._weights, self._form)
        return replace(fitted, constrained_s=self._constrained_s)

    def iteration_s(self, work: IterationWork) -> float:
        copies = self._swap_token_s * (work.swap_in_tokens + work.swap_out_tokens)
        compute = weighted(self._weights, self._form, work) + self._constrained_s * work.num_constrained
        return compute if compute > copies else copies

    def swap_s(self, num_tokens: float) -> float:
        return self._swap_token_s * num_tokens

    def observe(self, work: IterationWork, seconds: float, grammar_s: float | None = None) -> None:
        """Learn the duration of an iteration, above 0; a wait for copies teaches the cost of copies."""
        assert seconds > 0.0, "an iteration takes time"
        if work.num_constrained:
            seconds = self._without_grammars(work.num_constrained, seconds, grammar_s)
        predicted = weighted(self._weights, self._form, work)
        num_copied = work.swapped_tokens
        if num_copied:
            self._learn_copies(num_copied, seconds, predicted)
        if predicted <= self.swap_s(num_copied):
            return
        self.num_observed += 1
        if self.num_observed > _NUM_RESCALED:  # a duration of next to nothing would outweigh all others
            seconds = max(seconds, _LEAST_MEASURED * predicted)
        features = [feature / seconds for feature in features_of(work, self._form)]
        self._rescale(sum(map(mul, self._prior, features)))
        self._learn(features, self._weight_of(abs(predicted / seconds - 1.0)))

    def _without_grammars(self, num_rows: int, seconds: float, grammar_s: float | None) -> float:
        if grammar_s is not None:
            self._constrained_s += _GRAMMAR_STEP * (grammar_s / num_rows - self._constrained_s)
        spent_s = self._constrained_s * num_rows if grammar_s is None else grammar_s
        return max(seconds - spent_s, _LEAST_REST * seconds)

    def _learn_copies(self, num_tokens: float, seconds: float, computing_s: float) -> None:
        token_s = min(seconds / num_tokens, _MOST_DEARER * self._swap_token_s)
        is_late = seconds > (1.0 + _MAX_ERRORS * self._usual_error) * computing_s
        has_waited = is_late and self.swap_s(num_tokens) >= _LEAST_COPIED * computing_s
        if has_waited or token_s < self._swap_token_s:
            self._swap_token_s += _COPY_STEP * (token_s - self._swap_token_s)

    def _rescale(self, prior_ratio: float) -> None:
        step = max(1.0 / self.num_observed, _SCALE_STEP)
        change = -step * (math.log(prior_ratio) + self._log_scale)
        self._log_scale += change
        if self.num_observed <= _NUM_RESCALED:
            factor = math.exp(change)
            self._weights = tuple([factor * weight for weight in self._weights])

    def _weight_of(self, error: float) -> float:
        limit = _MAX_ERRORS * self._usual_error
        self._usual_error += _ERROR_STEP * (min(error, limit) - self._usual_error)
        self._usual_error = max(self._usual_error, _MIN_ERROR)
        return 1.0 if error <= limit else limit / error

    def _learn(self, features: list[float], weight: float) -> None:
        """Add an iteration's features to the sums, and move the coefficients towards the best fit.

        Each coefficient is set once to its best value while the others stay; later iterations go on from there.
        """
        scale = math.exp(self._log_scale)
        if self._has_kernel:
            priors = Priors(self._prior, scale, _PRIOR_WEIGHT)
            self._weights = learn(
                self._sums, features, weight=weight, decay=_DECAY, priors=priors, coefficients=self._weights
            )
            return
        self._accumulate(features, weight)
        self._descend(scale)

    def _accumulate(self, features: list[float], weight: float) -> None:
        row, (products, targets) = np.array(features), self._sums
        scaled = weight * row
        products *= _DECAY
        products += np.multiply.outer(scaled, row)
        targets *= _DECAY
        targets += scaled

    def _descend(self, scale: float) -> None:
        weights = list(self._weights)
        products, targets = (
            self._sums.products.tolist(),
            self._sums.targets.tolist(),
        )  # a number at a time is slow there
        for index in self._used:
            row = products[index]
            prior = scale * self._prior[index]
            pull = _PRIOR_WEIGHT / (prior * prior)
            together = 0.0
            for sum_of_products, other in zip(row, weights, strict=True):  # not by `sum`, which may correct its errors
                together += sum_of_products * other
            others = together - row[index] * weights[index]
            best = (targets[index] + pull * prior - others) / (row[index] + pull)
            weights[index] = best if best > 0.0 else 0.0
        self._weights = tuple(weights)


def learned_from(measured: Sequence[Sample]) -> OnlineIterationModel:
    """Return a model that begins with what was measured before. Its straggler stays as measured.

    The prior is the fit to the iterations; kinds of work without iterations have GENERIC's, scaled to this machine.
    Without any iteration it is GENERIC. Samples that compute nothing are copies to and from the host; they say what
    swapping costs.
    """
    straggler = straggler_in(measured).share
    # A kernel may divide a context that is alone, and none of many: such a time says when to believe a straggler alone.
    iterations = [sample for sample in measured if not (sample.work.is_empty or is_alone(sample.work))]
    copies = [sample for sample in measured if sample.work.is_empty]
    if not iterations:
        return OnlineIterationModel(swap_token_s=_swap_token_s(copies, GENERIC))
    fitted = fit_linear(iterations, straggler=straggler).coefficients
    generic, form = GENERIC.weights, fitted.form
    scale = math.exp(
        sum(math.log(seconds / weighted(generic, form, work)) for work, seconds in iterations) / len(iterations)
    )
    is_seen = [any(column) for column in zip(*(features_of(work, form) for work, _ in iterations), strict=True)]
    prior = (
        max(value, (_LEAST_SHARE if seen else 1.0) * scale * usual)
        for value, usual, seen in zip(fitted.weights, generic, is_seen, strict=True)
    )
    coefficients = LinearCoefficients.of(prior, form)
    model = OnlineIterationModel(coefficients, _swap_token_s(copies, coefficients))
    for work, seconds in iterations:
        model.observe(work, seconds)
    return model


def _swap_token_s(copies: Sequence[Sample], coefficients: LinearCoefficients) -> float:
    """Return the seconds to copy a token.

    The median copy decides, as single copies may be disturbed; without copies it is guessed from the computing.
    """
    if not copies:
        return _COPY_SHARE * (coefficients.prompt_token_s + coefficients.beyond_token_s)
    return statistics.median([seconds / work.swapped_tokens for work, seconds in copies])
