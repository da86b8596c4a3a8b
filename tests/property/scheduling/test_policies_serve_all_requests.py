"""Every policy over random histories: each request ends exactly once, no plan is unsound, nothing is leaked."""

from dataclasses import replace

import pytest

from alignedserve.config.sections import Topology
from alignedserve.scheduling.policies import all_policies, make_policy, policy_entry
from alignedserve.scheduling.policy import DeviceMemory, IterationLimits, Mechanism
from tests.harnesses.policy_run import Arrival, PolicyRun, random_arrivals
from tests.support.marks import slow

COLOCATED = [name for name, entry in all_policies().items() if Topology.COLOCATED in entry.topologies]
SEEDS = (0, *slow(1, 2))
_PLENTY = DeviceMemory(2000, 2000, 16)
_SCARCE = DeviceMemory(30, 30, 16)


def _memory(name: str, memory: DeviceMemory) -> DeviceMemory:
    """Return a memory with whatever the policy can make use of."""
    entry = policy_entry(name)
    mechanisms = entry.needs | entry.uses
    return replace(
        memory,
        num_free_host=300 if Mechanism.SWAP in mechanisms else 0,
        hidden_ratio=0.5 if Mechanism.HIDDEN_CACHE in mechanisms else None,
        has_shared_blocks=Mechanism.SHARED_BLOCKS in mechanisms,
    )


def _arrivals(name: str, seed: int, count: int) -> list[Arrival]:
    arrivals = random_arrivals(seed, count)
    if Mechanism.KNOWN_LENGTHS in policy_entry(name).needs:
        arrivals = [Arrival(one.request, one.output_len, float(one.output_len)) for one in arrivals]
    return arrivals


@pytest.mark.parametrize("memory", [_PLENTY, _SCARCE], ids=["plenty", "scarce"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", COLOCATED)
def test_every_request_ends_exactly_once(name: str, seed: int, memory: DeviceMemory) -> None:
    arrivals = _arrivals(name, seed, 20)
    courses = PolicyRun(make_policy(name), _memory(name, memory)).run(arrivals)
    assert {request_id: len(course.token_times_s) for request_id, course in courses.items()} == {
        str(one.request.request_id): one.output_len for one in arrivals
    }


@pytest.mark.parametrize("name", COLOCATED)
def test_few_places_and_tokens(name: str) -> None:
    limits = IterationLimits(max_running_requests=2, max_tokens=48)
    courses = PolicyRun(make_policy(name), _memory(name, _SCARCE), limits).run(_arrivals(name, 7, 12))
    assert all(course.token_times_s for course in courses.values())


@pytest.mark.parametrize("name", COLOCATED)
def test_the_same_history_gives_the_same_times(name: str) -> None:
    runs = [PolicyRun(make_policy(name), _memory(name, _SCARCE)) for _ in range(2)]
    arrivals = _arrivals(name, 11, 12)
    assert runs[0].run(arrivals) == runs[1].run(arrivals)
