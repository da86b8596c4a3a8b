"""The section of LoRA adapters."""

import msgspec

from alignedserve.config.sections.base import MIB, Section

_MAX_NAME_LEN = 200


class LoraConfig(Section, frozen=True):
    """Adapters that requests may name instead of the model: PEFT folders, the same paths on every host."""

    adapters: dict[str, str] = msgspec.field(default_factory=dict)  # folders by the names that clients use
    allowed_folder: str | None = None  # /v1/load_lora_adapter loads from below it; None: it is refused
    max_adapters: int = 16  # in the memory of each worker; those used least recently leave first
    memory_bytes: int = 512 * MIB  # of each worker, for all of them
    max_rank: int = 64

    def __post_init__(self) -> None:
        self._require_positive("max_adapters", "memory_bytes", "max_rank")
        self._require(self.max_rank <= 1024, "max_rank", "must be at most 1024")
        for name, path in self.adapters.items():
            is_good = 0 < len(name) <= _MAX_NAME_LEN and name.isprintable() and bool(path)
            self._require(is_good, "adapters", f"must map names of at most {_MAX_NAME_LEN} characters to folders")

    @property
    def is_enabled(self) -> bool:
        """Return whether requests may name adapters at all."""
        return bool(self.adapters) or self.allowed_folder is not None

    @property
    def worker_bytes(self) -> int:
        """Return the memory that each worker needs for adapters."""
        return self.memory_bytes if self.is_enabled else 0

    @property
    def max_worker_adapters(self) -> int:
        """Return how many adapters a worker may have in memory; 0: requests may name none."""
        return self.max_adapters if self.is_enabled else 0
