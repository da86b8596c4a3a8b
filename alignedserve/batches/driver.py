"""Drives every batch that is not over. Only one driver runs in a cluster: the one that holds the state folder's lock.

1. `_poll` finds new and cancelled batches in the repository; each new one becomes a `BatchRun` in a task of its own.
2. `_start_lines` starts lines while there are free slots in the cluster, each of the batch with the least slack.
3. `_write` writes the results of all runs to their logs, together.
4. `_save` stores progress, estimates and totals; `_collect_garbage` removes what has expired.

The driver may be killed at any moment. Its successor gets the lock from the system, finds the batches in the repository
and their results in the logs, and resumes; lines that were in the cluster run again, as they have no record.

Measurements and totals of all batches: throughput, expected ends, lines by outcome.

Removal of files and batches that are no longer needed: expired, deleted, or left behind by an unfinished upload.
"""

import asyncio
import contextlib
import logging
import operator
import os
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from alignedserve.batches.eta import ThroughputEstimate, Throughputs, assumed_rate, estimate_eta
from alignedserve.batches.hours import Turn, by_priority
from alignedserve.batches.interfaces import ClusterTotals, LineRunner, ModelState
from alignedserve.batches.line_scheduling import LineDurations, LineSlots, ModelShares, by_slack, client_turns
from alignedserve.batches.location import BatchStores, DriverStores
from alignedserve.batches.log.disk_log import LineOutcome, LogTotals, ResultRecord
from alignedserve.batches.records import BatchKey, BatchRecord, BatchTotals, FileRecord, ResultKind, Risk, is_client
from alignedserve.batches.repository import BatchRepository
from alignedserve.batches.run import BatchRun, RunContext
from alignedserve.config.sections import BatchesConfig
from alignedserve.core.errors import StorageError, StorageFull, StoreFull, StoreUnavailable
from alignedserve.disk.durable import lock_file

logger = logging.getLogger(__name__)

_MAX_AT_ONCE = 1000
_ABANDONED_S = 3600.0  # an older blob without a record will not get one any more


async def delete_file(stores: BatchStores, record: FileRecord) -> bool:
    """Remove a file and what only it needs. False: it has changed since it was read. The record is removed first: after
    a crash `collect_garbage` finds contents without a record, and there is never a record without its content."""
    if not await stores.repository.remove_file(record):
        return False
    if record.view is None:
        await stores.blobs.remove(record.file_id)
        return True
    snapshot = await stores.repository.batch(record.view.batch_id)
    if snapshot is None or not await _has_results(stores.repository, snapshot.record):
        await stores.logs.remove(record.view.batch_id)
    return True


def is_used_by(file: FileRecord, record: BatchRecord) -> bool:
    """Return True if the batch reads or writes this file while it is active."""
    return file.file_id in (record.input_file_id, record.output_file_id, record.error_file_id)


async def forget_input(stores: DriverStores, record: BatchRecord, now: float) -> None:
    """Remove the input file of a batch that is over and was made by another API than Files: no client knows of it. What
    is left behind expires. Raises StorageError."""
    file = None if is_client(record.owner) else await stores.repository.file(record.owner, record.input_file_id, now)
    if file is not None:
        await delete_file(stores, file)


async def collect_garbage(
    stores: DriverStores, now: float, *, batch_lifetime_s: float, clock_gained_s: float = 0.0
) -> None:
    """Remove expired unused files, old batches without results, and contents without a record. Raises StorageError.

    `clock_gained_s`: by which ages may be too high, as the clock was set; nothing is removed sooner for it."""
    await _remove_expired_files(stores, now - clock_gained_s)
    before_s = now - clock_gained_s - batch_lifetime_s
    for snapshot in await stores.repository.oldest_over(_MAX_AT_ONCE):
        record = snapshot.record
        if record.over_s < before_s and not await _has_results(stores.repository, record):
            await stores.logs.remove(record.batch_id)
            await stores.repository.remove_batch(record)
    age_s = _ABANDONED_S + clock_gained_s
    if num_abandoned := await stores.blobs.remove_abandoned(age_s):
        logger.info("%d unfinished uploads are removed", num_abandoned)
    old = await stores.blobs.committed_before(age_s)
    for first in range(0, len(old), _MAX_AT_ONCE):
        for file_id in await stores.repository.unknown_files(old[first : first + _MAX_AT_ONCE]):
            await stores.blobs.remove(file_id)
            logger.info("%s has no record and is removed", file_id)


