"""The windows that stand for a workload, and what they say of a plan."""

from dataclasses import replace
from itertools import pairwise

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.errors import ConfigError
from alignedserve.core.request import Slo
from lab.planning.candidates import Choices, PolicyChoice, families_of
from lab.planning.confidence import attained_interval
from lab.planning.hardware_list import Offer, parse_hardware
from lab.planning.loads import UnitCosts, unit_costs
from lab.planning.trials import Goals, goals_of
from lab.planning.windowed_trial import WindowedTrial
from lab.planning.windows import Group, WindowSizes, groups_of
from lab.sim.result import PartResult, SimulationResult
from lab.sim.simulation import Simulation
from lab.workload.requests import LEAD_IN, ClosedLoop, TimeWindow, window_of
from tests.harnesses.simulation import colocated, timed, workload_of
from tests.support.marks import each

COSTS = UnitCosts(0.001, 0.01)
SIZES = WindowSizes(least_s=10.0, lead_in_s=5.0, least_requests=5, least_windows=8)
EASY = Slo(1.0, 0.1)


def test_a_sample_without_a_miss_promises_not_that_none_will() -> None:
    low, high = attained_interval([PartResult(10, 10)] * 30, seed=0)
    assert (low, high) == (0.99, 1.0)
    assert attained_interval([PartResult(10, 5)] * 30, seed=0) == (0.5, 0.5)
    assert attained_interval([], seed=0) == (0.0, 1.0)


def rising(num_windows: int, per_window: int = 10) -> list[float]:
    """Return arrivals, so many in each ten seconds."""
    return [10.0 * number + place * 10.0 / per_window for number in range(num_windows) for place in range(per_window)]


def test_a_window_has_its_own_time_and_a_lead_in_that_does_not_count() -> None:
    requests = [timed(float(second), class_name="rt") for second in range(20)]
    part = window_of(workload_of(*requests), TimeWindow(10.0, 13.0, lead_in_s=2.0))
    assert [(one.arrival_s, one.class_name) for one in part.requests] == [
        (0.0, "rt" + LEAD_IN),
        (1.0, "rt" + LEAD_IN),
        (2.0, "rt"),
        (3.0, "rt"),
        (4.0, "rt"),
    ]
    assert part.ends_s == 5.0
    first = window_of(workload_of(*requests), TimeWindow(0.0, 2.0, lead_in_s=5.0))
    assert [one.arrival_s for one in first.requests] == [0.0, 1.0]


def test_a_closed_loop_sends_as_long_as_its_window() -> None:
    stream = [timed(class_name="be")] * 4
    loops = (ClosedLoop("be", 2, is_wave=False, stream=stream),)
    workload = replace(workload_of(timed(30.0)), closed_loops=loops, ends_s=60.0)
    assert window_of(workload, TimeWindow(20.0, 40.0, lead_in_s=5.0)).ends_s == 25.0
    assert window_of(workload, TimeWindow(50.0, 70.0)).ends_s == 10.0


def test_the_busiest_windows_are_chosen_more_often_than_others() -> None:
    """The later, the busier, nearly: some windows have a request more than others."""
    requests = [timed(at, prompt_len=100 + 20 * int(at), class_name="rt") for at in rising(16)]
    groups = groups_of(workload_of(*requests), COSTS, SIZES)
    assert [group.num_windows for group in groups] == [1, 2, 4, 8]
    assert [round(group.window.start_s, 6) for group in groups] == pytest.approx([148.4, 116.6, 106.0, 31.8])
    assert sum(sum(group.total_requests.values()) for group in groups) == len(requests)
    assert all(one.load_s > other.load_s for one, other in pairwise(groups))


def test_a_short_workload_has_no_windows() -> None:
    assert groups_of(workload_of(*(timed(at) for at in rising(7))), COSTS, SIZES) == ()
    assert groups_of(workload_of(*(timed(at) for at in rising(20, per_window=1))), COSTS, SIZES) == ()
    assert groups_of(workload_of(), COSTS, SIZES) == ()


def test_a_token_of_an_answer_costs_its_share_of_a_batch_that_keeps_the_pace() -> None:
    config = colocated()
    loose, tight = (unit_costs(config, [timed(slo=Slo(1.0, tpot_s))]) for tpot_s in (10.0, 0.011))
    assert loose.prompt_token_s == tight.prompt_token_s
    assert 0.0 < loose.answer_token_s < tight.answer_token_s


# --- what windows say of a plan


