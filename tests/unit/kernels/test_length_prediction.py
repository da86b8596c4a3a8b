"""Native n-grams and steps of the length regression against their plain forms."""

import random

import numpy as np
import pytest

from kernels.cpu import length_prediction
from kernels.cpu.length_prediction import AdamState, can_descend, descend, hash_ngrams
from router.prediction.encoders import KEY_LEN, HashedNgrams
from router.prediction.predictor import LengthMlp
from tests.support.marks import each

pytestmark = pytest.mark.skipif(not length_prediction.is_native(), reason="the native kernels are not built")

NUM_FEATURES = 1027


@each("num_ids", [1, 2, 5, 511, 512, 513, 3000])
@each("vocab_size", [3, 1000, 150_000])
def test_codes_are_those_of_the_plain_form(num_ids: int, vocab_size: int) -> None:
    drawn = random.Random(num_ids * vocab_size)
    ids = tuple(drawn.randrange(vocab_size) for _ in range(num_ids))
    native, plain = HashedNgrams().encode(ids), HashedNgrams(allow_native=False).encode(ids)
    np.testing.assert_allclose(native.features, plain.features, rtol=1e-6)
    np.testing.assert_allclose(native.key, plain.key, rtol=1e-5, atol=1e-7)


def test_what_is_no_token_id_is_refused_by_both() -> None:
    for allow_native in (True, False):
        with pytest.raises(OverflowError):
            HashedNgrams(allow_native=allow_native).encode((5, -1))
    with pytest.raises(TypeError):
        hash_ngrams(("a",), 1024, KEY_LEN)  # type: ignore[arg-type]


def test_sizes_that_do_not_fold_are_refused() -> None:
    for num_features, key_len in ((1000, 10), (1024, 100), (1024, 0), (0, 1)):
        with pytest.raises(ValueError, match="power of two"):
            hash_ngrams((5, 6), num_features, key_len)


def test_steps_are_those_of_the_plain_form() -> None:
    drawn = np.random.default_rng(0)
    native, plain = (LengthMlp(num_features=NUM_FEATURES, allow_native=allowed) for allowed in (True, False))
    features = drawn.standard_normal((20, NUM_FEATURES)).astype(np.float32)
    for row, output_len in zip(features, drawn.integers(1, 500, 20), strict=True):
        native.learn(row, float(output_len))
        plain.learn(row, float(output_len))
    for row in features:  # Adam divides by the root of a mean square, which is as good as its rounding at first
        assert native.predict(row) == pytest.approx(plain.predict(row), rel=1e-2)


def test_other_sizes_take_the_plain_form() -> None:
    assert can_descend(32, 7)
    assert not can_descend(16, 7)
    assert not can_descend(32, 17)
    LengthMlp(num_features=3, num_hidden=4).learn(np.ones(3, np.float32), 5.0)


def state_of(num_inputs: int) -> AdamState:
    return AdamState(*(np.zeros(num_inputs * 32 + 65, np.float32) for _ in range(3)))


@pytest.mark.parametrize("rows", [[-1], [8], [], list(range(17))])
def test_rows_that_are_not_there_are_refused(rows: list[int]) -> None:
    inputs, targets = np.zeros((8, 3), np.float32), np.zeros(8, np.float32)
    with pytest.raises(ValueError, match=r"row"):
        descend(state_of(3), inputs, targets, np.array(rows, np.int64), (1e-3, 0.1, 0.001))


def test_parameters_of_another_size_are_refused() -> None:
    inputs, targets = np.zeros((8, 3), np.float32), np.zeros(8, np.float32)
    with pytest.raises(ValueError, match="another network"):
        descend(state_of(4), inputs, targets, np.array([0], np.int64), (1e-3, 0.1, 0.001))
