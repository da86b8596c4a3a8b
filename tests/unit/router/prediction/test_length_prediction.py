"""The length predictor, piece by piece, and forecasts of the queue.

The example of docs/policies/length_prediction.md is among them.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from alignedserve.core.request import Request, RequestClass
from router.prediction.encoders import (
    KEY_LEN,
    WINDOW,
    HashedNgrams,
    PromptCode,
    TokenEmbeddings,
    Vector,
    normalised,
    window_of,
)
from router.prediction.predictor import (
    FinishedRequests,
    LengthMlp,
    LengthPrediction,
    LengthPredictor,
    LengthPrior,
    PredictionSource,
    PredictorConfig,
)
from router.request_registry import DrainForecast, OutputLengthForecast, doubled_past
from tests.support.marks import each
from tests.support.models.tiny_gguf import HIDDEN, write_tiny_gguf
from tests.support.samples import request


class Planar:
    """An encoder whose key is the direction of the first two token ids, so that cosines can be worked out by hand."""

    num_features = 2
    least_similarity = 0.5

    def encode(self, prompt_token_ids: Sequence[int]) -> PromptCode:
        direction = normalised(np.array(prompt_token_ids[:2], dtype=np.float32))
        return PromptCode(direction, np.concatenate((direction, np.zeros(KEY_LEN - 2, np.float32))))


def towards(x: int, y: int, name: str = "r1", max_tokens: int = 1000, **changes: object) -> Request:
    made = request(name, prompt_len=2, max_tokens=max_tokens, **changes)
    object.__setattr__(made, "prompt_token_ids", (x, y))
    return made


def taught(*finished: tuple[int, int, int], **config: int) -> LengthPredictor:
    predictor = LengthPredictor(Planar(), PredictorConfig(**config))
    for x, y, output_len in finished:
        learn(predictor, towards(x, y), output_len)
    return predictor


def learn(predictor: LengthPredictor, of: Request, output_len: int) -> None:
    predictor.learn(of, predictor.encode(of), output_len)


def predict(predictor: LengthPredictor, of: Request) -> LengthPrediction:
    return predictor.predict(of, predictor.encode(of))


# --- the page's example


EXAMPLE = ((1, 0, 100), (4, 3, 200), (3, 4, 300), (0, 1, 900))


def test_the_worked_example_of_the_page() -> None:
    prediction = predict(taught(*EXAMPLE), towards(1, 0))
    assert prediction.source is PredictionSource.RETRIEVAL
    # Cosines 1, 0.8, 0.6 and 0: the last is below 0.5. (100 + 0.8 * 200 + 0.6 * 300) / 2.4
    assert prediction.output_len == pytest.approx(440 / 2.4, abs=1e-3)


def test_no_more_neighbours_count_than_k() -> None:
    prediction = predict(taught(*EXAMPLE, num_neighbours=2), towards(1, 0))
    assert prediction.output_len == pytest.approx((100 + 0.8 * 200) / 1.8, abs=1e-3)


def test_a_prediction_is_never_above_the_limit() -> None:
    assert predict(taught(*EXAMPLE), towards(1, 0, max_tokens=150)).output_len == 150.0
    assert predict(taught(*EXAMPLE), towards(1, 0, max_tokens=0)).output_len == 0.0


def test_an_overrun_is_doubled_until_it_is_none_but_not_past_the_limit() -> None:
    assert doubled_past(183.0, 182, 1000) == 183.0
    assert doubled_past(183.0, 183, 1000) == 366.0
    assert doubled_past(183.0, 800, 1000) == 1000.0
    assert doubled_past(183.0, 400, 1000) == 732.0


# --- where nothing is similar


def test_with_little_finished_the_mean_is_expected() -> None:
    assert predict(taught((1, 0, 100)), towards(0, 1)) == (100.0, PredictionSource.PRIOR)


def test_before_anything_has_finished_the_limit_is_expected() -> None:
    assert predict(taught(), towards(0, 1)) == (1000.0, PredictionSource.PRIOR)


def test_with_enough_finished_the_network_is_asked() -> None:
    prediction = predict(taught(*[(1, 0, 100)] * 64), towards(0, 1))
    assert prediction.source is PredictionSource.MLP
    assert 50.0 < prediction.output_len < 200.0


def test_every_finished_request_counts_at_once() -> None:
    predictor = taught((1, 0, 100))
    learn(predictor, towards(0, 1), 700)
    assert predict(predictor, towards(0, 1)).output_len == pytest.approx(700.0)


def test_the_prior_knows_classes_and_doublings_of_the_prompt_length() -> None:
    prior = LengthPrior()
    chat, document = request(max_tokens=500), request(max_tokens=500, request_class=RequestClass.BEST_EFFORT)
    prior.observe(chat, 10)
    prior.observe(request(prompt_len=100, max_tokens=500), 74)
    assert prior.predict(chat) == 10.0
    assert prior.predict(request(prompt_len=127, max_tokens=500)) == 74.0
    assert prior.predict(request(prompt_len=300, max_tokens=500)) == 11.0  # the mean of its class
    assert prior.predict(document) == 500.0


# --- encoders


def test_codes_have_length_one_and_do_not_depend_on_history() -> None:
    code = HashedNgrams().encode((5, 6, 7))
    assert np.linalg.norm(code.features) == pytest.approx(1.0)
    assert np.linalg.norm(code.key) == pytest.approx(1.0)
    assert (code.features.shape, code.key.shape) == ((1024,), (KEY_LEN,))
    assert np.array_equal(code.key, HashedNgrams().encode([5, 6, 7]).key)


def test_similar_prompts_have_similar_keys_and_order_counts() -> None:
    encoder, words = HashedNgrams(), list(range(100, 130))
    one, same_end, reversed_words = (encoder.encode(ids).key for ids in (words, [99, *words[1:]], words[::-1]))
    other = encoder.encode(list(range(500, 530))).key
    assert one @ same_end > 0.9
    assert 0.2 < one @ reversed_words < 0.9
    assert abs(one @ other) < 0.3


def test_a_prompt_of_one_token_has_a_code() -> None:
    assert np.linalg.norm(HashedNgrams().encode((5,)).key) == pytest.approx(1.0)


def test_of_a_long_prompt_both_ends_count() -> None:
    assert list(window_of(range(2000))) == [*range(WINDOW // 2), *range(2000 - WINDOW // 2, 2000)]
    assert window_of(range(WINDOW)) == range(WINDOW)


def test_token_embeddings_are_pooled_less_their_mean() -> None:
    rows = np.array([[3.0, 1.0], [1.0, 1.0], [2.0, 4.0]], dtype=np.float32)  # mean (2, 2)
    encoder = TokenEmbeddings(rows)
    assert encoder.encode((0, 1)).features == pytest.approx([0.0, -1.0])
    assert encoder.encode((2, 99)).features == pytest.approx([0.0, 1.0])
    assert encoder.encode((0, 1)).key.shape == (KEY_LEN,)


# --- store and network


def key(*entries: float) -> Vector:
    return normalised(np.array([*entries, *[0.0] * (KEY_LEN - len(entries))]))


def test_the_most_similar_come_first() -> None:
    store = FinishedRequests(capacity=10)
    for entries, output_len in (((3, 4), 30), ((1, 0), 10), ((4, 3), 20)):
        store.add(key(*entries), output_len)
    found = store.search(key(1, 0), num_wanted=2, least_similarity=0.0)
    assert found.output_lens.tolist() == [10.0, 20.0]
    assert found.similarities == pytest.approx([1.0, 0.8])


def test_the_newest_replaces_the_oldest() -> None:
    store = FinishedRequests(capacity=2)
    for entries, output_len in (((1, 0), 10), ((4, 3), 20), ((0, 1), 30)):
        store.add(key(*entries), output_len)
    assert len(store) == 2
    assert store.search(key(1, 0), num_wanted=8, least_similarity=-1.0).output_lens.tolist() == [20.0, 30.0]


def test_what_is_learnt_from_is_bounded_by_bytes() -> None:
    predictor = LengthPredictor(HashedNgrams(), PredictorConfig(max_bytes=1 << 20))
    for number in range(2000):
        learn(predictor, towards(number, number + 1), 10)
    assert predictor.num_bytes <= 1 << 20
    assert predict(predictor, towards(1999, 2000)).source is PredictionSource.RETRIEVAL  # the newest are there
    assert predict(predictor, towards(1, 2)).source is not PredictionSource.RETRIEVAL  # the oldest have made room


def test_the_default_bound_leaves_room_for_all_requests_that_are_compared() -> None:
    config = PredictorConfig()
    bytes_of_all = FinishedRequests(capacity=config.capacity).num_bytes
    assert LengthPredictor(HashedNgrams(), config).num_bytes > bytes_of_all


def test_the_network_begins_with_the_first_length_and_learns_what_differs() -> None:
    network = LengthMlp(num_features=2)
    short, long = np.array([1.0, 0.0], np.float32), np.array([0.0, 1.0], np.float32)
    network.learn(short, 20.0)
    assert network.predict(long) == pytest.approx(20.0, rel=0.1)
    for _ in range(1500):
        network.learn(short, 20.0)
        network.learn(long, 400.0)
    assert network.predict(short) == pytest.approx(20.0, rel=0.1)
    assert network.predict(long) == pytest.approx(400.0, rel=0.1)


def test_embeddings_of_a_gguf_file(tmp_path: Path) -> None:
    encoder = TokenEmbeddings.of_model(write_tiny_gguf(tmp_path / "a.gguf", "llama", ("Q4_K",)), "llama")
    assert encoder.num_features == HIDDEN
    same, other = encoder.encode([5, 6, 7]), encoder.encode([90, 91, 92])
    assert float(same.features @ encoder.encode([5, 6, 7]).features) > float(same.features @ other.features)


DOCUMENT = request(max_tokens=100, request_class=RequestClass.BEST_EFFORT)
CHAT = request(max_tokens=100)


def test_before_anything_is_known_the_limit_is_expected() -> None:
    assert OutputLengthForecast().predict(CHAT) == 100.0


def test_classes_are_learnt_apart() -> None:
    forecast = OutputLengthForecast()
    forecast.observe(CHAT, 10)
    assert forecast.predict(CHAT) == 10.0
    assert forecast.predict(DOCUMENT) == 100.0


def test_the_mean_moves_by_one_in_sixty_four() -> None:
    forecast = OutputLengthForecast()
    forecast.observe(CHAT, 10)
    forecast.observe(CHAT, 74)
    assert forecast.predict(CHAT) == 11.0


def test_no_more_is_expected_than_may_come() -> None:
    forecast = OutputLengthForecast()
    forecast.observe(CHAT, 90)
    assert forecast.predict(request(max_tokens=20)) == 20.0


def test_without_a_known_rate_come_back_in_a_second() -> None:
    forecast = DrainForecast()
    assert forecast.seconds_for(1_000_000) == 1.0
    forecast.observe(500, now=1.0)  # the first of a row only starts the clock
    assert forecast.seconds_for(1_000_000) == 1.0


def test_the_queue_drains_at_the_rate_seen() -> None:
    forecast = DrainForecast()
    forecast.observe(0, now=1.0)
    forecast.observe(500, now=2.0)
    assert forecast.seconds_for(5000) == 10.0


def test_the_rate_is_that_of_the_last_half_minute() -> None:
    forecast = DrainForecast()
    for now in range(200):
        forecast.observe(100, now=float(now))
    for now in range(200, 320):
        forecast.observe(300, now=float(now))
    assert forecast.seconds_for(3000) == pytest.approx(10.0, rel=0.05)


def test_prompts_of_one_iteration_do_not_make_the_machine_look_fast() -> None:
    forecast = DrainForecast()
    for second in range(60):
        for prompt in range(20):  # told within the same millisecond
            forecast.observe(50, now=second + prompt * 1e-5)
    assert forecast.seconds_for(10_000) == pytest.approx(10.0, rel=0.05)


@each(("num_tokens", "expected"), [(1, 1.0), (10**9, 120.0)])
def test_answers_lie_between_one_second_and_two_minutes(num_tokens: int, expected: float) -> None:
    forecast = DrainForecast()
    forecast.observe(0, now=1.0)
    forecast.observe(100, now=2.0)
    assert forecast.seconds_for(num_tokens) == expected


def test_time_without_a_queue_says_nothing_about_the_rate() -> None:
    forecast = DrainForecast()
    forecast.observe(0, now=1.0)
    forecast.observe(100, now=2.0)
    forecast.idle()
    forecast.observe(100, now=1000.0)
    assert forecast.seconds_for(1000) == 10.0


def test_two_reports_at_one_moment_are_no_rate() -> None:
    forecast = DrainForecast()
    forecast.observe(100, now=1.0)
    forecast.observe(100, now=1.0)
    assert forecast.seconds_for(1000) == 1.0
