"""Simulations of the grid's points, small ones."""

from alignedserve.config.sections import Topology
from experiments.grid.points import Point, all_points
from experiments.grid.search import simulate
from experiments.grid.systems import DEFAULT, FIELD, System, families, others


def test_every_system_can_be_configured_and_every_workload_built() -> None:
    for point in {one.trace: one for one in all_points(minutes=0.5)}.values():
        assert point.workload().build().requests
    for systems, first in families(2):
        assert systems[first].config(2).cluster.decode.count in (1, 2)
    assert {one.policy for one in others(4).values()} == {one.policy for one in FIELD}
    assert DEFAULT.config(4).cluster.chosen_topology is Topology.ELASTIC


def test_another_seed_and_another_length_are_other_workloads_under_other_names() -> None:
    first = Point("azure_conv", 0.54, "tight", 2, has_best_effort=False, minutes=0.5)
    assert first.of_seed(2).name == f"{first.name}/seed2"
    assert first.name.endswith("/alone/0.5min")
    assert first.of_seed(2).workload().build().requests != first.workload().build().requests
    assert Point("azure_conv", 0.54, "tight", 2, has_best_effort=False).workload().duration_s == 600.0


def test_an_abandoned_case_could_not_have_held_more() -> None:
    point = Point("azure_conv", 0.78, "mixed", 2, has_best_effort=True, minutes=0.6)
    system = System("fcfs", Topology.COLOCATED)
    whole = simulate(point, system, 0)
    assert 0 < whole.num_met < whole.num_sent
    assert whole.best_effort_tokens_per_s
    assert whole.fluidity is not None
    assert 0.0 < whole.fluidity < 1.0
    assert simulate(point, system, whole.num_met).num_met == whole.num_met
    abandoned = simulate(point, system, whole.num_met + 1)
    assert abandoned.at_most == whole.num_met
    assert abandoned.ended_s <= whole.ended_s
