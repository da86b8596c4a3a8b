import math

import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.workload.arrivals import GapDistribution, RateProfile, Renewal, weibull_shape
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
