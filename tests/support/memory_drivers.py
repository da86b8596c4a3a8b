"""A stand-in for a GPU's driver: it notes which memory is registered with it."""


class NotedDriver:
    """A MemoryDriver that takes no more than so many bytes at a time, and refuses from the n-th call on."""

    def __init__(self, *, num_allowed: int = 1 << 30, largest: int = 64 << 30) -> None:
        self.registered: dict[int, int] = {}  # bytes by address
        self.calls: list[tuple[str, int]] = []
        self._num_allowed = num_allowed
        self._largest = largest

    def register(self, address: int, size: int) -> str | None:
        self.calls.append(("register", address))
        assert address not in self.registered
        if size > self._largest or len(self.registered) >= self._num_allowed:
            return "out of memory"
        self.registered[address] = size
        return None

    def unregister(self, address: int) -> None:
        self.calls.append(("unregister", address))
        del self.registered[address]
