"""The router's forecasts of output lengths and of its queue."""

from alignedserve.core.request import RequestClass
from router.policies.forecast import DrainForecast, OutputLengthForecast
from tests.support.marks import each
from tests.support.samples import request

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


def test_the_rate_moves_by_an_eighth() -> None:
    forecast = DrainForecast()
    for num_tokens, now in ((0, 1.0), (800, 2.0), (1600, 3.0)):
        forecast.observe(num_tokens, now=now)
    assert forecast.seconds_for(9000) == 10.0


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
