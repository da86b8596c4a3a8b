"""Simulations that the options of `alignedserve simulate` ask for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import fsum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from alignedserve.config.environment import data_dir
from alignedserve.config.loading import load_config
from alignedserve.config.sections import ClusterConfig, ScalingConfig, Topology
from alignedserve.config.unset_sizes import with_fixed_sizes
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.model import AttentionKernel
from alignedserve.scheduling.factory import require_effect, topology_of
from alignedserve.scheduling.policies import PolicyEntry, policy_entry
from lab.commands.simulation.options import SimulateOptions
from lab.costmodel.choice import FITTED, WorkerSpec, attention_kernel
from lab.costmodel.profile_file import MachineProfile, read_profile
from lab.sim.config import SimConfig, SimRouters
from lab.sim.policies import ClusterHardware, simulated_policy, with_policy
from lab.sim.sweep import Case, WorkloadLine
from lab.workload.grammar import parse_classes
from lab.workload.rates import as_recorded, at_rate, require_feasible
from lab.workload.requests import Workload

DEFAULT_WORKLOAD = "azure_conv, arrivals=recorded, ttft=1, tpot=0.1"
DEFAULT_POLICIES = ("aligned", "aligned_slo", "fcfs", "sarathi")
DEFAULT_RATES = (2.0, 3.0, 4.0, 6.0)
DEFAULT_DURATION_S = 60.0  # of the default workload; others are as long as they are
DEFAULT_MODEL, DEFAULT_HARDWARE = "llama-2-13b", "a100-80g"
# What a server of such accelerators has, where no configuration file says otherwise.
SERVER_SIZES = (
    "pool.memory_bytes=64GiB",
    "prefill.max_num_batched_tokens=2048",
    "prefill.max_running_requests=64",
    "decode.max_running_requests=256",
    "decode.max_num_batched_tokens=2048",
    "decode.swap_space_bytes=16GiB",
)
_SAID_ELSEWHERE = {
    "scheduling.policy": "--policy",
    "scheduling.policy_params": "--policy",
    "prefill.count": "--prefill",
    "decode.count": "--decode or --workers",
}
_FOLLOWS = (
    "decode.kv_cache_bytes",
    "prefill.kv_cache_bytes",
    "prefill.candidate_buffer_bytes",
)  # from model and hardware


class Variant(NamedTuple):
    """A policy with parameters, as the command line names it."""

    label: str
    name: str
    settings: Mapping[str, Any]


class _RatedWorkload(NamedTuple):
    rate: float  # requests per second that come
    line: WorkloadLine
    workload: Workload

    @property
    def ends_s(self) -> float:
        """Return the time of the last arrival.

        0 where only closed loops send and nothing but their number ends them.
        """
        return self.workload.ends_s or (self.workload.requests[-1].arrival_s if self.workload.requests else 0.0)


class PlannedCase(NamedTuple):
    """A simulation, and the names that it goes by in the report."""

    policy: str
    rate: float
    case: Case
    ends_s: float  # of arrivals; 0 where nothing but their number ends them


def plan_cases(options: SimulateOptions) -> list[PlannedCase]:
    """Plan every policy at every rate. Raises ConfigError for whatever could never run."""
    if options.num_nodes is not None and options.num_pools != 1:
        raise ConfigError("--nodes gives each node its own workers, --pools shares them out: choose one")
    cluster = _cluster(options)
    machines = machines_of(
        options.costs, options.model, options.hardware, cluster.engine.tensor_parallel, options.kernel
    )
    variants = [parse_variant(text) for text in options.policies] or _default_variants(options, cluster)
    configs = [_configured(options, cluster, machines, variant) for variant in variants]
    _require_separate(options, cluster.topology, configs)
    traffics = _traffics(options)
    for traffic, config in product(traffics, configs):
        require_feasible(traffic.workload, max_context_len=config.context_len, memory_tokens=config.memory_tokens)
    planned = [
        PlannedCase(label, traffic.rate, Case(f"{label} at {traffic.rate:g}/s", config, traffic.line), traffic.ends_s)
        for (label, config), traffic in product(zip((way.label for way in variants), configs, strict=True), traffics)
    ]
    if len({planned_case.case.name for planned_case in planned}) < len(planned):
        raise ConfigError("a policy or a rate was named twice")
    return planned


def _cluster(options: SimulateOptions) -> ClusterConfig:
    """Load the user's configuration, or one of the size of a server; other options set the worker counts.

    Its topology is that with which it would be served; None: no file, so that each policy has its own. Raises
    ConfigError for what would change nothing.
    """
    for override in options.overrides:
        field = override.partition("=")[0].strip()
        for name, elsewhere in _SAID_ELSEWHERE.items():
            if field == name or field.startswith(f"{name}."):
                raise ConfigError(f"--set {field}: here {elsewhere} says that")
        if field in _FOLLOWS and not options.costs.startswith(FITTED):
            raise ConfigError(f"--set {field}: memory follows from --model, --hardware and --tensor-parallel")
    config = load_config(options.config, options.overrides)
    if config.topology is not None:
        require_effect(config)
    sizes = () if options.config is not None else SERVER_SIZES
    cluster = load_config(options.config, (*sizes, *options.overrides))
    for name in ScalingConfig.__struct_fields__:
        if getattr(cluster.scaling, name) != getattr(ScalingConfig(), name):
            raise ConfigError(f"scaling.{name}: nodes that come and go are not simulated; see --nodes")
    if options.config is not None:
        cluster = msgspec.structs.replace(cluster, topology=topology_of(cluster))
    return with_fixed_sizes(with_degree(cluster, options.tensor_parallel))


def with_degree(cluster: ClusterConfig, asked: int | None = None) -> ClusterConfig:
    """Return the cluster with so many accelerators a worker; None: as many as it says itself.

    Raises ConfigError for a contradiction, and for workers that are divided otherwise.
    """
    engine = cluster.engine
    for name in ("pipeline_parallel", "expert_parallel"):
        if getattr(engine, name) > 1:
            raise ConfigError(f"engine.{name}: simulated workers are tensor-parallel alone; leave it at 1")
    if asked not in (None, engine.tensor_parallel) and engine.tensor_parallel > 1:
        raise ConfigError(f"--tensor-parallel {asked}: engine.tensor_parallel says {engine.tensor_parallel}")
    degree = asked or engine.tensor_parallel
    return msgspec.structs.replace(cluster, engine=msgspec.structs.replace(engine, tensor_parallel=degree))


def _default_variants(options: SimulateOptions, cluster: ClusterConfig) -> list[Variant]:
    if options.config is None:
        return [parse_variant(name) for name in DEFAULT_POLICIES]
    scheduling = cluster.scheduling
    return [Variant(scheduling.policy, scheduling.policy, scheduling.policy_params)]


def parse_variant(text: str) -> Variant:
    """Parse `alise`, or with parameters `alise:num_levels=4,preemption=recompute`. Raises ConfigError."""
    name, _, given = text.partition(":")
    settings: dict[str, Any] = {}
    for setting in given.split(",") if given else []:
        key, separator, value = setting.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"--policy {text!r}: write NAME:parameter=value,parameter=value")
        try:
            settings[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ConfigError(f"--policy {text!r}: {value!r} is not a value") from None
    return Variant(text, name.strip(), settings)


def _configured(
    options: SimulateOptions, cluster: ClusterConfig, machines: ClusterHardware | MachineProfile, variant: Variant
) -> SimConfig:
    chosen = with_policy(
        cluster, variant.name, variant.settings, topology=_topology(options, cluster, policy_entry(variant.name))
    )
    chosen = _sized(options, chosen, cluster.topology)
    config = simulated_policy(machines, chosen)
    return replace(
        config,
        num_pools=options.num_nodes or options.num_pools,
        routers=SimRouters(options.num_routers, options.router_us * 1e-6),
        seed=options.seed,
        timeline_of=config.decode_name(0),
    )


def _require_separate(options: SimulateOptions, given: Topology | None, configs: Sequence[SimConfig]) -> None:
    if options.num_prefill is None or any(config.cluster.chosen_topology.is_separate for config in configs):
        return
    if options.num_workers is not None or (given is not None and not given.is_separate):
        raise ConfigError(f"--prefill {options.num_prefill}: no policy has separate workers here; see --workers")


def _topology(options: SimulateOptions, cluster: ClusterConfig, entry: PolicyEntry) -> Topology | None:
    is_named = any(text.partition("=")[0].strip() == "topology" for text in options.overrides)
    is_served = options.config is not None and not options.policies
    topology = cluster.topology if is_named or is_served else None
    if options.num_workers is not None and options.num_prefill is None and options.num_decode is None:
        together = (topology, *entry.topologies, Topology.COLOCATED)  # the last one is refused, saying why
        return next(topology for topology in together if topology is not None and not topology.is_separate)
    return topology


def _sized(options: SimulateOptions, cluster: ClusterConfig, topology: Topology | None) -> ClusterConfig:
    """Return the cluster with as many workers as asked for.

    Where separate ones were `given`, those that do both phases are as many as both kinds.
    """
    changed = msgspec.structs.replace
    num_prefill = options.num_prefill or cluster.prefill.count
    num_decode = options.num_decode or cluster.decode.count
    if not cluster.chosen_topology.is_separate:
        num_together = num_prefill + num_decode if topology is None or topology.is_separate else num_decode
        num_decode = options.num_workers or num_together
    num_alike = options.num_nodes or 1
    return changed(
        cluster,
        prefill=changed(cluster.prefill, count=num_prefill * num_alike),
        decode=changed(cluster.decode, count=num_decode * num_alike),
    )


def machines_of(
    costs: str,
    model: str | None,
    hardware: str | None,
    degree: int,
    kernel: str = AttentionKernel.LOAD_BALANCED.value,
) -> ClusterHardware | MachineProfile:
    """Return what the workers are: a profiled machine, or `degree` accelerators each. Raises ConfigError."""
    if costs.startswith(FITTED):
        if (model, hardware, degree, kernel) != (None, None, 1, AttentionKernel.LOAD_BALANCED.value):
            raise ConfigError(f"--costs {costs} says itself which model on which machine")
        return read_profile(Path(costs.removeprefix(FITTED)))
    worker = WorkerSpec(model or DEFAULT_MODEL, hardware or DEFAULT_HARDWARE, degree, attention_kernel(kernel))
    return ClusterHardware(worker, source=costs)


def _traffics(options: SimulateOptions) -> list[_RatedWorkload]:
    rates = [_rate(text) for entry in options.rates for text in entry.split(",")]
    if options.workload is None:
        rates = rates or list(DEFAULT_RATES)
    workload = as_recorded(options.workload or DEFAULT_WORKLOAD)
    return [_traffic(options, at_rate(workload, rate), rate) for rate in rates] or [_traffic(options, workload, None)]


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.0 < rate <= 1e6:
        raise ConfigError(f"--rate {text!r} is not a number of requests per second")
    return rate


def _traffic(options: SimulateOptions, text: str, rate: float | None) -> _RatedWorkload:
    duration_s = DEFAULT_DURATION_S if options.workload is None else None
    line = WorkloadLine(text, options.seed, duration_s=options.duration_s or duration_s, data_dir=data_dir())
    traffic = _RatedWorkload(rate or 0.0, line, line.build())
    if not (traffic.workload.requests or traffic.workload.closed_loops):
        raise ConfigError(f"workload {text!r}: no request comes; see --duration and rate=")
    return traffic if rate is not None else traffic._replace(rate=_own_rate(traffic))


def _own_rate(traffic: _RatedWorkload) -> float:
    rates = [spec.rate for spec in parse_classes(traffic.line.line) if not spec.is_closed]
    known = [rate for rate in rates if rate is not None]
    if len(known) == len(rates):
        return fsum(known)
    arrivals_s = [request.arrival_s for request in traffic.workload.requests]
    span_s = arrivals_s[-1] - arrivals_s[0] if arrivals_s else 0.0
    return float(f"{(len(arrivals_s) - 1) / span_s:.3g}") if span_s else 0.0
