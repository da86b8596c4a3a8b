"""Holders of cached blocks: an index by the names of blocks, by which prompts are placed where they begin.

Workers tell which blocks enter and leave their caches (PrefixBlocksChanged). What a worker was given and has yet to
compute is expected there: requests that come meanwhile with the same beginning then follow the first one. Example: 500
lines with one instruction arrive together. The first goes to the least loaded worker; its blocks are expected there,
and the others count them as hits, long before the first is computed.

Names are hints. A worker finds out for itself what it has; a wrong hit costs a worse placement, never a wrong answer.
Sets of workers are bits of integers.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping

from alignedserve.core.ids import WorkerName
from alignedserve.messages.prefixes import BLOCK_NAME_BYTES, PrefixBlocksChanged, is_told, split_names
from router.state import PrefixHit, TrackedRequest, WorkerRecord

_LOADED = 0.875  # of a token is saved by loading it from the pool of the node, instead of computing it
_FAR_TOKENS = 256  # that another node's pool must have more, to be asked
MAX_NAMES = 1 << 20  # of all workers; further ones are not noted (about 130 bytes each)


class PrefixIndex:
    """Sets of workers by name of block, and the blocks that workers are about to compute."""

    def __init__(self, *, max_names: int = MAX_NAMES) -> None:
        self._max_names = max_names
        self._bits: dict[str, int] = {}  # one bit for each worker that has told of blocks, or was given some
        self._workers: dict[int, str] = {}
        self._holders: dict[bytes, int] = {}  # bits of workers, by name of block
        self._num_held = 0  # over all workers
        self._pools: dict[str, None] = {}  # that are linked; those that keep prefix blocks alone never register
        self._expected: dict[bytes, list[tuple[str, bytes]]] = {}  # by their first name: worker, names

    def __len__(self) -> int:
        return self._num_held

    def update(self, worker: str, changed: PrefixBlocksChanged) -> None:
        bit, holders = self._bit_of(worker), self._holders
        if changed.is_complete:
            self._forget_held(bit)
        num_held = self._num_held
        for name in changed.removed:
            having = holders.pop(name, 0)
            if having & bit:
                num_held -= 1
            if having & ~bit:
                holders[name] = having & ~bit
        for name in changed.stored:
            having = holders.get(name, 0)
            if not having & bit and num_held < self._max_names:
                holders[name] = having | bit
                num_held += 1
        self._num_held = num_held

    def forget(self, worker: str) -> None:
        """Forget a worker that is lost; what it was given must have been settled."""
        bit = self._bits.pop(worker, None)
        if bit is not None:
            self._forget_held(bit)
            del self._workers[bit]

    def add_pool(self, pool: str) -> None:
        self._pools[pool] = None

    def remove_pool(self, peer: str) -> None:
        if peer in self._pools:
            del self._pools[peer]
            self.forget(peer)

    def has_pool(self, peer: str) -> bool:
        return peer in self._pools

    def far_pool(self, tracked: TrackedRequest, worker: WorkerRecord) -> WorkerName | None:
        """Return the pool of another node with clearly more of a request than this worker and its pool have, ties by
        name."""
        near_pool, registered = worker.registered.pool_name, worker.registered
        if len(self._pools) < 2 or not (tracked.block_names and registered.can_decode):
            return None
        runs = self.runs(tracked.block_names)
        least = max(runs.get(worker.name, 0), runs.get(near_pool, 0)) + -(-_FAR_TOKENS // registered.block_size)
        far = [(-runs.get(name, 0), name) for name in self._pools if name != near_pool and runs.get(name, 0) >= least]
        return WorkerName(min(far)[1]) if far else None

    def expect(self, worker: str, names: bytes) -> None:
        if names:
            self._bit_of(worker)
            self._expected.setdefault(names[:BLOCK_NAME_BYTES], []).append((worker, names))

    def settle(self, worker: str, names: bytes) -> None:
        if names:
            first = names[:BLOCK_NAME_BYTES]
            expected = self._expected[first]
            expected.remove((worker, names))
            if not expected:
                del self._expected[first]

    def runs(self, block_names: bytes) -> dict[str, int]:
        """Return how many of a context's blocks, from its first on, each worker has or will have; none has 0."""
        holders, expected = self._holders, self._expected
        if not self._may_have(block_names):
            return {}
        ends: dict[int, int] = {}  # of runs, by the worker's bit
        running, end = -1, 0  # workers that hold every block so far that is told, and where the last one of these ends
        furthest = 0  # end of what is expected
        for index, name in enumerate(split_names(block_names)):
            if name in expected:
                self._note_expected(ends, running, index, block_names)
                furthest = max(ends.values(), default=0)
            if is_told(name):
                having = holders.get(name, 0) & running
                if end and having != running:
                    _note_ends(ends, running & ~having, end)
                running, end = having, index + 1
            if not running and index >= furthest:
                break
        if end:
            _note_ends(ends, running, end)
        return {self._workers[bit]: length for bit, length in ends.items()}

    def _may_have(self, block_names: bytes) -> bool:
        for index in range(0, len(block_names), BLOCK_NAME_BYTES):
            name = block_names[index : index + BLOCK_NAME_BYTES]
            if name in self._expected:
                return True
            if is_told(name):
                return name in self._holders
        return False

    def _note_expected(self, ends: dict[int, int], running: int, index: int, block_names: bytes) -> None:
        rest = block_names[index * BLOCK_NAME_BYTES :]
        for worker, expected in self._expected[rest[:BLOCK_NAME_BYTES]]:
            bit = self._bits[worker]
            if bit & running or ends.get(bit, 0) >= index:
                ends[bit] = max(ends.get(bit, 0), index + _num_common(rest, expected))

    def _bit_of(self, worker: str) -> int:
        bit = self._bits.get(worker)
        if bit is None:
            bit = 1
            while bit in self._workers:
                bit <<= 1
            self._bits[worker] = bit
            self._workers[bit] = worker
        return bit

    def _forget_held(self, bit: int) -> None:
        held = [name for name, having in self._holders.items() if having & bit]
        for name in held:
            left = self._holders[name] ^ bit
            if left:
                self._holders[name] = left
            else:
                del self._holders[name]
        self._num_held -= len(held)


