"""Chooses the topology of a cluster where none is set, and refuses settings that have no effect in the one it has.

Unset, it is the policy's own: elastic for the default policy, the paper's for a paper's. Only where something is set
that separate workers alone have, and the policy runs on such, are they what was asked for.
"""

import msgspec

from alignedserve.config.sections import ClusterConfig, Topology
from alignedserve.config.unset_sizes import SIZES, DefaultSize
from alignedserve.core.errors import ConfigError
from alignedserve.scheduling.policies import policy_entry
from alignedserve.scheduling.policy import Mechanism

_OF_SEPARATE_WORKERS = ("prefill", "pool", "batching")  # sections
_DEFAULTS = {name: getattr(ClusterConfig(), name) for name in _OF_SEPARATE_WORKERS}
_LENT = ("prefill", "candidate_buffer_bytes")  # by elastic workers as well, for moves


def topology_of(config: ClusterConfig) -> Topology:
    """Return the topology of this configuration. Raises ConfigError for an unknown policy."""
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
