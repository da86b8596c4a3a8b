"""The search against an exhaustive one."""

import random

import pytest

from alignedserve.config.sections import Topology
from alignedserve.planning.candidates import Candidate, Family, PolicyChoice
from alignedserve.planning.hardware_list import Offer
from alignedserve.planning.search import FINALISTS, PlanSearch, Trial, Verdict

GOAL = 0.9
UNION = PolicyChoice("aligned_slo", "aligned_slo", {})


def family(number: int, size: int, price: float) -> Family:
    """Build a family of up to so many workers, of a kind of its own."""
    offer = Offer(f"kind-{number}", size, price)
    members = [Candidate(offer, 1, Topology.ELASTIC, 0, count, UNION) for count in range(1, size + 1)]
    return Family(f"family {number}", tuple(members))


def tables(rng: random.Random, families: list[Family]) -> dict[str, float]:
    """Return the share that each plan attains: more workers never less."""
    attained: dict[str, float] = {}
    for one in families:
        rising = sorted(rng.choice((0.3, 0.5, 0.85, 0.9, 0.95, 1.0)) for _ in one.members)
        attained |= {member.label: share for member, share in zip(one.members, rising, strict=True)}
    return attained


def searched(families: list[Family], attained: dict[str, float], num_stages: int) -> tuple[PlanSearch, list[Trial]]:
    """Search to the end, with the same outcome at every stage."""
    search, done = PlanSearch(families, num_stages=num_stages), []
    while trials := search.next_trials():
        shares = [attained[trial.candidate.label] for trial in trials]
        search.take([(trial, Verdict(share, share >= GOAL)) for trial, share in zip(trials, shares, strict=True)])
        done += trials
    return search, done


@pytest.mark.parametrize("seed", range(60))
def test_the_cheapest_plan_that_holds_is_found(seed: int) -> None:
    rng = random.Random(seed)
    families = [
        family(number, rng.randrange(1, 9), rng.choice((1.0, 1.5, 2.0))) for number in range(rng.randrange(1, 7))
    ]
    attained = tables(rng, families)
    members = [member for one in families for member in one.members]
    holding = [member.cost for member in members if attained[member.label] >= GOAL]
    for num_stages in (1, 3):
        search, done = searched(families, attained, num_stages)
        found = search.best()
        assert (found.cost if found is not None else None) == min(holding, default=None)
        if found is None:
            nearest = search.nearest()
            assert attained[nearest.label] == max(attained[one.members[-1].label] for one in families)
        assert len({(trial.candidate.label, trial.stage) for trial in done}) == len(done), "simulated twice"


def test_of_equally_cheap_plans_the_one_that_attains_more_is_taken() -> None:
    families = [family(0, 2, 1.0), family(1, 2, 1.0)]
    attained = dict(zip([m.label for one in families for m in one.members], (0.5, 0.92, 0.4, 0.97), strict=True))
    search, _ = searched(families, attained, 1)
    best = search.best()
    assert best is not None
    assert best.label == families[1].members[1].label


def test_families_are_halved_before_the_whole_workload() -> None:
    families = [family(number, 8, 1.0) for number in range(12)]
    attained = {member.label: member.num_decode / 8 for one in families for member in one.members}
    _, done = searched(families, attained, 3)
    per_stage = [len({trial.candidate.offer.name for trial in done if trial.stage == stage}) for stage in range(3)]
    assert per_stage == [12, 6, FINALISTS]
    assert all(trial.is_limited for trial in done if trial.stage)


def test_a_plan_that_fails_the_longer_beginning_is_followed_by_the_next_larger_one() -> None:
    (one,) = [family(0, 4, 1.0)]
    search = PlanSearch([one], num_stages=2)
    tried = []
    while trials := search.next_trials():
        (trial,) = trials
        tried.append((trial.stage, trial.candidate.num_decode))
        holds = trial.candidate.num_decode >= (2 if trial.stage == 0 else 3)
        search.take([(trial, Verdict(1.0 if holds else 0.5, holds))])
    assert tried == [(0, 2), (0, 1), (1, 2), (1, 3)]
    assert search.best() == one.members[2]
