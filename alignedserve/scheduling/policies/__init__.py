"""Registry of scheduling policies by name, with the settings that they imply in other components.

A policy is one file: its config, and up to four steps on a `Packer`. `rank` orders the requests, `budget` bounds the
iteration, `fill` adds requests in that order while the budget lasts, and `evict` makes room where blocks lack.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

import msgspec

from alignedserve.config.sections import SchedulingConfig, Topology
from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.checked_policy import CheckedPolicy
from alignedserve.scheduling.policies.accelgen import Accelgen, AccelgenConfig
from alignedserve.scheduling.policies.aligned import AlignedConfig, RunAllRequests
from alignedserve.scheduling.policies.aligned_slo import AlignedSlo, AlignedSloConfig
from alignedserve.scheduling.policies.alise import Alise, AliseConfig
from alignedserve.scheduling.policies.apt_serve import AptServe, AptServeChunked, AptServeConfig
from alignedserve.scheduling.policies.bros import Bros, BrosConfig
from alignedserve.scheduling.policies.fcfs import Fcfs, FcfsConfig
from alignedserve.scheduling.policy import CandidateChoice, IterationPolicy, Mechanism

COLOCATED = (Topology.COLOCATED, Topology.ELASTIC)
BOTH = (*COLOCATED, Topology.DISAGGREGATED)
DISAGGREGATED = (Topology.DISAGGREGATED,)
_GROUP = "alignedserve.policies"  # of entry points


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One named policy for the whole system."""

    summary: str  # one line for `--help` and the docs
    config: type[Any]  # frozen dataclass, the paper's values as defaults
    make: Callable[[Any], IterationPolicy]  # from such a config; one instance per worker
    topologies: tuple[Topology, ...] = COLOCATED  # the first one is its own
    needs: frozenset[Mechanism] = frozenset()  # refused where the engine has not all of these
    uses: frozenset[Mechanism] = frozenset()  # used where the engine has them
    needed_by: str | None = None  # the parameter that, set to false, makes `needs` unnecessary
    prefill_order: str = "fcfs"  # in the router (router/policies.py)
    batching: str = "fcfs"  # in the pool (kvpool/policies), disaggregated only
    schedules_iterations: bool = False  # disaggregated: it decides the iterations of decode workers too
    has_prompt_order: bool = True  # and those of prefill workers, where it decides those; else prompts go in order
    batching_settings: tuple[str, ...] = ()  # of its parameters, those that are the `batching` section's
    admission_share: str | None = None  # disaggregated: the parameter with the share of a TPOT objective that an
    # iteration may take, so that decode workers admit no more; None: they admit what their memory holds
    candidate_choice: CandidateChoice = CandidateChoice.NONE  # disaggregated
    is_direct: bool = False  # disaggregated: a prefill goes straight to a decode worker, not through the pool
    is_trusted: bool = False  # though of another package: no plan is checked
    yields: bool = False  # its passes stop between layers for prompts that somebody waits for, unless set otherwise

    @property
    def topology_together(self) -> Topology | None:
        """Return the first of its topologies whose workers do both phases; None: it needs separate ones."""
        return next((topology for topology in self.topologies if not topology.is_separate), None)

    @property
    def schedules_prompts(self) -> bool:
        """True if it decides the iterations of prefill workers."""
        return self.schedules_iterations and self.has_prompt_order

    def needs_with(self, config: Any) -> frozenset[Mechanism]:
        """Return the mechanisms needed with these parameters (an instance of `self.config`)."""
        is_needed = self.needed_by is None or getattr(config, self.needed_by)
        return self.needs if is_needed else frozenset()


