"""The adapters in the memory of a worker: loaded in a thread when a request needs one, the least recently used leave.

1. A request for an adapter that is not there waits, with others for the same; the loop and the iterations go on.
2. An adapter is held by the class (real-time or best effort) of the sequences that use it, and of the requests that it
   was made ready for, until they enter the engine or `_WANTED_S` have passed. Best effort holds three quarters of the
   places and bytes at most (of one place, all), real-time requests all, but for one place where best effort waits that
   holds none.
3. Where adapters or bytes would be too many, those leave that nobody holds: those that best effort used last before
   the others, the least recently used first. If all are held, the request waits until one is not; a real-time request
   takes the place of one that best effort holds but does not use yet, unless that is all it holds.
4. While one has waited for longer than PATIENCE_S, requests of its class for adapters that are there wait behind it, so
   that the sequences that use them come to an end; its own adapter serves all that wait for it then. Best effort
   waits behind every real-time request that waits, unless it holds no adapter at all.
5. A request that comes from another worker waits until its adapter is loaded, whatever the bounds.
6. A sequence that enters the engine uses its adapter until it leaves. One whose adapter has left meanwhile (it was
   preempted, or waited for long) has it loaded on the spot, whatever the bounds.
"""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from alignedserve.core.errors import AdapterError
from alignedserve.core.request import LoraAdapter
from kernels.adapters.lora import AdapterMatrices

PATIENCE_S = 1.0
_WANTED_S = 30.0
_MOST_OF_BEST_EFFORT = 0.75  # of the places and of the bytes


@dataclass(slots=True)
class _Use:
    """How requests of one class hold an adapter."""

    num_users: int = 0  # sequences in the engine
    wanted_until_s: float = float("-inf")  # by requests that have not entered it

    def holds(self, now: float) -> bool:
        return self.num_users > 0 or now < self.wanted_until_s


@dataclass(slots=True)
class _Loaded:
    matrices: AdapterMatrices
    best_effort: _Use = field(default_factory=_Use)
    real_time: _Use = field(default_factory=_Use)
    is_real_time: bool = False  # the latest that held it

    @property
    def is_used(self) -> bool:
        return self.best_effort.num_users > 0 or self.real_time.num_users > 0

    def use(self, *, is_real_time: bool) -> _Use:
        return self.real_time if is_real_time else self.best_effort

    def is_held(self, now: float) -> bool:
        return self.best_effort.holds(now) or self.real_time.holds(now)


@dataclass(frozen=True, slots=True)
class _Loading:
    classes: set[bool]  # that wait for it; True: real-time requests do
    done: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Waiting:
    adapter: LoraAdapter
    is_real_time: bool
    since_s: float
    done: "Future[None]" = field(default_factory=Future)


