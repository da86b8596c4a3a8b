"""The sections of what a node keeps in memory beside its workers: the KV pool, the prefix cache."""

from alignedserve.config.sections.base import MIB, Section


class PoolConfig(Section, frozen=True):
    """KV pool in CPU memory, one per node, where prompts and decodes have workers of their own."""

    memory_bytes: int = 256 * MIB
    lease_s: float = 30.0  # a lease not used within this time is taken back

    def __post_init__(self) -> None:
        self._require_positive("memory_bytes", "lease_s")


class PrefixCacheConfig(Section, frozen=True):
    """Blocks of contexts that later requests with the same beginning reuse instead of computing them again."""

    enabled: bool = True
    # Memory of a node, beside that of its workers, for blocks that they share and that outlive one; 0: none. When unset
    # as much as its workers have, from what is free, where there are several.
    host_bytes: int = 0
    shared_between_keys: bool = False  # API keys share each other's blocks; False: each key its own only

    def __post_init__(self) -> None:
        self._require(self.host_bytes >= 0, "host_bytes", "must be at least 0")

    @property
    def pool_bytes(self) -> int:
        """Return the memory of a node's pool for prefix blocks; 0: it keeps none."""
        return int(self.host_bytes) if self.enabled else 0
