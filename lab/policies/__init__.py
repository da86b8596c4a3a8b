"""Baseline policies, for simulations and comparisons: `alignedserve` finds them by the entry point of its policies."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from alignedserve.scheduling.policies import BOTH, DISAGGREGATED, PolicyEntry
from alignedserve.scheduling.policies.aligned import RunAllRequests
from alignedserve.scheduling.policies.fcfs import FcfsConfig
from alignedserve.scheduling.policy import CandidateChoice, Mechanism
from lab.policies.edf import Edf, EdfConfig
from lab.policies.fastgen import Fastgen, FastgenConfig
from lab.policies.fastserve import FastServe, FastServeConfig
from lab.policies.fcfs_classed import FcfsClassed
from lab.policies.oracle import Oracle, OracleConfig
from lab.policies.orca import Orca, OrcaConfig
from lab.policies.qoserve import QoServe, QoServeConfig
from lab.policies.round_robin import RoundRobin, RoundRobinConfig
from lab.policies.sarathi import Sarathi, SarathiConfig
from lab.policies.srpt import Srpt, SrptConfig


@dataclass(frozen=True, slots=True)
class DistserveConfig:
    """No parameters, as both phases of DistServe's online scheduler are FCFS (its section 4.3)."""


_BASELINES = {
    "distserve": PolicyEntry(
        "prompts and decodes on workers of their own, first come, first served (DistServe)",
        DistserveConfig,
        RunAllRequests,
        DISAGGREGATED,
        is_direct=True,
    ),
    "edf": PolicyEntry(
        "earliest deadline first, prompts in chunks",
        EdfConfig,
        Edf,
        BOTH,
        prefill_order="deadline",
        candidate_choice=CandidateChoice.OVER_BEST_EFFORT,
        schedules_iterations=True,
    ),
    "fastserve": PolicyEntry(
        "feedback queues, joined by prefill time (FastServe)",
        FastServeConfig,
        FastServe,
        BOTH,
        candidate_choice=CandidateChoice.ALL,
        schedules_iterations=True,
        uses=frozenset({Mechanism.SWAP}),
    ),
    "fcfs_classed": PolicyEntry(
        "the same, real-time requests before best-effort ones (vLLM with priorities)",
        FcfsConfig,
        FcfsClassed,
        BOTH,
        uses=frozenset({Mechanism.SWAP}),
        prefill_order="fcfs_classed",
        candidate_choice=CandidateChoice.OVER_BEST_EFFORT,
        schedules_iterations=True,
    ),
    "fastgen": PolicyEntry("passes of one size, short prompts split to fill them", FastgenConfig, Fastgen),
    "oracle": PolicyEntry(
        "reference: as many requests within their SLOs as known lengths allow",
        OracleConfig,
        Oracle,
        needs=frozenset({Mechanism.KNOWN_LENGTHS}),
    ),
    "orca": PolicyEntry("first come, first served by iteration, memory reserved up to the limit", OrcaConfig, Orca),
    "qoserve": PolicyEntry(
        "deadline and remaining work in one priority, late requests last, chunks by slack (QoServe)",
        QoServeConfig,
        QoServe,
        BOTH,
        prefill_order="deadline",
        candidate_choice=CandidateChoice.OVER_BEST_EFFORT,
        schedules_iterations=True,
    ),
    "round_robin": PolicyEntry(
        "an iteration of real-time requests, then one of best-effort ones (BROS's baseline)",
        RoundRobinConfig,
        RoundRobin,
        BOTH,
        schedules_iterations=True,
    ),
    "sarathi": PolicyEntry("decodes first, then prompts in chunks up to a budget", SarathiConfig, Sarathi),
    "sarathi_classed": PolicyEntry(
        "the same, real-time requests before best-effort ones",
        SarathiConfig,
        partial(Sarathi, is_classed=True),
        prefill_order="fcfs_classed",
    ),
    "srpt": PolicyEntry(
        "shortest predicted remaining time first in each class, prompts in chunks",
        SrptConfig,
        Srpt,
        BOTH,
        prefill_order="shortest_prompt",
        candidate_choice=CandidateChoice.OVER_BEST_EFFORT,
        schedules_iterations=True,
    ),
}
POLICIES: Mapping[str, PolicyEntry] = MappingProxyType(
    {name: replace(entry, is_trusted=True) for name, entry in _BASELINES.items()}
)
