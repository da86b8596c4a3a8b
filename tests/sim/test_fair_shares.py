"""Fair shares, simulated in every topology: tokens by weight in any ten seconds, and what a third tenant sees."""

from dataclasses import replace

from alignedserve.core.request import RequestClass
from lab.sim.result import ClassResult
from lab.sim.simulation import Simulation
from tests.harnesses.simulation import mixed_workload, workload_of
from tests.harnesses.tenants import TOPOLOGIES, TenantTokens, backlog, chats, shared
from tests.support.marks import each

LAST_S = 18


@each("topology", TOPOLOGIES)
@each("request_class", list(RequestClass))
def test_tokens_go_by_weight_in_any_ten_seconds(topology: str, request_class: RequestClass) -> None:
    tokens = TenantTokens()
    tokens.run(shared(topology, float(LAST_S)), workload_of(*backlog(500, request_class)))
    ratios = tokens.ratios(5, LAST_S)
    assert min(ratios) >= 1.9
    assert max(ratios) <= 2.1


def _third(topology: str, num_backlogged: int) -> ClassResult:
    requests = sorted([*backlog(num_backlogged), *chats(1.0, LAST_S - 3.0)], key=lambda one: one.arrival_s)
    return Simulation(shared(topology, float(LAST_S)), workload_of(*requests)).run().classes["c"]


@each("topology", TOPOLOGIES)
def test_a_third_tenant_passes_a_backlog_at_once(topology: str) -> None:
    """Its first token waits for the iteration in flight and comes with the next, each some 0.1 s long there."""
    alone, beside = _third(topology, 0), _third(topology, 500)
    assert alone.ttft_s is not None
    assert beside.ttft_s is not None
    assert beside.attainment == 1.0
    assert beside.ttft_s.curve[99] <= alone.ttft_s.curve[99] + 0.25


@each("topology", TOPOLOGIES)
def test_one_tenant_is_served_as_if_it_had_no_name(topology: str) -> None:
    config, plain = TOPOLOGIES[topology], mixed_workload(40, 8.0)
    named = [replace(one, tenant="alone", weight=3.0) for one in plain.requests]
    with_name, without = Simulation(config, workload_of(*named)).run(), Simulation(config, plain).run()
    assert (with_name.num_decisions, with_name.num_events) == (without.num_decisions, without.num_events)
    assert with_name.classes == without.classes
