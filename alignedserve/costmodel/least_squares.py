"""Least squares with no negative solution, in numpy alone."""

import numpy as np
import numpy.typing as npt

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
