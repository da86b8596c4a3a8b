"""Decides from which pools the router orders batches, and for which decode workers.

A decode worker gets batches of its own node's pool, which shares its memory. When that has nothing for it, it takes
from another node's pool what no worker there can take now: over the link that has lately been the fastest. A pool that
has waited too long goes before the worker's own (overdue_pools.py).

While several tenants share the cluster, lengths do not matter: a worker is given what had its turn first in the
router's queue, whose order is fair, a few requests ahead of need.

Nothing is decided twice from the same facts: a pool is looked at when something has changed there (`note_change`), and
when the time is up that one of its workers or large requests had to wait.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing

import msgspec

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import BatchId, WorkerName
from alignedserve.costmodel.hardware import LearnedLinks
from alignedserve.messages.pools import FormBatch
from alignedserve.messages.workers import JoinedBatch, WorkerLoad
from router.batching.far_batches import FarBatch, choose_far_batches, is_spare, num_left
from router.batching.overdue_pools import Nodes, OverduePools, is_batch_awaited
from router.pool_records import PoolRecord
from router.ranking import Ranking
from router.state import BatchKind, WorkerRecord

_AHEAD_BY_TURN = 1 / 8  # of a worker's places: requests that it has ahead of need while tenants share


class BatchRequests:
    """The FormBatch messages to pools. Reads the records of pools and nodes, which belong to the placement."""

    def __init__(
        self,
        *,
        pools: Mapping[str, PoolRecord],
        nodes: Nodes,
        links: LearnedLinks,
        max_candidate_requests: int,
        batching: BatchingConfig,
    ) -> None:
        self._pools = pools
        self._nodes = nodes
        self._max_candidate_requests = max_candidate_requests
        self._batching = batching
        self._links = links
        self._next_batch = 1
        self._by_turn = False  # now
        self._changed: dict[str, None] = {}  # pools to look at
        self._spare: dict[str, WorkerRecord] = {}  # decode workers for which their own pool has nothing
        self._spare_order: Ranking[int] = Ranking()  # those by the number of their requests
        self._surplus: dict[str, None] = {}  # pools with requests that no worker of their node can take now
        self._asked_far: dict[str, dict[str, WorkerRecord]] = {}  # workers of other nodes, by the pool that was asked
        self._waiting: Ranking[float] = Ranking()  # pools by the begin of the wait that is over next
        self._requested: Counter[str] = Counter()  # requests that FormBatch without an answer ask for, by pool
        self._overdue = OverduePools(
            pools=pools,
            nodes=nodes,
            is_served=self._is_served,
            max_candidate_requests=max_candidate_requests,
            batching=batching,
        )

    def note_change(self, pool: str) -> None:
        """Look at this pool, registered or not, at the next call of `to_send`."""
        self._changed[pool] = None

    def to_send(self, now: float, is_shared: Callable[[float], bool]) -> list[tuple[str, FormBatch]]:
        """Return the FormBatch messages to send, with their pools, the decode worker with the fewest requests first.

        `is_shared`: whether several tenants share the cluster now.
        A pool gets no FormBatch while those without an answer may take all that is pooled: most would come back empty.
        """
        self._note_waited(now)
        if not self._changed:
            return []
        self._by_turn = is_shared(now)
        changed, self._changed = self._changed, {}
        asked = self._overdue_forms(changed, now)
        for worker in self._to_ask(changed):
            pool = self._pools[worker.registered.pool_name]
            form = self._next_form(worker, pool, now) if pool.num_pooled > self._requested[pool.name] else None
            if form is not None:
                asked.append((pool.name, form))
        for name in changed:
            self._wait(name, now)
            self._note_spare(name)
            self._overdue.note(name, now)
        return asked + self._far_forms()

    def _to_ask(self, pools: Iterable[str]) -> list[WorkerRecord]:
        workers = [
            worker
            for name in pools
            if (pool := self._pools.get(name)) is not None and pool.num_pooled > self._requested[name]
            for worker in self._nodes.get(name, {}).values()
            if not (worker.registered.can_prefill or worker.is_draining or worker.awaits_batch)
        ]
        if len(workers) > 1:
            workers.sort(key=lambda worker: (len(worker.decoding), worker.name))
        return workers

    def close(self, worker: WorkerRecord, *, is_empty: bool, now: float) -> None:
        self.cancel(worker)
        if is_empty and worker.asked_pool != worker.registered.pool_name:
            worker.refusing_pools.add(worker.asked_pool)
            return
        if is_empty:
            worker.refused_kinds.add(worker.requested_kind)
            return
        worker.is_load_stale = True
        if worker.requested_kind is not BatchKind.JOIN:
            worker.last_batch_s = now

    def cancel(self, worker: WorkerRecord) -> None:
        if worker.pending_batch is not None:
            self._requested[worker.asked_pool] -= worker.num_requested
        worker.pending_batch = None
        self._asked_far.get(worker.asked_pool, {}).pop(worker.name, None)
        self.note_change(worker.registered.pool_name)
        self.note_change(worker.asked_pool)

    def pool_lost(self, pool: str) -> None:
        near = self._nodes.get(pool, {}).values()
        for worker in (*near, *self._asked_far.get(pool, {}).values()):
            if worker.asked_pool == pool:
                self.cancel(worker)
        self._asked_far.pop(pool, None)
        self._surplus.pop(pool, None)
        self._requested.pop(pool, None)

    def worker_lost(self, worker: WorkerRecord) -> None:
        self.cancel(worker)
        self._forget_spare(worker)
        self._overdue.forget(worker)

    def least_share(self, pool: str) -> int:
        """Return the fewest blocks that a batch for a busy decode worker of this pool may have."""
        known = [worker for worker in self._nodes.get(pool, {}).values() if worker.registered.can_decode]
        return min((self._share(worker) for worker in known), default=0)

    # --- when to look again

    def _note_waited(self, now: float) -> None:
        while (first := self._waiting.first()) is not None and now - first.rank >= self._batching.starvation_s:
            self._waiting.discard(first.name)
            self._changed[first.name] = None

    def _wait(self, name: str, now: float) -> None:
        """Look at the pool again when its oldest or next large request or worker will have waited for `starvation_s`.

        And when a chat's next token is late, where classes are known. Large requests concern the workers of its node.
        """
        pool = self._pools.get(name)
        if pool is None or not pool.num_pooled:
            self._waiting.discard(name)
            return
        near = self._nodes.get(name, {}).values()
        begins = [pool.oldest_s, *(worker.last_batch_s for worker in near)]
        begins += [pooled_s for _, pooled_s in pool.large_requests.values()] if near else []
        if self._batching.best_effort_floor is not None and math.isfinite(pool.late_at_s):
            begins.append(self._late_from(pool))
        begin = min((begin for begin in begins if now - begin < self._batching.starvation_s), default=None)
        if begin is None:
            self._waiting.discard(name)
        else:
            self._waiting.put(name, begin)

    # --- what to ask for

    def _may_be_asked(self, pool: str) -> Iterable[WorkerRecord]:
        return (*self._nodes.get(pool, {}).values(), *self._asked_far.get(pool, {}).values())

    def _next_form(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        if self._by_turn:
            form = self._request_by_turn(worker, pool)
        elif self._batching.pack_share is not None and worker.takes_any_length:
            form = self._request_joining(worker, pool, now) or self._request_batch(worker, pool, now)
        else:
            form = (
                self._request_real_time(worker, pool, now)
                or self._request_batch(worker, pool, now)
                or self._request_joining(worker, pool, now)
            )
        if form is not None:
            self._note_asked(worker, pool, form)
        return form

    def _note_asked(self, worker: WorkerRecord, pool: PoolRecord, form: FormBatch) -> None:
        worker.pending_batch, worker.num_requested, worker.asked_pool = form.batch_id, form.max_requests, pool.name
        worker.requested_kind = BatchKind.BATCH if form.joins is None else BatchKind.JOIN
        if form.is_for_real_time:
            worker.requested_kind = BatchKind.REAL_TIME
        self._requested[pool.name] += form.max_requests

    def _request_by_turn(self, worker: WorkerRecord, pool: PoolRecord) -> FormBatch | None:
        waiting, sizes = pool.pooled_real_time, [size for size, _ in pool.large_requests.values()]
        is_for_real_time = bool(waiting) and self._batching.best_effort_floor is not None
        if is_for_real_time and BatchKind.REAL_TIME not in worker.refused_kinds:
            num_held, sizes = len(worker.decoding_real_time), list(waiting.values())
        elif BatchKind.BATCH not in worker.refused_kinds:
            num_held, is_for_real_time = len(worker.decoding), False
        else:
            return None
        num_places = worker.registered.max_running_requests
        num_ahead = min(max(int(_AHEAD_BY_TURN * num_places), 1), self._max_candidate_requests)
        form = self._form(
            worker, pool, num_places + num_ahead - num_held, 1, least_blocks=_largest_that_fits(worker, sizes)
        )
        return form and msgspec.structs.replace(form, is_for_real_time=is_for_real_time, by_turn=True)

    def _request_real_time(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        """Request a batch of the real-time requests that wait, where classes are known.

        Best-effort ones that the worker runs, or has for its next batch, take no place and no blocks from these: there
        they go after them. One whose next token is late does not wait for others that make a batch worth a switch.
        """
        load, batching, waiting = worker.load or WorkerLoad(), self._batching, pool.pooled_real_time
        if batching.best_effort_floor is None or not waiting or BatchKind.REAL_TIME in worker.refused_kinds:
            return None
        if load.num_real_time_candidates:
            return None
        max_requests, num_held = worker.registered.max_running_requests, len(worker.decoding_real_time)
        min_requests = batching.enough_requests(max_requests)
        is_saturated = num_held >= min_requests
        has_waited = now - min(worker.last_batch_s, self._late_from(pool)) >= batching.starvation_s
        if is_saturated and len(waiting) < min_requests and not has_waited:
            return None
        if not (is_saturated and batching.is_aligned):
            max_requests += self._max_candidate_requests - num_held
        max_requests = min(max_requests, self._fair_share(len(waiting), pool))
        num_blocks = worker.registered.num_blocks
        largest = _largest_that_fits(worker, waiting.values())
        max_blocks = max(self._share(worker), largest) if num_held else num_blocks
        if max_requests < 1 or max_blocks < 1:
            return None
        min_requests = min(min_requests, max_requests)
        name = WorkerName(worker.name)
        return FormBatch(self._batch_id(), name, max_blocks, max_requests, min_requests, is_for_real_time=True)

    def _late_from(self, pool: PoolRecord) -> float:
        return pool.late_at_s - self._batching.starvation_s

    def _fair_share(self, num_waiting: int, pool: PoolRecord) -> int:
        peers = self._nodes[pool.name].values()
        num_peers = sum(other.registered.can_decode and not other.is_draining for other in peers)
        return -(-num_waiting // num_peers)

    def _request_batch(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        load, batching = worker.load or WorkerLoad(), self._batching
        if BatchKind.BATCH in worker.refused_kinds or load.num_batch_candidates:
            return None
        min_requests = batching.enough_requests(worker.registered.max_running_requests)
        is_saturated = load.num_running >= min_requests
        is_worth_it = pool.num_pooled >= min_requests
        if is_saturated and not is_worth_it and now - worker.last_batch_s < batching.starvation_s:
            return None
        max_requests = worker.registered.max_running_requests
        if not (is_saturated and batching.is_aligned):
            max_requests += self._max_candidate_requests - len(worker.decoding)
        overdue = (size for size, pooled_s in pool.large_requests.values() if now - pooled_s >= batching.starvation_s)
        return self._form(worker, pool, max_requests, min_requests, least_blocks=_largest_that_fits(worker, overdue))

    def _request_joining(self, worker: WorkerRecord, pool: PoolRecord, now: float) -> FormBatch | None:
        load = worker.load
        if load is None or load.running is None or BatchKind.JOIN in worker.refused_kinds:
            return None
        if load.num_batch_candidates and now - worker.last_batch_s >= self._batching.starvation_s:
            return None
        num_places = worker.registered.max_running_requests - load.num_running
        max_requests = num_places + self._max_candidate_requests - load.num_candidate_requests
        return self._form(worker, pool, max_requests, 1, joins=load.running)

    def _form(
        self,
        worker: WorkerRecord,
        pool: PoolRecord,
        max_requests: int,
        min_requests: int,
        *,
        joins: JoinedBatch | None = None,
        least_blocks: int = 0,
    ) -> FormBatch | None:
        max_requests = min(max_requests, self._fair_share(pool.num_pooled, pool))
        max_blocks = worker.registered.num_blocks
        if worker.decoding:
            candidate_blocks = worker.load.num_candidate_blocks if worker.load is not None else 0
            max_blocks = max(self._share(worker) - candidate_blocks, least_blocks)
        if max_requests < 1 or max_blocks < 1:
            return None
        name = WorkerName(worker.name)
        return FormBatch(self._batch_id(), name, max_blocks, max_requests, min(min_requests, max_requests), joins)

    def _batch_id(self) -> BatchId:
        batch_id, self._next_batch = BatchId(self._next_batch), self._next_batch + 1
        return batch_id

    def _share(self, worker: WorkerRecord) -> int:
        return int(self._batching.max_block_share * worker.registered.num_blocks)

    # --- of other nodes' pools

    def _note_spare(self, pool_name: str) -> None:
        pool, near = self._pools.get(pool_name), self._nodes.get(pool_name, {})
        for worker in near.values():
            if is_spare(worker, pool):
                self._spare[worker.name] = worker
                self._spare_order.put(worker.name, len(worker.decoding))
            else:
                self._forget_spare(worker)
        if pool is not None and num_left(pool, near.values(), self._requested[pool_name]):
            self._surplus[pool_name] = None
        else:
            self._surplus.pop(pool_name, None)

    def _forget_spare(self, worker: WorkerRecord) -> None:
        self._spare.pop(worker.name, None)
        self._spare_order.discard(worker.name)

    def _far_forms(self) -> list[tuple[str, FormBatch]]:
        if not self._spare or not self._surplus:
            return []
        left = {name: self._pools[name].num_pooled - self._requested[name] for name in self._surplus}
        left = {name: count for name, count in left.items() if count > 0}
        if not left:
            return []
        with closing(self._spare_order.in_order()) as names:
            spare = (self._spare[name] for name in names)
            chosen = choose_far_batches(spare, len(self._spare), left, self._pools, self._links, self._batching)
        for worker, pool, _ in chosen:
            self.note_change(worker.registered.pool_name)
            self.note_change(pool.name)
        return [self._far_form(batch) for batch in chosen]

    def _far_form(self, batch: FarBatch) -> tuple[str, FormBatch]:
        worker, pool, limits = batch
        form = FormBatch(self._batch_id(), WorkerName(worker.name), **limits._asdict(), by_turn=self._by_turn)
        self._note_asked(worker, pool, form)
        self._asked_far.setdefault(pool.name, {})[worker.name] = worker
        return pool.name, form

    def _overdue_forms(self, changed: dict[str, None], now: float) -> list[tuple[str, FormBatch]]:
        for name in changed:
            self._overdue.note(name, now)
        chosen = self._overdue.choose(changed, now)
        for worker, pool, _ in chosen:
            changed[worker.registered.pool_name] = changed[pool.name] = None
        return [self._far_form(batch) for batch in chosen]

    def _is_served(self, pool: PoolRecord) -> bool:
        may_be_asked = self._may_be_asked(pool.name)
        return is_batch_awaited(pool.name, may_be_asked) or self._requested[pool.name] >= pool.num_pooled


def _largest_that_fits(worker: WorkerRecord, sizes: Iterable[int]) -> int:
    return max((size for size in sizes if size <= worker.registered.num_blocks), default=0)
