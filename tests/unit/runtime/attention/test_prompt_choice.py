"""Which results of a library for prompts are taken for ours."""

import pytest
import torch

from alignedserve.runtime.attention.prompt_choice import _obstacle

OURS = [torch.zeros(2, 3), torch.ones(2, 3)]  # of layers without a window and with one


@pytest.mark.parametrize("layer", [0, 1])
def test_results_that_are_not_numbers_are_refused_in_every_kind_of_layer(layer: int) -> None:
    theirs = [one.clone() for one in OURS]
    theirs[layer][1, 2] = float("nan")
    assert _obstacle(lambda: theirs, OURS) == "its results differ from ours by nan"


def test_results_within_the_rounding_are_taken() -> None:
    assert _obstacle(lambda: [one + 1e-5 for one in OURS], OURS) is None
    assert _obstacle(lambda: [OURS[0], OURS[1] + 0.25], OURS) == "its results differ from ours by 0.25"
