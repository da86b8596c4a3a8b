"""No decision depends on how long answers will be: with other lengths from a moment on, all before it are the same."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from alignedserve.config.sections import Topology
from alignedserve.scheduling.policies import all_policies, policy_entry
from alignedserve.scheduling.policy import Mechanism
from lab.sim.config import SimConfig, SimMechanisms
from lab.sim.policies import with_policy
from lab.sim.simulation import Simulation
from lab.workload.build import build_workload
from lab.workload.catalogue import Library
from lab.workload.requests import RequestSource, TimedRequest, Workload
from tests.harnesses.simulation import BLOCK_BYTES, colocated, disaggregated

LINE = (
    "rt: prompt=uniform(1,400), output=skewed(20,20), max_output=200, rate=8, ttft=0.5, tpot=0.1; "
    "be: prompt=uniform(50,300), output=uniform(5,60), outstanding=4, deadline=60"
)
LIBRARY = Library()
MOMENT_S = 4.0  # of the run
FORESEES = {name for name, entry in all_policies().items() if Mechanism.KNOWN_LENGTHS in entry.needs}
ALWAYS = (("aligned_slo", Topology.COLOCATED), ("aligned_slo", Topology.DISAGGREGATED), ("alise", Topology.COLOCATED))
# Elastic workers decide as colocated ones do, and the router moves requests: the default policy is enough of those.
OTHERS = [
    (name, one)
    for name, entry in all_policies().items()
    if name not in FORESEES
    for one in entry.topologies
    if one is not Topology.ELASTIC or one is entry.topologies[0]
]

Place = tuple[str, int]  # class of a request, and its number there
Change = Callable[[TimedRequest, int], TimedRequest]  # to a length of the answer


def with_length(timed: TimedRequest, output_len: int) -> TimedRequest:
    return replace(timed, output_len=output_len)


def with_length_told(timed: TimedRequest, output_len: int) -> TimedRequest:
    return replace(timed, output_len=output_len, max_tokens=output_len)


@dataclass(frozen=True)
class ChangedStream:
    """A closed loop's requests with other lengths."""

    name: str
    stream: RequestSource
    lengths: Mapping[Place, int]
    change: Change

    def __getitem__(self, number: int) -> TimedRequest:
        timed = self.stream[number]
        return self.change(timed, self.lengths.get((self.name, number), timed.output_len))


def by_place(requests: Iterable[Any]) -> Iterator[tuple[Place, Any]]:
    """Return requests or their records, each with its number in its class."""
    counts: dict[str, int] = {}
    for request in requests:
        place = counts.setdefault(request.class_name, 0)
        counts[request.class_name] = place + 1
        yield (request.class_name, place), request


def changed(workload: Workload, lengths: Mapping[Place, int], change: Change) -> Workload:
    """Return the workload with these lengths of answers, the others as they are."""
    requests = [change(timed, lengths.get(place, timed.output_len)) for place, timed in by_place(workload.requests)]
    loops = [
        replace(loop, stream=ChangedStream(loop.class_name, loop.stream, lengths, change))
        for loop in workload.closed_loops
    ]
    return replace(workload, requests=tuple(requests), closed_loops=tuple(loops))


class Watched:
    """A logic whose decisions are noted."""

    def __init__(self, name: str, logic: Any, decisions: list[tuple[str, float, str]]) -> None:
        self._name, self._logic, self._decisions = name, logic, decisions

    def on_event(self, event: Any, now: float) -> Any:
        commands = self._logic.on_event(event, now)
        self._decisions.append((self._name, now, repr(commands)))
        return commands


class Run:
    """Everything up to the moment: decisions, and the tokens of each request."""

    def __init__(self, config: SimConfig, workload: Workload) -> None:
        self.decisions: list[tuple[str, float, str]] = []
        simulation = Simulation(replace(config, duration_s=MOMENT_S), workload)
        for component in simulation._components:
            component.logic = Watched(component.name, component.logic, self.decisions)
        simulation.run()
        records = sorted(simulation._gateway.records, key=lambda record: record.number)
        self.num_tokens = {place: record.num_tokens for place, record in by_place(records)}


def config_of(policy: str, topology: Topology) -> SimConfig:
    """Configure short memory, and every mechanism that the policy can use."""
    one_kind = colocated(2 if topology is Topology.ELASTIC else 1, worker_blocks=90)
    config = disaggregated(worker_blocks=90, buffer_blocks=40) if topology.is_separate else one_kind
    cluster = with_policy(config.cluster, policy, topology=topology)
    wanted = policy_entry(policy).needs | policy_entry(policy).uses
    host_bytes = 400 * BLOCK_BYTES if Mechanism.SWAP in wanted else 0
    decode = msgspec.structs.replace(cluster.decode, swap_space_bytes=host_bytes)
    mechanisms = SimMechanisms(0.5 if Mechanism.HIDDEN_CACHE in wanted else None, Mechanism.SHARED_BLOCKS in wanted)
    return replace(config, cluster=msgspec.structs.replace(cluster, decode=decode), mechanisms=mechanisms)


def two_futures(config: SimConfig, change: Change, seed: int = 0) -> tuple[Run, Run]:
    """Return two runs whose answers have what came before the moment in common, and nothing else."""
    workload = changed(build_workload(LINE, seed=seed, library=LIBRARY, duration_s=MOMENT_S), {}, change)
    streams = {loop.class_name: loop.stream for loop in workload.closed_loops}
    lengths = {place: timed.output_len for place, timed in by_place(workload.requests)}
    first = Run(config, workload)
    rng = random.Random(seed)
    for place, num_tokens in first.num_tokens.items():
        name, number = place
        output_len = lengths[place] if name not in streams else streams[name][number].output_len
        lengths[place] = output_len if num_tokens == output_len else num_tokens + 1 + rng.randrange(150)
    return first, Run(config, changed(workload, lengths, change))


@pytest.mark.parametrize(
    ("policy", "topology"),
    [*ALWAYS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS if one not in ALWAYS)],
)
def test_decisions_do_not_depend_on_what_is_still_to_come(policy: str, topology: Topology) -> None:
    first, other = two_futures(config_of(policy, topology), with_length)
    assert len(first.decisions) > 100
    assert first.decisions == other.decisions


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("topology", policy_entry("aligned_slo").topologies)
def test_nor_with_other_workloads(topology: Topology, seed: int) -> None:
    first, other = two_futures(config_of("aligned_slo", topology), with_length, seed)
    assert first.decisions == other.decisions


def test_limits_that_are_lengths_are_found_out_by_this_comparison() -> None:
    first, other = two_futures(config_of("aligned_slo", Topology.COLOCATED), with_length_told)
    assert first.decisions != other.decisions
