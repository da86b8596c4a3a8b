"""The experiment of Apt-Serve: how the highest rate at a level is found, and what it is compared with."""

import pytest

from experiments.apt_serve import (
    HELD,
    KV_ONLY,
    AptServeLoad,
    AttainmentCurve,
    WorkerSizes,
    advantages,
    curves_in,
    find_throughputs,
    throughput_rows,
)


def _found(first_below: int) -> AttainmentCurve:
    """Return the curve of a policy that holds everything up to a rate, and half from the next on."""
    curve = AttainmentCurve("sharegpt", "opt-13b", "fcfs")
    while numbers := curve.wanted():
        curve.held |= {number: 1.0 if number < first_below else 0.5 for number in numbers}
    return curve


def test_a_level_is_found_by_bisection_and_interpolated() -> None:
    curve = _found(first_below=7)
    assert len(curve.held) <= 5
    assert curve.bracket(0.9) == (6, 7)
    assert curve.throughput(0.9) == pytest.approx(curve.rate(6) * 1.25**0.2)
    rows = [
        {"part": "figure 8", "dataset": curve.dataset, "model": curve.model, "policy": curve.policy}
        | {"rate": float(f"{curve.rate(number):.4g}"), HELD: held}
        for number, held in curve.held.items()
    ]
    assert curves_in(rows) == [curve]
    assert curve.throughput(0.6) == pytest.approx(curve.rate(6) * 1.25**0.8)


@pytest.mark.parametrize("first_below", [0, 20])
def test_a_rate_beyond_the_grid_is_not_known(first_below: int) -> None:
    curve = _found(first_below)
    assert curve.wanted() == []
    assert curve.throughput(0.9) is None


def test_advantages_are_means_over_models_where_both_are_known() -> None:
    rows = [
        {"dataset": "sharegpt", "model": model, "policy": policy, "rate at 90%": rate, "rate at 60%": None}
        for model, policy, rate in (
            ("opt-13b", "apt_serve", 4.0),
            ("opt-13b", "fcfs", 2.0),
            ("opt-30b", "apt_serve", 4.0),
            ("opt-30b", "fcfs", 1.0),
            ("opt-66b", "apt_serve", 4.0),
            ("opt-66b", "fcfs", None),
        )
    ]
    first = advantages(rows)[0]
    assert (first["policy"], first["baseline"]) == ("apt_serve", "fcfs")
    assert (first["90%"], first["90%, most"], first["90%, least"], first["60%"]) == (3.0, 4.0, 2.0, None)


def test_the_ablation_has_no_hidden_caches_and_measured_costs_the_smaller_memory() -> None:
    with_hidden, without = (
        AptServeLoad("sharegpt", 3.0, 4).case("", policy, 1).case.config for policy in ("apt_serve", KV_ONLY)
    )
    assert (with_hidden.mechanisms.hidden_ratio, without.mechanisms.hidden_ratio) == (0.5, None)
    measured = AptServeLoad("sharegpt", 3.0, 4, costs="vllm").case("", "apt_serve", 1).case.config
    assert measured.cluster.decode.kv_cache_bytes == with_hidden.cluster.decode.kv_cache_bytes


@pytest.mark.slow
def test_the_whole_way_in_little() -> None:
    curves = [AttainmentCurve("humaneval", "opt-13b", policy) for policy in ("fcfs", "apt_serve")]
    rows = find_throughputs(curves, WorkerSizes(20, (1,), processes=1))
    assert throughput_rows(curves_in(rows)) == throughput_rows(curves)
    assert [row["policy"] for row in throughput_rows(curves)] == ["fcfs", "apt_serve"]