async def _remove_expired_files(stores: DriverStores, now: float) -> None:
    expired = [file for file in await stores.repository.expiring_files(_MAX_AT_ONCE) if file.is_expired(now)]
    if not expired:
        return
    active = [snapshot.record for snapshot in await stores.repository.active_batches()]
    for file in expired:
        if any(is_used_by(file, record) for record in active):
            continue
        try:
            await delete_file(stores, file)
            logger.info("%s has expired", file.file_id)
        except StorageError:
            logger.exception("%s cannot be removed", file.file_id)


async def _has_results(repository: BatchRepository, record: BatchRecord) -> bool:
    kinds = list(ResultKind)
    return len(await repository.unknown_files([record.result_file(kind) for kind in kinds])) < len(kinds)


_LEARN_S = 1.0  # between measurements of the rate
_CLUSTER_S = 5.0  # of workers' time, between looks at their totals
_MAX_MODELS = 256  # whose estimates are kept; the longest unused one goes first
_RETRY_S = 0.5
_MAX_LENGTH_SAMPLES = 64  # lines of one write
_MAX_ESTIMATES, _MAX_COMPARED = 64, 16_384  # ends at a time, each of which looks at all other batches; all their looks


class LineLength(NamedTuple):
    """One completed line."""

    num_bytes: int
    input_tokens: int
    output_tokens: int


class ThroughputMeter:
    """The estimate of every model that had lines."""

    def __init__(self, throughputs: Throughputs) -> None:
        self._assumed = throughputs.assumed
        self._by_model: dict[str, ThroughputEstimate] = {
            model: estimate
            if estimate.is_measured
            else msgspec.structs.replace(estimate, tokens_per_s=self._assumed.tokens_per_s)
            for model, estimate in throughputs.by_model.items()  # the configuration may assume something else by now
        }
        self._num_tokens: Counter[str] = Counter()  # since the last measurement
        self._measured_s = time.monotonic()
        self._were_busy: frozenset[str] = frozenset()
        self._totals: dict[str, ClusterTotals] = {}  # at the last comparison

    @property
    def current(self) -> Throughputs:
        return Throughputs(self._assumed, self._by_model)

    def note_tokens(self, model: str, num_tokens: int) -> None:
        self._num_tokens[model] += num_tokens

    def note_line(self, model: str, line: LineLength) -> None:
        self._set(model, self._of(model).with_line(*line))

    def note_states(self, states: Mapping[str, ModelState]) -> None:
        """Assume, for models without a measured rate, the share of their workers' time that other requests leave.
        Totals are compared over some seconds, as workers report about once per second."""
        self._totals = {model: last for model, last in self._totals.items() if model in states}
        for model, state in states.items():
            last = self._totals.get(model)
            if last is None or state.totals.wall_s < last.wall_s:  # a new router
                self._totals[model] = state.totals
            elif state.totals.wall_s - last.wall_s >= _CLUSTER_S:
                self._totals[model] = state.totals
                if not self._of(model).is_measured:
                    rate = assumed_rate(self._assumed.tokens_per_s, *map(operator.sub, state.totals, last))
                    self._set(model, msgspec.structs.replace(self._of(model), tokens_per_s=rate))

    def learn(self, num_in_flight: Mapping[str, float], limits: Mapping[str, int]) -> None:
        """Learn from an interval in which enough lines of a model were in flight; at first from any with lines.

        `num_in_flight`: lines by model. `limits`: of those."""
        now = time.monotonic()
        seconds = now - self._measured_s
        if seconds < _LEARN_S:
            return
        are_busy = frozenset(
            model
            for model, count in num_in_flight.items()
            if count * 2 >= limits[model] or (count > 0 and not self._of(model).is_measured)
        )
        for model in sorted(are_busy & self._were_busy):
            if self._num_tokens[model]:
                self._set(model, self._of(model).with_rate(self._num_tokens[model], seconds))
        self._num_tokens.clear()
        self._measured_s, self._were_busy = now, are_busy

    def _of(self, model: str) -> ThroughputEstimate:
        return self._by_model.get(model, self._assumed)

    def _set(self, model: str, estimate: ThroughputEstimate) -> None:
        by_model = {name: estimate for name, estimate in self._by_model.items() if name != model}
        for oldest in list(by_model)[: max(len(by_model) + 1 - _MAX_MODELS, 0)]:
            del by_model[oldest]
        self._by_model = {**by_model, model: estimate}


