"""The plans that are considered: workers of one kind, their degree of parallelism, topology and policy.

A family is a row of plans that differ in one number of workers; more of them never hold less. Bisection therefore finds
the cheapest plan that holds the objectives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from alignedserve.config.sections import Topology
from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import policy_config, policy_entry
from alignedserve.scheduling.policy import Mechanism
from lab.planning.hardware_list import Offer

MAX_DEGREE = 8  # accelerators of one worker, or of each of its stages: those of one machine
MAX_STAGES = 8


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A policy with parameters, and its name in reports."""

    label: str
    name: str
    params: Mapping[str, Any]

    @property
    def can_be_served(self) -> bool:
        """Return whether a live system can have it: no server knows lengths."""
        return Mechanism.KNOWN_LENGTHS not in policy_entry(self.name).needs_with(policy_config(self.name, self.params))

    def topologies(self) -> tuple[Topology, ...]:
        topologies = policy_entry(self.name).topologies
        return tuple(topology for topology in Topology if topology in topologies)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan: a number of workers of a kind, under a policy."""

    offer: Offer
    tensor_parallel: int
    topology: Topology
    num_prefill: int  # 0: workers do both phases
    num_decode: int
    policy: PolicyChoice
    pipeline_parallel: int = 1  # machines of a worker, with layers of their own
    expert_parallel: int = 1  # processes of a worker that share its experts, each on what one worker was measured on

    @property
    def worker_size(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.expert_parallel

    @property
    def num_accelerators(self) -> int:
        return (self.num_prefill + self.num_decode) * self.worker_size

    @property
    def cost(self) -> float:
        """Return the price per hour, or the number of accelerators where there are no prices."""
        price = self.offer.price_per_hour
        return float(self.num_accelerators) if price is None else self.num_accelerators * price

    @property
    def can_be_served(self) -> bool:
        return self.policy.can_be_served and self.pipeline_parallel == 1

    @property
    def shape(self) -> str:
        degree = f" of {self.worker_size} each" if self.worker_size > 1 else ""
        degree += f" in {self.pipeline_parallel} stages" if self.pipeline_parallel > 1 else ""
        degree += ", which share experts" if self.expert_parallel > 1 else ""
        if self.topology.is_separate:
            return f"{self.num_prefill} prefill + {self.num_decode} decode{degree}"
        return f"{self.num_decode} {self.topology.value}{degree}"

    @property
    def label(self) -> str:
        return f"{self.num_accelerators} x {self.offer.label}, {self.shape}, {self.policy.label}"


@dataclass(frozen=True, slots=True)
class Family:
    """Plans by their number of workers, the cheapest first; a later one holds at least what an earlier one does."""

    name: str
    members: tuple[Candidate, ...]

    @property
    def can_be_served(self) -> bool:
        return self.members[0].can_be_served


@dataclass(frozen=True, slots=True)
class Choices:
    """Parts that a plan may consist of."""

    offers: Sequence[Offer]
    policies: Sequence[PolicyChoice]
    topologies: Sequence[Topology] = tuple(Topology)
    degrees: Sequence[int] | None = None  # of tensor parallelism; None: powers of two as far as there are accelerators
    max_cost: float | None = None
    expert_degrees: Mapping[str, Sequence[int]] = field(default_factory=dict)  # processes that share experts, by offer


def families_of(choices: Choices) -> list[Family]:
    """Return all families. Raises ConfigError where nothing is left."""
    for policy in choices.policies:
        if not set(policy.topologies()) & set(choices.topologies):
            able = " or ".join(topology.value for topology in policy.topologies())
            wanted = " or ".join(topology.value for topology in choices.topologies)
            raise ConfigError(f"policy {policy.name!r} is for {able} workers, not for {wanted} ones")
    rows = [
        row
        for offer in choices.offers
        for degree in _degrees(offer, choices)
        for policy in choices.policies
        for topology in (Topology.ELASTIC, Topology.COLOCATED, Topology.DISAGGREGATED)
        if topology in choices.topologies and topology in policy.topologies()
        for row in _rows(offer, degree, topology, policy, has_elastic=Topology.ELASTIC in choices.topologies)
    ]
    affordable = (_affordable(row, choices.max_cost) for row in rows)
    families = [Family(_name(row[0]), row) for row in affordable if row]
    if not families:
        limit = "" if choices.max_cost is None else f" for {choices.max_cost:g} per hour"
        raise ConfigError(
            f"no plan is possible{limit}: see --hardware, --tensor-parallel, --expert-parallel, --topology and "
            "--max-cost"
        )
    return families


class _Degree(NamedTuple):
    tensor: int
    stages: int = 1
    shares: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.stages * self.shares


def _degrees(offer: Offer, choices: Choices) -> list[_Degree]:
    asked = choices.degrees
    if offer.is_profiled:
        shares = [
            _Degree(1, 1, size)
            for size in sorted(set(choices.expert_degrees.get(offer.name, (1,))))
            if size <= offer.count
        ]
        return shares if asked is None or 1 in asked else []
    if asked is not None:
        return [_Degree(degree) for degree in sorted(set(asked)) if degree <= min(offer.count, MAX_DEGREE)]
    degrees = [_Degree(1 << power) for power in range(MAX_DEGREE.bit_length())]
    degrees += [_Degree(MAX_DEGREE, 1 << power) for power in range(1, MAX_STAGES.bit_length())]
    return [degree for degree in degrees if degree.size <= offer.count]


def _rows(
    offer: Offer, degree: _Degree, topology: Topology, policy: PolicyChoice, *, has_elastic: bool
) -> Iterator[tuple[Candidate, ...]]:
    most, tensor = offer.count // degree.size, degree.tensor
    inside = (degree.stages, degree.shares)
    if topology.is_separate:
        if degree.stages > 1:  # which hand no blocks over
            return
        for num_prefill in range(1, most):
            counts = range(1, most - num_prefill + 1)
            yield tuple(Candidate(offer, tensor, topology, num_prefill, count, policy, *inside) for count in counts)
        return
    # A single elastic worker is a colocated one.
    least = 2 if topology is Topology.COLOCATED and has_elastic else 1
    counts = range(least, most + 1)
    yield tuple(Candidate(offer, tensor, topology, 0, count, policy, *inside) for count in counts)


def _affordable(row: tuple[Candidate, ...], max_cost: float | None) -> tuple[Candidate, ...]:
    return (
        row if max_cost is None else tuple(candidate for candidate in row if candidate.cost <= max_cost * (1.0 + 1e-9))
    )


def _name(first: Candidate) -> str:
    prefill = f"{first.num_prefill} prefill, " if first.topology.is_separate else ""
    degree = f", {first.worker_size} each" if first.worker_size > 1 else ""
    return f"{first.offer.label}{degree}: {prefill}{first.topology.value}, {first.policy.label}"
