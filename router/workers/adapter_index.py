"""Which workers have which LoRA adapters: an estimate from the prompts that they were given.

A worker keeps those used last, as many as its registration tells, and so does this. It is a hint: an adapter that has
left is loaded again, and one that another worker brought along with a request is not known here.
"""

from collections import OrderedDict
from collections.abc import Iterator

from router.state import WorkerRecord

LOAD_S = 0.2  # that loading one delays its prompt, with what those pay that are evicted for it


class AdapterIndex:
    """Adapters by worker, and workers by adapter; an adapter is its digest."""

    def __init__(self) -> None:
        self._of_worker: dict[str, OrderedDict[bytes, None]] = {}  # the most recently used last
        self._holders: dict[bytes, dict[str, None]] = {}

    def use(self, worker: WorkerRecord, adapter: bytes) -> None:
        """Note that a worker is given a prompt of this adapter; those used least recently leave for it."""
        most = worker.registered.max_adapters
        if not most:
            return
        own = self._of_worker.setdefault(worker.name, OrderedDict())
        own[adapter] = None
        own.move_to_end(adapter)
        self._holders.setdefault(adapter, {})[worker.name] = None
        while len(own) > most:
            evicted, _ = own.popitem(last=False)
            self._drop(worker.name, evicted)

    def has(self, worker: str, adapter: bytes) -> bool:
        return worker in self._holders.get(adapter, {})

    def holders(self, adapter: bytes) -> Iterator[str]:
        yield from self._holders.get(adapter, {})

    def fail(self, worker: str, adapter: bytes) -> None:
        """Forget an adapter of a worker where a request of it has failed: perhaps it cannot be loaded there."""
        own = self._of_worker.get(worker)
        if own is not None and adapter in own:
            del own[adapter]
            self._drop(worker, adapter)

    def forget(self, worker: str) -> None:
        for adapter in self._of_worker.pop(worker, {}):
            self._drop(worker, adapter)

    def _drop(self, worker: str, adapter: bytes) -> None:
        holders = self._holders[adapter]
        del holders[worker]
        if not holders:
            del self._holders[adapter]
