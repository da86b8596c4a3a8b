"""The regression for prompts without a similar finished request: a small MLP, trained as requests finish."""

import numpy as np
import numpy.typing as npt

from kernels.cpu.length_prediction import EPSILON, AdamState, can_descend, descend
from router.prediction.encoders import Vector

_LEARNING_RATE = 1e-3
# Earlier requests learnt with each new one: so few that BLAS computes the products on the calling thread. Its own
# threads wait for each other, for tens of milliseconds on a busy machine.
_NUM_REPEATED = 6
_BETA_1, _BETA_2 = 0.9, 0.999  # Adam's, as in its paper
_MAX_LOG_LEN = 20.0  # predictions are capped at e to this power

Array = npt.NDArray[np.float32]


class LengthMlp:
    """Features -> ReLU layer -> logarithm of the output length, fitted to squared error by Adam.

    The error of the logarithm is minimised, so that being wrong by a factor counts alike for short and long answers.
    Each finished request is learnt together with a few earlier ones, drawn at random from the last
    `memory`. Deterministic for a seed.
    """

    def __init__(
        self,
        *,
        num_features: int,
        num_hidden: int = 32,
        memory: int = 8192,
        max_bytes: int = 1 << 40,
        seed: int = 0,
        allow_native: bool = True,
    ) -> None:
        """`max_bytes`: of those requests. `allow_native`: by a native kernel where it is built, five times as fast,
        the same but for rounding."""
        self._rng = np.random.default_rng(seed)
        scale = (2.0 / num_features) ** 0.5
        parts = (
            (self._rng.standard_normal((num_features, num_hidden)) * scale).astype(np.float32).ravel(),
            np.zeros(2 * num_hidden + 1, np.float32),
        )
        parameters = np.concatenate(parts)
        memory = max(1, min(memory, max_bytes // (4 * num_features + 4)))
        self._adam = AdamState(parameters, np.zeros_like(parameters), np.zeros_like(parameters))
        self._weights, self._moments, self._squares = (_views(part, num_features, num_hidden) for part in self._adam)
        self._inputs: Array = np.zeros((memory, num_features), np.float32)
        self._targets: Array = np.zeros(memory, np.float32)
        self._is_native = allow_native and can_descend(num_hidden, _NUM_REPEATED + 1)
        self.num_learnt = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of the earlier requests, as they will be when all are there."""
        return self._inputs.nbytes + self._targets.nbytes

    def predict(self, features: Vector) -> float:
        hidden_weight, hidden_bias, out_weight, out_bias = self._weights
        hidden = np.maximum(features @ hidden_weight + hidden_bias, 0.0)
        return float(np.exp(np.clip(hidden @ out_weight + out_bias[0], 0.0, _MAX_LOG_LEN)))

    def learn(self, features: Vector, output_len: float) -> None:
        """Take one step of Adam: a request with these features generated `output_len` tokens."""
        target = np.log(max(output_len, 1.0))
        if not self.num_learnt:
            self._weights[3][0] = target  # so that it has to learn only the difference
        row = self.num_learnt % len(self._targets)
        self._inputs[row], self._targets[row] = features, target
        self.num_learnt += 1
        batch = np.empty(_NUM_REPEATED + 1, np.int64)
        batch[0] = row
        batch[1:] = self._rng.integers(0, min(self.num_learnt, len(self._targets)), _NUM_REPEATED)
        rate = _LEARNING_RATE * (1 - _BETA_2**self.num_learnt) ** 0.5 / (1 - _BETA_1**self.num_learnt)
        if self._is_native:
            descend(self._adam, self._inputs, self._targets, batch, (rate, 1 - _BETA_1, 1 - _BETA_2))
        else:
            self._descend(self._inputs[batch], self._targets[batch], rate)

    def _descend(self, inputs: Array, targets: Array, rate: float) -> None:
        hidden_weight, hidden_bias, out_weight, out_bias = self._weights
        hidden = np.maximum(inputs @ hidden_weight + hidden_bias, 0.0)
        errors = (hidden @ out_weight + out_bias - targets) * np.float32(2.0 / len(targets))
        back = np.outer(errors, out_weight) * (hidden > 0)
        gradients = (inputs.T @ back, back.sum(axis=0), hidden.T @ errors, errors.sum(keepdims=True))
        for weight, moment, square, gradient in zip(
            self._weights, self._moments, self._squares, gradients, strict=True
        ):
            moment += (1 - _BETA_1) * (gradient - moment)
            square += (1 - _BETA_2) * (gradient * gradient - square)
            weight -= np.float32(rate) * moment / (np.sqrt(square) + EPSILON)


def _views(part: Array, num_features: int, num_hidden: int) -> tuple[Array, Array, Array, Array]:
    end = num_features * num_hidden
    return (
        part[:end].reshape(num_features, num_hidden),
        part[end : end + num_hidden],
        part[end + num_hidden : end + 2 * num_hidden],
        part[end + 2 * num_hidden :],
    )
