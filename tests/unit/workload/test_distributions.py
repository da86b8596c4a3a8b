import numpy as np
import pytest

from alignedserve.core.errors import ConfigError
from alignedserve.workload.distributions import constant, parse_distribution
from tests.support.marks import each

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
