"""Sizes that a configuration leaves unset: at the start they are worked out from model and machine.

`from_mapping` marks them, `with_fixed_sizes` settles them where there is no machine to ask.
"""

from typing import Any

import msgspec

from alignedserve.config.sections import ClusterConfig, Section
from alignedserve.core.errors import ConfigError

# Sections and their fields that are worked out when unset.
SIZES = {
    "gateway": ("count",),
    "engine": ("block_size",),
    "pool": ("memory_bytes",),
    "prefill": ("count", "kv_cache_bytes", "candidate_buffer_bytes", "max_running_requests", "max_num_batched_tokens"),
    "prefix_cache": ("host_bytes",),
    "decode": ("count", "kv_cache_bytes", "swap_space_bytes", "max_running_requests", "max_num_batched_tokens"),
}


class DefaultSize(int):
    """A size or count that a loaded configuration leaves unset: at the start it is worked out from model and machine.
    Its own value is for where there is no machine to ask, as in the simulator."""


def from_mapping(values: dict[str, Any]) -> ClusterConfig:
    """Build the config from plain values, with the sizes that are absent or null marked as unset. Raises ConfigError
    naming the field."""
    set_values = {name: _without_unset(name, section) for name, section in values.items()}
    try:
        config = msgspec.convert(set_values, ClusterConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    replace = msgspec.structs.replace
    marked: dict[str, Section] = {}
    for name, fields in SIZES.items():
        section = getattr(config, name)
        unset = [field for field in fields if field not in set_values.get(name, {})]
        marked[name] = replace(section, **{field: DefaultSize(getattr(section, field)) for field in unset})
    return replace(config, **marked)


def _without_unset(name: str, section: Any) -> Any:
    if name not in SIZES or not isinstance(section, dict):
        return section
    return {field: value for field, value in section.items() if value is not None or field not in SIZES[name]}


def with_fixed_sizes(config: ClusterConfig) -> ClusterConfig:
    replace = msgspec.structs.replace
    fixed: dict[str, Section] = {}
    for name, fields in SIZES.items():
        section = getattr(config, name)
        fixed[name] = replace(section, **{field: int(getattr(section, field)) for field in fields})
    return replace(config, **fixed)