def hit_of(tracked: TrackedRequest, worker: WorkerRecord, runs: Mapping[str, int]) -> PrefixHit:
    """Return which part of a request a worker need not compute, by the runs of workers and pools.

    Loading from the pool of its node counts as most of a hit. At least one token is computed.
    """
    num_cached, pooled = runs.get(worker.name, 0), runs.get(worker.registered.pool_name, 0)
    num_blocks = max(num_cached, _LOADED * pooled) if pooled else num_cached
    return PrefixHit(min(int(num_blocks * worker.registered.block_size), tracked.num_prefill_tokens - 1), num_cached)


def _note_ends(ends: dict[int, int], ended: int, end: int) -> None:
    while ended:
        bit = ended & -ended
        ends[bit] = max(ends.get(bit, 0), end)
        ended ^= bit


def _num_common(names: bytes, others: bytes) -> int:
    length = min(len(names), len(others))
    difference = int.from_bytes(names[:length], "big") ^ int.from_bytes(others[:length], "big")
    return (length - (difference.bit_length() + 7) // 8) // BLOCK_NAME_BYTES


LOAD_S = 0.2  # that loading an adapter delays its prompt, with the cost of an eviction


class AdapterIndex:
    """An estimate of the LoRA adapters (by digest) of each worker: the latest used, as many as its registration
    tells."""

    def __init__(self) -> None:
        self._of_worker: dict[str, OrderedDict[bytes, None]] = {}  # the most recently used last
        self._holders: dict[bytes, dict[str, None]] = {}

    def use(self, worker: WorkerRecord, adapter: bytes) -> None:
        most = worker.registered.max_adapters
        if not most:
            return
        adapters = self._of_worker.setdefault(worker.name, OrderedDict())
        adapters[adapter] = None
        adapters.move_to_end(adapter)
        self._holders.setdefault(adapter, {})[worker.name] = None
        while len(adapters) > most:
            evicted, _ = adapters.popitem(last=False)
            self._drop(worker.name, evicted)

    def has(self, worker: str, adapter: bytes) -> bool:
        return worker in self._holders.get(adapter, {})

    def holders(self, adapter: bytes) -> Iterator[str]:
        yield from self._holders.get(adapter, {})

    def fail(self, worker: str, adapter: bytes) -> None:
        adapters = self._of_worker.get(worker)
        if adapters is not None and adapter in adapters:
            del adapters[adapter]
            self._drop(worker, adapter)

    def forget(self, worker: str) -> None:
        for adapter in self._of_worker.pop(worker, {}):
            self._drop(worker, adapter)

    def _drop(self, worker: str, adapter: bytes) -> None:
        holders = self._holders[adapter]
        del holders[worker]
        if not holders:
            del self._holders[adapter]