POLICIES: Mapping[str, PolicyEntry] = MappingProxyType(
    {
        "accelgen": PolicyEntry(
            "token budgets and urgency by iteration-level SLOs, both resources filled (AccelGen)",
            AccelgenConfig,
            Accelgen,
            BOTH,
            prefill_order="least_slack",
            schedules_iterations=True,
        ),
        "aligned": PolicyEntry(
            "decode batches of similar context length, formed in a quad-tree (AlignedServe)",
            AlignedConfig,
            RunAllRequests,
            DISAGGREGATED,
            batching="density_first",
            batching_settings=("min_requests", "max_block_share", "starvation_s", "pack_share"),
        ),
        "aligned_slo": PolicyEntry(
            "objectives as constraints, throughput with what is left (ideas of BROS, AccelGen, Apt-Serve, QoServe)",
            AlignedSloConfig,
            AlignedSlo,
            (Topology.ELASTIC, Topology.COLOCATED, Topology.DISAGGREGATED),
            uses=frozenset({Mechanism.SWAP, Mechanism.POOL}),
            prefill_order="least_slack",
            batching="density_first",
            candidate_choice=CandidateChoice.OVER_BEST_EFFORT,
            schedules_iterations=True,
            admission_share="slack_share",
            yields=True,
        ),
        "alise": PolicyEntry(
            "least predicted remaining time first, swapping as int8 (ALISE)",
            AliseConfig,
            Alise,
            BOTH,
            candidate_choice=CandidateChoice.ALL,
            schedules_iterations=True,
            uses=frozenset({Mechanism.SWAP, Mechanism.INT8_SWAP}),
        ),
        "apt_serve": PolicyEntry(
            "most pending time per block, hidden caches where blocks are short (Apt-Serve)",
            AptServeConfig,
            AptServe,
            BOTH,
            schedules_iterations=True,
            has_prompt_order=False,
            needs=frozenset({Mechanism.HIDDEN_CACHE}),
            needed_by="hybrid_cache",
        ),
        "apt_serve_chunked": PolicyEntry(
            "the same with prompts in chunks beside decodes (Apt-Serve-S)",
            AptServeConfig,
            AptServeChunked,
            BOTH,
            schedules_iterations=True,
            has_prompt_order=False,
            needs=frozenset({Mechanism.HIDDEN_CACHE}),
            needed_by="hybrid_cache",
        ),
        "bros": PolicyEntry(
            "real-time requests by residual time, best-effort ones in what that leaves (BROS)",
            BrosConfig,
            Bros,
            BOTH,
            uses=frozenset({Mechanism.SWAP, Mechanism.SHARED_BLOCKS}),
            prefill_order="least_slack",
            candidate_choice=CandidateChoice.OVER_BEST_EFFORT,
            schedules_iterations=True,
        ),
        "fcfs": PolicyEntry(
            "first come, first served, prompts first (vLLM)",
            FcfsConfig,
            Fcfs,
            BOTH,
            uses=frozenset({Mechanism.SWAP}),
        ),
    }
)


@cache
def all_policies() -> Mapping[str, PolicyEntry]:
    """Return the policies here and those that installed packages offer under the entry point group.

    Each entry point is a mapping of names to entries; a name that stands here already stays.
    """
    offered = [point.load() for point in entry_points(group=_GROUP)]
    return MappingProxyType({name: entry for mapping in (*offered, POLICIES) for name, entry in mapping.items()})


def policy_entry(name: str) -> PolicyEntry:
    """Return the entry of this policy. Raises ConfigError listing the valid names."""
    known = POLICIES if name in POLICIES else all_policies()
    if name not in known:
        hint = "; pip install alignedserve[lab] brings the baselines" if len(known) == len(POLICIES) else ""
        raise ConfigError(f"unknown policy {name!r}; known: {', '.join(sorted(known))}{hint}")
    return known[name]


def policy_config(name: str, settings: Mapping[str, Any] | None = None) -> Any:
    """Return the policy's parameters, with these changed. Raises ConfigError naming the parameter."""
    entry = policy_entry(name)
    known = [field.name for field in fields(entry.config)]
    for name_given in settings or {}:
        if name_given not in known:
            raise ConfigError(f"policy {name!r} has no parameter {name_given!r}; known: {', '.join(known) or 'none'}")
    try:
        return msgspec.convert(dict(settings or {}), entry.config)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {name!r}: {error}") from error


def make_policy(name: str, settings: Mapping[str, Any] | None = None) -> IterationPolicy:
    """Build an instance, with these of its parameters changed. Raises ConfigError naming the parameter.

    Plans of a policy from another package are checked.
    """
    entry = policy_entry(name)
    policy = entry.make(policy_config(name, settings))
    return policy if name in POLICIES or entry.is_trusted else CheckedPolicy(name, policy)


def wanted_mechanisms(scheduling: SchedulingConfig) -> frozenset[Mechanism]:
    """Return the mechanisms that the policy needs or uses. Raises ConfigError as `policy_config` does."""
    entry, config = policy_entry(scheduling.policy), policy_config(scheduling.policy, scheduling.policy_params)
    return entry.needs_with(config) | entry.uses


def wants_shared_blocks(scheduling: SchedulingConfig, *, can_move: bool, has_int8_swaps: bool) -> bool:
    """Return whether two requests are to share blocks of a worker where the policy decides on both phases.

    Not where requests move to other workers in whole blocks, or are rounded by whole blocks on the host.
    """
    if Mechanism.SHARED_BLOCKS not in wanted_mechanisms(scheduling) or can_move or has_int8_swaps:
        return False
    return bool(getattr(policy_config(scheduling.policy, scheduling.policy_params), "share_blocks", True))


def require_policy(scheduling: SchedulingConfig, topology: Topology, available: frozenset[Mechanism]) -> None:
    """Raise ConfigError if the policy or a parameter is unknown, or cannot work with these workers."""
    name = scheduling.policy
    entry, parameters = policy_entry(name), policy_config(name, scheduling.policy_params)
    if topology not in entry.topologies:
        able = " or ".join(item.value for item in entry.topologies)
        raise ConfigError(f"policy {name!r} is for {able} workers; set topology={entry.topologies[0].value}")
    missing = entry.needs_with(parameters) - available
    if missing:
        wanted = ", ".join(sorted(item.value for item in missing))
        raise ConfigError(f"policy {name!r} needs what these workers do not have: {wanted} (a simulated engine can)")
