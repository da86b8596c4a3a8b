"""Arrivals, lengths and rates of a workload."""

import math

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from lab.workload.arrivals import GapDistribution, RateProfile, Renewal, weibull_shape
from lab.workload.distributions import constant, parse_distribution
from lab.workload.rates import at_rate
from tests.support.marks import each


@each("distribution", list(GapDistribution))
@each("cv", [0.0, 0.5, 1.0, 3.0])
def test_gaps_have_mean_one_and_the_variation_asked_for(cv: float, distribution: GapDistribution) -> None:
    gaps = Renewal(cv, distribution).gaps(np.random.default_rng(5), 100_000)
    assert gaps.mean() == pytest.approx(1.0, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_weibull_of_variation_one_is_exponential() -> None:
    assert weibull_shape(1.0) == pytest.approx(1.0, rel=1e-9)
    assert weibull_shape(math.sqrt(5.0)) == pytest.approx(0.5, rel=1e-9)  # shape 1/2: cv^2 = 4! / 2!^2 - 1 = 5


def test_even_gaps_until_a_moment() -> None:
    assert Renewal(0.0).arrivals(np.random.default_rng(0), count=None, until=3.5).tolist() == [1.0, 2.0, 3.0]


def test_count_and_end_take_the_same_beginning() -> None:
    many = Renewal().arrivals(np.random.default_rng(1), count=10_000, until=math.inf)
    until = Renewal().arrivals(np.random.default_rng(1), count=None, until=100.0)
    assert len(many) == 10_000
    assert until.tolist() == many[: len(until)].tolist()
    assert many[len(until)] >= 100.0


@each("cv", [-1.0, math.nan, 1e9])
def test_impossible_variation(cv: float) -> None:
    with pytest.raises(ConfigError, match="cv"):
        Renewal(cv)


def test_profile_places_requests_where_it_is_busy() -> None:
    """At 0.5 per second on average: 5 in the first step, 15 in the third."""
    moments = RateProfile(10.0, (1.0, 0.0, 3.0, 0.0)).stretch(np.arange(0.5, 20.0), rate=0.5, start_s=0.0)
    assert moments[:5].tolist() == [1.0, 3.0, 5.0, 7.0, 9.0]
    assert moments[5:8] == pytest.approx([20 + 1 / 3, 21.0, 21 + 2 / 3])
    assert moments[-1] == pytest.approx(20 + 29 / 3)


def test_profile_begins_anew_and_can_begin_later() -> None:
    profile = RateProfile(10.0, (1.0, 0.0))
    assert profile.stretch(np.array([9.5, 10.5]), rate=0.5, start_s=0.0) == pytest.approx([9.5, 20.5])
    assert profile.stretch(np.array([1.0, 6.0]), rate=0.5, start_s=5.0) == pytest.approx([1.0, 16.0])


def test_rate_of_a_part_of_a_profile() -> None:
    """The steps have half and one and a half times the mean rate."""
    profile = RateProfile(10.0, (1.0, 3.0))
    assert profile.rate_of_whole(rate=2.0, start_s=0.0, duration_s=40.0) == pytest.approx(2.0)
    assert profile.rate_of_whole(rate=2.0, start_s=2.0, duration_s=5.0) == pytest.approx(4.0)
    assert profile.rate_of_whole(rate=2.0, start_s=15.0, duration_s=10.0) == pytest.approx(2.0)
    with pytest.raises(ConfigError, match="no requests in the 5 s after 12 s"):
        RateProfile(10.0, (1.0, 0.0)).rate_of_whole(rate=1.0, start_s=12.0, duration_s=5.0)


COUNT = 40_000


def test_lognormal_takes_median_and_95th_percentile() -> None:
    drawn = parse_distribution("lognormal(100,300)").draw(np.random.default_rng(3), COUNT)
    assert np.percentile(drawn, [50, 95]) == pytest.approx([100, 300], rel=0.03)


def test_skewed_takes_mean_and_deviation() -> None:
    drawn = parse_distribution("skewed(220,260)").draw(np.random.default_rng(3), COUNT)
    assert (drawn.mean(), drawn.std()) == pytest.approx((220, 260), rel=0.05)


@each(
    ("text", "mean"),
    [
        ("60", 60),
        ("uniform(10,30)", 20),
        ("exponential(50)", 50),
        ("choice(1,2,6)", 3),
        ("mix(3: 10, 1: uniform(100,300))", 57.5),
        ("mix(0.5: mix(1: 10, 1: 20), 0.5: 25)", 20),
    ],
)
def test_distributions_have_their_mean(text: str, mean: float) -> None:
    assert parse_distribution(text).draw(np.random.default_rng(2), COUNT).mean() == pytest.approx(mean, rel=0.03)


def test_short_and_long_prompts_of_the_paper_come_in_their_shares() -> None:
    drawn = parse_distribution("mix(0.9: uniform(1,999), 0.1: uniform(1000,8000))").draw(
        np.random.default_rng(2), COUNT
    )
    assert (drawn >= 1000).mean() == pytest.approx(0.1, abs=0.005)


def test_a_constant_says_so() -> None:
    assert constant(4.0).constant == 4.0
    assert parse_distribution("uniform(1,2)").constant is None


@each(
    ("text", "complaint"),
    [
        ("x", "not a number"),
        ("inf", "not finite"),
        ("-5", "above 0"),
        ("gauss(1,2)", "distributions are"),
        ("uniform(1,2", "distributions are"),
        ("uniform(5)", "takes 2"),
        ("uniform(5,2)", "must not exceed"),
        ("skewed(5,0)", "above 0"),
        ("choice()", "not a number"),
        ("mix(1,2)", "a mix is written"),
        ("mix(0: 1, 1: 2)", "weights must be above 0"),
        ("mix(1: uniform(5))", "takes 2"),
    ],
)
def test_wrong_distribution_says_what_is_wrong(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_distribution(text)


@each(
    ("line", "expected"),
    [
        ("sharegpt, rate=2, cv=3", "sharegpt, rate=6, cv=3"),
        ("azure_conv, arrivals=recorded", "azure_conv, arrivals=recorded, rate=6"),
        ("sharegpt", "sharegpt, rate=6"),
        ("rt: rate=2, prompt=uniform(1,9), output=3;", "rt: rate=6, prompt=uniform(1,9), output=3"),
        ("rt: sharegpt, rate = 1; be: sharegpt, rate=3", "rt: sharegpt, rate =1.5; be: sharegpt, rate=4.5"),
        ("rt: sharegpt, rate=2; be: sharegpt, outstanding=4", "rt: sharegpt, rate=6; be: sharegpt, outstanding=4"),
    ],
)
def test_open_loops_are_scaled_together(line: str, expected: str) -> None:
    assert at_rate(line, 6.0) == expected


@each(
    ("line", "message"),
    [
        ("be: sharegpt, outstanding=4", "closed loops only"),
        ("a: azure_conv, arrivals=recorded; b: sharegpt, rate=1", "a rate= of its own"),
        ("a: azure_conv; b: sharegpt, rate=1", "give one of rate="),
        ("sharegpt, rate=x", "rate"),
    ],
)
def test_what_cannot_be_scaled_is_said(line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        at_rate(line, 6.0)
