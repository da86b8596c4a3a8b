"""The length predictor over random histories: bounds, capacity, determinism, and the search against a sort of all."""

import random

import numpy as np
import numpy.typing as npt
import pytest

from alignedserve.core.ids import RequestId
from alignedserve.core.request import Request, RequestClass, SamplingParams
from router.prediction.encoders import KEY_LEN, HashedNgrams, Vector
from router.prediction.predictor import FinishedRequests, LengthPrediction, LengthPredictor, PredictorConfig

Matrix = npt.NDArray[np.float32]


def some_request(rng: random.Random, number: int) -> Request:
    topic = rng.randrange(5) * 100
    ids = tuple(topic + rng.randrange(20) for _ in range(rng.choice((1, 2, 10, 30, 700))))
    request_class = rng.choice(tuple(RequestClass))
    sampling = SamplingParams(max_tokens=rng.choice((0, 1, 5, 64, 4096)))
    return Request(RequestId(str(number)), ids, sampling, "", 0.0, request_class=request_class)


def predictions_of(seed: int, num_events: int = 300) -> list[LengthPrediction]:
    rng = random.Random(seed)
    predictor = LengthPredictor(HashedNgrams(), PredictorConfig(capacity=100))
    made = []
    for number in range(num_events):
        one = some_request(rng, number)
        code = predictor.encode(one)
        made.append(predictor.predict(one, code))
        limit = one.sampling.max_tokens
        assert min(1.0, limit) <= made[-1].output_len <= limit
        if rng.random() < 0.8:
            predictor.learn(one, code, rng.randint(0, limit))
    return made


@pytest.mark.parametrize("seed", range(3))
def test_predictions_lie_within_bounds_and_the_same_history_gives_the_same(seed: int) -> None:
    first = predictions_of(seed)
    assert len({prediction.source for prediction in first}) == 3
    assert predictions_of(seed) == first


def clustered(rng: np.random.Generator, num_keys: int) -> Matrix:
    """Draw keys of several kinds of prompts: around 200 directions, near and far."""
    centres = np.random.default_rng(99).standard_normal((200, KEY_LEN))
    spread = rng.choice([0.2, 0.5, 1.0], (num_keys, 1))
    drawn = centres[rng.integers(0, 200, num_keys)] + spread * rng.standard_normal((num_keys, KEY_LEN))
    keys = drawn.astype(np.float32)
    unit: Matrix = keys / np.linalg.norm(keys, axis=1, keepdims=True)
    return unit


def best(keys: Matrix, key: Vector, least: float) -> Vector:
    similarities = np.sort(keys @ key)[::-1][:8]
    return similarities[similarities >= least]


@pytest.mark.parametrize("capacity", [50, 1500])
def test_the_store_finds_the_most_similar_of_those_it_keeps(capacity: int) -> None:
    rng = np.random.default_rng(capacity)
    store, keys = FinishedRequests(capacity=capacity), clustered(rng, 2000)
    for number, key in enumerate(keys):
        store.add(key, number)
        assert len(store) == min(number + 1, capacity)
        if number % 40 == 0:
            query = clustered(rng, 1)[0]
            kept = keys[max(0, number + 1 - capacity) : number + 1]
            found = store.search(query, num_wanted=8, least_similarity=0.3)
            assert found.similarities == pytest.approx(best(kept, query, 0.3), abs=1e-5)
            assert all(number + 1 - capacity <= output_len <= number for output_len in found.output_lens)
