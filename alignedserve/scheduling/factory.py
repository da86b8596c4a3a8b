"""Construction of schedulers from the configuration, for live workers and for simulated ones."""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import msgspec

from alignedserve.config.sections import (
    BatchingConfig,
    ClusterConfig,
    DecodeWorkerConfig,
    EngineConfig,
    PrefillWorkerConfig,
    SchedulingConfig,
    Topology,
)
from alignedserve.config.unset_sizes import SIZES, DefaultSize
from alignedserve.core.errors import ConfigError
from alignedserve.costmodel.linear import Sample
from alignedserve.costmodel.model import CostModel, PredictedSpeed, ShownSpeed, speed_of
from alignedserve.costmodel.online import learned_from
from alignedserve.scheduling.iteration_scheduler import (
    FcfsIterationScheduler,
    IterationScheduler,
    PolicyIterationScheduler,
)
from alignedserve.scheduling.policies import make_policy, policy_config, policy_entry, wanted_mechanisms
from alignedserve.scheduling.policy import IterationLimits, Mechanism
from alignedserve.scheduling.scheduler import Scheduler
from alignedserve.scheduling.yielding import YieldConfig, Yielding

_OF_SEPARATE_WORKERS = ("prefill", "pool", "batching")  # sections
_DEFAULTS = {name: getattr(ClusterConfig(), name) for name in _OF_SEPARATE_WORKERS}
_LENT = ("prefill", "candidate_buffer_bytes")  # by elastic workers as well, for moves


def topology_of(config: ClusterConfig) -> Topology:
    """Return the topology that is set, or else the policy's first; separate workers where settings of such are set.

    Raises ConfigError for an unknown policy.
    """
    able = policy_entry(config.scheduling.policy).topologies
    if config.topology is not None:
        return config.topology
    is_separate = Topology.DISAGGREGATED in able and any(field != _LENT for field in _set_fields(config))
    return Topology.DISAGGREGATED if is_separate else able[0]


def require_effect(config: ClusterConfig) -> None:
    """Raise ConfigError naming a setting without effect in this topology. For a configuration as it was loaded."""
    topology, name = topology_of(config), config.scheduling.policy
    entry = policy_entry(name)
    if config.decode.pool_bytes:
        _require_pooling(topology, name)
    if topology.is_separate:
        return
    for section, field in _set_fields(config):
        is_lent = (section, field) == _LENT and topology is Topology.ELASTIC
        is_implied = (section, field) == ("batching", "policy") and config.batching.policy == entry.batching
        if is_lent or is_implied:
            continue
        can_separate = Topology.DISAGGREGATED in entry.topologies
        remedy = ", or set topology=disaggregated" if can_separate else f" (policy {name!r} has no separate ones)"
        raise ConfigError(
            f"{section}.{field} has no effect in {topology.value} workers, which do both phases by the settings of "
            f"decode; leave it out{remedy}"
        )


def _require_pooling(topology: Topology, name: str) -> None:
    if topology.is_separate:
        raise ConfigError(
            "decode.pool_bytes has no effect in separate workers, whose pool is that of pool.memory_bytes"
        )
    if Mechanism.POOL not in policy_entry(name).uses:
        raise ConfigError(f"decode.pool_bytes has no effect with policy {name!r}, which lets no decode wait in a pool")


def _set_fields(config: ClusterConfig) -> list[tuple[str, str]]:
    sizes = _sizes(config)
    is_loaded = any(isinstance(size, DefaultSize) for size in sizes.values())  # else they may all be defaults
    return [
        (name, field)
        for name in _OF_SEPARATE_WORKERS
        for field, default in msgspec.structs.asdict(_DEFAULTS[name]).items()
        if getattr(getattr(config, name), field) != default
        or (is_loaded and (name, field) in sizes and not isinstance(sizes[name, field], DefaultSize))
    ]


def _sizes(config: ClusterConfig) -> dict[tuple[str, str], int]:
    return {(name, field): getattr(getattr(config, name), field) for name, fields in SIZES.items() for field in fields}


_INTERFERENCE = "interference"
_FLOOR = "best_effort_floor"
_PACK_SHARE = "pack_share"
_NOT_YIELDING = frozenset({Mechanism.SHARED_BLOCKS, Mechanism.HIDDEN_CACHE})  # what passes do not stop with
_CLASSED_ORDERS = {"fcfs": "fcfs_classed"}  # of prompts, in the router: by those that know no classes


