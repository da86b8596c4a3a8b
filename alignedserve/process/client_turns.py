"""What several clients wait for: they have turns one after the other, however much one of them asks for."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(slots=True)
class _Own(Generic[ItemT]):
    items: deque[ItemT] = field(default_factory=deque)  # in the order in which they came
    takes_last: bool = False


class ClientTurns(Generic[ItemT]):
    """Items by client. Of one client the first comes first; `from_both_ends`: the first and the last by turns."""

    def __init__(self, *, from_both_ends: bool = False) -> None:
        self._clients: dict[str, _Own[ItemT]] = {}  # that have some, the one whose turn is next first
        self._from_both_ends = from_both_ends

    def __bool__(self) -> bool:
        return bool(self._clients)

    def __iter__(self) -> Iterator[ItemT]:
        """Iterate over all items, client by client."""
        return chain.from_iterable(client.items for client in self._clients.values())

    def append(self, client: str, item: ItemT) -> None:
        """Let an item wait for a turn of its client."""
        self._clients.setdefault(client, _Own()).items.append(item)

    def take(self) -> ItemT:
        """Remove and return the item whose turn it is; there must be one."""
        client = next(iter(self._clients))
        own = self._clients.pop(client)
        item = own.items.pop() if own.takes_last else own.items.popleft()
        own.takes_last = self._from_both_ends and not own.takes_last
        if own.items:
            self._clients[client] = own
        return item

    def remove(self, client: str, item: ItemT) -> None:
        """Remove an item of this client."""
        own = self._clients[client]
        own.items.remove(item)
        if not own.items:
            del self._clients[client]

    def clear(self) -> None:
        self._clients.clear()
