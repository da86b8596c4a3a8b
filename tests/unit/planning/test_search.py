"""The search against an exhaustive one."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

from alignedserve.config.sections import Topology
from lab.planning.candidates import Candidate, Family, PolicyChoice
from lab.planning.confidence import Interval
from lab.planning.hardware_list import Offer
from lab.planning.plan import Plan
from lab.planning.report import summary
from lab.planning.search import PlanSearch, Trial, Verdict
from lab.planning.trials import Outcome
from tests.support.marks import each

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


def searched(
    families: list[Family], attained: dict[str, float], on_windows: dict[str, float] | None = None
) -> tuple[PlanSearch, list[Trial]]:
    """Search to the end. `on_windows`: what windows say, where there are any."""
    search, done = PlanSearch(families, has_windows=on_windows is not None), []
    while trials := search.next_trials():
        verdicts = []
        for trial in trials:
            shares = attained if trial.is_whole else on_windows or {}
            share = shares[trial.candidate.label]
            is_abandoned = trial.is_whole and trial.is_limited and share < GOAL
            verdicts.append(Verdict(share, share >= GOAL, num_windows=1, is_abandoned=is_abandoned))
        search.take(list(zip(trials, verdicts, strict=True)))
        done += trials
    return search, done


def some_families(rng: random.Random) -> list[Family]:
    """Draw a few families, of different sizes and prices."""
    return [family(number, rng.randrange(1, 9), rng.choice((1.0, 1.5, 2.0))) for number in range(rng.randrange(1, 7))]


def least_cost(families: list[Family], attained: dict[str, float]) -> float | None:
    """Return the cost of the cheapest that holds, of all."""
    members = [member for one in families for member in one.members]
    return min((member.cost for member in members if attained[member.label] >= GOAL), default=None)


@each("seed", range(60))
@each("has_windows", [False, True])
def test_the_cheapest_plan_that_holds_is_found(seed: int, has_windows: bool) -> None:
    rng = random.Random(seed)
    families = some_families(rng)
    attained = tables(rng, families)
    search, done = searched(families, attained, attained if has_windows else None)
    found = search.best()
    assert (found.cost if found is not None else None) == least_cost(families, attained)
    if found is None:
        nearest = search.nearest()
        assert attained[nearest.label] == max(attained[one.members[-1].label] for one in families)
    played = [(trial.candidate.label, trial.is_whole, trial.is_limited) for trial in done]
    assert len(set(played)) == len(played), "simulated twice"


@each("seed", range(60))
def test_windows_that_flatter_cost_nothing(seed: int) -> None:
    """A plan that fails its windows fails the whole: then the cheapest of all is found, however many hold windows."""
    rng = random.Random(seed)
    families = some_families(rng)
    attained = tables(rng, families)
    flattering = {label: max(share, rng.choice((0.3, 0.9, 0.95))) for label, share in attained.items()}
    for one in families:
        for smaller, larger in pairwise(one.members):
            flattering[larger.label] = max(flattering[larger.label], flattering[smaller.label])
    found = searched(families, attained, flattering)[0].best()
    if least_cost(families, flattering) is None or least_cost(families, attained) is None:
        assert found is None
    else:
        assert found is not None
        assert found.cost == least_cost(families, attained)


@each("seed", range(60))
def test_windows_that_deceive_cost_no_more_than_they_say(seed: int) -> None:
    """Check that the plan holds the whole, and that no cheaper one which held its windows holds it too."""
    rng = random.Random(seed)
    families = some_families(rng)
    attained, on_windows = tables(rng, families), tables(rng, families)
    search, done = searched(families, attained, on_windows)
    found = search.best()
    if found is None:
        assert not any(attained[trial.candidate.label] >= GOAL for trial in done if trial.is_whole)
        return
    assert attained[found.label] >= GOAL
    both = [
        member.cost
        for one in families
        for member in one.members
        if min(attained[member.label], on_windows[member.label]) >= GOAL
    ]
    assert found.cost <= min(both, default=found.cost)


def test_a_single_plan_that_windows_slander_is_found_on_the_whole() -> None:
    """The plan of one worker less plays the whole as well, and those below it as long as they hold."""
    (one,) = [family(0, 4, 1.0)]
    labels = [member.label for member in one.members]
    attained = dict(zip(labels, (0.5, 0.95, 1.0, 1.0), strict=True))
    slandered = dict(zip(labels, (0.2, 0.5, 0.8, 1.0), strict=True))
    search, done = searched([one], attained, slandered)
    best = search.best()
    assert best is not None
    assert best.num_decode == 2
    assert [trial.candidate.num_decode for trial in done if trial.is_whole] == [4, 3, 2, 1]


def test_what_windows_refute_is_not_played() -> None:
    (one,) = [family(0, 2, 1.0)]
    search = PlanSearch([one], has_windows=True)
    played = []
    while trials := search.next_trials():
        played += [trial.candidate.num_decode for trial in trials if trial.is_whole]
        holding = [trial.candidate.num_decode == 2 for trial in trials]
        search.take(
            [(trial, Verdict(0.5 + holds / 2, holds, not holds)) for trial, holds in zip(trials, holding, strict=True)]
        )
    assert played == [2]


def test_of_equally_cheap_plans_the_one_that_attains_more_is_taken() -> None:
    families = [family(0, 2, 1.0), family(1, 2, 1.0)]
    attained = dict(zip([m.label for one in families for m in one.members], (0.5, 0.92, 0.4, 0.97), strict=True))
    for on_windows in (None, attained):
        best = searched(families, attained, on_windows)[0].best()
        assert best is not None
        assert best.label == families[1].members[1].label


def test_the_whole_is_played_by_few() -> None:
    families = [family(number, 8, 1.0) for number in range(12)]
    attained = {member.label: member.num_decode / 8 for one in families for member in one.members}
    _, done = searched(families, attained, attained)
    assert len([trial for trial in done if trial.is_whole]) == 2
    assert len(done) <= 12 * 4 + 2


def test_a_plan_that_fails_the_whole_is_followed_by_the_next_larger_one() -> None:
    (one,) = [family(0, 4, 1.0)]
    labels = [member.label for member in one.members]
    attained = dict(zip(labels, (0.5, 0.5, 0.95, 1.0), strict=True))
    flattering = dict(zip(labels, (0.5, 0.95, 0.95, 1.0), strict=True))
    search, done = searched([one], attained, flattering)
    assert [trial.candidate.num_decode for trial in done if trial.is_whole] == [2, 1, 3]
    best = search.best()
    assert best is not None
    assert best.num_decode == 3


def test_where_none_holds_the_best_of_the_largest_plans_is_played_to_its_end() -> None:
    families = [family(0, 3, 1.0), family(1, 2, 1.0)]
    attained = {
        member.label: member.num_decode / 10 + 0.05 * (one is families[1]) for one in families for member in one.members
    }
    search, done = searched(families, attained, attained)
    assert search.best() is None
    assert [(trial.candidate.label, trial.is_limited) for trial in done if trial.is_whole] == [
        (families[0].members[2].label, False)
    ]
    assert search.nearest().label == families[0].members[2].label


# The sentences of a plan.


def test_why_the_nearest_plan_failed_is_said() -> None:
    outcome = Outcome(0.0, holds=False, keeps_up=False, result=None, error="OverflowError: too large")
    nearest = SimpleNamespace(candidate=SimpleNamespace(label="1 x h100"), outcome=outcome)
    plan = SimpleNamespace(
        goals=SimpleNamespace(share=0.99), chosen=None, nearest=nearest, variations=(), interval=Interval(0.0, 1.0),
        simulated_only=None,
    )  # fmt: skip
    lines = summary(cast("Plan", plan))
    assert lines[0].endswith("Nearest: 1 x h100, failed.")
    assert lines[1] == "Why it failed: OverflowError: too large"
