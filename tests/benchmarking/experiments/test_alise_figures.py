"""ALISE's experiment: the rate that a figure is read off at."""

import pytest

from experiments.alise import LATENCY, SYSTEMS, AliseLoad, rate_at, throughputs
from experiments.common import Row


def _row(policy: str, rate: float, latency_s: float) -> Row:
    labels = {"part": "figure 6", "model": "opt-13b", "lengths": "alpaca"}
    return {**labels, "policy": policy, "rate": rate, "seed": 1, LATENCY: latency_s}


def test_between_two_rates_the_logarithm_of_latency_is_a_line() -> None:
    rows = [_row("vLLM", 4.0, 0.05), _row("vLLM", 8.0, 0.1), _row("vLLM", 12.0, 0.4)]
    assert rate_at(rows, 0.2) == pytest.approx(10.0)


def test_a_latency_that_is_not_reached_has_no_rate() -> None:
    assert rate_at([_row("vLLM", 4.0, 0.05), _row("vLLM", 8.0, 0.1)]) is None
    assert rate_at([_row("vLLM", 4.0, 0.5), _row("vLLM", 8.0, 0.9)]) is None


def test_throughput_is_compared_with_that_of_vllm() -> None:
    rows = [_row("vLLM", 4.0, 0.1), _row("vLLM", 8.0, 0.4), _row("ALISE", 8.0, 0.1), _row("ALISE", 10.0, 0.4)]
    found = {row["policy"]: row["times"] for row in throughputs(rows)}
    assert found == {"vLLM": 1.0, "ALISE": pytest.approx(1.5)}


def test_every_system_can_be_simulated() -> None:
    for name in SYSTEMS:
        case = AliseLoad("opt-13b", "alpaca", 10.0, 1.0).case("any", name, 1)
        assert case.labels["policy"] == name
