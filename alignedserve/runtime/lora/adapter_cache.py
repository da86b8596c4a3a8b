"""The adapters in the memory of a worker: loaded in a thread when a request needs one, the least recently used leave.

1. A request for an adapter that is not there waits, with others for the same; the loop and the iterations go on.
2. An adapter is held by the class (real-time or best effort) of the sequences that use it, and of the requests that it
   was made ready for, until they enter the engine, end, or `_WANTED_S` have passed. Best effort holds three quarters of
   the places and bytes at most (of one place, all), real-time requests all, but for one place where best effort waits
   that holds none.
3. Where adapters or bytes would be too many, those leave that nobody holds: those that best effort used last before
   the others, the least recently used first. If all are held, the request waits until one is not; a real-time request
   takes the place of one that best effort holds but does not use yet, unless that is all it holds. Those that
   real-time requests wait for are loaded first.
4. Behind a request that has waited for longer than PATIENCE_S, requests of its class for loaded adapters wait too, and
   sequences with these adapters come to an end; the adapter that comes then serves all requests for it. Best effort
   waits behind every real-time request that waits, unless it holds no adapter at all. Once best effort has waited for
   `_LAST_PATIENCE_S` without an adapter, real-time requests for their least recently used adapter wait, and the adapter
   leaves, even as the only one.
5. A request that comes from another worker waits until its adapter is loaded, whatever the bounds.
6. A sequence in the engine uses its adapter until the sequence leaves. One whose adapter has left meanwhile (it was
   preempted, or waited for long) has it loaded on the spot, whatever the bounds.
7. Sequences that have ended leave the engine with the next iteration. Where none follows and all adapters are used, the
   first request that waits has its own, whatever the bounds: its iteration lets the others leave.

The adapters of the sequences of one engine, from the messages that announce them to their last iteration."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import torch

from alignedserve.config.sections import LoraConfig
from alignedserve.core.errors import AdapterError
from alignedserve.core.ids import RequestId
from alignedserve.core.request import LoraAdapter, Request
from alignedserve.messages.gateways import AbortRequest
from alignedserve.messages.wire import Message
from alignedserve.messages.workers import PrefillRequest, requests_of
from alignedserve.process.turn_threads import TurnThreads
from alignedserve.runtime.lora.adapter_weights import load_adapter
from alignedserve.runtime.lora.loaded_adapters import read_adapter
from alignedserve.runtime.model.decoder.model_config import ModelConfig
from alignedserve.runtime.model.sharding.layer_stages import LayerStage
from alignedserve.runtime.model.sharding.tensor_shard import TensorShard
from kernels.lora import AdapterMatrices


@dataclass(frozen=True, slots=True, eq=False)
class AdapterWait:
    """A request that waits for its adapter to be loaded, or to be free."""

    request_id: RequestId
    adapter: LoraAdapter
    is_real_time: bool
    attempt: int | None  # None: it has begun elsewhere, and is not withdrawn
    since_s: float
    done: "Future[None]" = field(default_factory=Future)

    def is_of(self, request_id: RequestId, attempt: int | None) -> bool:
        is_until = attempt is None or (self.attempt is not None and self.attempt <= attempt)
        return self.request_id == request_id and self.attempt is not None and is_until


@dataclass(slots=True)
class AdapterHold:
    """How requests of one class hold an adapter."""

    num_users: int = 0  # sequences in the engine
    wishes: dict[RequestId, tuple[AdapterWait, float]] = field(default_factory=dict)  # before they enter it; until when

    def is_wanted(self, now: float) -> bool:
        for request_id in [request_id for request_id, (_, until_s) in self.wishes.items() if until_s <= now]:
            del self.wishes[request_id]
        return bool(self.wishes)

    def holds(self, now: float) -> bool:
        return self.is_wanted(now) or self.num_users > 0


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter in memory."""

    matrices: AdapterMatrices
    best_effort: AdapterHold = field(default_factory=AdapterHold)
    real_time: AdapterHold = field(default_factory=AdapterHold)
    is_real_time: bool = False  # the latest that held it

    @property
    def is_used(self) -> bool:
        return self.best_effort.num_users > 0 or self.real_time.num_users > 0

    def use(self, *, is_real_time: bool) -> AdapterHold:
        return self.real_time if is_real_time else self.best_effort

    def withdraw(self, request_id: RequestId, attempt: int | None) -> None:
        for use in (self.best_effort, self.real_time):
            if request_id in use.wishes and use.wishes[request_id][0].is_of(request_id, attempt):
                del use.wishes[request_id]

    def is_held(self, now: float) -> bool:
        return self.best_effort.holds(now) or self.real_time.holds(now)


