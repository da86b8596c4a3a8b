"""Batch formers by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from alignedserve.core.errors import ConfigError
from kvpool.policies.batch_former import BatchFormer
from kvpool.policies.fcfs import FcfsBatchFormer

BATCH_FORMERS: Mapping[str, Callable[[], BatchFormer]] = MappingProxyType({"fcfs": FcfsBatchFormer})


def make_batch_former(name: str) -> BatchFormer:
    """Raises ConfigError listing the valid names."""
    if name not in BATCH_FORMERS:
        raise ConfigError(f"pool.batching: unknown batch former {name!r}; known: {', '.join(sorted(BATCH_FORMERS))}")
    return BATCH_FORMERS[name]()