def params_of(scheduling: SchedulingConfig) -> dict[str, Any]:
    """Return the parameters of the policy, with those that have a setting of their own.

    Raises ConfigError where the policy does not have that.
    """
    params, interference = scheduling.policy_params, scheduling.interference
    if interference is None:
        return params
    if _INTERFERENCE not in {field.name for field in fields(policy_entry(scheduling.policy).config)}:
        raise ConfigError(
            f"scheduling.interference has no effect with policy {scheduling.policy!r}; leave it out, or set "
            "scheduling.policy=aligned_slo"
        )
    if params.get(_INTERFERENCE, interference) != interference:
        raise ConfigError("scheduling.interference and scheduling.policy_params.interference differ; set one of them")
    return {**params, _INTERFERENCE: interference}


def limits_of(config: PrefillWorkerConfig | DecodeWorkerConfig) -> IterationLimits:
    """Return the bounds of one iteration on such a worker."""
    return IterationLimits(config.max_running_requests, config.max_num_batched_tokens)


def make_scheduler(
    scheduling: SchedulingConfig,
    limits: IterationLimits,
    costs: CostModel | None = None,
    measured: Sequence[Sample] = (),
) -> Scheduler:
    """Build the scheduler of one worker. Without `costs` it learns them from the iterations that the worker runs,
    beginning with the `measured` ones.

    Raises ConfigError naming what is unknown.
    """
    policy = make_policy(scheduling.policy, params_of(scheduling))
    if costs is not None:
        return Scheduler(policy, costs, limits)
    learned = learned_from(measured)
    return Scheduler(policy, learned, limits, learned)


def measured_speed(
    limits: IterationLimits,
    costs: CostModel | None,
    measured: Sequence[Sample],
    *,
    max_context_len: int,
) -> PredictedSpeed | None:
    """Return how fast a worker is, by its costs or by what it measured at its start; None: it has neither."""
    if costs is None and not any(not sample.work.is_empty for sample in measured):
        return None
    known = costs if costs is not None else learned_from(measured)
    speed = speed_of(known, max_tokens=limits.max_tokens, max_context_len=max_context_len)
    if costs is not None:
        return speed
    shown = ShownSpeed()
    for work, seconds in measured:
        shown.note(work, seconds, 0.0)
    prompt_s, shared_token_s = shown.at(0.0)
    return speed._replace(
        prompt_s=speed.prompt_s if math.isinf(prompt_s) else prompt_s,
        shared_token_s=speed.shared_token_s if math.isinf(shared_token_s) else shared_token_s,
    )


def calibration_s(engine: EngineConfig, scheduling: SchedulingConfig, batching: BatchingConfig | None = None) -> float:
    """Return how long a prefill or decode worker calibrates iteration costs; 0 if it does not use them.

    `batching`: of a decode worker.
    """
    packs = batching is not None and batching.pack_share is not None
    return engine.calibration_s if packs or policy_entry(scheduling.policy).schedules_iterations else 0.0


def make_iteration_scheduler(
    scheduling: SchedulingConfig,
    limits: IterationLimits,
    costs: CostModel | None = None,
    measured: Sequence[Sample] = (),
    num_layers: int | None = None,
) -> IterationScheduler:
    """Build the iteration scheduler of a prefill worker. `num_layers`: of the model, between which a pass may stop."""
    if policy_entry(scheduling.policy).schedules_prompts:
        yielding = make_yielding(scheduling, num_layers, decodes_here=False)
        scheduler = make_scheduler(scheduling, limits, costs, measured)
        floor = getattr(policy_config(scheduling.policy, params_of(scheduling)), _FLOOR, 0.0)
        return PolicyIterationScheduler(scheduler, yielding, best_effort_floor=floor)
    return FcfsIterationScheduler(limits.max_tokens)


def check_yielding(scheduling: SchedulingConfig, topology: Topology, available: frozenset[Mechanism]) -> None:
    """Raise ConfigError if passes are to stop between layers and the policy excludes it with these workers."""
    if not scheduling.yield_between_layers:
        if scheduling.best_effort_floor is not None and not _may_yield(scheduling):
            raise ConfigError("scheduling.best_effort_floor has no effect without scheduling.yield_between_layers")
        return
    used = wanted_mechanisms(scheduling) & available & _NOT_YIELDING
    if used:
        what = " and ".join(sorted(mechanism.value for mechanism in used))
        raise ConfigError(
            f"scheduling.yield_between_layers cannot be had with policy {scheduling.policy!r}, which uses {what}; "
            "leave it out, or set scheduling.policy=aligned_slo"
        )
    if topology.is_separate and not policy_entry(scheduling.policy).schedules_prompts:
        raise ConfigError(
            f"scheduling.yield_between_layers has no effect with policy {scheduling.policy!r} on separate workers, "
            "which compute prompts in the order in which they come; leave it out, or set scheduling.policy=aligned_slo"
        )