@dataclass(frozen=True, slots=True)
class LoadingAdapter:
    """An adapter on its way into memory."""

    work: "Future[None]"
    wishes: list[AdapterWait] = field(default_factory=list)
    done: "Future[None]" = field(default_factory=Future)

    def is_for(self, *, is_real_time: bool) -> bool:
        return any(wish.is_real_time is is_real_time for wish in self.wishes)


PATIENCE_S = 1.0
_WANTED_S = 30.0
_LAST_PATIENCE_S = 20.0
_MOST_OF_BEST_EFFORT = 0.75  # of the places and of the bytes


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
        self._load = load
        self._max_adapters = max_adapters
        self._max_bytes = max_bytes
        self._clock = clock
        self._loaded: OrderedDict[bytes, LoadedAdapter] = OrderedDict()  # the most recently used last
        self._loading: dict[bytes, LoadingAdapter] = {}
        self._largest_bytes: int | None = None  # of one; None: none has been loaded yet
        self._waiting: dict[bool, deque[AdapterWait]] = {True: deque(), False: deque()}  # real-time ones first
        self._lock = threading.Lock()
        self._thread = TurnThreads(1, "adapters")
        self._timer: threading.Timer | None = None
        self._is_closed = False
        self._rests = False

    @property
    def num_bytes(self) -> int:
        return sum(loaded.matrices.num_bytes for loaded in self._loaded.values())

    def prepare(
        self, adapter: LoraAdapter, request_id: RequestId, *, is_real_time: bool, attempt: int = 0
    ) -> "Future[None] | None":
        """Begin to load an adapter; return what its request waits for, if anything. It never fails: `acquire` does.
        What it waits for is cancelled by `withdraw`."""
        with self._lock:
            wish = AdapterWait(request_id, adapter, is_real_time, attempt, self._clock())
            if not self._must_queue(wish.since_s, is_real_time=is_real_time) and self._is_ready(wish, wish.since_s):
                self._want(wish)
                return None
            self._waiting[is_real_time].append(wish)
            served = self._serve_waiting()
        _complete(served)
        return wish.done

    def prepare_at_once(
        self, adapter: LoraAdapter, request_id: RequestId, *, is_real_time: bool
    ) -> "Future[None] | None":
        """Begin to load an adapter as `prepare` does, but whatever the bounds: its request has begun elsewhere."""
        with self._lock:
            wish = AdapterWait(request_id, adapter, is_real_time, None, self._clock())
            if adapter.digest in self._loaded:
                self._want(wish)
                return None
            self._join_loading(wish)
        return wish.done

    def withdraw(self, request_id: RequestId, attempt: int | None) -> None:
        with self._lock:
            ended: list[AdapterWait] = []
            for wishes in (*self._waiting.values(), *(loading.wishes for loading in self._loading.values())):
                withdrawn = [wish for wish in wishes if wish.is_of(request_id, attempt)]
                for wish in withdrawn:
                    wishes.remove(wish)
                ended += withdrawn
            for loaded in self._loaded.values():
                loaded.withdraw(request_id, attempt)
            self._evict(self._max_adapters, self._max_bytes)
            served = self._serve_waiting()
        for wish in ended:
            wish.done.cancel()
        _complete(served)

    def acquire(self, adapter: LoraAdapter, request_id: RequestId, *, is_real_time: bool) -> AdapterMatrices:
        """Return the matrices, which stay in memory until `release`. Raises AdapterError."""
        with self._lock:
            loading = self._loading.get(adapter.digest)
            if loading is not None:
                self._thread.hasten(loading.work)
        if loading is not None:
            loading.done.result()
        with self._lock:
            if adapter.digest in self._loaded:
                return self._used(adapter, request_id, is_real_time)
        matrices = self._load(adapter)
        with self._lock:
            self._came(adapter, matrices)
            used = self._used(adapter, request_id, is_real_time)
            self._evict(self._max_adapters, self._max_bytes)
        return used

    def release(self, adapter: LoraAdapter, *, is_real_time: bool) -> None:
        with self._lock:
            use = self._loaded[adapter.digest].use(is_real_time=is_real_time)
            use.num_users -= 1
            assert use.num_users >= 0, "an adapter released more often than acquired"
            self._evict(self._max_adapters, self._max_bytes)
            served = self._serve_waiting()
        _complete(served)

    def rest(self, *, has_ended: bool) -> None:
        """Note that no iteration is to be computed (`has_ended`), or that one is again."""
        if has_ended == self._rests:
            return
        with self._lock:
            self._rests = has_ended
            served = self._serve_waiting()
        _complete(served)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._timer is not None:
                self._timer.cancel()
        self._thread.close()

    # --- under the lock

    def _must_queue(self, now: float, *, is_real_time: bool) -> bool:
        queue, before = self._waiting[is_real_time], self._waiting[True]
        if not is_real_time and before and self._holding(now, is_real_time=False):
            return True
        return bool(queue) and now - queue[0].since_s > PATIENCE_S and not self._has_to_end(queue[0], now)

    def _has_to_end(self, wish: AdapterWait, now: float) -> bool:
        if not wish.is_real_time or not self._lacks_one_too_long(now):
            return False
        held = (digest for digest, loaded in self._loaded.items() if loaded.real_time.holds(now))
        return next(held, None) == wish.adapter.digest

    def _lacks_one_too_long(self, now: float) -> bool:
        waiting = self._waiting[False]
        is_overdue = bool(waiting) and now - waiting[0].since_s > _LAST_PATIENCE_S
        return is_overdue and not self._holding(now, is_real_time=False)

    def _is_ready(self, wish: AdapterWait, now: float) -> bool:
        loaded = self._loaded.get(wish.adapter.digest)
        if loaded is None or self._has_to_end(wish, now):
            return False
        is_held = loaded.use(is_real_time=wish.is_real_time).holds(now)
        return is_held or self._may_hold_more(now, is_real_time=wish.is_real_time)

    def _want(self, wish: AdapterWait) -> None:
        loaded = self._loaded[wish.adapter.digest]
        loaded.use(is_real_time=wish.is_real_time).wishes[wish.request_id] = wish, self._clock() + _WANTED_S
        loaded.is_real_time = wish.is_real_time
        self._loaded.move_to_end(wish.adapter.digest)

    def _used(self, adapter: LoraAdapter, request_id: RequestId, is_real_time: bool) -> AdapterMatrices:
        loaded = self._loaded[adapter.digest]
        use = loaded.use(is_real_time=is_real_time)
        use.num_users += 1
        use.wishes.pop(request_id, None)
        loaded.is_real_time = is_real_time
        self._loaded.move_to_end(adapter.digest)
        return loaded.matrices

    def _holding(self, now: float, *, is_real_time: bool) -> list[LoadedAdapter]:
        return [loaded for loaded in self._loaded.values() if loaded.use(is_real_time=is_real_time).holds(now)]

    def _may_hold_more(self, now: float, *, is_real_time: bool) -> bool:
        held = self._holding(now, is_real_time=is_real_time)
        num_loading = sum(loading.is_for(is_real_time=is_real_time) for loading in self._loading.values())
        count = len(held) + num_loading
        if is_real_time:
            keeps_one = bool(self._waiting[False]) and not self._holding(now, is_real_time=False)
            return count < max(self._max_adapters - keeps_one, not self._lacks_one_too_long(now))
        num_bytes = sum(adapter.matrices.num_bytes for adapter in held) + num_loading * (self._largest_bytes or 0)
        has_bytes = num_bytes < _MOST_OF_BEST_EFFORT * self._max_bytes or not count
        return has_bytes and count < max(int(_MOST_OF_BEST_EFFORT * self._max_adapters), 1)

    def _serve_waiting(self) -> list[AdapterWait]:
        served: list[AdapterWait] = []
        now = self._clock()
        if self._is_closed:
            return served
        for is_real_time, waiting in self._waiting.items():
            while waiting:
                if not is_real_time and self._waiting[True] and self._holding(now, is_real_time=False):
                    break
                first = waiting[0]
                uses = (use for loaded in self._loaded.values() for use in (loaded.best_effort, loaded.real_time))
                is_first = self._rests and not self._loading and not any(use.is_wanted(now) for use in uses)
                is_ready = self._is_ready(first, now) or (is_first and first.adapter.digest in self._loaded)
                if not (is_ready or is_first or self._may_load(first, now)):
                    break
                same = [wish for wish in waiting if wish.adapter.digest == first.adapter.digest]
                others = [wish for wish in waiting if wish.adapter.digest != first.adapter.digest]
                waiting.clear()
                waiting.extend(others)
                for wish in same:
                    if is_ready:
                        self._want(wish)
                    else:
                        self._join_loading(wish)
                served += same if is_ready else ()
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

    def _may_load(self, wish: AdapterWait, now: float) -> bool:
        loading = self._loading.get(wish.adapter.digest)
        if loading is not None and loading.is_for(is_real_time=wish.is_real_time):
            return True
        if wish.adapter.digest in self._loaded or not self._may_hold_more(now, is_real_time=wish.is_real_time):
            return False
        return loading is not None or self._has_room(wish.is_real_time, now)

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
        self._loaded.setdefault(adapter.digest, LoadedAdapter(matrices))
        self._largest_bytes = max(self._largest_bytes or 0, matrices.num_bytes)

    def _join_loading(self, wish: AdapterWait) -> None:
        loading = self._loading.get(wish.adapter.digest)
        if loading is None:
            work = self._thread.submit(partial(self._load_in_thread, wish.adapter), is_real_time=wish.is_real_time)
            loading = self._loading[wish.adapter.digest] = LoadingAdapter(work)
        elif wish.is_real_time:
            self._thread.hasten(loading.work)
        loading.wishes.append(wish)

    def _evict(self, max_left: int, max_bytes: int, *, for_real_time: bool = False) -> None:
        """Let adapters that nobody holds leave until their number and their bytes are within the limits.

        `for_real_time`: also those that best effort wants, but does not use."""
        now = self._clock()
        idle = [
            (loaded.is_real_time, digest)
            for digest, loaded in self._loaded.items()
            if not (loaded.is_used or loaded.real_time.holds(now) if for_real_time else loaded.is_held(now))
        ]
        for _, digest in sorted(idle, key=lambda entry: entry[0]):
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
                    for wish in sorted(loading.wishes, key=lambda wait: wait.is_real_time):
                        self._want(wish)
                    self._evict(self._max_adapters, self._max_bytes)
                served = self._serve_waiting()
            loading.done.set_result(None)
            _complete([*loading.wishes, *served])


