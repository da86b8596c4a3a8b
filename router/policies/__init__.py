"""The router's policies by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from alignedserve.core.errors import ConfigError
from router.policies.prefill_order import (
    DeadlineOrder,
    FcfsByClassOrder,
    FcfsOrder,
    LeastSlackOrder,
    PrefillOrder,
    ShortestPromptOrder,
)

PREFILL_ORDERS: Mapping[str, Callable[[], PrefillOrder]] = MappingProxyType(
    {
        "deadline": DeadlineOrder,
        "fcfs": FcfsOrder,
        "fcfs_classed": FcfsByClassOrder,
        "least_slack": LeastSlackOrder,
        "shortest_prompt": ShortestPromptOrder,
    }
)


def make_prefill_order(name: str) -> PrefillOrder:
    """Return the prefill order of this name. Raises ConfigError listing the valid names."""
    if name not in PREFILL_ORDERS:
        known = ", ".join(sorted(PREFILL_ORDERS))
        raise ConfigError(f"router.prefill_order: unknown order {name!r}; known: {known}")
    return PREFILL_ORDERS[name]()
