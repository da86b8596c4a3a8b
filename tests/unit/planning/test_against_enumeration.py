"""Plans found by windows against the simulation of every plan on the whole workload."""

import pytest

from alignedserve.config.loading import load_config
from alignedserve.config.sections import Topology
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.costmodel.hardware import LinkModel
from alignedserve.costmodel.linear import LinearCoefficients
from alignedserve.costmodel.model_shapes import ModelShape
from lab.costmodel.profile_file import MachineProfile
from lab.planning.candidates import Choices, PolicyChoice, families_of
from lab.planning.hardware_list import Offer
from lab.planning.plan import PlanRequest, make_plan
from lab.planning.trials import Machines, Run, Traffic, case_of, goals_of, judged
from lab.planning.windows import WindowSizes
from lab.sim.sweep import CasePool, WorkloadLine, run_cases

SHAPE = ModelShape("tiny", 2, 64, 4, 4, 16, 256, 512, is_gated=False, ties_embeddings=True, dtype="float32")
COSTS = LinearCoefficients(base_s=0.04, prompt_token_s=2e-4, decode_s=2e-3)
OFFER = Offer("fitted:here", 4)
SIZES = WindowSizes(least_s=4.0, lead_in_s=4.0, least_requests=4, least_windows=8)


def request(line: str, seed: int, duration_s: float) -> PlanRequest:
    """Ask for a plan of up to four workers of a slow machine."""
    machines = Machines(
        with_fixed_sizes(load_config(None, ())),
        None,
        profiles={OFFER.name: MachineProfile(SHAPE, COSTS, LinkModel(0.0, 1e9))},
    )
    choices = Choices((OFFER,), (PolicyChoice("fcfs", "fcfs", {}),), (Topology.ELASTIC, Topology.COLOCATED))
    traffic = Traffic(WorkloadLine(line, seed, duration_s=duration_s))
    return PlanRequest(traffic, 0.97, choices, machines, seed, SIZES)


def least_cost(asked: PlanRequest) -> float | None:
    """Return the cost of the cheapest plan that holds, of all of them, each on the whole workload."""
    goals = goals_of(asked.traffic.whole(), asked.share)
    members = [member for family in families_of(asked.choices) for member in family.members]
    cases = [case_of(member, Run(), asked.machines, asked.traffic) for member in members]
    outcomes = [judged(one.result, one.error, goals) for one in run_cases(cases)]
    return min((one.cost for one, outcome in zip(members, outcomes, strict=True) if outcome.holds), default=None)


def found_cost(asked: PlanRequest) -> float | None:
    """Return the cost of the plan found."""
    with CasePool(1) as pool:
        plan = make_plan(asked, pool)
    assert plan.groups, "windows were not used"
    return plan.chosen.candidate.cost if plan.chosen is not None else None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("rate", [4.0, 8.0, 12.0])
def test_a_plan_is_as_cheap_as_the_best_of_all(rate: float, seed: int) -> None:
    line = f"prompt=uniform(100,800), output=uniform(10,60), rate={rate}, cv=2, ttft=1.5, tpot=0.15"
    asked = request(line, seed, 50.0)
    assert found_cost(asked) == least_cost(asked)
