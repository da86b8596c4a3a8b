"""The list of hardware, and the plans that it allows."""

import pytest

from alignedserve.config.sections import Topology
from alignedserve.core.errors import ConfigError
from lab.planning.candidates import Choices, PolicyChoice, families_of
from lab.planning.hardware_list import Offer, parse_hardware
from tests.support.marks import each

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
