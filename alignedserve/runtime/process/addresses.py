"""The addresses at which the processes of one cluster listen."""

from dataclasses import dataclass
from pathlib import Path

ROUTER = "router"


@dataclass(frozen=True, slots=True)
class AddressBook:
    """Addresses by name: Unix sockets in the cluster's private folder, or TCP ports of a host."""

    folder: Path
    tcp: tuple[tuple[str, str], ...] = ()  # (name, "host:port") of processes that are reached over TCP

    def of(self, name: str) -> str:
        """Return the address of the process with this name."""
        for known, host_and_port in self.tcp:
            if known == name:
                return f"tcp:{host_and_port}"
        return f"unix:{self.folder / name}.sock"

    def progress_of(self, name: str) -> Path:
        """Return the file in which this process reports how far its model is loaded."""
        return self.folder / f"{name}.progress"
