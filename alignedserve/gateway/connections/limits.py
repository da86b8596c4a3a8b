"""What one connection may send before it is refused, and how many connections there may be."""

import resource
from collections import Counter
from dataclasses import dataclass, field

from alignedserve.config.sections import GatewayConfig

_RESERVED_FILES = 256  # for links to the cluster, stores and logs


@dataclass(slots=True)
class ConnectionLimits:
    """The limits of a gateway's connections, and the connections that count."""

    max_header_bytes: int
    header_timeout_s: float
    min_body_bytes_per_s: int
    max_connections: int
    max_per_address: int
    num_open: int = 0
    num_of_address: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, config: GatewayConfig) -> "ConnectionLimits":
        """Return the configured limits; there are never more connections than the process may have files."""
        return cls(
            max_header_bytes=config.max_header_bytes,
            header_timeout_s=config.header_timeout_s,
            min_body_bytes_per_s=config.min_body_bytes_per_s,
            max_connections=min(config.max_connections, most_connections()),
            max_per_address=config.max_connections_per_address,
        )

    def admit(self, address: str) -> bool:
        """Count one more connection of this address, unless there are too many; False: it is to be closed."""
        if self.num_open >= self.max_connections or self.num_of_address[address] >= self.max_per_address:
            return False
        self.num_open += 1
        self.num_of_address[address] += 1
        return True

    def leave(self, address: str) -> None:
        """Count one connection less."""
        self.num_open -= 1
        self.num_of_address[address] -= 1
        if not self.num_of_address[address]:
            del self.num_of_address[address]


def most_connections() -> int:
    """Return how many connections the process has file descriptors for."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if soft == resource.RLIM_INFINITY else max(16, soft - min(_RESERVED_FILES, soft // 2))


def raise_file_limit() -> None:
    """Let the process have as many files open as the system allows it, for connections."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