def _complete(wishes: list[AdapterWait]) -> None:
    for wish in wishes:
        wish.done.set_result(None)


class SequenceAdapters:
    """Loads, lends and takes back adapters."""

    def __init__(
        self,
        lora: LoraConfig,
        model: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        shard: TensorShard | LayerStage | None = None,
    ) -> None:
        """`model`: the whole one; `shard`: the rank or stage whose products adapters add to; None: there is one."""
        load = partial(_load, lora=lora, model=model, dtype=dtype, device=device, shard=shard)
        self.cache = AdapterCache(load, max_adapters=lora.max_adapters, max_bytes=lora.memory_bytes)
        self._used: dict[RequestId, tuple[LoraAdapter, bool]] = {}  # and whether it is for a real-time request
        self._failures: dict[RequestId, str] = {}

    def prepare(self, message: Message) -> "Sequence[Future[None]]":
        """Begin to load the adapters of the requests that a message brings; return what they wait for. A new request
        waits for room among the adapters as well; a request from another worker only for its adapter. An AbortRequest
        cancels what a new request waits for."""
        if isinstance(message, AbortRequest):
            self.cache.withdraw(message.request_id, message.attempt)
            return ()
        prepare = self.cache.prepare_at_once
        if isinstance(message, PrefillRequest):
            prepare = partial(self.cache.prepare, attempt=message.attempt)
        prepared = [
            prepare(request.adapter, request.request_id, is_real_time=request.is_real_time)
            for request in requests_of(message)
            if request.adapter is not None
        ]
        return [future for future in prepared if future is not None]

    def add(self, request: Request) -> AdapterMatrices | None:
        """Return the adapter of a sequence that is added; None: it has none, or fails."""
        if request.adapter is None:
            return None
        try:
            return self.acquire(request.request_id, request.adapter, is_real_time=request.is_real_time)
        except AdapterError as error:
            self._failures[request.request_id] = f"its adapter cannot be loaded: {error}"
            return None

    def acquire(self, request_id: RequestId, adapter: LoraAdapter, *, is_real_time: bool = True) -> AdapterMatrices:
        """Return the adapter of a sequence that is added. Raises AdapterError. Ranks and stages that follow the first
        are not told the class: what waits, and for what, is decided there."""
        matrices = self.cache.acquire(adapter, request_id, is_real_time=is_real_time)
        self._used[request_id] = adapter, is_real_time
        return matrices

    def remove(self, request_id: RequestId) -> None:
        self._failures.pop(request_id, None)
        used = self._used.pop(request_id, None)
        if used is not None:
            adapter, is_real_time = used
            self.cache.release(adapter, is_real_time=is_real_time)

    def rest(self, *, has_ended: bool) -> None:
        """Note that no iteration is to be computed (`has_ended`), or that one is again."""
        self.cache.rest(has_ended=has_ended)

    def close(self) -> None:
        """End the thread that loads."""
        self.cache.close()

    def failures(self, request_ids: Iterable[RequestId]) -> dict[RequestId, str]:
        if not self._failures:
            return {}
        return {request_id: self._failures[request_id] for request_id in request_ids if request_id in self._failures}


def _load(
    adapter: LoraAdapter,
    *,
    lora: LoraConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    shard: TensorShard | LayerStage | None,
) -> AdapterMatrices:
    return load_adapter(read_adapter(adapter, lora), model, dtype, device, max_rank=lora.max_rank, shard=shard)
