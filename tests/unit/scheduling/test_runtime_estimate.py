"""Running time of a request: three coefficients, fitted to a cost model, and predictions that double."""

import numpy as np
import pytest

from alignedserve.scheduling.runtime_estimate import RequestRuntimeModel, fit_request_runtime, remaining_output_len
from tests.harnesses.scheduling import EasyCosts, table_of
from tests.support.marks import each


def test_a_linear_cost_model_gives_its_own_coefficients() -> None:
    model = fit_request_runtime(EasyCosts(base_s=0.0, token_s=0.002, context_s=0.00003))
    assert model == pytest.approx(RequestRuntimeModel(0.002, 0.00003, 0.002))


def test_the_line_of_prompts_goes_through_the_origin() -> None:
    """10 ms + 1 ms for each token: the slope takes on 10 ms times 3968 / 5586944, sums over the probed lengths."""
    model = fit_request_runtime(EasyCosts())
    assert model == pytest.approx(RequestRuntimeModel(0.001 + 0.010 * 3968 / 5586944, 0.00001, 0.011))


def test_what_is_left_of_a_request() -> None:
    rows = {
        "new": {"prompt_len": 50},
        "half prefilled": {"prompt_len": 50, "num_cached": 20},
        "decodes": {"prompt_len": 50, "num_generated": 10},
        "dropped": {"prompt_len": 50, "num_generated": 10, "num_cached": 0},
    }
    remaining_s = RequestRuntimeModel(0.001, 0.00001, 0.010).remaining_s(table_of(rows), np.array([8.0, 8.0, 8.0, 8.0]))
    assert remaining_s == pytest.approx([0.05 + 0.084, 0.03 + 0.084, 0.0848, 0.06 + 0.0848])


@each(
    ("num_generated", "left", "num_overruns"),
    [(0, 10, 0), (9, 1, 0), (10, 10, 1), (19, 1, 1), (20, 20, 2), (25, 15, 2), (40, 10, 3), (49, 1, 3)],
)
def test_an_overrun_doubles_the_prediction_up_to_the_limit(num_generated: int, left: int, num_overruns: int) -> None:
    table = table_of({"a": {"max_tokens": 50, "predicted_len": 10, "num_generated": num_generated}})
    assert [values.tolist() for values in remaining_output_len(table)] == [[left], [num_overruns]]


def test_no_request_overruns_without_a_prediction() -> None:
    table = table_of({"a": {"max_tokens": 50, "num_generated": 49}})
    assert [values.tolist() for values in remaining_output_len(table)] == [[1], [0]]