def groups(*sizes: int) -> list[Group]:
    """Return groups of so many windows, each of which has 100 requests."""
    return [
        Group(TimeWindow(100.0 * number, 100.0 * number + 60.0), size, {"rt": 100}, {"rt": 100 * size}, 1.0)
        for number, size in enumerate(sizes)
    ]


def result_of(num_missed: int, num_sent: int = 100, *, is_abandoned: bool = False) -> SimulationResult:
    """Return a result in which so many requests missed."""
    request = timed(class_name="rt", slo=EASY)
    result = Simulation(colocated(), workload_of(request)).run()
    found = replace(result.classes["rt"], num_sent=num_sent, parts=(PartResult(num_sent, num_sent - num_missed),))
    return replace(result, classes={"rt": found}, is_abandoned=is_abandoned)


def goals(share: float = 0.99, number: int = 1500) -> Goals:
    """Return the goals of a class of real-time requests."""
    return Goals(share, {"rt": number}, frozenset({"rt"}), frozenset(), 900.0)


def played(trial: WindowedTrial, *missed: int) -> list[int]:
    """Play windows with so many misses, and return their groups in order."""
    order, left = [], list(missed)
    while asked := trial.next_windows():
        for group in asked:
            order.append(int(group.window.start_s // 100.0))
            trial.take(group, result_of(left.pop(0)), None)
    assert not left, "not all were played"
    return order


def test_two_busy_windows_without_misses_are_enough() -> None:
    trial = WindowedTrial(groups(1, 2, 4, 8), goals())
    assert played(trial, 1, 0) == [0, 1]
    outcome = trial.outcome()
    assert outcome.holds
    assert outcome.windows == (2, 4)
    assert not outcome.is_representative


def test_a_plan_fails_as_soon_as_the_groups_played_miss_too_many() -> None:
    """15 may miss of 1500, 33 with the margin: 40 in the busiest window are too many."""
    trial = WindowedTrial(groups(1, 2, 4, 8), goals())
    assert played(trial, 40) == [0]
    outcome = trial.outcome()
    assert (outcome.holds, outcome.is_refuted, outcome.attained) == (False, True, 0.6)


def test_what_is_missed_is_estimated_group_by_group() -> None:
    """10 + 8 x 1 + 4 x 1 + 2 x 2 of 1500: more than 15, but within the margin for chance."""
    trial = WindowedTrial(groups(1, 2, 4, 8), goals())
    assert played(trial, 10, 1, 1, 2) == [0, 3, 2, 1]
    outcome = trial.outcome()
    assert outcome.holds
    assert outcome.is_representative
    assert outcome.attained == pytest.approx(1 - 26 / 1500)
    assert not outcome.is_refuted
    too_many = WindowedTrial(groups(1, 2, 4, 8), goals())
    assert played(too_many, 10, 7) == [0, 3]
    assert not too_many.outcome().holds
    assert too_many.outcome().is_refuted


def test_a_window_is_abandoned_where_a_quarter_misses() -> None:
    """26 are known to miss, of 45 that may: not enough, and so the window that stands for 8 is played."""
    trial = WindowedTrial(groups(1, 2, 4, 8), goals(share=0.97))
    assert trial.limits(groups(1)[0]) == {"rt": 25}
    (busiest,) = trial.next_windows()
    trial.take(busiest, result_of(26, 60, is_abandoned=True), None)
    (lightest,) = trial.next_windows()
    assert lightest.num_windows == 8
    trial.take(lightest, result_of(26, 60, is_abandoned=True), None)
    outcome = trial.outcome()
    assert (outcome.holds, outcome.is_abandoned) == (False, True)
    assert outcome.attained == pytest.approx(0.74)
    assert not trial.next_windows()


def test_a_thorough_trial_plays_all_windows() -> None:
    trial = WindowedTrial(groups(1, 2, 4, 8), goals(), is_thorough=True)
    assert played(trial, 20, 0, 0, 0) == [0, 1, 2, 3]
    assert not trial.outcome().holds


def test_an_error_ends_a_trial() -> None:
    trial = WindowedTrial(groups(1, 2), goals())
    (busiest,) = trial.next_windows()
    trial.take(busiest, None, "broken")
    assert not trial.next_windows()
    assert trial.outcome().error == "broken"


def test_a_backlog_without_objectives_must_not_grow() -> None:
    """20 requests a second of 0.3 s each, of which none has an objective."""
    requests = [timed(0.05 * number, prompt_len=300, class_name="be", slo=Slo()) for number in range(200)]
    chat = [timed(0.5 * number, class_name="rt", slo=Slo(1000.0, None)) for number in range(20)]
    workload = workload_of(*sorted([*requests, *chat], key=lambda one: one.arrival_s))
    trial = WindowedTrial(
        [Group(TimeWindow(0.0, 10.0), 1, {"rt": 20, "be": 200}, {"rt": 20, "be": 200}, 1.0)], goals_of(workload, 0.99)
    )
    for group in trial.next_windows():
        trial.take(group, Simulation(colocated(), workload).run(), None)
    outcome = trial.outcome()
    assert (outcome.attained, outcome.keeps_up, outcome.holds) == (1.0, False, False)


# The list of hardware, and the plans that it allows.

UNION = PolicyChoice("aligned_slo", "aligned_slo", {})


def test_counts_and_prices() -> None:
    assert parse_hardware("4x h100 @2.5, 8 x a100-80g @ 1.2") == (Offer("h100", 4, 2.5), Offer("a100-80g", 8, 1.2))
    assert parse_hardware("h100") == (Offer("h100", 1),)
    assert parse_hardware("2xfitted:./here.json") == (Offer("fitted:./here.json", 2),)


@each(
    ("text", "message"),
    [
        ("4x k80", "hardware 'k80' is none of v100-32g.*alignedserve profile MODEL.*fitted:FILE"),
        ("", "empty"),
        ("0x h100", "count must be between 1"),
        ("999999999x h100", "count must be between 1"),
        ("2x h100 @0", "price per hour must be above 0"),
        ("2x h100 for 3", "write COUNTx NAME @PRICE"),
        ("2x h100, 3x h100", "names one kind twice"),
        ("2x h100 @2, 3x a100-80g", "a100-80g has none"),
    ],
)
def test_what_is_no_list_of_hardware_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_hardware(text)


def names_of(choices: Choices) -> list[str]:
    """Return the names of all plans."""
    return [member.label for family in families_of(choices) for member in family.members]


def test_families_differ_in_one_number_of_workers() -> None:
    names = names_of(Choices((Offer("h100", 3),), (UNION,), degrees=(1,)))
    assert names == [
        "1 x h100, 1 elastic, aligned_slo",
        "2 x h100, 2 elastic, aligned_slo",
        "3 x h100, 3 elastic, aligned_slo",
        "2 x h100, 2 colocated, aligned_slo",
        "3 x h100, 3 colocated, aligned_slo",
        "2 x h100, 1 prefill + 1 decode, aligned_slo",
        "3 x h100, 1 prefill + 2 decode, aligned_slo",
        "3 x h100, 2 prefill + 1 decode, aligned_slo",
    ]


def test_a_worker_has_at_most_the_accelerators_that_there_are() -> None:
    names = names_of(Choices((Offer("h100", 5),), (UNION,), topologies=(Topology.ELASTIC,)))
    assert names[-3:] == [
        "2 x h100, 1 elastic of 2 each, aligned_slo",
        "4 x h100, 2 elastic of 2 each, aligned_slo",
        "4 x h100, 1 elastic of 4 each, aligned_slo",
    ]
    both = families_of(Choices((Offer("h100", 5),), (UNION, PolicyChoice("oracle", "oracle", {})), degrees=(1, 2)))
    assert {(family.can_be_served, family.members[0].policy.name) for family in both} == {
        (True, "aligned_slo"),
        (False, "oracle"),
    }


def test_a_worker_that_one_machine_does_not_hold_has_stages() -> None:
    families = families_of(Choices((Offer("a100-40g", 16),), (UNION,)))
    (own,) = [one for one in families if one.members[0].pipeline_parallel > 1]
    assert [member.label for member in own.members] == ["16 x a100-40g, 1 elastic of 16 each in 2 stages, aligned_slo"]
    assert not own.can_be_served  # stages are processes of CPUs


def test_costs_are_prices_and_limit_the_plans() -> None:
    choices = Choices((Offer("h100", 4, 2.5),), (UNION,), topologies=(Topology.ELASTIC,), degrees=(1,), max_cost=5.0)
    (family,) = families_of(choices)
    assert [member.cost for member in family.members] == [2.5, 5.0]


def test_a_topology_that_the_policy_forbids_is_refused() -> None:
    distserve = PolicyChoice("distserve", "distserve", {})
    with pytest.raises(ConfigError, match="'distserve' is for disaggregated workers, not for elastic ones"):
        families_of(Choices((Offer("h100", 4),), (distserve,), topologies=(Topology.ELASTIC,)))
    with pytest.raises(ConfigError, match="no plan is possible for 1 per hour"):
        families_of(Choices((Offer("h100", 4, 2.0),), (UNION,), max_cost=1.0))
