"""Random histories of pools with and without decode workers: ages count when batches are asked for."""

import random
from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.config.sections import BatchingConfig
from alignedserve.core.ids import BatchId
from alignedserve.core.lifecycle import Stage
from alignedserve.messages.pools import FormBatch, PoolRegistered
from alignedserve.messages.workers import JoinedBatch, WorkerLoad
from router.placement import Placement
from router.state import BatchKind, TrackedRequest
from tests.support.samples import GATEWAY, PREFILL, request, worker

STARVATION_S = 2.0


class Fleet:
    """Pools that give their oldest first, some without a decode worker; every worker has a batch done within 1.5 s."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.now, self.num_pooled = rng, 0.0, 0
        batching = BatchingConfig(min_requests=2, starvation_s=STARVATION_S, policy=rng.choice([None, "fcfs"]))
        self.where = Placement(max_candidate_requests=2, batching=batching)
        self.pooled: dict[str, deque[TrackedRequest]] = {f"pool-{number}": deque() for number in range(4)}
        self.running: dict[str, list[TrackedRequest]] = {}
        self.due: list[tuple[float, str]] = []  # when a worker's requests are done
        self.waits: dict[str, list[tuple[float, float]]] = {pool: [] for pool in self.pooled}  # when, how long
        for number, pool in enumerate(self.pooled):
            self.where.register(pool, PoolRegistered(1000))
            for copy in range(rng.randrange(3) if number else 1):
                self.where.register(f"decode-{number}-{copy}", worker(pool_name=pool, max_running_requests=4))

    def arrive(self, pool: str) -> None:
        self.num_pooled += 1
        tracked = TrackedRequest(request(f"r{self.num_pooled}"), GATEWAY, 1.0, pooled_s=self.now)
        tracked.move(Stage.PREFILLING, PREFILL)
        self.where.set_pooled(tracked, pool, self.rng.randrange(1, 12))
        self.pooled[pool].append(tracked)

    def form(self) -> None:
        """Let the router ask, and check that it asks no pool while a much older one could have been asked."""
        asked = self.where.batches_to_form(self.now)
        for pool, form in asked:
            if pool == self.where.workers[form.worker].registered.pool_name:
                self.check_ages(pool)
        for pool, form in asked:
            self.answer(pool, form)

    def check_ages(self, asked: str) -> None:
        for pool, waiting in self.pooled.items():
            awaited = [one for one in self.where.workers.values() if one.asked_pool == pool and one.pending_batch]
            if pool == asked or not waiting or any(one.requested_kind is BatchKind.BATCH for one in awaited):
                continue
            longer_s = self.pooled[asked][0].pooled_s - waiting[0].pooled_s
            assert min(longer_s, self.now - waiting[0].pooled_s) < STARVATION_S

    def answer(self, pool: str, form: FormBatch) -> None:
        record = self.where.workers[form.worker]
        members = [self.pooled[pool].popleft() for _ in range(min(form.max_requests, len(self.pooled[pool])))]
        self.where.close_batch_request(record, is_empty=not members, now=self.now)
        for tracked in members:
            self.waits[pool].append((self.now, self.now - tracked.pooled_s))
            self.where.set_decoding(tracked, record)
        self.running.setdefault(form.worker, []).extend(members)
        self.due.append((self.now + self.rng.uniform(0.05, 1.5), form.worker))

    def finish(self) -> None:
        done, self.due = [one for one in self.due if one[0] <= self.now], [one for one in self.due if one[0] > self.now]
        for _, name in done:
            for tracked in self.running.pop(name, []):
                self.where.unassign(tracked)
            running = JoinedBatch(BatchId(1), 1, 100) if self.rng.random() < 0.5 else None
            self.where.update_load(name, WorkerLoad(num_running=len(self.running.get(name, [])), running=running))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**9))
def test_no_pool_is_asked_while_a_much_older_one_could_be(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(rng)
    rates = {pool: rng.choice([0.02, 0.2, 0.6]) for pool in fleet.pooled}
    for _ in range(200):
        fleet.now += 0.1
        for pool, rate in rates.items():
            while rng.random() < rate:
                fleet.arrive(pool)
        fleet.finish()
        if rng.random() < 0.2:
            fleet.where.clear_refusals()
        fleet.form()


@settings(max_examples=10)
@given(seed=st.integers(0, 10**9))
def test_every_request_gets_a_batch_beside_workers_whose_own_pools_are_never_empty(seed: int) -> None:
    rng = random.Random(seed)
    fleet = Fleet(rng)
    served = [record.registered.pool_name for record in fleet.where.workers.values()]
    for _ in range(300):
        fleet.now += 0.1
        for pool, waiting in fleet.pooled.items():
            while pool in served and len(waiting) < 9:
                fleet.arrive(pool)
            if pool not in served and rng.random() < 0.1:
                fleet.arrive(pool)
        fleet.finish()
        fleet.form()
    longest_near_s = max(wait for pool in served for _, wait in fleet.waits[pool])
    for pool in set(fleet.pooled) - set(served):
        held_s = max([fleet.now - one.pooled_s for one in fleet.pooled[pool]], default=0.0)
        waits = [wait for _, wait in fleet.waits[pool]]
        assert max([held_s, *waits]) < STARVATION_S + longest_near_s + 1.6 * len(fleet.pooled)
