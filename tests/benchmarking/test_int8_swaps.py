"""Answers of the pocket model when its caches are rounded to 8 bits on their way to host memory and back."""

import pytest

from alignedserve.evaluation.accuracy import make_items
from alignedserve.loadgen.prompts import load_tokenizer
from alignedserve.runtime.model.built_in import pocket_folder
from benchmarks.precision.int8_swaps import answer_all


@pytest.mark.slow
def test_answers_are_as_right_as_without() -> None:
    items = make_items(3, 1, load_tokenizer(pocket_folder()))
    undisturbed, rounded = answer_all(items, None), answer_all(items, "int8")
    assert answer_all(items, "exact") == undisturbed
    same = sum(one.text == other.text for one, other in zip(undisturbed, rounded, strict=True))
    assert same >= len(items) - 2