class BatchStatistics:
    """Throughput and totals of all batches, stored across restarts. Await `load` before use."""

    def __init__(self, repository: BatchRepository, assumed_tokens_per_s: float) -> None:
        self.totals = BatchTotals()
        self._repository = repository
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._meter = ThroughputMeter(Throughputs(ThroughputEstimate(tokens_per_s=assumed_tokens_per_s)))
        self._saved: tuple[Throughputs, BatchTotals] | None = None

    @property
    def throughputs(self) -> Throughputs:
        return self._meter.current

    async def load(self) -> None:
        while True:
            try:
                self._meter = ThroughputMeter(await self._repository.throughputs(self._assumed_tokens_per_s))
                self.totals = await self._repository.totals()
            except StoreUnavailable:
                await asyncio.sleep(_RETRY_S)
            else:
                return

    def note_ended(self, run: BatchRun, records: Sequence[ResultRecord]) -> None:
        totals = LogTotals()
        for record in records:
            totals.add(record)
        self.totals = self.totals.with_ended(totals.counts(len(records)), totals.usage())
        for position, record in enumerate(records):
            if record.outcome is LineOutcome.COMPLETED:
                model = run.model_of_line(record.line)
                self._meter.note_tokens(model, record.input_tokens + record.output_tokens)
                if position < _MAX_LENGTH_SAMPLES:
                    length = LineLength(run.line_bytes(record.line), record.input_tokens, record.output_tokens)
                    self._meter.note_line(model, length)

    def note_states(self, states: Mapping[str, ModelState]) -> None:
        self._meter.note_states(states)

    def estimate_etas(self, runs: Sequence[BatchRun], slots: LineSlots, now: float) -> None:
        """Set the expected end of every batch; of very many, of those that have the oldest. `slots`: of lines now."""
        self._learn_rates(runs, slots)
        remaining = [run.remaining_work(self.throughputs) for run in runs]
        most = min(_MAX_ESTIMATES, max(1, _MAX_COMPARED // max(len(runs), 1)))
        for index in sorted(range(len(runs)), key=lambda position: _estimated_s(runs[position]))[:most]:
            others = remaining[:index] + remaining[index + 1 :]
            runs[index].set_eta(estimate_eta(remaining[index], others, self.throughputs, now))

    async def save(self, runs: Sequence[BatchRun], now: float, *, is_paused: bool) -> None:
        """Store throughput and totals if they have changed. Raises StoreUnavailable."""
        etas = [run.progress.eta for run in runs]
        waiting_since = [run.record.created_s for run in runs if run.num_waiting]
        self.totals = msgspec.structs.replace(
            self.totals,
            num_waiting=sum(run.num_waiting for run in runs),
            num_in_flight=sum(run.num_in_flight for run in runs),
            num_batches=dict(Counter(run.record.status.value for run in runs)),
            num_at_risk=sum(eta is not None and eta.risk is not Risk.FITS for eta in etas),
            oldest_waiting_s=max(0.0, now - min(waiting_since, default=now)),
            is_paused=is_paused,
        )
        current = (self.throughputs, self.totals)
        if current != self._saved:
            await self._repository.save_statistics(*current)
            self._saved = current

    def _learn_rates(self, runs: Sequence[BatchRun], slots: LineSlots) -> None:
        num_in_flight: dict[str, float] = {}
        for run in runs:
            for model, share in run.model_shares().items():
                num_in_flight[model] = num_in_flight.get(model, 0.0) + share * run.num_in_flight
        self._meter.learn(num_in_flight, {model: slots.limit(model) for model in num_in_flight})


def _estimated_s(run: BatchRun) -> float:
    eta = run.progress.eta
    return 0.0 if eta is None else eta.estimated_s


_POLL_S = 0.25  # between looks at the store for new and cancelled batches
_SAVE_S = 0.5  # between saves of progress
_WRITE_S = 0.02  # between writes: results of this time are written together
_GARBAGE_S = 60.0  # between looks for files that have expired
_FULL_S = 1.0  # between attempts while nothing can be written
_RESTART_S = 2.0  # before a batch whose run failed is resumed
_START_S = 0.1
_ORDER_S = 0.1
_REST, _MAX_REST_S = 20.0, 1.0  # times what an order has taken, until the next: that of a thousand takes long
_LOCK_S = 0.2


def _alike(_: str) -> float:
    return 1.0


class Unwritten(NamedTuple):
    """A batch's results that could not be written."""

    again_s: float  # when to try again
    is_full: bool  # the disk: for all batches


class BatchDriver:
    """Await `run`; it lasts until it is cancelled. Implements RunListener."""

    def __init__(
        self,
        *,
        stores: DriverStores,
        runner: LineRunner,
        config: BatchesConfig,
        models: Container[str],
        max_in_flight: int | None = None,
        weight_of: Callable[[str], float] = _alike,
    ) -> None:
        """`max_in_flight`: lines in the cluster at a time; None: as many as LineSlots says of each model's workers.

        `weight_of`: an owner's, of its share beside other owners."""
        self._weight_of = weight_of
        self._stores = stores
        self._max_in_flight = max_in_flight
        self._context = RunContext(stores, runner, config, models, LineDurations(), listener=self)
        self._runs: dict[BatchKey, BatchRun] = {}
        self._tasks: dict[BatchKey, asyncio.Task[None]] = {}
        self._statistics = BatchStatistics(stores.repository, config.assumed_tokens_per_s)
        self._num_places: dict[str, int] = {}  # of each model's workers, as last told
        self._clock_gain = ClockGain()
        self._has_pending = asyncio.Event()
        self._order: list[tuple[BatchRun, ModelShares]] = []
        self._shares: list[ModelShares] = []  # of the batches in order, each once
        self._ordered_s = self._ordering_s = 0.0  # when, and how long it took
        self._is_order_stale = True  # a batch was added, removed or changed
        self._paused_until_s: dict[str, float] = {}  # by model that rejected a line: start none before
        self._answered_at_rejection: dict[str, int] = {}  # lines that a model had answered when it last rejected one
        self._unwritten: dict[BatchRun, Unwritten] = {}  # whose results cannot be written: start none of their lines

    async def run(self) -> None:
        """Wait for the lock, then drive."""
        while (lock := lock_file(self._stores.lock_path)) is None:  # noqa: ASYNC110  (another process holds it)
            await asyncio.sleep(_LOCK_S)
        try:
            await self._statistics.load()
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._every(_POLL_S, self._poll))
                tasks.create_task(self._every(_START_S, self._start_due_lines))
                tasks.create_task(self._every(_SAVE_S, self._save))
                tasks.create_task(self._every(_GARBAGE_S, self._collect_garbage))
                tasks.create_task(self._write())
        finally:
            for task in self._tasks.values():
                task.cancel()
            for run in self._runs.values():
                run.close()
            os.close(lock)

    # --- batches

    async def _poll(self) -> None:
        known = set(self._runs)  # one of these that ends meanwhile may be told as it was before: it is not begun again
        for snapshot in await self._stores.repository.active_batches():
            batch_id = snapshot.record.batch_id
            if batch_id in self._runs:
                self._runs[batch_id].update(snapshot.record)
            elif batch_id not in known:
                run = self._runs[batch_id] = BatchRun(snapshot, self._context)
                self._is_order_stale = True
                self._tasks[batch_id] = asyncio.create_task(self._run_batch(run), name=batch_id)

    async def _run_batch(self, run: BatchRun) -> None:
        batch_id = run.record.batch_id
        try:
            await run.run()
            logger.info("%s is %s", batch_id, run.record.status.value)
            await run.persist(lambda: forget_input(self._stores, run.record, time.time()))
        except StorageError as error:
            logger.error("%s pauses: %s", batch_id, error)
            await self._pause(run, str(error))
        except Exception:
            logger.exception("%s failed and will be resumed", batch_id)
            await self._pause(run, "a fault of the server; it is in its log")
        finally:
            run.close()
            del self._runs[batch_id], self._tasks[batch_id]
            self._unwritten.pop(run, None)
            self._order = [entry for entry in self._order if entry[0] is not run]
            self._is_order_stale = True

    async def _pause(self, run: BatchRun, reason: str) -> None:
        run.set_paused(reason)
        with contextlib.suppress(StorageError):
            await run.save()
        await asyncio.sleep(_RESTART_S)
        await run.leave()

    async def _save(self) -> None:
        runs = list(self._runs.values())
        states = self._context.runner.model_states()
        self._num_places |= {model: state.num_places for model, state in states.items()}
        # What is not served any more has no workers either: its lines are started all the same, and fail.
        self._num_places = {model: count for model, count in self._num_places.items() if count or model in states}
        self._statistics.note_states(states)
        self._statistics.estimate_etas(runs, self._slots(), time.time())
        saves: list[Callable[[], Awaitable[None]]] = [run.save for run in runs]
        saves.append(partial(self._statistics.save, runs, time.time(), is_paused=bool(self._unwritten)))
        problem: StoreFull | None = None
        for save in saves:
            try:
                await save()
            except StoreFull as error:  # the gateways show what is unsaved
                problem = error
        if problem is not None:
            raise problem

    async def _collect_garbage(self) -> None:
        now, lifetime_s = time.time(), self._context.config.file_lifetime_s
        gained_s = self._clock_gain.look(now, time.monotonic())
        await collect_garbage(self._stores, now, batch_lifetime_s=lifetime_s, clock_gained_s=gained_s)

    async def _every(self, pause_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await act()
            except StorageError as error:
                logger.warning("batches keep running although storage is unavailable: %s", error)
                await asyncio.sleep(_FULL_S)
            await asyncio.sleep(pause_s)

    # --- lines

    def on_progress(self) -> None:
        self._has_pending.set()
        self._is_order_stale |= not self._order  # a batch may have lines from now on
        self._start_lines()

    def on_rejection(self, model: str, retry_after_s: float) -> None:
        """A model that has answered a line since its last rejection has places: only the rejected line waits, as it may
        be too large for any."""
        num_answered = self._context.num_answered[model]
        if num_answered > self._answered_at_rejection.get(model, 0):
            self._answered_at_rejection[model] = num_answered
        else:
            self._paused_until_s[model] = time.monotonic() + retry_after_s

    async def _start_due_lines(self) -> None:
        self._start_lines()

    def _start_lines(self) -> None:
        if self._is_full:
            return
        now, wall_s = time.monotonic(), time.time()
        self._paused_until_s = {model: until_s for model, until_s in self._paused_until_s.items() if until_s > now}
        slots, order = self._slots(), self._ordered(now, wall_s)
        if not any(slots.num_free(shares) > 0 for shares in self._shares):
            return
        paused = self._paused_until_s.keys() | slots.closed
        by_owner: dict[str, deque[tuple[BatchRun, ModelShares]]] = {}
        for run, shares in order:
            if run in self._unwritten:
                continue
            if not shares.keys() <= paused:
                by_owner.setdefault(run.record.owner, deque()).append((run, shares))
        num_in_flight = Counter[str]()
        for run in self._runs.values():
            num_in_flight[run.record.owner] += run.num_in_flight

        def start(owner: str) -> bool:
            runs = by_owner[owner]
            while runs:
                run, shares = runs[0]
                if slots.num_free(shares) > 0 and run.start_line(now, wall_s, paused):
                    slots.take(shares, 1)
                    return True
                runs.popleft()
            return False

        for _ in client_turns(tuple(by_owner), num_in_flight, self._weight_of, start):
            pass

    def _slots(self) -> LineSlots:
        """Return the places for lines, with those of all batches taken; answers that cannot be written take none, and
        neither do lines that wait in a model whose workers are gone."""
        slots = LineSlots(self._num_places, self._max_in_flight)
        for run in self._runs.values():
            if count := run.num_running if run in self._unwritten else run.num_in_flight:
                stuck = run.num_running_of(slots.closed) if slots.closed else 0
                slots.take(run.model_shares(), count - stuck)
        return slots

    def _ordered(self, now: float, wall_s: float) -> list[tuple[BatchRun, ModelShares]]:
        rest_s = max(min(_REST * self._ordering_s, _MAX_REST_S), 0.0 if self._is_order_stale else _ORDER_S)
        if now - self._ordered_s >= rest_s:
            runs = list(self._runs.values())
            ready = (
                run.ready_batch(position, self._statistics.throughputs, wall_s) for position, run in enumerate(runs)
            )
            order = by_slack((batch for batch in ready if batch is not None), wall_s)
            turns = [Turn(position, runs[position].record.owner, runs[position].record.priority) for position in order]
            self._order = [(runs[position], runs[position].model_shares()) for position in by_priority(turns)]
            self._shares = list({frozenset(shares.items()): shares for _, shares in self._order}.values())
            self._ordered_s, self._is_order_stale = now, False
            self._ordering_s = time.monotonic() - now
        return self._order

    def models_of_waiting_lines(self) -> set[str]:
        """Return the models that lines wait for which may be started now."""
        order = self._ordered(time.monotonic(), time.time())
        return {model for run, shares in order if run.num_waiting for model in shares}

    async def _write(self) -> None:
        while True:
            await self._has_pending.wait()
            self._has_pending.clear()
            for run in list(self._runs.values()):
                last = self._unwritten.get(run)
                if run.has_pending and (last is None or last.again_s <= time.monotonic()):
                    await self._write_results(run)
            if self._unwritten:
                self._has_pending.set()
            self._start_lines()
            await asyncio.sleep(_FULL_S if self._is_full else _WRITE_S)

    @property
    def _is_full(self) -> bool:
        return any(unwritten.is_full for unwritten in self._unwritten.values())

    async def _write_results(self, run: BatchRun) -> None:
        """Write a batch's pending results. Where they cannot be written they are pending again, and the batch pauses;
        where the disk is full all do, as it is for all."""
        try:
            records = await run.write_results()
        except StorageError as error:
            if self._runs.get(run.record.batch_id) is not run:
                return  # it has ended, which closed its log: these lines are its next run's
            if run not in self._unwritten:
                logger.error("results of %s cannot be written, it pauses: %s", run.record.batch_id, error)
            self._unwritten[run] = Unwritten(time.monotonic() + _FULL_S, isinstance(error, StorageFull))
            return
        self._unwritten.pop(run, None)
        self._statistics.note_ended(run, records)


class ClockGain:
    """Watches the wall clock beside a monotonic one; the distance between them may be any. Nothing that was removed
    comes back, so removal goes by the time that has passed. A wall clock that was set an hour forward makes an upload
    of a second ago look an hour old."""

    def __init__(self) -> None:
        self._least_ahead_s = float("inf")

    def look(self, wall_s: float, now: float) -> float:
        """Return by how much the age of anything dated since the first look may be too high. The monotonic clock omits
        the time in which this host slept, so that time counts as gained."""
        ahead_s = wall_s - now
        self._least_ahead_s = min(self._least_ahead_s, ahead_s)
        return ahead_s - self._least_ahead_s
