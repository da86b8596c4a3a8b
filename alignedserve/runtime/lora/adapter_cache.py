"""The adapters in the memory of a worker: loaded in a thread when a request needs one, the least recently used leave.

1. A request for an adapter that is not there waits, with others for the same; the loop and the iterations go on.
2. Where adapters or bytes would be too many, those leave that no sequence uses, the least recently used first. If all
   are used, the request waits until one is not.
3. While one has waited for longer than PATIENCE_S, requests for adapters that are there wait behind it, so that the
   sequences that use them come to an end.
4. A request that comes from another worker waits until its adapter is loaded, whatever the bounds.
5. A sequence that enters the engine uses its adapter until it leaves. One whose adapter has left meanwhile (it was
   preempted) has it loaded on the spot, whatever the bounds.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from alignedserve.core.errors import AdapterError
from alignedserve.core.request import LoraAdapter
from kernels.adapters.lora import AdapterMatrices

PATIENCE_S = 1.0


@dataclass(slots=True)
class _Loaded:
    matrices: AdapterMatrices
    num_users: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    adapter: LoraAdapter
    done: "Future[None]"
    since_s: float


class AdapterCache:
    """Adapters by digest. `prepare` is for the event loop, `acquire` and `release` for the thread that computes."""

    def __init__(self, load: Callable[[LoraAdapter], AdapterMatrices], *, max_adapters: int, max_bytes: int) -> None:
        """`load` raises AdapterError."""
        self._load = load
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._loaded: OrderedDict[bytes, _Loaded] = OrderedDict()  # the most recently used last
        self._loading: dict[bytes, Future[None]] = {}
        self._waiting: deque[_Waiting] = deque()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "adapters")

    @property
    def num_bytes(self) -> int:
        """Return the bytes of their matrices."""
        return sum(own.matrices.num_bytes for own in self._loaded.values())

    def prepare(self, adapter: LoraAdapter) -> "Future[None] | None":
        """Begin to load an adapter; return what its request waits for, if anything. It never fails: `acquire` does."""
        with self._lock:
            now = time.monotonic()
            is_overdue = bool(self._waiting) and now - self._waiting[0].since_s > PATIENCE_S
            if adapter.digest in self._loaded and not is_overdue:
                self._loaded.move_to_end(adapter.digest)
                return None
            waiting = _Waiting(adapter, Future(), now)
            self._waiting.append(waiting)
            served = self._serve_waiting()
        _complete(served)
        return waiting.done

    def prepare_at_once(self, adapter: LoraAdapter) -> "Future[None] | None":
        """Begin to load an adapter as `prepare` does, but whatever the bounds: its request has begun elsewhere."""
        with self._lock:
            if adapter.digest in self._loaded:
                self._loaded.move_to_end(adapter.digest)
                return None
            loading = self._loading.get(adapter.digest) or self._start_loading(adapter)
            done: Future[None] = Future()
            loading.add_done_callback(partial(_pass_on, done))
        return done

    def acquire(self, adapter: LoraAdapter) -> AdapterMatrices:
        """Return the matrices, which stay in memory until `release`. Raises AdapterError."""
        with self._lock:
            loading = self._loading.get(adapter.digest)
        if loading is not None:
            loading.result()
        with self._lock:
            if adapter.digest in self._loaded:
                return self._used(adapter)
        matrices = self._load(adapter)
        with self._lock:
            self._loaded.setdefault(adapter.digest, _Loaded(matrices))
            used = self._used(adapter)
            self._evict(self._max_adapters)
        return used

    def release(self, adapter: LoraAdapter) -> None:
        """End a use."""
        with self._lock:
            own = self._loaded[adapter.digest]
            own.num_users -= 1
            assert own.num_users >= 0, "an adapter released more often than acquired"
            self._evict(self._max_adapters)
            served = self._serve_waiting()
        _complete(served)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    # --- under the lock

    def _used(self, adapter: LoraAdapter) -> AdapterMatrices:
        own = self._loaded[adapter.digest]
        own.num_users += 1
        self._loaded.move_to_end(adapter.digest)
        return own.matrices

    def _serve_waiting(self) -> "list[Future[None]]":
        """Start to load adapters for waiting requests, in order of arrival; return requests that need not wait."""
        served: list[Future[None]] = []
        while self._waiting:
            first = self._waiting[0]
            digest = first.adapter.digest
            if digest in self._loaded:
                served.append(first.done)
            elif digest in self._loading:
                self._loading[digest].add_done_callback(partial(_pass_on, first.done))
            elif self._has_room():
                self._start_loading(first.adapter).add_done_callback(partial(_pass_on, first.done))
            else:
                break
            self._waiting.popleft()
        return served

    def _start_loading(self, adapter: LoraAdapter) -> "Future[None]":
        loading = self._loading[adapter.digest] = Future()
        self._thread.submit(self._load_in_thread, adapter)
        return loading

    def _has_room(self) -> bool:
        self._evict(self._max_adapters - 1 - len(self._loading))
        has_place = len(self._loaded) + len(self._loading) < self._max_adapters
        return has_place and (self.num_bytes < self._max_bytes or not self._loaded)

    def _evict(self, max_left: int) -> None:
        """Let adapters without users leave until their number and their bytes are within the limits."""
        for digest in [digest for digest, own in self._loaded.items() if not own.num_users]:
            if len(self._loaded) <= max(max_left, 0) and self.num_bytes <= self._max_bytes:
                return
            del self._loaded[digest]

    # --- on the thread

    def _load_in_thread(self, adapter: LoraAdapter) -> None:
        matrices = None
        try:
            matrices = self._load(adapter)
        except AdapterError:
            pass  # `acquire` tries again, and tells the request why
        finally:
            with self._lock:
                loading = self._loading.pop(adapter.digest)
                if matrices is not None:
                    own = self._loaded.setdefault(adapter.digest, _Loaded(matrices))
                    own.num_users += 1  # while others leave, not itself
                    self._evict(self._max_adapters)
                    own.num_users -= 1
                served = self._serve_waiting()
            loading.set_result(None)
            _complete(served)


def _pass_on(done: "Future[None]", _: "Future[None]") -> None:
    done.set_result(None)


def _complete(futures: "list[Future[None]]") -> None:
    """Call back outside of the lock."""
    for future in futures:
        future.set_result(None)