def with_yielding(scheduling: SchedulingConfig, *, can_stop: bool, decodes_here: bool) -> SchedulingConfig:
    """Settle whether passes stop between layers, where that is unset.

    `can_stop`: whether the engine's can. `decodes_here`: the worker generates too; there passes do not stop where gaps
    are bounded, as what is left of a pass is a gap for the chat that has stopped it.
    """
    wanted = scheduling.yield_between_layers
    is_bound = decodes_here and scheduling.interference is not None
    if wanted is None and not (can_stop and not is_bound and _may_yield(scheduling)):
        return msgspec.structs.replace(scheduling, yield_between_layers=False, best_effort_floor=None)
    return msgspec.structs.replace(scheduling, yield_between_layers=wanted is not False)


def _may_yield(scheduling: SchedulingConfig) -> bool:
    wanted = scheduling.yield_between_layers
    return policy_entry(scheduling.policy).yields if wanted is None else wanted


def make_yielding(
    scheduling: SchedulingConfig, num_layers: int | None, *, decodes_here: bool = True
) -> Yielding | None:
    """Build the rule by which passes stop between layers; None: they do not, or it is not settled.

    `num_layers`: of the model. `decodes_here`: the worker generates too.
    """
    if not scheduling.yield_between_layers or num_layers is None:
        return None
    floor = scheduling.best_effort_floor
    config = YieldConfig(num_layers, decodes_here=decodes_here)
    return Yielding(config if floor is None else replace(config, best_effort_floor=floor))


def make_decode_scheduler(
    scheduling: SchedulingConfig,
    limits: IterationLimits,
    costs: CostModel | None = None,
    measured: Sequence[Sample] = (),
) -> Scheduler | None:
    """Build the scheduler of a separate decode worker; None: the whole batch is in every iteration."""
    if policy_entry(scheduling.policy).schedules_iterations:
        return replace(make_scheduler(scheduling, limits, costs, measured), computes_prompts=False)
    return None


def admission_share(scheduling: SchedulingConfig) -> float | None:
    """Return the share of a TPOT objective that an iteration of a separate decode worker may take; None: any time."""
    name = policy_entry(scheduling.policy).admission_share
    if name is None:
        return None
    share: float = getattr(policy_config(scheduling.policy, params_of(scheduling)), name)
    return share


def resolve_policy(config: ClusterConfig) -> ClusterConfig:
    """Return the configuration with its topology, and unset values filled in by its policy.

    Raises ConfigError for an unknown policy or parameter.
    """
    scheduling, topology = config.scheduling, topology_of(config)
    entry = policy_entry(scheduling.policy)
    if _FLOOR in {field.name for field in fields(entry.config)}:
        params = {_FLOOR: config.router.best_effort_floor, **scheduling.policy_params}
        scheduling = msgspec.structs.replace(scheduling, policy_params=params)
    if _may_yield(scheduling) and scheduling.best_effort_floor is None:
        scheduling = msgspec.structs.replace(scheduling, best_effort_floor=config.router.best_effort_floor)
    parameters = policy_config(scheduling.policy, params_of(scheduling))
    router: dict[str, Any] = {}
    if config.router.direct_handoff is None:
        router["direct_handoff"] = entry.is_direct
    replace = msgspec.structs.replace
    batching = {
        name: scheduling.policy_params[name] for name in entry.batching_settings if name in scheduling.policy_params
    }
    if config.batching.policy is None:
        batching["policy"] = entry.batching
    if _PACK_SHARE in entry.batching_settings:
        batching.setdefault(_PACK_SHARE, config.batching.pack_share or getattr(parameters, _PACK_SHARE))
    elif config.batching.pack_share is not None:
        raise ConfigError(f"batching.{_PACK_SHARE} has no effect with policy {scheduling.policy!r}; leave it out")
    prefill_order = entry.prefill_order
    if batching.get(_PACK_SHARE) is not None:
        # Packed slack goes by objectives; so do prompts that wait for slack.
        prefill_order = _CLASSED_ORDERS.get(prefill_order, prefill_order)
    router["prefill_order"] = config.router.prefill_order or prefill_order
    knows_classes = router["prefill_order"] not in _CLASSED_ORDERS
    if config.batching.best_effort_floor is None and knows_classes and topology.is_separate:
        batching["best_effort_floor"] = config.router.best_effort_floor
    return replace(
        config,
        topology=topology,
        scheduling=scheduling,
        router=replace(config.router, **router),
        batching=replace(config.batching, **batching),
    )