class AdapterCache:
    """Adapters by digest. `prepare` is for the event loop, `acquire` and `release` for the thread that computes."""

    def __init__(
        self,
        load: Callable[[LoraAdapter], AdapterMatrices],
        *,
        max_adapters: int,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`load` raises AdapterError."""
        self._load = load
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._clock = clock
        self._loaded: OrderedDict[bytes, _Loaded] = OrderedDict()  # the most recently used last
        self._loading: dict[bytes, _Loading] = {}
        self._largest_bytes: int | None = None  # of one; None: none has been loaded yet
        self._waiting: dict[bool, deque[_Waiting]] = {True: deque(), False: deque()}  # real-time ones first
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "adapters")
        self._timer: threading.Timer | None = None
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Return the bytes of their matrices."""
        return sum(own.matrices.num_bytes for own in self._loaded.values())

    def prepare(self, adapter: LoraAdapter, *, is_real_time: bool) -> "Future[None] | None":
        """Begin to load an adapter; return what its request waits for, if anything. It never fails: `acquire` does."""
        with self._lock:
            now = self._clock()
            if not self._must_queue(now, is_real_time=is_real_time) and self._is_ready(adapter, is_real_time, now):
                return None
            waiting = _Waiting(adapter, is_real_time, now)
            self._waiting[is_real_time].append(waiting)
            served = self._serve_waiting()
        _complete(served)
        return waiting.done

    def prepare_at_once(self, adapter: LoraAdapter, *, is_real_time: bool) -> "Future[None] | None":
        """Begin to load an adapter as `prepare` does, but whatever the bounds: its request has begun elsewhere."""
        with self._lock:
            if adapter.digest in self._loaded:
                self._want(adapter.digest, is_real_time, self._clock())
                return None
            done: Future[None] = Future()
            self._join_loading(adapter, is_real_time, done)
        return done

    def acquire(self, adapter: LoraAdapter, *, is_real_time: bool) -> AdapterMatrices:
        """Return the matrices, which stay in memory until `release`. Raises AdapterError."""
        with self._lock:
            loading = self._loading.get(adapter.digest)
        if loading is not None:
            loading.done.result()
        with self._lock:
            if adapter.digest in self._loaded:
                return self._used(adapter, is_real_time)
        matrices = self._load(adapter)
        with self._lock:
            self._came(adapter, matrices)
            used = self._used(adapter, is_real_time)
            self._evict(self._max_adapters, self._max_bytes)
        return used

    def release(self, adapter: LoraAdapter, *, is_real_time: bool) -> None:
        """End a use."""
        with self._lock:
            use = self._loaded[adapter.digest].use(is_real_time=is_real_time)
            use.num_users -= 1
            assert use.num_users >= 0, "an adapter released more often than acquired"
            self._evict(self._max_adapters, self._max_bytes)
            served = self._serve_waiting()
        _complete(served)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._thread.shutdown(cancel_futures=True)

    # --- under the lock

    def _must_queue(self, now: float, *, is_real_time: bool) -> bool:
        own, before = self._waiting[is_real_time], self._waiting[True]
        if not is_real_time and before and self._holding(now, is_real_time=False):
            return True
        return bool(own) and now - own[0].since_s > PATIENCE_S

    def _is_ready(self, adapter: LoraAdapter, is_real_time: bool, now: float) -> bool:
        """Return whether a request can have this adapter now, which it then wants."""
        own = self._loaded.get(adapter.digest)
        is_ready = own is not None and (
            own.use(is_real_time=is_real_time).holds(now) or self._may_hold_more(now, is_real_time=is_real_time)
        )
        if is_ready:
            self._want(adapter.digest, is_real_time, now)
        return is_ready

    def _want(self, digest: bytes, is_real_time: bool, now: float) -> None:
        own = self._loaded[digest]
        own.use(is_real_time=is_real_time).wanted_until_s = now + _WANTED_S
        own.is_real_time = is_real_time
        self._loaded.move_to_end(digest)

    def _used(self, adapter: LoraAdapter, is_real_time: bool) -> AdapterMatrices:
        own = self._loaded[adapter.digest]
        use = own.use(is_real_time=is_real_time)
        use.num_users += 1
        use.wanted_until_s = float("-inf")
        own.is_real_time = is_real_time
        self._loaded.move_to_end(adapter.digest)
        return own.matrices

    def _holding(self, now: float, *, is_real_time: bool) -> list[_Loaded]:
        return [own for own in self._loaded.values() if own.use(is_real_time=is_real_time).holds(now)]

    def _may_hold_more(self, now: float, *, is_real_time: bool) -> bool:
        """Return whether a class may hold one more adapter beside those that it holds, or that are loaded for it."""
        held = self._holding(now, is_real_time=is_real_time)
        num_loading = sum(is_real_time in loading.classes for loading in self._loading.values())
        count = len(held) + num_loading
        if is_real_time:
            keeps_one = bool(self._waiting[False]) and not self._holding(now, is_real_time=False)
            return count < max(self._max_adapters - keeps_one, 1)
        num_bytes = sum(own.matrices.num_bytes for own in held) + num_loading * (self._largest_bytes or 0)
        has_bytes = num_bytes < _MOST_OF_BEST_EFFORT * self._max_bytes or not count
        return has_bytes and count < max(int(_MOST_OF_BEST_EFFORT * self._max_adapters), 1)

    def _serve_waiting(self) -> "list[Future[None]]":
        """Start to load adapters for waiting requests, by class and arrival; return requests that need not wait."""
        served: list[Future[None]] = []
        now = self._clock()
        if self._is_closed:
            return served
        for is_real_time, waiting in self._waiting.items():
            while waiting:
                if not is_real_time and self._waiting[True] and self._holding(now, is_real_time=False):
                    break
                adapter = waiting[0].adapter
                is_ready = self._is_ready(adapter, is_real_time, now)
                if not is_ready and not self._may_load(adapter, is_real_time, now):
                    break
                for one in [one for one in waiting if one.adapter.digest == adapter.digest]:
                    waiting.remove(one)
                    if is_ready:
                        served.append(one.done)
                    else:
                        self._join_loading(adapter, is_real_time, one.done)
        if any(self._waiting.values()) and self._timer is None:  # what is only wanted may be so no longer
            self._timer = threading.Timer(PATIENCE_S, self._look_again)
            self._timer.daemon = True
            self._timer.start()
        return served

    def _look_again(self) -> None:
        with self._lock:
            self._timer = None
            served = self._serve_waiting()
        _complete(served)

    def _may_load(self, adapter: LoraAdapter, is_real_time: bool, now: float) -> bool:
        """Return whether an adapter may be loaded for a request, or is being loaded and may be kept for it."""
        loading = self._loading.get(adapter.digest)
        if loading is not None and is_real_time in loading.classes:
            return True
        if adapter.digest in self._loaded or not self._may_hold_more(now, is_real_time=is_real_time):
            return False
        return loading is not None or self._has_room(is_real_time, now)

    def _has_room(self, is_real_time: bool, now: float) -> bool:
        num_loading = len(self._loading)
        if num_loading and self._largest_bytes is None:  # nobody knows yet what they take
            return False
        max_left = self._max_adapters - 1 - num_loading
        max_bytes = self._max_bytes - 1 - num_loading * (self._largest_bytes or 0)
        if num_loading and max_bytes < 0:
            return False
        self._evict(max_left, max_bytes)
        if is_real_time and len(self._holding(now, is_real_time=False)) > 1:
            self._evict(max_left, max_bytes, for_real_time=True)
        has_place = len(self._loaded) <= max_left
        return has_place and (self.num_bytes <= max_bytes or not (self._loaded or num_loading))

    def _came(self, adapter: LoraAdapter, matrices: AdapterMatrices) -> None:
        self._loaded.setdefault(adapter.digest, _Loaded(matrices))
        self._largest_bytes = max(self._largest_bytes or 0, matrices.num_bytes)

    def _join_loading(self, adapter: LoraAdapter, is_real_time: bool, done: "Future[None]") -> None:
        """Load an adapter, unless that is under way; a request waits for it."""
        loading = self._loading.get(adapter.digest)
        if loading is None:
            loading = self._loading[adapter.digest] = _Loading(set())
            self._thread.submit(self._load_in_thread, adapter)
        loading.classes.add(is_real_time)
        loading.done.add_done_callback(partial(_pass_on, done))

    def _evict(self, max_left: int, max_bytes: int, *, for_real_time: bool = False) -> None:
        """Let adapters that nobody holds leave until their number and their bytes are within the limits.

        `for_real_time`: also those that best effort wants, but does not use.
        """
        now = self._clock()
        idle = [
            (own.is_real_time, digest)
            for digest, own in self._loaded.items()
            if not (own.is_used or own.real_time.holds(now) if for_real_time else own.is_held(now))
        ]
        for _, digest in sorted(idle, key=lambda one: one[0]):
            if len(self._loaded) <= max(max_left, 0) and self.num_bytes <= max_bytes:
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
                    self._came(adapter, matrices)
                    for is_real_time in sorted(loading.classes):
                        self._want(adapter.digest, is_real_time, self._clock())
                    self._evict(self._max_adapters, self._max_bytes)
                served = self._serve_waiting()
            loading.done.set_result(None)
            _complete(served)


def _pass_on(done: "Future[None]", _: "Future[None]") -> None:
    done.set_result(None)


def _complete(futures: "list[Future[None]]") -> None:
    """Call back outside of the lock."""
    for future in futures:
        future.set_result(None)
